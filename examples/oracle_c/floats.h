/* Numbers of the three dtypes that MinMaxUInt8 knows, as float, which is what all of them are computed in (S1). */
#ifndef FLOATS_H
#define FLOATS_H

#include <stddef.h>

typedef enum { FLOAT32, FLOAT16, BFLOAT16 } dtype;

size_t item_size(dtype type);

/* Return the number at this place, in little-endian bytes. */
float load(dtype type, const unsigned char *place);

/* Round to nearest-even and store; what is beyond the range becomes an infinity. */
void store(dtype type, unsigned char *place, float value);

/* The same, but beyond the range lies the largest finite number, with its sign (S4.3). */
void store_saturated(dtype type, unsigned char *place, float value);

/* Store the NaN that S4.4 wants. */
void store_nan(dtype type, unsigned char *place);

#endif
