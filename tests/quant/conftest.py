"""A small model and what goes through it."""

from __future__ import annotations

import pytest
import torch

from .drawn import Small


@pytest.fixture
def model() -> Small:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(1))
