"""What torch.compile makes of a model, stage by stage: the graph that TorchDynamo captures and its guards,
the joint, forward and backward graphs of AOTAutograd, the code that TorchInductor writes, and, on a GPU, the
PTX that Triton makes of a kernel.

    lowered = lower(work, torch.device("cpu"))
    print(lowered)

All of it is what the compilers themselves say: their logs, and inductor's own account of what it fused.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fuseline.profiling.compiled import CompilationWatch, Fusion, GraphBreak, listening
from fuseline.profiling.user_code import Work
from fuseline.records import Environment, describe

LOGS = (
    "__graph_code",
    "__guards",
    "__aot_joint_graph",
    "__aot_graphs",
    "__post_grad_graphs",
    "__output_code",
)
_GRAPH = re.compile(r"^TRACED GRAPH\n ===== (?P<title>.+?) =====\n(?P<code>.*)", re.S)
_CLASS = re.compile(r"^ *\S* ?class (\w+)\(torch\.nn\.Module\):", re.M)
_FILE = re.compile(r"(# File: )\S*/([^/\s]+:\d+)")
_OPERATION = re.compile(r"^\s+\w+(?:: \"[^\"]*\")? = (?!L_\w+\s|L_\w+$|fx_pytree|\w+\[\d+\])", re.M)
"""A line that computes: neither an argument's other name nor a part of what another line made."""
_AOT_ID = re.compile(r"# AOT ID: \['\d+_(\w+)'\]")
_GUARDS = "TREE_GUARD_MANAGER:"
_CODE = "Output code:"


@dataclass(frozen=True)
class Stage:
    """What one compiler hands on. `operations` counts the operations of a graph, and is None for code."""

    key: str
    text: str
    operations: int | None = None


@dataclass
class Lowered:
    """A model under torch.compile, from its source to its kernels. `seconds` is how long the first forward
    and backward took, compiling included."""

    name: str
    source: str
    device: str
    environment: Environment
    seconds: float
    stages: list[Stage] = field(default_factory=list)
    fusions: list[Fusion] = field(default_factory=list)
    graph_breaks: list[GraphBreak] = field(default_factory=list)

    def of(self, key: str) -> list[Stage]:
        """The stages of that kind, one for each graph that was compiled."""
        return [stage for stage in self.stages if stage.key == key]

    def __str__(self) -> str:
        from fuseline.profiling.lowering_text import text_of

        return text_of(self)


def lower(work: Work, device: torch.device, *, name: str = "", backward: bool = True) -> Lowered:
    """Compile `work`'s model on its batch, forward and (with `backward`) backward, and keep what each
    compiler hands on. What this process has compiled before is forgotten."""
    work = _ready(work, device, backward)
    heard = _Heard()
    torch.compiler.reset()
    with contextlib.ExitStack() as stack:
        triton_files = stack.enter_context(_triton_files(device))
        watch = stack.enter_context(CompilationWatch())
        stack.enter_context(_plain_kernels())
        stack.enter_context(listening(heard, LOGS))
        begin = time.perf_counter()
        _run(work, backward)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
        stages = [*heard.stages, *_ptx(triton_files)]
    torch.compiler.reset()
    return Lowered(
        name=name or type(work.model).__name__,
        source=_source(work.model),
        device=str(device),
        environment=describe(device),
        seconds=seconds,
        stages=stages,
        fusions=watch.fusions,
        graph_breaks=watch.graph_breaks,
    )


def _ready(work: Work, device: torch.device, backward: bool) -> Work:
    moved = work.to(device)
    asked = [wanted.requires_grad and backward for wanted in work.tensors]
    tensors = tuple(
        tensor.detach().requires_grad_(grad) for tensor, grad in zip(moved.tensors, asked, strict=True)
    )
    return Work(moved.model, tensors, moved.names, moved.rest, moved.loss_fn, moved.alone)


def _run(work: Work, backward: bool) -> None:
    compiled: Any = torch.compile(work.model, dynamic=False)
    if not backward:
        with torch.no_grad():
            work.output(compiled, work.tensors)
        return
    if work.loss_fn is not None:
        work.loss(compiled, work.tensors).backward()
        return
    results = [t for t in tree_leaves(work.output(compiled, work.tensors)) if _has_gradient(t)]
    if results:
        torch.autograd.backward(results, [torch.ones_like(t) for t in results])


def _has_gradient(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


class _Heard:
    """Sorts what the logs say into stages."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    def __call__(self, message: str) -> None:
        stage = stage_of(message)
        if stage is not None and stage not in self.stages:
            self.stages.append(stage)


def stage_of(message: str) -> Stage | None:
    """The stage that a message of the compilers' logs holds; None where it holds none."""
    if message.startswith(_CODE) and (found := _AOT_ID.search(message)):
        return Stage("backward code" if found[1] == "backward" else "forward code", _without_frame(message))
    if message.lstrip().startswith(_GUARDS):
        return Stage("guards", message.strip())
    found = _GRAPH.match(message)
    if found is None:
        return None
    code = _FILE.sub(
        r"\1\2", _CLASS.sub(r"class \1(torch.nn.Module):", textwrap.dedent(found["code"]))
    ).strip()
    return Stage(_graph_key(found["title"], code), code, len(_OPERATION.findall(code)))


def _graph_key(title: str, code: str) -> str:
    if title.startswith("__compiled_fn"):
        return "captured"
    for key in ("Joint", "Forward", "Backward"):
        if title.startswith(key):
            return key.lower()
    # AFTER POST GRAD: the inputs of a backward pass are tangents.
    inputs = code.partition("def ")[2].partition("):")[0]
    return "backward optimized" if "tangents_" in inputs else "forward optimized"


def _without_frame(message: str) -> str:
    """The kernels and the function that calls them, without the imports before and the benchmark after."""
    code = message.removeprefix(_CODE).strip()
    _, found, after = code.partition("async_compile = AsyncCompile()")
    code = after if found else code
    code = "\n".join(line for line in code.splitlines() if not line.startswith("empty_strided_p2p"))
    for end in ("\ndef get_args(", "\ndef benchmark_compiled_module("):
        code = code.partition(end)[0]
    return code.strip()


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Kernels as they would be without a profiler, which `CompilationWatch` has C++ kernels speak to."""
    from torch._inductor import config

    with config.patch({"cpp.enable_kernel_profile": False}):
        yield


@contextlib.contextmanager
def _triton_files(device: torch.device) -> Iterator[Path | None]:
    """On a GPU an empty folder that Triton keeps what it compiles in; on a CPU None."""
    if device.type != "cuda":
        yield None
        return
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    # Triton in this process: others would have been started with another folder.
    with tempfile.TemporaryDirectory() as folder, fresh_cache(dir=folder), config.patch(compile_threads=1):
        yield Path(folder)


def _ptx(folder: Path | None) -> list[Stage]:
    """The PTX of the first of the kernels, by name; a reader needs no more to see what it looks like."""
    if folder is None:
        return []
    files = sorted(folder.rglob("*.ptx"), key=lambda file: file.name)
    return [Stage("ptx", file.read_text(encoding="utf-8").strip()) for file in files[:1]]


def _source(model: torch.nn.Module) -> str:
    """The source of the model's forward; nothing where there is none to read."""
    try:
        return textwrap.dedent(inspect.getsource(type(model).forward)).rstrip()
    except (OSError, TypeError):
        return ""
