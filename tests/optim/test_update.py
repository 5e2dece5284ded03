"""A step's end: which optimizers the kernel stands in for, what it is given, and that nothing else changes.

On a CPU the kernel's op is the formula in float64 here, so that all around it runs without a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fuseline.optim import CompactAdamW, Update, fused_adamw, update
from fuseline.optim.fused_adamw import gathered, why_not, why_not_now

CPU = torch.device("cpu")


def adamw_in_float64(
    weights, grads, exp_avgs, exp_avg_sqs, steps, sizes, rates, settings, norm, max_norm, inf, arrived
):  # fmt: skip
    """What the op says that it does, one parameter after the other."""
    if inf is not None and inf.item() == 1:
        return
    groups = [index for index, size in enumerate(sizes) for _ in range(size)]
    clip = 1.0 if norm is None else min(1.0, max_norm / (norm.item() + 1e-6))
    for i, group in enumerate(groups):
        lr, beta1, beta2, eps, decay = settings[5 * group : 5 * group + 5]
        lr = lr if rates[group] is None else rates[group].item()
        w, g, m, v = (x[i].double() for x in (weights, grads, exp_avgs, exp_avg_sqs))
        g = g * clip
        t = steps[i].item() + 1
        w = w - lr * decay * w
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        w = w - lr / (1 - beta1**t) * m / (v.sqrt() / (1 - beta2**t) ** 0.5 + eps)
        weights[i].copy_(w), exp_avgs[i].copy_(m), exp_avg_sqs[i].copy_(v)
        steps[i].add_(1)


def norm_in_float64(grads, arrived):
    return torch.cat([grad.double().flatten() for grad in grads]).norm().float()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`Update` on a CPU as on a GPU, with the ops above."""
    from fuseline import native

    if not native.ready("cpu"):
        pytest.skip("the op is not there")
    library = torch.library.Library("fuseline", "IMPL")
    library.impl("adamw", adamw_in_float64, "CPU")
    library.impl("gradient_norm", norm_in_float64, "CPU")
    monkeypatch.setattr(update, "why_not", lambda optimizer, device: None)
    yield
    library._destroy()


