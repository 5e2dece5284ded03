"""Who takes the step of a case: the model as it came, compiled, with Liger's kernels, and accelerated."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fuseline.acceleration import Acceleration, accelerate
from fuseline.acceleration.forms import Choice
from fuseline.acceleration.observe import call_model
from fuseline.bench.acceleration import liger
from fuseline.bench.acceleration.case import Case
from fuseline.bench.acceleration.models import Made
from fuseline.bench.peers import PEERS
from fuseline.errors import unknown_name

LEARNING_RATE = 1e-5
MODES = {"inductor": "default", "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune"}
OURS = ("fuseline", "fuseline-eager")
CONTENDERS = ("eager", "inductor", *OURS, "reduce-overhead", "liger", "max-autotune")
"""In the order in which they are made ready: a run that is cut short has the first of them."""
DEFAULTS = tuple(name for name in CONTENDERS if name != "max-autotune")


class RefusedError(Exception):
    """This contender does not take this case; the message says why."""


@dataclass
class Contender:
    """`step()` takes one optimizer step and returns the loss, gradients left where they are, or returns the
    outputs of one forward pass. Each of its turns runs within `inside`. `seconds` went into changing the
    model, and `found` says how it is run and what was put into it, where that was `accelerate`."""

    name: str
    model: nn.Module
    step: Callable[[], Any]
    inside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    close: Callable[[], object] = lambda: None
    seconds: float = 0.0
    fast: Acceleration | None = None
    execution: Callable[[], str] = lambda: "eager"

    def changes(self) -> str | None:
        """How the step runs, and what was kept: "recorded; 12 gelu, 25 layer_norm"."""
        if self.fast is None:
            return None
        kinds = Counter(site.kind for site in self.fast.kept)
        kept = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        return f"{self.execution()}; {kept or 'nothing kept'}"


def check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those contenders, each once, in the order in which they run."""
    for name in names:
        if name not in CONTENDERS:
            raise unknown_name("peer", name, CONTENDERS)
    return tuple(name for name in CONTENDERS if name in names)


def why_not(name: str, device: torch.device) -> str | None:
    """Why a contender cannot run here, whatever the model; None if it can."""
    if name in ("reduce-overhead", "max-autotune") and device.type != "cuda":
        return "it records CUDA graphs, and there is no GPU"
    return PEERS["liger"].why_not(device) if name == "liger" else None


def version(name: str) -> str | None:
    """Of the package that computes, where that is neither torch nor Fuseline."""
    return PEERS["liger"].version() if name == "liger" else None


def enter(name: str, case: Case, made: Made) -> Contender:
    """Change the model that was made for it into this contender's. Raises `RefusedError`."""
    if name in OURS:
        return _ours(name, case, made)
    inside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    begin = time.perf_counter()
    if name == "liger":
        if reason := liger.why_not_liger(made.model):
            raise RefusedError(reason)
        inside = liger.apply(made.model)
    seconds = time.perf_counter() - begin
    mode = MODES.get(name)
    called: Any = made.model if mode is None else torch.compile(made.model, mode=mode, dynamic=False)
    records_graphs = name in ("reduce-overhead", "max-autotune")
    step = _step(case, made, called, records_graphs)
    close = torch.compiler.reset if mode is not None else lambda: None
    return Contender(name, made.model, step, inside, close, seconds)


def _ours(name: str, case: Case, made: Made) -> Contender:
    begin = time.perf_counter()
    fast = accelerate(made.model, made.batch)
    seconds = time.perf_counter() - begin
    contender = Contender(name, made.model, _step(case, made, made.model), seconds=seconds, fast=fast)
    if name == "fuseline" and case.trains:
        precision = "fp32" if next(made.model.parameters()).dtype is torch.float32 else "bf16"
        whole = fast.training_step(_optimizer(made.model), precision, grad_clip=0.0, loss=made.loss)
        contender.step = lambda: whole(made.batch)
        contender.close = whole.close
        contender.execution = lambda: _told(whole.choice, whole.reason)
    elif name == "fuseline":
        args, kwargs = ((), made.batch) if isinstance(made.batch, dict) else ((made.batch,), {})
        contender.step = lambda: fast.compiled_call(*args, **kwargs)
        contender.close = fast.undo
        contender.execution = lambda: _told(*_call_of(fast))
    return contender


def _call_of(fast: Acceleration) -> tuple[Choice | None, str]:
    """The form of the last call, and why it was not recorded."""
    return (None, "it was never called") if fast._call is None else (fast._call.choice, fast._call.reason)


def _told(choice: Choice | None, reason: str) -> str:
    """How it ran: "recorded: compiled (kernels 5.2 ms, compiled 3.4 ms)"."""
    if choice is None or reason:
        return f"eager: {reason}"
    tried = [f"{name} {ms:.3g} ms" for name, ms in choice.ms.items()]
    tried += [f"{name}: {why}" for name, why in choice.refused.items()]
    return f"recorded, {choice.form.name}" + (f" ({', '.join(tried)})" if tried else "")


def _step(case: Case, made: Made, called: nn.Module, records_graphs: bool = False) -> Callable[[], Any]:
    """What a user's own loop does with the model."""
    if not case.trains:

        def forward() -> Any:
            if records_graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                return call_model(called, made.batch)

        return forward
    optimizer = _optimizer(made.model)

    def train() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        if records_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        loss = made.loss_of(called)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
