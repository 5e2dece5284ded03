"""Proof that a recipe computes what a module computes: outputs and every gradient, against float64.

The rule is that of the op contract: an error against float64 of at most twice the original's plus one unit in
the last place, as a norm and at the worst element. The original's error on a few numbers may be next to
nothing by chance: where the rule is broken, both are tried on more numbers, and their worst errors are
compared. Original and recipe run on the module's own parameters and on what it was called with, then on other
values, lengths and strides, in training and in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from fuseline.acceleration.observe import Sample, is_tensor
from fuseline.acceleration.probes import PROBES, in_mode, nudged, reduced
from fuseline.acceleration.recipe import Recipe, each_computed
from fuseline.acceleration.trace import Returned, Trace, UntraceableError, trace
from fuseline.acceleration.wide import fix_default_eps, run_wide, widened
from fuseline.errors import first_line
from fuseline.ops.autocast import autocast_on
from fuseline.timing import ran_out_of_memory

SEED = 1234
SLACK_OF_MASKED = 4.0
"""With dropout drawn by torch, recipe and original are compared with each other, by so many times the errors
that the original has in evaluation: both have errors, and the mask leaves some of an average out."""


class UnprovenError(Exception):
    """Why a recipe does not stand for a module."""


@dataclass
class Proof:
    """Relative errors against float64 as a norm, the worst over all probes."""

    error: float = 0.0
    original_error: float = 0.0
    any_length: bool = True
    """Whether the module took other lengths, too; else the proof holds for the shapes it was called with."""


@dataclass
class Results:
    """What a run gave: outputs, gradients of what was differentiated, and the returned structure."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    others: list[Any] = field(default_factory=list)

    def all(self) -> list[torch.Tensor | None]:
        return [*self.outputs, *self.gradients]


Run = Callable[[Sequence[torch.Tensor]], Any]
Draw = tuple[Results, Results, Results]
"""Of the same numbers: ours, the original's, and those of float64."""
DRAWS = 6


def prove(
    module: nn.Module, sample: Sample, recipes: Sequence[Recipe], returned: Returned
) -> tuple[dict[int, Proof], dict[int, str]]:
    """Try each recipe on each probe. Returns proofs and refusals by the recipe's number."""
    proofs = {number: Proof() for number in range(len(recipes))}
    refused: dict[int, str] = {}
    tolerances: dict[str, list[float]] = {}
    traces: dict[Any, Trace] = {}
    drops = any(recipe.drops for recipe in recipes)
    for name, probe, training in _cases(module, sample, module.training and not drops):
        with in_mode(module, training):
            try:
                bench = _Bench(module, probe, returned, tolerances.get(name, []), traces)
            except _NotTakenError as error:
                if name not in MAY_BE_REFUSED:
                    raise UnprovenError(str(error)) from error
                for proof in proofs.values():
                    proof.any_length &= name != "other lengths"
                continue
            except RuntimeError as error:
                if name == FULL and ran_out_of_memory(error):
                    continue  # too large for three copies in float64: the smaller probes stand
                raise
            if not training:
                tolerances[name] = bench.own_errors()
            for number in set(range(len(recipes))) - refused.keys():
                try:
                    ours, original = bench.errors(recipes[number])
                except UnprovenError as error:
                    mode = "training" if training else "evaluation"
                    refused[number] = f"{error} ({name}, in {mode})"
                    continue
                proofs[number].error = max(proofs[number].error, ours)
                proofs[number].original_error = max(proofs[number].original_error, original)
    return {number: proofs[number] for number in proofs if number not in refused}, refused


FULL = "full size"
DECLINES = (ValueError, TypeError, RuntimeError, IndexError, AssertionError, NotImplementedError)
"""What code raises for inputs that it does not take."""
MAY_BE_REFUSED = ("other lengths", "other strides")
"""What a module need not take: some are made for one length, some want their input in one piece."""


