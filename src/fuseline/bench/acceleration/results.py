"""A contest as records."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError

from fuseline.bench.acceleration.case import Case
from fuseline.bench.acceleration.contenders import OURS, version
from fuseline.bench.acceleration.contest import Contest, Outcome
from fuseline.bench.peers.peer import package_version
from fuseline.records import Environment, Record
from fuseline.records.record import Scalar
from fuseline.timing import paired_ratio, summarize

SUITE = "acceleration"


def records_of(case: Case, dtype: str, contest: Contest, environment: Environment) -> list[Record]:
    """What every contender took, ours against the fastest of the others, and why the rest took nothing."""
    described = {**case.as_record(dtype), "transformers": _transformers()}
    best = fastest_peer(contest.outcomes)
    records = [
        record for outcome in contest.outcomes for record in _of_one(outcome, best, described, environment)
    ]
    return records + refusals(described, contest.refused, environment)


def refusals(described: dict[str, Scalar], refused: dict[str, str], environment: Environment) -> list[Record]:
    return [
        Record.of(SUITE, {**described, "reason": reason}, "skipped", None, environment, peer=name)
        for name, reason in refused.items()
    ]


def fastest_peer(outcomes: Sequence[Outcome]) -> Outcome | None:
    peers = [outcome for outcome in outcomes if outcome.contender.name not in OURS]
    return min(peers, key=lambda outcome: summarize(outcome.times_ms).median, default=None)


def _of_one(
    outcome: Outcome, best: Outcome | None, described: dict[str, Scalar], environment: Environment
) -> list[Record]:
    contender, times = outcome.contender, summarize(outcome.times_ms)
    name = contender.name
    of = environment.fuseline if name in OURS else version(name)

    def record(
        metric: str,
        value: float | None,
        low: float | None = None,
        high: float | None = None,
        n: int = 1,
        **more: Scalar,
    ) -> Record:
        case = {**described, **more}
        return Record.of(
            SUITE, case, metric, value, environment, peer=name, peer_version=of, low=low, high=high, n=n
        )

    records = [
        record("iteration_ms", times.median, times.low, times.high, times.n),
        record("compile_s", outcome.ready_s),
    ]
    if outcome.peak_gib is not None:
        records.append(record("peak_memory_gib", outcome.peak_gib))
    records += [record(metric, value) for metric, value in outcome.errors.items()]
    if contender.fast is not None:
        records.append(record("accelerate_s", contender.seconds))
        records.append(record("kernels", len(contender.fast.kept), names=contender.changes()))
    if best is not None and name in OURS:
        ratio = paired_ratio(best.times_ms, outcome.times_ms)
        records.append(record("paired_speedup", ratio.value, ratio.low, ratio.high, ratio.n))
    return records


def _transformers() -> str | None:
    try:
        return package_version("transformers")
    except PackageNotFoundError:
        return None
