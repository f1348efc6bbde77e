// MXFP8, MXFP4 and MXINT8 (S12.1, S12.6): one launch each way for all chunks; each element is read once and written once. NVFP4
// (S12.7) reads twice to compress: find_largest writes the largest magnitude of each part of a chunk to the workspace;
// compress_NVFP4, with parts of its own, merges those of its chunk.
//
// The 32 (NVFP4: 16) elements of a block are in neighbouring lanes, 16 bytes in each, which find the largest magnitude by shuffles; so
// a warp works on four blocks of float32 at once, or on eight of 16-bit floats. A chunk's elements begin directly after its scales, at
// any address: each lane writes its codes in the widest words that this allows.
#include "codec.cuh"

constexpr unsigned SIGN = 0x80000000u, INFINITE = 0x7F800000u;  // bits of float32
constexpr int MANTISSA = 23, BIAS = 127;                        // of float32; E8M0 has the same bias
constexpr int POISON = 255;                                     // the scale of a poisoned block (S12.3)
constexpr int PACK_WORDS = 4;                                   // of 4 bytes

// 2^exponent, from -127, a subnormal, to 127.
INLINE float power_of_two(int exponent) {
    return __uint_as_float(exponent > -BIAS ? static_cast<unsigned>(exponent + BIAS) << MANTISSA : 1u << (MANTISSA - 1));
}

// Elements with EXPONENT bits of exponent and FRACTION bits of mantissa; LARGEST is the code of the largest finite number.
template <int EXPONENT, int FRACTION, int EMAX, unsigned LARGEST> struct FloatElement {
    static constexpr int bits = 1 + EXPONENT + FRACTION, emax = EMAX, bias = (1 << (EXPONENT - 1)) - 1;
    static constexpr int reach = EMAX;  // all values are less than 2^(reach + 1)
    static constexpr float unit = 1.0f;
    static constexpr int sharing = 32;  // elements that share a scale
    static constexpr int header = 0;    // bytes of a chunk's payload before the scales

    // The code of x, given in units of the scale and less than 2^(EMAX + 1). Adding 2^23 times the last place of |x| rounds to whole
    // places, and the sum's low bits count them. In a code, each step of the exponent stands for 2^FRACTION places; subnormals have
    // those of the smallest one.
    INLINE static unsigned code_of(float x) {
        constexpr unsigned smallest = static_cast<unsigned>(1 - bias + BIAS) << MANTISSA;
        const unsigned power = __float_as_uint(x) & INFINITE, step = power > smallest ? power : smallest;
        const unsigned anchor = step + (static_cast<unsigned>(MANTISSA - FRACTION) << MANTISSA);
        const unsigned places = __float_as_uint(plus(fabsf(x), __uint_as_float(anchor))) - anchor;
        const unsigned code = places + ((step - smallest) >> (MANTISSA - FRACTION));
        return (code < LARGEST ? code : LARGEST) | (__float_as_uint(x) >> (32 - bits) & 1u << (bits - 1));
    }

    // The codes of two such numbers, the first in the lowest bits.
    INLINE static unsigned codes_of(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        if constexpr (EXPONENT == 4) {  // one instruction rounds and saturates as `code_of` does
            unsigned short both;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
            return both;
        }
#endif
        return code_of(first) | code_of(second) << bits;
    }

    // Exact unless it is a NaN: the code's bits as a float32 of the same mantissa, whose exponent is too small by the difference of the
    // biases. Shifted to the top first, so that the sign comes along.
    INLINE static float value_of(unsigned code) {
        constexpr unsigned kept = SIGN | (SIGN - 1) >> (8 - EXPONENT) & ~((1u << (MANTISSA - FRACTION)) - 1);
        const unsigned moved = static_cast<unsigned>(static_cast<int>(code << (32 - bits)) >> (8 - EXPONENT)) & kept;
        return times(__uint_as_float(moved), power_of_two(BIAS - bias));
    }

    INLINE static bool is_nan(unsigned code) { return (code & ((1u << (bits - 1)) - 1)) > LARGEST; }

    // Whether one of eight codes is a NaN, of which there is one if any, with all bits but the sign set.
    INLINE static bool has_nan(unsigned long long codes) {
        if (LARGEST == (1u << (bits - 1)) - 1) return false;
        return ((codes & 0x7F7F7F7F7F7F7F7Full) + 0x0101010101010101ull) & 0x8080808080808080ull;
    }
};

