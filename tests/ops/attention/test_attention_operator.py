"""The native op `fuseline::attention` as an operator of torch: layouts, gradients, graphs, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fuseline import native

from .native_calls import BOTTOM_RIGHT, DEVICES, NONE, TOP_LEFT, Spec, draw, run_native, written_out


@pytest.mark.parametrize("device", DEVICES)
def test_same_bits_every_time(device: str) -> None:
    assert native.load()
    spec = Spec(
        B=2, H=4, H_kv=2, T=150, S=170, D=64, dtype=torch.bfloat16, mask="float32", mask_dims="h", sinks=True
    )
    inputs = draw(replace(spec, causal=BOTTOM_RIGHT, dropout_p=0.1), device)
    first, again = run_native(inputs), run_native(inputs)
    for one, other in zip(first, again, strict=True):
        for name in one:
            assert torch.equal(one[name], other[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [NONE, TOP_LEFT])
def test_blocks_that_add_in_turn_give_the_same_bits(causal: int) -> None:
    """More blocks than run at once add to the gradient of q in the order of their keys."""
    assert native.load()
    spec = Spec(B=8, H=12, H_kv=12, T=1024, S=1024, D=64, dtype=torch.bfloat16, causal=causal, scale=0.125)
    inputs = draw(spec, "cuda")
    first = run_native(inputs)[1]
    for _ in range(3):
        again = run_native(inputs)[1]
        for name in first:
            assert torch.equal(first[name], again[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_layouts_keep_their_order(device: str) -> None:
    assert native.load()
    for layout in ("bhtd", "bthd"):
        inputs = draw(Spec(layout=layout), device)
        out, _ = torch.ops.fuseline.attention(**inputs.tensors, **inputs.options)
        assert out.stride() == inputs.tensors["q"].stride()


@pytest.mark.parametrize("device", DEVICES)
def test_expanded_gradient(device: str) -> None:
    assert native.load()
    inputs = draw(Spec(wanted=("q", "k", "v")), device)
    leaves, exact = inputs.to(torch.float32), inputs.to(torch.float64)
    torch.ops.fuseline.attention(**leaves, **inputs.options)[0].sum().backward()
    written_out(inputs, exact)[0].sum().backward()
    for name in "qkv":
        torch.testing.assert_close(leaves[name].grad, exact[name].grad.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_odd_addresses_and_strides(device: str) -> None:
    assert native.load()
    inputs = draw(Spec(), device)
    expected = torch.ops.fuseline.attention(**inputs.tensors, **inputs.options)[0]
    moved = {}
    for name, x in inputs.tensors.items():
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 3, device=device)
        moved[name] = wide[..., 1 : 1 + 2 * x.shape[-1] : 2].copy_(x)
    torch.testing.assert_close(torch.ops.fuseline.attention(**moved, **inputs.options)[0], expected)


def test_gradcheck() -> None:
    assert native.load()
    inputs = draw(
        Spec(B=1, T=5, S=6, D=4, mask="float32", mask_dims="hs", sinks=True, causal=BOTTOM_RIGHT), "cpu"
    )
    inputs = replace(inputs, tensors=inputs.tensors | {"mask": inputs.tensors["mask"].nan_to_num(neginf=0.5)})
    leaves = inputs.to(torch.float64)

    def attend(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named = dict(zip(leaves, tensors, strict=True))
        options = inputs.options | {"soft_cap": 3.0, "dropout_p": 0.2, "seed": torch.tensor([5])}
        return torch.ops.fuseline.attention(**named, **options)

    assert torch.autograd.gradcheck(attend, tuple(leaves.values()))


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "sinks"])
def test_no_second_derivative(name: str) -> None:
    assert native.load()
    inputs = draw(Spec(T=4, S=4, mask="float32", sinks=True), "cpu")
    leaves = inputs.to(torch.float32)
    out, _ = torch.ops.fuseline.attention(**leaves, **inputs.options)
    (grad,) = torch.autograd.grad(out.sum(), leaves["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(grad.sum(), leaves[name])


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    assert native.load()
    inputs = draw(Spec(T=9, S=8, mask="float32", mask_dims="hts", sinks=True, layout="bthd"), device)
    leaves = inputs.to(torch.float32)
    torch.library.opcheck(torch.ops.fuseline.attention.default, (), leaves | inputs.options)


@pytest.mark.parametrize("device", DEVICES)
def test_one_graph_for_all_lengths(device: str) -> None:
    assert native.load()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ops.fuseline.attention(
            q, k, v, max_seqlen_q=q.shape[2], max_seqlen_k=k.shape[2], softmax_scale=0.25, causal=TOP_LEFT
        )[0]

    compiled = torch.compile(attend, backend=count, dynamic=True, fullgraph=True)
    for T in (20, 33, 57):
        inputs = draw(Spec(T=T, S=T), device)
        torch.testing.assert_close(compiled(**inputs.tensors), attend(**inputs.tensors))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"causal": 3}, "causal is 3"),
        ({"window_left": -2}, "the window"),
        ({"dropout_p": 0.5}, "wants a seed"),
        ({"soft_cap": -1.0}, "soft_cap"),
        ({"k": torch.zeros(2, 2, 40, 8)}, "they are"),
        ({"k": torch.zeros(2, 3, 40, 16), "v": torch.zeros(2, 3, 40, 16)}, "do not divide"),
        ({"mask": torch.zeros(2, 2, 3, 40)}, "does not broadcast"),
        ({"mask": torch.zeros(40)}, "4 dimensions"),
        ({"sinks": torch.zeros(5)}, "one a head"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, "both or not"),
        ({"forward_by": 1}, "forward_by is 1; on a CPU it is 0"),
    ],
)
def test_refusals(change: dict[str, Any], said: str) -> None:
    assert native.load()
    inputs = draw(Spec(), "cpu")
    with pytest.raises(ValueError, match=said):
        torch.ops.fuseline.attention(**(inputs.tensors | inputs.options | change))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"forward_by": 3}, ValueError, "it is 0"),
        ({"window_left": 3}, ValueError, "takes no mask"),
        ({"soft_cap": 2.0}, ValueError, "takes no mask"),
        ({"causal": 1, "q": torch.empty(2, 2, 24, 16, device="meta").half()}, ValueError, "as many keys"),
        (
            {name: torch.empty(2, 2, 40, 16, device="meta") for name in "qkv"},
            TypeError,
            "float16 and bfloat16",
        ),
    ],
)
def test_refusals_of_a_forward_pass_of_others(
    change: dict[str, Any], error: type[Exception], said: str
) -> None:
    assert native.load()
    q = torch.empty(2, 40, 2, 16, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    k = torch.empty(2, 2, 40, 16, device="meta", dtype=torch.bfloat16)
    call = {"q": q, "k": k, "v": k, "max_seqlen_q": 40, "max_seqlen_k": 40, "softmax_scale": 0.25}
    out, lse = torch.ops.fuseline.attention(**call, forward_by=1)
    assert (out.stride(), lse.shape) == (q.stride(), (2, 2, 40))
    if change.get("q") is not None and change["q"].dtype == torch.float16:
        change |= {name: k.half() for name in "kv"}
    with pytest.raises(error, match=said):
        torch.ops.fuseline.attention(**({**call, "forward_by": 1} | change))
