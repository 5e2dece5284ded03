"""The head and its loss by chunks, against all logits at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fuseline import ops
from fuseline.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, chunk_rows

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def draw(
    device: str, rows: int = 40, classes: int = 50, embed_dim: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, embed_dim, generator=generator).to(device, dtype)
    weight = (torch.randn(classes, embed_dim, generator=generator) / 4).to(device, dtype)
    target = torch.randint(classes, (rows,), generator=generator).to(device)
    return hidden.requires_grad_(), weight.requires_grad_(), target


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_size", [1, 7, 40, None])
def test_is_the_loss_of_the_logits(reduction: str, chunk_size: int | None, device: str) -> None:
    hidden, weight, target = draw(device)
    ours = ops.linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk_size=chunk_size)
    wanted = F.cross_entropy(F.linear(hidden, weight), target, reduction=reduction)
    torch.testing.assert_close(ours, wanted)
    factor = torch.linspace(1, 2, ours.numel(), device=device).view(ours.shape)
    found = torch.autograd.grad(ours, (hidden, weight), factor)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, (hidden, weight), factor))


@pytest.mark.parametrize("device", DEVICES)
def test_serves_two_backward_passes(device: str) -> None:
    hidden, weight, target = draw(device)
    loss = ops.linear_cross_entropy(hidden, weight, target)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(2 * loss, (hidden, weight))
    torch.testing.assert_close([2 * grad for grad in first], list(second))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "wanting", [("hidden",), ("weight",), ("bias",), ("hidden", "weight", "bias")], ids=str
)
def test_second_derivatives_are_refused_by_all_they_depend_on(
    wanting: tuple[str, ...], reduction: str
) -> None:
    hidden, weight, target = draw("cpu")
    given = {"hidden": hidden, "weight": weight, "bias": torch.zeros(50)}
    own = {name: tensor.detach().requires_grad_(name in wanting) for name, tensor in given.items()}
    loss = ops.linear_cross_entropy(target=target, reduction=reduction, **own)
    inputs = [own[name] for name in wanting]
    grads = torch.autograd.grad(loss, inputs, torch.ones_like(loss), create_graph=True)
    for grad in grads:
        for leaf in inputs:
            with pytest.raises(NotImplementedError, match="linear_cross_entropy has no second derivative"):
                torch.autograd.grad(grad.pow(2).sum(), leaf, retain_graph=True)


@pytest.mark.parametrize("device", DEVICES)
def test_serves_several_gradients_of_the_loss_at_once(device: str) -> None:
    hidden, weight, target = draw(device)
    loss = ops.linear_cross_entropy(hidden, weight, target)
    factors = torch.tensor([1.0, 2.0], device=device)
    found = torch.autograd.grad(loss, (hidden, weight), factors, is_grads_batched=True)
    for both in found:
        torch.testing.assert_close(2 * both[0], both[1])
    loss = ops.linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close([both[0] for both in found], list(torch.autograd.grad(loss, (hidden, weight))))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_made_before_the_loss_is_scaled_do_not_vanish_in_fp16(device: str) -> None:
    """Words that are no target have gradients of the mean around 5e-8, the last bit that fp16 has."""
    hidden, weight, target = draw(device, rows=4096, classes=5000, embed_dim=32, dtype=torch.float16)
    scale = 65536.0
    found = torch.autograd.grad(scale * ops.linear_cross_entropy(hidden, weight, target), (hidden, weight))
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    wanted = torch.autograd.grad(F.cross_entropy(F.linear(*wide), target), wide)
    for ours, true in zip(found, wanted, strict=True):
        assert (ours.double() / scale - true).norm() < 2e-3 * true.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_fp16_sums_beyond_its_range(device: str) -> None:
    """The gradient of the sum over all rows is past 65504; that of the mean is not."""
    rows = 9000
    hidden = torch.full((rows, 8), 20.0, dtype=torch.float16, device=device)
    weight = torch.zeros(4, 8, dtype=torch.float16, device=device, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.long, device=device)
    for chunk_size in (512, rows):
        loss = ops.linear_cross_entropy(hidden, weight, target, chunk_size=chunk_size)
        (grad,) = torch.autograd.grad(loss, weight)
        wanted = torch.tensor([-15.0, 5.0, 5.0, 5.0], device=device).half().view(4, 1).expand(4, 8)
        torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_to_one_graph(device: str) -> None:
    torch._dynamo.reset()
    hidden, weight, target = draw(device)

    def step(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return 3 * ops.linear_cross_entropy(hidden * 2, weight, target)

    loss = torch.compile(step, fullgraph=True, backend="aot_eager")(hidden, weight)
    torch.testing.assert_close(loss, step(hidden, weight))
    found = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(found, torch.autograd.grad(step(hidden, weight), (hidden, weight)))


@pytest.fixture
def memory_full_of_nan() -> Iterator[None]:
    """Memory that nobody has written reads as NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes, counted", [(49, None), (51, 47), (56, None)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.usefixtures("memory_full_of_nan")
