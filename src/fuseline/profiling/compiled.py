"""What torch.compile does while a step is compiled: which operations inductor fuses into each kernel and
where in the model they stand, where the graph breaks, and why code is compiled again.

    with CompilationWatch() as watch:
        step()  # compiles
    watch.fusions, watch.graph_breaks, watch.recompilations

Operations and their places come from inductor's own bookkeeping (its provenance tracking) and from the graph
that it is about to turn into code; breaks and recompilations from what TORCH_LOGS=graph_breaks,recompiles
would print. Code that was compiled before the watch began is not seen.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuseline.profiling.kinds import is_generated
from fuseline.profiling.work import stored_bytes

_LOGS = ("__graph_breaks", "__recompiles", "__output_code")
_CODE = "Output code:"
_BREAK = re.compile(
    r"Graph [Bb]reak in user code at (?P<place>.+?:\d+)\s*\nGraph Break Reason: (?P<reason>.*)", re.S
)
_AGAIN = re.compile(r"Recompiling function (?P<name>\S+) in (?P<place>.+?:\d+)\s*\n(?P<reason>.*)", re.S)
_ROOT = re.compile(r"^[LG]\[['\"](?P<name>\w+)['\"]\]\.?")
_ITEM = re.compile(r"\[['\"]?(\w+)['\"]?\]|_modules\b\.?")
_VIEWS = frozenset({
    "view", "reshape", "permute", "transpose", "t", "expand", "squeeze", "unsqueeze", "slice", "select",
    "split", "split_with_sizes", "alias", "as_strided", "_unsafe_view", "unbind", "detach",
})  # fmt: skip
_LOOK_UPS = ("embedding", "index", "gather", "index_select")


@dataclass(frozen=True)
class Fusion:
    """One call of a kernel in compiled code: the ATen operations in it and the modules they come from, in the
    order of the graph; `bytes` that it must move. `graph` counts the compiled graphs."""

    kernel: str
    graph: int
    operations: tuple[str, ...]
    places: tuple[str, ...]
    bytes: int | None

    @property
    def is_generated(self) -> bool:
        """Whether inductor wrote the kernel; else it calls a library's."""
        return is_generated(self.kernel)


@dataclass(frozen=True)
class GraphBreak:
    place: str
    reason: str


@dataclass(frozen=True)
class Recompilation:
    function: str
    place: str
    reason: str


class CompilationWatch:
    """Watches what is compiled inside `with`. Compiled graphs are not taken from inductor's cache meanwhile,
    whose entries do not say what is in them."""

    def __init__(self) -> None:
        self.fusions: list[Fusion] = []
        self.graph_breaks: list[GraphBreak] = []
        self.recompilations: list[Recompilation] = []
        self._graphs = 0
        self._graph: torch.fx.Graph | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CompilationWatch:
        self._stack.enter_context(self._inductor_tells())
        self._stack.enter_context(listening(self._heard, _LOGS))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._graph = None

    @contextlib.contextmanager
    def _inductor_tells(self) -> Iterator[None]:
        import torch._functorch.config as functorch
        from torch._inductor import config
        from torch._inductor.custom_graph_pass import CustomGraphPass

        before: Any = config.post_grad_custom_post_pass
        others = list(before) if isinstance(before, (list, tuple)) else [before] if before else []

        class Look(CustomGraphPass):
            def __call__(look, graph: torch.fx.Graph) -> None:  # noqa: N805 - `self` is the watch here
                for other in others:
                    other(graph)
                self._graph = graph

            def uuid(look) -> None:  # noqa: N805
                """None: what is compiled with this pass is neither looked up in a cache nor put there."""
                return

        settings = {
            "post_grad_custom_post_pass": Look(),
            "trace.provenance_tracking_level": 1,
            "cpp.enable_kernel_profile": True,  # a CPU's kernels then show in the profile by their names
        }
        with config.patch(settings), functorch.patch(enable_autograd_cache=False):
            yield

    def _heard(self, message: str) -> None:
        if message.startswith(_CODE):
            self._take_graph()
        elif found := _BREAK.search(message):
            self._keep(self.graph_breaks, GraphBreak(found["place"], _reason(found["reason"])))
        elif found := _AGAIN.search(message):
            told = Recompilation(found["name"], found["place"], _guards(found["reason"]))
            self._keep(self.recompilations, told)

    @staticmethod
    def _keep(held: list[Any], new: Any) -> None:
        if new not in held:
            held.append(new)

    def _take_graph(self) -> None:
        """The code of the graph seen last is written: note what went into each of its kernels."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        from torch._inductor import debug

        held: dict[str, list[str]] = getattr(debug, "_inductor_triton_kernel_to_post_grad_node_info", {})
        calls = dict(held)
        held.clear()  # it goes on with the next graph, whose nodes have the same names
        nodes = {node.name: node for node in graph.nodes}
        for key, names in calls.items():
            kernel, _, _ = key.rpartition(":")
            inside = [node for name, node in nodes.items() if name in set(names)]
            self.fusions.append(
                Fusion(
                    kernel or key,
                    self._graphs,
                    tuple(dict.fromkeys(filter(None, map(_operation, inside)))),
                    tuple(dict.fromkeys(filter(None, map(_place, inside)))),
                    _bytes_moved(inside),
                )
            )
        self._graphs += 1


def compiler_in_use() -> bool:
    """Whether anything in this process has been handed to inductor: a watch is worth its import then."""
    return "torch._inductor.config" in sys.modules


def anything_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


@contextlib.contextmanager
def listening(heard: Callable[[str], None], logs: tuple[str, ...]) -> Iterator[None]:
    """Hear what the compilers' logs whose names end in one of `logs` say, printed or not."""
    # These modules make the loggers.
    import torch._dynamo.convert_frame
    import torch._functorch._aot_autograd.graph_capture
    import torch._functorch._aot_autograd.graph_compile
    import torch._inductor.codecache
    import torch._inductor.compile_fx

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard(record.getMessage())

    ear = Ear(logging.DEBUG)
    loggers = [
        logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.endswith(logs)
    ]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        # Whoever has switched the log on still gets it.
        logger.propagate = logger.propagate and logger.level == logging.DEBUG
        logger.setLevel(logging.DEBUG)
        logger.addHandler(ear)
    # Why code is compiled again is only put into words where the log of that name is on.
    named: set[str] = torch._logging._internal.log_state.artifact_names
    switched_on = "recompiles" not in named
    named.add("recompiles")
    try:
        yield
    finally:
        if switched_on:
            named.discard("recompiles")
        for logger, level, propagate in before:
            logger.removeHandler(ear)
            logger.setLevel(level)
            logger.propagate = propagate


