// What our kernels use of CUDA, for a C++ compiler. Threads of a block are fibres that take turns at barriers and warp
// operations only (runtime.cpp); arithmetic is the CPU's own float32 and float64, compiled without contraction.
#pragma once

#include <math.h>
#include <string.h>

#include <utility>

namespace emulation {

struct Index {
    unsigned x, y, z;
};

// What running code sees of its place in the grid.
struct Place {
    Index thread, block, block_size, grid_size;
    unsigned char* shared;
};

extern Place* here;

void barrier(const char* file, int line);
int barrier_or(int vote, const char* file, int line);
// A warp's exchange: everybody in mask sends, and gets what lane `source` sent.
unsigned long long exchange(unsigned mask, unsigned long long sent, unsigned source, const char* file, int line);
void warp_barrier(unsigned mask, const char* file, int line);

using Body = void (*)(void** arguments);
struct Register {
    Register(const char* kernel, Body body);
};

template <typename... P, size_t... I>
inline void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<P>*>(arguments[I])...);
}
template <typename... P> inline void call(void (*kernel)(P...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<P...>());
}
template <auto kernel> void invoke(void** arguments) { call(kernel, arguments); }

template <typename To, typename From> inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

}  // namespace emulation

#define EMULATED(kernel) static emulation::Register registered_##kernel(#kernel, &emulation::invoke<&kernel>)

#define __global__ inline  // kernels that no program uses are not compiled
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__
#ifdef EMULATION_THREADS  // a block per system thread, so that each has shared memory of its own
#define __shared__ static thread_local
#else
#define __shared__ static
#endif
#define DYNAMIC_SHARED(name) unsigned char* const name = emulation::here->shared

#define threadIdx (emulation::here->thread)
#define blockIdx (emulation::here->block)
#define blockDim (emulation::here->block_size)
#define gridDim (emulation::here->grid_size)

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
template <typename T> inline void __stcs(T* to, T value) { *to = value; }

// Barriers and warps.

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { emulation::barrier(file, line); }
inline int __syncthreads_or(int vote, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return emulation::barrier_or(vote, file, line);
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emulation::warp_barrier(mask, file, line);
}
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int lane, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    unsigned long long sent = 0;
    memcpy(&sent, &value, sizeof value);
    sent = emulation::exchange(mask, sent, static_cast<unsigned>(lane) % 32, file, line);
    memcpy(&value, &sent, sizeof value);
    return value;
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int other, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ other, file, line);
}

// Atomics.

template <typename T, typename F> inline T emulated_atomic(T* at, F f) {
    using Bits = std::conditional_t<sizeof(T) == 4, unsigned, unsigned long long>;  // so that floats work, too
    Bits old = __atomic_load_n(reinterpret_cast<Bits*>(at), __ATOMIC_RELAXED), now;
    do now = emulation::bits_as<Bits>(f(emulation::bits_as<T>(old)));
    while (!__atomic_compare_exchange_n(reinterpret_cast<Bits*>(at), &old, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return emulation::bits_as<T>(old);
}
template <typename T> inline T atomicAdd(T* at, T value) { return emulated_atomic(at, [=](T old) { return static_cast<T>(old + value); }); }
template <typename T> inline T atomicMax(T* at, T value) { return emulated_atomic(at, [=](T old) { return old > value ? old : value; }); }
template <typename T> inline T atomicExch(T* at, T value) { return emulated_atomic(at, [=](T) { return value; }); }

// Arithmetic.

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    const unsigned low = (a & 0xFFFFu) > (b & 0xFFFFu) ? a : b, high = a > b ? a : b;
    return (low & 0xFFFFu) | (high & 0xFFFF0000u);
}
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return emulation::bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return emulation::bits_as<unsigned>(x); }

struct __half { unsigned short bits; };
struct __nv_bfloat16 { unsigned short bits; };

inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {0x7FFF};  // CUDA's own choice of NaN
    return {static_cast<unsigned short>((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16)};
}
inline float __half2float(__half x) {
    const unsigned sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7FFFu;
    if (rest >= 0x7C00u) return __uint_as_float(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
    if (rest >= 0x400u) return __uint_as_float(sign | ((rest << 13) + 0x38000000u));
    const float small = static_cast<float>(rest) * 0x1p-24f;
    return sign ? -small : small;
}
inline __half __float2half_rn(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7FFFFFFFu;
    if (rest > 0x7F800000u) return {0x7FFF};
    unsigned result;
    if (rest >= 0x477FF000u) result = 0x7C00u;  // from halfway between the largest number and the next power of two
    else if (rest < 0x38800000u) result = static_cast<unsigned>(rintf(fabsf(x) * 0x1p24f));
    else result = (rest - 0x38000000u + 0xFFFu + (rest >> 13 & 1)) >> 13;
    return {static_cast<unsigned short>(sign | result)};
}