def test_rows_of_logits_have_room_for_words_that_do_not_count(
    reduction: str, classes: int, counted: int | None, dtype: torch.dtype
) -> None:
    """Of a vocabulary of any size each row begins where products are fast."""
    torch.manual_seed(0)
    hidden = torch.randn(40, 16).to(dtype).requires_grad_()
    weight = (torch.randn(classes, 16) / 4).to(dtype).requires_grad_()
    bias = torch.randn(classes).to(dtype).requires_grad_()
    target = torch.randint(counted or classes, (40,))
    for given in ((hidden, weight), (hidden, weight, bias)):
        every: dict[str, Any] = {"reduction": reduction, "vocab_size": counted, "chunk_size": 24}
        exact = [x.detach().double().requires_grad_() for x in given]
        found = ops.linear_cross_entropy(given[0], given[1], target, *given[2:], **every)
        del every["chunk_size"]
        wanted = LINEAR_CROSS_ENTROPY.reference(exact[0], exact[1], target, *exact[2:], **every)
        share = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
        torch.testing.assert_close(found.double(), wanted, rtol=share, atol=share)
        grad_out = torch.randn_like(wanted)
        ours = torch.autograd.grad(found, given, grad_out.to(found.dtype))
        for one, other in zip(ours, torch.autograd.grad(wanted, exact, grad_out), strict=True):
            assert (one.double() - other).norm() <= share * other.norm()


@pytest.mark.gpu
def test_memory_is_down_by_the_logits() -> None:
    hidden, weight, target = draw("cuda", rows=16384, classes=16384, embed_dim=64, dtype=torch.bfloat16)
    logits = 16384 * 16384 * 2

    def peak(chunk_size: int | None) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if chunk_size is None:
            loss = F.cross_entropy(F.linear(hidden, weight), target)
        else:
            loss = ops.linear_cross_entropy(hidden, weight, target, chunk_size=chunk_size)
        torch.autograd.grad(loss, (hidden, weight))
        return torch.cuda.max_memory_allocated() - before

    whole = peak(None)
    assert peak(16384) <= whole - logits
    assert peak(2048) <= logits // 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_takes_less_memory_than_the_logits(dtype: torch.dtype) -> None:
    """Of GPT-2's head and a batch that is no larger than most, with all gradients, unless told how."""
    rows, classes, embed_dim = 8192, 50304, 768
    hidden, weight, target = draw("cuda", rows, classes, embed_dim, dtype)
    torch.autograd.grad(ops.linear_cross_entropy(hidden, weight, target), (hidden, weight))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(ops.linear_cross_entropy(hidden, weight, target), (hidden, weight))
    taken = torch.cuda.max_memory_allocated() - before
    assert [grad.dtype for grad in grads] == [dtype, dtype]
    assert taken < 0.8 * rows * classes * dtype.itemsize


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "rows, classes, counted, embed_dim", [(1100, 8261, 8200, 840), (2048, 16384, None, 768)]
)
def test_many_rows_of_a_large_head(
    rows: int, classes: int, counted: int | None, embed_dim: int, dtype: torch.dtype
) -> None:
    """Where logits stay in the kernel they are not rounded; and the last rows and words are no whole tile."""
    hidden, weight, target = draw("cuda", rows, classes, embed_dim, dtype)
    target = target % (counted or classes)
    target[3], target[5], target[6] = -100, (counted or classes) - 1, 0
    class_weight = torch.rand(counted or classes, device="cuda") + 0.5
    limit = 2e-5 if torch.cuda.get_device_capability() == (9, 0) else 1e-2
    for reduction in ("mean", "sum", "none"):
        for options in ({}, {"z_loss": 1e-3, "class_weight": class_weight}):
            every: dict[str, Any] = {"reduction": reduction, "vocab_size": counted, **options}
            with torch.no_grad():
                found = ops.linear_cross_entropy(hidden, weight, target.int(), **every)
                wanted = LINEAR_CROSS_ENTROPY.reference(hidden.double(), weight.double(), target, **every)
                torch.testing.assert_close(found.double(), wanted, rtol=limit, atol=limit)
                again = ops.linear_cross_entropy(hidden, weight, target, **every)
                assert torch.equal(found, again)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "rows, classes, embed_dim",
    [(3300, 16800, 944), (2800, 16800, 1144), (1200, 8264, 768), (2400, 8261, 776)],
)
def test_gradients_of_many_rows_of_a_large_head(
    rows: int, classes: int, embed_dim: int, dtype: torch.dtype
) -> None:
    """In bf16, in turn: all products the op's own, tiles not whole; those of the loss; only that."""
    hidden, weight, target = draw("cuda", rows, classes, embed_dim, dtype)
    hidden = (hidden.detach() / 8).requires_grad_()
    target[3] = -100
    # The mean's gradients of words that are no target are some 3e-7: of fp16, five steps of its last bit.
    factor = torch.tensor(2048.0, device="cuda")
    share = 0.02 if dtype is torch.bfloat16 else 0.004

    def gradients() -> tuple[torch.Tensor, ...]:
        loss = ops.linear_cross_entropy(hidden, weight, target)
        torch.testing.assert_close(loss, wanted, rtol=1e-2, atol=1e-2)
        return torch.autograd.grad(loss, (hidden, weight), factor)

    exact = (hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_())
    wanted = F.cross_entropy(F.linear(*exact), target)
    found, again, right = gradients(), gradients(), torch.autograd.grad(wanted, exact, factor)
    for ours, same, gradient in zip(found, again, right, strict=True):
        assert torch.equal(ours, same)
        for dim in (0, 1):
            error = (ours.float() - gradient).norm(dim=dim)
            assert (error <= share * gradient.norm(dim=dim) + 1e-3 * gradient.norm(dim=dim).mean()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.2, 4, 20, 60])
