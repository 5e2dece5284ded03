"""Steps on a CUDA device: each execution against the eager one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline import ops
from fuseline.errors import InputError
from fuseline.ops import products
from fuseline.training.execution import EXECUTIONS
from fuseline.training.optimizer import (
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    set_learning_rate,
)
from fuseline.training.step import TrainStep

Make = Callable[..., Any]

# The compiler warns of what it finds in these models (TF32 left off, softmax done one way), and of itself.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
WHOLE_STEP = [name for name, how in EXECUTIONS.items() if how.whole_step]
COMPILED = [name for name in EXECUTIONS if name != "eager"]


@pytest.fixture
def train(tiny_model: Make, batches: Make) -> Make:
    def run(
        steps: int, *, execution: str, dropout: float = 0.0, accumulation: int = 1, **options: Any
    ) -> tuple[list[float], list[torch.Tensor]]:
        model = tiny_model("cuda", dropout=dropout)
        torch.manual_seed(5)
        capturable = EXECUTIONS[execution].whole_step
        optimizer = make_optimizer(model, lr=1e-2, capturable=capturable)
        step = TrainStep(model, optimizer, execution=execution, accumulation=accumulation, **options)
        stream = iter(batches(steps * accumulation, device="cuda"))
        losses = []
        for number in range(steps):
            set_learning_rate(optimizer, 1e-2 / (number + 1))
            losses.append(step(*(next(stream) for _ in range(accumulation))))
        weights = [p.detach().clone() for p in model.parameters()]
        step.close()
        return [loss.item() for loss in losses], weights

    return run


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("execution", COMPILED)
def test_the_losses_are_the_eager_ones(train: Make, execution: str, precision: str) -> None:
    expected, _ = train(8, execution="eager", precision=precision)
    losses, _ = train(8, execution=execution, precision=precision)
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    assert losses == pytest.approx(expected, rel=tolerance)


def test_a_graph_is_the_eager_run_to_the_bit_dropout_included(train: Make) -> None:
    expected, eager = train(8, execution="eager", dropout=0.3)
    losses, graph = train(8, execution="graph", dropout=0.3)
    assert losses == expected
    for ours, theirs in zip(graph, eager, strict=True):
        assert torch.equal(ours, theirs)


def test_dropout_differs_from_replay_to_replay(tiny_model: Make, batches: Make) -> None:
    model = tiny_model("cuda", dropout=0.5)
    step = TrainStep(
        model, make_optimizer(model, lr=0.0, weight_decay=0.0, capturable=True), execution="graph"
    )
    batch = batches(1, device="cuda")[0]
    losses = {step(batch).item() for _ in range(6)}
    assert len(losses) == 6


@pytest.mark.parametrize("execution", COMPILED)
def test_accumulation_under_every_execution(train: Make, execution: str) -> None:
    expected, _ = train(4, execution="eager", accumulation=3)
    losses, _ = train(4, execution=execution, accumulation=3)
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("execution", WHOLE_STEP)
def test_other_shapes_are_recorded_anew(tiny_model: Make, batches: Make, execution: str) -> None:
    shapes = [4, 2, 4, 3, 2]
    runs = []
    for name in ("eager", execution):
        model = tiny_model("cuda")
        optimizer = make_optimizer(model, lr=1e-2, capturable=name != "eager")
        step = TrainStep(model, optimizer, execution=name)
        runs.append(
            [step(batches(1, batch=b, seed=i, device="cuda")[0]).item() for i, b in enumerate(shapes)]
        )
        step.close()
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)


@pytest.mark.parametrize("execution", WHOLE_STEP)
def test_a_graph_goes_on_from_loaded_state(tiny_model: Make, batches: Make, execution: str) -> None:
    stream = batches(6, device="cuda")
    whole, half = tiny_model("cuda"), tiny_model("cuda")
    optimizer = make_optimizer(whole, lr=1e-2, capturable=True)
    step = TrainStep(whole, optimizer, execution=execution)
    expected = [step(batch).item() for batch in stream]
    first = make_optimizer(half, lr=1e-2, capturable=True)
    begun = TrainStep(half, first, execution=execution)
    losses = [begun(batch).item() for batch in stream[:3]]
    resumed = tiny_model("cuda")
    resumed.load_state_dict(half.state_dict())
    second = make_optimizer(resumed, lr=1e-2, capturable=True)
    load_optimizer_state(second, optimizer_state(first))
    went_on = TrainStep(resumed, second, execution=execution)
    losses += [went_on(batch).item() for batch in stream[3:]]
    assert losses == expected


@pytest.mark.parametrize("execution", ["eager", *WHOLE_STEP])
def test_fp16_skips_overflow_without_being_asked(tiny_model: Make, batches: Make, execution: str) -> None:
    model = tiny_model("cuda")
    optimizer = make_optimizer(model, lr=1e-2, capturable=execution != "eager")
    step = TrainStep(model, optimizer, precision="fp16", execution=execution)
    scale = step.scaler.get_scale()
    with torch.no_grad():
        model.hidden.weight.fill_(torch.inf)
    before = [p.detach().clone() for p in model.parameters()]
    step(batches(1, device="cuda")[0])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert step.scaler.get_scale() == scale / 2


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_no_step_after_the_first_waits_for_the_device(
    tiny_model: Make, batches: Make, execution: str, precision: str
) -> None:
    model = tiny_model("cuda", dropout=0.1)
    optimizer = make_optimizer(model, lr=1e-2, capturable=EXECUTIONS[execution].whole_step)
    step = TrainStep(model, optimizer, precision=precision, execution=execution, accumulation=2)
    stream = batches(16, device="cuda")
    for i in range(5):  # torch's own graphs warm up, then record, then replay
        step(stream[2 * i], stream[2 * i + 1])
    losses = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(5, 8):
            set_learning_rate(optimizer, 1e-3 * i)
            losses.append(step(stream[2 * i], stream[2 * i + 1]).detach().clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(loss.isfinite() for loss in losses)


def test_a_closed_graph_gives_its_memory_back(tiny_model: Make, batches: Make) -> None:
    batch = batches(1, batch=512, seqlen=256, device="cuda")[0]
    torch.cuda.synchronize()
    held = []
    for _ in range(3):
        model = tiny_model("cuda")
        step = TrainStep(model, make_optimizer(model, lr=1e-2, capturable=True), execution="graph")
        step(batch)
        step.close()
        del model, step
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    assert held[2] <= held[0]


def test_a_graph_refuses_what_it_would_freeze(tiny_model: Make) -> None:
    model = tiny_model("cuda")
    with pytest.raises(InputError, match="capturable=True"):
        TrainStep(model, make_optimizer(model, lr=1e-2), execution="graph")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    with pytest.raises(InputError, match="learning rate"):
        TrainStep(model, optimizer, execution="graph")


def test_a_graph_has_workspaces_of_its_own(tiny_model: Make, batches: Make) -> None:
    """torch.compile frees cuBLAS's workspaces when it records graphs of its own."""
    losses = []
    for frees in (False, True):
        model = tiny_model("cuda")
        optimizer = make_optimizer(model, lr=1e-2, capturable=True)
        step = TrainStep(model, optimizer, execution="graph", precision="bf16")
        stream = list(batches(6, device="cuda"))
        taken = []
        for batch in stream:
            taken.append(step(batch).item())
            if frees:
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()
        losses.append(taken)
        step.close()
    assert losses[0] == losses[1]


class Product(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2048, 512, device="cuda") / 512**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight).float().square().mean()


def test_a_recorded_step_measures_its_products_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path))
    torch.ops.fuseline.product_forget()
    x = torch.randn(4096, 512, device="cuda")
    losses = {}
    for execution in ("eager", "graph"):
        torch.manual_seed(0)
        module = Product()
        optimizer = make_optimizer(module, lr=1e-2, capturable=execution == "graph")
        step = TrainStep(module, optimizer, precision="bf16", execution=execution)
        losses[execution] = [step((x,)).item() for _ in range(3)]
        step.close()
        measured = {(p.turned_left, p.turned_right) for p in products.choices(x.device)}
        assert measured == ({(False, True), (True, False)} if execution == "graph" else set())
    assert losses["graph"] == pytest.approx(losses["eager"], rel=1e-2)
