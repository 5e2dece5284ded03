"""Every preset's training step under the profiler: our kernels beside torch's own, by kind of work.

A kernel that is fast alone may be slow in the dtypes and shapes that a step gives it.
"""

from __future__ import annotations

import gc

import pytest
import torch

from fuseline.cli.profile_asked import Asked
from fuseline.cli.profile_targets import SHAPES, ready
from fuseline.profiling import Profile, profile_step
from fuseline.profiling.ceilings import Ceilings
from fuseline.profiling.profile import Row

# Kinds between which work moves when kernels are fused: GELU goes into products, casts and sums into norms.
TOGETHER = {
    "attention": ("attention",),
    "optimizer": ("optimizer",),
    "norms and what is fused with them": ("norms", "pointwise", "copies and casts"),
    "all but attention and the optimizer": (
        *("products", "loss", "norms", "pointwise", "copies and casts", "other"),
    ),
}
NOISE = 1.05
LEAST_MS = 0.05  # of a step: what is less is noise


def slower(ours: list[Row], torchs: list[Row]) -> list[str]:
    """The groups in which our kernels take longer than torch's, beyond the intervals of both."""
    found = []
    for name, kinds in TOGETHER.items():
        ms = sum(row.low for row in ours if row.kind in kinds)
        theirs = sum(row.high for row in torchs if row.kind in kinds)
        if ms > NOISE * theirs + LEAST_MS:
            found.append(f"{name}: {ms:.2f} ms, torch's {theirs:.2f}")
    return found


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("preset", SHAPES)
def test_no_kind_of_work_is_slower_by_our_kernels_than_by_torchs(preset: str):
    rows = {}
    for kernels, loss in (("fuseline", "fuseline-linear"), ("torch", "logits")):
        rows[kernels] = profiled(preset, kernels, loss).by_kind()
        gc.collect()
        torch.cuda.empty_cache()
    assert slower(rows["fuseline"], rows["torch"]) == []


def profiled(preset: str, kernels: str, loss: str) -> Profile:
    attention = "pick" if kernels == "fuseline" else "auto"
    options = {"kernels": kernels, "attention": attention, "loss": loss}
    made = ready(Asked(preset, torch.device("cuda"), precision="bf16", **options))
    try:
        return profile_step(
            made.step, "cuda", model=made.model, ceilings=Ceilings(4000.0, {"bf16": 800.0}), memory=False
        )
    finally:
        made.close()


def test_a_group_that_is_slower_beyond_the_noise_is_named():
    def row(kind: str, ms: float) -> Row:
        return Row(kind, kind, 1, ms, 0.98 * ms, 1.02 * ms, 0.1)

    torchs = [row("norms", 10.0), row("attention", 5.0), row("products", 40.0), row("pointwise", 8.0)]
    fused = [row("norms", 12.0), row("attention", 5.2), row("products", 43.0)]
    assert slower(fused, torchs) == []  # what left the pointwise kernels is in the others
    slow = [row("norms", 10.0), row("attention", 7.0), row("products", 40.0), row("pointwise", 8.0)]
    assert slower(slow, torchs) == ["attention: 6.86 ms, torch's 5.10"]
    heavy = [row("norms", 33.0), row("attention", 5.0), row("products", 40.0)]
    assert [found.split(":")[0] for found in slower(heavy, torchs)] == [
        "norms and what is fused with them",
        "all but attention and the optimizer",
    ]
