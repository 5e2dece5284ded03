"""`fast.training_step(...)`: one optimizer step of the user's model, one CUDA graph where it can be recorded.

A step is forward under autocast, backward, clipping without a synchronization, optimizer and scheduler. If it
cannot be recorded (on a CPU, with an optimizer that is not capturable, with shapes that never repeat, with
layers that the host skips at random), it runs eagerly, and `execution` and `reason` say so. Batches that
differ in their length are padded to a few lengths where that was proved to change nothing (lengths.py).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from fuseline.acceleration.forms import Choice, Form, InForms, Inside, choose, narrowest, too_far
from fuseline.acceleration.fp8 import Fp8Layers
from fuseline.acceleration.learning_rates import LearningRates, why_not_recordable
from fuseline.acceleration.lengths import Lengths, Masks
from fuseline.acceleration.masks import MasksLeftOut, hides_nothing
from fuseline.acceleration.no_cache import without_cache
from fuseline.acceleration.observe import call_model
from fuseline.acceleration.padding_proof import NothingProvedError
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.precision import (
    autocast,
    check_precision,
    compute_dtype,
    make_scaler,
    matmul_format,
)
from fuseline.acceleration.recordable import HeldGraphError, NotRecordableError, why_not_plain
from fuseline.acceleration.recording import StepGraph
from fuseline.acceleration.returned_loss import returned_loss
from fuseline.acceleration.shared_input import across_modules
from fuseline.acceleration.wanted import Loss
from fuseline.acceleration.weight_copies import WeightCopies
from fuseline.errors import InputError, first_line
from fuseline.ops.philox import seeds_together
from fuseline.optim import Update
from fuseline.timing import ran_out_of_memory

MOST_GRAPHS = 8
"""Recordings that are kept: of batches in more shapes than that, the rest run eagerly."""

MANY_SHAPES = f"{MOST_GRAPHS} recordings are kept, and none of them is for the shapes of this batch"
MOST_HELD = 4
"""Steps for which a recording is tried while an output of an earlier pass is held."""
MOST_SETTINGS = 4
"""Settings of the optimizer, like momentum or weight decay, that steps are recorded for: a graph holds them
as numbers, so that a schedule of them would record every step."""


class Scheduler(Protocol):
    """Any object with a `step()`, such as torch's learning rate schedulers."""

    def step(self) -> object: ...


