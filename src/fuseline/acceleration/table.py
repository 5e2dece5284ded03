"""A model's sites as a table: equal sites in one row, what they gain, and why the others were left."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

from fuseline.acceleration.pay import Verdict
from fuseline.acceleration.site import FOUND, KEPT, NOT_FASTER, REFUSED, SLOWER, Site

ORDER = {KEPT: 0, FOUND: 1, NOT_FASTER: 2, REFUSED: 3}
HEADINGS = ("site", "recognized as", "result", "error", "original's", "time", "original's", "gain")


def table(sites: Sequence[Site], whole: Verdict | None, notes: Sequence[str]) -> str:
    """Rows under headings, each reason below its row, then the whole step and the notes."""
    if not sites:
        return "\n".join(["No module of this model computes something that Fuseline has an op for.", *notes])
    groups = grouped(sites)
    rows = [_row(paths, site) for paths, site in groups]
    widths = [max(len(row[i]) for row in (HEADINGS, *rows)) for i in range(len(HEADINGS))]
    lines = [_line(HEADINGS, widths), "  ".join("-" * width for width in widths)]
    for row, (_, site) in zip(rows, groups, strict=True):
        lines.append(_line(row, widths))
        if site.reason and site.reason != SLOWER:  # the row says that itself
            lines += textwrap.wrap(site.reason, 104, initial_indent="    ", subsequent_indent="    ")
    kept = sum(site.status == KEPT for site in sites)
    lines += ["", f"{kept} of {len(sites)} sites run Fuseline's ops."]
    if whole is not None:
        now = whole.original_us / whole.ratio.value  # a median taken apart could contradict the ratio
        lines.append(
            f"Whole step: {time_text(whole.original_us)} before, {time_text(now)} now; "
            f"in pairs {whole.ratio.value:.2f}x as fast ({whole.ratio.low:.2f} to {whole.ratio.high:.2f})."
        )
    return "\n".join([*lines, *notes])


def grouped(sites: Sequence[Site]) -> list[tuple[list[str], Site]]:
    """Group sites that differ only by a layer's number; kept sites come first."""
    groups: dict[tuple[object, ...], tuple[list[str], Site]] = {}
    for site in sites:
        key = (
            re.sub(r"\d+", "*", site.path),
            site.kind,
            site.status,
            re.sub(r"\d+", "*", site.reason),
            site.error,
            site.time_us,
        )
        groups.setdefault(key, ([], site))[0].append(site.path)
    return sorted(groups.values(), key=lambda group: ORDER.get(group[1].status, 9))


def report_text(
    runs: Sequence[tuple[str, int, Mapping[str, int]]],
    eager: Mapping[str, int],
    padded: Mapping[str, int],
    unpadded: Sequence[str],
) -> str:
    """One line for each reason why a site ran its original or why a step or call was not recorded, what was
    padded and why nothing was, then the totals."""
    lines = []
    for site, _, declined in runs:
        lines += [f"{site}: {count} times its own code: {reason}" for reason, count in declined.items()]
    lines += [
        f"{count} of the steps and compiled calls were not recorded: {reason}"
        for reason, count in eager.items()
    ]
    if padded.get("padded"):
        share = padded["added"] / padded["given"]
        lines.append(
            f"{padded['padded']} steps and compiled calls were padded to a recorded length, which added "
            f"{share:.1%} to their positions."
        )
    lines += [f"No batch is padded: {reason}" for reason in unpadded]
    taken = sum(count for _, count, _ in runs)
    left = sum(sum(declined.values()) for _, _, declined in runs)
    lines.append(f"{taken} calls ran Fuseline's ops, {left} the model's own code.")
    return "\n".join(lines)


def _row(paths: Sequence[str], site: Site) -> tuple[str, ...]:
    return (
        together(paths),
        site.kind + (f" -> {site.op}" if site.op else ""),
        site.status,
        _error(site.error),
        _error(site.original_error),
        time_text(site.time_us),
        time_text(site.original_time_us),
        "" if site.gain is None else f"{site.gain:.2f}x",
    )


def together(paths: Sequence[str]) -> str:
    """One name for paths that differ by numbers: "model.layers.{0..15}.mlp"."""
    if len(paths) == 1:
        return paths[0]
    numbers = [[int(n) for n in re.findall(r"\d+", path)] for path in paths]
    places = iter(zip(*numbers, strict=True))

    def span(match: re.Match[str]) -> str:
        seen = sorted(set(next(places)))
        if len(seen) == 1:
            return str(seen[0])
        whole = seen == list(range(seen[0], seen[-1] + 1))
        return f"{{{seen[0]}..{seen[-1]}}}" if whole else "{" + ",".join(map(str, seen)) + "}"

    return f"{re.sub(r'[0-9]+', span, paths[0])} ({len(paths)})"


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def time_text(us: float | None) -> str:
    if us is None:
        return ""
    return f"{us / 1e3:.2f} ms" if us >= 1000 else f"{us:.1f} us"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.ljust(width) if i < 3 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
