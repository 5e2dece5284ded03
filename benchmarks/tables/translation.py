"""The translation model's training step, with and without fused kernels, and its BLEU."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from fuseline.records import Record
from tables.markdown import table

EXECUTIONS = {
    "eager": "eager",
    "graph": "one CUDA graph a step",
    "inductor-graph": "`torch.compile`, one CUDA graph",
}
KERNELS = ("formulas", "torch", "fuseline", "nothing")


def translation(records: Sequence[Record]) -> list[str]:
    """Milliseconds a step by kernels, and the ratio of ours to the first.

    What would be left were nothing to fuse is in brackets where the compiler would remove it: it is then
    computed from the kernels' times, else from the uncompiled graph.
    """
    found = {
        (r.case["execution"], r.case["dtype"], r.case["kernels"], r.metric): r.value
        for r in records
        if r.case.get("section") == "epoch"
    }
    limits = {
        (r.case["execution"], r.case["dtype"]): r.value
        for r in records
        if r.case.get("section") == "work" and r.metric == "amdahl_limit"
    }
    body = []
    for execution, dtype in dict.fromkeys(key[:2] for key in found):
        times = [found.get((execution, dtype, kernels, "iteration_ms")) for kernels in KERNELS]
        cells = [f"{EXECUTIONS[str(execution)]}, {dtype}", *(f"{t:.2f} ms" if t else "" for t in times)]
        if times[0] and not times[-1]:
            limit = limits.get((execution, dtype))
            graph = found.get(("graph", dtype, "nothing", "iteration_ms"))
            left = times[0] / limit if limit else graph
            cells[-1] = f"({left:.2f} ms)" if left else ""
        body.append([*cells, f"{found[execution, dtype, 'fuseline', 'paired_speedup']:.2f}x"])
    head = ["step", "operator by operator", "torch's kernels", "Fuseline's ops", "nothing left to fuse"]
    return table([*head, "faster"], body)


def bleu(records: Sequence[Record]) -> list[str]:
    """BLEU on Multi30k's test sentences: with and without fused kernels, and of the encoder-decoder."""
    scores: dict[str, list[float]] = {}
    names = {True: "decoder-only, Fuseline's ops", False: "decoder-only, operator by operator"}
    seconds = ""
    for r in records:
        if r.metric == "bleu" and r.value is not None and r.case["section"] in ("quality", "recipe"):
            recipe = r.case["section"] == "recipe"
            name = "encoder-decoder, Fuseline's ops" if recipe else names[bool(r.case["fused"])]
            scores.setdefault(name, []).append(r.value)
        if r.metric == "training_s" and r.case["section"] == "recipe":
            seconds = f"{r.value:.0f} s"
    body = [
        [
            name,
            str(len(values)),
            f"{mean(values):.1f}",
            f"{min(values):.1f} to {max(values):.1f}" if len(values) > 1 else "",
            seconds if name.startswith("encoder") else "",
        ]
        for name, values in scores.items()
    ]
    return table(["model", "seeds", "BLEU", "range", "training"], body)
