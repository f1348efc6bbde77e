// MXFP8, MXFP4 and MXINT8 (S12.1): one launch each way for all chunks; each element is read once and written once.
//
// The 32 elements of a block are in neighbouring lanes, 16 bytes in each, which find the largest magnitude by shuffles; so a warp
// works on four blocks of float32 at once, or on eight of 16-bit floats. A chunk's elements begin directly after its scales, at any
// address: each lane writes its codes in the widest words that this allows.
#include "codec.cuh"

constexpr unsigned SIGN = 0x80000000u, INFINITE = 0x7F800000u;  // bits of float32
constexpr int MANTISSA = 23, BIAS = 127;                        // of float32; E8M0 has the same bias
constexpr int POISON = 255;                                     // the scale of a poisoned block (S12.3)
constexpr int SHARING = 32;                                     // elements that share a scale

// 2^exponent, from -127, a subnormal, to 127.
INLINE float power_of_two(int exponent) {
    return __uint_as_float(exponent > -BIAS ? static_cast<unsigned>(exponent + BIAS) << MANTISSA : 1u << (MANTISSA - 1));
}

// Elements with EXPONENT bits of exponent and FRACTION bits of mantissa; LARGEST is the code of the largest finite number.
template <int EXPONENT, int FRACTION, int EMAX, unsigned LARGEST> struct FloatElement {
    static constexpr int bits = 1 + EXPONENT + FRACTION, emax = EMAX, bias = (1 << (EXPONENT - 1)) - 1;

    // The code of x, given in units of the scale. Adding 2^23 times the last place of |x| rounds to whole places, and the sum's low
    // bits count them. In a code, each step of the exponent stands for 2^FRACTION places; subnormals have those of the smallest one.
    INLINE static unsigned code_of(float x) {
        const unsigned sign = __float_as_uint(x) & SIGN, magnitude = __float_as_uint(x) ^ sign;
        constexpr unsigned smallest = 1 - bias + BIAS;
        const unsigned exponent = magnitude >> MANTISSA > smallest ? magnitude >> MANTISSA : smallest;
        const unsigned anchor = (exponent + MANTISSA - FRACTION) << MANTISSA;
        const unsigned places = __float_as_uint(plus(__uint_as_float(magnitude), __uint_as_float(anchor))) - anchor;
        const unsigned code = places + ((exponent - smallest) << FRACTION);
        return (code < LARGEST ? code : LARGEST) | sign >> (32 - bits);
    }

    // Exact: the code's bits as a float32 of the same mantissa, whose exponent is too small by the difference of the biases.
    INLINE static float value_of(unsigned code) {
        const unsigned sign = code >> (bits - 1), magnitude = code ^ sign << (bits - 1);
        if (magnitude > LARGEST) return nan32();
        return times(__uint_as_float(sign << 31 | magnitude << (MANTISSA - FRACTION)), power_of_two(BIAS - bias));
    }
};

// Integers from -127 to 127 in units of 2^-6.
struct IntegerElement {
    static constexpr int bits = 8, emax = 0;

    INLINE static unsigned code_of(float x) {
        const float level = rintf(times(x, 64.0f));
        return static_cast<unsigned char>(static_cast<int>(fminf(fmaxf(level, -127.0f), 127.0f)));
    }
    INLINE static float value_of(unsigned code) { return times(static_cast<float>(static_cast<signed char>(code)), 1.0f / 64.0f); }
};

using MXFP8 = FloatElement<4, 3, 8, 0x7E>;  // E4M3
using MXFP4 = FloatElement<2, 1, 2, 0x7>;   // E2M1
using MXINT8 = IntegerElement;

// A chunk's block of the payload: scales, elements, padding.
template <typename F> struct Layout {
    long long scales, end;

    INLINE explicit Layout(long long size) : scales((size + SHARING - 1) / SHARING), end(scales + (size * F::bits + 7) / 8) {}
    INLINE long long block(long long chunk) const { return chunk * padded(end); }
    INLINE long long scale(const Part& part) const { return block(part.chunk) + part.begin / SHARING; }
    INLINE long long element(const Part& part) const { return block(part.chunk) + scales + part.begin * F::bits / 8; }
};

// The largest magnitude, as bits, in the lanes that hold a block of which each has N elements. NaN counts as larger than infinity.
template <int N> INLINE unsigned largest_of(const float (&values)[N]) {
    unsigned largest = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const unsigned magnitude = __float_as_uint(values[n]) & ~SIGN;
        largest = magnitude > largest ? magnitude : largest;
    }
