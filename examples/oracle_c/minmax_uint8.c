#include "oracle.h"

#include <math.h>
#include <string.h>

enum { HEADER = 32 };

typedef struct {
    float scale, upper, lower;
} grid;

/* S4.2. Compile with -ffp-contract=off: every operation rounds by itself. */
static grid grid_between(float min, float max) {
    grid g;
    g.scale = 255.0f / ((max - min) + 1e-7f);
    g.upper = rintf(max * g.scale);
    g.lower = g.upper - 255.0f;
    return g;
}

size_t block_size(size_t count) { return HEADER + (count + 31) / 32 * 32; }

void compress_chunk(dtype type, const unsigned char *x, size_t count, unsigned char *block) {
    size_t item = item_size(type);
    memset(block, 0, block_size(count));
    if (count == 0) return; /* the header is 0, 0 */
    float min = INFINITY, max = -INFINITY;
    bool finite = true;
    for (size_t i = 0; i < count; i++) {
        float value = load(type, x + i * item);
        finite = finite && isfinite(value);
        if (value < min) min = value;
        if (value > max) max = value;
    }
    min += 0.0f; /* -0 is written as +0 */
    max += 0.0f;
    grid g = grid_between(min, max);
    if (!finite || !isfinite(max - min) || !isfinite(max * g.scale) || !isfinite(min * g.scale)) { /* poisoned, S4.4 */
        store_nan(type, block);
        store_nan(type, block + item);
        return;
    }
    store(type, block, min);
    store(type, block + item, max);
    for (size_t i = 0; i < count; i++) {
        float level = fminf(rintf(load(type, x + i * item) * g.scale), g.upper) - g.lower;
        block[HEADER + i] = (unsigned char)fminf(fmaxf(level, 0.0f), 255.0f);
    }
}

void decompress_chunk(dtype type, const unsigned char *block, size_t count, unsigned char *x) {
    size_t item = item_size(type);
    float min = load(type, block), max = load(type, block + item);
    grid g = grid_between(min, max);
    for (size_t i = 0; i < count; i++) {
        if (isnan(min) || isnan(max))
            store_nan(type, x + i * item);
        else
            store_saturated(type, x + i * item, ((float)block[HEADER + i] + g.lower) / g.scale);
    }
}
