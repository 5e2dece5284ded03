"""The tables of the front page: accelerated models, whole steps, and what people use now against ours."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from tables.markdown import fastest, named, newest, source, table
from tables.ops import PEERS as PEERS_OF_OPS

OURS = ("fuseline", "fuseline-eager", "fuseline-inductor")
LESS_PRECISE = "fuseline-fp8"
"""Ours too, of another precision: it stands beside neither."""
TASKS = {"train": "training step", "forward": "forward"}
Line = tuple[str, str, str, float]
"""What was measured, what people use now, Fuseline, and the ratio of the two."""


def steps(records: Sequence[Record]) -> list[str]:
    """Whole steps of a suite whose cases name a model and a task: ours against the fastest of the others."""

    def place(r: Record) -> tuple[object, ...] | None:
        case = r.case
        model = case.get("model") or case.get("preset")
        keys = ("task", "batch", "seqlen_q", "dtype", "dropout")
        return (r.device, model, *(case.get(key) for key in keys)) if model else None

    times, memory = newest(records, "iteration_ms", place), newest(records, "peak_memory_gib", place)
    body = []
    for where, found in times.items():
        _, model, task, batch, length, dtype, dropout = where
        ours = fastest(found, OURS)
        best = fastest(found, sorted(set(found) - {*OURS, LESS_PRECISE}))
        if ours is None or best is None:
            continue
        name = f"{model}, {TASKS.get(str(task), task)}, {batch} x {length}, {dtype}"
        name += f", dropout {dropout}" if dropout else ""
        gib = memory.get(where, {}).get(ours[0])
        body.append(
            [
                name,
                f"{best[1]:.2f} ms ({named(best[0])})",
                f"**{ours[1]:.2f} ms**",
                f"{best[1] / ours[1]:.2f}x",
                f"{gib:.1f}" if gib is not None else "",
            ]
        )
    return table(["model", "fastest of the others", "Fuseline", "faster", "peak GiB"], body)


def compiled_steps(ladder: Sequence[Record], translation: Sequence[Record]) -> list[str]:
    """Whole training steps as the ladder and the translation suite have them."""
    lines = [_gpt2(ladder), *_translation(translation)]
    return [*_lines(lines), "", source([*ladder, *translation])]


def against(records: dict[str, Sequence[Record]]) -> list[str]:
    """What people use now against Fuseline, one line a subject."""
    lines = [
        *_decoding(records["decode"]),
        *_ops(records["ops"]),
        *_attention(records["attention"]),
        *_linears(records["linear"]),
    ]
    return [*_lines(lines), "", source([r for suite in records.values() for r in suite])]


def _lines(lines: Sequence[Line]) -> list[str]:
    body = [[what, now, f"**{ours}**", f"{ratio:.2f}x"] for what, now, ours, ratio in lines]
    return table(["", "what people use now", "Fuseline", "faster"], body, left=2)


def _gpt2(records: Sequence[Record]) -> Line:
    """nanoGPT's rows, compiled, against the fastest rung of the climb; both at batch 16."""
    times: dict[str, dict[str, float]] = {"anchor": {}, "cumulative": {}}
    for r in records:
        case = r.case
        of_gpt2 = case.get("preset") == "gpt2" and case.get("batch") == 16 and case.get("mode") in times
        if of_gpt2 and r.metric == "iteration_ms" and r.value is not None:
            times[str(case["mode"])][str(case["rung"])] = r.value
    theirs = min(t for rung, t in times["anchor"].items() if rung.startswith("inductor"))
    ours = min(times["cumulative"].values())
    return (
        "GPT-2 124M, training step",
        f"{theirs:.1f} ms (nanoGPT, compiled)",
        f"{ours:.1f} ms",
        theirs / ours,
    )


def _translation(records: Sequence[Record]) -> list[Line]:
    names = {
        "inductor-graph": ("translation model, training step, compiled", "`torch.compile`, one CUDA graph"),
        "graph": ("the same without a compiler", "torch's kernels, one CUDA graph"),
    }
    lines = []
    for execution, (what, peer) in names.items():
        found = {
            str(r.case["kernels"]): r.value
            for r in records
            if r.metric == "iteration_ms" and r.value is not None and r.case.get("section") == "epoch"
            and r.case["execution"] == execution and r.case["dtype"] == "bf16"
        }  # fmt: skip
        theirs, ours = found.get("torch") or found["formulas"], found["fuseline"]
        lines.append((what, f"{theirs:.2f} ms ({peer})", f"{ours:.2f} ms", theirs / ours))
    return lines