def _operation(node: torch.fx.Node) -> str:
    """The ATen operation of the model that the node stems from: `native_layer_norm`."""
    if node.target is operator.getitem:
        return ""  # a part of what another node made
    origin = node.meta.get("original_aten")
    target = node.target if origin is None else origin
    name = getattr(target, "_opname", None) or getattr(target, "__name__", "")
    return str(name).partition(".")[0] if node.op == "call_function" else ""


def _place(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values() if isinstance(entry, (tuple, list)) and entry]
    return clean_path(paths[-1]) if paths else ""


def clean_path(path: str) -> str:
    """`L['self'].transformer.h.0` as the model's own name for it: `transformer.h.0`."""
    path = path.replace("L['fn'].", "")
    path = _ROOT.sub("", path)
    path = _ITEM.sub(lambda m: f".{m.group(1)}" if m.group(1) else "", path)
    return re.sub(r"\.{2,}", ".", path).strip(".")


def _bytes_moved(inside: Sequence[torch.fx.Node]) -> int | None:
    """What enters the kernel and what others read of it, each once; None if a node has no known size. Views
    stand for what they look at."""
    own = set(inside)
    read: dict[torch.fx.Node, dict[torch.fx.Node, int]] = {}
    looked_up = written = 0
    for node in inside:
        for source in node.all_input_nodes:
            root = _viewed(source)
            if root in own or source in own or root.op == "get_attr":
                continue
            size = _bytes(source)
            if size is None:
                return None
            if _operation(node) in _LOOK_UPS and node.args and node.args[0] is source:
                looked_up += size
            else:
                read.setdefault(root, {})[source] = size
        if not _is_view(node) and _leaves(node, own):
            size = _bytes(node)
            if size is None:
                return None
            written += size
    entering = sum(min(sum(parts.values()), _bytes(root) or 0) for root, parts in read.items())
    return entering + written + min(looked_up, written)


def _is_view(node: torch.fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", "")).partition(".")[0]
    return node.op == "call_function" and name in _VIEWS


def _viewed(node: torch.fx.Node) -> torch.fx.Node:
    """What a view of a view looks at in the end."""
    while _is_view(node) and node.args and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node


def _leaves(node: torch.fx.Node, own: set[torch.fx.Node]) -> bool:
    """Whether anything outside the kernel reads the node, itself or a view of it."""
    return any(_leaves(user, own) if _is_view(user) else user not in own for user in node.users)


def _bytes(node: torch.fx.Node) -> int | None:
    """None where the size is not fixed; nothing for what is no tensor."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return 0  # its parts are nodes of their own
    if not isinstance(value, torch.Tensor):
        return 0
    if any(not isinstance(size, int) for size in (*value.shape, *value.stride())):
        return None
    return stored_bytes(value)


def _reason(text: str) -> str:
    """What went wrong and what explains it, on one line."""
    lines = [line.strip() for line in text.partition("User code traceback")[0].splitlines() if line.strip()]
    kept = [line for line in lines[:2] if not line.startswith(("Hint", "Developer", "For more"))]
    kept += [line for line in lines[2:] if line.startswith("Explanation:")]
    return " ".join(dict.fromkeys(kept))


def _guards(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [re.sub(r"^- ", "", line) for line in lines if not line.startswith("triggered by")]
    return "; ".join(kept)


def fusions_by_occurrence(fusions: Iterable[Fusion]) -> dict[tuple[str, int], Fusion]:
    """Each call of a kernel by the kernel's name and how often it was called before: forward graphs are
    compiled, and run, before their backward graphs."""
    seen: dict[str, int] = {}
    found = {}
    for fusion in fusions:
        number = seen.get(fusion.kernel, 0)
        seen[fusion.kernel] = number + 1
        found[fusion.kernel, number] = fusion
    return found
