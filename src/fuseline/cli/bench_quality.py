"""What the formats of quantized weights, and of keys and values, cost a GPT that `fuseline train gpt` has
trained: its perplexity on the text that was held out, in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuseline.cli.measuring import measuring
from fuseline.cli.names import split_names
from fuseline.cli.options import Recorded, resolve_device
from fuseline.cli.publishing import publish
from fuseline.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from fuseline.records import Record

DEFAULT_OUT = Path("fuseline-quality")


@dataclass(frozen=True)
class Options(Recorded):
    checkpoint: Path | None = None
    """Folder of a run of `fuseline train gpt`."""
    formats: tuple[str, ...] = ()
    """int8, int4 (groups of 128), int4-64, int4-32, int4-zeros (zero points), int4-32-zeros, .., each with
    an ending for how weights are rounded: none (to the nearest), -fitted, -hqq, -calibrated (GPTQ); so
    ternary, int3, int5 and w8a8 (int8 activations, too); fp4, nf4, mxfp4, fp6_e2m3 and fp6_e3m2, to the
    nearest or -fitted; fp8; sparse24 (a GPU); and of keys and values cache-int8, cache-fp8. The usual ones if
    none is named."""
    batches: int = 40
    """Batches of held-out text."""
    calibration: int = 8
    """Batches of training text that calibration reads."""
    batch_size: int | None = None
    """Sequences a batch; the run's own if not given."""
    text: Path | None = None
    """UTF-8 file to measure on, in the place of the run's own held-out part."""


def run(options: Options) -> int:
    import torch

    from fuseline.bench import quality as suite

    if options.checkpoint is None:
        raise InputError("Name the run to measure: --checkpoint FOLDER, as `fuseline train gpt` wrote it.")
    bench = suite.QualityBench(
        torch.device(resolve_device(options.device)),
        options.checkpoint,
        split_names(options.formats) or suite.USUAL,
        options.batches,
        options.calibration,
        options.batch_size,
        options.text,
    )
    out = options.out or DEFAULT_OUT
    if options.dry_run:
        what = f"{bench.run}: perplexity in {', '.join(bench.formats)}"
        print(f"{what} on {bench.device}. Records would go to {out / 'quality.jsonl'}.")
        return 0
    with measuring(28) as observe:
        records = suite.run(bench, out, observe)
    return publish(records, out / "quality.jsonl", [_table(records)], _skipped(records), as_json=options.json)


def _skipped(records: Sequence[Record]) -> list[str]:
    return [
        f"Skipped: {record.case['format']}: {record.case['reason']}"
        for record in records
        if record.metric == "skipped"
    ]


def _table(records: Sequence[Record]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title="Perplexity on held-out text", box=box.SIMPLE)
    for heading in ("format", "groups of", "zero points", "rounding"):
        table.add_column(heading)
    for heading in ("bits a weight", "perplexity", "over the plain model's"):
        table.add_column(heading, justify="right")
    lines: dict[tuple[str, ...], dict[str, float]] = {}
    for record in records:
        if record.value is not None:
            zeros = "yes" if record.case.get("zero_points") else ""
            format, size, rounding = (
                str(record.case[key] or "") for key in ("format", "group_size", "rounding")
            )
            lines.setdefault((format, size, zeros, rounding), {})[record.metric] = record.value
    for line, found in lines.items():
        over = f"{found['loss_error']:+.3%}" if "loss_error" in found else ""
        bits = f"{found['bits_per_weight']:.3f}" if "bits_per_weight" in found else ""
        table.add_row(*line, bits, f"{found['perplexity']:.4f}", over)
    return table