// Integers from -127 to 127 in units of 2^-6.
struct IntegerElement {
    static constexpr int bits = 8, emax = 0, reach = 1;  // -128 is read, too
    static constexpr float unit = 1.0f / 64.0f;
    static constexpr int sharing = 32, header = 0;

    INLINE static unsigned code_of(float x) {
        const float level = rintf(times(x, 64.0f));
        return static_cast<unsigned char>(static_cast<int>(fminf(fmaxf(level, -127.0f), 127.0f)));
    }
    INLINE static unsigned codes_of(float first, float second) { return code_of(first) | code_of(second) << bits; }
    // In units of `unit`; 2^23 + 128 is added by bits and subtracted, as conversions take longer.
    INLINE static float value_of(unsigned code) { return minus(__uint_as_float(0x4B000000u | ((code & 255) ^ 128)), 8388736.0f); }
    INLINE static bool is_nan(unsigned) { return false; }
    INLINE static bool has_nan(unsigned long long) { return false; }
};

using MXFP8 = FloatElement<4, 3, 8, 0x7E>;  // E4M3
using MXFP4 = FloatElement<2, 1, 2, 0x7>;   // E2M1
using MXINT8 = IntegerElement;

struct NVFP4 : MXFP4 {
    static constexpr int sharing = 16, header = HEADER;
    static constexpr float largest = 6.0f;
};

// A chunk's block of the payload: header, scales, elements, padding.
template <typename F> struct Layout {
    long long elements, end;

    INLINE explicit Layout(long long size)
        : elements(F::header + (size + F::sharing - 1) / F::sharing), end(elements + (size * F::bits + 7) / 8) {}
    INLINE long long block(long long chunk) const { return chunk * padded(end); }
    INLINE long long scale(const Part& part) const { return block(part.chunk) + F::header + part.begin / F::sharing; }
    INLINE long long element(const Part& part) const { return block(part.chunk) + elements + part.begin * F::bits / 8; }
};

// The scale byte of a block, and the factor of its elements.
struct Scale {
    bool poisoned;
    int byte;
    float factor;
};

// S12.1, S12.6: a power of two. `rounding` is the rule's.
template <typename F> struct Powers {
    unsigned rounding;

    // `largest` are the bits of the block's largest magnitude.
    INLINE Scale operator()(unsigned largest) const {
        // float32's field of the exponent has E8M0's bias, and is 0 for zeros and subnormals.
        const int field = static_cast<int>((largest + rounding) >> MANTISSA) - F::emax, byte = field > 0 ? field : 0;
        if (largest >= INFINITE) return {true, POISON, 0.0f};
        return {false, byte, power_of_two(BIAS - byte)};
    }
    INLINE float operator()(float x, float factor) const { return times(x, factor); }
};

// S12.7: an E4M3 number, times one of the chunk.
struct Products {
    bool poisoned;
    float sixth, unit;

    // `largest` are the bits of the chunk's largest magnitude.
    INLINE explicit Products(unsigned largest) : poisoned(largest >= INFINITE) {
        const float multiple = largest == 0 ? 1.0f : fminf(over(2688.0f, __uint_as_float(largest)), Format<float>::largest());
        sixth = times(multiple, 1.0f / 6.0f);
        unit = over(1.0f, multiple);
    }
    INLINE Scale operator()(unsigned largest) const {
        const unsigned byte = MXFP8::code_of(times(__uint_as_float(largest), sixth));
        const float factor = over(1.0f, times(MXFP8::value_of(byte), unit));
        return {poisoned, poisoned ? 0 : static_cast<int>(byte), fminf(factor, Format<float>::largest())};
    }
    // A product may be infinite.
    INLINE float operator()(float x, float factor) const {
        return fminf(fmaxf(times(x, factor), -NVFP4::largest), NVFP4::largest);
    }
};

