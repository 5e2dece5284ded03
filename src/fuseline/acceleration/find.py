"""Which modules of a model compute something that Fuseline has an op for."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fuseline.acceleration.kinds import recognize
from fuseline.acceleration.layer import Layer
from fuseline.acceleration.observe import Observed, Sample, fingerprint
from fuseline.acceleration.probes import reduced
from fuseline.acceleration.recipe import Match, Refusal, Verdict
from fuseline.acceleration.swap import why_not_passed
from fuseline.acceleration.trace import Trace, UntraceableError, trace
from fuseline.acceleration.wide import fix_default_eps
from fuseline.errors import InputError

LARGEST_FAMILY = 12
"""Modules in and below one that may be a single fused op."""
SINGLE = (nn.Linear, nn.Dropout, nn.Identity)
"""Modules of torch's that are one operation already: there is nothing to look for in them."""
KNOWN = {
    nn.LayerNorm: "layer_norm",
    nn.RMSNorm: "rms_norm",
    nn.GELU: "activation",
    nn.Embedding: "embedding",
}
"""Kinds of torch's modules, to name the site if one of them cannot be traced."""


@dataclass(frozen=True)
class Candidate:
    """A module that was recognized, and the calls of it. `family` is equal for modules that are alike."""

    module: nn.Module
    paths: tuple[str, ...]
    samples: tuple[Sample, ...]
    verdict: Match | Refusal
    trace: Trace | None
    family: Any

    @property
    def path(self) -> str:
        return self.paths[0]


def find(seen: Iterable[Observed], only: Sequence[str], skip: Sequence[str]) -> list[Candidate]:
    """The recognized modules in the model's order, each module before those inside it."""
    known: dict[Any, tuple[Verdict, Trace | None]] = {}
    found: list[Candidate] = []
    for observed in seen:
        module = observed.module
        if not observed.samples or observed.reason or not is_wanted(observed.paths, only, skip):
            continue
        if type(module) in SINGLE or observed.attends or _count(module) > LARGEST_FAMILY:
            continue
        samples = tuple(observed.samples.values())
        family = fingerprint(module), tuple(id(sample) for sample in samples)
        if family not in known:
            known[family] = _recognized(module, samples)
        verdict, traced = known[family]
        if verdict is None:
            continue
        reason = why_untouchable(module) if isinstance(verdict, Match) else None
        if reason is not None:
            verdict = Refusal(verdict.kind, reason)
        found.append(Candidate(module, observed.paths, samples, verdict, traced, (family, reason)))
    return found


def is_wanted(paths: Sequence[str], only: Sequence[str], skip: Sequence[str]) -> bool:
    """Whether to look at a module: it, or a module around it, matches a name or a pattern with stars."""

    def named(path: str, patterns: Sequence[str]) -> bool:
        parts = path.split(".")
        heads = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return any(fnmatch.fnmatchcase(head, pattern) for head in heads for pattern in patterns)

    return not any(named(path, skip) for path in paths) and (
        not only or any(named(path, only) for path in paths)
    )


def check_names(model: nn.Module, names: Sequence[str], option: str) -> None:
    """Raise `InputError` for a name or pattern that fits no module."""
    paths = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name in names:
        if not any(fnmatch.fnmatchcase(path, name) for path in paths):
            raise InputError(f"{option} names {name!r}, which fits no module of this model.")


def why_untouchable(module: nn.Module) -> str | None:
    """Why the forward of a recognized module may not be swapped."""
    own = module.__dict__.get("forward")
    if own is not None and not isinstance(own, Layer):
        return f"its forward was replaced on the instance, by {_name(own)}"
    if "parametrizations" in module._modules:
        return "it is parametrized"
    for path, child in module.named_modules():
        if path and (reason := why_not_passed(child, path)) is not None:
            return reason
        for name, parameter in child._parameters.items():
            if parameter is not None and type(parameter) is not nn.Parameter:
                return f"{name} is a {type(parameter).__name__}, not a plain parameter"
        if child.training is not module.training:
            return f"{path} is in another mode than the module around it"
    return None


def _recognized(module: nn.Module, samples: Sequence[Sample]) -> tuple[Verdict, Trace | None]:
    """What all calls of the module agree on."""
    verdicts = []
    traced: Trace | None = None
    for sample in samples:
        try:
            traced = _small_trace(module, sample)
        except UntraceableError as error:
            kind = KNOWN.get(type(module))
            return None if kind is None else Refusal(kind, str(error)), None
        verdicts.append(recognize(traced, module))
    if any(verdict != verdicts[0] for verdict in verdicts):
        kinds = [verdict.kind for verdict in verdicts if verdict is not None]
        return Refusal(kinds[0], "it computes different things when called differently"), traced
    return verdicts[0], traced


def _small_trace(module: nn.Module, sample: Sample) -> Trace:
    """The module's graph on few rows, so that looking at it costs little; on all where it takes no fewer."""
    try:
        traced = trace(module, reduced(sample, 6))
    except UntraceableError:
        traced = trace(module, sample)
    fix_default_eps(traced)
    return traced


def _count(module: nn.Module) -> int:
    return sum(1 for _ in module.modules())


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))
