"""The record: one measured figure with its interval, what was run, and on which machine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Union

from fuseline.errors import InputError, unknown_name
from fuseline.records.environment import Environment
from fuseline.records.kernel_sources import hashes

Scalar = Union[str, int, float, bool, None]

SUITES = (
    "ops",
    "attention",
    "ladder",
    "compile",
    "decode",
    "linear",
    "translation",
    "quality",
    "hardware",
    "step",
    "acceleration",
    "profile",
)

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
    "paired_over_bf16": "ratio",
    "layers_in_fp8": "layers",
    "peak_memory_gib": "GiB",
    "reserved_memory_gib": "GiB",
    "max_batch": "sequences",
    "compile_s": "s",
    "accelerate_s": "s",
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
    "bits_per_weight": "bits",
    "cost_per_million_tokens": "currency",
    "skipped": "reason",
    "kernels": "list",
    "launches": "kernels",
    "kernel_ms": "ms",
    "saving_ms": "ms",
    "latency_ns": "ns",
    "latency_cycles": "cycles",
    "intensity": "FLOP/byte",
}


@dataclass(frozen=True)
class Record:
    """One measured figure.

    `case` is a flat object that says what was run, `low` and `high` are a 95% interval, and `n` is the number
    of samples behind `value`. A case that could not run has metric `skipped`, value null and the reason under
    `case["reason"]`. `kernels` are the hashes of the kernel families that may have run (see
    `fuseline.records.kernel_sources`), empty where none of ours did; None of records from before they were
    kept.
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
    kernels: Mapping[str, str] | None = None

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
            kernels=hashes(suite, case, peer, metric, on_gpu=environment.cuda is not None),
            **asdict(environment),
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str | bytes) -> Record:
        """Parse one line. Raises `InputError` if it is not a record that a page can be drawn from."""
        from fuseline.records.schema import checked_line  # pydantic takes a while, and few verbs read records

        return cls(**checked_line(line, "This line is not a Fuseline record"))


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
