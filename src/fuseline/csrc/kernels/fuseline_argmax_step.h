/* The end of a decoding step that takes the most likely token: what it leaves for the next step, in one launch. */
#ifndef FUSELINE_ARGMAX_STEP_H
#define FUSELINE_ARGMAX_STEP_H

#include "fuseline_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FUSELINE_MOST_LOGITS = 1 << 30 }; /* of a row */

/* tokens[b] = the index of the largest of n logits of row b, and lengths[b] += 1, for b < rows.
 *
 * logits: rows of n of dtype, `stride` elements apart, each of unit stride. Of equal ones the first counts, zeros of
 * either sign being equal; NaN is larger than all others, and the first of them counts. n is 1 or more. tokens, lengths:
 * [rows]. */
FUSELINE_API int fuseline_argmax_step(const void* logits, int64_t* tokens, int64_t* lengths, int64_t rows, int64_t n,
                                     int64_t stride, int dtype, void* stream);

#ifdef __cplusplus
}
#endif

#endif
