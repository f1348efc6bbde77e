// Parts shared by the codecs: limits of the dtypes, parts of chunks, the frame of a payload's block, reading and writing of values.
#pragma once

#include "vector.cuh"

constexpr int HEADER = 32;

INLINE float nan32() { return __uint_as_float(0x7FC00000u); }
INLINE bool is_finite(float x) { return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u; }

template <typename T> struct Format;
template <> struct Format<float> {
    static constexpr unsigned nan = 0x7FC00000u;
    INLINE static float largest() { return __uint_as_float(0x7F7FFFFFu); }
    INLINE static unsigned bits(float x) { return __float_as_uint(x); }
};
template <> struct Format<__half> {
    static constexpr unsigned nan = 0x7E00u;
    INLINE static float largest() { return 65504.0f; }
    INLINE static unsigned bits(__half x) { return __half_as_ushort(x); }
};
template <> struct Format<__nv_bfloat16> {
    static constexpr unsigned nan = 0x7FC0u;
    INLINE static float largest() { return __uint_as_float(0x7F7F0000u); }
    INLINE static unsigned bits(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
};

// x in T, limited to T's range (S4.3). NaN stays, as it is neither above nor below.
template <typename T> INLINE T limited(float x) {
    const float largest = Format<T>::largest();
    return narrow<T>(x > largest ? largest : x < -largest ? -largest : x);
}

// The chunk and the part of a unit of work: parts have `part_size` elements, except the last one of a chunk.
struct Part {
    long long chunk, number, begin, count;
};

INLINE Part part_of(long long unit, long long parts, long long part_size, long long size) {
    Part part;
    part.chunk = unit / parts;
    part.number = unit - part.chunk * parts;
    part.begin = part.number * part_size;
    part.count = size - part.begin < part_size ? size - part.begin : part_size;
    return part;
}

INLINE long long padded(long long bytes) { return (bytes + 31) / 32 * 32; }

// Zeros from byte `end` of a chunk's block up to the next multiple of 32.
INLINE void write_padding(unsigned char* block, long long end) {
    const long long gap = padded(end) - end;
    const int thread = threadIdx.x;
    if (thread < gap) block[end + thread] = 0;
}

// Header and padding of a chunk's block, byte by byte, so that any address works.
INLINE void write_frame(unsigned char* block, unsigned long long header, long long end) {
    const int thread = threadIdx.x;
    if (thread < HEADER) block[thread] = thread < 8 ? static_cast<unsigned char>(header >> (8 * thread)) : 0;
    write_padding(block, end);
}

// Read `count` elements with all threads of the block; see(value) gets a thread's share, keep(i, pack) and keep(i, element) the input.
template <typename T, typename Keep, typename See> INLINE void read_values(const T* from, long long count, Keep keep, See see) {
    constexpr int N = LANES<T>;
    spread<N, 4>(
        from, count, threadIdx.x, blockDim.x,
        [&](auto batch, long long i, long long step) {
            constexpr int K = decltype(batch)::value;
            Pack<T, N> packs[K];
#pragma unroll
            for (int k = 0; k < K; ++k) load(packs[k], from + i + k * step);
#pragma unroll
            for (int k = 0; k < K; ++k) {
                keep(i + k * step, packs[k]);
#pragma unroll
                for (int n = 0; n < N; ++n) see(widen(packs[k].at[n]));
            }
        },
        [&](long long i) {
            const T element = from[i];
            keep(i, element);
            see(widen(element));
        });
}

struct KeepNothing {
    template <typename What> INLINE void operator()(long long, const What&) const {}
};

// Write `count` elements with all threads of the block. read(Count<N>(), i) returns the codes of N elements from i on, and
// restore(codes, pack) writes those elements to a pack.
template <typename T, typename Read, typename Restore> INLINE void write_values(T* to, long long count, Read read, Restore restore) {
    constexpr int N = LANES<T>;
    spread<N, 2>(
        to, count, threadIdx.x, blockDim.x,
        [&](auto batch, long long i, long long step) {
            constexpr int K = decltype(batch)::value;
            decltype(read(Count<N>(), i)) codes[K];
#pragma unroll
            for (int k = 0; k < K; ++k) codes[k] = read(Count<N>(), i + k * step);
#pragma unroll
            for (int k = 0; k < K; ++k) {
                Pack<T, N> result;
                restore(codes[k], result);
                store_streaming(to + i + k * step, result);
            }
        },
        [&](long long i) {
            Pack<T, 1> result;
            restore(read(Count<1>(), i), result);
            to[i] = result.at[0];
        });
}
