"""The choice of a candidate for a call: by request, by measurement, by estimate, or by a rule.

The first of these decides: a name in the call; `picker.use`; the environment variable FUSELINE_ATTENTION; the
fastest as measured on this machine, then in the package's table; the fastest by an estimate from the
package's measurements of that GPU, or else from measurements on this machine; `rule.py`. Under torch.compile
the choice is made while tracing: from static shapes as in eager mode, from shapes that vary by the rule.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fuseline.errors import InputError, unknown_name
from fuseline.ops.attention import rule, table_store
from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.work import packed_bytes

PICK = "pick"
VARIABLE = "FUSELINE_ATTENTION"
_UNKNOWN_LENGTH = 1024
_UNKNOWN_BATCH = 8
_UNKNOWN_HEADS = 8
_UNKNOWN_DROPOUT = 0.1
_MOST_REMEMBERED = 4096
COPY_GBS = 3000.0
"""What a GPU copies in a second, near enough to weigh a pass over the gradients (an H100's)."""


@dataclass(frozen=True)
class Decision:
    """What was chosen and why.

    `refused` has the reasons of the candidates that could not be chosen, `times_us` the measured times of
    this very problem, and `estimated_us` the times that are estimated from other problems.
    """

    problem: Problem
    name: str
    why: str
    refused: Mapping[str, str] = field(default_factory=dict)
    times_us: Mapping[str, float] = field(default_factory=dict)
    estimated_us: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Settings:
    """What `picker.use`, `picker.forbid`, `picker.compiling` and `picker.tuning` set, for the whole process.
    `compile`: what compiles for seconds for each shape may be chosen by an estimate, too. `tune` measures a
    problem that was not measured on this machine before it is chosen for."""

    used: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    compile: bool = False
    tune: Callable[[Problem], object] | None = None


SETTINGS = Settings()
_remembered: dict[tuple[Any, ...], str] = {}
_unfit: dict[tuple[Problem, str], str] = {}


def names() -> tuple[str, ...]:
    """What `backend=` takes."""
    return (PICK, *CANDIDATES)


def choose(call: Call, backend: str, *, packed: bool = False) -> str:
    """The candidate that runs the call. `packed`: q, k and v are parts of one tensor whose gradient is wanted
    whole."""
    if backend != PICK and backend not in CANDIDATES:
        raise unknown_name("attention backend", backend, names())
    used, forbidden = SETTINGS.used, SETTINGS.forbidden
    if torch.compiler.is_compiling():
        parts, is_dynamic = _with_stand_ins(call.parts())
        return _choose_traced(*parts, backend, used, forbidden, is_dynamic, packed)
    parts = call.parts()
    key = (parts, backend, used, forbidden, SETTINGS.compile, os.environ.get(VARIABLE), packed)
    found = _remembered.get(key)
    if found is None:
        problem = Problem(*parts)
        if backend == PICK:
            _measure_first(problem)
        found = _name_of(decide(problem, backend, used, forbidden), packed)
        if len(_remembered) >= _MOST_REMEMBERED:
            _remembered.clear()
        _remembered[key] = found
    return found


def _name_of(decision: Decision, packed: bool) -> str:
    """Who was chosen; for packed tensors with a gradient, whose times do not count that other kernels'
    gradients are put together afterwards, the fastest once that is counted."""
    times = decision.times_us or decision.estimated_us
    if not (packed and decision.problem.wants_grad and times):
        return decision.name
    together_us = 2 * packed_bytes(decision.problem) / COPY_GBS / 1e3

    def whole_us(name: str) -> float:
        return times[name] + (0.0 if CANDIDATES[name].run_packed else together_us)

    return min(times, key=whole_us)


def _measure_first(problem: Problem) -> None:
    """Measure a problem that is new on this machine; not while a graph is captured."""
    gpu = table_store.gpu_name(problem.device)
    if SETTINGS.tune is None or gpu is None or table_store.measured_here(gpu).find(problem) is not None:
        return
    if problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    tune, SETTINGS.tune = SETTINGS.tune, None  # what it measures calls attention
    try:
        tune(problem)
    except torch.OutOfMemoryError:
        warnings.warn(
            f"attention: there is no memory to measure {problem} beside what runs; its kernel is picked by "
            "what is known of others.",
            stacklevel=4,
        )
    finally:
        SETTINGS.tune = tune


def set_aside(call: Call, name: str, reason: str) -> None:
    """Choose another than `name` for such calls from now on: it was tried, and cannot."""
    _unfit[call.problem(), name] = reason
    _remembered.clear()


def forget() -> None:
    """Choose anew: what was measured has changed."""
    _remembered.clear()
    table_store.clear_caches()


def decide(
    problem: Problem,
    backend: str = PICK,
    used: Sequence[str] = (),
    forbidden: Sequence[str] = (),
    is_dynamic: bool = False,
    is_traced: bool = False,
    may_compile: bool | None = None,
) -> Decision:
    """The choice and its reasons. `may_compile`: whether what compiles for each shape may be chosen where it
    was not measured on this machine; None goes by `picker.compiling`.

    Raises InputError if what was asked for does not do the problem, or nothing does.
    """
    if may_compile is None:
        may_compile = SETTINGS.compile
    if backend != PICK:
        reason = _reason(problem, backend, is_traced)
        if reason is not None:
            raise InputError(
                f"attention: {backend} does not run here: {reason}. {_others(problem, is_traced)}"
            )
        return Decision(problem, backend, "the call names it")
    wished, banned, source = _wishes(used, forbidden)
    banned_by = dict.fromkeys(banned, f"{source} forbids it")
    if wished:
        refused = {n: r for n in wished if (r := banned_by.get(n) or _reason(problem, n, is_traced))}
        able = [name for name in wished if name not in refused]
        if not able:
            raise InputError(f"attention: of what {source} asks for, nothing runs here ({_said(refused)}).")
        refused.update({n: f"{source} asks for {', '.join(wished)}" for n in CANDIDATES if n not in wished})
        if len(able) == 1:
            return Decision(problem, able[0], f"{source} asks for it", refused)
        return _best(problem, able, refused, is_dynamic, may_compile)
    refused = {}
    for name, candidate in CANDIDATES.items():
        if name in banned_by:
            refused[name] = banned_by[name]
        elif problem.device.type not in candidate.offered_on:
            refused[name] = "it runs on request"
        elif is_traced and candidate.compiles and not may_compile:
            refused[name] = "it wants inductor to compile what is traced"
        elif reason := _reason(problem, name, is_traced):
            refused[name] = reason
    able = [name for name in CANDIDATES if name not in refused]
    if not able:
        raise InputError(f"attention: nothing runs {problem}: {_said(refused)}.")
    return _best(problem, able, refused, is_dynamic, may_compile)


def _reason(problem: Problem, name: str, is_traced: bool) -> str | None:
    """Why a candidate does not run the problem; None where it does."""
    candidate = CANDIDATES[name]
    if is_traced and not candidate.traces:
        return "torch.compile cannot trace it"
    return candidate.refuses(problem) or _unfit.get((problem, name))


def _best(
    problem: Problem,
    able: Sequence[str],
    refused: Mapping[str, str],
    is_dynamic: bool,
    may_compile: bool,
) -> Decision:
    """The fastest known of `able`."""
    if not is_dynamic:
        gpu = table_store.gpu_name(problem.device)
        willing = [name for name in able if may_compile or not CANDIDATES[name].compiles]
        tables = (
            (table_store.measured_here(gpu), able, "measured on this machine"),  # and asked to be
            (table_store.shipped(gpu), willing, "in the package's table"),
        )
        for table, among, where in tables:
            entry = table.find(problem)
            known = {} if entry is None else {n: t for n, t in entry.times_us.items() if n in among}
            if known:
                known = _with_parts(problem, gpu, known, among)
                name = min(known, key=lambda n: known[n])
                return Decision(problem, name, f"the fastest {where}", refused, known)
        estimated, why = _estimated(problem, gpu, willing)
        if estimated:
            estimated = _with_parts(problem, gpu, estimated, willing)
            name = min(estimated, key=lambda n: estimated[n])
            return Decision(problem, name, why, refused, estimated_us=estimated)
    preferred, why = rule.order(problem, is_dynamic)
    name = next((n for n in preferred if n in able), able[0])
    return Decision(problem, name, f"by rule, nothing near was measured: {why}", refused)


def _with_parts(
    problem: Problem, gpu: str | None, times_us: Mapping[str, float], names: Sequence[str]
) -> dict[str, float]:
    """The times, and with them those of candidates that were not measured but consist of two that were: the
    time of the backward pass's owner with the other's forward pass in the place of its own."""
    found = dict(times_us)
    for name in names:
        parts = CANDIDATES[name].parts
        if name in found or parts is None or parts[1] not in found:
            continue
        forward_us = _forward_times(problem, gpu, parts)
        if len(forward_us) == len(parts):
            theirs, own = (forward_us[part] for part in parts)
            found[name] = theirs + max(found[parts[1]] - own, 0.0)
    return found


def _forward_times(problem: Problem, gpu: str | None, names: Sequence[str]) -> dict[str, float]:
    """Microseconds of the forward pass alone: as measured where all were, else as estimated."""
    forward = replace(problem, direction="fw")
    for table in (table_store.measured_here(gpu), table_store.shipped(gpu)):
        entry = table.find(forward)
        if entry is not None and all(name in entry.times_us for name in names):
            return {name: entry.times_us[name] for name in names}
    return _estimated(forward, gpu, names)[0]


def _estimated(problem: Problem, gpu: str | None, names: Sequence[str]) -> tuple[dict[str, float], str]:
    """Microseconds of a problem that was not measured, and what they are from."""
    fitted = table_store.fitted(gpu)
    if fitted is not None:
        estimated = fitted.estimate(problem, names)
        if estimated:
            return (
                estimated,
                f"the fastest as estimated from {fitted.problems} problems measured on such a GPU",
            )
    every = table_store.combined(gpu)
    near = every.nearest(problem)
    if near is None:
        return {}, ""
    return every.estimator.estimate(problem, names), (
        f"the fastest as estimated from {len(every.entries)} measured problems, the nearest "
        f"{near[0]:.1f} doublings away: {near[1].problem}"
    )


def _wishes(used: Sequence[str], forbidden: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """What is asked for and what forbidden, and by whom: the context manager before the environment."""
    asked, banned = parse(os.environ.get(VARIABLE, ""))
    if used:
        return tuple(used), tuple(forbidden), "fuseline.picker"
    return asked, (*banned, *forbidden), VARIABLE if asked or banned else "fuseline.picker"


def parse(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names asked for and names forbidden of `flash,cudnn` or `-cudnn`."""
    words = [word.strip() for word in text.split(",") if word.strip() and word.strip() != PICK]
    for word in words:
        check_name(word.removeprefix("-"))
    asked = tuple(word for word in words if not word.startswith("-"))
    return asked, tuple(word[1:] for word in words if word.startswith("-"))


def check_name(name: str) -> None:
    if name not in CANDIDATES:
        raise unknown_name("attention candidate", name, CANDIDATES)


def _others(problem: Problem, is_traced: bool) -> str:
    offered = [name for name, c in CANDIDATES.items() if problem.device.type in c.offered_on]
    able = [name for name in offered if _reason(problem, name, is_traced) is None]
    return f"Take {PICK!r}" + (f", or one of {', '.join(able)}." if able else ".")


def _said(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _choose_traced(*constants: Any) -> str:
    *fields, backend, used, forbidden, is_dynamic, packed = constants
    if SETTINGS.tune is not None and backend == PICK and not is_dynamic:
        _measure_first(Problem(*fields))
    may_compile = SETTINGS.compile or _goes_to_inductor()
    decision = decide(
        Problem(*fields), backend, used, forbidden, is_dynamic, is_traced=True, may_compile=may_compile
    )
    return _name_of(decision, packed)


def _goes_to_inductor() -> bool:
    """Whether inductor compiles what is traced now. Other backends of torch.compile run what they traced
    as it is, and FlexAttention then holds [B, H, T, S]; without inductor it is not chosen."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # another tracer than dynamo
        return False
    for wrapped in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):
        backend = getattr(backend, wrapped, backend)
    return "inductor" in (getattr(backend, "compiler_name", None), getattr(backend, "__name__", None))


# Evaluated while torch.compile traces, with constants: what torch.compiler.assume_constant_result does,
# without importing the compiler.
_choose_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _branched(condition: bool) -> bool:
    """The condition as a constant: traced, a comparison of sizes stays symbolic until something branches."""
    if condition:  # noqa: SIM103
        return True
    return False


def _with_stand_ins(parts: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
    """A problem's parts with stand-ins for sizes that vary while tracing, and whether there are any."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    before, (batch, heads, kv_heads, T, S, D), after = parts[:2], parts[2:8], parts[8:]
    direction_to_mask, (sequences, longest_q, longest_k) = after[:6], after[6:9]
    (soft_cap, sinks, dropout_p), rest = after[9:12], after[12:]
    is_dynamic = False
    if not has_static_value(batch):
        batch, is_dynamic = _UNKNOWN_BATCH, True
    if not (has_static_value(T) and has_static_value(S)):
        is_dynamic = True
        if T == S:
            T = S = _UNKNOWN_LENGTH
        elif T < S:
            T, S = T if has_static_value(T) else _UNKNOWN_LENGTH // 2, _UNKNOWN_LENGTH
        else:
            T, S = _UNKNOWN_LENGTH, S if has_static_value(S) else _UNKNOWN_LENGTH // 2
    if sequences != 0:
        known = [has_static_value(size) for size in (sequences, longest_q, longest_k)]
        if not all(known):
            sequences, longest_q, longest_k = _UNKNOWN_BATCH, _UNKNOWN_LENGTH, _UNKNOWN_LENGTH
            is_dynamic = True
    if not (has_static_value(heads) and has_static_value(kv_heads)):
        heads, kv_heads = _UNKNOWN_HEADS, _UNKNOWN_HEADS if heads == kv_heads else _UNKNOWN_HEADS // 2
    if not has_static_value(D):
        D = (64 if D <= 128 else 256 if D <= 256 else 512) + (0 if D % 8 == 0 else 1)
    if not has_static_value(dropout_p):
        dropout_p = _UNKNOWN_DROPOUT if dropout_p > 0 else 0.0
    sizes, packing = (batch, heads, kv_heads, T, S, D), (sequences, longest_q, longest_k)
    numbers = (_branched(soft_cap), sinks, dropout_p)
    return (*before, *sizes, *direction_to_mask, *packing, *numbers, *rest), is_dynamic
