"""Functions that a module's own forward calls by a global name: rotary embeddings, and torch's attention.

One more run of the batch, with recorders in the functions' places, says what each was called with. What is
recognized is proved and timed like everything else, and a stand-in takes its place in that module alone.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from fuseline.acceleration.attention_study import forms_of, judge_call, site_of_calls, site_of_numbers
from fuseline.acceleration.change import Change
from fuseline.acceleration.find import Candidate, is_wanted
from fuseline.acceleration.inline_attention import InlineAttention, inline_call
from fuseline.acceleration.judge import Outcome
from fuseline.acceleration.kept_proofs import KeptRecipe
from fuseline.acceleration.kinds.rotary import ONCE, read_tables
from fuseline.acceleration.layer import Layer, put_in, take_out
from fuseline.acceleration.observe import PLAIN, Observed, Sample, call_model, is_tensor
from fuseline.acceleration.packed_attention import LayerCall, torch_layer
from fuseline.acceleration.packed_attention_study import study_packed
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.rebound import Function, Name, Rebound, StandIn, functions_read, rebound
from fuseline.acceleration.rotary import NOTE, UNKNOWN, TableMaker
from fuseline.acceleration.site import FOUND, KEPT, NOT_FASTER, REFUSED, Site
from fuseline.acceleration.swap import form_of
from fuseline.acceleration.trace import UntraceableError, trace
from fuseline.acceleration.turn_study import judge_turn
from fuseline.acceleration.wanted import Wanted

TORCH_ATTENTION: Any = F.scaled_dot_product_attention
FEWEST_ARGUMENTS = 3
"""Of a function that turns by tables: what is turned, cosines, sines."""
MOST_CALLS = 8
"""Calls of one function in one module that are looked at."""


@dataclass
class FunctionStudy:
    """What became of every function, and the ids of modules whose tables Fuseline turns by."""

    sites: list[Site] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    serving: set[int] = field(default_factory=set)


class Recorder(StandIn):
    """Calls the function and keeps what it was called with; alike calls, in any module, share one sample."""

    def __init__(self, name: Name, shared: dict[Any, Sample]) -> None:
        super().__init__()
        self.name = name
        self.calls: dict[Any, Sample] = {}
        self._shared = shared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        alike = self.original, str(spec), tuple(map(_signature, leaves))
        if alike not in self.calls and len(self.calls) < MOST_CALLS:
            if alike not in self._shared:
                self._shared[alike] = Sample(*pytree.tree_map(_held, (args, kwargs)))
            self.calls[alike] = self._shared[alike]
        return self.original(*args, **kwargs)

    @property
    def samples(self) -> list[Sample]:
        return list(self.calls.values())


class LayerRecorder(StandIn):
    """Of torch's whole layer of attention: its calls, and those of the attention function in it."""

    def __init__(self, name: Name, inner: Recorder) -> None:
        super().__init__()
        self.name, self.inner = name, inner
        self.calls: dict[Any, LayerCall | str] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = LayerCall.read(args, kwargs)
        alike = call if isinstance(call, str) else (call.key(lengths=True), call.dropout)
        self.calls.setdefault(alike, call if isinstance(call, str) else replace(call, x=_held(call.x)))
        return rebound(self.original, {self.inner.name[1:]: self.inner}, [])(*args, **kwargs)


def study_functions(
    model: nn.Module,
    batch: Any,
    seen: Mapping[int, Observed],
    rotary: Sequence[Candidate],
    taken: Mapping[int, str],
    wanted: Wanted,
    clock: Clock,
) -> FunctionStudy:
    """Judge the functions of all modules; `rotary` are the modules that make tables."""
    result = FunctionStudy()
    shared: dict[Any, Sample] = {}
    recorders = {
        identity: found
        for identity, observed in seen.items()
        if observed.calls
        and is_wanted(observed.paths, wanted.only, wanted.skip)
        and identity not in taken
        and (found := _recorders(observed.module, shared))
    }
    if not recorders:
        return result
    makers = {id(one.module): maker for one in rotary if (maker := _maker(one, wanted)) is not None}
    standing: list[tuple[nn.Module, Layer]] = [
        *((seen[i].module, Rebound(seen[i].module, dict(found))) for i, found in recorders.items()),
        *((seen[i].module, maker) for i, maker in makers.items()),
    ]
    for module, layer in standing:
        put_in(module, layer)
    try:
        with torch.set_grad_enabled(wanted.train or torch.is_grad_enabled()):
            call_model(model, batch)
    finally:
        for module, layer in standing:
            take_out(module, layer)
    turns: dict[Any, Any] = {}
    attentions: dict[Any, KeptRecipe] = {}
    layers: dict[Any, Outcome] = {}
    for identity, found in recorders.items():
        observed = seen[identity]
        for recorder in found.values():
            if isinstance(recorder, LayerRecorder):
                calls = list(recorder.calls.values())
                whole = study_packed(observed, recorder.name, calls, layers, wanted, clock)
                if whole is not None and (whole[1] is not None or whole[0].status == FOUND):
                    result.sites.append(whole[0])
                    result.changes += [] if whole[1] is None else [whole[1]]
                    continue
                recorder = recorder.inner
            if not recorder.calls:
                continue
            if recorder.original is TORCH_ATTENTION:
                _attend(result, observed, recorder, attentions, wanted, clock)
            else:
                _turn(result, observed, recorder, makers, turns, wanted, clock)
    return result


