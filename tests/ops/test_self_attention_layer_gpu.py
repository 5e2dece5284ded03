"""The attention layer's kernels against float64, over lengths, heads, masks and dtypes; bits, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fuseline import ops
from fuseline.ops.self_attention_layer import reference

pytestmark = pytest.mark.gpu

MATHS = ("float32", "tf32", "bfloat16")
# B, S, H, H_kv, D, E, out; E = 0: one projection shared by the heads.
SHAPES = (
    (8, 10, 4, 4, 16, 64, 64),
    (8, 16, 8, 8, 64, 512, 512),
    (8, 64, 4, 4, 64, 256, 256),
    (8, 128, 8, 8, 64, 512, 512),
    (2, 1, 2, 2, 32, 64, 64),
    (3, 17, 3, 3, 32, 96, 40),
    (1, 33, 12, 12, 64, 768, 768),
    (2, 100, 6, 6, 48, 288, 288),
    (2, 65, 5, 5, 16, 80, 24),
    (2, 64, 3, 3, 128, 384, 384),
    (2, 64, 4, 4, 80, 320, 320),
    (2, 31, 2, 2, 80, 160, 160),
    (2, 20, 16, 16, 32, 512, 512),
    (16, 30, 8, 8, 16, 0, 128),
    (16, 30, 8, 8, 128, 0, 1024),
    (2, 100, 4, 4, 64, 0, 256),
)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def choose(math: str) -> torch.dtype:
    torch.backends.cuda.matmul.allow_tf32 = math == "tf32"
    return torch.float32 if math == "tf32" else getattr(torch, math)


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, bias: bool = True, seed: int = 0
) -> tuple[list[Any], dict[str, int]]:
    batch, S, H, kv, D, E, out = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*sizes: int, by: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(sizes, generator=generator, device="cuda", dtype=torch.float64)
        return (drawn * by).to(dtype).requires_grad_()

    columns = E or D
    projection = normal((H + 2 * kv) * D if E else 3 * D, columns, by=columns**-0.5)
    tensors: list[Any] = [
        normal(batch, S, E or H * D),
        projection,
        None,
        normal(out, H * D, by=(H * D) ** -0.5),
        None,
    ]
    if bias:
        tensors[2], tensors[4] = normal(projection.shape[0]), normal(out)
    return tensors, {"num_heads": H, "num_kv_heads": kv}


def all_of(
    function: Any, tensors: list[Any], options: dict[str, Any], rounded: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The output and all gradients, for one drawn gradient of the output, rounded to the layer's dtype."""
    out = function(*tensors, **options)
    generator = torch.Generator("cuda").manual_seed(9)
    grad = torch.randn(out.shape, generator=generator, device="cuda", dtype=torch.float64)
    grad = grad.to(rounded or out.dtype)
    leaves = [t for t in tensors if t is not None]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def fused(*tensors: Any, **options: Any) -> torch.Tensor:
    return ops.self_attention_layer(*tensors, implementation="fused", **options)


def captured(
    function: Any, tensors: list[Any], options: dict[str, Any], rounded: torch.dtype | None = None
) -> list[torch.Tensor]:
    """`all_of` by a CUDA graph."""
    out = all_of(function, tensors, options)[0]
    generator = torch.Generator("cuda").manual_seed(9)
    grad = torch.randn(out.shape, generator=generator, device="cuda", dtype=torch.float64)
    grad = grad.to(rounded or out.dtype).to(out.dtype)
    leaves = [t for t in tensors if t is not None]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*tensors, **options)
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    for tensor in found:
        tensor.fill_(float("nan"))
    graph.replay()
    return found


