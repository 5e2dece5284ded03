"""A model of the user's own on the batch that it came with, as something that a ladder measures.

Every rung gets a copy of the model as it came. The learning rate is 0: a step does all its work and changes
no weight, so that rungs are compared at the same weights, however many steps each of them took.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fuseline.acceleration import Acceleration, accelerate
from fuseline.acceleration.fp8 import Fp8Layers
from fuseline.acceleration.precision import autocast, matmul_format
from fuseline.acceleration.training_step import TrainingStep
from fuseline.bench.ladder.contender import BETAS, Batch, BatchSource, Contender, Step
from fuseline.bench.ladder.learner import Learner, TrainingState
from fuseline.bench.ladder.model_spec import RECORDED, ModelSpec
from fuseline.bench.ladder.pairing import Runs
from fuseline.bench.ladder.precision_check import Reference, errors
from fuseline.bench.ladder.result import Figure
from fuseline.errors import InputError, first_line
from fuseline.profiling.user_code import WithLoss, Work
from fuseline.timing import paired_ratio, ran_out_of_memory, reset_peak_memory, summarize
from fuseline.training.optimizer import make_optimizer
from fuseline.training.step import TrainStep

SAME_LOSS = 1e-5
"""Two passes over one batch whose losses differ by a larger share than this have drawn random numbers."""
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def spec_of(work: Work, name: str) -> ModelSpec:
    """The model as it came. `InputError` for weights in a format that training does not know."""
    formats = {p.dtype for p in work.model.parameters() if p.requires_grad}
    if not formats:
        raise InputError(f"{name} has no parameter that requires a gradient: there is nothing to train.")
    if len(formats) > 1 or not formats <= set(_NAMES):
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in formats))
        raise InputError(f"The weights of {name} are {found}; they must all be fp32, all bf16 or all fp16.")
    first = work.tensors[0]
    if first.dim() == 0:
        raise InputError(f"The first tensor of the batch of {name} has no dimension for its examples.")
    are_tokens = first.dim() == 2 and not first.is_floating_point()
    return ModelSpec(
        preset=f"{type(work.model).__name__} of {name}",
        batch=first.shape[0],
        seqlen=first.shape[1] if are_tokens else None,
        weights=_NAMES[formats.pop()],
    )


class ModelWorkload:
    """See `Workload`. `work` stays as it is, on the CPU; its batch lies on `device`.

    Raises `InputError` for a model that cannot be copied, fails on its batch, or returns no loss.
    """

    def __init__(self, work: Work, device: torch.device) -> None:
        self._device = device
        self._tensors = tuple(tensor.to(device) for tensor in work.tensors)
        self._work = work.to(torch.device("cpu"))
        self.learner = Learner(TrainingState({}), 0.0)
        self._truth = self._reference()

    def build(self, spec: ModelSpec) -> Contender:
        subject = self._copy()
        fast, seconds = None, 0.0
        if spec.kernels == "fuseline":
            begin = time.perf_counter()
            fast = self._accelerated(spec, subject)
            seconds = time.perf_counter() - begin
        optimizer = make_optimizer(subject, lr=0.0, betas=BETAS, fused=spec.optimizer == "fused")
        step: Step
        if spec.execution == RECORDED:
            assert fast is not None
            whole = fast.training_step(optimizer, spec.precision, grad_clip=0.0)
            step, fp8 = _RecordedStep(whole, subject, seconds), whole.fp8
        else:
            own = TrainStep(
                subject,
                optimizer,
                precision=spec.precision,
                execution=spec.execution,
                grad_clip=0.0,
                kernels=fast is not None,
            )
            step, fp8 = own if fast is None else _AcceleratedStep(own, seconds), own.fp8
        reset_peak_memory(self._device)  # what the proofs took is no part of a step
        return _ModelContender(spec, self._device, subject, optimizer, step, fast, fp8)

    def batches(self, spec: ModelSpec) -> BatchSource:
        return _Repeated(self._tensors)

    def begin(self, contender: Contender) -> None:
        pass

    def end(self, contender: Contender, runs: Runs) -> None:
        pass

    def figures(self, contender: Contender, runs: Runs) -> dict[str, Figure]:
        spec = contender.spec
        assert isinstance(spec, ModelSpec)
        time_ms = summarize(runs.new)
        metric, amount = "samples_per_s", spec.batch
        if spec.seqlen is not None:
            metric, amount = "tokens_per_s", spec.batch * spec.seqlen
        rate, low, high = (amount * 1e3 / ms for ms in (time_ms.median, time_ms.high, time_ms.low))
        figures = {"iteration_ms": Figure.of(time_ms), metric: Figure(rate, low, high, time_ms.n)}
        if runs.old:
            figures["paired_speedup"] = Figure.of(paired_ratio(runs.old, runs.new))
        return figures

    def check(self, contender: Contender) -> tuple[Mapping[str, Figure], Batch]:
        return ({} if self._truth is None else errors(contender, self._truth)), self._tensors

    def halved(self, contender: Contender) -> Batch | None:
        return None  # which dimensions are examples is the user's to know

    def _copy(self) -> WithLoss:
        try:
            model = copy.deepcopy(self._work.model)
        except Exception as error:  # a model may hold anything
            raise InputError(
                f"The model cannot be copied ({type(error).__name__}: {first_line(error)}), and every rung "
                "needs a copy of its own. Keep what cannot be copied outside of it."
            ) from error
        return WithLoss(self._work, model.to(self._device).train())

    def _accelerated(self, spec: ModelSpec, subject: WithLoss) -> Acceleration:
        """As the model will run."""
        model, batch = subject.called(self._tensors)
        with matmul_format(spec.precision), autocast(spec.precision, self._device):
            fast = accelerate(model, batch, train=True)
        if not fast.kept and spec.execution != RECORDED:
            raise InputError(f"accelerate kept nothing: {len(fast.sites)} sites recognized, none faster here")
        return fast

    def _reference(self) -> Reference | None:
        """Loss and gradients in fp32; None for a model that draws random numbers, of which no two passes are
        alike, and where memory does not suffice."""
        subject = self._copy()
        state = TrainingState.of(subject)
        subject.float()
        batch = tuple(t.float() if t.is_floating_point() else t for t in self._tensors)
        losses = []
        try:
            with matmul_format("fp32"):
                for seed in (0, 1):
                    torch.manual_seed(seed)
                    subject.zero_grad(set_to_none=True)
                    loss = subject(*batch)
                    loss.backward()
                    losses.append(float(loss.detach()))
        except InputError:
            raise
        except Exception as error:  # whatever the user's model raises
            if ran_out_of_memory(error):
                return None
            raise InputError(
                f"The model fails on its batch: {type(error).__name__}: {first_line(error)}"
            ) from error
        if abs(losses[1] - losses[0]) > SAME_LOSS * abs(losses[0]):
            return None
        gradients = {name: p.grad.cpu() for name, p in subject.named_parameters() if p.grad is not None}
        return Reference(self._tensors, state, losses[0], gradients)


class _ModelContender(Contender):
    """A copy of the model at work; `fast` is the handle where it was accelerated."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        subject: WithLoss,
        optimizer: torch.optim.Optimizer,
        step: Step,
        fast: Acceleration | None,
        fp8: Fp8Layers | None,
    ) -> None:
        super().__init__(spec, device, subject, optimizer, step)
        self._fast, self._fp8 = fast, fp8

    @property
    def note(self) -> str:
        """What is in the model now (a recorded step looks at its modules once more), and which layers are in
        fp8."""
        notes = [] if self._fp8 is None else self._fp8.summary()
        if self._fast is not None:
            kinds = Counter(site.kind for site in self._fast.kept)
            kept = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
            notes = [f"accelerate put in {kept or 'nothing'}", *notes]
        return "; ".join(notes)

    def close(self) -> None:
        self._fast = self._fp8 = None
        super().close()


