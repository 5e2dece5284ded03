"""The documents that docs/seeds.md walks through: their figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import geometric_mean

from fuseline.bench.ladder.references import SEED_001, SEED_003
from fuseline.bench.ops.seed_shapes import MASKS
from fuseline.records import Record
from fuseline.report.sections.loss_clock import seconds_to
from tables.markdown import newest, source, table

NOT_YET = "not on record yet"


def fullest(draw: Callable[[Sequence[Record]], list[str]], records: Sequence[Record]) -> list[str]:
    """The table from the device that has most of it on record, of several the one measured last; below it the
    device and the days."""
    drawn = [(0, "", draw([]))]
    for device in {r.device for r in records}:
        here = [r for r in records if r.device == device]
        lines = draw(here)
        figures = sum(line.count("|") - line.count("| |") for line in lines if NOT_YET not in line)
        if lines != drawn[0][2]:
            drawn.append((figures, max(r.time for r in here), [*lines, "", source(here)]))
    return max(drawn)[2]


def lstm(records: Sequence[Record]) -> list[str]:
    """The tutorial's LSTM cell: microseconds in Python, in C++ over ATen, and with a kernel."""
    found = newest(
        records, "time_us", lambda r: (r.case["direction"],) if r.case.get("section") == "lstm" else None
    )
    theirs = {"fw": ("188 us", "129 us"), "bw": ("411 us", "305 us")}
    body = []
    for direction, name in (("fw", "forward"), ("bw", "backward")):
        ours = found.get((direction,), {})
        cells = [f"{ours[way]:.0f} us" if way in ours else NOT_YET for way in ("python", "aten", "fuseline")]
        body.append([name, *theirs[direction], *cells])
    head = ["LSTM cell", "theirs, Python", "theirs, CUDA extension", "ours, Python", "C++ over ATen"]
    return table([*head, "with a kernel"], body)


def masked_softmax(records: Sequence[Record]) -> list[str]:
    """Softmax with what attention asks of it, bf16: the fastest of the others, and ours, in a graph."""

    def place(r: Record) -> tuple[object, ...] | None:
        case = r.case
        if case.get("section") != "seed" or "mask" not in case or not case["captured"]:
            return None
        return case["mask"], case["direction"], case["n"]

    found = newest(records, "paired_speedup", place)
    body = []
    for mask in MASKS:
        cells = []
        for direction in ("fw", "bw"):
            for peers in (("composed",), OTHERS):
                best = [
                    min(one[peer] for peer in peers if peer in one)
                    for at, one in found.items()
                    if at[:2] == (mask, direction) and any(peer in one for peer in peers)
                ]
                cells.append(_ratio(best))
        body.append([mask, *cells])
    head = ["bf16, in a graph", "forward, against operations", "the fastest of the others"]
    return table([*head, "backward, against operations", "the fastest of the others"], body)


TRAINING = ("data", "layers", "batch", "seqlen_q", "dropout", "seed")
"""What two trainings have in common, of which one is naive and one the fastest way."""


def clock(records: Sequence[Record]) -> list[str]:
    """GPT-2 by naive attention and by the fastest way, on the same batches: the validation loss against the
    clock. Of several pairs the newest."""
    runs: dict[tuple[str, ...], dict[str, dict[float, float]]] = {}
    tokens: dict[tuple[str, ...], dict[str, float]] = {}
    for r in sorted(records, key=lambda r: r.time):
        case = r.case
        if case.get("model") != "gpt" or case.get("embed_dim") != 768 or r.value is None:
            continue
        same = tuple(str(case.get(key)) for key in TRAINING)
        way = "naive" if case.get("backend") == "naive" else "fastest"
        if r.metric == "validation_loss" and "training_s" in case:
            runs.setdefault(same, {}).setdefault(way, {})[float(str(case["training_s"]))] = r.value
        elif r.metric == "tokens_per_s":
            tokens.setdefault(same, {})[way] = r.value
    pairs = [same for same, ways in runs.items() if len(ways) == len(tokens.get(same, {})) == 2]
    body = []
    for way in ("naive", "fastest"):
        if not pairs:
            body.append([way, NOT_YET, "", "", ""])
            continue
        curves = runs[pairs[-1]]
        points = curves[way]
        lowest = min(points, key=lambda at: points[at])
        last = max(points)
        reached = seconds_to(sorted(points.items()), min(curves["naive"].values()))
        body.append(
            [
                way,
                f"{tokens[pairs[-1]][way]:,.0f}",
                f"{points[last]:.3f} after {last / 60:.1f} min",
                f"{points[lowest]:.3f} after {lowest / 60:.1f} min",
                f"{reached / 60:.1f} min" if reached else "",
            ]
        )
    head = ["GPT-2, held-out text", "tokens/s", "validation loss at the end", "its lowest"]
    return table([*head, "time to naive's lowest"], body)


