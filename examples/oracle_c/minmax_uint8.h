/* MinMaxUInt8: one byte for each number, between its chunk's minimum and maximum (S4). */
#ifndef MINMAX_UINT8_H
#define MINMAX_UINT8_H

#include <stddef.h>

#include "floats.h"

/* Bytes of the block of a chunk of so many numbers (S4.1). */
size_t block_size(size_t count);

void compress_chunk(dtype type, const unsigned char *x, size_t count, unsigned char *block);

void decompress_chunk(dtype type, const unsigned char *block, size_t count, unsigned char *x);

#endif
