"""Forms in which a recorded step may compute a model: Fuseline's kernels one by one, or its blocks compiled.

The host costs a recorded step nothing, so only the kernels' time counts. On some models and GPUs
torch.compile fuses the work between matrix products better than single kernels do; on others Fuseline's
kernels win. Every form is checked against the first and timed as a whole recorded step, and the fastest is
kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from fuseline.errors import first_line
from fuseline.timing import ran_out_of_memory

KERNELS = "kernels"
GAIN = 0.99
"""A compiled form has to take less than this share of the time without it."""
LARGEST_DISTANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""How far all gradients of two forms may lie apart, as a share of their length: the roundings of both."""

Inside = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Form:
    """`inside()` is the context in which the model and its loss are computed."""

    name: str
    inside: Inside


@dataclass
class Choice:
    """The form that is kept, milliseconds of a step in each that was timed, and why others were refused."""

    form: Form
    ms: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


class InForms:
    """What runs a model in the form of its `choice`; plainly where that is None."""

    choice: Choice | None = None

    @contextlib.contextmanager
    def _in_form(self, choice: Choice | None) -> Iterator[None]:
        kept, self.choice = self.choice, choice
        try:
            yield
        finally:
            self.choice = kept


def choose(
    forms: Sequence[Form],
    seconds_of: Callable[[Form], float],
    why_wrong: Callable[[Form], str | None],
) -> Choice:
    """The fastest of the forms that compute what the first does. A form that cannot run is refused; if the
    first cannot, its error is raised."""
    first, *others = forms
    if not others:
        return Choice(first)
    choice = Choice(first, {first.name: 1e3 * seconds_of(first)})
    for form in others:
        try:
            reason = why_wrong(form)
            if reason is None:
                choice.ms[form.name] = 1e3 * seconds_of(form)
        except Exception as error:  # compilers raise anything at all
            reason = "not enough memory" if ran_out_of_memory(error) else first_line(error)
        if reason is not None:
            choice.refused[form.name] = reason
    best = min(others, key=lambda form: choice.ms.get(form.name, float("inf")))
    if choice.ms.get(best.name, float("inf")) < GAIN * choice.ms[first.name]:
        choice.form = best
    return choice


def distance(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The length of the difference of all tensors together over the length of `wanted`."""
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, wanted, strict=True))
    length = sum(float(b.double().square().sum()) for b in wanted)
    return float((apart / length) ** 0.5) if length else float(apart > 0)


def too_far(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], dtype: torch.dtype) -> float:
    """The distance, or 0 if what was computed in `dtype` may lie so far apart. Numbers that are not finite
    lie too far from any."""
    apart = distance(found, wanted)
    return 0.0 if apart <= LARGEST_DISTANCE.get(dtype, 0.0) else apart


def narrowest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype with the fewest bits."""
    return min(dtypes, key=lambda dtype: dtype.itemsize)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of which a transformer has many: members of lists with several modules of one class that
    have modules inside. The outermost such lists count."""
    found: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        children = [child for child in module.children() if any(True for _ in child.children())]
        alike = {type(child) for child in children}
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > len(alike):
            found += children
        else:
            waiting += module.children()
    return list(dict.fromkeys(found))


class CompiledBlocks:
    """The forwards of modules, compiled by torch.compile while `in_place()` stands; never outside.

    Modules of one class share what is compiled where it fits them all.
    """

    def __init__(self, blocks: Sequence[nn.Module], backend: str | Callable[..., Any] = "inductor") -> None:
        self.blocks, self._backend = tuple(blocks), backend
        self._codes: list[CodeType] = []
        self._calls = {kind: self._compile() for kind in dict.fromkeys(type(block) for block in blocks)}

    def _compile(self) -> Callable[..., Any]:
        # Code of its own: torch.compile counts and keeps what it compiled by the code that it began at.
        code = _call_class.__code__.replace(co_name="compiled_block")
        self._codes.append(code)
        return torch.compile(FunctionType(code, globals()), dynamic=False, backend=self._backend)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, each block runs compiled in the place of its own forward."""
        covered = [(block, block.__dict__.pop("forward", None)) for block in self.blocks]
        for block in self.blocks:
            block.__dict__["forward"] = _Bound(self._calls[type(block)], block)
        try:
            with _many_versions(4 * len(self.blocks)):
                yield
        finally:
            for block, forward in covered:
                del block.__dict__["forward"]
                if forward is not None:
                    block.__dict__["forward"] = forward

    def close(self) -> None:
        """Let go of what was compiled."""
        from torch._C._dynamo.eval_frame import reset_code

        for code in self._codes:
            reset_code(code)


@contextlib.contextmanager
def _many_versions(count: int) -> Iterator[None]:
    """Blocks that differ in a number (their place in a cache, a window) are compiled once each."""
    from torch._dynamo import config  # here, not above: it takes a second to import

    with config.patch(recompile_limit=max(config.recompile_limit, count)):
        yield


class _Bound:
    """A compiled call with the module it is for."""

    def __init__(self, call: Callable[..., Any], block: nn.Module) -> None:
        self._call, self._block = call, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._block, args, kwargs)


def _call_class(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return type(block).forward(block, *args, **kwargs)
