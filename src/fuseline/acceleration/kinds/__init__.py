"""The kinds of module that Fuseline has an op for; a file each, with how to recognize it and what takes its
place."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fuseline.acceleration.kinds import (
    activation,
    embedding,
    feed_forward,
    norm,
    patch_embedding,
    residual_norm,
    rotary,
)
from fuseline.acceleration.recipe import Verdict
from fuseline.acceleration.trace import Trace

RECOGNIZERS: tuple[Callable[[Trace, nn.Module], Verdict], ...] = (
    embedding.recognize,
    residual_norm.recognize,
    norm.recognize,
    feed_forward.recognize,
    activation.recognize,
    rotary.recognize,
    patch_embedding.recognize,
)


def recognize(trace: Trace, module: nn.Module) -> Verdict:
    """What the first recognizer that knows the computation says of it; None if none does."""
    for recognizer in RECOGNIZERS:
        verdict = recognizer(trace, module)
        if verdict is not None:
            return verdict
    return None
