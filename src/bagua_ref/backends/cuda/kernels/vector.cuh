// Parts shared by all kernels: arithmetic that rounds once per operation, and memory accesses of up to 16 bytes.
//
// Tensors may begin at any element and have any size. The output of a kernel is split into aligned packs, with a head and a tail of
// fewer elements than a pack. Inputs may have other alignments and are read with the widest words that their address allows.
// Sizes and indices have 64 bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Shared memory whose size the launch determines. The emulation, which has no linker to provide it, defines this beforehand.
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

#define INLINE __device__ __forceinline__

constexpr int BLOCK = 256;  // threads; the plan launches the same number

// From Blackwell on, the compiler uses up to 111 registers per thread if allowed; three blocks per multiprocessor allow 80.
// For older architectures, the same bound would make it use more than it does without.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define BOUNDS __launch_bounds__(BLOCK, 3)
#else
#define BOUNDS __launch_bounds__(BLOCK)
#endif

#define KERNEL(name, suffix) extern "C" __global__ void BOUNDS name##_##suffix

// Arithmetic (S1): 16-bit floats in float32, rounded once when stored; operations are never fused.

template <typename T> struct Arithmetic { using Type = float; };
template <> struct Arithmetic<double> { using Type = double; };
template <typename T> using Wide = typename Arithmetic<T>::Type;

INLINE float plus(float a, float b) { return __fadd_rn(a, b); }
INLINE float minus(float a, float b) { return __fsub_rn(a, b); }
INLINE float times(float a, float b) { return __fmul_rn(a, b); }
INLINE float over(float a, float b) { return __fdiv_rn(a, b); }
INLINE double plus(double a, double b) { return __dadd_rn(a, b); }
INLINE double minus(double a, double b) { return __dsub_rn(a, b); }
INLINE double times(double a, double b) { return __dmul_rn(a, b); }
INLINE double over(double a, double b) { return __ddiv_rn(a, b); }

INLINE float widen(float x) { return x; }
INLINE double widen(double x) { return x; }
INLINE float widen(__half x) { return __half2float(x); }
INLINE float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> INLINE T narrow(Wide<T> x);
template <> INLINE float narrow<float>(float x) { return x; }
template <> INLINE double narrow<double>(double x) { return x; }
template <> INLINE __half narrow<__half>(float x) { return __float2half_rn(x); }
template <> INLINE __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// Memory.

INLINE constexpr int word_of(int bytes) { return bytes < 16 ? bytes : 16; }

template <typename T, int N> struct alignas(word_of(N * sizeof(T))) Pack { T at[N]; };

template <typename T, int N> INLINE constexpr int lanes_of(const Pack<T, N>&) { return N; }

template <typename T> constexpr int LANES = 16 / sizeof(T);  // elements of a pack of 16 bytes

INLINE unsigned long long address(const void* pointer) { return reinterpret_cast<unsigned long long>(pointer); }

template <typename Word, typename P> INLINE void load_words(P& pack, const void* from) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(P) / sizeof(Word)); ++i)
        reinterpret_cast<Word*>(&pack)[i] = static_cast<const Word*>(from)[i];
}

template <typename Word, typename P> INLINE void store_words(void* to, const P& pack) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(P) / sizeof(Word)); ++i)
        static_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(&pack)[i];
}

// Call access(word) with the widest type of word in which a pack at `at`, which is aligned to T, can be accessed. All threads of a
// block take the same branch, as their packs are whole packs apart.
template <typename P, typename T, typename Access> INLINE void by_words(const T* at, Access access) {
    const unsigned off = static_cast<unsigned>(address(at)) & (alignof(P) - 1);
    if constexpr (alignof(P) >= 16) {
        if ((off & 15) == 0) return access(uint4());
    }
    if constexpr (alignof(P) >= 8 && sizeof(T) <= 8) {
        if ((off & 7) == 0) return access(uint2());
    }
    if constexpr (alignof(P) >= 4 && sizeof(T) <= 4) {
        if ((off & 3) == 0) return access(0u);
    }
    if constexpr (alignof(P) >= 2 && sizeof(T) <= 2) {
        if ((off & 1) == 0) return access(static_cast<unsigned short>(0));
    }
    if constexpr (sizeof(T) == 1) access(static_cast<unsigned char>(0));
}

// Read or write a pack with the widest words that the address allows.
template <typename P, typename T> INLINE void load(P& pack, const T* from) {
    by_words<P>(from, [&](auto word) { load_words<decltype(word)>(pack, from); });
}
template <typename P, typename T> INLINE void store_anywhere(T* to, const P& pack) {
    by_words<P>(to, [&](auto word) { store_words<decltype(word)>(to, pack); });
}

// Write a pack to an aligned address.
template <typename P> INLINE void store(void* to, const P& pack) {
    if constexpr (alignof(P) == 16) return store_words<uint4>(to, pack);
    if constexpr (alignof(P) == 8) return store_words<uint2>(to, pack);
    if constexpr (alignof(P) == 4) return store_words<unsigned>(to, pack);
    if constexpr (alignof(P) == 2) return store_words<unsigned short>(to, pack);
    if constexpr (alignof(P) == 1) return store_words<unsigned char>(to, pack);
}

// Write a pack of 16 bytes to an aligned address; the cache evicts it first. Kernels that write more than they read gain by it.
template <typename P> INLINE void store_streaming(void* to, const P& pack) {
    static_assert(sizeof(P) == 16);
    __stcs(static_cast<uint4*>(to), reinterpret_cast<const uint4&>(pack));
}

template <int K> struct Count { static constexpr int value = K; };

// Share `count` elements from `base` on among threads `first`, `first` + 1, ... of `stride` (at least 16): whole(Count<K>, i, step)
// gets the K packs of N elements at i, i + step, ..., which are aligned, and single(i) the elements before and after those.
// K packs at a time, so that all their loads are in flight before the first one is needed.
template <int N, int K, typename T, typename Whole, typename Single>
INLINE void spread(const T* base, long long count, long long first, long long stride, Whole whole, Single single) {
    const long long before = static_cast<long long>((0 - address(base)) & (N * sizeof(T) - 1)) / static_cast<int>(sizeof(T));
    const long long head = before < count ? before : count;
    const long long packs = (count - head) / N, rest = head + packs * N;
    if (first < head) single(first);
    if (first < count - rest) single(rest + first);
    long long pack = first;
    for (; pack + (K - 1) * stride < packs; pack += K * stride) whole(Count<K>(), head + pack * N, stride * N);
    for (; pack < packs; pack += stride) whole(Count<1>(), head + pack * N, stride * N);
}

INLINE long long thread_of_grid() { return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; }
INLINE long long threads_of_grid() { return static_cast<long long>(gridDim.x) * blockDim.x; }
