"""One training step: gradients over the micro-batches, clipping, optimizer; no synchronization in it."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fuseline.acceleration.fp8 import Fp8Layers
from fuseline.acceleration.learning_rates import why_not_recordable
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.precision import (
    autocast,
    check_precision,
    compute_dtype,
    make_scaler,
    matmul_format,
)
from fuseline.acceleration.recording import Batch, StepGraph
from fuseline.acceleration.weight_copies import WeightCopies
from fuseline.errors import InputError
from fuseline.optim import Update
from fuseline.timing import synchronize
from fuseline.training.execution import Execution, compile_forward, find_execution

Loss = Callable[[nn.Module, Batch], torch.Tensor]


class TrainStep:
    """`step(*micro_batches)` takes one optimizer step and returns the mean loss, detached, on the device.

    Args:
        module: called as `module(*batch)`, it returns the scalar loss, unless `loss(module, batch)` is given.
            A `DistributedDataParallel` module averages gradients at the last micro-batch only.
        optimizer: for `graph` and `inductor-graph` a capturable one (see `make_optimizer`).
        precision: `fp32`, `tf32`, `bf16` or `fp16` (autocast, with a gradient scaler for fp16), or `fp8`:
            bf16 in which linear layers of the model's blocks compute in fp8 where that is faster, as the
            first call decides.
        execution: `eager`; `torch.compile` by `cudagraphs`, `inductor`, `reduce-overhead`, `max-autotune`,
            `max-autotune-no-cudagraphs`; `graph`, the whole eager step as one CUDA graph; `inductor-graph`,
            the same over a compiled forward and backward.
        accumulation: micro-batches a step; their losses and gradients are averaged.
        grad_clip: largest norm of all gradients together; 0 leaves them as they are. `.grad` is clipped or
            not after a step (`fuseline.optim.Update`).
        kernels: whether ours may take the place of the optimizer's own step.
        fp8: the layers that may compute in fp8, where they are another step's too, or are not chosen by the
            clock of this device.

    Raises:
        InputError: an unknown precision or execution, or one that this device or optimizer cannot do.

    `compile_seconds` is how long the first call took where there was something to compile or to record, 0.0
    where there was not. That call waits for the device; no later one does. Inputs of new shapes are compiled
    or recorded anew. `fp8.layers` says of each linear layer what became of it; `fp8` is None for other
    precisions.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss | None = None,
        precision: str = "fp32",
        execution: str = "eager",
        accumulation: int = 1,
        grad_clip: float = 1.0,
        kernels: bool = True,
        fp8: Fp8Layers | None = None,
    ) -> None:
        self.device = next(module.parameters()).device
        if fp8 is None:
            check_precision(precision, self.device)
        how = find_execution(execution, self.device)
        if accumulation < 1:
            raise InputError(f"accumulation={accumulation}: a step needs at least one micro-batch.")
        if grad_clip < 0:
            raise InputError(f"grad_clip={grad_clip}: a norm is not negative; 0 turns clipping off.")
        if how.whole_step:
            _check_capturable(module, optimizer, execution)
        self.module, self.optimizer = module, optimizer
        self.precision, self.execution = precision, execution
        self.accumulation = accumulation
        self.scaler = make_scaler(precision, self.device, optimizer)
        if precision == "fp8" and fp8 is None:
            fp8 = Fp8Layers(module, clock=Clock(recorded=how.whole_step))
        self.fp8 = fp8
        # Compiled code may keep the addresses of a step's copies; what it multiplies by it casts itself.
        copied = torch.float32 if how.backend is not None else compute_dtype(precision)
        self._copies = WeightCopies(module, copied)
        self.compile_seconds = 0.0
        self._update = Update(optimizer, grad_clip=grad_clip, scaler=self.scaler, kernels=kernels)
        self._trees = how.trees
        self._is_built = how.backend is not None or how.whole_step
        self._is_first = True
        self._compiled_inside: nn.Module | None = None
        self._loss = loss
        self._forward = self._prepare_forward(module, loss, how)
        self._graph = StepGraph(self._run, module, optimizer, self.scaler) if how.whole_step else None

    def __call__(self, *micro_batches: Batch) -> torch.Tensor:
        """Take one step over `accumulation` micro-batches, each a tuple of tensors on the device."""
        if len(micro_batches) != self.accumulation:
            raise InputError(
                f"This step accumulates over {self.accumulation} micro-batches and was given "
                f"{len(micro_batches)}."
            )
        if not self._is_first:
            return self._take(micro_batches)
        begin = time.perf_counter()
        if self.fp8 is not None and not self.fp8.layers:
            self._decide_fp8(self.fp8, micro_batches[0])
        loss = self._take(micro_batches)
        if self._is_built:
            synchronize(self.device)
            self.compile_seconds = time.perf_counter() - begin
        self._is_first = False
        return loss

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """The loss of one micro-batch, computed as the step computes it, with its graph for a backward."""
        return self._forward(*batch)

    def close(self) -> None:
        """Let go of compiled code and recorded graphs. The module and the optimizer stay usable."""
        if self._graph is not None:
            self._graph.close()
        if self._compiled_inside is not None:
            self._compiled_inside._compiled_call_impl = None
        self._graph, self._forward, self._compiled_inside = None, _closed, None
        if self.fp8 is not None:
            self.fp8.close()
        if self._is_built:
            gc.collect()  # compiled code and what it was compiled from refer to each other

    def _decide_fp8(self, fp8: Fp8Layers, batch: Batch) -> None:
        with matmul_format(self.precision), torch.compiler.set_stance("force_eager"):
            fp8.prepare(
                lambda: _loss_of(fp8.model, self._loss, batch),
                lambda: autocast(self.precision, self.device),
            )

    def _take(self, micro_batches: tuple[Batch, ...]) -> torch.Tensor:
        with matmul_format(self.precision):
            if self._graph is not None:
                return self._graph(micro_batches)
            if self._trees:
                torch.compiler.cudagraph_mark_step_begin()
            return self._run(micro_batches)

    def _run(self, micro_batches: tuple[Batch, ...]) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with contextlib.nullcontext() if self.fp8 is None else self.fp8.one_step(), self._copies.one_step():
            losses = self._gradients(micro_batches)
        self._update()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _gradients(self, micro_batches: tuple[Batch, ...]) -> list[torch.Tensor]:
        """Adds up the gradients of all micro-batches; returns their losses."""
        losses = []
        for index, batch in enumerate(micro_batches):
            with self._gradients_averaged(is_last=index == self.accumulation - 1):
                with autocast(self.precision, self.device):
                    loss = self._forward(*batch)
                    if self.accumulation > 1:
                        loss = loss / self.accumulation
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            # A compiled graph overwrites its outputs at its next run: keep a copy.
            losses.append(loss.detach().clone() if self._trees else loss.detach())
        return losses

    def _gradients_averaged(self, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Processes exchange gradients once a step, at its last micro-batch."""
        if isinstance(self.module, DistributedDataParallel) and not is_last:
            return self.module.no_sync()
        return contextlib.nullcontext()

    def _prepare_forward(
        self, module: nn.Module, loss: Loss | None, how: Execution
    ) -> Callable[..., torch.Tensor]:
        if how.backend is not None and isinstance(module, DistributedDataParallel):
            # Compiled inside, so that the exchange of gradients stays outside the compiled code.
            self._compiled_inside = module.module
            self._compiled_inside.compile(backend=how.backend, mode=how.mode, dynamic=False)

        def forward(*batch: torch.Tensor) -> torch.Tensor:
            return _loss_of(module, loss, batch)

        if how.backend is None or self._compiled_inside is not None:
            return forward
        return compile_forward(forward, how.backend, how.mode)


def _loss_of(module: nn.Module, loss: Loss | None, batch: Batch) -> torch.Tensor:
    result: torch.Tensor = module(*batch) if loss is None else loss(module, batch)
    return result


def _check_capturable(module: nn.Module, optimizer: torch.optim.Optimizer, execution: str) -> None:
    if isinstance(module, DistributedDataParallel):
        raise InputError(
            f"Execution {execution!r} records a step of one process; with several take 'inductor'."
        )
    if why := why_not_recordable(optimizer):
        raise InputError(f"Execution {execution!r} records the optimizer in a CUDA graph, but {why}.")
    if not all(group.get("capturable") for group in optimizer.param_groups):
        raise InputError(
            f"Execution {execution!r} records the optimizer in a CUDA graph, but it is not capturable. "
            "Make it with make_optimizer(..., capturable=True)."
        )
    if not all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups):
        raise InputError(
            f"Execution {execution!r} would freeze the learning rate into the graph: give it as a tensor "
            "on the device, as make_optimizer(..., capturable=True) does."
        )


def _closed(*batch: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("this TrainStep was closed")
