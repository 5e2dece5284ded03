from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fuseline.errors import InputError
from fuseline.training.optimizer import make_optimizer
from fuseline.training.step import TrainStep

Make = Callable[..., Any]

# torch's own compiler imports what torch itself calls deprecated.
compiles = pytest.mark.filterwarnings(r"ignore:`torch\.jit:DeprecationWarning")


@pytest.fixture
def train(tiny_model: Make, batches: Make) -> Make:
    def run(steps: int, **options: Any) -> tuple[list[float], nn.Module]:
        model = tiny_model()
        step = TrainStep(model, make_optimizer(model, lr=1e-2), **options)
        losses = [step(batch).item() for batch in batches(steps)]
        step.close()
        return losses, model

    return run


def test_a_step_is_what_the_plain_loop_does(tiny_model: Make, batches: Make, train: Make) -> None:
    losses, model = train(5, grad_clip=0.5)
    plain = tiny_model()
    optimizer = make_optimizer(plain, lr=1e-2)
    expected = []
    for batch in batches(5):
        optimizer.zero_grad()
        loss = plain(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        expected.append(loss.item())
    assert losses == expected
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_training_lowers_the_loss(tiny_model: Make, batches: Make) -> None:
    model = tiny_model()
    step = TrainStep(model, make_optimizer(model, lr=3e-2))
    batch = batches(1)[0]
    losses = [step(batch).item() for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_accumulation_equals_the_large_batch(tiny_model: Make, batches: Make) -> None:
    accumulated, whole = tiny_model(), tiny_model()
    micro = batches(4)
    large = tuple(torch.cat([m[i] for m in micro]) for i in range(2))
    first = TrainStep(accumulated, make_optimizer(accumulated, lr=1e-2), accumulation=4)(*micro)
    second = TrainStep(whole, make_optimizer(whole, lr=1e-2))(large)
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(accumulated.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_clipping_bounds_the_norm_and_zero_turns_it_off(tiny_model: Make, batches: Make) -> None:
    norms = {}
    for clip in (0.0, 1e-3):
        model = tiny_model()
        TrainStep(model, make_optimizer(model, lr=1e-2), grad_clip=clip)(batches(1)[0])
        norms[clip] = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-2)
    assert norms[0.0] > 1e-2


def test_the_loss_is_detached_and_stays_a_tensor(tiny_model: Make, batches: Make) -> None:
    model = tiny_model()
    loss = TrainStep(model, make_optimizer(model, lr=1e-2))(batches(1)[0])
    assert isinstance(loss, torch.Tensor)
    assert not loss.requires_grad


def test_a_loss_function_of_ones_own(tiny_model: Make, batches: Make) -> None:
    model = tiny_model()
    step = TrainStep(model, make_optimizer(model, lr=1e-2), loss=lambda m, batch: 2 * m(*batch))
    assert step(batches(1)[0]).item() == pytest.approx(2 * tiny_model()(*batches(1)[0]).item())


def test_bf16_computes_in_bf16_and_keeps_fp32_weights(tiny_model: Make, batches: Make) -> None:
    seen: list[torch.dtype] = []
    model = tiny_model()
    model.hidden.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    TrainStep(model, make_optimizer(model, lr=1e-2), precision="bf16")(batches(1)[0])
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_fp16_skips_the_step_whose_gradients_overflow_and_halves_the_scale(
    tiny_model: Make, batches: Make
) -> None:
    model = tiny_model()
    step = TrainStep(model, make_optimizer(model, lr=1e-2), precision="fp16")
    step.scaler.load_state_dict(
        {**step.scaler.state_dict(), "scale": 2.0**40}
    )  # scaled gradients overflow fp16 for certain
    before = [p.clone() for p in model.parameters()]
    step(batches(1)[0])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert step.scaler.get_scale() == 2.0**39
    step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 2.0**10})
    step(batches(1)[0])
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(state["step"].item() == 1 for state in step.optimizer.state.values())


def test_fp16_refuses_an_optimizer_that_would_synchronize(tiny_model: Make) -> None:
    model = tiny_model()
    with pytest.raises(InputError, match="fused"):
        TrainStep(model, make_optimizer(model, lr=1e-2, fused=False), precision="fp16")


@pytest.mark.parametrize(("precision", "format"), [("fp32", "highest"), ("bf16", "high")])
def test_the_process_wide_matmul_format_is_put_back(
    tiny_model: Make, batches: Make, precision: str, format: str
) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        seen = []
        model = tiny_model()
        model.hidden.register_forward_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
        TrainStep(model, make_optimizer(model, lr=1e-2), precision=precision)(batches(1)[0])
        assert seen == [format]
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@compiles
def test_inductor_trains_as_eager_does_and_reports_its_compile_time(
    tiny_model: Make, batches: Make, train: Make
) -> None:
    expected, _ = train(4)
    model = tiny_model()
    step = TrainStep(model, make_optimizer(model, lr=1e-2), execution="inductor")
    stream = batches(4)
    losses = [step(stream[0]).item()]
    compile_seconds = step.compile_seconds
    losses += [step(batch).item() for batch in stream[1:]]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert compile_seconds > 0.05
    assert step.compile_seconds == compile_seconds
    step.close()
    model(*stream[0]).backward()


@compiles
def test_every_step_is_compiled_for_itself(tiny_model: Make, batches: Make) -> None:
    compiled = []
    for _ in range(3):
        model = tiny_model()
        step = TrainStep(model, make_optimizer(model, lr=1e-2), execution="inductor")
        torch._dynamo.utils.counters.clear()
        step(batches(1)[0])
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        step.close()
    assert compiled == [1, 1, 1]


@pytest.mark.parametrize("execution", ["cudagraphs", "reduce-overhead", "graph", "inductor-graph"])
def test_cuda_graphs_are_refused_on_a_cpu(execution: str, tiny_model: Make) -> None:
    model = tiny_model()
    with pytest.raises(InputError, match="cpu"):
        TrainStep(model, make_optimizer(model, lr=1e-2), execution=execution)


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"execution": "inducter"}, "inductor"),
        ({"precision": "bf61"}, "bf16"),
        ({"precision": "tf32"}, "tf32"),
        ({"accumulation": 0}, "accumulation=0"),
        ({"grad_clip": -1.0}, "grad_clip=-1.0"),
    ],
)
def test_bad_options_are_told(options: dict[str, Any], complaint: str, tiny_model: Make) -> None:
    model = tiny_model()
    with pytest.raises(InputError, match=complaint):
        TrainStep(model, make_optimizer(model, lr=1e-2), **options)


def test_a_wrong_number_of_micro_batches_is_told(tiny_model: Make, batches: Make) -> None:
    model = tiny_model()
    with pytest.raises(InputError, match="2 micro-batches and was given 1"):
        TrainStep(model, make_optimizer(model, lr=1e-2), accumulation=2)(batches(1)[0])
