"""Rotary embeddings inside a forward: a function that turns queries and keys by tables of cosines and sines.

The tables come from a module of their own, as wide as a head, each angle twice. `Tables` are made once for
each of its calls and kept on the cosines that it returns; `Turn` stands in for the function and finds them
there. Of tables from elsewhere nobody knows that both halves are equal: the function then runs as written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from fuseline.acceleration.kinds.rotary import HALVES, ONCE, PAIRS
from fuseline.acceleration.layer import Layer
from fuseline.acceleration.rebound import StandIn
from fuseline.acceleration.swap import NOT_PROVED, Inside, Key, tensors_and_form, why_not_tensors
from fuseline.ops import rope
from fuseline.ops.autocast import autocast_on
from fuseline.ops.rope import rope_pair

NOTE = "_fuseline_tables"
UNKNOWN = "its cosines and sines are not the tables of a module that was proved, or were written to"


@dataclass(frozen=True)
class Tables:
    """Cosines and sines [positions, dims / 2], and which positions the tokens have: None for 0, 1, .."""

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> Tables:
        """Of tables [T, n] or [B, T, n] in that layout."""
        one, other = (_once(table, layout) for table in (cos, sin))
        if one.dim() == 2 or one.shape[0] == 1:
            return cls(one.reshape(one.shape[-2:]), other.reshape(one.shape[-2:]), None)
        positions = torch.arange(one.shape[0] * one.shape[1], device=one.device).view(one.shape[:2])
        return cls(one.flatten(0, 1), other.flatten(0, 1), positions)


@dataclass(frozen=True)
class TablesNote:
    """On the cosines that a module returned: the tables, the sines that came with them, the state of both."""

    maker: TableMaker
    tables: Tables
    sin: torch.Tensor
    versions: tuple[int, int]


@dataclass(frozen=True)
class TurnRecipe:
    """Turns tensors number `xs` of a call by the tables `cos` and `sin` of it. `widen`: in float32."""

    op: ClassVar[str] = "rope"
    xs: tuple[int, ...]
    cos: int
    sin: int
    layout: str
    interleaved: bool
    seq_dim: int
    widen: bool = False

    def run(self, tensors: Sequence[torch.Tensor], tables: Tables) -> list[torch.Tensor]:
        how: dict[str, Any] = {
            "positions": tables.positions,
            "interleaved": self.interleaved,
            "dims": 2 * tables.cos.shape[-1],
            "seq_dim": self.seq_dim,
        }
        xs = [tensors[i].float() if self.widen else tensors[i] for i in self.xs]
        if len(xs) == 2:
            return list(rope_pair(xs[0], xs[1], tables.cos, tables.sin, **how))
        return [rope(x, tables.cos, tables.sin, **how) for x in xs]


class TableMaker(Layer):
    """Writes on the cosines that a module returns what `Turn` needs of them."""

    rank: ClassVar[int] = 2

    def __init__(
        self, module: nn.Module, cos: int, layout: str, forms: Iterable[tuple[Any, ...]], strict: bool = False
    ) -> None:
        super().__init__(module, strict)
        self.cos, self.layout, self.forms = cos, layout, set(forms)
        self._inside = Inside.of(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.original(args, kwargs)
        if is_dynamo_compiling() or torch.is_inference_mode_enabled():
            return result
        if tensors_and_form(args, kwargs)[1] not in self.forms or self._inside.why_not(self.module):
            return result
        if type(result) in (tuple, list) and len(result) == 2 and all(map(_is_table, result)):
            cos, sin = result[self.cos], result[1 - self.cos]
            tables = Tables.of(cos, sin, self.layout)
            setattr(cos, NOTE, TablesNote(self, tables, sin, (cos._version, sin._version)))
        return result

    def merge(self, other: Self) -> None:
        if (self.cos, self.layout) == (other.cos, other.layout):
            self.forms |= other.forms
        else:
            self.cos, self.layout, self.forms = other.cos, other.layout, other.forms

    def made(self, cos: object) -> bool:
        """Whether the tables on a tensor are of this module."""
        note = getattr(cos, NOTE, None)
        return note is not None and note.maker is self


class Turn(StandIn):
    """Stands in for a function that turns one tensor, or several, by tables."""

    def __init__(
        self, recipe: TurnRecipe, form: tuple[Any, ...], keys: Sequence[Key], strict: bool = False
    ) -> None:
        super().__init__(strict)
        self.recipe, self.form, self.keys = recipe, form, set(keys)

    def merge(self, other: StandIn) -> bool:
        if not isinstance(other, Turn) or (self.recipe, self.form) != (other.recipe, other.form):
            return False
        self.keys |= other.keys
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors, form = tensors_and_form(args, kwargs)
        tables = (
            self._tables(tensors) if form == self.form else "it is called with other arguments than proved"
        )
        if isinstance(tables, str):
            self.decline(tables)
            return self.original(*args, **kwargs)
        self.taken += 1
        turned = self.recipe.run(tensors, tables)
        return turned[0] if len(turned) == 1 else tuple(turned)

    def _tables(self, tensors: Sequence[torch.Tensor]) -> Tables | str:
        """The tables of a call, or why it goes to the original."""
        reason = why_not_tensors(tensors)
        if reason is not None:
            return reason
        if turn_key(self.recipe, tensors) not in self.keys:
            return NOT_PROVED
        cos, sin = tensors[self.recipe.cos], tensors[self.recipe.sin]
        if self.recipe.layout == ONCE:
            return Tables.of(cos, sin, ONCE)
        note = getattr(cos, NOTE, None)
        if note is None or note.maker.layout != self.recipe.layout:
            return UNKNOWN
        if note.sin is not sin or note.versions != (cos._version, sin._version):
            return UNKNOWN
        found: Tables = note.tables
        return found


def turn_key(recipe: TurnRecipe, tensors: Sequence[torch.Tensor]) -> Key:
    """What a proof is for, besides the recipe; tables that want a gradient, and lengths that do not fit each
    other, have a key of their own."""
    device = tensors[0].device.type
    autocast = autocast_on(device)
    cos, sin = tensors[recipe.cos], tensors[recipe.sin]
    fits = cos.shape == sin.shape and not (cos.requires_grad or sin.requires_grad)
    tokens = cos.shape[-2] if cos.dim() > 1 else 0
    batch = cos.shape[0] if cos.dim() == 3 else 1
    parts: list[Any] = [device, autocast, cos.dtype, cos.dim(), cos.shape[-1]]
    for x in (tensors[i] for i in recipe.xs):
        fits = fits and x.dim() == 4 and x.shape[recipe.seq_dim] == tokens and batch in (1, x.shape[0])
        parts += (x.dtype, x.shape[-1])
    return (fits, *parts)


def _once(table: torch.Tensor, layout: str) -> torch.Tensor:
    """Each angle once, in float32 at least."""
    if layout == HALVES:
        table = table[..., : table.shape[-1] // 2]
    elif layout == PAIRS:
        table = table[..., ::2]
    return (table if table.dtype is torch.float64 else table.float()).contiguous()


def _is_table(value: object) -> bool:
    return (
        type(value) is torch.Tensor
        and value.is_floating_point()
        and value.dim() in (2, 3)
        and not value.requires_grad
        and not value.is_inference()
    )
