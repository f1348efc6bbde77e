#include "oracle.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "float arithmetic must round to float after each operation: on x86 compile with -mfpmath=sse"
#endif

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

size_t item_size(dtype type) { return type == FLOAT32 ? 4 : 2; }

static float float_of_half(uint32_t half) {
    uint32_t sign = (half & 0x8000) << 16, exponent = half >> 10 & 0x1F, fraction = half & 0x3FF;
    if (exponent == 0x1F) return float_of(sign | 0x7F800000 | fraction << 13);
    if (exponent == 0) {
        float value = (float)fraction * 0x1p-24f; /* denormal: exact */
        return sign ? -value : value;
    }
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

static uint32_t half_of_float(float value) {
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return 0x7E00;                              /* NaN */
    if (magnitude >= 0x47800000) return sign | 0x7C00;                      /* 65536 and above */
    if (magnitude < 0x38800000)                                             /* denormal: a multiple of 2^-24 */
        return sign | (uint32_t)rintf(float_of(magnitude) * 0x1p24f);
    magnitude += 0xFFF + (magnitude >> 13 & 1);                             /* may carry, up to infinity */
    return sign | (magnitude - 0x38000000) >> 13;
}

static uint32_t bfloat_of_float(float value) {
    uint32_t bits = bits_of(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

float load(dtype type, const unsigned char *place) {
    uint32_t low = (uint32_t)place[0] | (uint32_t)place[1] << 8;
    if (type == FLOAT32) return float_of(low | (uint32_t)place[2] << 16 | (uint32_t)place[3] << 24);
    return type == BFLOAT16 ? float_of(low << 16) : float_of_half(low);
}

static void store_bits(dtype type, unsigned char *place, uint32_t bits) {
    for (size_t i = 0; i < item_size(type); i++) place[i] = (unsigned char)(bits >> (8 * i));
}

void store(dtype type, unsigned char *place, float value) {
    store_bits(type, place, type == FLOAT32 ? bits_of(value) : type == BFLOAT16 ? bfloat_of_float(value) : half_of_float(value));
}

void store_saturated(dtype type, unsigned char *place, float value) {
    static const uint32_t largest[] = {[FLOAT32] = 0x7F7FFFFF, [FLOAT16] = 0x7BFF, [BFLOAT16] = 0x7F7F};
    static const uint32_t sign[] = {[FLOAT32] = 0x80000000, [FLOAT16] = 0x8000, [BFLOAT16] = 0x8000};
    store(type, place, value);
    if (isinf(load(type, place))) store_bits(type, place, largest[type] | (value < 0 ? sign[type] : 0));
}

void store_nan(dtype type, unsigned char *place) {
    static const uint32_t nan[] = {[FLOAT32] = 0x7FC00000, [FLOAT16] = 0x7E00, [BFLOAT16] = 0x7FC0};
    store_bits(type, place, nan[type]);
}