def assert_right(
    math: str, tensors: list[Any], options: dict[str, Any], what: str, run: Any = all_of
) -> None:
    """At most twice plain PyTorch's error, and a unit in the last place, against float64."""
    wide = [t if t is None else t.detach().double().requires_grad_() for t in tensors]
    exact = all_of(reference, wide, options, tensors[0].dtype)
    plain = all_of(reference, tensors, options)
    names = (
        "out",
        *(
            n
            for n, t in zip(("x", "qkv_w", "qkv_b", "out_w", "out_b"), tensors, strict=True)
            if t is not None
        ),
    )
    ulp = 1e-3 if math == "tf32" else torch.finfo(tensors[0].dtype).eps
    for name, ours, near, far in zip(names, run(fused, tensors, options), plain, exact, strict=True):
        assert not ours.isnan().any(), f"{what} {name}: NaN"
        for measure in (torch.linalg.vector_norm, lambda x: x.abs().max()):
            bound = 2 * measure(near.double() - far) + ulp * measure(far)
            error = measure(ours.double() - far)
            assert error <= bound, f"{what} {name}: error {error:.3e}, at most {bound:.3e}"


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_right(shape: tuple[int, ...], math: str) -> None:
    tensors, options = draw(shape, choose(math))
    assert_right(math, tensors, options, str(shape))


@pytest.mark.parametrize("math", MATHS)
def test_is_right_in_a_graph(math: str) -> None:
    """Where layers that one launch would not fill the device with are two."""
    dtype = choose(math)
    padding = torch.arange(20, device="cuda") >= torch.arange(14, 21, device="cuda")[:, None]
    for shape, options in (
        ((8, 16, 8, 8, 64, 512, 512), {}),
        ((8, 64, 4, 4, 64, 256, 256), {"causal": True}),
        ((9, 16, 12, 12, 64, 768, 40), {"causal": True}),
        ((7, 20, 16, 16, 32, 512, 512), {"key_padding": padding}),
        ((16, 30, 8, 8, 64, 0, 512), {}),
        ((5, 100, 6, 6, 32, 192, 24), {"causal": True}),
        ((12, 50, 12, 12, 16, 192, 64), {"dropout_p": 0.3, "seed": torch.tensor([5], device="cuda")}),
        ((3, 65, 20, 20, 64, 1280, 1280), {}),
        ((4, 100, 12, 12, 64, 768, 768), {"causal": True}),
    ):
        tensors, heads = draw(shape, dtype)
        assert_right(math, tensors, {**heads, **options}, f"captured {shape}", captured)


@pytest.mark.parametrize("math", MATHS)
def test_is_right_with_masks_and_without_biases(math: str) -> None:
    dtype = choose(math)
    generator = torch.Generator("cuda").manual_seed(1)
    for shape in ((3, 10, 4, 4, 16, 64, 64), (2, 40, 2, 2, 64, 128, 128), (2, 128, 2, 2, 64, 128, 128)):
        B, S, H = shape[:3]

        def random(*sizes: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.rand(sizes, generator=generator, device="cuda")

        padding = random(B, S) < 0.4
        padding[0] = True  # nothing is seen
        for name, given in {
            "causal": {"causal": True},
            "padding": {"key_padding": padding},
            "mask": {"mask": random(S, S) < 0.5},
            "all": {"causal": True, "key_padding": padding, "mask": random(B, H, S, S) < 0.6},
            "dropout": {"dropout_p": 0.3, "seed": torch.tensor([1 << 40], device="cuda")},
            "scale": {"softmax_scale": 0.05},
        }.items():
            tensors, options = draw(shape, dtype, bias=name != "causal")
            assert_right(math, tensors, {**options, **given}, f"{name} {shape}")


@pytest.mark.parametrize("math", ["float32", "bfloat16"])
def test_every_length(math: str) -> None:
    dtype = choose(math)
    for S in range(1, 129):
        tensors, options = draw((2, S, 2, 2, 16, 48, 32), dtype, seed=S)
        assert_right(math, tensors, {**options, "causal": S % 2 == 1}, f"S={S}")


@pytest.mark.parametrize("math", MATHS)
def test_heads_that_share_keys(math: str) -> None:
    dtype = choose(math)
    padding = torch.arange(50, device="cuda") >= torch.arange(40, 42, device="cuda")[:, None]
    cases: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
        ((2, 12, 4, 1, 64, 256, 256), {}),
        ((8, 16, 8, 2, 64, 512, 512), {"causal": True}),
        ((2, 50, 4, 2, 64, 256, 256), {"key_padding": padding}),
        ((2, 64, 6, 3, 32, 192, 96), {"causal": True}),
        ((2, 33, 4, 2, 16, 64, 64), {"dropout_p": 0.3, "seed": torch.tensor([5], device="cuda")}),
        ((2, 128, 4, 2, 64, 256, 256), {"causal": True}),
    )
    for shape, options in cases:
        for run in (all_of, captured):
            tensors, heads = draw(shape, dtype)
            assert_right(math, tensors, {**heads, **options}, f"grouped {shape} {run.__name__}", run)