def memory(records: Sequence[Record]) -> list[str]:
    """The training state of GPT-2 on a GPU: used and held at the peak, by moments and arena."""
    found = {
        (str(r.case["optimizer_state"]), bool(r.case["arena"]), r.metric): r.value
        for r in sorted(records, key=lambda r: r.time)
        if r.case.get("section") == "memory" and r.case.get("preset") == "gpt2" and r.value is not None
    }
    body = []
    for state in ("fp32", "bf16", "8bit"):
        cells = [
            f"{value:.2f}" if (value := found.get((state, arena, metric))) is not None else NOT_YET
            for metric in ("peak_memory_gib", "reserved_memory_gib")
            for arena in (False, True)
        ]
        body.append([f"`{state}`", *cells])
    return table(["GPT-2, moments in", "used, GiB", "in an arena", "held, GiB", "in an arena"], body)


OTHERS = ("eager", "inductor", "max-autotune", "liger", "quack", "apex")


def attention_layer(records: Sequence[Record]) -> list[str]:
    """The C++/CUDA attention layer: each way's time under that of the Python layer, geometric means."""

    def place(r: Record) -> tuple[object, ...] | None:
        case = r.case
        if case.get("form") != "shared" or case.get("dtype") != "float32" or case.get("drawn"):
            return None
        if case.get("baseline") != "python":
            return None
        return case["direction"], case["seqlen_q"], case["embed_dim"]

    found = newest(records, "paired_speedup", place)
    small = {where: ratios for where, ratios in found.items() if where[1] <= 16 and where[2] <= 512}  # type: ignore[operator]
    body = []
    for direction, name, theirs in (
        ("fw", "forward", "about 1.15x on small sizes; slower on large ones"),
        ("bw", "backward", "slower than torch's everywhere"),
    ):
        for sizes, where in (("to 16 tokens and width 512", small), ("all", found)):
            ratios = [one for at, one in where.items() if at[0] == direction]
            cells = [
                _ratio([one[way] for one in ratios if way in one]) for way in ("aten", "sdpa", "fuseline")
            ]
            body.append([name, sizes, theirs, *cells])
    head = ["fp32, faster than in Python", "sizes", "theirs, C++ over ATen", "ours, C++ over ATen"]
    return table([*head, "with torch's SDPA", "`ops.self_attention_layer`"], body, left=3)


def nanogpt(records: Sequence[Record]) -> list[str]:
    """The five rows of SDPA's kernels on nanoGPT."""
    ours = _combination(records, "seed-001", "iteration_ms")
    # Rows of nanoGPT's own model that are the same thing; they stand in until the combination is on record.
    same = {
        "naive": "inductor naive 50257",
        "flash": "inductor flash 50257",
        "flash padded": "inductor flash 50304",
    }
    anchors = _combination(records, "anchors", "iteration_ms")
    for rung, anchor in same.items():
        if rung not in ours and anchor in anchors:
            ours[rung] = anchors[anchor]
    theirs = {row.rung: row.iteration_ms for row in SEED_001.rows}
    body = []
    for rung, ms in theirs.items():
        mine = ours.get(rung)
        against = f"{ours['naive'] / mine:.2f}x" if mine and "naive" in ours else ""
        body.append(
            [
                _ROWS[rung],
                f"{ms:.0f} ms",
                f"{theirs['naive'] / ms:.2f}x",
                f"{mine:.1f} ms" if mine else NOT_YET,
                against,
            ]
        )
    return table(["under `torch.compile`", "theirs", "against naive", "ours", "against naive"], body)


_ROWS = {
    "naive": "naive attention",
    "math": "SDPA, math",
    "efficient": "SDPA, memory-efficient",
    "flash": "SDPA, flash",
    "flash padded": "flash, vocabulary padded to 50,304",
}


