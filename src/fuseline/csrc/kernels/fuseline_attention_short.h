/* Attention over short sequences: whole (batch, head) problems on chip. The structs and what they mean stand in
 * fuseline_attention.h; out and lse of the backward's record are not read, so that a forward by any kernel
 * may go before. */
#ifndef FUSELINE_ATTENTION_SHORT_H
#define FUSELINE_ATTENTION_SHORT_H

#include "fuseline_attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether these kernels take the call: bf16, or fp16 where there is no Hopper, both lengths 1 .. 128, head dims 8 .. 128
 * by 8, a positive scale, no soft cap or sinks. Of packed sequences each has such lengths, there is no mask, and the device
 * is Hopper if one is longer than 64. `backward`: and its gradients. */
FUSELINE_API int fuseline_attention_short_fits(const fuseline_attention* call, int backward);

/* Bytes of scratch for workspace, of the call or its gradients; may be 0. Without it calls go slower, and gradients with
 * fewer key heads than heads are FUSELINE_UNSUPPORTED. */
FUSELINE_API size_t fuseline_attention_short_workspace(const fuseline_attention* call, int backward);

/* FUSELINE_UNSUPPORTED where they do not, where a pointer or stride is no multiple of 16 bytes, and where the gradient
 * of a mask or of sinks is wanted. */
FUSELINE_API int fuseline_attention_short_forward(const fuseline_attention* call, void* stream);
FUSELINE_API int fuseline_attention_short_backward(const fuseline_attention_gradients* gradients, void* stream);

#ifdef __cplusplus
}
#endif

#endif
