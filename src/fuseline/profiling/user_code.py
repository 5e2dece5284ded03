"""A model of the user's own: `MODULE:FUNCTION`, a function that returns `(model, batch)` or `(model, batch,
loss_fn)`.

`batch` is a tensor, a tuple of tensors, or a dict of them: `model(batch)`, `model(*batch)` or
`model(**batch)`. `loss_fn(model, batch)` returns the loss; without it the loss is what the model returns, or
the `loss` in that.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fuseline.errors import InputError, first_line

LossFn = Callable[[nn.Module, Any], torch.Tensor]
WANTED = "It should return (model, batch) or (model, batch, loss_fn)"


@dataclass(frozen=True)
class Work:
    """A model with a batch for it. `tensors` are the tensors of the batch in order, `names` their names if
    the batch is a dict, and `rest` its other entries."""

    model: nn.Module
    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...] = ()
    rest: Mapping[str, Any] | None = None
    loss_fn: LossFn | None = None
    alone: bool = False

    def to(self, device: torch.device) -> Work:
        """The same on `device`."""
        moved = tuple(tensor.to(device) for tensor in self.tensors)
        return Work(self.model.to(device), moved, self.names, self.rest, self.loss_fn, self.alone)

    def batch(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The batch in the form in which it was given, made of `tensors`."""
        if self.rest is not None:
            return {**self.rest, **dict(zip(self.names, tensors, strict=True))}
        return tensors[0] if self.alone else tuple(tensors)

    def output(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
        """What the model makes of the batch."""
        batch = self.batch(tensors)
        if isinstance(batch, dict):
            return module(**batch)
        return module(batch) if self.alone else module(*batch)

    def loss(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The scalar loss. Raises `InputError` where there is none."""
        if self.loss_fn is not None:
            found = _called(self.loss_fn, module, self.batch(tensors))
            if not isinstance(found, torch.Tensor) or found.numel() != 1:
                raise InputError(f"loss_fn returned {_described(found)}; a loss is a tensor of one element.")
            return found
        return loss_in(self.output(module, tensors))


class WithLoss(nn.Module):
    """The model and its loss as one module: called with the batch's tensors, it returns the loss."""

    def __init__(self, work: Work, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.__dict__["work"] = work  # not a part of this module: it holds the model as it came

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        work: Work = self.__dict__["work"]
        return work.loss(self.model, tensors)

    def called(self, tensors: Sequence[torch.Tensor]) -> tuple[nn.Module, Any]:
        """What a training step calls, and with what: this module where there is a `loss_fn`; a model that
        returns its loss is called with its batch, as it came."""
        work: Work = self.__dict__["work"]
        if work.loss_fn is not None:
            return self, tuple(tensors)
        return self.model, work.batch(tensors)


def _called(loss_fn: LossFn, module: nn.Module, batch: Any) -> Any:
    """What `loss_fn` returns. If it takes the model for its output, the error says how it is called."""
    try:
        return loss_fn(module, batch)
    except (TypeError, AttributeError) as error:
        if type(module).__name__ not in str(error):
            raise
        raise InputError(
            f"loss_fn fails: {type(error).__name__}: {first_line(error)}. It is called as loss_fn(model, "
            "batch), so call the model in it: loss_fn = lambda model, batch: loss_of(model(**batch))."
        ) from error


def loss_in(output: Any) -> torch.Tensor:
    """The loss that a model returned: a scalar, the `loss` of its output, or the first scalar in that."""
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, (tuple, list)) and output:
        candidates += output  # (loss, logits), or (logits, loss) as nanoGPT has it
    for found in candidates:
        if isinstance(found, torch.Tensor) and found.numel() == 1 and found.requires_grad:
            return found
    raise InputError(
        f"The model returned {_described(output)}, and no loss. Give labels in the batch, return (model, "
        "batch, loss_fn) with loss_fn(model, batch) the loss. `fuseline profile --forward` needs none."
    )


def load(target: str) -> Work:
    """Call the function that `target` names, `package.module:function` or `path/to/file.py:function`. Raises
    `InputError` for what cannot be found and for what it should not return."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise InputError(f"{target!r} names no function. Write MODULE:FUNCTION, like my_model:make.")
    module = _module(where)
    function = getattr(module, name, None)
    if function is None:
        raise InputError(f"{where} has no function named {name!r}. {WANTED.replace('It', 'The function')}.")
    if not callable(function):
        raise InputError(
            f"{target} is {_described(function)}, not a function. {WANTED.replace('It', 'A function')}."
        )
    return made(function(), target)


def made(returned: Any, target: str) -> Work:
    """What the function returned, as work. Raises `InputError` for what is none."""
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        raise InputError(f"{target} returned {_described(returned)}. {WANTED}.")
    model, batch = returned[0], returned[1]
    loss_fn = returned[2] if len(returned) == 3 else None
    if not isinstance(model, nn.Module):
        raise InputError(f"{target} returned {_described(model)} where the model should be. {WANTED}.")
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(
            f"{target} returned {_described(loss_fn)} as loss_fn, which is called as loss_fn(model, batch)."
        )
    if isinstance(batch, torch.Tensor):
        return Work(model, (batch,), loss_fn=loss_fn, alone=True)
    if isinstance(batch, (tuple, list)) and batch and all(isinstance(t, torch.Tensor) for t in batch):
        return Work(model, tuple(batch), loss_fn=loss_fn)
    if isinstance(batch, Mapping):  # also what a Hugging Face tokenizer returns
        names = tuple(name for name, value in batch.items() if isinstance(value, torch.Tensor))
        rest = {name: value for name, value in batch.items() if name not in names}
        if names:
            return Work(model, tuple(batch[name] for name in names), names, rest, loss_fn)
    raise InputError(
        f"{target} returned {_described(batch)} as the batch, which is a tensor, a tuple of tensors, or a "
        "dict of the model's arguments."
    )


def _module(where: str) -> ModuleType:
    """A module by its name, found from the current folder as well, or by its file."""
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise InputError(f"There is no file {path}.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        sys.path.insert(0, str(path.resolve().parent))
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            raise InputError(f"Importing {path} failed: {first_line(error)}.") from error
        return module
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(where)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and where.startswith(error.name or " ")
        if not missing:
            raise InputError(f"Importing {where} failed: {first_line(error)}.") from error
        raise InputError(
            f"There is no module {where!r} here. Name it as Python imports it from this folder, or give its "
            "file: path/to/file.py:make."
        ) from error


def _described(value: Any) -> str:
    """What something is, for an error."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"an object of type {type(value).__name__}" if value is not None else "nothing"
