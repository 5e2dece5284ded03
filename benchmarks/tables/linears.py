"""Linear layers for few rows of activations, in bf16 and quantized."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from tables.markdown import fastest, named, newest, table

FORMATS = ("int8", "int4", "bf16")
_COMPILED = ("inductor", "max-autotune", "torchao")
PEERS = ("eager", *_COMPILED, *(f"{peer}-own-clock" for peer in _COMPILED), "tinygemm")
"""`-own-clock`: tuned by inductor's own clock; the better of the two counts."""
ROWS = (1, 8, 32, 128, 256)


def gemv(records: Sequence[Record]) -> list[str]:
    """Microseconds of one row times a square weight: ours, and the best of the peers."""

    def place(r: Record) -> tuple[object, ...] | None:
        return (r.case["k"], r.case["format"]) if r.case.get("section") == "chart" else None

    times = newest(records, "time_us", place)
    sizes = sorted({int(str(size)) for size, _ in times})
    body = [[format, *(_beside(times.get((size, format), {})) for size in sizes)] for format in FORMATS]
    return table(["K = N", *(f"{n:,}" for n in sizes)], body)


def _beside(times: dict[str, float]) -> str:
    if "fuseline" not in times:
        return ""
    best = fastest(times, PEERS)
    return f"**{times['fuseline']:.1f}**" + (f" ({named(best[0])} {best[1]:.1f})" if best else "")


def layers(records: Sequence[Record]) -> list[str]:
    """Layers of Llama by rows: microseconds in int8 and int4, and cuBLAS's in bf16 over each."""

    def place(r: Record) -> tuple[object, ...] | None:
        case = r.case
        if case.get("section") != "layers" or case.get("dtype") != "bfloat16" or case["preset"] == "odd":
            return None
        return case["k"], case["n"], case["m"], case["format"]

    times = newest(records, "time_us", place)
    shapes = sorted({(int(str(k)), int(str(n))) for k, n, *_ in times})
    body = []
    for k, n in shapes:
        for format in ("int8", "int4"):
            cells = [f"{k:,} x {n:,}", format]
            for rows in ROWS:
                ours = times.get((k, n, rows, format), {}).get("fuseline")
                cublas = times.get((k, n, rows, "bf16"), {}).get("eager")
                gain = f" ({cublas / ours:.2f}x)" if ours and cublas else ""
                cells.append(f"{ours:.1f}{gain}" if ours else "")
            body.append(cells)
    head = ["K x N", "weights", *(f"{rows} row{'s' if rows > 1 else ''}" for rows in ROWS)]
    return table(head, body, left=2)
