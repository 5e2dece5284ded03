"""What takes a forward's place: a recipe is a value of paths and numbers, never a tensor or a module."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import nn


class Recipe(Protocol):
    """Computes what a module's forward computes, by Fuseline's ops.

    `weights` are the paths of the parameters and buffers that it reads, `drops` whether it draws random
    numbers in training. `run` returns the one tensor that the forward computes, or all of them as a tuple.
    A recipe that has an attribute `multiplies` which is true does nothing with its inputs but products by
    weights, which autocast computes in 16 bits.
    """

    op: ClassVar[str]

    @property
    def weights(self) -> tuple[str, ...]: ...

    @property
    def drops(self) -> bool: ...

    def run(
        self, module: nn.Module, tensors: Sequence[torch.Tensor]
    ) -> torch.Tensor | tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True)
class Match:
    """A module computes `kind`; `recipes` are the ways to compute it, any of which may be the fastest."""

    kind: str
    recipes: tuple[Recipe, ...]


@dataclass(frozen=True)
class Refusal:
    """A module looks like `kind`, and why Fuseline leaves it."""

    kind: str
    reason: str


Verdict = Match | Refusal | None


def each_computed(result: torch.Tensor | tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
    """What a recipe returned for each tensor that a forward computes, in order."""
    return iter(result) if isinstance(result, tuple) else itertools.repeat(result)


MOVED = "a weight was taken from where it stood, by a parametrization or pruning"


def owner_of(module: nn.Module, path: str) -> nn.Module:
    """The module whose parameter or buffer has that path; `KeyError` where there is none."""
    owner = module
    for parent in path.split(".")[:-1]:
        child = owner._modules[parent]
        assert child is not None
        owner = child
    return owner


def tensor_at(module: nn.Module, path: str) -> torch.Tensor:
    """The parameter or buffer of that path, past every `__getattr__`; `KeyError` where none stands there."""
    owner, name = owner_of(module, path), path.rpartition(".")[2]
    tensor: torch.Tensor | None = owner._parameters.get(name)
    if tensor is None:
        tensor = owner._buffers[name]
    assert tensor is not None
    return tensor


def optional_tensor_at(module: nn.Module, path: str | None) -> torch.Tensor | None:
    return None if path is None else tensor_at(module, path)