def _cases(module: nn.Module, sample: Sample, training: bool) -> Iterator[tuple[str, Sample, bool]]:
    """Every probe in evaluation, the first in training too, and the call in its full size. What the module
    takes in no smaller size, an image of a few patches, is tried in its own."""
    small = reduced(sample)
    if not _takes(module, small):
        small = sample
    for name, make in PROBES.items():
        if (probe := make(small)) is not None:
            yield name, probe, False
    first = next(iter(PROBES))
    yield first, small, True
    if [t.shape for t in small.tensors()] != [t.shape for t in sample.tensors()]:
        yield FULL, sample, training


def _takes(module: nn.Module, sample: Sample) -> bool:
    with in_mode(module, False), torch.no_grad():
        try:
            type(module).forward(module, *sample.args, **sample.kwargs)
        except DECLINES as error:
            if ran_out_of_memory(error):
                raise
            return False
    return True


class _NotTakenError(Exception):
    """The module itself does not take a probe."""


class _Bench:
    """The original on one probe, in the working dtype and in float64."""

    def __init__(
        self,
        module: nn.Module,
        sample: Sample,
        returned: Returned,
        tolerances: Sequence[float],
        traces: dict[Any, Trace],
    ) -> None:
        self.module, self.sample, self.returned = module, sample, returned
        self.tolerances, self._traces = tolerances, traces
        self._drawn: dict[int, _Bench] = {0: self}
        self.parameters = {
            path: p for path, p in module.named_parameters() if p.requires_grad and p.is_floating_point()
        }
        self.original = self._run(self._original)
        # How its input lies in memory changes nothing of what a module computes.
        shape = module.training, tuple((t.shape, t.dtype) for t in sample.tensors())
        if shape not in traces:
            try:
                traces[shape] = trace(module, sample)
            except UntraceableError as error:
                raise _NotTakenError(str(error)) from error
            fix_default_eps(traces[shape])
        self.trace = traces[shape]
        self.dtype = self._narrowest()
        self.draws = any(_draws(node) for node in self.trace.nodes)
        self.exact = self._exact(self.trace)

    def errors(self, recipe: Recipe) -> tuple[float, float]:
        """The recipe's error and the original's, after the rule; `UnprovenError` if it is broken."""
        drops = recipe.drops and self.module.training
        if drops and getattr(recipe, "own_mask", False):
            return compare_draws(lambda number: self._draw(number)._with_own_mask(recipe), self.dtype)
        if self.draws:
            return self._compare_masked(self._ours(recipe))
        return compare_draws(lambda number: self._draw(number)._with(recipe), self.dtype)

    def _draw(self, number: int) -> _Bench:
        """The same on numbers that are moved a little."""
        if number not in self._drawn:
            sample = nudged(self.sample, number)
            self._drawn[number] = _Bench(self.module, sample, self.returned, self.tolerances, self._traces)
        return self._drawn[number]

    def _with(self, recipe: Recipe) -> Draw:
        return self._ours(recipe), self.original, self.exact

    def _ours(self, recipe: Recipe) -> Results:
        def run(tensors: Sequence[torch.Tensor]) -> Any:
            result = recipe.run(self.module, tensors)
            return self.returned.build([*_outputs_of(self.trace, tensors, result)])

        try:
            ours = self._run(run)
        except _NotTakenError as error:
            raise UnprovenError(f"the op does not take it: {error}") from error
        self._check_alike(ours)
        return ours

    def _original(self, tensors: Sequence[torch.Tensor]) -> Any:
        call = self.sample.with_tensors(list(tensors))
        result = type(self.module).forward(self.module, *call.args, **call.kwargs)
        _check_autograd([leaf for leaf in pytree.tree_leaves(result) if is_tensor(leaf)])
        return result

    def _run(self, run: Run) -> Results:
        """Outputs and gradients on the module's parameters; the same random numbers every time."""
        tensors = self._leaves(self.sample.tensors())
        wanted = [*(t for t in tensors if t.requires_grad), *self.parameters.values()]
        torch.manual_seed(SEED)
        try:
            with torch.enable_grad():
                result = run(tensors)
                return results(result, wanted)
        except DECLINES as error:
            if ran_out_of_memory(error):
                raise
            raise _NotTakenError(first_line(error)) from error

    @staticmethod
    def _leaves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]

    def _exact(self, traced: Trace) -> Results:
        """The original in float64, from the traced graph, in which no float32 is left."""
        inputs = self._leaves([widened(t.detach()).contiguous() for t in self.sample.tensors()])
        held = {
            path: widened(t.detach())
            for path, t in (*self.module.named_parameters(), *self.module.named_buffers())
        }
        own = {path: held[path].requires_grad_(path in self.parameters) for path in held}
        sources = [inputs[s.index] if s.kind == "input" else own[s.path] for s in traced.sources]
        torch.manual_seed(SEED)
        with torch.enable_grad():
            outputs = run_wide(traced, sources)
            wanted = [*(t for t in inputs if t.requires_grad), *(own[path] for path in self.parameters)]
            return results(tuple(outputs), wanted)

    def _check_alike(self, ours: Results) -> None:
        if len(ours.outputs) != len(self.original.outputs) or ours.others != self.original.others:
            raise UnprovenError("it returns something else")
        for mine, theirs in zip(ours.outputs, self.original.outputs, strict=True):
            if mine.dtype is not theirs.dtype:
                raise UnprovenError(f"the op returns {mine.dtype} where the module returns {theirs.dtype}")
            if mine.shape != theirs.shape or mine.device != theirs.device:
                raise UnprovenError("the op returns another shape")
            if theirs.is_contiguous() and not mine.is_contiguous():
                raise UnprovenError("the op's result lies in memory in another order")
        for gradient, other in zip(ours.gradients, self.original.gradients, strict=True):
            if (gradient is None) != (other is None):
                raise UnprovenError("another set of tensors gets gradients")

    def own_errors(self) -> list[float]:
        """The original's relative errors, of each output and gradient in turn."""
        return [
            0.0 if near is None or far is None else _norm(near.double() - far) / max(_norm(far), 1e-300)
            for near, far in zip(self.original.all(), self.exact.all(), strict=True)
        ]

    def _compare_masked(self, ours: Results) -> tuple[float, float]:
        """Recipe against original under one mask of torch's; the errors are those of evaluation."""
        ulp = torch.finfo(self.dtype).eps
        allowed = self.tolerances or [0.0] * len(ours.all())
        for mine, theirs, error in zip(ours.all(), self.original.all(), allowed, strict=True):
            if mine is None or theirs is None:
                continue
            difference = _norm(mine.double() - theirs.double())
            if not difference <= SLACK_OF_MASKED * (error + ulp) * _norm(theirs.double()):
                raise UnprovenError("with dropout it differs by more than rounding")
        return 0.0, 0.0

    def _with_own_mask(self, recipe: Any) -> Draw:
        """The op's dropout: its formula with the mask of one seed, in float64 and in the working dtype."""
        device = self.sample.tensors()[0].device
        seed = torch.full((1,), SEED, dtype=torch.int64, device=device)
        ours = self._run(lambda tensors: recipe.run_seeded(self.module, tensors, seed))
        self._check_alike(ours)
        plain = self._run(lambda tensors: recipe.define_seeded(self.module, tensors, seed))
        inputs = self._leaves([widened(t.detach()) for t in self.sample.tensors()])
        own = {
            path: widened(p.detach()).requires_grad_(path in self.parameters)
            for path, p in self.module.named_parameters()
        }
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            with _reparametrize_module(self.module, own, tie_weights=True, stack_weights=True):
                result = recipe.define_seeded(self.module, inputs, seed)
            wanted = [*(t for t in inputs if t.requires_grad), *(own[path] for path in self.parameters)]
            exact = results(result, wanted)
        return ours, plain, exact

    def _narrowest(self) -> torch.dtype:
        tensors = [*self.sample.tensors(), *self.original.outputs, *self.parameters.values()]
        dtypes = {t.dtype for t in tensors if t.is_floating_point()}
        if (autocast := autocast_on(tensors[0].device.type)) is not None:
            dtypes.add(autocast)
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _draws(node: torch.fx.Node) -> bool:
    """Whether a node draws random numbers: dropout in training."""
    return "dropout" in str(node.target) and len(node.args) > 2 and bool(node.args[1]) and bool(node.args[2])