def batches(records: Sequence[Record]) -> list[str]:
    """The largest batches: theirs, on 80 GB with everything else that their run held, and ours."""
    found = {
        str(r.case["rung"]): (r.value, bool(r.case.get("verified")))
        for r in sorted(records, key=lambda r: r.time)
        if r.metric == "max_batch" and r.case.get("preset") == "gpt2" and r.value is not None
    }
    lines = (
        ("naive attention, bf16", "24", "bf16"),
        ("flash attention", "39", "flash"),
        ("the best of the climb", "", "fused-loss"),
    )
    body = []
    for name, theirs, rung in lines:
        batch, tried = found.get(rung, (None, False))
        told = f"{batch:.0f}" if batch is not None else NOT_YET
        body.append([name, theirs, told if tried or batch is None else f"about {told}"])
    return table(["largest batch, 1,024 tokens", "theirs, 80 GB", "ours"], body)


def head(records: Sequence[Record]) -> list[str]:
    """The products of GPT-2's head with and without padding."""

    def place(r: Record) -> tuple[object, ...] | None:
        return (r.case["product"], r.case["vocab"]) if "product" in r.case else None

    rates = newest(records, "tflops", place)
    body = []
    for product, name in (
        ("logits", "logits"),
        ("grad_x", "gradient of the input"),
        ("grad_weight", "gradient of the weight"),
    ):
        odd, padded = (rates.get((product, vocab), {}).get("fuseline") for vocab in (50257, 50304))
        cells = (
            [f"{odd:,.0f} TFLOP/s", f"{padded:,.0f} TFLOP/s", f"{padded / odd:.1f}x"]
            if odd and padded
            else []
        )
        body.append([name, "nearly 3x", *(cells or [NOT_YET, "", ""])])
    return table(["product, 16,384 tokens", "theirs", "ours, 50,257", "50,304", "faster"], body)


def stability(records: Sequence[Record]) -> list[str]:
    """Attention's error against float64 with q and k scaled after their product, before it, and in SDPA."""

    def place(r: Record) -> tuple[object, ...] | None:
        return (r.case["dtype"], r.case["magnitude"], r.case["variant"]) if "magnitude" in r.case else None

    errors = newest(records, "error", place)
    overflows = {place(r) for r in records if place(r) and r.case.get("overflow")}
    body = []
    for dtype in ("fp32", "bf16", "fp16"):
        for magnitude in (1.0, 16.0, 64.0):
            cells = []
            for variant in ("scale_after", "scale_before", "fused_softmax", "sdpa"):
                at = (dtype, magnitude, variant)
                error = errors.get(at, {}).get("fuseline")
                cells.append(
                    "overflows" if at in overflows else f"{error:.1e}" if error is not None else NOT_YET
                )
            body.append([dtype, f"{magnitude:.0f}", *cells])
    heading = [
        "dtype",
        "magnitude of q and k",
        "scaled after",
        "scaled before",
        "after, with `ops.softmax`",
        "SDPA",
    ]
    return table(heading, body)


def fused_kernels(records: Sequence[Record]) -> list[str]:
    """Softmax and LayerNorm at the homework's shapes against their composition from operations."""

    def place(r: Record) -> tuple[object, ...] | None:
        case = r.case
        if case.get("section") != "seed" or "mask" in case:
            return None
        return case["op"], case["direction"], case["captured"], case["rows"], case["n"]

    found = newest(records, "paired_speedup", place)
    body = []
    for op, direction, name, theirs in (
        ("softmax", "fw", "softmax forward", "6.5x"),
        ("softmax", "bw", "softmax backward", "0.5x"),
        ("layer_norm", "fw", "LayerNorm forward", "15.8x"),
        ("layer_norm", "bw", "LayerNorm backward", "3.7x"),
    ):
        cells = [
            _ratio(
                [
                    one[peer]
                    for at, one in found.items()
                    if at[:3] == (op, direction, captured) and peer in one
                ]
            )
            for captured in (False, True)
            for peer in ("composed", "eager")
        ]
        body.append([name, theirs, *cells])
    head = ["fp32", "theirs, against miniTorch", "ours, against torch's operations, called"]
    return table(
        [*head, "against torch's kernel, called", "operations, in a graph", "kernel, in a graph"], body
    )


