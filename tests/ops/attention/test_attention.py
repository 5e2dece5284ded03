"""Every attention backend computes the same attention, or says why it does not run here."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fuseline.errors import InputError
from fuseline.ops import attention, attention_backends

BACKENDS = tuple(attention_backends.BACKENDS)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None = None
) -> torch.Tensor:
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        T, S = scores.shape[-2:]
        hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1) @ v


def draw(device: str, dtype: torch.dtype, T: int = 20, S: int = 20) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(2, 3, n, 16, generator=generator, device=device).to(dtype).requires_grad_()
        for n in (T, S, S)
    ]


def usable(backend: str, device: str, dtype: torch.dtype) -> None:
    reason = attention_backends.supports(backend, device, dtype, 16)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_is_right(backend: str, causal: bool, dtype: torch.dtype, device: str) -> None:
    usable(backend, device, dtype)
    q, k, v = draw(device, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    y = attention(q, k, v, causal=causal, backend=backend)
    wanted = exact(q, k, v, causal)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance)
    grad_out = torch.randn_like(y)
    found = torch.autograd.grad(y, (q, k, v), grad_out)
    for ours, other in zip(found, torch.autograd.grad(wanted, (q, k, v), grad_out.double()), strict=True):
        torch.testing.assert_close(ours, other, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_takes_a_scale(backend: str, causal: bool, scale: float, device: str) -> None:
    """Of any sign: kernels that hide keys by -inf before they scale would see them again, or NaN."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    usable(backend, device, dtype)
    q, k, v = draw(device, dtype)
    tolerance = 1e-5 if device == "cpu" else 4e-2
    y = attention(q, k, v, causal=causal, softmax_scale=scale, backend=backend)
    wanted = exact(q, k, v, causal, scale)
    torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance)
    grad_out = torch.randn_like(y)
    found = torch.autograd.grad(y, (q, k, v), grad_out)
    for ours, other in zip(found, torch.autograd.grad(wanted, (q, k, v), grad_out.double()), strict=True):
        torch.testing.assert_close(ours, other, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_over_longer_keys_lets_the_last_query_see_all(backend: str) -> None:
    usable(backend, "cpu", torch.float32)
    q, k, v = draw("cpu", torch.float32, T=5, S=12)
    y = attention(q, k, v, causal=True, backend=backend)
    torch.testing.assert_close(y.double(), exact(q, k, v, True), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [3, 67])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_masked_rows_have_the_same_bits_whatever_ran_before(D: int, T: int, dtype: torch.dtype) -> None:
    """Where a tile of rows is not full, what others left in shared memory stands in place of its mask."""
    generator = torch.Generator("cuda").manual_seed(D + T)
    q, k, v = (torch.randn(4, 8, n, D, generator=generator, device="cuda") for n in (T, 300, 300))
    mask = torch.rand(4, 1, T, 300, generator=generator, device="cuda") < 0.7
    bias = 50 * torch.randn(4, 1, 131, 300, generator=generator, device="cuda")
    others = torch.randn(4, 8, 131, D, generator=generator, device="cuda").to(dtype)
    q, k, v = (3 * q).to(dtype), k.to(dtype), v.to(dtype)
    first = attention(q, k, v, mask=mask, backend="fuseline")
    for _ in range(20):
        attention(others, k, v, mask=bias.to(dtype), backend="fuseline")
        assert torch.equal(attention(q, k, v, mask=mask, backend="fuseline"), first)


@pytest.mark.parametrize("backend", ["naive", "naive_fused", "math", "auto"])
def test_drops_weights(backend: str) -> None:
    q, k = (torch.zeros(1, 1, 64, 8) for _ in range(2))
    v = torch.eye(64)[None, None]
    torch.manual_seed(0)
    y = attention(q, k, v[..., :8].contiguous(), dropout_p=0.5, backend=backend) * 64
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert 0.3 < float((y == 0).float().mean()) < 0.7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_traces_into_one_graph(backend: str, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    usable(backend, device, dtype)
    if backend == "flex":
        pytest.skip("it compiles for each shape")
    torch._dynamo.reset()
    counter = CompileCounter()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal=True, backend=backend)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for T in (8, 12, 24):
        q, k, v = draw(device, dtype, T, T)
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_casts_as_torch_does(backend: str) -> None:
    usable(backend, "cpu", torch.bfloat16)
    q, k, v = draw("cpu", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = attention(q, k, v, backend=backend)
    assert y.dtype == torch.bfloat16
    grad_out = torch.randn_like(y)
    wanted = torch.autograd.grad(exact(q, k, v, False), (q, k, v), grad_out.double())
    for ours, other in zip(torch.autograd.grad(y, (q, k, v), grad_out), wanted, strict=True):
        torch.testing.assert_close(ours, other, rtol=4e-2, atol=4e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["efficient", "flash", "cudnn", "fuseline", "pick"])
def test_trains_compiled_under_autocast_and_in_a_cuda_graph(backend: str) -> None:
    torch._dynamo.reset()
    if backend != "pick":
        usable(backend, "cuda", torch.bfloat16)
    weight = torch.randn(48, 48 * 3, device="cuda", requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            q, k, v = (x @ weight).unflatten(-1, (9, 16)).chunk(3, -2)
            y = attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, backend=backend
            )
        return y.transpose(1, 2).flatten(2).float().square().mean()

    x = torch.randn(2, 64, 48, device="cuda")
    (wanted,) = torch.autograd.grad(step(x), weight)
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    (found,) = torch.autograd.grad(compiled(x), weight)
    torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-3)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(step(x), weight)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        (recorded,) = torch.autograd.grad(step(x), weight)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(recorded, wanted, rtol=3e-2, atol=3e-3)


def test_says_why_not() -> None:
    supports = attention_backends.supports
    assert supports("naive", "cpu", torch.float32, 7) is None
    assert supports("efficient", "cpu", torch.float32, 64) == "it is a CUDA kernel; the device is cpu"
    assert supports("flash", "cpu", torch.float32, 64, 0.1) == "it has no dropout"
    assert supports("flash", "cuda", torch.float32, 64) == "it takes float16, bfloat16, not float32"
    assert supports("pick", "cpu", torch.float32, 7) is None
    assert "multiples of 8 at bfloat16, not 20" in str(supports("flash", "cuda", torch.bfloat16, 20))
    assert "head dims up to 256, not 512" in str(supports("flash", "cuda", torch.bfloat16, 512))
    with pytest.raises(InputError, match=r"no attention backend named 'flsh'\. Did you mean 'flash'"):
        supports("flsh", "cpu", torch.float32, 64)


def test_refuses_what_does_not_fit() -> None:
    q, k, v = draw("cpu", torch.float32)
    with pytest.raises(InputError, match="no attention backend named 'cudn'"):
        attention(q, k, v, backend="cudn")
    with pytest.raises(InputError, match=r"They are \[B, H, T, D\]"):
        attention(q[0], k[0], v[0])
    with pytest.raises(InputError, match=r"k \[2, 3, 20, 8\]"):
        attention(q, k[..., :8], v)
    with pytest.raises(InputError, match="mask is on meta and q on cpu"):
        attention(q, k, v, mask=torch.ones(20, 20, device="meta"))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": 3}, {"soft_cap": 5.0}, {"return_lse": True}, {"dropout_p": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shapes_alone_attend_as_well(options: dict[str, object], device: str) -> None:
    q = torch.empty(2, 6, 5, 16, device="meta", requires_grad=True)
    k, v = (torch.empty(2, 3, 7, 16, device="meta", requires_grad=True) for _ in range(2))
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cpu" or torch.cuda.is_available()):
        found = attention(q, k, v, **options)  # type: ignore[arg-type]
    out = found[0] if isinstance(found, tuple) else found
    assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, "meta")
    grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
