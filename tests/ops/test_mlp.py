"""The MLP where kernels have GELU at the ends of its products, against float64 and against torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm

from fuseline import ops
from fuseline.nn.feed_forward import feed_forward, is_plain
from fuseline.ops.mlp import reference

from .recorded import recorded

NAMES = ("x", "weight_1", "bias_1", "weight_2", "bias_2")
# rows, C, F and D: whole tiles, rows and columns that end inside one, and a D that the kernels do not take.
SHAPES = [(16384, 768, 3072, 768), (20011, 800, 2056, 776), (9001, 768, 3080, 1608)]
WIDEST = (16384, 1600, 6400, 1600)


def draw(
    device: str, dtype: torch.dtype, rows: int, width: int, inner: int, out: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The op's tensors, and a gradient of what it returns."""
    generator = torch.Generator(device).manual_seed(0)

    def of(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    weight_1, weight_2 = of(inner, width, scale=width**-0.5), of(out, inner, scale=inner**-0.5)
    given = [of(rows, width), weight_1, of(inner), weight_2, of(out)]
    return [tensor.requires_grad_() for tensor in given], of(rows, out)


def turned(given: list[torch.Tensor], which: tuple[str, ...]) -> list[torch.Tensor]:
    """The same tensors, but the weights named are views of transposed leaves."""
    return [
        tensor.detach().t().contiguous().requires_grad_().t() if name in which else tensor
        for name, tensor in zip(NAMES, given, strict=True)
    ]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, WIDEST], ids=str)
@pytest.mark.parametrize("which", [(), ("weight_1", "weight_2")], ids=["upright", "turned"])
def test_is_as_near_as_torch_by_many_rows(
    which: tuple[str, ...], shape: tuple[int, int, int, int], dtype: torch.dtype, approximate: str
) -> None:
    given, grad_out = draw("cuda", dtype, *shape)
    given = turned(given, which)
    y = ops.mlp(*given, approximate)
    grads = torch.autograd.grad(y, given, grad_out)
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    exact = reference(*wide, approximate)
    exact_grads = torch.autograd.grad(exact, wide, grad_out.double())
    plain = reference(*given, approximate)
    plain_grads = torch.autograd.grad(plain, given, grad_out)
    for ours, theirs, wanted in zip((y, *grads), (plain, *plain_grads), (exact, *exact_grads), strict=True):
        assert ours.dtype is dtype
        assert error(ours, wanted) <= 1.42 * error(theirs, wanted)  # sqrt(2): see ops/mlp.py


@pytest.mark.gpu
def test_many_rows_are_repeatable() -> None:
    given, grad_out = draw("cuda", torch.bfloat16, *SHAPES[1])

    def once() -> list[torch.Tensor]:
        y = ops.mlp(*given)
        return [y, *torch.autograd.grad(y, given, grad_out)]

    seen = once()
    for first, second in zip(seen, once(), strict=True):
        assert torch.equal(first, second)
    with torch.no_grad():
        assert torch.equal(ops.mlp(*given), seen[0])


@pytest.mark.gpu
@pytest.mark.parametrize("which", [(), ("weight_1",), ("weight_2",), ("weight_1", "weight_2")], ids=str)
@pytest.mark.parametrize(
    "shape, launches", [(SHAPES[0], 2), (SHAPES[1], 2), (SHAPES[2], 0), (WIDEST, 2)], ids=str
)
def test_kernels_take_many_rows(
    shape: tuple[int, int, int, int], launches: int, which: tuple[str, ...]
) -> None:
    """Forward and backward, with weights as they lie; neither where grad_y is 1,608 wide."""
    given, grad_out = draw("cuda", torch.bfloat16, *shape)
    given = turned(given, which)
    torch.autograd.grad(ops.mlp(*given), given, grad_out)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        torch.autograd.grad(ops.mlp(*given), given, grad_out)
        torch.cuda.synchronize()
    keys = [e.key for e in profile.key_averages() for _ in range(e.count)]
    assert sum("linear_gelu" in key for key in keys) == launches, keys
    assert not any("copy" in key for key in keys), keys


@pytest.mark.gpu
def test_many_rows_are_captured_in_a_cuda_graph() -> None:
    given, grad_out = draw("cuda", torch.bfloat16, *SHAPES[0])

    def step() -> list[torch.Tensor]:
        y = ops.mlp(*given)
        return [y.detach(), *torch.autograd.grad(y, given, grad_out)]

    graph, captured = recorded(step)
    with torch.no_grad():
        given[0].neg_()
    graph.replay()
    for found, wanted in zip(captured, step(), strict=True):
        assert error(found, wanted) < 1e-2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")  # inductor's own imports
