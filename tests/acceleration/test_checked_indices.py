"""An index outside of a table raises before the operator runs; every other call is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuseline.acceleration.checked_indices import CheckedIndices

TABLE = torch.randn(5, 3)


def at(*values: int) -> torch.Tensor:
    return torch.tensor(values)


LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "embedding": lambda index: F.embedding(index, TABLE),
    "index_select": lambda index: TABLE.index_select(0, index),
    "gather": lambda index: TABLE.gather(0, index[:, None]),
    "scatter": lambda index: TABLE.scatter(0, index[:, None], 1.0),
    "index": lambda index: TABLE[index],
    "index beside a slice": lambda index: TABLE.t()[:, index],
    "index_put": lambda index: TABLE.clone().index_put_((index,), torch.tensor(1.0)),
    "nll_loss": lambda index: F.cross_entropy(torch.randn(len(index), 5), index, ignore_index=-1),
    "nll_loss of many dimensions": lambda index: F.cross_entropy(
        torch.randn(1, 5, len(index)), index[None], ignore_index=-1
    ),
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_is_looked_up_is_in_the_table(name: str) -> None:
    look = LOOKS[name]
    with CheckedIndices():
        look(at(0, 4))
        with pytest.raises(IndexError, match="looks up 0 to 5 in a table of 5"):
            look(at(0, 5))
        with pytest.raises(IndexError, match="looks up -100 to 1 in a table of 5"):
            look(at(-100, 1))


def test_what_is_allowed() -> None:
    rows, many = torch.tensor([True, False, True, True, False]), torch.randn(2, 5, 3)
    with CheckedIndices():
        assert torch.equal(TABLE[at(-5, -1)], TABLE[[0, 4]])
        assert torch.equal(TABLE[rows], TABLE[[0, 2, 3]])
        assert many[:, rows, :][:, at(2), at(2)].shape == (2, 1)
        assert many[torch.ones(2, 5, dtype=torch.bool), at(2)].shape == (10,)
        assert F.cross_entropy(torch.randn(2, 5), at(-100, 3)).isfinite()
        assert F.embedding(torch.empty(0, dtype=torch.long), TABLE).shape == (0, 3)