def _recorders(module: nn.Module, shared: dict[Any, Sample]) -> dict[Name, Recorder | LayerRecorder]:
    """A recorder for each function of the module's forward that may be one of these."""
    forward: Any = type(module).forward
    if "forward" in module.__dict__:
        return {}
    found: dict[Name, Recorder | LayerRecorder] = {}
    for dotted, function in functions_read(forward):
        for name in _interesting(dotted, function):
            recorder = Recorder(name, shared)
            # Other code than torch's own might ask for the result in one piece.
            if function is torch_layer and forward is nn.MultiheadAttention.forward:
                found[name[:1]] = LayerRecorder(name[:1], recorder)
            else:
                found[name] = recorder
    return found


def _interesting(dotted: str, function: Function) -> list[Name]:
    if function is TORCH_ATTENTION:
        return [(dotted,)]
    if not isinstance(function, types.FunctionType):
        return []
    within = [(dotted, inner) for inner, value in functions_read(function) if value is TORCH_ATTENTION]
    if within:
        return list(within)
    if function.__module__.split(".")[0] == "torch":
        return []
    return [(dotted,)] if len(inspect.signature(function).parameters) >= FEWEST_ARGUMENTS else []


def _maker(candidate: Candidate, wanted: Wanted) -> TableMaker | None:
    """What writes on the tables of a module, if they are the same kind of tables in all of its calls."""
    module = candidate.module
    if "forward" in module.__dict__:
        return None
    try:
        found = {read_tables(trace(module, sample)) for sample in candidate.samples}
    except UntraceableError:
        return None
    tables = found.pop() if len(found) == 1 else None
    if tables is None:
        return None
    return TableMaker(module, *tables, map(form_of, candidate.samples), wanted.strict)


def _turn(
    result: FunctionStudy,
    observed: Observed,
    recorder: Recorder,
    makers: Mapping[int, TableMaker],
    known: dict[Any, Any],
    wanted: Wanted,
    clock: Clock,
) -> None:
    verdict = judge_turn(recorder.original, recorder.samples, known, wanted, clock)
    if verdict is None:
        return
    place = Site(observed.path, "rotary", KEPT, op="rope", also=observed.paths[1:])
    used: dict[int, TableMaker] = {}
    reason = verdict.numbers.refused
    for call in recorder.samples if verdict.recipe.layout != ONCE else ():
        cos = call.tensors()[verdict.recipe.cos]
        maker = next((one for one in makers.values() if one.made(cos)), None)
        if maker is None or maker.layout != verdict.recipe.layout:
            reason = reason or UNKNOWN
        else:
            used[id(maker.module)] = maker
    if reason:
        result.sites.append(replace(place, status=REFUSED, reason=reason))
        return
    site = site_of_numbers(place, verdict.numbers, wanted, "the model's own rotary embedding is as fast here")
    result.sites.append(site)
    if site.status != NOT_FASTER:
        result.serving |= used.keys()
    if site.status == KEPT:
        rebound = Rebound(observed.module, {recorder.name: verdict.stand_in(wanted)}, wanted.strict)
        layers = ((observed.module, rebound), *((maker.module, maker) for maker in used.values()))
        result.changes.append(Change(observed.path, "rotary", layers, recorder.name))


def _attend(
    result: FunctionStudy,
    observed: Observed,
    recorder: Recorder,
    known: dict[Any, KeptRecipe],
    wanted: Wanted,
    clock: Clock,
) -> None:
    calls = [inline_call(observed.module, *call.args, **call.kwargs) for call in recorder.samples]
    numbers = [judge_call(call, clock, known, wanted) for call in calls]
    site = site_of_calls(observed.path, observed.paths[1:], numbers, wanted)
    result.sites.append(site)
    if site.status == KEPT:
        keys = [one.key_of_proof() for call in calls for one in forms_of(call)]
        stand_in = InlineAttention(observed.module, keys, wanted.strict)
        layers = ((observed.module, Rebound(observed.module, {recorder.name: stand_in}, wanted.strict)),)
        result.changes.append(Change(observed.path, "attention", layers, recorder.name))


def _signature(leaf: Any) -> Any:
    """Equal for two arguments only if a function does the same with both, but for the values of tensors."""
    if not is_tensor(leaf):
        return (type(leaf), leaf) if isinstance(leaf, PLAIN) else id(leaf)
    note = getattr(leaf, NOTE, None)
    maker = None if note is None else id(note.maker)
    return maker, type(leaf), leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.device, leaf.requires_grad


def _held(leaf: Any) -> Any:
    """A tensor that keeps its attributes, without its history."""
    if not is_tensor(leaf):
        return leaf
    held = leaf.detach().requires_grad_(leaf.requires_grad)
    held.__dict__.update(leaf.__dict__)
    return held