def test_many_rows_compile() -> None:
    given, grad_out = draw("cuda", torch.bfloat16, *SHAPES[0])
    seen = []
    for function in (torch.compile(ops.mlp, fullgraph=True), ops.mlp):
        y = function(*given)
        seen.append([y, *torch.autograd.grad(y, given, grad_out)])
    for found, wanted in zip(*seen, strict=True):
        assert error(found, wanted) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_many_rows_of_which_one_gradient_is_wanted(name: str) -> None:
    given, grad_out = draw("cuda", torch.bfloat16, *SHAPES[0])
    index = NAMES.index(name)
    wanted = torch.autograd.grad(ops.mlp(*given), given, grad_out)[index]
    own = [tensor if i == index else tensor.detach() for i, tensor in enumerate(given)]
    (found,) = torch.autograd.grad(ops.mlp(*own), given[index], grad_out)
    assert error(found, wanted) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("biases", [(False, True), (False, False)])
def test_many_rows_without_biases(biases: tuple[bool, bool]) -> None:
    given, grad_out = draw("cuda", torch.bfloat16, *SHAPES[0])
    x, weight_1, _, weight_2, bias_2 = given
    last = bias_2 if biases[1] else None
    wanted = [x, weight_1, weight_2, *([bias_2] if biases[1] else [])]
    ours = torch.autograd.grad(ops.mlp(x, weight_1, None, weight_2, last), wanted, grad_out)
    theirs = torch.autograd.grad(reference(x, weight_1, None, weight_2, last), wanted, grad_out)
    for found, other in zip(ours, theirs, strict=True):
        assert error(found, other) < 1e-2


@pytest.mark.gpu
def test_many_rows_at_odd_addresses() -> None:
    given, _ = draw("cuda", torch.bfloat16, *SHAPES[0])
    odd = []
    for tensor in given:
        moved = torch.empty(tensor.numel() + 1, device="cuda", dtype=tensor.dtype)[1:].view(tensor.shape)
        odd.append(moved.copy_(tensor.detach()).requires_grad_())
    grads = [torch.autograd.grad(ops.mlp(*tensors).sum(), tensors) for tensors in (given, odd)]
    for first, second in zip(*grads, strict=True):
        assert error(first, second) < 1e-2


