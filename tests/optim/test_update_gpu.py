"""AdamW in one launch on a CUDA device: the bits of torch's fused kernel, and the norm against float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fuseline.optim import Update
from fuseline.training.optimizer import set_learning_rate
from fuseline.training.step import TrainStep

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 3, 7, 8, 31, 1000, 4095, 4096, 4097, 8192, 8193, 20_001, 70_000)


Trained = tuple[list[nn.Parameter], torch.optim.Optimizer]


def _word() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cuda")


def _on(device_shapes: list[tuple[int, ...]], dtype: torch.dtype, offset: int = 0) -> list[nn.Parameter]:
    """Parameters at `offset` elements behind a multiple of 16 bytes."""
    made = []
    for shape in device_shapes:
        count = torch.Size(shape).numel()
        storage = torch.empty(count + offset, dtype=dtype, device="cuda").normal_()
        made.append(nn.Parameter(storage[offset:].view(shape)))
    return made


def _draw(given: list[nn.Parameter], scale: float = 1.0, offset: int = 0) -> None:
    for p in given:
        storage = torch.randn(p.numel() + offset, dtype=torch.float32, device="cuda") * scale
        p.grad = storage.to(p.dtype)[offset:].view(p.shape)


def _twins(
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    make: Callable[..., torch.optim.Optimizer],
    offset: int = 0,
) -> tuple[Trained, Trained]:
    ours = _on(shapes, dtype, offset)
    torchs = [nn.Parameter(p.detach().clone()) for p in ours]
    return (ours, make(ours)), (torchs, make(torchs))


def _grouped(given: list[nn.Parameter]) -> torch.optim.AdamW:
    third = max(1, len(given) // 3)
    rate = torch.tensor(3e-3, device="cuda")
    groups = [
        {"params": given[:third], "lr": rate, "weight_decay": 0.1, "betas": (0.9, 0.95)},
        {"params": given[third : 2 * third], "lr": 1e-4, "weight_decay": 0.0, "eps": 1e-6},
        {"params": given[2 * third :], "lr": 1e-2, "weight_decay": 0.3, "betas": (0.5, 0.99)},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], fused=True, capturable=True)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int32 if a.dtype.itemsize == 4 else torch.int16
    return torch.equal(a.detach().contiguous().view(kind), b.detach().contiguous().view(kind))


def _check_same(
    ours: list[nn.Parameter],
    one: torch.optim.Optimizer,
    torchs: list[nn.Parameter],
    other: torch.optim.Optimizer,
) -> None:
    for number, (mine, theirs) in enumerate(zip(ours, torchs, strict=True)):
        assert _same_bits(mine, theirs), number
        assert one.state[mine].keys() == other.state[theirs].keys()
        for name, value in one.state[mine].items():
            assert _same_bits(value, other.state[theirs][name]), (number, name)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_torchs(dtype: torch.dtype, offset: int) -> None:
    shapes = [(n,) for n in LENGTHS] + [(33, 65), (0,), (256, 128)]
    (ours, one), (torchs, other) = _twins(shapes, dtype, _grouped, offset)
    updated = Update(one)
    for number in range(12):
        _draw(ours, 10.0 ** -(number % 6), offset)
        for mine, theirs in zip(ours, torchs, strict=True):
            theirs.grad = mine.grad.clone()
        if number == 4:
            ours[3].grad = torchs[3].grad = None
        updated()
        other.step()
        assert updated.reason is None
        _check_same(ours, one, torchs, other)
        assert one.state[ours[1]]["step"].item() == number + 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_rare_values_have_torchs_bits_too(dtype: torch.dtype) -> None:
    """Zeros of either sign, the smallest and the largest numbers, infinities and NaN, each with each."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal / 2**5 if dtype != torch.float16 else 2.0**-24
    special = [0.0, -0.0, tiny, -tiny, info.smallest_normal, 1e-20, -1e-20, 1e-12, 3e-8, 1e-3, -1.0, 1e4]
    values = torch.tensor(
        [*special, info.max, -info.max, torch.inf, -torch.inf, torch.nan], device="cuda"
    ).to(dtype)
    each = torch.cartesian_prod(values, values, values, values.abs()).unbind(1)
    for decay in (0.0, 0.1):
        for eps in (1e-8, 0.0):
            pairs = []
            for _ in range(2):
                weight = nn.Parameter(each[0].clone())
                optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=decay, eps=eps, fused=True)
                optimizer.state[weight] = {
                    "step": torch.tensor(7.0, device="cuda"),
                    "exp_avg": each[2].clone(),
                    "exp_avg_sq": each[3].clone(),
                }
                weight.grad = each[1].clone()
                pairs.append((weight, optimizer))
            (mine, one), (theirs, other) = pairs
            updated = Update(one)
            updated()
            other.step()
            assert updated.reason is None
            for a, b in (
                (mine, theirs),
                *zip(one.state[mine].values(), other.state[theirs].values(), strict=True),
            ):
                numbers = ~(a.isnan() & b.isnan())
                assert _same_bits(torch.where(numbers, a, 0), torch.where(numbers, b, 0))