class TrainingStep(InForms):
    """`step(batch)` takes one optimizer step and returns the mean loss, detached, on the device.

    Args:
        model: called with each batch as `accelerate` calls it.
        prepare: called with the first batch, under the step's autocast, before anything is recorded. Returns
            the forms in which forward and loss can be computed, the plain one first. A recorded step keeps
            the fastest form; an eager step uses the first.
        optimizer: over the model's parameters.
        precision: "bf16" and "fp16" (with a gradient scaler, for a fused optimizer) run float32 weights under
            autocast; "tf32" and "fp32" do not. 16-bit weights need no autocast. "fp8" is bf16, except that
            linear layers of the model's blocks compute in fp8 where that is faster.
        accumulation: the number of micro-batches in a step: `step(first, second, ..)`; losses and gradients
            are averaged.
        grad_clip: the largest allowed norm of all gradients together; 0 for no clipping. `.grad` is clipped
            or not after a step (`fuseline.optim.Update`).
        scheduler: its `step()` is called after each optimizer step.
        loss: `loss(output, batch)`, for a model that returns no loss.
        pad: whether a batch may be padded to a length that is recorded (lengths.py says when).
        own_code: the context in which the model runs its own code.

    Attributes:
        execution: "recorded" or "eager", and `reason`: why it is eager.
        eager_steps: how many steps ran eagerly, by reason.
        lengths: how many steps were padded and by how much (`lengths.counts`), and why none are
            (`lengths.reason`).
        choice: the form that is used, and the milliseconds of each form; None before the first step.
        fp8: which linear layers compute in fp8, and why not the others (`fp8.summary()`); None for other
            precisions.
    """

    def __init__(
        self,
        model: nn.Module,
        prepare: Callable[[Any], Sequence[Form]],
        optimizer: torch.optim.Optimizer,
        *,
        precision: str = "bf16",
        accumulation: int = 1,
        grad_clip: float = 1.0,
        scheduler: Scheduler | None = None,
        loss: Loss | None = None,
        pad: bool = True,
        own_code: Inside = contextlib.nullcontext,
        fp8: Fp8Layers | None = None,
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.device = next(model.parameters()).device
        if fp8 is None:
            check_precision(precision, self.device)
        if accumulation < 1:
            raise InputError(f"accumulation={accumulation}: a step needs at least one micro-batch.")
        if grad_clip < 0:
            raise InputError(f"grad_clip={grad_clip}: a norm is not negative; 0 turns clipping off.")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise InputError(
                "LBFGS computes the loss several times in a step, but a training step computes it once. Take "
                "another optimizer, or call the accelerated model in a loop of your own."
            )
        self.precision = "fp32" if precision in _HALVES and _is_narrow(model) else precision
        self.accumulation = accumulation
        self._copies = WeightCopies(model, compute_dtype(self.precision))
        self._loss, self._prepare = loss, prepare
        self._forms: Sequence[Form] = ()
        self.choice: Choice | None = None
        self._scaler = make_scaler(self.precision, self.device, optimizer)
        self._update = Update(optimizer, grad_clip=grad_clip, scaler=self._scaler)
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.reason = _why_eager(model, optimizer, self.device)
        if precision == "fp8" and fp8 is None:
            fp8 = Fp8Layers(model, clock=Clock(recorded=not self.reason))
        self.fp8 = fp8
        self.eager_steps: Counter[str] = Counter()
        self._graph: StepGraph | None = None
        self._rates: LearningRates | None = None
        self.lengths, self._own_code = Lengths(model, pad=pad), own_code
        self._masks = MasksLeftOut()
        self._full: Masks = ()  # masks that hide nothing
        self._settings: dict[Hashable, None] = {}
        self._held = 0
        if not self.reason:
            self._graph = StepGraph(self._run, model, optimizer, self._scaler)
            self._rates = LearningRates(optimizer, self.device)

    @property
    def execution(self) -> str:
        return "eager" if self._graph is None else "recorded"

    def __call__(self, *micro_batches: Any) -> torch.Tensor:
        """Take one step over `accumulation` batches, each a mapping, a tuple or a tensor."""
        if len(micro_batches) != self.accumulation:
            raise InputError(
                f"This step accumulates over {self.accumulation} micro-batches and was given "
                f"{len(micro_batches)}."
            )
        if self._graph is not None:
            self._full = tuple(hides_nothing(batch) for batch in micro_batches)
        batches = tuple(self._moved(batch) for batch in micro_batches)
        if not self._forms:
            with matmul_format(self.precision), autocast(self.precision, self.device):
                self._forms = self._prepare(batches[0])
            if self.fp8 is not None:
                self._decide_fp8(self.fp8, batches[0])
        with matmul_format(self.precision):
            loss = self._take(batches)
        if self.scheduler is not None:
            self.scheduler.step()
        return loss

    def _decide_fp8(self, fp8: Fp8Layers, batch: Any) -> None:
        def forward() -> object:
            with self._forms[0].inside():
                return self._loss_of(call_model(fp8.model, batch), batch)

        with matmul_format(self.precision):
            fp8.prepare(forward, lambda: autocast(self.precision, self.device))

    def close(self) -> None:
        """Free recorded graphs and end fp8. The model and the optimizer stay usable; further steps are
        eager."""
        if self.fp8 is not None:
            self.fp8.close()
        if self._graph is not None:
            self._graph.close()
            self._graph, self.reason = None, "it was closed"

    def _take(self, batches: tuple[Any, ...]) -> torch.Tensor:
        if self._graph is None or self._rates is None:
            return self._eagerly(batches)
        if why := why_not_plain(batches, "the batches"):
            self._give_up(why)
            return self._eagerly(batches)
        self._rates.refresh()
        settings = self._rates.others()
        self._settings.setdefault(settings)
        if len(self._settings) > MOST_SETTINGS:
            self._give_up("the optimizer's settings beside the learning rate change from step to step")
            return self._eagerly(batches)
        room = len(self._graph) < MOST_GRAPHS
        fitted, self._full = self._fitted(batches, room)
        also = settings, self._full
        if not room and not self._graph.has(fitted, also):
            return self._eagerly(batches, f"{MANY_SHAPES} (not padded: {self.lengths.why})")
        try:
            if self.choice is None:
                self.choice = self._choose(fitted)
            loss = self._graph(fitted, also)
        except HeldGraphError as error:
            # `loss = step(batch)` lets go of the loss before, so that the next step is recorded.
            self._held += 1
            if self._held < MOST_HELD:
                return self._eagerly(batches, first_line(error))
            self._give_up(first_line(error))
            return self._eagerly(batches)
        except NotRecordableError as error:
            self._give_up(first_line(error))
            return self._eagerly(batches)
        except RuntimeError as error:
            if ran_out_of_memory(error) or self._graph.has(fitted, also):
                raise
            self._give_up(f"it could not be recorded ({first_line(error)})")
            return self._eagerly(batches)
        if fitted is not batches:
            self.lengths.count(batches, fitted)
        return loss

    def _fitted(self, batches: tuple[Any, ...], room: bool) -> tuple[tuple[Any, ...], Masks]:
        """The batches at the length that they are recorded at, and their masks that hide nothing."""
        fitted = self.lengths.fit(
            batches,
            self._full,
            self._to_compare,
            self._why_padding_shows,
            room=room,
        )
        return fitted or (batches, self._full)

    def _give_up(self, reason: str) -> None:
        self.close()
        self.choice, self.reason = None, reason

    def _choose(self, batches: tuple[Any, ...]) -> Choice:
        """Time a recorded step in every form."""
        graph = self._graph
        assert graph is not None

        def seconds_of(form: Form) -> float:
            with self._in_form(Choice(form)):
                return graph.seconds(batches)

        def why_wrong(form: Form) -> str | None:
            return graph.without_trace(lambda: self._why_wrong(form, batches[0]))

        return choose(self._forms, seconds_of, why_wrong)

    def _why_wrong(self, form: Form, batch: Any) -> str | None:
        """Why a form differs from the first: its loss or its gradients of a batch do. If the model draws
        random numbers, they differ between forms; then losses and gradients must only be finite."""
        random = torch.cuda.get_rng_state(self.device)
        wanted = self._gradients(self._forms[0], batch, self._full[0], self.precision)
        draws = not torch.equal(random, torch.cuda.get_rng_state(self.device))
        torch.cuda.set_rng_state(random, self.device)
        found = self._gradients(form, batch, self._full[0], self.precision)
        if any(
            not one.isfinite().all() and other.isfinite().all()
            for one, other in zip(found, wanted, strict=True)
        ):
            return "its gradients are not finite"
        if not draws and (apart := self._too_far(found, wanted)):
            return f"its loss and gradients lie {apart:.1%} from those of the kernels"
        return None

    def _to_compare(self, batch: Any, exact: bool) -> list[torch.Tensor]:
        """The loss and the gradients of a batch; with `exact` by the model's own code, without autocast."""
        form = Form("its own code", self._own_code) if exact else self._forms[0]
        return self._gradients(form, batch, hides_nothing(batch), "fp32" if exact else self.precision)

    def _why_padding_shows(
        self, found: list[torch.Tensor], wanted: list[torch.Tensor], batch: Any, *, exact: bool
    ) -> str | None:
        """Why a padded batch has another loss or other gradients than the batch as it came."""
        if not all(tensor.isfinite().all() for tensor in wanted):
            raise NothingProvedError("the loss or the gradients of the batch are not finite")
        if apart := self._too_far(found, wanted, exact):
            return (
                f"padding changes its loss and gradients by {apart:.1%}: its mask does not hide what is added"
            )
        return None

    def _too_far(self, found: list[torch.Tensor], wanted: list[torch.Tensor], exact: bool = False) -> float:
        """How far loss and gradients lie apart; 0 if roundings explain it: those of float32 if `exact`."""
        dtype = _COMPUTED_IN.get(self.precision, narrowest(t.dtype for t in wanted))
        dtype = torch.float32 if exact else dtype
        return too_far(found, wanted, dtype) or too_far(found[:1], wanted[:1], dtype)

    def _gradients(self, form: Form, batch: Any, full: Hashable, precision: str) -> list[torch.Tensor]:
        """The loss of a batch, and its gradients: zeros where there is none. `full`: masks of it that hide
        nothing."""
        self.optimizer.zero_grad(set_to_none=True)
        with self._in_form(Choice(form)), autocast(precision, self.device), self._inside(full):
            loss = self._loss_of(call_model(self.model, batch), batch)
        loss.backward()
        nothing = torch.zeros((), device=self.device)
        given = [
            nothing.to(p.dtype).expand_as(p) if p.grad is None else p.grad
            for p in self._parameters
            if p.requires_grad
        ]
        self.optimizer.zero_grad(set_to_none=True)
        return [loss.detach(), *given]

    def _eagerly(self, batches: tuple[Any, ...], reason: str = "") -> torch.Tensor:
        self.eager_steps[reason or self.reason] += 1
        with self._in_form(None):
            return self._run(batches)

    def _run(self, batches: tuple[Any, ...]) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with contextlib.nullcontext() if self.fp8 is None else self.fp8.one_step(), self._copies.one_step():
            losses = [self._backward(index, batch) for index, batch in enumerate(batches)]
        self._update()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _backward(self, index: int, batch: Any) -> torch.Tensor:
        """Adds a micro-batch's gradients to those before it; returns its loss."""
        with self._gradients_averaged(is_last=index == self.accumulation - 1):
            full = self._full[index] if self._full else ()
            with autocast(self.precision, self.device), self._inside(full):
                output = call_model(self.model, batch)
                loss = self._loss_of(output, batch)
                if self.accumulation > 1:
                    loss = loss / self.accumulation
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return loss.detach()

    @contextlib.contextmanager
    def _inside(self, full: Hashable) -> Iterator[None]:
        """The context of the kept form, with masks of which those in `full` hide nothing; that of the plain
        form for an eager step."""
        if self.choice is None:
            with across_modules(), self._forms[0].inside():
                yield
        else:
            seeds, masks = seeds_together(), self._masks.inside(full)
            with across_modules(), seeds, self.choice.form.inside(), masks:
                yield

    def _loss_of(self, output: Any, batch: Any) -> torch.Tensor:
        if self._loss is not None:
            return self._loss(output, batch)
        loss = returned_loss(output)
        if loss is None:
            raise InputError(
                f"The model returns {type(output).__name__} without a loss. Give training_step a "
                "loss=function(output, batch) that returns one number."
            )
        return loss

    def _moved(self, batch: Any) -> Any:
        def moved(leaf: Any) -> Any:
            return leaf.to(self.device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

        # A batch of transformers is a mapping of its own kind.
        batch = pytree.tree_map(moved, dict(batch) if isinstance(batch, Mapping) else batch)
        return batch if self._loss is not None else without_cache(self.model, batch)

    def _gradients_averaged(self, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Processes exchange gradients once a step, at its last micro-batch."""
        if isinstance(self.model, DistributedDataParallel) and not is_last:
            return self.model.no_sync()
        return contextlib.nullcontext()


_HALVES = ("bf16", "fp16", "fp8")
_COMPUTED_IN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16, "tf32": torch.float16}
"""What rounds like the products of a precision, whatever the weights are."""


def _is_narrow(model: nn.Module) -> bool:
    floating = [p for p in model.parameters() if p.is_floating_point()]
    return bool(floating) and all(p.dtype.itemsize == 2 for p in floating)


def _why_eager(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    if device.type != "cuda":
        return f"the model is on {device.type}, which has no CUDA graphs"
    if isinstance(model, DistributedDataParallel):
        return "gradients are exchanged between processes"
    if any(type(p) is not nn.Parameter for p in model.parameters()):
        return "its parameters are spread over processes or of a kind of their own"
    return why_not_recordable(optimizer) or ""