@pytest.mark.parametrize("sizes", [(5, 0, 32, 8), (5, 16, 0, 8), (5, 16, 32, 0), (0, 0, 0, 0)], ids=str)
def test_sizes_of_zero(sizes: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    rows, width, inner, out = sizes
    shapes = (rows, width), (inner, width), (inner,), (out, inner), (out,)
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    y, wanted = ops.mlp(*given), reference(*given)
    torch.testing.assert_close(y, wanted)
    grads = [torch.autograd.grad(each.sum(), given, retain_graph=True) for each in (y, wanted)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "wanting, kept",
    [
        (("x",), ["z"]),
        (("x", "weight_1"), ["x", "z"]),
        (("weight_1",), ["x", "z"]),
        (("bias_1",), ["z"]),
        (("weight_2",), ["inner"]),
        (("bias_2",), []),
        (NAMES, ["x", "z", "inner"]),
    ],
    ids=str,
)
def test_keeps_what_wanted_gradients_take(wanting: tuple[str, ...], kept: list[str]) -> None:
    given, grad_out = draw("cpu", torch.float32, 5, 16, 32, 8)
    own = [tensor.requires_grad_(name in wanting) for name, tensor in zip(NAMES, given, strict=True)]
    parameters = {tensor.data_ptr() for tensor in own[1:]}
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = ops.mlp(*own)
    z = F.linear(own[0], own[1])
    values = {"x": own[0], "z": z, "inner": F.gelu(z + own[2], approximate="tanh")}
    found = [tensor for tensor in saved if tensor.data_ptr() not in parameters]
    assert len(found) == len(kept)
    for tensor, name in zip(found, kept, strict=True):
        torch.testing.assert_close(tensor, values[name])
    inputs = [tensor for tensor in own if tensor.requires_grad]
    grads = [torch.autograd.grad(each, inputs, grad_out) for each in (y, reference(*own))]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("which", [("weight_1",), ("weight_2",), ("weight_1", "weight_2")], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_turned_weights_have_gradients_in_their_own_order(device: str, which: tuple[str, ...]) -> None:
    given, grad_out = draw("cpu", torch.float32, 5, 16, 32, 8)
    plain = torch.autograd.grad(reference(*given), given, grad_out)
    own = turned(given, which)
    if device == "cpu":
        y = ops.mlp(*own)
        torch.testing.assert_close(y, reference(*given))
        grads = torch.autograd.grad(y, own, grad_out)
        torch.testing.assert_close(grads, plain)
    else:
        x, weight_1, bias_1, weight_2, _ = (tensor.detach().to("meta") for tensor in own)
        z = torch.empty(5, 32, device="meta")
        grads = torch.ops.fuseline.mlp_backward(
            grad_out.to("meta"), x, weight_1, bias_1, weight_2, z, z, "tanh", [True] * 5
        )
    for name, grad, tensor in zip(NAMES, grads, own, strict=True):
        assert grad.stride() == tensor.stride(), name


@pytest.mark.parametrize("compiled", [False, True])
def test_frozen_weights_compile(compiled: bool) -> None:
    given, grad_out = draw("cpu", torch.float32, 5, 16, 32, 8)
    own = [given[0], *(tensor.detach() for tensor in given[1:])]
    function = torch.compile(ops.mlp, fullgraph=True, backend="aot_eager") if compiled else ops.mlp
    grads = [torch.autograd.grad(each(*own), given[0], grad_out) for each in (function, reference)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("wanting", [("x",), ("weight_1",), ("bias_1",), NAMES], ids=str)
def test_second_derivatives_are_refused_by_all_they_depend_on(wanting: tuple[str, ...]) -> None:
    given, grad_out = draw("cpu", torch.float32, 5, 16, 32, 8)
    own = [tensor.requires_grad_(name in wanting) for name, tensor in zip(NAMES, given, strict=True)]
    inputs = {name: tensor for name, tensor in zip(NAMES, own, strict=True) if tensor.requires_grad}
    grads = torch.autograd.grad(ops.mlp(*own), list(inputs.values()), grad_out, create_graph=True)
    for name in set(inputs) - {"bias_2"}:  # on which none depends
        with pytest.raises(NotImplementedError, match="mlp has no second derivative"):
            torch.autograd.grad(grads[0].sum(), inputs[name], retain_graph=True)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gradients_of_float32_weights_are_float32(approximate: str) -> None:
    given, grad_out = draw("cpu", torch.float32, 40, 16, 32, 8)
    x, grad_out = given[0].detach().bfloat16().requires_grad_(), grad_out.bfloat16()
    own = [x, *given[1:]]
    y = ops.mlp(*own, approximate)
    narrow = [tensor.detach().bfloat16().requires_grad_() for tensor in own]
    plain = ops.mlp(*narrow, approximate)
    assert torch.equal(y, plain)
    wanted = torch.autograd.grad(plain, narrow, grad_out)
    grads = torch.autograd.grad(y, own, grad_out, create_graph=True)
    assert [grad.dtype for grad in grads] == [torch.bfloat16] + [torch.float32] * 4
    for found, other in zip(grads, wanted, strict=True):
        assert error(found, other) < 1e-2
    with pytest.raises(NotImplementedError, match="mlp has no second derivative"):
        torch.autograd.grad(grads[0].sum(), own[3])


def nothing(*_: object) -> None:
    """A hook that changes nothing."""


SPECIAL: dict[str, Callable[[torch.nn.Linear], object]] = {
    "forward hook": lambda linear: linear.register_forward_hook(nothing),
    "forward pre-hook": lambda linear: linear.register_forward_pre_hook(nothing),
    "backward hook": lambda linear: linear.register_full_backward_hook(nothing),
    "backward pre-hook": lambda linear: linear.register_full_backward_pre_hook(nothing),
    "pruned": lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
    "spectral norm": spectral_norm,
    "parametrized": parametrizations.weight_norm,
}


@pytest.mark.parametrize("special", SPECIAL)
def test_a_linear_layer_with_more_to_it_is_not_plain(special: str) -> None:
    linear = torch.nn.Linear(16, 16)
    assert is_plain(linear, torch.nn.Linear)
    SPECIAL[special](linear)
    assert not is_plain(linear, torch.nn.Linear)


def test_a_linear_layer_of_special_weights_is_not_plain() -> None:
    class Subclass(torch.Tensor):
        pass

    linear = torch.nn.Linear(16, 16)
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Subclass))
    assert not is_plain(linear, torch.nn.Linear)
    assert not is_plain(torch.nn.Identity(), torch.nn.Linear)
    assert is_plain(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear)


def test_feed_forward_computes_in_autocasts_dtype() -> None:
    first, second = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
    x = torch.randn(5, 16)
    torch.testing.assert_close(feed_forward(x, first, second, "none"), second(F.gelu(first(x))))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = feed_forward(x, first, second)
        y.sum().backward()
    assert y.dtype is torch.bfloat16
    assert first.weight.grad is not None
    assert first.weight.grad.dtype is torch.float32
    wide = copy.deepcopy(first).double(), copy.deepcopy(second).double()
    exact = feed_forward(x.double(), *wide)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # torch's leaves float64, too
        assert torch.equal(feed_forward(x.double(), *wide), exact)


def test_feed_forward_of_a_device_without_autocast() -> None:
    first, second = (torch.nn.Linear(*sizes, device="meta") for sizes in ((16, 64), (64, 16)))
    assert feed_forward(torch.empty(5, 16, device="meta"), first, second).shape == (5, 16)


def test_what_does_not_fit_is_refused() -> None:
    given, _ = draw("cpu", torch.float32, 5, 16, 32, 8)
    x, weight_1, bias_1, weight_2, bias_2 = given
    with pytest.raises(ValueError, match=r"they are \[\.\.\., C\], \[F, C\] and \[D, F\]"):
        ops.mlp(x, weight_1.t(), bias_1, weight_2, bias_2)
    with pytest.raises(ValueError, match="bias_2 has shape"):
        ops.mlp(x, weight_1, bias_1, weight_2, bias_1)
    with pytest.raises(ValueError, match="approximate is 'sigmoid'"):
        ops.mlp(x, weight_1, bias_1, weight_2, bias_2, "sigmoid")
    with pytest.raises(TypeError, match=r"weight_2 is Half and x Float\. It has x's dtype"):
        ops.mlp(x, weight_1, bias_1, weight_2.half(), bias_2)
