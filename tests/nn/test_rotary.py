"""`fuseline.nn.RotaryEmbedding`: what makes a rotary embedding one, and its layouts against one another."""

from __future__ import annotations

import pytest
import torch

from fuseline.nn import RotaryEmbedding


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distance_alone(interleaved: bool) -> None:
    rotary = RotaryEmbedding(32, interleaved=interleaved)
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        turned = rotary.turn(q, torch.tensor([at_q])), rotary.turn(k, torch.tensor([at_k]))
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(100_007, 100_003))
    assert not torch.isclose(score(7, 3), score(7, 4))


def test_tables_and_computed_angles_agree_and_are_not_saved() -> None:
    q, k = torch.randn(2, 6, 9, 64), torch.randn(2, 2, 9, 64)
    with_tables, without = RotaryEmbedding(64, max_positions=20), RotaryEmbedding(64)
    assert not with_tables.state_dict()
    positions = torch.arange(5, 14)
    for one, other in zip(with_tables(q, k, positions), without(q, k, positions), strict=True):
        torch.testing.assert_close(one, other)


def test_both_orders_of_heads_and_tokens_agree() -> None:
    q, k = torch.randn(2, 6, 9, 64), torch.randn(2, 2, 9, 64)
    first = RotaryEmbedding(32)(q, k)
    second = RotaryEmbedding(32, seq_dim=-3)(q.transpose(1, 2), k.transpose(1, 2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other.transpose(1, 2))


def test_the_result_lies_in_memory_as_x_does() -> None:
    qkv = torch.randn(2, 9, 3, 6, 64)
    q = qkv[:, :, 0].transpose(1, 2)
    assert RotaryEmbedding(64).turn(q).transpose(1, 2).is_contiguous()


def test_interleaved_is_half_split_of_other_elements() -> None:
    x = torch.randn(4, 16)
    order = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2)))
    apart = RotaryEmbedding(16, interleaved=True).turn(x)
    assert torch.equal(apart[:, order], RotaryEmbedding(16).turn(x[:, order]))