// The larger of two magnitudes as bits, or of each of two pairs of 16 bits.
template <typename T> INLINE unsigned larger(unsigned a, unsigned b) {
    if constexpr (sizeof(T) == 2) return __vmaxu2(a, b);
    return a > b ? a : b;
}

// The largest magnitude, as bits of a float32, in the lanes that hold a block of SHARING. NaN counts as larger than infinity.
template <int SHARING, typename T, int N> INLINE unsigned largest_of(const Pack<T, N>& mine) {
    const unsigned* const words = reinterpret_cast<const unsigned*>(&mine);
    constexpr unsigned magnitude = sizeof(T) == 2 ? 0x7FFF7FFFu : ~SIGN;
    unsigned largest = words[0] & magnitude;
#pragma unroll
    for (int word = 1; word < PACK_WORDS; ++word) largest = larger<T>(largest, words[word] & magnitude);
#pragma unroll
    for (int lanes = SHARING / N / 2; lanes > 0; lanes /= 2)
        largest = larger<T>(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lanes));
    if constexpr (sizeof(T) == 4) return largest;
    const unsigned short low = static_cast<unsigned short>(largest), high = static_cast<unsigned short>(largest >> 16);
    const unsigned short bits = low > high ? low : high;
    return __float_as_uint(widen(reinterpret_cast<const T&>(bits)));
}

// Compress a part of a chunk; scaling(largest) returns a block's `Scale`, and scaling(x, factor) a
// number's multiple of it.
template <typename F, typename T, typename Scaling>
INLINE void compress_part(const T* x, long long size, const Part& part, const Scaling& scaling, unsigned char* payload) {
    constexpr int N = LANES<T>, BYTES = N * F::bits / 8;
    constexpr int AHEAD = 2;  // packs in flight
    const Layout<F> layout(size);
    const T* const from = x + part.chunk * size + part.begin;
    unsigned char* const scales = payload + layout.scale(part);
    unsigned char* const elements = payload + layout.element(part);
    const auto read = [&](Pack<T, N>& pack, long long i) {
        if (part.count - i >= N) return load(pack, from + i);
#pragma unroll
        for (int n = 0; n < N; ++n) pack.at[n] = i + n < part.count ? from[i + n] : narrow<T>(0.0f);
    };
    const auto write = [&](const Pack<T, N>& pack, long long i) {
        const long long left = part.count - i;
        const Scale scale = scaling(largest_of<F::sharing>(pack));
        unsigned long long codes = 0;
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const unsigned both =
                F::codes_of(scaling(widen(pack.at[n]), scale.factor), scaling(widen(pack.at[n + 1]), scale.factor));
            codes |= static_cast<unsigned long long>(both) << (F::bits * n);
        }
        if (scale.poisoned) codes = 0;
        Pack<unsigned char, BYTES> bytes;
        memcpy(&bytes, &codes, BYTES);
        unsigned char* const to = elements + i * F::bits / 8;
        if (left > 0 && i % F::sharing == 0) scales[i / F::sharing] = static_cast<unsigned char>(scale.byte);
        if (left >= N) {
            store_anywhere(to, bytes);
        } else {
#pragma unroll
            for (int b = 0; b < BYTES; ++b)
                if (8 * b < F::bits * left) to[b] = bytes.at[b];
        }
    };
    // Whole warps continue or end, as all of their lanes take part in the shuffles.
    const long long step = blockDim.x * N;
    for (long long first = threadIdx.x / 32 * 32 * N; first < part.count; first += AHEAD * step) {
        const long long i = first + threadIdx.x % 32 * N;
        Pack<T, N> packs[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) read(packs[k], i + k * step);
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) write(packs[k], i + k * step);
    }
}

template <typename F, typename T>
INLINE void compress(const T* x, long long rounding, long long size, long long parts, long long part_size, unsigned char* payload) {
    const Part part = part_of(blockIdx.x, parts, part_size, size);
    const Layout<F> layout(size);
    if (part.number == 0) write_padding(payload + layout.block(part.chunk), layout.end);
    compress_part<F>(x, size, part, Powers<F>{static_cast<unsigned>(rounding)}, payload);
}