class _Repeated:
    """The one batch, again and again; nobody waits for it."""

    wait_seconds = 0.0

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __iter__(self) -> _Repeated:
        return self

    def __next__(self) -> Batch:
        return self._batch


class _AcceleratedStep:
    """A step over modules that were swapped, which took `seconds`."""

    def __init__(self, step: TrainStep, seconds: float) -> None:
        self._step, self._seconds = step, seconds

    @property
    def compile_seconds(self) -> float:
        return self._seconds + self._step.compile_seconds

    def __call__(self, *batches: Any) -> Tensor:
        return self._step(*batches)

    def close(self) -> None:
        self._step.close()


class _RecordedStep:
    """`training_step`, called with the tensors of a batch. `InputError` where it could not be recorded."""

    def __init__(self, step: TrainingStep, subject: WithLoss, seconds: float) -> None:
        self._step, self._subject = step, subject
        self.compile_seconds = seconds
        self._is_first = True

    def __call__(self, batch: Batch) -> Tensor:
        begin = time.perf_counter()
        _, given = self._subject.called(batch)
        loss = self._step(given)
        if self._step.execution != "recorded":
            raise InputError(f"it runs eagerly: {self._step.reason}")
        if self._is_first:
            self.compile_seconds += time.perf_counter() - begin
            self._is_first = False
        return loss

    def close(self) -> None:
        self._step.close()
