"""Which layers train in fp8: by a clock of the test's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fuseline.acceleration import accelerate, fp8
from fuseline.acceleration.fp8 import Fp8Layers
from fuseline.acceleration.pay import Clock, Verdict
from fuseline.acceleration.precision import autocast, check_precision
from fuseline.acceleration.training_step import TrainingStep
from fuseline.errors import InputError
from fuseline.models.gpt import GPT
from fuseline.models.gpt_config import GPTConfig
from fuseline.nn.fp8_linear import Fp8Linear
from fuseline.ops import fp8_rows
from fuseline.ops.fp8_rows import E5M2
from fuseline.timing import Ratio

CPU = torch.device("cpu")


class Told(Clock):
    """Runs both once, and says that fp8 is faster where `pays` says so of the numbers of its weights."""

    def __init__(self, pays: Callable[[int], bool] = lambda number: True) -> None:
        super().__init__()
        self.pays, self.compared = pays, 0

    def compare(self, original: Any, swapped: Any, device: torch.device) -> Verdict:
        gradients, in_fp8 = original(), swapped()
        assert [g.shape for g in gradients] == [g.shape for g in in_fp8]
        assert not torch.equal(gradients[0], in_fp8[0])
        self.compared += 1
        ratio = 1.5 if self.pays(max(g.numel() for g in gradients[1:])) else 0.9
        return Verdict(ratio, 1.0, Ratio(ratio, ratio, ratio, 1))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path))


def _gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "block_size": 16, "num_layers": 2, "num_heads": 2, "embed_dim": 32}
    return GPT(GPTConfig(**{**sizes, **options}))


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(64, (3, 17), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def _prepared(model: nn.Module, clock: Clock | None = None, **options: Any) -> Fp8Layers:
    layers = Fp8Layers(model, clock=Told() if clock is None else clock, **options)
    layers.prepare(lambda: model(*_tokens()), lambda: autocast("fp8", CPU))
    return layers


def test_layers_of_blocks_change_and_come_back() -> None:
    model = _gpt()
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    layers = _prepared(model)
    in_fp8 = {layer.name for layer in layers.layers if layer.in_fp8}
    assert in_fp8 == {name for name in names if ".h." in name}
    assert {name for name, m in model.named_modules() if type(m) is Fp8Linear} == in_fp8
    head = next(layer for layer in layers.layers if layer.name == "lm_head")
    assert (head.rows, head.reason) == (0, "it is in no repeated block")
    layers.close()
    assert not any(isinstance(m, Fp8Linear) for m in model.modules())


def test_a_shape_is_timed_once_and_kept_for_the_next_run() -> None:
    first, second = Told(), Told()
    _prepared(_gpt(), first)
    assert first.compared == 4  # qkv, out, and the two of the MLP
    again = _prepared(_gpt(), second)
    assert second.compared == 0
    assert all(layer.in_fp8 for layer in again.layers if ".h." in layer.name)
    _prepared(_gpt(), second, gradient=E5M2)
    assert second.compared == 4


def test_other_kernels_are_timed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Told(), Told()
    _prepared(_gpt(), first)
    monkeypatch.setattr(fp8, "family_hash", lambda family: f"other {family}")
    _prepared(_gpt(), second)
    assert second.compared == first.compared


def test_a_layer_that_is_slower_stays_and_says_so() -> None:
    layers = _prepared(_gpt(), Told(lambda numbers: numbers >= 32 * 96))
    small = [layer for layer in layers.layers if layer.inputs == layer.outputs]
    assert [layer.reason for layer in small] == ["bf16 is as fast"] * 2
    assert [layer.in_fp8 for layer in layers.layers if layer.outputs == 96] == [True] * 2
    assert layers.summary() == [
        "2 x [96, 32], 48 rows, bf16 2 us, fp8 1: fp8",
        "2 x [32, 32], 48 rows, bf16 1 us, fp8 1: bf16, bf16 is as fast",
        "2 x [128, 32], 48 rows, bf16 2 us, fp8 1: fp8",
        "2 x [32, 128], 48 rows, bf16 2 us, fp8 1: fp8",
        "1 x [64, 32]: bf16, it is in no repeated block",
    ]


def test_layers_that_are_one_op_are_timed_as_one() -> None:
    clock = Told()
    layers = _prepared(_gpt(norm="fuseline"), clock)
    assert clock.compared == 3  # qkv, out, and the MLP
    assert "2 x [128, 32], 48 rows, bf16 2 us, fp8 1 for 2 layers: fp8" in layers.summary()


def test_odd_sizes_and_other_layers_stay_by_name() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.even = nn.Linear(16, 24), nn.Linear(24, 16)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
            self.idle, self.able = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.able(self.normed(self.even(self.odd(x))))

    model = nn.Sequential(Block(), Block())
    layers = Fp8Layers(model, clock=Told())
    layers.prepare(lambda: model(torch.randn(4, 16)), lambda: autocast("fp8", CPU))
    assert {layer.name: layer.reason for layer in layers.layers if layer.name.startswith("0.")} == {
        "0.odd": "its sizes are not multiples of 16",
        "0.even": "its sizes are not multiples of 16",
        "0.normed": "it is a ParametrizedLinear",
        "0.idle": "the batch does not reach it",
        "0.able": "",
    }


def test_preparing_leaves_no_trace() -> None:
    model = _gpt(dropout=0.1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    torch.manual_seed(3)
    wanted = torch.rand(())
    torch.manual_seed(3)
    _prepared(model)
    assert torch.rand(()) == wanted
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("norm", ["torch", "fuseline"])
def test_gradients_of_a_model_are_near_those_in_float32(norm: str) -> None:
    model = _gpt(norm=norm, bias=True)
    model(*_tokens()).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    layers = _prepared(model)
    with layers.one_step(), autocast("fp8", CPU):
        model(*_tokens()).backward()
    apart = sum(float((p.grad - wanted[name]).square().sum()) for name, p in model.named_parameters())
    length = sum(float(g.square().sum()) for g in wanted.values())
    assert 0.005 < (apart / length) ** 0.5 < 0.12


def test_an_accelerated_model_takes_its_step_in_fp8() -> None:
    model = _gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fast = accelerate(model, _tokens(), time_sites=False)
    step = TrainingStep(
        model,
        lambda batch: fast._prepared(batch, False),
        optimizer,
        precision="fp8",
        fp8=Fp8Layers(model, clock=Told()),
    )
    losses = [float(step(_tokens())) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    assert step.fp8 is not None
    assert sum(layer.in_fp8 for layer in step.fp8.layers) == 8
    step.close()
    assert not any(isinstance(m, Fp8Linear) for m in model.modules())


def test_where_there_is_no_fp8_the_error_says_what_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"cpu has no products in fp8\. Take bf16"):
        check_precision("fp8", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert fp8_rows.why_no_fp8(torch.device("cuda")) == (
        "NVIDIA A100 has compute capability 8.0, and fp8 needs 8.9"
    )
    with pytest.raises(InputError, match="training steps"):
        check_precision("fp8", torch.device("cuda"), train=False)


class _FeedForward(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.gate = nn.Linear(32, 48) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(nn.functional.gelu(self.up(x), approximate="tanh"))
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class _Block(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.feed_forward = _FeedForward(gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed_forward(x)


@pytest.mark.parametrize("gated", [True, False])
def test_what_accelerate_put_in_goes_on_over_layers_in_fp8(gated: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(_Block(gated) for _ in range(3))), torch.randn(40, 32)
    fast = accelerate(model, x, time_sites=False)
    layers = Fp8Layers(model, clock=Told())
    layers.prepare(lambda: model(x), contextlib.nullcontext)
    assert all(layer.in_fp8 and layer.together == (3 if gated else 2) for layer in layers.layers)
    before = {run.path: run.taken for run in fast.report().sites}
    y = model(x)
    assert {run.path: run.taken for run in fast.report().sites} == {p: n + 1 for p, n in before.items()}
    fast.undo()
    torch.testing.assert_close(model(x), y, rtol=2e-2, atol=2e-2)
    layers.close()
    assert not torch.equal(model(x), y)
