// MinMaxUInt8 (S4): all chunks in one launch, without atomics, initialisation or synchronisation with the host.
//
// A chunk that fits into shared memory is read once (compress_on_chip). Larger ones are split into parts, one block for each:
// find_ends writes the minimum and maximum of each part to the workspace; quantise, with smaller parts, merges those of its chunk
// and writes the levels. That is 9 bytes of memory traffic per float32 element; decompress needs 5.
#include "codec.cuh"

// Minimum and maximum of the values seen, and whether there was a NaN, which fminf and fmaxf ignore.
struct Range {
    float low, high;
    bool nan;

    INLINE void see(float x) { merge(x, x); }
    INLINE void merge(float other_low, float other_high) {
        low = fminf(low, other_low);
        high = fmaxf(high, other_high);
        nan |= other_low != other_low;
    }
};

INLINE Range nothing() { return {__uint_as_float(0x7F800000u), __uint_as_float(0xFF800000u), false}; }

// Merge the ranges of all threads of the block; all get the result. It is also a barrier for memory, and another one must come before
// the next call.
INLINE Range range_of_block(Range mine) {
    __shared__ float lows[BLOCK / 32], highs[BLOCK / 32];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        mine.low = fminf(mine.low, __shfl_xor_sync(0xFFFFFFFFu, mine.low, distance));
        mine.high = fmaxf(mine.high, __shfl_xor_sync(0xFFFFFFFFu, mine.high, distance));
    }
    if (threadIdx.x % 32 == 0) {
        lows[threadIdx.x / 32] = mine.low;
        highs[threadIdx.x / 32] = mine.high;
    }
    Range all = nothing();
    all.nan = __syncthreads_or(mine.nan);
#pragma unroll
    for (int warp = 0; warp < BLOCK / 32; ++warp) all.merge(lows[warp], highs[warp]);
    return all;
}

// The grid of levels between two ends, operation by operation (S4.2).
struct Grid {
    float scale, upper, lower;
    bool poisoned;  // S4.4
};

INLINE Grid grid_between(float low, float high) {
    Grid grid;
    const float span = minus(high, low);
    grid.scale = over(255.0f, plus(span, 1e-7f));
    const float top = times(high, grid.scale), bottom = times(low, grid.scale);
    grid.upper = rintf(top);
    grid.lower = minus(grid.upper, 255.0f);
    grid.poisoned = !(is_finite(low) && is_finite(high) && is_finite(span) && is_finite(top) && is_finite(bottom));
    return grid;
}

INLINE unsigned char level_of(float x, const Grid& grid) {
    const float level = minus(fminf(rintf(times(x, grid.scale)), grid.upper), grid.lower);
    return grid.poisoned ? 0 : static_cast<unsigned char>(fminf(fmaxf(level, 0.0f), 255.0f));
}

INLINE long long bytes_of_block(long long size) { return HEADER + padded(size); }

// The header of one chunk's block (S4.1), as bits, because a NaN has specified ones (S4.4).
template <typename T> INLINE unsigned long long header_of(const Range& range, const Grid& grid) {
    // + 0 turns -0 into +0.
    const unsigned long long low = grid.poisoned ? Format<T>::nan : Format<T>::bits(narrow<T>(plus(range.low, 0.0f)));
    const unsigned long long high = grid.poisoned ? Format<T>::nan : Format<T>::bits(narrow<T>(plus(range.high, 0.0f)));
    return low | high << (8 * sizeof(T));
}

// Levels of `count` elements, computed by all threads of the block.
template <typename T> INLINE void write_levels(const T* from, unsigned char* levels, long long count, const Grid& grid) {
    constexpr int N = LANES<T>;
    spread<N, 2>(
        levels, count, threadIdx.x, blockDim.x,
        [&](auto batch, long long i, long long step) {
            constexpr int K = decltype(batch)::value;
            Pack<T, N> packs[K];
#pragma unroll
            for (int k = 0; k < K; ++k) load(packs[k], from + i + k * step);
#pragma unroll
            for (int k = 0; k < K; ++k) {
                Pack<unsigned char, N> result;
#pragma unroll
                for (int n = 0; n < N; ++n) result.at[n] = level_of(widen(packs[k].at[n]), grid);
                store(levels + i + k * step, result);
            }
        },
        [&](long long i) { levels[i] = level_of(widen(from[i]), grid); });
}

// Ends of `count` elements: each thread of the block returns those of its share.
template <typename T, typename Keep> INLINE Range read_range(const T* from, long long count, Keep keep) {
    Range range = nothing();
    read_values(from, count, keep, [&](float x) { range.see(x); });
    return range;
}

template <typename T> struct KeepOnChip {
    T* at;
    INLINE void operator()(long long i, const Pack<T, LANES<T>>& pack) const { store(at + i, pack); }
    INLINE void operator()(long long i, const T& element) const { at[i] = element; }
};