// The largest number of all threads of the block; all get it. A kernel calls it once.
INLINE unsigned largest_of_block(unsigned mine) {
    __shared__ unsigned numbers[BLOCK / 32];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) mine = larger<float>(mine, __shfl_xor_sync(0xFFFFFFFFu, mine, distance));
    if (threadIdx.x % 32 == 0) numbers[threadIdx.x / 32] = mine;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < BLOCK / 32; ++warp) mine = larger<float>(mine, numbers[warp]);
    return mine;
}

template <typename T> INLINE void find_largest(const T* x, long long size, long long parts, long long part_size, unsigned* largest) {
    const Part part = part_of(blockIdx.x, parts, part_size, size);
    unsigned mine = 0;
    read_values(x + part.chunk * size + part.begin, part.count, KeepNothing(),
                [&](float value) { mine = larger<float>(mine, __float_as_uint(value) & ~SIGN); });
    mine = largest_of_block(mine);
    if (threadIdx.x == 0) largest[blockIdx.x] = mine;
}

template <typename T>
INLINE void compress_products(const T* x, long long size, long long per_chunk, const unsigned* largest, long long parts,
                              long long part_size, unsigned char* payload) {
    const Part part = part_of(gridDim.x - 1 - blockIdx.x, parts, part_size, size);  // from the end, see the plan
    unsigned mine = 0;
    for (long long i = threadIdx.x; i < per_chunk; i += blockDim.x) mine = larger<float>(mine, largest[part.chunk * per_chunk + i]);
    const Products scaling(largest_of_block(mine));
    const Layout<NVFP4> layout(size);
    const float header = scaling.poisoned ? nan32() : scaling.unit;
    if (part.number == 0) write_frame(payload + layout.block(part.chunk), __float_as_uint(header), layout.end);
    compress_part<NVFP4>(x, size, part, scaling, payload);
}

// The codes of N elements from i on, the first in the lowest bits. With two a byte, i may be odd.
template <int BITS, int N> INLINE unsigned long long codes_at(const unsigned char* elements, long long i) {
    constexpr int BYTES = (N * BITS + 7) / 8;
    const long long first = i * BITS / 8;
    const int skipped = static_cast<int>(i * BITS % 8);
    Pack<unsigned char, BYTES> pack;
    load(pack, elements + first);
    unsigned long long codes = 0;
#pragma unroll
    for (int b = 0; b < BYTES; ++b) codes |= static_cast<unsigned long long>(pack.at[b]) << (8 * b);
    if constexpr (BITS < 8) {
        if (skipped + N * BITS > 8 * BYTES) codes |= static_cast<unsigned long long>(elements[first + BYTES]) << (8 * BYTES);
    }
    return codes >> skipped;
}

// Codes of neighbouring elements, and their scale; those from number `second` on have the next one.
struct Codes {
    unsigned long long codes;
    int scale, next_scale, second;
};

template <typename F> INLINE float factor_of(int scale) {
    return scale == POISON ? nan32() : times(power_of_two(scale - BIAS), F::unit);
}

template <typename F, typename T, int N> INLINE void restore(const Codes& some, Pack<T, N>& result) {
    constexpr int highest = sizeof(T) == 2 && Format<T>::nan == 0x7E00u ? 15 : 127;  // exponent of T
    const auto code = [&](int n) { return static_cast<unsigned>(some.codes >> (F::bits * n)) & ((1u << F::bits) - 1); };
    const float factor = factor_of<F>(some.scale);
    // Mostly, they share a scale, none is a NaN and none too large for T.
    if (N > 1 && some.second >= N && some.scale <= BIAS + highest - F::reach && !F::has_nan(some.codes)) {
#pragma unroll
        for (int n = 0; n < N; ++n) result.at[n] = narrow<T>(times(F::value_of(code(n)), factor));
    } else {
        const float next = factor_of<F>(some.next_scale);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float value = F::is_nan(code(n)) ? nan32() : F::value_of(code(n));
            result.at[n] = limited<T>(times(value, n < some.second ? factor : next));
        }
    }
}