@pytest.mark.parametrize("options", ["plain", "weighed", "padded", "odd"])
@pytest.mark.parametrize("chunk_size", [None, 1152])
def test_gradients_by_powers(spread: float, options: str, chunk_size: int | None) -> None:
    """Logits between which all powers have room, most and next to none; targets likeliest, ignored."""
    rows, classes, embed_dim = 2304, 8317 if options == "odd" else 8320, 768
    hidden, weight, target = draw("cuda", rows, classes, embed_dim, torch.bfloat16)
    hidden = (hidden.detach() * spread).requires_grad_()
    every: dict[str, Any] = {"weighed": {"z_loss": 1e-3}, "padded": {"vocab_size": 8200}}.get(options, {})
    counted = every.get("vocab_size", classes)
    if options == "weighed":
        every["class_weight"] = torch.rand(classes, device="cuda") + 0.5
    with torch.no_grad():
        likeliest = (hidden.detach() @ weight.detach().t())[:, :counted].argmax(1)
        target = torch.where(torch.arange(rows, device="cuda") % 3 == 0, likeliest, target % counted)
        target[7], target[rows - 1] = -100, -100
        hidden[7] = float("nan")  # of a row that is ignored nothing may tell
    loss = ops.linear_cross_entropy(hidden, weight, target.int(), chunk_size=chunk_size, **every)
    found = torch.autograd.grad(loss, (hidden, weight))
    with torch.no_grad():
        hidden[7] = 0
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    wanted = LINEAR_CROSS_ENTROPY.reference(*exact, target, **every)
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=2e-5, atol=2e-5)
    for ours, gradient in zip(found, torch.autograd.grad(wanted, exact), strict=True):
        error = (ours.double() - gradient).norm() / gradient.norm()
        assert error < 6e-3
        rows_apart = (ours.double() - gradient).norm(dim=1)
        assert (rows_apart <= 0.03 * gradient.norm(dim=1) + 1e-3 * gradient.norm(dim=1).mean()).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "what", ["hidden alone", "weight alone", "float32 weight", "three chunks", "wide", "signs"]
)
def test_powers_serve_whatever_is_wanted(what: str) -> None:
    rows, embed_dim = 3456 if what == "three chunks" else 1536, 1144 if what == "wide" else 768
    hidden, weight, target = draw("cuda", rows, 8320, embed_dim, torch.bfloat16)
    chunk_size = 1152 if what == "three chunks" else None
    every: dict[str, Any] = {}
    if what == "signs":
        every["class_weight"] = torch.tensor([0.0, -0.5, 1.0, 2.0], device="cuda").repeat(8320 // 4)
    if what == "float32 weight":
        weight = weight.detach().float().requires_grad_()
    inputs = [hidden, weight]
    if what.endswith("alone"):
        inputs = [hidden if what.startswith("hidden") else weight]
        hidden.requires_grad_(inputs[0] is hidden)
        weight.requires_grad_(inputs[0] is weight)
    loss = ops.linear_cross_entropy(hidden, weight, target, chunk_size=chunk_size, **every)
    found = torch.autograd.grad(loss, inputs)
    assert [gradient.dtype for gradient in found] == [tensor.dtype for tensor in inputs]
    exact = [tensor.detach().bfloat16().double().requires_grad_() for tensor in (hidden, weight)]
    wanted = LINEAR_CROSS_ENTROPY.reference(*exact, target, **every)
    right = torch.autograd.grad(wanted, exact)
    for ours, tensor in zip(found, inputs, strict=True):
        gradient = right[0 if tensor is hidden else 1]
        assert (ours.double() - gradient).norm() < 6e-3 * gradient.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["target", "hidden", "infinite"])
