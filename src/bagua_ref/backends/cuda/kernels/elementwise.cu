// x <- f(x, y, ...) element by element: S1, S3.3 to S3.6, S5.5. Each tensor is read once and x written once.
#include "vector.cuh"

// K packs of N elements of one operand.
template <typename Y, int N, int K> struct Operand {
    const Y* from;
    Pack<Y, N> packs[K];

    INLINE void read(long long step) {
#pragma unroll
        for (int k = 0; k < K; ++k) load(packs[k], from + k * step);
    }
};

template <int N, int K, typename F, typename T, typename... Y>
INLINE void update_packs(F f, T* x, long long step, Operand<Y, N, K>... y) {
    Operand<T, N, K> old = {x, {}};
    old.read(step);
    (y.read(step), ...);
#pragma unroll
    for (int k = 0; k < K; ++k) {
        Pack<T, N> result;
#pragma unroll
        for (int n = 0; n < N; ++n) result.at[n] = f(widen(old.packs[k].at[n]), widen(y.packs[k].at[n])...);
        store(x + k * step, result);
    }
}

// AHEAD: the number of packs of each operand in flight; fewer if there are many operands, as registers would run out.
template <int AHEAD = 2, typename T, typename F, typename... Y> INLINE void update(T* x, long long m, F f, const Y*... y) {
    constexpr int N = LANES<T>;
    spread<N, AHEAD>(
        x, m, thread_of_grid(), threads_of_grid(),
        [&](auto batch, long long i, long long step) {
            constexpr int K = decltype(batch)::value;
            update_packs<N, K>(f, x + i, step, Operand<Y, N, K>{y + i, {}}...);
        },
        [&](long long i) { x[i] = f(widen(x[i]), widen(y[i])...); });
}

// x + factor * y, with product and sum rounded (S1).
template <typename W> INLINE W add_scaled(W x, W y, W factor) { return plus(x, times(factor, y)); }

#define INSTANCES(T, suffix)                                                                                                  \
    KERNEL(add, suffix)(T* x, const T* __restrict__ y, long long m) {                                                         \
        update(x, m, [](Wide<T> a, Wide<T> b) { return narrow<T>(plus(a, b)); }, y);                                          \
    }                                                                                                                         \
    KERNEL(subtract, suffix)(T* x, const T* __restrict__ y, long long m) {                                                    \
        update(x, m, [](Wide<T> a, Wide<T> b) { return narrow<T>(minus(a, b)); }, y);                                         \
    }                                                                                                                         \
    KERNEL(add_scaled, suffix)(T* x, const T* __restrict__ y, long long m, Wide<T> factor) {                                  \
        update(x, m, [=](Wide<T> a, Wide<T> b) { return narrow<T>(add_scaled(a, b, factor)); }, y);                           \
    }                                                                                                                         \
    KERNEL(average, suffix)(T* x, const T* __restrict__ y, long long m) {                                                     \
        update(x, m, [](Wide<T> a, Wide<T> b) { return narrow<T>(times(plus(a, b), Wide<T>(0.5))); }, y);                     \
    }                                                                                                                         \
    KERNEL(divide, suffix)(T* x, long long m, Wide<T> divisor) {                                                              \
        update(x, m, [=](Wide<T> a) { return narrow<T>(over(a, divisor)); });                                                 \
    }                                                                                                                         \
    /* S3.5: x is stored in its dtype after each of the three steps, so each rounds to T. */                                  \
    KERNEL(combine_ring, suffix)(T* x, const T* __restrict__ left, const T* __restrict__ right, const T* __restrict__ weight, \
                                 long long m) {                                                                               \
        update(                                                                                                               \
            x, m,                                                                                                             \
            [](Wide<T> a, Wide<T> l, Wide<T> r, Wide<T> w) {                                                                  \
                const Wide<T> third = static_cast<Wide<T>>(1.0 / 3.0), five = static_cast<Wide<T>>(-5.0 / 3.0);               \
                a = widen(narrow<T>(add_scaled(a, l, third)));                                                                \
                a = widen(narrow<T>(add_scaled(a, r, third)));                                                                \
                return narrow<T>(add_scaled(a, w, five));                                                                     \
            },                                                                                                                \
            left, right, weight);                                                                                             \
    }                                                                                                                         \
    /* S3.6: reduced comes in the type of the arithmetic. */                                                                  \
    KERNEL(async_average, suffix)(T* x, const Wide<T>* __restrict__ reduced, const T* __restrict__ snapshot, long long m,     \
                                  Wide<T> nranks) {                                                                           \
        update<1>(                                                                                                            \
            x, m,                                                                                                             \
            [=](Wide<T> a, Wide<T> total, Wide<T> old) { return narrow<T>(plus(a, minus(over(total, nranks), old))); },       \
            reduced, snapshot);                                                                                               \
    }                                                                                                                         \
    /* S5.5: gain is 1 - beta1, which the host forms in double precision. */                                                  \
    KERNEL(update_momentum, suffix)(T* m, const T* __restrict__ grad, long long size, Wide<T> keep, Wide<T> gain) {           \
        update(m, size, [=](Wide<T> a, Wide<T> g) { return narrow<T>(plus(times(a, keep), times(g, gain))); }, grad);         \
    }

INSTANCES(float, float32)
INSTANCES(double, float64)
INSTANCES(__half, float16)
INSTANCES(__nv_bfloat16, bfloat16)
