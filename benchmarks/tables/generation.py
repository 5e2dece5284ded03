"""Generation: tokens a second by format and lever, and what each format costs in perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fuseline.records import Record
from tables.markdown import named, newest, table

LEVERS = {
    "eager": "eager",
    "compiled": "`torch.compile`, static cache",
    "cuda-graph": "one CUDA graph a step",
    "fused": "Fuseline's kernels",
    "int8": "int8 weights",
    "int4": "int4 weights, groups of 128",
    "speculation": "an int4 copy drafts 4 tokens ahead of bf16",
}
FORMATS = ("bf16", "int8", "int4", "fp8")
ROUNDINGS = {"nearest": "", "fitted": ", fitted grids", "hqq": ", HQQ", "calibrated": ", calibrated"}


def climb(records: Sequence[Record]) -> list[str]:
    """Generation rung by rung: in Llama-2-7B's shape, and in the newest trained model with its perplexity."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for r in sorted(records, key=lambda r: r.time):
        if "rung" in r.case and r.value is not None:
            rungs = found.setdefault(str(r.case["preset"]), {})
            rungs.setdefault(str(r.case["rung"]), {})[r.metric] = r.value
    large = found.get("llama2-7b", {})
    trained = [rungs for rungs in found.values() if any("perplexity" in values for values in rungs.values())]
    small = trained[-1] if trained else {}
    body = []
    for rung, name in LEVERS.items():
        cells = [name]
        for rungs in (large, small):
            rate = rungs.get(rung, {}).get("tokens_per_s")
            cells.append(f"{rate:,.0f}" if rate else "")
            for other in ("compiled", "eager"):
                theirs = rungs.get(other, {}).get("tokens_per_s")
                cells.append(f"{rate / theirs:.2f}x" if rate and theirs else "")
        perplexity = small.get(rung, {}).get("perplexity")
        body.append([*cells, f"{perplexity:.3f}" if perplexity else ""])
    over = ["over `torch.compile`", "over eager"]
    head = ["rung", "Llama-2-7B, tokens/s", *over, "a small trained GPT, tokens/s", *over]
    return table([*head, "perplexity"], body)


def decode(records: Sequence[Record]) -> list[str]:
    """Tokens a second around position 200 of 512, by model, format and rows, and the best of others."""

    def place(r: Record) -> tuple[object, ...] | None:
        if "rung" in r.case or (r.case.get("position"), r.case.get("seqlen_k")) != (200, 512):
            return None
        return r.case["preset"], r.case["format"], r.case["batch"]

    rates = newest(records, "tokens_per_s", place)
    models = sorted(
        {where[:2] for where in rates}, key=lambda at: (at[0] == "gpt2", FORMATS.index(str(at[1])))
    )
    body = []
    for model, format in models:
        cells = [str(model), str(format)]
        for rows in (1, 8):
            others = dict(rates.get((model, format, rows), {}))
            ours = others.pop("fuseline", None)
            best = max(others, key=lambda peer: others[peer], default="")
            cells.append("" if ours is None else f"{ours:,.0f}")
            cells.append(f"{others[best]:,.0f} ({named(best)})" if best else "")
        body.append(cells)
    head = ["model", "weights", "1 row, tokens/s", "best of the others"]
    return table([*head, "8 rows, tokens/s", "best of the others"], body, left=2)


def quality(records: Sequence[Record]) -> list[str]:
    """What each format costs in perplexity, by the text that a model was trained and measured on."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for r in sorted(records, key=lambda r: r.time):
        if r.case.get("section") != "formats" or r.value is None:
            continue
        of = str(r.case["data"]) if r.case["text"] == "held out" else Path(str(r.case["text"])).stem
        size = f", groups of {r.case['group_size']}" if r.case["group_size"] else ""
        zeros = ", zero points" if r.case.get("zero_points") else ""
        rounding = ROUNDINGS[str(r.case["rounding"])]
        found.setdefault((of, f"{r.case['format']}{size}{zeros}{rounding}"), {})[r.metric] = r.value
    body = []
    for (of, format), values in found.items():
        percent = round(100 * values.get("loss_error", 0.0), 3) + 0.0  # -0 is 0
        cost = f"{percent:.3f}%" if "loss_error" in values else ""
        bits = f"{values['bits_per_weight']:.2f}" if "bits_per_weight" in values else ""
        body.append([of, format, bits, f"{values['perplexity']:.3f}", cost])
    return table(["text", "weights", "bits a weight", "perplexity", "more than bf16"], body, left=2)
