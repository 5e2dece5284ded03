"""The record: one measured figure, its interval, what was run and on what."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any, Union

from fuseline.errors import InputError, unknown_name
from fuseline.records.environment import Environment

Scalar = Union[str, int, float, bool, None]

SUITES = ("ops", "attention", "ladder", "compile", "decode", "linear", "translation", "quality", "hardware")

UNITS = {
    "time_us": "us",
    "host_us": "us",
    "bandwidth_gbs": "GB/s",
    "share_of_copy": "ratio",
    "share_of_floor": "ratio",
    "share_of_best": "ratio",
    "tflops": "TFLOP/s",
    "error": "ratio",
    "iteration_ms": "ms",
    "iteration_mean_ms": "ms",
    "iteration_sigma_ms": "ms",
    "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "mfu": "ratio",
    "mfu_sigma": "ratio",
    "mfu_causal": "ratio",
    "speedup": "ratio",
    "paired_speedup": "ratio",
    "peak_memory_gib": "GiB",
    "max_batch": "sequences",
    "compile_s": "s",
    "epoch_s": "s",
    "ttft_ms": "ms",
    "data_wait_share": "ratio",
    "loss": "nats",
    "validation_loss": "nats",
    "loss_error": "ratio",
    "grad_error": "ratio",
    "bleu": "BLEU",
    "amdahl_share": "ratio",
    "amdahl_limit": "ratio",
    "training_s": "s",
    "perplexity": "ratio",
    "cost_per_million_tokens": "currency",
    "skipped": "reason",
    "kernels": "list",
    "launches": "kernels",
    "kernel_ms": "ms",
    "latency_ns": "ns",
    "latency_cycles": "cycles",
    "intensity": "FLOP/byte",
}


@dataclass(frozen=True)
class Record:
    """One measured figure.

    `case` is a flat object of what was run; `low`/`high` a 95% interval; `n` the number of samples
    behind `value`. A thing that could not run is a record with metric `skipped`, value null and the
    reason under `case["reason"]`.
    """

    suite: str
    case: Mapping[str, Scalar]
    peer: str
    peer_version: str | None
    metric: str
    value: float | None
    unit: str
    low: float | None
    high: float | None
    n: int
    device: str
    clocks: str | None
    power_w: float | None
    torch: str
    cuda: str | None
    fuseline: str
    commit: str | None
    time: str

    @classmethod
    def of(
        cls,
        suite: str,
        case: Mapping[str, Scalar],
        metric: str,
        value: float | None,
        environment: Environment,
        *,
        peer: str = "fuseline",
        peer_version: str | None = None,
        low: float | None = None,
        high: float | None = None,
        n: int = 1,
    ) -> Record:
        """A record taken now in `environment` (see `fuseline.records.describe`)."""
        if suite not in SUITES:
            raise unknown_name("suite", suite, SUITES)
        if metric not in UNITS:
            raise unknown_name("metric", metric, UNITS)
        nested = {k: v for k, v in case.items() if not isinstance(v, (str, int, float, bool, type(None)))}
        if nested:
            raise InputError(f"A record's case is a flat object, but {nested} is not made of scalars.")
        return cls(
            suite=suite,
            case=dict(case),
            peer=peer,
            peer_version=peer_version or (environment.fuseline if peer == "fuseline" else environment.torch),
            metric=metric,
            value=_finite(value),
            unit=UNITS[metric],
            low=_finite(low),
            high=_finite(high),
            n=n,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            **asdict(environment),
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Parse one line. Raises `InputError` if it is not a record."""
        try:
            data: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"This line is not JSON ({error}): {line[:80]!r}") from error
        names = {f.name for f in fields(cls)}
        if not isinstance(data, dict) or not names <= set(data):
            missing = sorted(names - set(data)) if isinstance(data, dict) else sorted(names)
            raise InputError(
                f"This line is not a Fuseline record: {', '.join(missing)} missing in {line[:80]!r}"
            )
        return cls(**{name: data[name] for name in names})


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
