// Chunk t <- (((+0 + chunk 0) + chunk 1) + ...), divided for the mean (S3.7): n chunks read once, one written.
#include "vector.cuh"

template <typename T> INLINE void reduce_chunks(T* x, long long size, long long num_chunks, long long target, Wide<T> divisor) {
    constexpr int N = LANES<T>, AHEAD = 4;  // chunks whose loads are in flight together; the order of the sum is kept
    T* const sums = x + target * size;
    const auto stored = [=](Wide<T> total) { return narrow<T>(divisor == Wide<T>(0) ? total : over(total, divisor)); };
    const auto whole = [&](auto, long long i, long long) {
        Wide<T> total[N] = {};
        const auto add = [&](const Pack<T, N>& pack) {
#pragma unroll
            for (int n = 0; n < N; ++n) total[n] = plus(total[n], widen(pack.at[n]));
        };
        long long chunk = 0;
        for (; chunk + AHEAD <= num_chunks; chunk += AHEAD) {
            Pack<T, N> packs[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) load(packs[k], x + (chunk + k) * size + i);
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) add(packs[k]);
        }
        for (; chunk < num_chunks; ++chunk) {
            Pack<T, N> pack;
            load(pack, x + chunk * size + i);
            add(pack);
        }
        Pack<T, N> result;
#pragma unroll
        for (int n = 0; n < N; ++n) result.at[n] = stored(total[n]);
        store(sums + i, result);
    };
    const auto single = [&](long long i) {
        Wide<T> total = 0;
        for (long long chunk = 0; chunk < num_chunks; ++chunk) total = plus(total, widen(x[chunk * size + i]));
        sums[i] = stored(total);
    };
    spread<N, 1>(sums, size, thread_of_grid(), threads_of_grid(), whole, single);
}

// divisor: the number of chunks, or 0 for the sum.
#define INSTANCE(T, suffix)                                                                                              \
    extern "C" __global__ void BOUNDS                                                                  \
        reduce_chunks_##suffix(T* x, long long size, long long num_chunks, long long target, Wide<T> divisor) {          \
        reduce_chunks(x, size, num_chunks, target, divisor);                                                             \
    }

INSTANCE(float, float32)
INSTANCE(double, float64)
INSTANCE(__half, float16)
INSTANCE(__nv_bfloat16, bfloat16)
