"""Attention: short sequences, decoding, whole small layers, and how good the picks are."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from fuseline.records import Record
from tables.markdown import fastest, named, newest, table

PEERS = ("math", "efficient", "flash", "cudnn", "flex")
CAUSAL = {"none": "", "bottom_right": ", causal"}


def short(records: Sequence[Record]) -> list[str]:
    """Forward and backward of short sequences: ours, and the fastest of torch's kernels."""
    return _against(records, "short", "fwbw")


def long(records: Sequence[Record]) -> list[str]:
    """The same of long sequences, where other kernels are faster than ours."""
    return _against(records, "long", "fwbw")


def decoding(records: Sequence[Record]) -> list[str]:
    """A few queries over a long cache."""
    return _against(records, "decode", "fw")


def _against(records: Sequence[Record], section: str, direction: str) -> list[str]:
    def place(r: Record) -> tuple[object, ...] | None:
        case = r.case
        if case.get("section") != section or case.get("direction") != direction or "mask" in case:
            return None
        keys = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "causal")
        return tuple(case[key] for key in keys)

    times = newest(records, "time_us", place)
    body = []
    for where, found in sorted(times.items(), key=lambda at: (*map(int, map(str, at[0][3:6])), str(at[0]))):
        batch, heads, kv_heads, queries, keys, head_dim, causal = where
        best = fastest(found, PEERS)
        if "fuseline" not in found or best is None:
            continue
        shared = f"/{kv_heads}" if kv_heads != heads else ""
        length = f"{queries}" if queries == keys else f"{queries} x {keys}"
        name = f"{batch} x {heads}{shared} x {length} x {head_dim}{CAUSAL[str(causal)]}"
        ours = found["fuseline"]
        body.append([name, f"{ours:,.0f}", f"{best[1]:,.0f} ({named(best[0])})", f"{best[1] / ours:.2f}x"])
    return table(["batch x heads x length x head dim", "Fuseline, us", "fastest other, us", "ratio"], body)


DTYPES = {"bfloat16": "bf16", "tf32": "TF32", "float32": "fp32"}


def small_layers(records: Sequence[Record]) -> list[str]:
    """Whole small layers of the form `bar`: microseconds, and the share of SDPA's module's time."""

    def place(r: Record) -> tuple[object, ...] | None:
        case = r.case
        if case.get("section") != "small" or case.get("form") != "bar":
            return None
        keys = ("dtype", "seqlen_q", "embed_dim", "direction", "captured")
        return tuple(case[key] for key in keys)

    times = newest(records, "time_us", place)
    columns = (("fw", False, "eager forward"), ("fwbw", False, "eager, with backward"))
    columns = (*columns, ("fw", True, "forward in a graph"))
    rows = dict.fromkeys((dtype, length, width) for dtype, length, width, *_ in times)
    body = []
    for dtype, length, width in rows:
        cells = [f"8 x {length} x {width}, {DTYPES[str(dtype)]}"]
        for direction, captured, _ in columns:
            found = times.get((dtype, length, width, direction, captured), {})
            both = "fuseline" in found and "sdpa" in found
            share = f"{found['fuseline']:.1f} us ({found['fuseline'] / found['sdpa']:.2f})" if both else ""
            cells.append(share)
        body.append(cells)
    return table(["batch x length x width", *(name for *_, name in columns)], body)


def picks(records: Sequence[Record]) -> list[str]:
    """How near the picks come to the fastest candidate over random problems."""
    shares: dict[bool, list[float]] = {False: [], True: []}
    for r in records:
        if r.case.get("section") == "picker" and r.metric == "share_of_best" and r.value is not None:
            shares[bool(r.case.get("tuned"))].append(r.value)
    names = {False: "as shipped", True: "after `fuseline tune` on the same problems"}
    body = []
    for tuned, found in shares.items():
        if found:
            near = sum(share >= 0.97 for share in found) / len(found)
            body.append([names[tuned], str(len(found)), f"{near:.1%}", f"{mean(found):.3f}"])
    return table(["the pick", "problems", "within 3% of the fastest", "mean share of its speed"], body)