def _decoding(records: Sequence[Record]) -> list[Line]:
    def place(r: Record) -> tuple[object, ...] | None:
        at = r.case.get("position"), r.case.get("seqlen_k"), r.case.get("batch")
        return None if "rung" in r.case or at != (200, 512, 1) else (r.case["preset"], r.case["format"])

    rates = newest(records, "tokens_per_s", place)
    lines = []
    for key, name in {
        ("llama2-7b", "bf16"): "Llama-2-7B's shape, one row, bf16",
        ("llama2-7b", "int8"): "the same with int8 weights",
        ("gpt2", "bf16"): "GPT-2's shape, one row, bf16",
    }.items():
        ours = rates[key].pop("fuseline")
        best = max(rates[key], key=lambda peer: rates[key][peer])
        theirs = rates[key][best]
        lines.append(
            (name, f"{theirs:,.0f} tokens/s ({named(best)})", f"{ours:,.0f} tokens/s", ours / theirs)
        )
    return lines


def _ops(records: Sequence[Record]) -> list[Line]:
    def place(r: Record) -> tuple[object, ...] | None:
        case = r.case
        if case.get("dtype") != "bfloat16" or case.get("captured") is not False:
            return None
        return case["op"], case["direction"], case["rows"], case["n"]

    times = newest(records, "time_us", place)
    found = times.get(("linear_cross_entropy", "fwbw", 8192, 50304), {})
    best = fastest(found, PEERS_OF_OPS)
    if best is None:
        return []
    ours = found["fuseline"]
    name = "GPT-2's head and loss, 8,192 tokens, with the backward"
    return [(name, f"{best[1]:,.0f} us ({named(best[0])})", f"{ours:,.0f} us", best[1] / ours)]


def _attention(records: Sequence[Record]) -> list[Line]:
    def place(r: Record) -> tuple[object, ...] | None:
        case = r.case
        if case.get("section") != "short" or case.get("direction") != "fwbw" or case.get("causal") != "none":
            return None
        return case["seqlen_q"], case["head_dim"], case["batch"], case["heads"]

    lines = []
    for (length, width, batch, heads), found in newest(records, "time_us", place).items():
        best = fastest(found, ("math", "efficient", "flash", "cudnn", "flex"))
        if (length, width) == (128, 64) and "fuseline" in found and best is not None:
            name = (
                f"attention forward and backward, {batch:,} sequences of {length}, {heads} heads of {width}"
            )
            now = f"{best[1]:,.0f} us ({named(best[0])})"
            lines.append((name, now, f"{found['fuseline']:,.0f} us", best[1] / found["fuseline"]))
    return sorted(lines)


def _linears(records: Sequence[Record]) -> list[Line]:
    def place(r: Record) -> tuple[object, ...] | None:
        case = r.case
        wanted = case.get("section") == "layers" and (case["m"], case["k"], case["n"]) == (1, 11008, 4096)
        return (case["format"],) if wanted else None

    times = newest(records, "time_us", place)
    found = times.get(("int4",), {})
    best = fastest(found, ("eager", "inductor", "torchao", "tinygemm"))
    if "fuseline" not in found or best is None:
        return []
    ours = found["fuseline"]
    now = f"{best[1]:.1f} us ({named(best[0])})"
    return [("int4 linear, one row, 11,008 x 4,096", now, f"{ours:.1f} us", best[1] / ours)]


def step_in_words(records: Sequence[Record]) -> list[str]:
    """One line: the largest training step of GPT-2 on record, ours and compiled nanoGPT's."""
    times = [r for r in records if r.metric == "iteration_ms" and r.case.get("preset") == "gpt2" and r.value]
    largest = max(int(str(r.case["batch"])) for r in times)
    found = {r.peer: r for r in times if r.case["batch"] == largest}
    ours, theirs = fastest_of(found, OURS), fastest_of(found, sorted(set(found) - set(OURS)))
    case, gpu = ours.case, ours.device.removeprefix("NVIDIA ")
    return [
        f"A training step of GPT-2 124M ({case['batch']} x {case['seqlen_q']:,} tokens, bf16, one {gpu}) "
        f"takes **{ours.value:.0f} ms**; nanoGPT under `torch.compile` takes {theirs.value:.0f}."
    ]


def fastest_of(found: dict[str, Record], peers: Sequence[str]) -> Record:
    return min((found[peer] for peer in peers if peer in found), key=lambda r: r.value or 0.0)
