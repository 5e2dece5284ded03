"""SelfAttention's three implementations agree, and each has the gradients that finite differences have."""

from __future__ import annotations

import math

import pytest
import torch

from fuseline.nn import SelfAttention
from fuseline.nn.self_attention import IMPLEMENTATIONS

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
S = 5
SOME = torch.tensor([[1, 1, 0, 1, 0]] * S).bool() | torch.eye(S).bool()
MASKS = {
    "none": None,
    "causal": torch.ones(S, S).tril(),
    "of each sequence": torch.stack([SOME, SOME.T, torch.zeros(S, S).bool()]),
    "of each head": torch.rand(3, 2, S, S, generator=torch.Generator().manual_seed(0)) < 0.6,
}


def module(device: str, implementation: str = "python") -> tuple[SelfAttention, torch.Tensor]:
    torch.manual_seed(0)
    layer = SelfAttention(6, 2, dtype=torch.float64)
    with torch.no_grad():
        layer.out_bias.normal_()
    x = torch.randn(3, S, 6, dtype=torch.float64)
    layer.implementation = implementation
    return layer.to(device), x.to(device).requires_grad_()


def seeds_formula(layer: SelfAttention, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Head by head and by einsum, as a second opinion."""
    D = layer.head_dim
    w_q, w_k, w_v = layer.qkv_weight.split(D)
    attended = []
    for h in range(layer.num_heads):
        x_h = x[..., h * D : (h + 1) * D]
        q, k, v = (torch.einsum("btd,ed->bte", x_h, w) for w in (w_q, w_k, w_v))
        scores = torch.einsum("btd,bsd->bts", q, k) / math.sqrt(layer.embed_dim)
        if mask is not None:
            keep = mask.to(x.device).bool()
            keep = keep[:, h] if keep.dim() == 4 else keep
            scores = scores.masked_fill(~keep, -1e20)
        weights = torch.softmax(scores, dim=-1)
        if mask is not None:
            weights = weights * keep
        attended.append(weights @ v)
    return torch.cat(attended, dim=-1) @ layer.out_weight.T + layer.out_bias


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_implementations_agree_to_rounding(implementation: str, mask: str, device: str) -> None:
    layer, x = module(device, implementation)
    given = MASKS[mask]
    out = layer(x, None if given is None else given.to(device))
    wanted = seeds_formula(layer, x, given)
    torch.testing.assert_close(out, wanted, rtol=1e-13, atol=1e-13)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    leaves = (x, *layer.parameters())
    for ours, one in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(wanted, leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_gradient_passes_gradcheck(implementation: str, mask: str) -> None:
    layer, x = module("cpu", implementation)

    def run(*values: torch.Tensor) -> torch.Tensor:
        named = dict(zip(("qkv_weight", "out_weight", "out_bias"), values[1:], strict=True))
        return torch.func.functional_call(layer, named, (values[0], MASKS[mask]))

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()))


def test_starts_from_one_projection_for_each_of_q_k_v() -> None:
    layer = SelfAttention(512, 8)
    bound = math.sqrt(6 / (64 + 64))
    for weight in layer.qkv_weight.chunk(3):
        assert 0.95 * bound < weight.abs().max() <= bound
    assert not layer.out_bias.any()
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "qkv_weight": (192, 64),
        "out_weight": (512, 512),
        "out_bias": (512,),
    }


def test_says_what_it_takes() -> None:
    with pytest.raises(ValueError, match="not a multiple of num_heads=5"):
        SelfAttention(64, 5)
    with pytest.raises(ValueError, match="aten"):
        SelfAttention(64, 4, implementation="attn")
    assert "implementation='aten'" in repr(SelfAttention(64, 4, implementation="aten"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fused_is_as_near_to_float64_as_python(dtype: torch.dtype) -> None:
    for length, embed_dim in ((10, 64), (30, 1024), (128, 512)):
        torch.manual_seed(0)
        exact = SelfAttention(embed_dim, 8, implementation="python", device="cuda", dtype=torch.float64)
        exact.load_state_dict({name: p.to(dtype).double() for name, p in exact.state_dict().items()})
        layer = SelfAttention(embed_dim, 8, device="cuda", dtype=dtype)
        layer.load_state_dict(exact.state_dict())
        x = torch.randn(16, length, embed_dim, device="cuda").to(dtype).requires_grad_()
        wide = x.detach().double().requires_grad_()
        mask = torch.ones(length, length, device="cuda").tril()
        grad = torch.randn_like(x)
        wanted = torch.autograd.grad(exact(wide, mask), (wide, *exact.parameters()), grad.double())
        found = {}
        for name in ("python", "fused"):
            layer.implementation = name
            found[name] = torch.autograd.grad(layer(x, mask), (x, *layer.parameters()), grad)
        for ours, plain, far in zip(found["fused"], found["python"], wanted, strict=True):
            bound = 2 * (plain.double() - far).norm() + torch.finfo(dtype).eps * far.norm()
            assert (ours.double() - far).norm() <= bound


@pytest.mark.gpu
def test_atens_gradients_in_a_graph_are_the_eager_ones() -> None:
    """There the weights' gradients are on a second stream."""
    torch.manual_seed(0)
    layer = SelfAttention(256, 8, implementation="aten", device="cuda")
    x = torch.randn(16, 30, 256, device="cuda", requires_grad=True)
    mask, grad = torch.ones(30, 30, device="cuda").tril(), torch.randn(16, 30, 256, device="cuda")
    leaves = (x, *layer.parameters())

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(layer(x, mask), leaves, grad)

    wanted = gradients()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [gradients() for _ in range(3)]
    for _ in range(5):
        for one in found:
            for tensor in one:
                tensor.fill_(float("nan"))
        graph.replay()
        for one in found:
            for tensor, near in zip(one, wanted, strict=True):
                torch.testing.assert_close(tensor, near, rtol=1e-4, atol=1e-4)
    assert torch.equal(gradients()[1], wanted[1])


@pytest.mark.gpu
def test_atens_graphs_are_replayed_at_once() -> None:
    held = []
    for E, length, batch in ((512, 64, 16), (768, 96, 8)):
        torch.manual_seed(E)
        layer = SelfAttention(E, 8, implementation="aten", device="cuda")
        x = torch.randn(batch, length, E, device="cuda", requires_grad=True)
        grad_out = torch.randn_like(x)
        leaves = (x, *layer.parameters())
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            expected = torch.autograd.grad(layer(x), leaves, grad_out)
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                found = torch.autograd.grad(layer(x), leaves, grad_out)
        held.append((stream, graph, found, expected, layer, leaves, grad_out))
    for _ in range(20):
        for stream, graph, *_ in held:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for _, _, found, expected, *_ in held:
            for ours, eager in zip(found, expected, strict=True):
                assert (ours - eager).norm() <= 1e-4 * eager.norm()
