// OneBit (S12.2): all chunks in two launches. sum_squares adds the squares of each part of a chunk in float64; write_signs, with
// parts of its own, adds the sums of its chunk and writes scale and signs. 8 bytes of memory traffic per float32 element, and an
// eighth; restore_signs needs 4, and an eighth.
#include "codec.cuh"

// Add the numbers of all threads of the block; all get the sum. A kernel calls it once.
INLINE double sum_of_block(double mine) {
    __shared__ double sums[BLOCK / 32];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) mine = plus(mine, __shfl_xor_sync(0xFFFFFFFFu, mine, distance));
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = mine;
    __syncthreads();
    double all = 0;
#pragma unroll
    for (int warp = 0; warp < BLOCK / 32; ++warp) all = plus(all, sums[warp]);
    return all;
}

template <typename T> INLINE void sum_squares(const T* x, long long size, long long parts, long long part_size, double* sums) {
    const Part part = part_of(blockIdx.x, parts, part_size, size);
    double sum = 0;
    read_values(x + part.chunk * size + part.begin, part.count, KeepNothing(), [&](double value) {
        sum = __fma_rn(value, value, sum);  // a float32's square is exact in float64, so this rounds as two operations do
    });
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// The signs of eight elements, of which `count` exist, the first in the highest bit. Both zeros are 1.
template <typename T> INLINE unsigned char signs_of(const T* from, long long count) {
    unsigned signs = 0;
    if (count >= 8) {
        Pack<T, 8> pack;
        load(pack, from);
#pragma unroll
        for (int n = 0; n < 8; ++n) signs |= (widen(pack.at[n]) >= 0.0f ? 0x80u : 0u) >> n;
    } else {
#pragma unroll
        for (int n = 0; n < 7; ++n)
            if (n < count) signs |= (widen(from[n]) >= 0.0f ? 0x80u : 0u) >> n;
    }
    return static_cast<unsigned char>(signs);
}

INLINE long long end_of(long long size) { return HEADER + (size + 7) / 8; }

template <typename T>
INLINE void write_signs(const T* x, long long size, long long sums_per_chunk, const double* sums, long long parts, long long part_size,
                        unsigned char* payload) {
    const Part part = part_of(gridDim.x - 1 - blockIdx.x, parts, part_size, size);  // from the end, see the plan
    double sum = 0;
    for (long long i = threadIdx.x; i < sums_per_chunk; i += blockDim.x) sum = plus(sum, sums[part.chunk * sums_per_chunk + i]);
    sum = sum_of_block(sum);
    const bool poisoned = !(sum < 1e300);  // S12.3; sums of squares of finite float32 numbers are far smaller
    unsigned char* const block = payload + part.chunk * padded(end_of(size));
    if (part.number == 0) {
        const float scale = __double2float_rn(__dsqrt_rn(over(sum, static_cast<double>(size))));
        write_frame(block, __float_as_uint(poisoned ? nan32() : scale), end_of(size));
    }
    const T* const from = x + part.chunk * size + part.begin;
    unsigned char* const signs = block + HEADER + part.begin / 8;
    for (long long i = 8 * threadIdx.x; i < part.count; i += 8 * blockDim.x)
        signs[i / 8] = poisoned ? 0 : signs_of(from + i, part.count - i);
}

template <typename T>
INLINE void restore_signs(const unsigned char* payload, long long size, long long parts, long long part_size, T* out) {
    const Part part = part_of(blockIdx.x, parts, part_size, size);
    const unsigned char* const block = payload + part.chunk * padded(end_of(size));
    Pack<unsigned char, sizeof(float)> header;
    load(header, block);
    const float scale = *reinterpret_cast<const float*>(&header);
    const T positive = limited<T>(scale), negative = limited<T>(-scale);
    const unsigned char* const signs = block + HEADER + part.begin / 8;
    write_values(
        out + part.chunk * size + part.begin, part.count,
        [&](auto lanes, long long i) {  // which begin at any bit and reach into the next byte at most
            const unsigned both = signs[i / 8] << 8 | signs[(i + decltype(lanes)::value - 1) / 8];
            return both << (i % 8);
        },
        [&](unsigned bits, auto& result) {
#pragma unroll
            for (int n = 0; n < lanes_of(result); ++n) result.at[n] = bits << n & 0x8000u ? positive : negative;
        });
}

#define INSTANCES(T, suffix)                                                                                                  \
    KERNEL(sum_squares, suffix)(const T* __restrict__ x, long long size, long long parts, long long part_size, double* sums) { \
        sum_squares(x, size, parts, part_size, sums);                                                                         \
    }                                                                                                                         \
    KERNEL(write_signs, suffix)(const T* __restrict__ x, long long size, long long sums_per_chunk,                            \
                                const double* __restrict__ sums, long long parts, long long part_size,                        \
                                unsigned char* payload) {                                                                     \
        write_signs(x, size, sums_per_chunk, sums, parts, part_size, payload);                                                \
    }                                                                                                                         \
    KERNEL(restore_signs, suffix)(const unsigned char* __restrict__ payload, long long size, long long parts,                 \
                                  long long part_size, T* out) {                                                              \
        restore_signs(payload, size, parts, part_size, out);                                                                  \
    }

INSTANCES(float, float32)
INSTANCES(__half, float16)
INSTANCES(__nv_bfloat16, bfloat16)
