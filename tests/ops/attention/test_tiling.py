"""The columns that say which of our kernels takes a problem agree with the plan, on the GPU they are of."""

from __future__ import annotations

import random

import pytest
import torch

from fuseline import native
from fuseline.native.gpus import GPUS
from fuseline.ops.attention import tiling
from fuseline.ops.attention.features import sizes
from fuseline.ops.attention.problem import CAUSAL, Problem
from fuseline.ops.op import DTYPES
from fuseline.ops.plans import attention_plans

pytestmark = pytest.mark.skipif(not native.ready("cpu"), reason="the native core, which decides, is missing")

GPU = GPUS["h100"]
PROBLEMS = 5000


def drawn(draw: random.Random) -> Problem:
    longest = draw.choice([16, 64, 128, 2048])
    rows, keys = draw.randint(1, longest), draw.randint(1, longest)
    if draw.random() < 0.3:
        rows, keys = draw.randint(1, 20), draw.randint(400, 20000)
    heads, sequences = draw.choice([4, 12, 16]), draw.choice([0, 0, 0, 5])
    mask = "none" if draw.random() < 0.5 else draw.choice(["bool", "float", "float_grad"])
    return Problem(
        torch.device("cuda"),
        draw.choice(DTYPES),
        1 if sequences else draw.choice([1, 8, 64]),
        heads,
        draw.choice([heads, 4, 1]),
        rows * max(1, sequences),
        keys * max(1, sequences),
        8 * draw.randint(1, 32),
        direction=draw.choice(["fw", "fwbw"]),
        causal=draw.choice(CAUSAL),
        window_left=draw.choice([-1, -1, 100]),
        mask=mask,
        mask_dims="".join(name for name in "bhts" if mask != "none" and draw.random() < 0.6),
        sequences=sequences,
        max_seqlen_q=rows if sequences else 0,
        max_seqlen_k=keys if sequences else 0,
        soft_cap=draw.random() < 0.1,
        sinks=draw.random() < 0.1,
        dropout_p=draw.choice([0.0, 0.0, 0.1]),
    )


def test_columns_name_the_kernels_that_the_plan_names() -> None:
    draw = random.Random(0)
    seen = {"short": 0, "packed": 0, "split": 0, "panels": 0}
    for _ in range(PROBLEMS):
        problem = drawn(draw)
        forward, backward = (
            attention_plans(problem, GPU, work)[0].kernel for work in ("forward", "backward")
        )
        is_short = forward.startswith("short_"), backward.startswith("short_")
        of = sizes(problem)
        whole, packed, split, panels = (
            bool(columns[0])
            for columns in (
                tiling._short(problem, of),
                tiling._packed(problem, of),
                tiling._split(problem, of),
                tiling._panels(problem, of),
            )
        )
        both = is_short[0] and (is_short[1] or not problem.wants_grad)
        assert whole == (both and not problem.sequences), problem
        assert packed == (problem.sequences > 0 and is_short[problem.wants_grad]), problem
        assert split == (forward == "attention_split"), problem
        if forward == "attention_forward_panels":
            assert panels, problem
        for name, one in (("short", whole), ("packed", packed), ("split", split), ("panels", panels)):
            seen[name] += one
    assert min(seen.values()) > 30, seen


def test_splits_are_the_plans() -> None:
    """The blocks of a split are those of its first launch."""
    draw = random.Random(1)
    for _ in range(PROBLEMS):
        problem = drawn(draw)
        of = sizes(problem)
        plan = attention_plans(problem, GPU, "forward")[0]
        if plan.kernel == "attention_split":
            _, _, blocks, _, splits = tiling._split_sizes(problem, of)
            assert plan.blocks == blocks * splits, problem
