"""AdamW with moments in 16 and 8 bits, beside torch's in fp32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fuseline.errors import InputError
from fuseline.optim import CompactAdamW, adamw, state_bytes

WIDTH = 64
STEPS = 200
COMPACT = ["bf16", "8bit"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two matrices of 16,384 and four small parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.LayerNorm(4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    ).to(dtype)


def trained(make: Callable[..., torch.optim.Optimizer], net: nn.Module, steps: int = STEPS) -> list[float]:
    """Losses of a regression on a fixed nonlinear teacher, with noise, a fresh batch a step."""
    optimizer = make(net.parameters())
    losses = []
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    for _ in range(steps):
        x = torch.randn(128, WIDTH, generator=generator)
        y = torch.tanh(x @ teacher) + 0.1 * torch.randn(128, WIDTH, generator=generator)
        loss = F.mse_loss(net(x.to(net[0].weight.dtype)).float(), y)  # type: ignore[index, union-attr, arg-type]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in net.parameters()])


@pytest.mark.parametrize("state, of_the_way, of_the_loss", [("bf16", 0.01, 0.001), ("8bit", 0.03, 0.002)])
def test_the_course_is_that_of_fp32(state: str, of_the_way: float, of_the_loss: float) -> None:
    """After 200 steps the weights differ by a small share of the way that they went."""
    options = {"lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.99)}
    first, full, compact = model(), model(), model()
    expected = trained(lambda p: torch.optim.AdamW(p, **options), full)
    losses = trained(lambda p: CompactAdamW(p, state=state, **options), compact)
    way = (weights(full) - weights(first)).norm()
    assert (weights(compact) - weights(full)).norm() / way < of_the_way
    assert abs(sum(losses[-20:]) / sum(expected[-20:]) - 1) < of_the_loss
    assert expected[-1] < 0.3 * expected[0]


def test_fp32_state_is_torchs_to_the_bit() -> None:
    options = {"lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.99), "fused": True}
    full, same = model(), model()
    expected = trained(lambda p: torch.optim.AdamW(p, **options), full, 20)
    assert trained(lambda p: CompactAdamW(p, state="fp32", **options), same, 20) == expected
    assert torch.equal(weights(full), weights(same))


def test_the_first_step_does_not_see_the_rounding() -> None:
    full, compact = model(), model()
    trained(lambda p: torch.optim.AdamW(p, lr=1e-2), full, 1)
    trained(lambda p: CompactAdamW(p, lr=1e-2, state="8bit"), compact, 1)
    assert torch.allclose(weights(full), weights(compact), rtol=0, atol=1e-6)


@pytest.mark.parametrize("state, each", [("fp32", 8), ("bf16", 4), ("8bit", 2 + 8 / 256)])
def test_bytes_of_state(state: str, each: float) -> None:
    net = nn.Linear(512, 512, bias=False)
    optimizer = CompactAdamW(net.parameters(), state=state)
    net(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    assert state_bytes(optimizer) == 512 * 512 * each + 4  # and the step's count


def test_small_parameters_keep_fp32_moments() -> None:
    net = model()
    optimizer = CompactAdamW(net.parameters(), state="8bit")
    net(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
    for parameter in net.parameters():
        wanted = torch.uint8 if parameter.numel() >= 4096 else torch.float32
        assert optimizer.state[parameter]["exp_avg"].dtype is wanted


@pytest.mark.parametrize("state", COMPACT)
def test_a_stretch_at_a_time_is_the_same_to_the_bit(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, stretched = model(), model()
    trained(lambda p: CompactAdamW(p, state=state), whole, 5)
    monkeypatch.setattr(adamw, "STRETCH", 1024)
    trained(lambda p: CompactAdamW(p, state=state), stretched, 5)
    assert torch.equal(weights(whole), weights(stretched))


@pytest.mark.parametrize("state", COMPACT)
def test_the_second_moment_follows_gradients_that_fall(state: str) -> None:
    """Rounded to the nearest it would stay: a step takes 0.1% off, less than half of a format's spacing."""
    parameter = nn.Parameter(torch.zeros(8192))
    optimizer = CompactAdamW([parameter], lr=0.0, betas=(0.9, 0.999), state=state)
    for step in range(1500):
        parameter.grad = torch.full_like(parameter, 1.0 if step < 500 else 0.01)
        parameter.grad[::256] = 1.0  # one of a block goes on, so that the block's largest does not fall
        optimizer.step()
    exact = (1 - 0.999**500) * 0.999**1000
    _, second = adamw.WAYS[state].read(optimizer.state[parameter], 0, 8192)
    assert second.view(-1, 256)[:, 1:].mean().item() == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("state", ["fp32", *COMPACT])
