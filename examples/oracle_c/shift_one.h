/* Who averages with whom (S3.4). */
#ifndef SHIFT_ONE_H
#define SHIFT_ONE_H

#include <stdint.h>

int64_t shift_one_peer(int64_t rank, int64_t nranks, int64_t step);

#endif
