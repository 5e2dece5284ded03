"""`fuseline ladder --workload generate`: the levers on a generation, for the verb `ladder`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fuseline.cli.measuring import measuring
from fuseline.cli.names import split_names
from fuseline.cli.options import resolve_device
from fuseline.cli.publishing import publish

if TYPE_CHECKING:
    from rich.table import Table

    from fuseline.cli.ladder_options import Options
    from fuseline.records import Record

DEFAULT_OUT = Path("fuseline-ladder-generate")


def run(options: Options) -> int:
    """Climb with the run --checkpoint, or --preset (auto: llama2-7b on a GPU, else llama-tiny) with random
    weights, and --batch-size rows (default 1)."""
    import torch

    from fuseline.bench.decode import DecodeBench
    from fuseline.bench.decode.climb import climb, usual_rungs
    from fuseline.training.text_generator import config_of

    device = torch.device(resolve_device(options.device))
    on_gpu = device.type == "cuda"
    bench = DecodeBench(
        device,
        ("llama2-7b" if on_gpu else "llama-tiny") if options.preset == "auto" else options.preset,
        (options.batch_size or 1,),
        (200,),
        512 if on_gpu else 256,
        ("bf16" if on_gpu else "fp32",),
        seed=options.seed,
        run=options.checkpoint,
    )
    config = config_of(options.checkpoint, None if options.checkpoint else bench.preset)
    if config is not None:
        bench = bench.within(config.block_size)
    out = options.out or DEFAULT_OUT
    named = split_names(options.rungs)
    if options.dry_run:
        chosen = named or usual_rungs(device)
        print(f"{options.checkpoint or bench.preset} on {device}: {', '.join(chosen)}.")
        return 0
    with measuring(28) as observe:
        records = climb(bench, out, observe, rungs=named)
    skipped = (r for r in records if r.metric == "skipped")
    remarks = [f"Skipped: {record.case['rung']}: {record.case['reason']}" for record in skipped]
    return publish(records, out / "decode.jsonl", [_table(records)], remarks, as_json=options.json)


def _table(records: Sequence[Record]) -> Table:
    from rich import box
    from rich.table import Table

    metrics = ("iteration_ms", "tokens_per_s", "over_compiled", "speedup", "peak_memory_gib", "perplexity")
    table = Table(title="Levers on a generation", box=box.SIMPLE)
    for heading in ("rung", "lever"):
        table.add_column(heading)
    for heading in ("ms a step", "tokens/s", "over compiled", "over eager", "memory, GiB", "perplexity"):
        table.add_column(heading, justify="right")
    lines: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        if record.value is not None:
            line = str(record.case["rung"]), str(record.case["lever"])
            lines.setdefault(line, {})[record.metric] = record.value
    compiled = next((found for (rung, _), found in lines.items() if rung == "compiled"), {})
    for line, found in lines.items():
        if "tokens_per_s" in found and "tokens_per_s" in compiled:
            found["over_compiled"] = found["tokens_per_s"] / compiled["tokens_per_s"]
        table.add_row(*line, *(f"{found[m]:,.4g}" if m in found else "" for m in metrics))
    return table
