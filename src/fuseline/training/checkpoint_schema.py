"""What our own checkpoints say of themselves, checked as strictly as what others write: a file may have been
damaged, edited, or written by another version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, Optional, Union

import torch
from pydantic import Field
from typing_extensions import TypedDict

_TENSORS = {"arbitrary_types_allowed": True}

Count = Annotated[int, Field(ge=0, le=2**62)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Plain = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Moments = dict[str, Union[torch.Tensor, int, float]]


class RunSaid(TypedDict):
    """A run between two steps (`Checkpoint`). Losses may be infinite: nothing was validated yet."""

    __pydantic_config__ = _TENSORS  # type: ignore[misc]

    step: Count
    position: Count
    config: Plain
    model_config: Plain
    data: Plain
    model: Tensors
    optimizer: dict[Union[int, str], Moments]
    scaler: Plain
    random: Annotated[list[Tensors], Field(min_length=1)]
    best_validation_loss: float
    best_step: Count
    seconds: Seconds
    average: NotRequired[Tensors]
    best_bleu: NotRequired[float]


class EntrySaid(TypedDict):
    """A line of a run's metrics, of any kind; null stands for what was no number."""

    kind: Annotated[str, Field(max_length=40)]
    step: Count


class LossSaid(EntrySaid):
    """A step, or a validation. `seconds` of training had passed; earlier versions did not write it."""

    loss: Optional[float]
    seconds: NotRequired[Seconds]


class PaceSaid(LossSaid):
    tokens_per_s: Optional[float]
    mfu: Optional[float]
    peak_memory_gib: Optional[float]
    data_wait_share: Optional[float]


ENTRIES: Mapping[str, type] = {"step": LossSaid, "validation": LossSaid, "pace": PaceSaid}


class ConfigSaid(TypedDict):
    """What is looked at without reading the tensors."""

    step: Count
    config: Plain


class WeightsSaid(TypedDict):
    """Weights and the shape of their model."""

    __pydantic_config__ = _TENSORS  # type: ignore[misc]

    model_config: Plain
    model: Tensors
    average: NotRequired[Tensors]