#pragma unroll
    for (int lanes = SHARING / N / 2; lanes > 0; lanes /= 2) {
        const unsigned other = __shfl_xor_sync(0xFFFFFFFFu, largest, lanes);
        largest = other > largest ? other : largest;
    }
    return largest;
}

template <typename F, typename T>
INLINE void compress(const T* x, long long size, long long parts, long long part_size, unsigned char* payload) {
    constexpr int N = LANES<T>, BYTES = N * F::bits / 8;
    constexpr int AHEAD = 8 / N;  // packs in flight; with two of a 16-bit type, registers would leave too few threads
    const Layout<F> layout(size);
    const Part part = part_of(blockIdx.x, parts, part_size, size);
    if (part.number == 0) write_padding(payload + layout.block(part.chunk), layout.end);
    const T* const from = x + part.chunk * size + part.begin;
    unsigned char* const scales = payload + layout.scale(part);
    unsigned char* const elements = payload + layout.element(part);
    const auto read = [&](float (&values)[N], long long i) {
        if (part.count - i >= N) {
            Pack<T, N> pack;
            load(pack, from + i);
#pragma unroll
            for (int n = 0; n < N; ++n) values[n] = widen(pack.at[n]);
        } else {
#pragma unroll
            for (int n = 0; n < N; ++n) values[n] = i + n < part.count ? widen(from[i + n]) : 0.0f;
        }
    };
    const auto write = [&](const float (&values)[N], long long i) {
        const long long left = part.count - i;
        const unsigned largest = largest_of(values);
        // float32's field of the exponent has E8M0's bias, and is 0 for zeros and subnormals.
        const int field = static_cast<int>(largest >> MANTISSA) - F::emax, scale = field > 0 ? field : 0;
        const float factor = power_of_two(BIAS - scale);
        const bool poisoned = largest >= INFINITE;
        unsigned long long codes = 0;
#pragma unroll
        for (int n = 0; n < N; ++n) codes |= static_cast<unsigned long long>(F::code_of(times(values[n], factor))) << (F::bits * n);
        if (poisoned) codes = 0;
        Pack<unsigned char, BYTES> bytes;
        memcpy(&bytes, &codes, BYTES);
        unsigned char* const to = elements + i * F::bits / 8;
        if (left > 0 && i % SHARING == 0) scales[i / SHARING] = static_cast<unsigned char>(poisoned ? POISON : scale);
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
        float values[AHEAD][N];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) read(values[k], i + k * step);
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) write(values[k], i + k * step);
    }
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

INLINE float factor_of(int scale) { return scale == POISON ? nan32() : power_of_two(scale - BIAS); }

// Codes of neighbouring elements; those from number `second` on belong to the next block.
struct Codes {
    unsigned long long codes;
    float factor, next_factor;
    int second;
};

template <typename F, typename T>
INLINE void decompress(const unsigned char* payload, long long size, long long parts, long long part_size, T* out) {
    __shared__ float values[1 << F::bits];  // of each code
    if (threadIdx.x < 1 << F::bits) values[threadIdx.x] = F::value_of(threadIdx.x);
    __syncthreads();
    const Layout<F> layout(size);
    const Part part = part_of(blockIdx.x, parts, part_size, size);
    const unsigned char* const scales = payload + layout.scale(part);
    const unsigned char* const elements = payload + layout.element(part);
    write_values(
        out + part.chunk * size + part.begin, part.count,
        [&](auto lanes, long long i) {
            constexpr int N = decltype(lanes)::value;
            const float factor = factor_of(scales[i / SHARING]), next_factor = factor_of(scales[(i + N - 1) / SHARING]);
            return Codes{codes_at<F::bits, N>(elements, i), factor, next_factor, static_cast<int>(SHARING - i % SHARING)};
        },
        [&](const Codes& some, int n) {
            const unsigned code = static_cast<unsigned>(some.codes >> (F::bits * n)) & ((1u << F::bits) - 1);
            return limited<T>(times(values[code], n < some.second ? some.factor : some.next_factor));
        });
}

#define INSTANCES(F, T, suffix)                                                                                               \
    KERNEL(compress_##F, suffix)(const T* __restrict__ x, long long size, long long parts, long long part_size,               \
                                 unsigned char* payload) {                                                                    \
        compress<F>(x, size, parts, part_size, payload);                                                                      \
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
