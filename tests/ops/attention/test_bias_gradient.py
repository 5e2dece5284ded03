"""The gradient of a bias: the sum of what the kernel that computes grad_q leaves, some tiles of rows at a
time, in bounded scratch; where that does not apply, from the scores computed once more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fuseline import native

from .native_calls import BOTTOM_RIGHT, TOP_LEFT, Spec, check, draw, run_native

pytestmark = pytest.mark.gpu

WHOLE = Spec(H=4, T=150, S=176, D=64, mask="same", mask_dims="hts", scale=0.125)
LEFT = {
    "heads": WHOLE,
    "all": replace(WHOLE, mask_dims="bhts"),
    "sequences": replace(WHOLE, mask_dims="bts", mask="float32"),
    "one": replace(WHOLE, mask_dims="ts", B=3, mask="float32"),
    "odd": replace(WHOLE, S=333, T=129),
    "odd_wide": replace(WHOLE, S=333, T=65, D=128, mask="float32"),
    "wide": replace(WHOLE, D=128, mask_dims="bhts"),
    "between": replace(WHOLE, D=80, layout="bthd"),
    "narrow": replace(WHOLE, D=24, layout="qkv", S=150),
    "causal": replace(WHOLE, causal=TOP_LEFT, T=260, S=200),
    "causal_wide": replace(WHOLE, causal=BOTTOM_RIGHT, T=200, S=328, D=128, H_kv=1),
    "window": replace(WHOLE, window=(30, 7), T=250, S=256),
    "blind_rows": replace(WHOLE, window=(20, 20), T=300, S=100),
    "grouped": replace(WHOLE, H=6, H_kv=2, causal=BOTTOM_RIGHT),
    "dropout": replace(WHOLE, dropout_p=0.2, sinks=True),
    "negative_scale": replace(WHOLE, scale=-0.1),
    "with_q_alone": replace(WHOLE, wanted=("q", "mask")),
}
AGAIN = {
    "without_q": replace(WHOLE, wanted=("mask",)),
    "capped": replace(WHOLE, soft_cap=3.0),
    "one_row": replace(WHOLE, mask_dims="bhs"),
    "one_key": replace(WHOLE, mask_dims="bht"),
    "too_wide": replace(WHOLE, D=136),
    "packed": replace(WHOLE, B=1, T=250, S=240, lengths=((60, 7, 0, 150), (70, 10, 4, 120)), mask_dims="hts"),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", [*LEFT, *AGAIN])
def test_in_16_bits(name: str, dtype: torch.dtype) -> None:
    check(replace((LEFT | AGAIN)[name], dtype=dtype), "cuda")


@pytest.mark.parametrize("name", ["heads", "all", "causal", "packed"])
def test_in_fp32(name: str) -> None:
    check((LEFT | AGAIN)[name], "cuda")


def tensors(T: int, S: int) -> dict[str, Any]:
    """q, k, v of 32 heads and a bias [8, T, S]; at S 2048 the scratch holds 32 tiles of 64 rows."""
    generator = torch.Generator("cuda").manual_seed(T)

    def normal(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return x.requires_grad_()

    made = {"q": normal(4, 8, T, 64), "k": normal(4, 8, S, 64), "v": normal(4, 8, S, 64)}
    return made | {"mask": normal(1, 8, T, S)}


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, soft_cap: float = 0.0
) -> torch.Tensor:
    sizes = {"max_seqlen_q": q.shape[2], "max_seqlen_k": k.shape[2]}
    out, _ = torch.ops.fuseline.attention(q, k, v, mask=mask, **sizes, softmax_scale=0.125, soft_cap=soft_cap)
    return out


def gradients(made: dict[str, Any], grad_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(attend(**made), tuple(made.values()), grad_out)


def test_tiles_at_a_time_give_the_same_bits() -> None:
    """33 and 65 tiles of rows: two and three times 32 at the most. Their last rows alone are fewer times."""
    assert native.load()
    for T in (2080, 4100):
        made = tensors(T, 2048)
        grad_out = torch.randn_like(made["q"])
        _, _, _, whole = gradients(made, grad_out)
        for rows in (slice(0, 1024), slice(1024, T)):
            part = {
                name: x.detach()[:, :, rows].requires_grad_() if name in ("q", "mask") else x
                for name, x in made.items()
            }
            assert torch.equal(gradients(part, grad_out[:, :, rows])[3], whole[:, :, rows]), (T, rows)


@pytest.mark.parametrize(
    ("T", "S", "soft_cap", "megabytes"),
    [
        pytest.param(1024, 2048, 0.0, 128, id="whole"),
        pytest.param(4096, 2048, 0.0, 256, id="in_two"),
        pytest.param(16384, 2048, 0.0, 256, id="in_eight"),
        pytest.param(4096, 2048, 3.0, 64, id="again"),
        pytest.param(4096, 8192, 0.0, 64, id="too_few_blocks"),
    ],
)
def test_scratch_is_bounded(T: int, S: int, soft_cap: float, megabytes: int) -> None:
    """Beyond its results, backward takes a row's statistic and this: so memory is linear in T."""
    assert native.load()
    made = tensors(T, S)
    out = attend(**made, soft_cap=soft_cap)
    grad_out = torch.randn_like(out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, tuple(made.values()), grad_out)
    used = torch.cuda.max_memory_allocated() - before
    results = sum(grad.numel() * grad.element_size() for grad in grads)
    statistics = 4 * 8 * T * 4
    assert used - results - statistics <= (megabytes << 20) + (16 << 20)  # what the allocator rounds up


@pytest.mark.parametrize("T", [200, 2080])
def test_compiled_and_in_a_cuda_graph(T: int) -> None:
    assert native.load()
    torch._dynamo.reset()
    made = tensors(T, 2048)
    grad_out = torch.randn_like(made["q"])
    wanted = gradients(made, grad_out)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=False)
    found = torch.autograd.grad(compiled(**made), tuple(made.values()), grad_out)
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(made, grad_out)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        recorded = gradients(made, grad_out)
    for _ in range(2):
        with torch.no_grad():
            made["mask"].mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        wanted = gradients(made, grad_out)
        assert all(torch.equal(one, two) for one, two in zip(recorded, wanted, strict=True))


def test_without_q_is_the_same_gradient() -> None:
    """Computed again it is rounded later: the two ways differ by the rounding of what is left."""
    assert native.load()
    inputs = draw(replace(WHOLE, dtype=torch.bfloat16, mask_dims="ts", mask="float32"), "cuda")
    left = run_native(inputs)[1]["mask"]
    again = run_native(replace(inputs, spec=replace(inputs.spec, wanted=("mask",))))[1]["mask"]
    assert not torch.equal(left, again)
    assert (left - again).norm() <= torch.finfo(torch.bfloat16).eps * again.norm()


def test_nothing_to_attend_to() -> None:
    assert native.load()
    for spec in (replace(WHOLE, B=0), replace(WHOLE, T=0), replace(WHOLE, S=0)):
        grads = run_native(draw(replace(spec, dtype=torch.bfloat16), "cuda"))[1]
        assert all(not grad.any() for grad in grads.values()), spec
