"""One spec brought to life: the model, its optimizer and its training step, ready to be timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from fuseline.bench.ladder.learner import TrainingState, unpadded
from fuseline.bench.ladder.spec import RunSpec, Spec
from fuseline.models.gpt import GPT
from fuseline.timing import synchronize, time_steps
from fuseline.training.optimizer import make_optimizer, set_learning_rate
from fuseline.training.step import TrainStep

Batch = tuple[torch.Tensor, ...]


class BatchSource(Iterator[Batch], Protocol):
    """Batches without end, and the seconds their taker has waited for them so far."""

    @property
    def wait_seconds(self) -> float: ...


class Run(NamedTuple):
    """Milliseconds a step, fetching its batch included, and how many of them were spent waiting for it."""

    ms: float
    wait_ms: float


BETAS = (0.9, 0.95)
# Steps before anything is timed. A compiled step compiles in the first, records its CUDA graph in the second
# and replays it from the third on.
WARM_UP = {False: 2, True: 4}
LEAD_IN = 1
SCALER_PATIENCE = 20  # fp16's scale starts at 2**16 and halves at each step it skips


class Step(Protocol):
    """Takes one optimizer step over a batch and returns its loss. `compile_seconds`: what the first call took
    where it had something to compile or record."""

    @property
    def compile_seconds(self) -> float: ...
    def __call__(self, *batches: Any) -> torch.Tensor: ...
    def close(self) -> None: ...


class Contender:
    """A spec at work on `device`: a model, its optimizer and its step, ready to be timed."""

    def __init__(
        self, spec: Spec, device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer, step: Step
    ) -> None:
        self.spec, self.device = spec, device
        self.model, self.optimizer, self.step = model, optimizer, step
        self.loss = torch.zeros((), device=device)

    @property
    def note(self) -> str:
        """What a reader of its figures should know, once it is warm."""
        return ""

    def warm_up(self, batches: Iterator[Batch]) -> None:
        """Compile, record, fill caches."""
        for _ in range(WARM_UP[self.spec.is_compiled]):
            self.loss = self.step(next(batches))
        synchronize(self.device)

    def run(self, batches: BatchSource, steps: int) -> Run:
        """Take `steps` steps to one synchronization, after `LEAD_IN` untimed ones in which clocks and caches
        settle from whoever ran before."""

        def one() -> None:
            self.loss = self.step(next(batches))

        for _ in range(LEAD_IN):
            one()
        before = batches.wait_seconds
        ms = time_steps(one, self.device, steps=steps)
        return Run(ms, (batches.wait_seconds - before) / steps * 1e3)

    def set_learning_rate(self, value: float) -> None:
        set_learning_rate(self.optimizer, value)

    def gradients(self, batch: Batch, state: TrainingState) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients (by name, fp32, unpadded) of one step over `batch`, taken from the weights of
        `state`.

        Read off AdamW's first moment, which after one step from nothing is (1 - beta1) times the gradient:
        the one place where a captured step leaves it, too. A step that fp16's scaler skipped is taken again.
        """
        self.set_learning_rate(0.0)
        state.without_moments().fill(self.model, self.optimizer)
        for _ in range(SCALER_PATIENCE):
            self.loss = self.step(batch)
            first = {
                name: self.optimizer.state[parameter]["exp_avg"]
                for name, parameter in self.model.named_parameters()
                if "exp_avg" in self.optimizer.state.get(parameter, {})
            }
            if any(bool(moment.any()) for moment in first.values()):
                break
        return float(self.loss), {
            name: unpadded(moment, self.model, name) / (1 - BETAS[0]) for name, moment in first.items()
        }

    def close(self) -> None:
        """Give everything back: compiled code, graphs, memory."""
        self.step.close()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        del self.step, self.optimizer, self.model, self.loss
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class GPTContender(Contender):
    """A spec of a GPT. Building it may fail: out of memory, or a case that torch does not have.

    Gradients are not clipped, as in nanoGPT's bench: a rung's time is that of the model and the optimizer.
    """

    spec: RunSpec
    model: GPT

    def __init__(self, spec: RunSpec, device: torch.device, state: TrainingState) -> None:
        with device:
            model = GPT(spec.config)
        state.fill(model)
        optimizer = make_optimizer(
            model,
            lr=0.0,  # the learner sets it before each run
            betas=BETAS,
            fused=spec.optimizer == "fused",
            capturable=spec.is_captured,
        )
        step = TrainStep(
            model,
            optimizer,
            precision=spec.precision,
            execution=spec.execution,
            grad_clip=0.0,
            kernels=spec.kernels == "fuseline",
        )
        super().__init__(spec, device, model, optimizer, step)
        self._fp8 = step.fp8

    @property
    def note(self) -> str:
        """Of a step in fp8, which layers are."""
        return "" if self._fp8 is None else "; ".join(self._fp8.summary())

    def close(self) -> None:
        self._fp8 = None
        super().close()