def translation_epoch(records: Sequence[Record]) -> list[str]:
    """An epoch of the translation model with and without fused kernels."""
    found = {
        (r.case["execution"], r.case["dtype"], r.case["kernels"], r.metric): r.value
        for r in sorted(records, key=lambda r: r.time)
        if r.case.get("section") == "epoch" and r.value is not None
    }
    body = []
    for execution, dtype in dict.fromkeys(key[:2] for key in found):
        plain = found.get((execution, dtype, "formulas", "epoch_s"))
        fused = found.get((execution, dtype, "fuseline", "epoch_s"))
        ratio = found.get((execution, dtype, "fuseline", "paired_speedup"))
        limit = found.get((execution, dtype, "nothing", "amdahl_limit"))
        if plain and fused and ratio:
            told = f"{limit:.2f}x" if limit else ""
            cells = [f"{plain:.2f} s", f"{fused:.2f} s", f"{ratio:.2f}x", told]
            body.append([f"{execution}, {dtype}", "1.1x", *cells])
    head = ["execution", "theirs", "ours, operator by operator", "ours, fused", "faster", "Amdahl's limit"]
    return table(head, body)


def compilers(model: str, records: Sequence[Record]) -> list[str]:
    """Eager, cudagraphs and inductor on one of two GPTs: mean and sigma of an iteration, and MFU."""
    by_model: Callable[[Record], tuple[object, ...]] = lambda r: (r.case["model"],)  # noqa: E731
    means, sigmas, mfu = (
        newest(records, metric, by_model) for metric in ("iteration_mean_ms", "iteration_sigma_ms", "mfu")
    )
    body = []
    theirs = {row.rung: row for row in SEED_003.rows if row.preset == model}
    for backend in ("eager", "cudagraphs", "inductor", "max-autotune-no-cudagraphs", "max-autotune"):
        row = theirs.get(backend)
        ours, base = means.get((model,), {}).get(backend), means.get((model,), {}).get("eager")
        cells = ["", "", ""]
        if row is not None and row.low is not None and row.mfu is not None:
            sigma = row.iteration_ms - row.low
            faster = theirs["eager"].iteration_ms / row.iteration_ms
            cells = [f"{row.iteration_ms:,.1f} ± {sigma:.1f} ms", f"{row.mfu:.1%}", f"{faster:.2f}x"]
        if ours and base:
            spread, share = sigmas[(model,)][backend], mfu[(model,)][backend]
            cells += [f"{ours:.1f} ± {spread:.1f} ms", f"{share:.1%}", f"{base / ours:.2f}x"]
        else:
            cells += [NOT_YET, "", ""]
        body.append([backend, *cells])
    name = {"gpt2": "GPT-2", "shakespeare": "10.65 M parameters"}[model]
    return table([name, "theirs", "MFU", "against eager", "ours", "MFU", "against eager"], body)


def machine(records: Sequence[Record]) -> list[str]:
    """Latencies in cycles, and the crash course's examples of fusing."""
    cycles = {
        str(r.case["what"]): r.value
        for r in sorted(records, key=lambda r: r.time)
        if r.metric == "latency_cycles" and r.value is not None
    }
    body = []
    for what, name, theirs in (
        ("HBM", "global memory", "290"),
        ("L2", "L2", "200"),
        ("L1", "L1", "33"),
        ("shared memory", "shared memory", "23"),
    ):
        ours = cycles.get(what)
        body.append([f"latency of {name}, cycles", theirs, f"{ours:.0f}" if ours else NOT_YET])
    rates = newest(records, "bandwidth_gbs", lambda r: (r.case.get("what"),) if _is_example(r) else None)
    intensity = newest(records, "intensity", lambda r: (r.case.get("what"),) if _is_example(r) else None)
    for what, name, theirs in (
        ("ReLU fp32", "ReLU, fp32, FLOP a byte", "1/8"),
        ("ReLU int8", "ReLU, int8, FLOP a byte", "1/2"),
        ("sin four times", "four sines, FLOP a byte", "not given"),
    ):
        told = [
            f"{way} {intensity[(what,)][peer]:.3g} at {rates[(what,)][peer]:,.0f} GB/s"
            for peer, way in (("eager", "eager"), ("inductor", "compiled"))
            if peer in rates.get((what,), {})
        ]
        body.append([name, theirs, ", ".join(told) or NOT_YET])
    return table(["", "theirs", "ours"], body)


def _is_example(r: Record) -> bool:
    return r.case.get("section") == "example"


def _combination(records: Sequence[Record], name: str, metric: str) -> dict[str, float]:
    """By rung: the newest value of GPT-2's rows at the usual batch in a named combination."""
    return {
        str(r.case["rung"]): r.value
        for r in sorted(records, key=lambda r: r.time)
        if r.metric == metric and r.value is not None and r.case.get("combination") == name
        and r.case.get("preset") == "gpt2" and r.case.get("batch") == 16
    }  # fmt: skip


def _ratio(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.2f}x" if ratios else NOT_YET