def parameters(shapes=((5, 3), (7,), (2, 3, 4)), seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def draw_gradients(given: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in given:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def two_groups(given: list[nn.Parameter]) -> torch.optim.AdamW:
    rate = torch.tensor(2e-3)
    groups = [
        {"params": given[:2], "lr": rate, "weight_decay": 0.1, "betas": (0.8, 0.95)},
        {"params": given[2:], "lr": 5e-3, "weight_decay": 0.0, "eps": 1e-6},
    ]
    return torch.optim.AdamW(groups, fused=True)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": two_groups,
    "not fused": lambda given: torch.optim.AdamW(given, lr=1e-2),
    "sgd": lambda given: torch.optim.SGD(given, lr=1e-2, momentum=0.9),
    "compact": lambda given: CompactAdamW(given, lr=1e-2, state="bf16"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_a_gpu_it_is_clipping_and_the_optimizers_own_step(name: str) -> None:
    ours, torchs = parameters(), parameters()
    optimizer, other = OPTIMIZERS[name](ours), OPTIMIZERS[name](torchs)
    updated = Update(optimizer, grad_clip=0.5)
    for seed in range(3):
        draw_gradients(ours, seed)
        draw_gradients(torchs, seed)
        updated()
        nn.utils.clip_grad_norm_(torchs, 0.5)
        other.step()
        for mine, theirs in zip(ours, torchs, strict=True):
            assert torch.equal(mine, theirs)
            assert torch.equal(mine.grad, theirs.grad)
    assert updated.reason is not None


@pytest.mark.parametrize("clip", [0.0, 0.3, 1e6])
def test_the_kernel_is_given_what_torch_computes_with(kernel: None, clip: float) -> None:
    ours, torchs = parameters(), parameters()
    optimizer, other = two_groups(ours), two_groups(torchs)
    updated = Update(optimizer, grad_clip=clip)
    for seed in range(4):
        for given in (ours, torchs):
            draw_gradients(given, seed)
            if seed == 2:
                given[1].grad = None
        updated()
        assert updated.reason is None
        if clip:
            nn.utils.clip_grad_norm_(torchs, clip)
        other.step()
        for mine, theirs in zip(ours, torchs, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-7)
            for key, value in optimizer.state[mine].items():
                torch.testing.assert_close(value, other.state[theirs][key], rtol=2e-6, atol=2e-7)
    assert [state["step"].item() for state in optimizer.state.values()] == [4, 3, 4]
    assert list(optimizer.state_dict()["state"][0]) == list(other.state_dict()["state"][0])


def test_the_formula_is_float64s_adamw(kernel: None) -> None:
    """That the formula above, with which all else is compared, is right: against torch in float64."""
    ours, exact = parameters(), [nn.Parameter(p.detach().double()) for p in parameters()]
    optimizer = two_groups(ours)
    other = torch.optim.AdamW(
        [
            {"params": exact[:2], "lr": 2e-3, "weight_decay": 0.1, "betas": (0.8, 0.95)},
            {"params": exact[2:], "lr": 5e-3, "weight_decay": 0.0, "eps": 1e-6},
        ],
        foreach=False,
    )
    updated = Update(optimizer)
    for seed in range(5):
        draw_gradients(ours, seed)
        for mine, theirs in zip(ours, exact, strict=True):
            theirs.grad = mine.grad.double()
        updated()
        other.step()
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-6, atol=1e-7)


def test_a_scheduler_sees_the_step(kernel: None) -> None:
    given = parameters()
    optimizer = torch.optim.AdamW(given, lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    updated = Update(optimizer)
    draw_gradients(given, 0)
    before = given[0].detach().clone()
    updated()
    assert updated.reason is None
    assert not torch.equal(before, given[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the scheduler came before the optimizer
        scheduler.step()
    assert gathered(optimizer, CPU).settings[0] == 5e-3


@pytest.mark.parametrize("overflows", [False, True])
def test_a_scaler_unscales_skips_and_goes_on(kernel: None, overflows: bool) -> None:
    ours, torchs = parameters(), parameters()
    ends = []
    for given, kind in ((ours, "update"), (torchs, "torch")):
        optimizer = torch.optim.AdamW(given, lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        updated = Update(optimizer, grad_clip=1.0, scaler=scaler)
        for seed in range(4):
            scaler.scale(torch.zeros(()))
            draw_gradients(given, seed, 8.0)
            if overflows and seed == 2:
                given[1].grad[3] = torch.inf
            if kind == "update":
                updated()
                continue
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(given, 1.0)
            scaler.step(optimizer)
            scaler.update()
        ends.append(scaler.get_scale())
        assert kind == "torch" or updated.reason is None
        assert optimizer.state[given[0]]["step"].item() == (3 if overflows else 4)
    assert ends[0] == ends[1]
    for mine, theirs in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-7)


def ready(change: Callable[[torch.optim.AdamW, list[nn.Parameter]], object]) -> str | None:
    """Why the kernel cannot take a step of an optimizer with a state, after `change`."""
    given = parameters()
    optimizer = two_groups(given)
    draw_gradients(given, 0)
    optimizer.step()
    assert not isinstance(gathered(optimizer, CPU), str)
    change(optimizer, given)
    found = gathered(optimizer, CPU)
    return found if isinstance(found, str) else None


def _set(name: str, value: object) -> Callable[[torch.optim.AdamW, list[nn.Parameter]], object]:
    return lambda optimizer, given: optimizer.param_groups[1].update({name: value})


CHANGES: dict[str, tuple[Callable[[torch.optim.AdamW, list[nn.Parameter]], object], str | None]] = {
    "amsgrad": (_set("amsgrad", True), "amsgrad"),
    "maximize": (_set("maximize", True), "maximize"),
    "differentiable": (_set("differentiable", True), "differentiable"),
    "not decoupled": (_set("decoupled_weight_decay", False), "weight decay"),
    "foreach": (_set("fused", False), "not fused"),
    "tensor betas": (_set("betas", (torch.tensor(0.9), 0.99)), "betas"),
    "capturable": (_set("capturable", True), None),
    "another rate": (_set("lr", 1.0), None),
    "pre hook": (lambda o, given: o.register_step_pre_hook(lambda *_: None), "hooks"),
    "post hook": (lambda o, given: o.register_step_post_hook(lambda *_: None), "hooks"),
    "another step": (lambda o, given: setattr(o, "step", lambda: None), "replaced"),
    "scheduler": (lambda o, given: torch.optim.lr_scheduler.StepLR(o, 1), None),
    "grad_scale": (lambda o, given: setattr(o, "grad_scale", torch.ones(1)), "grad_scale"),
    "no gradient": (lambda o, given: o.zero_grad(), "no parameter"),
    "one gradient": (lambda o, given: setattr(given[0], "grad", None), None),
    "no state": (lambda o, given: o.state.pop(given[0]), None),
    "sparse": (lambda o, given: setattr(given[0], "grad", torch.eye(5, 3).to_sparse()), "layout"),
    "turned": (lambda o, given: setattr(given[0], "grad", torch.ones(3, 5).t()), "orders"),
    "gaps": (lambda o, given: setattr(given[1], "grad", torch.ones(14)[::2]), "orders"),
    "double moments": (lambda o, given: o.state[given[0]].update(exp_avg=torch.eye(5, 3).double()), "moment"),
    "steps": (lambda o, given: o.state[given[0]].update(step=torch.tensor(1.0).double()), "counted"),
    "elsewhere": (lambda o, given: o.state[given[0]].update(exp_avg=torch.ones(5, device="meta")), "device"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_which_steps_the_kernel_takes(name: str) -> None:
    change, expected = CHANGES[name]
    reason = ready(change)
    if expected is None:
        assert reason is None
    else:
        assert reason is not None
        assert expected in reason


def test_global_hooks_and_a_subclass_keep_their_own_step() -> None:
    class Own(torch.optim.AdamW):
        pass

    given = parameters()
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert "hooks" in (why_not_now(two_groups(given)) or "")
    finally:
        handle.remove()
    assert why_not_now(two_groups(given)) is None
    assert "Own" in (why_not(Own(given, fused=True), CPU) or "")
    assert "cpu" in (why_not(two_groups(given), CPU) or "")


def test_channels_last_weights_are_taken() -> None:
    given = [nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))]
    optimizer = torch.optim.AdamW(given, fused=True)
    given[0].grad = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    optimizer.step()
    assert not isinstance(gathered(optimizer, CPU), str)
    given[0].grad = given[0].grad.contiguous()
    assert "orders" in str(gathered(optimizer, CPU))


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(3, 4).t(), True),
        (torch.ones(2, 3, 4).permute(2, 0, 1), True),
        (torch.ones(1, 5), True),
        (torch.ones(4, 6)[:, :5], False),
        (torch.ones(4).expand(3, 4), False),
        (torch.ones(0, 3), True),
    ],
)
def test_dense(tensor: Tensor, dense: bool) -> None:
    assert fused_adamw._is_dense(tensor) is dense


def test_the_norm_of_no_gradients_is_refused_as_shapes_are_asked_for() -> None:
    """A profiled step asks with the lists that the profiler kept, which may be empty."""
    from fuseline import native

    if not native.ready("cpu"):
        pytest.skip("the op is not there")
    arrived = torch.empty(1, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="no gradient"):
        torch.ops.fuseline.gradient_norm([], arrived)
    grads = [torch.empty(3, device="meta", dtype=torch.bfloat16)]
    norm = torch.ops.fuseline.gradient_norm(grads, arrived)
    assert (norm.shape, norm.dtype, norm.device.type) == ((), torch.float32, "meta")


def test_a_profiler_finds_clipping_among_the_optimizers_work():
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.full_like(weight, 3.0)
    update = Update(torch.optim.AdamW([weight]), grad_clip=1.0)
    with torch.profiler.profile() as recorded:
        update()
    (norm,) = [event for event in recorded.events() if event.name == "aten::_foreach_norm"]
    assert norm.cpu_parent is not None
    assert norm.cpu_parent.name == "Optimizer.step#AdamW.clip"
