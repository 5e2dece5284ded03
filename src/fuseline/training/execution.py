"""How a step is carried out: eagerly, compiled, or as one CUDA graph."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fuseline.errors import InputError, unknown_name


@dataclass(frozen=True)
class Execution:
    """One way to carry out a step.

    `backend` and `mode` are `torch.compile`'s; without a backend nothing is compiled. `whole_step` puts all
    from the zeroed gradients to the updated weights into one CUDA graph. `trees` says that torch keeps CUDA
    graphs of its own, which must be told where a step begins.
    `needs_cuda` says that it records CUDA graphs, or that it does the same as `inductor` on a CPU.
    """

    backend: str | None = None
    mode: str | None = None
    whole_step: bool = False
    trees: bool = False
    needs_cuda: bool = False


EXECUTIONS: dict[str, Execution] = {
    "eager": Execution(),
    "cudagraphs": Execution(backend="cudagraphs", trees=True, needs_cuda=True),
    "inductor": Execution(backend="inductor"),
    "reduce-overhead": Execution(backend="inductor", mode="reduce-overhead", trees=True, needs_cuda=True),
    "max-autotune": Execution(backend="inductor", mode="max-autotune", trees=True, needs_cuda=True),
    "max-autotune-no-cudagraphs": Execution(
        backend="inductor", mode="max-autotune-no-cudagraphs", needs_cuda=True
    ),
    "graph": Execution(whole_step=True, needs_cuda=True),
    "inductor-graph": Execution(backend="inductor", whole_step=True, needs_cuda=True),
}


def find_execution(name: str, device: torch.device) -> Execution:
    """The execution of that name; `InputError` if there is none, or none on `device`."""
    if name not in EXECUTIONS:
        raise unknown_name("execution", name, EXECUTIONS)
    execution = EXECUTIONS[name]
    if execution.needs_cuda and device.type != "cuda":
        raise InputError(
            f"Execution {name!r} {_why_cuda(name)}, and the model is on {device.type}. "
            "On a CPU take 'eager' or 'inductor'."
        )
    return execution


def _why_cuda(name: str) -> str:
    if name == "max-autotune-no-cudagraphs":
        return "chooses among a GPU's kernels"
    return "records CUDA graphs"


def fastest_execution(device: torch.device, processes: int, *, fused: bool = False) -> str:
    """What `auto` stands for: eager on a CPU. On a GPU it is the eager step as one graph if its kernels are
    `fused` already, else the compiled step as one graph. Several processes train without the graph, and
    nothing is compiled where Triton does not find the C compiler and Python headers that it needs."""
    if device.type != "cuda":
        return "eager"
    if processes > 1:
        return "inductor" if _triton_compiles() else "eager"
    return "inductor-graph" if _triton_compiles() and not fused else "graph"


def _triton_compiles() -> bool:
    compilers = [os.environ.get("CC"), "cc", "gcc", "clang"]
    return (
        importlib.util.find_spec("triton") is not None
        and any(name and shutil.which(name) for name in compilers)
        and Path(sysconfig.get_path("include"), "Python.h").is_file()
    )


def compile_forward(
    forward: Callable[..., torch.Tensor], backend: str, mode: str | None
) -> Callable[..., torch.Tensor]:
    """`forward` under `torch.compile`, apart from every other compiled step of the process.

    torch keeps what it compiled on the code object, eight entries at most, and then runs eagerly without a
    word. A ladder compiles the same model more often than that, so each step gets a code object of its own;
    it takes its compiled entries with it when it goes.
    """
    own = types.FunctionType(
        forward.__code__.replace(),
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    return torch.compile(own, backend=backend, mode=mode, dynamic=False)
