"""Layers of one tensor as one product in compiled forwards: right, once, and with the model's own weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuseline.acceleration import accelerate
from fuseline.acceleration.forms import CompiledBlocks
from fuseline.acceleration.merged_products import MergedProducts

WIDTH = 16


class Attention(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH // 2, bias)
        self.v, self.out = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x).view(2, -1, WIDTH), self.k(x), self.v(x)
        return x + self.out(q * torch.cat([k, k], -1).tanh() + v)


class WrittenBetween(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        q = self.q(x)
        x.mul_(2)
        return q + self.v(x)


class InOnePiece(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x).view(-1) + self.v(x).view(-1)


class Counted:
    """A compiler that leaves graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph

    @property
    def products(self) -> list[int]:
        return [sum(node.target is F.linear for node in graph.graph.nodes) for graph in self.graphs]


class Compiled:
    def __init__(self, blocks: Sequence[nn.Module], compiler: Any) -> None:
        self.merged = MergedProducts(compiler)
        self._blocks, self._compiled = blocks, CompiledBlocks(blocks, self.merged)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with self._compiled.in_place():
            for block in self._blocks:
                x = block(x)
        return x


def plain(blocks: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


@pytest.fixture
def compiler() -> Any:
    torch._dynamo.reset()
    return Counted()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, WIDTH)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@torch.no_grad()
def test_queries_keys_and_values_are_one_product(compiler: Any, x: torch.Tensor, bias: bool) -> None:
    blocks = [Attention(bias), Attention(bias)]
    compiled = Compiled(blocks, compiler)
    torch.testing.assert_close(compiled(x), plain(blocks, x))
    assert compiler.products == [2]  # of two blocks: compiled once, the merged product and `out`
    for block in blocks:
        q, k = block.q.weight, block.k.weight
        assert k.data_ptr() == q.data_ptr() + q.nbytes


@torch.no_grad()
def test_new_weights_are_seen(compiler: Any, x: torch.Tensor) -> None:
    blocks = [Attention()]
    compiled = Compiled(blocks, compiler)
    before = compiled(x)
    blocks[0].k.weight.mul_(3)
    blocks[0].v.load_state_dict({"weight": torch.randn(WIDTH, WIDTH), "bias": torch.randn(WIDTH)})
    torch.testing.assert_close(compiled(x), plain(blocks, x))
    assert not torch.allclose(before, compiled(x))
    blocks[0].q.weight.data = torch.randn(WIDTH, WIDTH)  # elsewhere in memory
    blocks[0].double().float()
    torch.testing.assert_close(compiled(x), plain(blocks, x))


@torch.no_grad()
def test_parameters_stay_the_model_s_own_and_get_memory_of_their_own_back(
    compiler: Any, x: torch.Tensor
) -> None:
    block = Attention()
    names = {id(parameter): name for name, parameter in block.named_parameters()}
    state = copy.deepcopy(block.state_dict())
    compiled = Compiled([block], compiler)
    compiled(x)
    assert {id(parameter): name for name, parameter in block.named_parameters()} == names
    assert all(torch.equal(state[name], value) for name, value in block.state_dict().items())
    assert block.q.weight.untyped_storage().nbytes() > block.q.weight.nbytes
    compiled.merged.separate()
    for name, parameter in block.named_parameters():
        assert torch.equal(state[name], parameter)
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


@torch.no_grad()
def test_weights_that_share_memory_with_others_are_copied_not_moved(compiler: Any, x: torch.Tensor) -> None:
    block = Attention()
    whole = torch.randn(2, WIDTH, WIDTH)
    block.q.weight.data = whole[1]
    compiled = Compiled([block], compiler)
    torch.testing.assert_close(compiled(x), block(x))
    assert block.q.weight.data_ptr() == whole[1].data_ptr()
    whole.mul_(2)
    torch.testing.assert_close(compiled(x), block(x))


@torch.no_grad()
def test_a_tensor_that_is_written_between_is_read_anew(compiler: Any, x: torch.Tensor) -> None:
    block = WrittenBetween()
    torch.testing.assert_close(Compiled([block], compiler)(x), block(x))
    assert compiler.products == [2]


@torch.inference_mode()
def test_in_inference_mode_weights_stay_trainable(compiler: Any, x: torch.Tensor) -> None:
    with torch.inference_mode(False):
        block = Attention()
    torch.testing.assert_close(Compiled([block], compiler)(x), block(x))
    with torch.inference_mode(False):
        block(torch.randn(2, 3, WIDTH)).sum().backward()
        assert block.k.weight.grad is not None
        assert not block.k.weight.data.is_inference()


@torch.no_grad()
def test_a_block_that_takes_no_parts_is_compiled_as_it_is(x: torch.Tensor) -> None:
    torch._dynamo.reset()
    block, seen = InOnePiece(), []

    def compiler(graph: Any, inputs: Any) -> Any:
        seen.append(len(inputs))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.testing.assert_close(Compiled([block], compiler)(x), block(x))
    assert seen == [7, 5]


def test_with_gradients_nothing_is_merged(compiler: Any, x: torch.Tensor) -> None:
    Compiled([Attention()], compiler)(x)
    assert compiler.products == [4]


@torch.no_grad()
def test_inductor_compiles_it(x: torch.Tensor) -> None:
    torch._dynamo.reset()
    blocks = [Attention(), Attention()]
    torch.testing.assert_close(Compiled(blocks, None)(x), plain(blocks, x))


@pytest.mark.gpu
@torch.no_grad()
def test_recorded_calls_read_the_weights_of_now() -> None:
    torch._dynamo.reset()
    blocks = [Attention(), Attention()]
    model = nn.Sequential(nn.Sequential(*blocks)).cuda().eval()
    x = torch.randn(2, 3, WIDTH, device="cuda")
    fast = accelerate(model, x, train=False)
    expected = model(x)
    torch.testing.assert_close(fast.compiled_call(x), expected, rtol=1e-3, atol=1e-4)
    blocks[1].v.weight.mul_(2)
    torch.testing.assert_close(fast.compiled_call(x), model(x), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(fast.compiled_call(x), expected)
    fast.undo()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
