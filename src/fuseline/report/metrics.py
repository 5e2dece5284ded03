"""How each metric is called and written. A metric not named here is shown under its own name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fuseline.records import Record
from fuseline.report.blocks import EMPTY, Cell
from fuseline.report.numbers import error, percent, plain, ratio, whole, with_interval


@dataclass(frozen=True)
class Presentation:
    """`unit` stands in the heading of a column or an axis; `style` says how a value is written."""

    label: str
    unit: str = ""
    style: str = "plain"
    hint: str = ""


METRICS: Mapping[str, Presentation] = {
    "time_us": Presentation("time", "µs", hint="median"),
    "host_us": Presentation("host time", "µs", hint="what one eager call costs the host"),
    "bandwidth_gbs": Presentation("bandwidth", "GB/s"),
    "share_of_copy": Presentation("share of copy", "", "percent", "of the copy bandwidth measured beside it"),
    "share_of_floor": Presentation("share of floor", "", "percent"),
    "share_of_best": Presentation("share of the best", "", "percent", "the fastest's time over this one's"),
    "tflops": Presentation("rate", "TFLOP/s"),
    "error": Presentation("error", "", "error", hint="relative, against float64"),
    "iteration_ms": Presentation("time", "ms/iteration", hint="median of the runs, 95% interval below it"),
    "iteration_mean_ms": Presentation("mean", "ms/iteration"),
    "iteration_sigma_ms": Presentation("sigma", "ms"),
    "tokens_per_s": Presentation("throughput", "tokens/s", "count"),
    "samples_per_s": Presentation("throughput", "samples/s"),
    "mfu": Presentation("MFU", "6N + 12LCT", "percent", "as the PaLM paper and nanoGPT count it"),
    "mfu_sigma": Presentation("MFU sigma", "", "percent"),
    "mfu_causal": Presentation("MFU", "causal", "percent", "6N + 6LCT: only the attention a mask leaves"),
    "speedup": Presentation("speed-up", "of the baseline", "ratio"),
    "paired_speedup": Presentation("ratio", "old/new, paired", "ratio", "runs taken A B B A"),
    "reserved_memory_gib": Presentation("reserved", "GiB", hint="what the allocator held, used or not"),
    "peak_memory_gib": Presentation("peak memory", "GiB", hint="allocated, not reserved"),
    "max_batch": Presentation("largest batch", "sequences", "count"),
    "compile_s": Presentation("compile", "s"),
    "accelerate_s": Presentation("accelerate", "s", hint="what finding, proving and timing the sites took"),
    "epoch_s": Presentation("epoch", "s"),
    "ttft_ms": Presentation("first token", "ms"),
    "data_wait_share": Presentation(
        "data wait", "", "percent", "share of a step spent waiting for its batch"
    ),
    "loss": Presentation("training loss", "nats"),
    "validation_loss": Presentation("validation loss", "nats"),
    "loss_error": Presentation("loss error", "relative", "error", "against fp32 on the same batch"),
    "grad_error": Presentation("gradient error", "relative", "error", "against fp32 on the same batch"),
    "launches": Presentation("launches", "kernels a call", "count"),
    "kernel_ms": Presentation("kernels", "ms a step"),
    "latency_ns": Presentation("latency", "ns"),
    "latency_cycles": Presentation("latency", "clock cycles"),
    "intensity": Presentation("intensity", "FLOP/byte"),
    "bleu": Presentation("BLEU"),
    "amdahl_share": Presentation("fusable share", "of the step", "percent"),
    "amdahl_limit": Presentation("limit", "if it cost nothing", "ratio"),
    "training_s": Presentation("training", "s"),
    "perplexity": Presentation("perplexity"),
    "bits_per_weight": Presentation("bits a weight", hint="of linear layers, scales among them"),
    "cost_per_million_tokens": Presentation("cost", "per million tokens"),
}


def presentation(metric: str) -> Presentation:
    return METRICS.get(metric, Presentation(metric.replace("_", " ")))


def number(metric: str, value: float) -> str:
    """A value of `metric` alone, without unit or interval."""
    return _STYLES[presentation(metric).style](value)


def cell(record: Record | None) -> Cell:
    """A table's cell: the value, its interval below it."""
    if record is None:
        return EMPTY
    if record.value is None:
        return Cell("none", tone="muted")
    style = presentation(record.metric).style
    if style == "plain":
        return Cell(*with_interval(record.value, record.low, record.high))
    if style == "ratio":
        text, interval = with_interval(record.value, record.low, record.high)
        return Cell(f"{text}x", interval)
    if style == "percent" and record.low is not None and record.high is not None:
        text, interval = with_interval(100 * record.value, 100 * record.low, 100 * record.high)
        return Cell(f"{text}%", interval)
    return Cell(number(record.metric, record.value))


def verdict(gain: float, low: float | None, high: float | None, other: str) -> str:
    """How a ratio over `other` reads after the number: faster, slower, or not told apart from noise."""
    if (gain if low is None else low) > 1:
        return f"faster than {other}"
    if (gain if high is None else high) < 1:
        return f"the speed of {other}: slower"
    return f"the speed of {other}: no difference beyond the noise"


_STYLES: Mapping[str, Callable[[float], str]] = {
    "plain": plain,
    "percent": percent,
    "error": error,
    "ratio": ratio,
    "count": whole,
}
