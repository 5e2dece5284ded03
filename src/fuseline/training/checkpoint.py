"""Checkpoints: all that a run needs to go on as if it had never stopped, in one file that is whole or absent.

`latest.pt` holds weights, optimizer, scaler, random numbers, the data position and the configuration.
`best.pt` holds the weights of the lowest validation loss and what describes the model. Both are read with
`weights_only`, so nothing a file contains is executed. Weights carry the plain model's names whether it was
trained compiled, distributed, or neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
from torch import nn

from fuseline.errors import InputError, first_line
from fuseline.files.schema import checked, checked_values
from fuseline.files.torch_files import check_tensors, load_torch
from fuseline.files.writing import write_atomically
from fuseline.models.gpt import GPT
from fuseline.models.gpt_config import GPTConfig, as_dict
from fuseline.training.checkpoint_schema import ConfigSaid, RunSaid, WeightsSaid
from fuseline.training.config import TrainConfig
from fuseline.training.random_state import RandomState

T = TypeVar("T")

LATEST, BEST = "latest.pt", "best.pt"

# What a file says that it is, by the verb that wrote it.
FORMATS = {"gpt": "fuseline training 1", "translate": "fuseline translation 1"}
WEIGHTS_FORMATS = {"gpt": "fuseline weights 1", "translate": "fuseline translation weights 1"}


@dataclass(frozen=True)
class Checkpoint:
    """A run between two steps.

    `step` counts optimizer steps taken, `position` micro-batches consumed by all processes together, and
    `random` has one state a process. `data` identifies corpus and tokenizer by their content.
    `average` and `best_bleu` are a translation run's.
    """

    step: int
    position: int
    config: dict[str, Any]
    model_config: dict[str, Any]
    data: dict[str, Any]
    model: dict[str, torch.Tensor]
    optimizer: dict[Any, Any]
    scaler: dict[str, Any]
    random: list[RandomState]
    best_validation_loss: float
    best_step: int
    seconds: float
    average: dict[str, torch.Tensor] = field(default_factory=dict)
    best_bleu: float = -math.inf


def save_checkpoint(path: Path, checkpoint: Checkpoint, kind: str = "gpt") -> None:
    """Write `checkpoint` of a run of `kind` to `path`, replacing the one before only when the new one is
    whole.

    Raises:
        InputError: it could not be written (a full disk, no permission). The one before stays as it was.
    """
    held = {f.name: getattr(checkpoint, f.name) for f in fields(Checkpoint)}
    _save(path, {"format": FORMATS[kind], **held})


def load_checkpoint(path: Path, kind: str = "gpt") -> Checkpoint:
    """Read a checkpoint, its tensors on the CPU. `InputError` if it is missing, damaged or foreign."""
    content = load_torch(path, whole=True)
    _check_kind(content, path, kind)
    said = checked_values(RunSaid, content, str(path))
    for weights in (said["model"], said.get("average", {})):
        check_tensors(weights, str(path))
    held: dict[str, Any] = {**said}
    return Checkpoint(**{f.name: held[f.name] for f in fields(Checkpoint) if f.name in held})


def peek_config(path: Path, kind: str) -> tuple[dict[str, Any], int]:
    """The configuration of a run of `kind`, as plain values, and its step; its tensors are not read. Raises
    as `load_checkpoint`."""
    content = load_torch(path, whole=False)
    _check_kind(content, path, kind)
    said = checked_values(ConfigSaid, content, str(path))
    return said["config"], said["step"]


def peek(path: Path) -> tuple[TrainConfig, int]:
    """A GPT checkpoint's configuration and step; its tensors are not read. Raises as `load_checkpoint`."""
    config, step = peek_config(path, "gpt")
    return settings_of(TrainConfig, config, path), step


def settings_of(kind: type[T], config: Mapping[str, Any], path: Path) -> T:
    """The configuration, of whatever `kind`, that a checkpoint at `path` holds as plain values."""
    return checked(kind, config, f"{path}: its configuration", extra="forbid")