def _outputs_of(
    traced: Trace, tensors: Sequence[torch.Tensor], result: torch.Tensor | tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """The tensors that the forward returns: those that it computes, and inputs that it passes on."""
    outputs, computed = [], each_computed(result)
    for node in traced.outputs:
        source = traced.source_of(node)
        outputs.append(next(computed) if source is None else tensors[source.index])
    return outputs


def results(result: Any, wanted: Sequence[torch.Tensor]) -> Results:
    leaves = pytree.tree_leaves(result)
    outputs = [leaf for leaf in leaves if is_tensor(leaf)]
    differentiable = [t for t in outputs if t.requires_grad]
    gradients: list[torch.Tensor | None] = [None] * len(wanted)
    if differentiable and wanted:
        incoming = []
        for number, output in enumerate(differentiable):
            generator = torch.Generator(output.device).manual_seed(SEED + number)
            drawn = torch.randn(output.shape, generator=generator, device=output.device)
            # Rounded to 16 bits for all, so that original, recipe and float64 are given the same.
            incoming.append(drawn.bfloat16().to(output.dtype))
        gradients = list(torch.autograd.grad(differentiable, wanted, incoming, allow_unused=True))
    detached = [output.detach() for output in outputs]
    return Results(detached, gradients, [leaf for leaf in leaves if not is_tensor(leaf)])


def compare_draws(draw: Callable[[int], Draw], dtype: torch.dtype) -> tuple[float, float]:
    """The contract's rule on draw 0, and where it is broken there on the worst of several; the outputs'
    relative errors."""
    first = draw(0)
    try:
        return compare([first], dtype)
    except UnprovenError:
        return compare([first, *map(draw, range(1, DRAWS))], dtype)


def compare(draws: Sequence[Draw], dtype: torch.dtype) -> tuple[float, float]:
    """The contract's rule over outputs and gradients, by the worst errors of all draws."""
    ulp = torch.finfo(dtype).eps * (32 if dtype is torch.float64 else 1)
    outputs = len(draws[0][0].outputs)
    worst = [0.0, 0.0]
    for number, tensors in enumerate(zip(*(_tensors_of(draw) for draw in draws), strict=True)):
        what = "output" if number < outputs else "gradient"
        known = [one for one in tensors if one is not None]
        if any(mine.isnan().any() and not near.isnan().any() for mine, near, _ in known):
            raise UnprovenError(f"an element of the {what} is NaN")
        for measure in (_norm, _largest):
            errors = [_relative_errors(measure, *one) for one in known]
            mine, theirs = (max((pair[i] for pair in errors), default=0.0) for i in (0, 1))
            if not mine <= 2 * theirs + ulp:
                raise UnprovenError(f"the {what}'s error is {mine:.1e}, the original's {theirs:.1e}")
            if measure is _norm and what == "output":
                worst = [max(worst[0], mine), max(worst[1], theirs)]
    return worst[0], worst[1]


Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _tensors_of(draw: Draw) -> list[Triple | None]:
    """Ours, the original's and the exact one of each output and gradient that can be measured."""
    return [
        None
        if mine is None or near is None or far is None or not far.is_floating_point() or not far.numel()
        else (mine, near, far)
        for mine, near, far in zip(*(one.all() for one in draw), strict=True)
    ]


def _relative_errors(
    measure: Callable[[torch.Tensor], float], mine: torch.Tensor, near: torch.Tensor, far: torch.Tensor
) -> tuple[float, float]:
    """Of ours and of the original; an error of nothing where all is 0 is none."""
    scale = max(measure(far), 1e-300)
    return measure(mine.double() - far) / scale, measure(near.double() - far) / scale


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())


def _check_autograd(outputs: Sequence[torch.Tensor]) -> None:
    """A function with a backward of its own may compute anything there, for other values than these, too."""
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            raise UnprovenError(f"it has a gradient of its own ({type(node).__name__})")
        waiting.extend(following for following, _ in node.next_functions if following is not None)