def test_saved_and_loaded_it_goes_on_to_the_bit(state: str) -> None:
    net = model()
    optimizer = CompactAdamW(net.parameters(), state=state)
    batches = [torch.randn(16, WIDTH) for _ in range(6)]

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    for x in batches[:3]:
        step(net, optimizer, x)
    resumed = copy.deepcopy(net)
    second = CompactAdamW(resumed.parameters(), state=state)
    second.load_state_dict(optimizer.state_dict())
    for old, new in zip(net.parameters(), resumed.parameters(), strict=True):
        for name, value in optimizer.state[old].items():
            assert second.state[new][name].dtype is value.dtype
            assert torch.equal(second.state[new][name], value)
            assert second.state[new][name].data_ptr() != value.data_ptr()
    for x in batches[3:]:
        step(net, optimizer, x)
        step(resumed, second, x)
    assert torch.equal(weights(net), weights(resumed))


@pytest.mark.parametrize("state", ["fp32", *COMPACT])
def test_a_state_set_to_zero_is_a_fresh_one(state: str) -> None:
    """The warm-up of a recorded step makes the state and sets it to zero."""
    fresh, warmed = nn.Parameter(torch.randn(100, 50)), nn.Parameter(torch.zeros(100, 50))
    optimizers = [CompactAdamW([parameter], state=state) for parameter in (fresh, warmed)]
    warmed.grad = torch.randn(100, 50)
    optimizers[1].step()
    with torch.no_grad():
        warmed.copy_(fresh)
        for tensor in optimizers[1].state[warmed].values():
            tensor.zero_()
    for _ in range(3):
        for parameter, optimizer in zip((fresh, warmed), optimizers, strict=True):
            parameter.grad = parameter.detach().sin()
            optimizer.step()
    assert torch.equal(fresh, warmed)


def test_16_bit_weights_learn_with_stochastic_rounding() -> None:
    """Changes of 1e-5 on weights of 1, whose spacing is 0.0078: rounded to the nearest all are lost."""
    moved = {}
    for stochastic in (False, True):
        parameter = nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))
        optimizer = CompactAdamW(
            [parameter], lr=1e-5, weight_decay=0.0, state="8bit", stochastic_rounding=stochastic
        )
        for _ in range(50):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        moved[stochastic] = 1 - parameter.detach().double().mean().item()
    assert moved[False] == 0
    assert moved[True] == pytest.approx(50 * 1e-5, rel=0.1)


def test_moments_of_16_bit_weights_are_in_fp32_if_asked_for() -> None:
    net = model(torch.bfloat16)
    optimizer = CompactAdamW(net.parameters(), state="fp32", stochastic_rounding=True)
    net(torch.randn(4, WIDTH, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert {optimizer.state[p]["exp_avg"].dtype for p in net.parameters()} == {torch.float32}


def test_parameters_that_are_not_contiguous() -> None:
    plain = nn.Parameter(torch.randn(64, 128))
    turned = nn.Parameter(plain.detach().t().contiguous().t())
    assert not turned.is_contiguous()
    for parameter in (plain, turned):
        optimizer = CompactAdamW([parameter], state="8bit")
        for factor in (1.0, 2.0):
            parameter.grad = (parameter.detach() * factor).sin()
            optimizer.step()
    assert torch.equal(plain, turned)


def test_a_learning_rate_on_the_device_is_read_there() -> None:
    fixed, read = model(), model()
    trained(lambda p: CompactAdamW(p, lr=2e-3, state="8bit"), fixed, 3)
    rate = torch.tensor(2e-3)
    trained(lambda p: CompactAdamW(p, lr=rate, state="8bit"), read, 3)
    assert torch.allclose(weights(fixed), weights(read), atol=1e-7)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="no optimizer state named '4bit'"):
        CompactAdamW(model().parameters(), state="4bit")
    with pytest.raises(InputError, match=r"complex64"):
        CompactAdamW([nn.Parameter(torch.zeros(4, dtype=torch.complex64))])


def test_a_closure_is_called_and_its_loss_returned() -> None:
    net = model()
    optimizer = CompactAdamW(net.parameters())

    def closure() -> torch.Tensor:
        loss = net(torch.ones(2, WIDTH)).sum()
        loss.backward()
        return loss

    expected = net(torch.ones(2, WIDTH)).sum()
    assert optimizer.step(closure) == expected
