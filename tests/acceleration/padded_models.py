"""Batches of any length, a model that heeds or ignores its mask, and recordings that a CPU can replay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from fuseline.acceleration import training_step
from fuseline.acceleration.forms import KERNELS, Form
from fuseline.acceleration.learning_rates import LearningRates
from fuseline.acceleration.recording import CallGraph, StepGraph, check_outputs, copied
from fuseline.acceleration.training_step import TrainingStep

VOCABULARY, WIDTH = 50, 16
ATTENTION = F.scaled_dot_product_attention


class Reader(nn.Module):
    """One layer of attention in both directions, and a loss for each token. Each option is a trap."""

    def __init__(
        self,
        *,
        heeds: bool = True,
        pools: bool = False,
        statistics: bool = False,
        ignored: int = -100,
        per_position: bool = False,
        embeds_labels: bool = False,
        positions: int = 512,
        p: float = 0.0,
        always_drops: bool = False,
    ) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(positions, WIDTH)
        self.kinds, self.mix = nn.Embedding(2, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if statistics else nn.LayerNorm(WIDTH)
        self.drop, self.head = nn.Dropout(p), nn.Linear(WIDTH, VOCABULARY)
        self.heeds, self.pools, self.ignored, self.per_position = heeds, pools, ignored, per_position
        self.embeds_labels, self.always_drops = embeds_labels, always_drops

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> dict[str, torch.Tensor]:
        B, T = input_ids.shape
        places = torch.arange(T, device=input_ids.device) if position_ids is None else position_ids
        x = self.table(input_ids) + self.places(places)
        if token_type_ids is not None:
            x = x + self.kinds(token_type_ids)
        if self.embeds_labels and labels is not None:
            x = x + self.table(labels)
        x = self.norm(x.flatten(0, 1)).view(B, T, WIDTH)
        x = self.drop(F.dropout(x, 0.1) if self.always_drops else x)
        seen = attention_mask[:, None, None].bool().expand(B, 1, T, T) if self.heeds else None
        x = x + self.mix(ATTENTION(x[:, None], x[:, None], x[:, None], attn_mask=seen)[:, 0])
        if self.pools:
            x = x + x.mean(1, keepdim=True)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        if labels.dim() == 1:
            first = logits[:, 0] + (x.mean(1) if self.pools else x[:, 0]).sum(-1, keepdim=True)
            return {"loss": F.cross_entropy(first, labels), "logits": logits}
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(),
            labels.flatten(),
            ignore_index=self.ignored,
            reduction="sum" if self.per_position else "mean",
        )
        return {"loss": loss / labels.numel() if self.per_position else loss, "logits": logits}


def batch_of(length: int, rows: int = 3, *, left: bool = False, full: bool = False) -> dict[str, Any]:
    """A batch as a collator makes it: rows of different lengths, and labels of -100 where they are padded."""
    tokens = torch.randint(1, VOCABULARY, (rows, length))
    mask = torch.ones_like(tokens)
    for row in () if full else range(1, rows):
        hidden = min(length - 2, 1 + row * length // 8)
        mask[row, slice(None, hidden) if left else slice(length - hidden, None)] = 0
    hides = mask == 0
    return {
        "input_ids": tokens.masked_fill(hides, 0),
        "attention_mask": mask,
        "labels": tokens.masked_fill(hides, -100),
    }


class Rerun:
    """Stands in for a CUDA graph: a replay computes all of it again."""

    def __init__(self, run: Callable[[], Any], kept: Any) -> None:
        self._run, self._kept = run, kept

    def replay(self) -> None:
        for kept, fresh in zip(pytree.tree_leaves(self._kept), pytree.tree_leaves(self._run()), strict=True):
            if isinstance(kept, torch.Tensor):
                kept.copy_(fresh)


@contextlib.contextmanager
def recorded_on_a_cpu() -> Any:
    """Within, steps and calls are recorded as on a GPU. Yields the lengths of all that were, in order."""
    made: list[int] = []

    def record_step(self: StepGraph, batches: Any, memory: Any) -> Any:
        made.append(max(batch["attention_mask"].shape[1] for batch in batches))
        static, loss = copied(batches, torch.device("cpu")), torch.zeros(())
        before = [parameter.detach().clone() for parameter in self._module.parameters()]
        if not self._optimizer.state:  # it comes into being while a recording warms up
            self._run(static)
            for value in self._kept_by_optimizer():
                value.zero_()
        with torch.no_grad():
            for parameter, value in zip(self._module.parameters(), before, strict=True):
                parameter.copy_(value)
        return Rerun(lambda: self._run(static), loss), static, loss

    def record_call(self: CallGraph, call: Any, memory: Any) -> Any:
        static = copied(call, torch.device("cpu"))
        outputs = self._run(static)
        check_outputs(outputs)
        made.append(call[1]["attention_mask"].shape[1])
        return Rerun(lambda: self._run(static), outputs), static, outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraph, "_record", record_step)
        patch.setattr(CallGraph, "_record", record_call)
        patch.setattr(training_step, "_why_eager", lambda *_: "")
        patch.setattr(LearningRates, "_make_capturable", lambda _: None)  # no optimizer is, on a CPU
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield made


def make_step(model: nn.Module, precision: str = "fp32", **options: Any) -> TrainingStep:
    plain = Form(KERNELS, contextlib.nullcontext)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return TrainingStep(model, lambda _: [plain], optimizer, precision=precision, grad_clip=0.0, **options)
