"""The ways that AdamW's two moments are kept between steps: fp32, bf16, 8 bits.

A way is data and two functions over a stretch of elements. All state of a parameter that is zero means
moments that are zero, which a recorded step relies on."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from fuseline.optim import blockwise, rounding

State = dict[str, torch.Tensor]
Kept = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensors by name: shape and dtype."""
FIRST, SECOND = "exp_avg", "exp_avg_sq"


class Moments(ABC):
    """One way. `kept(numel)` are the tensors that the state of a parameter of so many elements has in it."""

    @abstractmethod
    def kept(self, numel: int) -> Kept: ...

    @abstractmethod
    def read(self, state: State, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The moments of the elements from `start` to `stop`, fp32, in memory of their own. `start` is a
        multiple of a block."""

    @abstractmethod
    def write(
        self, state: State, start: int, first: torch.Tensor, second: torch.Tensor, drawn: torch.Tensor
    ) -> None:
        """Keep the moments of the elements from `start` on, rounded by `draws` of their shape."""

    def empty(self, parameter: torch.Tensor) -> State:
        """The state of moments that are zero."""
        return {
            name: torch.zeros(shape, dtype=dtype, device=parameter.device)
            for name, (shape, dtype) in self.kept(parameter.numel()).items()
        }


class Float32(Moments):
    """In full."""

    def kept(self, numel: int) -> Kept:
        return dict.fromkeys((FIRST, SECOND), ((numel,), torch.float32))

    def read(self, state: State, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return state[FIRST][start:stop].clone(), state[SECOND][start:stop].clone()

    def write(
        self, state: State, start: int, first: torch.Tensor, second: torch.Tensor, drawn: torch.Tensor
    ) -> None:
        stop = start + first.numel()
        state[FIRST][start:stop], state[SECOND][start:stop] = first, second


class BFloat16(Moments):
    """The first moment rounded to the nearest; the second, of which a step changes less than bf16's spacing,
    stochastically."""

    def kept(self, numel: int) -> Kept:
        return dict.fromkeys((FIRST, SECOND), ((numel,), torch.bfloat16))

    def read(self, state: State, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return state[FIRST][start:stop].float(), state[SECOND][start:stop].float()

    def write(
        self, state: State, start: int, first: torch.Tensor, second: torch.Tensor, drawn: torch.Tensor
    ) -> None:
        stop = start + first.numel()
        state[FIRST][start:stop] = first
        state[SECOND][start:stop] = rounding.to_bfloat16(second, drawn)


class EightBits(Moments):
    """Codes in blocks of 256 and each block's largest magnitude. Of the second moment the root is kept, which
    is what AdamW divides by: its range is half as wide. It is rounded stochastically, the first moment to the
    nearest."""

    _FIRST_LARGEST, _SECOND_LARGEST = "exp_avg_absmax", "exp_avg_sq_absmax"

    def kept(self, numel: int) -> Kept:
        largest = (blockwise.blocks(numel),), torch.float32
        return {
            **dict.fromkeys((FIRST, SECOND), ((numel,), torch.uint8)),
            **dict.fromkeys((self._FIRST_LARGEST, self._SECOND_LARGEST), largest),
        }

    def read(self, state: State, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        block = slice(start // blockwise.BLOCK, blockwise.blocks(stop))
        first = blockwise.decode(state[FIRST][start:stop], state[self._FIRST_LARGEST][block], signed=True)
        root = blockwise.decode(state[SECOND][start:stop], state[self._SECOND_LARGEST][block], signed=False)
        return first, root.square_()

    def write(
        self, state: State, start: int, first: torch.Tensor, second: torch.Tensor, drawn: torch.Tensor
    ) -> None:
        stop = start + first.numel()
        block = slice(start // blockwise.BLOCK, blockwise.blocks(stop))
        codes, largest = blockwise.encode(first, signed=True)
        state[FIRST][start:stop], state[self._FIRST_LARGEST][block] = codes, largest
        codes, largest = blockwise.encode(second.sqrt(), signed=False, drawn=drawn)
        state[SECOND][start:stop], state[self._SECOND_LARGEST][block] = codes, largest
