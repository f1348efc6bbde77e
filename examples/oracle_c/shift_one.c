#include "shift_one.h"

int64_t shift_one_peer(int64_t rank, int64_t nranks, int64_t step) {
    int64_t half = nranks / 2;
    if (rank < half) return (step + rank) % half + half;
    int64_t place = (rank - half - step) % half; /* C's remainder has the sign of the dividend */
    return place < 0 ? place + half : place;
}
