"""What `accelerate` found in a model as records of the suite `acceleration`."""

from __future__ import annotations

from collections.abc import Iterator

from fuseline.acceleration.handle import Acceleration
from fuseline.acceleration.pay import PAIRS
from fuseline.acceleration.site import REFUSED
from fuseline.records import Environment, Record
from fuseline.records.record import Scalar

SUITE = "acceleration"


def records_of(fast: Acceleration, model: str, environment: Environment) -> list[Record]:
    """Times and errors of each site, Fuseline's and the original's (peer `eager`), or why it was refused;
    then the times of the whole step. `model` is the model's name."""
    case: dict[str, Scalar] = {"model": model, "task": "train" if fast.wanted.train else "forward"}
    return [*_of_sites(fast, case, environment), *_of_the_whole(fast, case, environment)]


def _of_sites(fast: Acceleration, case: dict[str, Scalar], environment: Environment) -> Iterator[Record]:
    for site in fast.sites:
        of = {**case, "site": site.path, "kind": site.kind, "op": site.op, "status": site.status}
        if site.status == REFUSED:
            yield Record.of(SUITE, {**of, "reason": site.reason}, "skipped", None, environment)
        for peer, metric, value, n in (
            ("fuseline", "error", site.error, 1),
            ("eager", "error", site.original_error, 1),
            ("fuseline", "time_us", site.time_us, PAIRS),
            ("eager", "time_us", site.original_time_us, PAIRS),
        ):
            if value is not None:
                yield Record.of(SUITE, of, metric, value, environment, peer=peer, n=n)


def _of_the_whole(fast: Acceleration, case: dict[str, Scalar], environment: Environment) -> Iterator[Record]:
    if fast.whole is None:
        return
    ratio = fast.whole.ratio
    yield Record.of(
        SUITE,
        case,
        "paired_speedup",
        ratio.value,
        environment,
        low=ratio.low,
        high=ratio.high,
        n=ratio.n,
    )
    for peer, value in (("fuseline", fast.whole.swapped_us), ("eager", fast.whole.original_us)):
        yield Record.of(SUITE, case, "time_us", value, environment, peer=peer, n=ratio.n)