template <typename T> INLINE void find_ends(const T* x, long long size, long long parts, long long part_size, float2* ends) {
    const Part part = part_of(blockIdx.x, parts, part_size, size);
    const Range range = range_of_block(read_range(x + part.chunk * size + part.begin, part.count, KeepNothing()));
    if (threadIdx.x == 0) ends[blockIdx.x] = range.nan ? make_float2(nan32(), nan32()) : make_float2(range.low, range.high);
}

template <typename T>
INLINE void quantise(const T* x, long long size, long long ends_per_chunk, const float2* ends, long long parts, long long part_size,
                     unsigned char* payload) {
    const Part part = part_of(gridDim.x - 1 - blockIdx.x, parts, part_size, size);  // from the end, see the plan
    Range range = nothing();
    for (long long i = threadIdx.x; i < ends_per_chunk; i += blockDim.x) {
        const float2 pair = ends[part.chunk * ends_per_chunk + i];
        range.merge(pair.x, pair.y);
    }
    range = range_of_block(range);
    Grid grid = grid_between(range.low, range.high);
    grid.poisoned |= range.nan;
    unsigned char* const block = payload + part.chunk * bytes_of_block(size);
    if (part.number == 0) write_frame(block, header_of<T>(range, grid), HEADER + size);
    write_levels(x + part.chunk * size + part.begin, block + HEADER + part.begin, part.count, grid);
}

// The launch allocates shared memory for a chunk and 16 bytes, so that the chunk has the same offset from a boundary as in memory.
template <typename T> INLINE void compress_on_chip(const T* x, long long size, long long num_chunks, unsigned char* payload) {
    DYNAMIC_SHARED(room);
    for (long long chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
        const T* const from = x + chunk * size;
        T* const kept = reinterpret_cast<T*>(room + (address(from) & 15));
        Range range = range_of_block(read_range(from, size, KeepOnChip<T>{kept}));
        if (size == 0) range.low = range.high = 0.0f;
        Grid grid = grid_between(range.low, range.high);
        grid.poisoned |= range.nan;
        unsigned char* const block = payload + chunk * bytes_of_block(size);
        write_frame(block, header_of<T>(range, grid), HEADER + size);
        write_levels(kept, block + HEADER, size, grid);
        __syncthreads();  // before the next chunk overwrites the shared memory
    }
}

// (level + lower) / scale, limited to T's range (S4.3).
template <typename T> INLINE T value_of(unsigned char level, const Grid& grid) {
    return limited<T>(over(plus(static_cast<float>(level), grid.lower), grid.scale));
}

template <typename T>
INLINE void decompress(const unsigned char* payload, long long size, long long parts, long long part_size, T* out) {
    const Part part = part_of(blockIdx.x, parts, part_size, size);
    const unsigned char* const block = payload + part.chunk * bytes_of_block(size);
    Pack<unsigned char, 2 * sizeof(T)> header;
    load(header, block);
    const T* const ends = reinterpret_cast<const T*>(&header);
    const Grid grid = grid_between(widen(ends[0]), widen(ends[1]));
    __shared__ T values[BLOCK];  // of each level: divisions are slow
    values[threadIdx.x] = value_of<T>(static_cast<unsigned char>(threadIdx.x), grid);
    __syncthreads();
    const unsigned char* const levels = block + HEADER + part.begin;
    write_values(
        out + part.chunk * size + part.begin, part.count,
        [&](auto lanes, long long i) {
            Pack<unsigned char, decltype(lanes)::value> pack;
            load(pack, levels + i);
            return pack;
        },
        [&](const auto& pack, auto& result) {
#pragma unroll
            for (int n = 0; n < lanes_of(result); ++n) result.at[n] = values[pack.at[n]];
        });
}

#define INSTANCES(T, suffix)                                                                                                  \
    KERNEL(find_ends, suffix)(const T* __restrict__ x, long long size, long long parts, long long part_size, float2* ends) {  \
        find_ends(x, size, parts, part_size, ends);                                                                           \
    }                                                                                                                         \
    KERNEL(quantise, suffix)(const T* __restrict__ x, long long size, long long ends_per_chunk,                               \
                             const float2* __restrict__ ends, long long parts, long long part_size, unsigned char* payload) { \
        quantise(x, size, ends_per_chunk, ends, parts, part_size, payload);                                                   \
    }                                                                                                                         \
    KERNEL(compress_on_chip, suffix)(const T* __restrict__ x, long long size, long long num_chunks, unsigned char* payload) { \
        compress_on_chip(x, size, num_chunks, payload);                                                                       \
    }                                                                                                                         \
    KERNEL(decompress, suffix)(const unsigned char* __restrict__ payload, long long size, long long parts,                    \
                               long long part_size, T* out) {                                                                 \
        decompress(payload, size, parts, part_size, out);                                                                     \
    }

INSTANCES(float, float32)
INSTANCES(__half, float16)
INSTANCES(__nv_bfloat16, bfloat16)