def test_what_is_no_number_is_told_by_its_row(what: str) -> None:
    hidden, weight, target = draw("cuda", 2048, 8320, 768, torch.bfloat16)
    with torch.no_grad():
        if what == "target":
            target[5] = 8320
        else:
            hidden[5, 3] = float("nan" if what == "hidden" else "inf")
    loss = ops.linear_cross_entropy(hidden, weight, target)
    (grad_hidden,) = torch.autograd.grad(loss, hidden)
    assert loss.isnan()
    assert grad_hidden[5].isnan().all()
    others = torch.arange(2048, device="cuda") != 5
    assert grad_hidden[others].isfinite().all()
    with_none = torch.full_like(target, -100)
    (nothing,) = torch.autograd.grad(
        ops.linear_cross_entropy(hidden, weight, with_none, reduction="sum"), hidden
    )
    assert not nothing[others].any()


@pytest.mark.gpu
def test_gradients_by_powers_in_a_graph() -> None:
    """Replayed the loss and its gradients are the same, and follow inputs to rows that are computed again."""
    hidden, weight, target = draw("cuda", 2048, 8320, 768, torch.bfloat16)

    def both() -> tuple[torch.Tensor, ...]:
        loss = ops.linear_cross_entropy(hidden, weight, target)
        return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both()
        both()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = both()
    with torch.no_grad():
        hidden.mul_(60)
    graph.replay()
    for replayed, called in zip(kept, both(), strict=True):
        assert torch.equal(replayed, called)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"weight": torch.zeros(50, 17)}, ValueError, r"hidden has shape \[40, 16\] and weight \[50, 17\]"),
        ({"weight": torch.zeros(50, 16).half()}, TypeError, r"weight is Half and hidden Float"),
        ({"bias": torch.zeros(49)}, ValueError, r"bias has shape \[49\]; it is \[50\]"),
        ({"target": torch.zeros(3, dtype=torch.long)}, ValueError, r"target has shape \[3\] and hidden"),
        ({"target": torch.full((40,), 50)}, IndexError, r"is 50; classes go from 0 to 49"),
        ({"reduction": "average"}, ValueError, r"reduction is 'average'"),
        ({"chunk_size": 0}, ValueError, r"chunk_size is 0"),
        ({"vocab_size": 51}, ValueError, r"vocab_size is 51; weight has 50 rows"),
        ({"weight": torch.zeros(0, 16)}, ValueError, "no class to choose from"),
        ({"target": torch.zeros(40, dtype=torch.long, device="meta")}, ValueError, "target is on meta"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    hidden, weight, target = draw("cpu")
    with pytest.raises(error, match=message):
        ops.linear_cross_entropy(**{"hidden": hidden, "weight": weight, "target": target, **change})


@pytest.mark.parametrize(
    "classes, dtype, rows",
    [
        (128, torch.bfloat16, 262144),
        (1000, torch.float32, 16768),
        (8192, torch.bfloat16, 4096),
        (50304, torch.bfloat16, 4096),
        (128256, torch.float16, 4096),
        (262144, torch.bfloat16, 2048),
        (50304, torch.float32, 2048),
        (256000, torch.float32, 1024),
        (2**31, torch.float64, 128),
    ],
)
def test_chunks_weigh_time_against_memory(classes: int, dtype: torch.dtype, rows: int) -> None:
    assert chunk_rows(classes, dtype) == rows
