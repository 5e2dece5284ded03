/* The norms' forward of many rows, long ones or at odd addresses, which takes scratch. Part of fuseline_kernels.h in all but name. */
#ifndef FUSELINE_LONG_NORMS_H
#define FUSELINE_LONG_NORMS_H

#include "fuseline_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of scratch with which fuseline_norm_forward is faster on the current device for the same struct; 0: it takes none. */
FUSELINE_API size_t fuseline_norm_forward_workspace(const fuseline_norm* norm);

/* fuseline_norm_forward. workspace: 16-byte aligned, uninitialized; null for none. */
FUSELINE_API int fuseline_norm_forward_with(const fuseline_norm* norm, void* workspace, void* stream);

#ifdef __cplusplus
}
#endif

#endif
