"""The training step in fp8: with micro-batches, clipping and several processes, and against bf16."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fuseline.acceleration.fp8 import Fp8Layers
from fuseline.acceleration.pay import Clock, Verdict
from fuseline.data.corpora import load_corpus
from fuseline.errors import InputError
from fuseline.models.gpt import GPT
from fuseline.models.gpt_config import GPTConfig
from fuseline.nn.fp8_linear import Fp8Linear
from fuseline.timing import Ratio
from fuseline.training.optimizer import make_optimizer
from fuseline.training.step import TrainStep

Batch = tuple[torch.Tensor, torch.Tensor]


class Faster(Clock):
    """Says of every layer that fp8 is faster."""

    def compare(self, original: Any, swapped: Any, device: torch.device) -> Verdict:
        return Verdict(2.0, 1.0, Ratio(2.0, 2.0, 2.0, 1))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path))


def _gpt(device: str = "cpu", **options: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "block_size": 16, "num_layers": 2, "num_heads": 2, "embed_dim": 32}
    return GPT(GPTConfig(**{**sizes, **options})).to(device)


def _batches(count: int, device: str = "cpu", *, batch: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(64, (batch, 17), generator=generator).to(device) for _ in range(count)]
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in drawn]


def _step(module: nn.Module, **options: Any) -> TrainStep:
    capturable = "graph" in options.get("execution", "")
    optimizer = make_optimizer(module, lr=1e-2, capturable=capturable)
    return TrainStep(module, optimizer, precision="fp8", fp8=Fp8Layers(module, clock=Faster()), **options)


def test_the_losses_follow_those_of_bf16() -> None:
    model, plain = _gpt(), _gpt()
    ours = _step(model)
    theirs = TrainStep(plain, make_optimizer(plain, lr=1e-2), precision="bf16")
    batch = _batches(1)[0]
    losses = [(float(ours(batch)), float(theirs(batch))) for _ in range(30)]
    assert losses[-1][1] < losses[0][1] - 1.0
    for mine, other in losses:
        assert mine == pytest.approx(other, abs=0.05)
    assert losses[0][0] != losses[0][1]


def test_micro_batches_add_up_and_gradients_are_clipped() -> None:
    model, whole = _gpt(), _gpt()
    micro = _batches(3)
    large = tuple(torch.cat([m[i] for m in micro]) for i in range(2))
    first = _step(model, accumulation=3, grad_clip=0.1)(*micro)
    second = _step(whole, grad_clip=0.1)(large)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-3)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert float(norm) == pytest.approx(0.1, rel=1e-2)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).norm()) < 0.02 * float(theirs.grad.norm())


def test_the_state_is_that_of_any_other_step() -> None:
    model, plain = _gpt(), _gpt()
    step = _step(model)
    step(_batches(1)[0])
    assert any(isinstance(m, Fp8Linear) for m in model.modules())
    assert {k: (v.shape, v.dtype) for k, v in model.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in plain.state_dict().items()
    }
    plain.load_state_dict(model.state_dict())
    step.close()
    assert not any(isinstance(m, Fp8Linear) for m in model.modules())
    tokens, targets = _batches(1)[0]
    assert torch.equal(model(tokens, targets), plain(tokens, targets))


def test_a_loss_of_ones_own_and_hooks_on_parameters() -> None:
    model, seen = _gpt(), []
    model.transformer.h[0].mlp.c_fc.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    step = _step(model, loss=lambda module, batch: 2 * module(*batch))
    step(_batches(1)[0])
    assert len(seen) == 1
    assert seen[0].dtype is torch.float32


def test_a_processor_is_told_what_to_take() -> None:
    model = _gpt()
    with pytest.raises(InputError, match="Take bf16"):
        TrainStep(model, make_optimizer(model, lr=1e-2), precision="fp8")


def test_several_processes_take_the_first_ones_decision(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    try:
        model, alone = DistributedDataParallel(_gpt()), _gpt()
        together, single = _step(model, accumulation=2), _step(alone, accumulation=2)
        for first, second in zip(_batches(4)[::2], _batches(4)[1::2], strict=True):
            assert torch.equal(together(first, second), single(first, second))
        assert any(isinstance(m, Fp8Linear) for m in model.modules())
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_the_loss_curve_is_within_the_noise_of_seeds(tmp_path: Path) -> None:
    """200 steps on the standard library's source, three seeds each."""
    text = bytearray("".join(itertools.islice(load_corpus("python", tmp_path).documents, 100)).encode())
    data = torch.frombuffer(text, dtype=torch.uint8).long()

    def curve(seed: int, precision: str) -> float:
        torch.manual_seed(seed)
        model = GPT(
            GPTConfig(vocab_size=256, block_size=64, num_layers=2, num_heads=2, embed_dim=64, norm="torch")
        )
        fp8 = Fp8Layers(model, clock=Faster()) if precision == "fp8" else None
        step = TrainStep(model, make_optimizer(model, lr=3e-3), precision=precision, fp8=fp8)
        generator = torch.Generator().manual_seed(seed)
        losses = []
        for _ in range(200):
            at = torch.randint(len(data) - 65, (16,), generator=generator)
            rows = torch.stack([data[i : i + 65] for i in at.tolist()])
            losses.append(step((rows[:, :-1], rows[:, 1:])))
        return float(torch.stack(losses[-50:]).mean())

    ends = {precision: [curve(seed, precision) for seed in range(3)] for precision in ("bf16", "fp8")}
    spread = max(ends["bf16"]) - min(ends["bf16"])
    difference = sum(ends["fp8"]) / 3 - sum(ends["bf16"]) / 3
    assert abs(difference) < spread, ends


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["torch", "fuseline"])
def test_a_recorded_step_is_the_eager_one(norm: str) -> None:
    losses: dict[str, list[float]] = {}
    for execution in ("eager", "graph"):
        model = _gpt("cuda", norm=norm, bias=True)
        step = _step(model, execution=execution, accumulation=2)
        stream = _batches(8, "cuda")
        losses[execution] = [
            float(step(*pair)) for pair in zip(stream[::2], stream[1::2], strict=True) for _ in range(4)
        ]
        step.close()
    assert losses["graph"] == pytest.approx(losses["eager"], rel=1e-3)
    assert losses["eager"][3] < losses["eager"][0]


@pytest.mark.gpu
def test_a_gpu_decides_by_its_clock() -> None:
    model = _gpt("cuda")
    step = TrainStep(
        model, make_optimizer(model, lr=1e-2, capturable=True), precision="fp8", execution="graph"
    )
    step(_batches(1, "cuda")[0])
    assert step.fp8 is not None
    assert all(layer.times is not None for layer in step.fp8.layers if ".h." in layer.name)
    step.close()
