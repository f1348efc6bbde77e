// Copies of tensors into a flat one and back (S2.3), bits only; and the integers that sort as floats do (S7.2).
#include "vector.cuh"

constexpr int SEGMENTS = 128;  // per launch: they are passed as an argument, which is limited to 4 KiB
constexpr int RANK = 8;

// Contiguous tensors and their offsets. Work is split into pieces of `piece` bytes, numbered across all segments.
struct Segments {
    unsigned char* there[SEGMENTS];
    long long start[SEGMENTS];        // in the flat tensor, in bytes
    long long bytes[SEGMENTS];
    int first_piece[SEGMENTS];
    int count, pieces;
    long long piece;
};

INLINE void copy_bytes(unsigned char* to, const unsigned char* from, long long bytes) {
    spread<16, 4>(
        to, bytes, threadIdx.x, blockDim.x,
        [&](auto batch, long long i, long long step) {
            constexpr int K = decltype(batch)::value;
            Pack<unsigned char, 16> packs[K];
#pragma unroll
            for (int k = 0; k < K; ++k) load(packs[k], from + i + k * step);
#pragma unroll
            for (int k = 0; k < K; ++k) store(to + i + k * step, packs[k]);
        },
        [&](long long i) { to[i] = from[i]; });
}

template <bool GATHER> INLINE void copy_segments(unsigned char* flat, const Segments& segments) {
    for (long long piece = blockIdx.x; piece < segments.pieces; piece += gridDim.x) {
        int low = 0, high = segments.count;  // the last segment that begins at or before this piece
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (segments.first_piece[middle] <= piece) low = middle;
            else high = middle;
        }
        const long long begin = (piece - segments.first_piece[low]) * segments.piece, left = segments.bytes[low] - begin;
        unsigned char* const here = flat + segments.start[low] + begin;
        unsigned char* const there = segments.there[low] + begin;
        copy_bytes(GATHER ? here : there, GATHER ? there : here, left < segments.piece ? left : segments.piece);
    }
}

extern "C" __global__ void BOUNDS gather_segments(unsigned char* flat, const __grid_constant__ Segments segments) {
    copy_segments<true>(flat, segments);
}

extern "C" __global__ void BOUNDS scatter_segments(unsigned char* flat, const __grid_constant__ Segments segments) {
    copy_segments<false>(flat, segments);
}

// A tensor with gaps or in another order: the address of element i follows from its coordinates and the strides (in elements).
struct Strided {
    long long count;
    long long size[RANK], stride[RANK];
    int rank;
};

template <typename Index> INLINE long long place_of(Index i, const Strided& shape) {
    long long place = 0;
    for (int axis = shape.rank - 1; axis > 0; --axis) {
        const Index size = static_cast<Index>(shape.size[axis]), row = i / size;
        place += static_cast<long long>(i - row * size) * shape.stride[axis];
        i = row;
    }
    return place + static_cast<long long>(i) * shape.stride[0];
}

template <bool GATHER, typename E> INLINE void copy_strided(E* flat, E* there, const Strided& shape) {
    const bool small = shape.count <= 0x7FFFFFFF;  // 64-bit division is slow
    for (long long i = thread_of_grid(); i < shape.count; i += threads_of_grid()) {
        E* const place = there + (small ? place_of(static_cast<unsigned>(i), shape) : place_of(i, shape));
        if (GATHER) flat[i] = *place;
        else *place = flat[i];
    }
}

#define STRIDED(E, suffix)                                                                                              \
    extern "C" __global__ void BOUNDS                                                                 \
        gather_strided_##suffix(E* flat, E* there, const __grid_constant__ Strided shape) {                             \
        copy_strided<true>(flat, there, shape);                                                                         \
    }                                                                                                                   \
    extern "C" __global__ void BOUNDS                                                                 \
        scatter_strided_##suffix(E* flat, E* there, const __grid_constant__ Strided shape) {                            \
        copy_strided<false>(flat, there, shape);                                                                        \
    }

STRIDED(unsigned char, 1)
STRIDED(unsigned short, 2)
STRIDED(unsigned, 4)
STRIDED(unsigned long long, 8)
using TwoWords = Pack<unsigned long long, 2>;
STRIDED(TwoWords, 16)

// Integers in the order of the floats with these bits: -0 counts as +0, and NaN of either sign is last (S7.2).
template <typename Bits> INLINE Bits key_of(Bits bits, Bits infinity) {
    constexpr Bits magnitude = static_cast<Bits>(~(Bits(1) << (8 * sizeof(Bits) - 1)));
    if ((bits & magnitude) > infinity) return magnitude;
    if ((bits & magnitude) == 0) return 0;
    return bits < 0 ? static_cast<Bits>(bits ^ magnitude) : bits;
}

#define ORDER(Bits, infinity, suffix)                                                                                    \
    extern "C" __global__ void BOUNDS                                                                  \
        order_keys_##suffix(const Bits* __restrict__ bits, long long count, Bits* keys) {                                \
        for (long long i = thread_of_grid(); i < count; i += threads_of_grid()) keys[i] = key_of<Bits>(bits[i], infinity); \
    }

ORDER(short, 0x7C00, float16)
ORDER(short, 0x7F80, bfloat16)
ORDER(int, 0x7F800000, float32)
ORDER(long long, 0x7FF0000000000000ll, float64)