def save_weights(path: Path, model: GPT, *, step: int, validation_loss: float) -> None:
    """Write a model's weights and shape to `path`, atomically. Raises as `save_checkpoint`."""
    write_weights(path, model, as_dict(model.config), "gpt", step=step, validation_loss=validation_loss)


def write_weights(
    path: Path, model: nn.Module, model_config: Mapping[str, Any], kind: str, **figures: float | None
) -> None:
    """Write the weights of a model of `kind` with its shape and `figures` that tell what they are."""
    state = {"model": model.state_dict(), "model_config": dict(model_config)}
    _save(path, {"format": WEIGHTS_FORMATS[kind], **state, **figures})


def read_weights(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The model's shape and weights of a `best.pt` or `latest.pt` of `kind`: of `latest.pt` the average of
    the weights, where one was kept. `InputError` if the file is missing, truncated or foreign."""
    content = load_torch(path, whole=True)
    if content.get("format") not in (FORMATS[kind], WEIGHTS_FORMATS[kind]):
        raise InputError(f"{path} holds no weights written by `fuseline train {kind}`.")
    said = checked_values(WeightsSaid, content, str(path))
    weights = said.get("average") or said["model"]
    check_tensors(weights, str(path))
    return said["model_config"], weights


def load_weights(path: Path, **options: Any) -> GPT:
    """The model of a `best.pt` or `latest.pt`, on the CPU, with `options` replacing fields of its config.

    Raises:
        InputError: the file is missing, truncated or foreign, or `options` ask for other shapes.
    """
    model_config, state = read_weights(path, "gpt")
    config = settings_of(GPTConfig, {**model_config, **options}, path)
    check_held(config.num_weights, state, path)
    model = GPT(config)
    load_model_state(model, state, path)
    return model


def check_held(weights: int, state: Mapping[str, torch.Tensor], path: Path) -> None:
    """`InputError` if `state` cannot hold so many weights: known before a model is made of that size."""
    held = sum(tensor.numel() for tensor in state.values())
    if weights > held:
        raise InputError(
            f"{path}: its configuration describes {weights:,} weights or more, and it holds {held:,}. It was "
            "damaged, or put together from two files."
        )


def peek_shape(path: Path) -> GPTConfig | None:
    """The shape of the GPT at `path`, if that is a file of ours; its tensors are not read."""
    content = load_torch(path, whole=False)
    if content.get("format") not in (FORMATS["gpt"], WEIGHTS_FORMATS["gpt"]):
        return None
    return settings_of(GPTConfig, checked_values(WeightsSaid, content, str(path))["model_config"], path)


def is_ours(path: Path, kind: str = "gpt") -> bool:
    """Whether the file at `path` holds a run or the weights of a model of `kind`."""
    return load_torch(path, whole=False).get("format") in (FORMATS[kind], WEIGHTS_FORMATS[kind])


def load_model_state(model: nn.Module, state: Mapping[str, torch.Tensor], source: Path) -> None:
    """Load weights into `model`, every name and shape checked. `source` is named if they do not fit."""
    own = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    theirs = {name: tuple(t.shape) for name, t in state.items()}
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            raise InputError(
                f"{source} does not fit the model: {name} is {theirs.get(name, 'missing')} in the file and "
                f"{own.get(name, 'unknown')} in the model. Take the sizes the file was trained with."
            )
    model.load_state_dict(state)


def _check_kind(content: Mapping[str, Any], path: Path, kind: str) -> None:
    if content.get("format") != FORMATS[kind]:
        hint = " To begin a new run from its weights give it to --init-from." if kind == "gpt" else ""
        raise InputError(f"{path} is not a checkpoint that `fuseline train {kind}` can resume.{hint}")


def _save(path: Path, content: Mapping[str, Any]) -> None:
    before = path.exists()
    try:
        write_atomically(path, lambda file: torch.save(dict(content), cast(IO[bytes], file)))
    except (OSError, RuntimeError) as error:
        # torch's writer turns a full disk into a RuntimeError of its own.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        mend = (
            "The checkpoint before it is untouched. Free some space (or move the folder), then resume."
            if before
            else "Nothing was written. Free some space, or give --out another disk."
        )
        raise InputError(f"Could not write {path}: {reason.rstrip('.')}. {mend}") from error