def test_more_parameters_than_a_launch_has() -> None:
    shapes = [(5 + n % 7, 11) for n in range(800)]
    (ours, one), (torchs, other) = _twins(shapes, torch.float32, _grouped)
    updated = Update(one)
    for _ in range(3):
        _draw(ours)
        for mine, theirs in zip(ours, torchs, strict=True):
            theirs.grad = mine.grad.clone()
        updated()
        other.step()
    assert updated.reason is None
    _check_same(ours, one, torchs, other)


def test_several_dtypes_in_one_optimizer_and_layouts() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 40, 3), nn.Flatten(), nn.Linear(40, 30).bfloat16(), nn.Linear(30, 7).half()
        )

    ends = []
    for kind in ("ours", "torch's"):
        module = model().cuda()
        module[0].to(memory_format=torch.channels_last)
        given = list(module.parameters())
        optimizer = torch.optim.AdamW(given, lr=1e-2, fused=True)
        updated = Update(optimizer)
        for number in range(4):
            torch.manual_seed(number)
            for p in given:
                p.grad = torch.randn_like(p)
            if kind == "ours":
                updated()
            else:
                optimizer.step()
        assert kind == "torch's" or updated.reason is None
        ends.append((given, optimizer))
    _check_same(*ends[0], *ends[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_float64s(dtype: torch.dtype) -> None:
    arrived = _word()
    several_waves = (150_000_001, 5, 0, 33_000, 1)  # in fp32; five pieces a block on an H100 or H200
    for lengths in ((1,), (3, 0, 5), LENGTHS, (4_000_000, 17), several_waves, tuple(range(1, 2000))):
        for offset in (0, 1):
            grads = [torch.randn(n + offset, device="cuda").to(dtype)[offset:] for n in lengths]
            norm = torch.ops.fuseline.gradient_norm(grads, arrived)
            exact = torch.cat([grad.double() for grad in grads]).norm()
            assert abs(norm.double() / exact - 1) < 2e-6
            assert torch.equal(norm, torch.ops.fuseline.gradient_norm(grads, arrived))
            assert arrived.item() == 0
    for value in (torch.inf, torch.nan):
        grads[-1][-1] = value
        assert not torch.ops.fuseline.gradient_norm(grads, arrived).isfinite()


def test_the_norm_of_several_dtypes() -> None:
    grads = [torch.randn(n, device="cuda").to(DTYPES[n % 3]) for n in LENGTHS]
    exact = torch.cat([grad.double() for grad in grads]).norm()
    assert abs(torch.ops.fuseline.gradient_norm(grads, _word()).double() / exact - 1) < 2e-6


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_clipping_is_one_factor_for_all(clip: float) -> None:
    (ours, one), (torchs, other) = _twins([(n,) for n in LENGTHS], torch.float32, _grouped)
    updated = Update(one, grad_clip=clip)
    for _ in range(4):
        _draw(ours)
        norm = torch.ops.fuseline.gradient_norm([p.grad for p in ours], _word())
        factor = torch.clamp(clip / (norm + 1e-6), max=1.0)
        for mine, theirs in zip(ours, torchs, strict=True):
            theirs.grad = mine.grad * factor
        updated()
        other.step()
        _check_same(ours, one, torchs, other)
    assert updated.reason is None


@pytest.mark.parametrize("overflows", [False, True])
def test_a_scaler_skips_where_a_gradient_overflowed(overflows: bool) -> None:
    (ours, one), (torchs, other) = _twins([(n,) for n in LENGTHS], torch.float32, _grouped)
    scalers = [torch.amp.GradScaler("cuda", init_scale=16.0, growth_interval=2) for _ in range(2)]
    updated = Update(one, scaler=scalers[0])
    for number in range(5):
        for scaler in scalers:
            scaler.scale(torch.zeros((), device="cuda"))
        _draw(ours, 16.0)
        if overflows and number in (2, 3):
            ours[5].grad[17] = torch.inf
        for mine, theirs in zip(ours, torchs, strict=True):
            theirs.grad = mine.grad.clone()
        updated()
        scalers[1].unscale_(other)
        scalers[1].step(other)
        scalers[1].update()
        _check_same(ours, one, torchs, other)
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert updated.reason is None
    assert one.state[ours[0]]["step"].item() == (3 if overflows else 5)


def test_a_graph_reads_rates_steps_and_the_norm_at_each_replay() -> None:
    (ours, one), (torchs, other) = _twins([(n,) for n in LENGTHS], torch.bfloat16, _grouped)
    given = [torch.empty_like(p) for p in ours]
    updated = Update(one)
    for p, grad, theirs in zip(ours, given, torchs, strict=True):
        p.grad, theirs.grad = grad.normal_(), grad.clone()
    updated()
    other.step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        updated()
    torch.cuda.current_stream().wait_stream(side)
    other.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        updated()
    assert updated.reason is None
    for rate in (1e-3, 5e-2, 0.0):
        for optimizer in (one, other):
            optimizer.param_groups[0]["lr"].fill_(rate)
        for grad, theirs in zip(given, torchs, strict=True):
            theirs.grad.copy_(grad.normal_())
        graph.replay()
        other.step()
        _check_same(ours, one, torchs, other)


@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_with_it_is_a_step_with_torchs(
    execution: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without clipping has the same bits; with clipping the norm may differ in its last bits."""
    ends: dict[tuple[str, float], list[Tensor]] = {}
    for kind in ("torch's", "ours"):
        for clip in (0.0, 0.05):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(40, 200), nn.GELU(), nn.Linear(200, 40)).cuda()
            rate = torch.tensor(1e-2, device="cuda")
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
            step = TrainStep(
                *(model, optimizer),
                loss=lambda module, batch: nn.functional.mse_loss(module(batch[0]).float(), batch[1]),
                execution=execution,
                precision=precision,
                grad_clip=clip,
                kernels=kind == "ours",
            )
            for number in range(6):
                torch.manual_seed(number)
                x = torch.randn(64, 40, device="cuda")
                set_learning_rate(optimizer, 1e-2 / (1 + number))
                step((x, x.flip(1)))
            assert (step._update.reason is None) is (kind == "ours")
            ends[kind, clip] = [p.detach().clone() for p in model.parameters()]
            step.close()
    for mine, theirs in zip(ends["ours", 0.0], ends["torch's", 0.0], strict=True):
        assert _same_bits(mine, theirs)
    for mine, theirs in zip(ends["ours", 0.05], ends["torch's", 0.05], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_schedulers_warning_stays_away() -> None:
    given = _on([(100,)], torch.float32)
    optimizer = torch.optim.AdamW(given, lr=1e-2, fused=True)
    _draw(given)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    updated = Update(optimizer)
    updated()
    assert updated.reason is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
