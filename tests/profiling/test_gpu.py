"""A step profiled on a GPU: launched kernel by kernel, and as a replayed graph."""

from __future__ import annotations

import pytest
import torch

from fuseline.models.gpt import GPT, preset
from fuseline.profiling import profile_step
from fuseline.profiling.profile import WAITING
from fuseline.training.optimizer import make_optimizer
from fuseline.training.step import TrainStep

BATCH, LENGTH, LAYERS, WIDTH = 4, 128, 4, 192


@pytest.mark.gpu
@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_a_training_step_is_explained_kernel_by_kernel(execution: str):
    with torch.device("cuda"):
        model = GPT(preset("tiny", norm="torch", loss="logits", vocab_size=1024))
    optimizer = make_optimizer(model, lr=1e-3, fused=True, capturable=execution == "graph")
    tokens = torch.randint(1024, (BATCH, LENGTH), device="cuda")

    def made(how: str) -> TrainStep:
        return TrainStep(model, optimizer, precision="bf16", execution=how)

    step, launched = made(execution), made("eager")
    profile = profile_step(
        lambda: step((tokens, tokens)),
        model=model,
        optimizer=optimizer,
        unrecorded=None if execution == "eager" else lambda: launched((tokens, tokens)),
        name_modules=True,
        precision="bf16",
    )
    rows = {row.kind: row for row in profile.by_kind()}
    assert {"products", "attention", "norms", "optimizer"} <= set(rows)
    assert sum(row.ms for kind, row in rows.items() if kind != WAITING) == pytest.approx(
        profile.busy_ms, rel=0.1
    )
    assert profile.busy_ms <= 1.05 * profile.step_ms.median
    named = [e for e in profile.entries if e.op]
    assert len(named) > 0.9 * len(profile.entries)
    # Each block's linear layers, forward and twice backward, and the head; the embedding is its transpose.
    tokens_a_step = BATCH * LENGTH
    blocks = 3 * 2 * tokens_a_step * LAYERS * 12 * WIDTH**2
    head = 3 * 2 * tokens_a_step * 1024 * WIDTH
    assert rows["products"].flops == pytest.approx(blocks + head, rel=0.02)
    assert profile.memory is not None
    assert profile.memory.by_kind()["parameters"] >= 4 * model.num_parameters()
    assert any(e.place.startswith("transformer.h.") for e in profile.entries)
    assert {"forward", "backward", "optimizer"} <= {e.part for e in profile.entries}