template <typename F, typename T, typename Restore>
INLINE void decompress_part(const unsigned char* payload, long long size, const Part& part, T* out, Restore restore) {
    const Layout<F> layout(size);
    const unsigned char* const scales = payload + layout.scale(part);
    const unsigned char* const elements = payload + layout.element(part);
    write_values(
        out + part.chunk * size + part.begin, part.count,
        [&](auto lanes, long long i) {
            constexpr int N = decltype(lanes)::value;
            const int scale = scales[i / F::sharing], second = F::sharing - static_cast<int>(i % F::sharing);
            const int next = second < N ? scales[i / F::sharing + 1] : scale;
            return Codes{codes_at<F::bits, N>(elements, i), scale, next, second};
        },
        restore);
}

template <typename F, typename T>
INLINE void decompress(const unsigned char* payload, long long size, long long parts, long long part_size, T* out) {
    decompress_part<F>(payload, size, part_of(blockIdx.x, parts, part_size, size), out,
                       [](const Codes& some, auto& result) { restore<F>(some, result); });
}

template <typename T>
INLINE void decompress_products(const unsigned char* payload, long long size, long long parts, long long part_size, T* out) {
    const Part part = part_of(blockIdx.x, parts, part_size, size);
    Pack<unsigned char, sizeof(float)> header;
    load(header, payload + Layout<NVFP4>(size).block(part.chunk));
    const float unit = *reinterpret_cast<const float*>(&header);
    const auto number = [](int code) { return MXFP8::is_nan(code) ? nan32() : MXFP8::value_of(code); };
    decompress_part<NVFP4>(payload, size, part, out, [&](const Codes& some, auto& result) {
        const float scale = number(some.scale), next = number(some.next_scale);
#pragma unroll
        for (int n = 0; n < lanes_of(result); ++n) {
            const float element = NVFP4::value_of(static_cast<unsigned>(some.codes >> (NVFP4::bits * n)) & 15);
            result.at[n] = limited<T>(
                times(times(element, n < some.second ? scale : next), unit));
        }
    });
}

#define INSTANCES(F, T, suffix)                                                                                               \
    KERNEL(compress_##F, suffix)(const T* __restrict__ x, long long rounding, long long size, long long parts,                \
                                 long long part_size, unsigned char* payload) {                                               \
        compress<F>(x, rounding, size, parts, part_size, payload);                                                            \
    }                                                                                                                         \
    KERNEL(decompress_##F, suffix)(const unsigned char* __restrict__ payload, long long size, long long parts,                \
                                   long long part_size, T* out) {                                                             \
        decompress<F>(payload, size, parts, part_size, out);                                                                  \
    }

#define FORMAT(F)                   \
    INSTANCES(F, float, float32)    \
    INSTANCES(F, __half, float16)   \
    INSTANCES(F, __nv_bfloat16, bfloat16)

FORMAT(MXFP8)
FORMAT(MXFP4)
FORMAT(MXINT8)

#define PRODUCTS(T, suffix)                                                                                                   \
    KERNEL(find_largest, suffix)(const T* __restrict__ x, long long size, long long parts, long long part_size,               \
                                 unsigned* largest) {                                                                         \
        find_largest(x, size, parts, part_size, largest);                                                                     \
    }                                                                                                                         \
    KERNEL(compress_NVFP4, suffix)(const T* __restrict__ x, long long size, long long per_chunk,                              \
                                   const unsigned* __restrict__ largest, long long parts, long long part_size,                \
                                   unsigned char* payload) {                                                                  \
        compress_products(x, size, per_chunk, largest, parts, part_size, payload);                                            \
    }                                                                                                                         \
    KERNEL(decompress_NVFP4, suffix)(const unsigned char* __restrict__ payload, long long size, long long parts,              \
                                     long long part_size, T* out) {                                                           \
        decompress_products(payload, size, parts, part_size, out);                                                            \
    }

PRODUCTS(float, float32)
PRODUCTS(__half, float16)
PRODUCTS(__nv_bfloat16, bfloat16)
