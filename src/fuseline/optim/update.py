"""What ends a training step: gradients unscaled and clipped, the optimizer's step, the scaler's update."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from fuseline.optim.fused_adamw import Gathered, gathered, why_not


class Update:
    """`update()` takes an optimizer's step with the gradients that are there. It never waits for the host.

    Where the optimizer is torch's fused AdamW on a GPU, one launch takes the norm of all gradients and one
    does the rest, on the optimizer's own state: the weights get the bits that its own step gives for the same
    clipped gradients. Any other optimizer takes its own step.

    Args:
        grad_clip: largest norm of all gradients together; 0 leaves them as they are.
        scaler: scales the losses of fp16; its update is part of this one.
        kernels: whether ours may take the place of the optimizer's own step.

    Attributes:
        reason: why the last update took the optimizer's own step; None where it was the kernel's.

    The norm is that of `torch.nn.utils.clip_grad_norm_`, in float32 whatever the gradients are. `.grad` is
    clipped or not afterwards, depending on which step was taken: nothing may build on it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        grad_clip: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        kernels: bool = True,
    ) -> None:
        self.optimizer, self.grad_clip, self.scaler = optimizer, grad_clip, scaler
        self._device = optimizer.param_groups[0]["params"][0].device
        self._never = why_not(optimizer, self._device) if kernels else "its own step was asked for"
        self.reason: str | None = self._never
        # The kernels count their blocks in these words, which are zero before and after.
        words = 0 if self._never else 2
        self._arrived = torch.zeros(words, dtype=torch.int32, device=self._device).split(1)

    def __call__(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        found = self._never or gathered(self.optimizer, self._device)
        if isinstance(found, str):
            self.reason = found
            self._by_itself()
        else:
            self.reason = None
            self._in_one_launch(found)
        if self.scaler is not None:
            self.scaler.update()

    def _by_itself(self) -> None:
        if self.grad_clip:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            with self._named("clip"):
                nn.utils.clip_grad_norm_(parameters, self.grad_clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)

    def _named(self, part: str) -> contextlib.AbstractContextManager[object]:
        """Within, a profiler counts what runs as the optimizer's work."""
        return torch.autograd.profiler.record_function(
            f"Optimizer.step#{type(self.optimizer).__name__}.{part}"
        )

    @torch.no_grad()
    def _in_one_launch(self, found: Gathered) -> None:
        optimizer, (of_norm, of_step) = self.optimizer, self._arrived
        infinite = None
        if self.scaler is not None:
            (infinite,) = self.scaler._found_inf_per_device(optimizer).values()
        with self._named("step"):
            norm = torch.ops.fuseline.gradient_norm(found.grads, of_norm) if self.grad_clip else None
            torch.ops.fuseline.adamw(
                *(found.weights, found.grads, found.exp_avgs, found.exp_avg_sqs, found.steps),
                *(found.sizes, found.rates, found.settings, norm, self.grad_clip, infinite, of_step),
            )
        if "step" in vars(optimizer):  # a scheduler looks whether the optimizer was called
            optimizer._opt_called = True  # type: ignore[attr-defined]
