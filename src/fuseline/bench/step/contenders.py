"""Who takes the step: our forms, and nanoGPT's own model under torch.compile.

nanoGPT's `model.py` is not part of this package: the user names a copy of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fuseline.acceleration.fp8 import Fp8Layers
from fuseline.acceleration.precision import autocast, matmul_format
from fuseline.bench.step.case import StepCase
from fuseline.errors import InputError
from fuseline.models.gpt import GPT
from fuseline.models.llama import Llama
from fuseline.models.llama_config import LlamaConfig
from fuseline.ops.fp8_rows import why_no_fp8
from fuseline.training.execution import EXECUTIONS
from fuseline.training.optimizer import make_optimizer
from fuseline.training.step import TrainStep

LEARNING_RATE = 6e-4


@dataclass(frozen=True)
class Form:
    """One of ours: which kernels, and how the step is carried out."""

    execution: str
    change: dict[str, Any]
    precision: str | None = None
    """The case's own if None."""


_OURS = {"norm": "fuseline", "loss": "fuseline-linear", "attention": "pick"}
_TORCHS = {"norm": "torch", "loss": "fuseline", "attention": "pick"}
FORMS: dict[str, Form] = {
    "fuseline": Form("graph", _OURS),
    "fuseline-eager": Form("eager", _OURS),
    "fuseline-inductor": Form("inductor-graph", _TORCHS),
    "fuseline-fp8": Form("graph", _OURS, "fp8"),
}
"""`fuseline`: our kernels, the whole step one CUDA graph; `fuseline-inductor`: torch's kernels and our loss,
compiled, in one graph; `fuseline-fp8`: as `fuseline`, linear layers in fp8 where that is faster."""
NANOGPT_MODES: dict[str, str | None] = {
    "nanogpt-eager": None,
    "nanogpt-inductor": "default",
    "nanogpt-reduce-overhead": "reduce-overhead",
    "nanogpt-max-autotune": "max-autotune",
}
PEERS = (*FORMS, *NANOGPT_MODES)


@dataclass
class Contender:
    """`step(tokens, targets)` takes one optimizer step and returns the loss on the device; `loss` is the loss
    alone, under the same autocast."""

    name: str
    module: nn.Module
    step: Callable[[Tensor, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    close: Callable[[], None]
    fp8: Fp8Layers | None = None


def why_not(name: str, case: StepCase, device: torch.device, nanogpt: Path | None) -> str | None:
    """Why a peer cannot run this case here; None if it can."""
    if name in NANOGPT_MODES:
        if isinstance(case.config, LlamaConfig):
            return "nanoGPT is no Llama"
        if nanogpt is None:
            return "name a copy of nanoGPT's model.py by --nanogpt"
        if NANOGPT_MODES[name] in ("reduce-overhead", "max-autotune") and device.type != "cuda":
            return "it records CUDA graphs, and there is no GPU"
        return None
    if FORMS[name].precision == "fp8" and case.precision != "bf16":
        return f"fp8 stands beside bf16, and this step is in {case.precision}"
    if FORMS[name].precision == "fp8" and (why := why_no_fp8(device)):
        return why
    if EXECUTIONS[FORMS[name].execution].needs_cuda and device.type != "cuda":
        return "it records CUDA graphs, and there is no GPU"
    return None


def make(
    name: str, case: StepCase, device: torch.device, nanogpt: Path | None, grad_clip: float
) -> Contender:
    """The contender, its weights drawn anew. `InputError` for a model.py that is not nanoGPT's."""
    if name in FORMS:
        return _ours(name, case, device, grad_clip)
    assert nanogpt is not None
    return _nanogpt(name, case, device, nanogpt, grad_clip)


def _ours(name: str, case: StepCase, device: torch.device, grad_clip: float) -> Contender:
    form = FORMS[name]
    precision = form.precision or case.precision
    with device:
        model = build(case, form.change)
    capturable = EXECUTIONS[form.execution].whole_step
    optimizer = make_optimizer(model, lr=LEARNING_RATE, capturable=capturable)
    step = TrainStep(model, optimizer, precision=precision, execution=form.execution, grad_clip=grad_clip)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with autocast(precision, device):
            result: Tensor = step.forward(tokens, targets)
            return result

    return Contender(name, model, lambda *batch: step(batch), loss, step.close, step.fp8)


def build(case: StepCase, change: dict[str, Any]) -> GPT | Llama:
    """The model of a case, with a GPT's `change`; of it a Llama has who computes its norms and more."""
    config = case.config
    if isinstance(config, LlamaConfig):
        return Llama(replace(config, kernels=change["norm"]))
    return GPT(replace(config, **change))


def _nanogpt(name: str, case: StepCase, device: torch.device, file: Path, grad_clip: float) -> Contender:
    source, config = nanogpt_source(file), case.gpt
    with contextlib.redirect_stdout(io.StringIO()):  # it counts its parameters aloud
        model = source.GPT(
            source.GPTConfig(
                block_size=config.block_size,
                vocab_size=case.nanogpt_vocab_size,
                n_layer=config.num_layers,
                n_head=config.num_heads,
                n_embd=config.embed_dim,
                dropout=config.dropout,
                bias=config.bias,
            )
        ).to(device)
        optimizer = model.configure_optimizers(0.1, LEARNING_RATE, (0.9, 0.95), device.type)
    mode = NANOGPT_MODES[name]
    called = model if mode is None else torch.compile(model, mode=mode, dynamic=False)
    records_graphs = mode in ("reduce-overhead", "max-autotune")

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        if records_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with autocast(case.precision, device):
            result: Tensor = called(tokens, targets)[1]
            return result

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with matmul_format(case.precision):
            found = loss(tokens, targets)
            found.backward()
        if grad_clip:
            nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return found.detach()

    return Contender(name, model, step, loss, torch._dynamo.reset)


def nanogpt_source(file: Path) -> ModuleType:
    """nanoGPT's model.py as a module; `InputError` if the file is not nanoGPT's."""
    if not file.is_file():
        raise InputError(f"--nanogpt {file}: there is no such file. Name nanoGPT's model.py.")
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    if spec is None or spec.loader is None:
        raise InputError(f"--nanogpt {file}: not a Python file. Name nanoGPT's model.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not (hasattr(module, "GPT") and hasattr(module, "GPTConfig")):
        raise InputError(f"--nanogpt {file}: it has no GPT and GPTConfig. Name nanoGPT's model.py.")
    return module
