"""What all tables share: rows of Markdown, the newest values by case, and the line that names a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from fuseline.records import Record

PEERS = {
    "eager": "eager",
    "inductor": "`torch.compile`",
    "reduce-overhead": "`torch.compile`, reduce-overhead",
    "max-autotune": "`torch.compile`, max-autotune",
    "nanogpt-inductor": "nanoGPT, compiled",
    "nanogpt-reduce-overhead": "nanoGPT, compiled, reduce-overhead",
    "liger": "Liger",
    "quack": "QuACK",
    "apex": "Apex",
    "transformer-engine": "Transformer Engine",
    "torchao": "torchao",
    "tinygemm": "tinygemm",
    "inductor-own-clock": "`torch.compile`, own clock",
    "max-autotune-own-clock": "`torch.compile`, max-autotune, own clock",
    "torchao-own-clock": "torchao, own clock",
    "gptfast-own-clock": "gpt-fast's method, own clock",
    "gptfast-files-own-clock": "gpt-fast, own clock",
    "transformers-compiled-own-clock": "transformers, compiled, own clock",
    "gptfast": "gpt-fast's method",
    "gptfast-files": "gpt-fast",
    "transformers": "transformers",
    "transformers-compiled": "transformers, compiled",
    "mha": "`nn.MultiheadAttention`",
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2",
    "efficient": "memory-efficient",
    "flex": "FlexAttention",
    "math": "math",
    "sdpa": "SDPA's module",
}


def table(head: Sequence[str], body: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """A table whose first `left` columns are text and whose other columns are numbers."""
    marks = ["---" if at < left else "---:" for at in range(len(head))]
    return [line(head), f"|{'|'.join(marks)}|", *(line(cells) for cells in body)]


def line(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def named(peer: str) -> str:
    return PEERS.get(peer, peer)


def newest(
    records: Iterable[Record], metric: str, key: Callable[[Record], tuple[object, ...] | None]
) -> dict[tuple[object, ...], dict[str, float]]:
    """By the key of a case (None leaves a record out): each peer's value of `metric` in the newest run."""
    found: dict[tuple[object, ...], dict[str, float]] = {}
    for r in sorted(records, key=lambda r: r.time):
        if r.metric == metric and r.value is not None:
            place = key(r)
            if place is not None:
                found.setdefault(place, {})[r.peer] = r.value
    return found


def fastest(times: dict[str, float], among: Iterable[str]) -> tuple[str, float] | None:
    """The peer of the least time, of those in `among` that were measured."""
    measured = [(times[peer], peer) for peer in among if peer in times]
    return (min(measured)[1], min(measured)[0]) if measured else None


def source(records: Sequence[Record]) -> str:
    """The devices, the versions of torch and the days of `records`."""
    devices = sorted({r.device for r in records})
    versions = sorted({r.torch.split("+")[0] for r in records})
    days = sorted({datetime.fromisoformat(r.time).date() for r in records})
    last = f"{days[-1].day} {days[-1]:%B %Y}"
    same_month = (days[0].year, days[0].month) == (days[-1].year, days[-1].month)
    first = f"{days[0].day}" if same_month else f"{days[0].day} {days[0]:%B %Y}"
    when = last if len(days) == 1 else f"{first} to {last}"
    return f"*{', '.join(devices)}; torch {', '.join(versions)}; measured {when}.*"
