"""FLOPs of a transformer's training step and the share of the peak they reach (MFU)."""

from __future__ import annotations

import re

# Dense tensor-core peaks in TFLOP/s (vendors' datasheets, no sparsity). TF32 is half of bf16 and
# fp32 is the plain-core rate. A GPU not listed has no MFU.
_PEAKS: dict[str, dict[str, float]] = {
    r"A100": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
    r"H100 PCIe": {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51},
    r"H100(?! (NVL|PCIe))": {"bf16": 989, "fp16": 989, "tf32": 494.5, "fp32": 67},
    r"H200(?! NVL)": {"bf16": 989, "fp16": 989, "tf32": 494.5, "fp32": 67},
    r"B200": {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75},
}

CONVENTIONS = {"mfu": 12, "mfu_causal": 6}


def flops_per_token(
    parameters: int, layers: int, embed_dim: int, seqlen: int, convention: str = "mfu"
) -> int:
    """Forward and backward FLOPs a token: `6N + 12 L C T` (`mfu`, as PaLM appendix B and nanoGPT count),
    or `6N + 6 L C T` (`mfu_causal`: only the half of the attention that a causal mask leaves).

    `parameters` leaves out the position embedding, as nanoGPT does.
    """
    return 6 * parameters + CONVENTIONS[convention] * layers * embed_dim * seqlen


def peak_flops(device_name: str, precision: str = "bf16") -> float | None:
    """Dense peak in FLOP/s, or None for a GPU (or a processor) whose peak is not known."""
    for pattern, peaks in _PEAKS.items():
        if re.search(pattern, device_name):
            return peaks[precision] * 1e12
    return None


def mfu(flops_per_second: float, device_name: str, precision: str = "bf16") -> float | None:
    """Model FLOP utilization in 0..1, or None where the peak is not known.

    By default it is the share of the bf16 peak, whatever the precision of the run. That is nanoGPT's
    convention, and it makes the ladder's rungs comparable.
    """
    peak = peak_flops(device_name, precision)
    return None if peak is None else flops_per_second / peak