@pytest.mark.parametrize("kv, launches", [(8, 3), (2, 4)])
def test_runs_in_one_launch_and_two(kv: int, launches: int) -> None:
    tensors, options = draw((8, 16, 8, kv, 64, 512, 512), torch.bfloat16)
    grad = torch.randn_like(tensors[0])
    all_of(fused, tensors, options)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        out = fused(*tensors, **options)
        torch.autograd.grad(out, tensors, grad)
        torch.cuda.synchronize()
    names = [e.key for e in profile.key_averages() for _ in range(e.count) if "small_layer" in e.key]
    assert len(names) == launches, names


@pytest.mark.parametrize("math", MATHS)
def test_same_bits_on_any_stream_and_in_a_graph(math: str) -> None:
    dtype = choose(math)
    for shape in (SHAPES[0], SHAPES[3]):
        tensors, options = draw(shape, dtype)
        options |= {"causal": True}
        wanted = all_of(fused, tensors, options)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(20):
                for ours, one in zip(all_of(fused, tensors, options), wanted, strict=True):
                    assert torch.equal(ours, one)
        torch.cuda.current_stream().wait_stream(side)
        grad = torch.randn_like(wanted[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused(*tensors, **options)
            captured = [out, *torch.autograd.grad(out, tensors, grad)]
        fresh, _ = draw(shape, dtype, seed=5)
        with torch.no_grad():
            for old, new in zip(tensors, fresh, strict=True):
                old.copy_(new)
        graph.replay()
        out = fused(*tensors, **options)
        for ours, one in zip(captured, [out, *torch.autograd.grad(out, tensors, grad)], strict=True):
            assert torch.equal(ours, one)


def test_same_bits_at_every_replay() -> None:
    """With more of k than fits on chip at once, other work beside it, and nothing left of the last replay."""
    for shape in (
        (9, 16, 12, 12, 64, 768, 40),
        (3, 65, 20, 20, 64, 1280, 1280),
        (9, 30, 16, 16, 64, 1024, 1024),
        (4, 100, 12, 12, 64, 768, 768),
        (8, 128, 8, 8, 64, 512, 512),
    ):
        tensors, options = draw(shape, torch.bfloat16)
        tensors = [t.detach() for t in tensors]
        wanted = fused(*tensors, **options)
        side, junk = torch.cuda.Stream(), torch.zeros(1 << 24, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused(*tensors, **options)
        graph.replay()
        first = out.clone()
        torch.testing.assert_close(first, wanted, rtol=0.05, atol=0.05)
        for turn in range(200):
            out.fill_(float("nan"))
            with torch.cuda.stream(side):
                junk.add_(1)
            graph.replay()
            assert torch.equal(out, first), f"{shape}, replay {turn}"


def test_takes_any_layout() -> None:
    tensors, options = draw((2, 24, 4, 4, 32, 128, 128), torch.float32)
    wanted = all_of(fused, tensors, options)
    relaid = [t.detach().T.contiguous().T if t.dim() == 2 else t.detach() for t in tensors]
    relaid[0] = torch.randn(2, 24, 129, device="cuda")[..., 1:].copy_(tensors[0].detach())
    for ours, one in zip(all_of(fused, [t.requires_grad_() for t in relaid], options), wanted, strict=True):
        assert torch.equal(ours, one)
