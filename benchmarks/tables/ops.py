"""The memory-bound ops against their peers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from fuseline.records import Record
from tables.markdown import fastest, named, newest, table

# Op, direction, name, and the shortest rows worth showing: 8,192 short rows of a loss take no time.
OPS = (
    ("softmax", "fw", "softmax forward", 1),
    ("softmax", "bw", "softmax backward", 1),
    ("layer_norm", "fw", "LayerNorm forward", 1),
    ("layer_norm", "bw", "LayerNorm backward", 1),
    ("rms_norm", "fw", "RMSNorm forward", 1),
    ("rms_norm", "bw", "RMSNorm backward", 1),
    ("dropout_add_layer_norm", "fw", "LayerNorm of residual + dropout(x + bias)", 1),
    ("dropout_add_layer_norm", "bw", "its backward", 1),
    ("gelu", "bw", "GELU with bias, backward", 1),
    ("swiglu", "bw", "SwiGLU backward", 1),
    ("embedding", "bw", "embedding backward", 1),
    ("cross_entropy", "fwbw", "cross-entropy and its gradient", 4096),
)
LENGTHS = (128, 768, 1024, 4096, 16384, 65536)
PEERS = ("eager", "inductor", "max-autotune", "liger", "quack", "apex", "transformer-engine")
DIRECTIONS = {"fw": "forward", "bw": "backward", "fwbw": "forward and backward"}
NEAR = 0.97


def ops(records: Sequence[Record]) -> list[str]:
    """Share of the copy bandwidth in bf16: ours, and the best of the peers."""

    def many_rows(r: Record) -> tuple[object, ...] | None:
        case = r.case
        if case.get("dtype") != "bfloat16" or case.get("captured") is not False:
            return None
        return case["op"], case["direction"], case["n"]

    shares = newest(records, "share_of_copy", many_rows)
    body = []
    for op, direction, name, shortest in OPS:
        cells = [_share(shares.get((op, direction, n), {})) if n >= shortest else "" for n in LENGTHS]
        if any(cells):
            body.append([name, *cells])
    return table(["bf16", *(f"{n:,}" for n in LENGTHS)], body)


def _share(found: dict[str, float]) -> str:
    peers = {peer: found[peer] for peer in PEERS if peer in found}
    if "fuseline" not in found or not peers:
        return ""
    best = max(peers, key=lambda peer: peers[peer])
    return f"**{found['fuseline']:.2f}** ({named(best)} {peers[best]:.2f})"


def against_the_best(records: Sequence[Record]) -> list[str]:
    """By op and direction: the fastest peer's time over ours, over all sizes and dtypes on record."""

    def place(r: Record) -> tuple[object, ...] | None:
        if "op" not in r.case or r.case.get("section") in ("seed", "lstm"):
            return None
        keys = ("op", "direction", "captured", "drawn", "dtype", "rows", "n")
        return tuple(r.case.get(key) for key in keys)

    ratios: dict[tuple[object, ...], list[float]] = {}
    for where, times in newest(records, "time_us", place).items():
        best = fastest(times, PEERS)
        if "fuseline" in times and best:
            ratios.setdefault(where[:4], []).append(best[1] / times["fuseline"])
    body = []
    for (op, direction, captured, drawn), found in sorted(
        ratios.items(), key=lambda at: tuple(map(str, at[0]))
    ):
        rows = ("few, in a graph" if captured else "many") + (", drawn lengths" if drawn else "")
        near = sum(ratio >= NEAR for ratio in found)
        spread = [f"{ratio:.2f}" for ratio in (min(found), geometric_mean(found), max(found))]
        body.append([f"`{op}`", DIRECTIONS[str(direction)], rows, f"{near} of {len(found)}", *spread])
    for name, is_drawn in (("all", False), ("all drawn", True)):
        every = [r for (*_, drawn), found in ratios.items() if bool(drawn) == is_drawn for r in found]
        if every:
            near = sum(ratio >= NEAR for ratio in every)
            spread = [f"{ratio:.2f}" for ratio in (min(every), geometric_mean(every), max(every))]
            body.append([f"**{name}**", "", "", f"**{near:,} of {len(every):,}**", *spread])
    head = ["op", "direction", "rows", "sizes as fast, or within 3%", "least", "mean", "most"]
    return table(head, body, left=3)


def head_and_loss(records: Sequence[Record]) -> list[str]:
    """A language model's head and its loss: milliseconds and GiB, by rows and vocabulary."""

    def place(r: Record) -> tuple[object, ...] | None:
        if r.case.get("op") != "linear_cross_entropy" or r.case.get("dtype") != "bfloat16":
            return None
        return r.case["rows"], r.case["n"], r.case.get("direction")

    times, memory = newest(records, "time_us", place), newest(records, "peak_memory_gib", place)
    measured = {peer for found in times.values() for peer in found}
    everyone = [peer for peer in ("fuseline", *PEERS) if peer in measured]
    body = []
    for (rows, vocabulary, direction), found in sorted(times.items(), key=lambda at: tuple(map(str, at[0]))):
        cells = [f"{rows:,} x {vocabulary:,}", DIRECTIONS[str(direction)]]
        for peer in everyone:
            gib = memory.get((rows, vocabulary, direction), {}).get(peer)
            kept = f" ({gib:.2f} GiB)" if gib is not None else ""
            cells.append(f"{found[peer] / 1000:.2f} ms{kept}" if peer in found else "")
        body.append(cells)
    names = ["Fuseline" if peer == "fuseline" else named(peer) for peer in everyone]
    return table(["rows x vocabulary", "direction", *names], body, left=2)
