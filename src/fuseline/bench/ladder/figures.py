"""From runs to a rung's figures."""

from __future__ import annotations

from fuseline.bench.ladder.contender import GPTContender
from fuseline.bench.ladder.pairing import Runs
from fuseline.bench.ladder.result import Figure
from fuseline.timing import flops_per_token, mfu, paired_ratio, summarize
from fuseline.timing.flops import CONVENTIONS


def speed(contender: GPTContender, runs: Runs, device_name: str) -> dict[str, Figure]:
    """Time a step, tokens a second, MFU by both conventions (where the GPU's peak is known), paired ratio."""
    time_ms = Figure.of(summarize(runs.new))
    spec, config = contender.spec, contender.spec.config
    figures = {"iteration_ms": time_ms, "tokens_per_s": _rate(spec.tokens * 1e3, time_ms)}
    for convention in CONVENTIONS:
        flops = flops_per_token(
            contender.model.num_parameters(), config.num_layers, config.embed_dim, spec.seqlen, convention
        )
        share = mfu(flops * spec.tokens * 1e3, device_name)
        if share is not None:
            figures[convention] = _rate(share, time_ms)
    if runs.old:
        figures["paired_speedup"] = Figure.of(paired_ratio(runs.old, runs.new))
    figures["data_wait_share"] = Figure(runs.data_wait_share, n=len(runs.new))
    return figures


def _rate(amount: float, time_ms: Figure) -> Figure:
    """`amount` over the time; the slow end of one interval is the low end of the other."""
    low, high = time_ms.low or time_ms.value, time_ms.high or time_ms.value
    return Figure(amount / time_ms.value, amount / high, amount / low, time_ms.n)
