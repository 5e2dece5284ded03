"""`fuseline.nn.Embedding` in the place of torch's, with positions and dropout beside."""

from __future__ import annotations

import pytest
import torch

from fuseline.errors import InputError
from fuseline.nn import Embedding


def test_takes_the_place_of_torchs() -> None:
    theirs = torch.nn.Embedding(50, 16, padding_idx=-1)
    ours = Embedding(50, 16, padding_idx=-1)
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(50, (3, 9))
    assert torch.equal(ours(tokens), theirs(tokens))
    ours(tokens).square().sum().backward()
    theirs(tokens).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_the_padding_starts_at_zero_and_stays_there() -> None:
    module = Embedding(50, 16, padding_idx=4)
    assert not module.weight[4].any()
    module(torch.full((2, 3), 4)).sum().backward()
    assert not module.weight.grad.any()


def test_adds_positions() -> None:
    module = Embedding(50, 16, max_positions=12)
    tokens = torch.randint(50, (3, 9))
    torch.testing.assert_close(module(tokens), module.weight[tokens] + module.position_weight[:9])
    positions = torch.randint(12, (3, 9))
    wanted = module.weight[tokens] + module.position_weight[positions]
    torch.testing.assert_close(module(tokens, positions), wanted)


def test_dropout_follows_the_generator_and_the_mode() -> None:
    module = Embedding(50, 64, dropout=0.25)
    tokens = torch.randint(50, (40, 9))
    torch.manual_seed(3)
    first, second = module(tokens), module(tokens)
    torch.manual_seed(3)
    assert torch.equal(module(tokens), first)
    assert not torch.equal(first, second)
    assert 0.23 < float((first == 0).float().mean()) < 0.27
    kept = first != 0
    torch.testing.assert_close(first[kept], module.weight[tokens][kept] / 0.75)
    assert torch.equal(module.eval()(tokens), module.weight[tokens])


def test_names_a_padding_that_is_not_there() -> None:
    with pytest.raises(InputError, match="padding_idx=50 is not a row of the table, which has 50"):
        Embedding(50, 16, padding_idx=50)
