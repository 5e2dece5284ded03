"""Measure every attention kernel on the shapes of a model, or on a list of shapes, and keep the times on this
machine: from then on `fuseline.ops.attention` takes the fastest there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuseline.cli.measuring import measuring
from fuseline.cli.options import Common, resolve_device
from fuseline.cli.precisions import checked
from fuseline.errors import InputError, unknown_name

if TYPE_CHECKING:
    import torch

    from fuseline.models.gpt_config import GPTConfig
    from fuseline.models.llama_config import LlamaConfig
    from fuseline.ops.attention.problem import Problem
    from fuseline.ops.attention.tables import Entry

SHAPE = "BxHxTxD, BxHxTxSxD or BxH/HkvxTxSxD"
DIRECTIONS = ("fw", "fwbw")
LONGEST = 8192


@dataclass(frozen=True)
class Options(Common):
    preset: str | None = None
    """A GPT's or Llama's preset: its attention in training and evaluation, or over a prompt."""
    batch_size: tuple[int, ...] = (1, 8, 16)
    """Batch sizes of the preset."""
    seqlen: tuple[int, ...] = ()
    """Lengths of the preset; its block size, up to 8,192, if none is named."""
    shapes: tuple[str, ...] = ()
    """Shapes to measure: BxHxTxD, BxHxTxSxD or BxH/HkvxTxSxD, as 8x16x1024x64 or 1x32/8x1x4096x128."""
    precision: str = "bf16"
    """fp32, fp16 or bf16."""
    directions: tuple[str, ...] = DIRECTIONS
    """fw, fwbw."""
    causal: bool = True
    """Shapes: whether the last query sees all keys, and earlier ones fewer."""
    dropout: float | None = None
    """Dropout while training; the preset's, or none, if it is not named."""
    flex: bool = False
    """Measure FlexAttention too, which compiles for every shape."""


def run(options: Options) -> int:
    import torch

    from fuseline.ops.attention import picker, table_store

    device = torch.device(resolve_device(options.device))
    problems = _problems(options, device)
    if not problems:
        raise InputError("`fuseline tune` wants to know what: --preset NAME, or --shapes " + SHAPE + ".")
    gpu = table_store.gpu_name(device)
    if options.dry_run:
        print(f"{len(problems)} problems:")
        for problem in problems:
            print(f"  {problem}")
        where = "nowhere: there is no GPU" if gpu is None else str(table_store.measured_file(gpu))
        print(f"Times would be kept in {where}.")
        return 0
    with measuring(80) as observe:
        entries = picker.tune(problems, with_compiled=options.flex, observe=observe)
    file = "" if gpu is None else str(table_store.measured_file(gpu))
    if options.json:
        print(json.dumps({"entries": [entry.to_json() for entry in entries], "file": file}))
        return 0
    _print(entries)
    print(f"Kept in {file}")
    return 0


def _problems(options: Options, device: torch.device) -> list[Problem]:
    import torch

    from fuseline.ops.attention.problem import Problem

    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    dtype = dtypes[checked(options.precision, dtypes)]
    for direction in options.directions:
        if direction not in DIRECTIONS:
            raise unknown_name("direction", direction, DIRECTIONS)
    sizes = [_parsed(shape) for shape in options.shapes]
    dropout_p = options.dropout or 0.0
    if options.preset is not None:
        config = _config(options.preset)
        if options.dropout is None:
            dropout_p = getattr(config, "dropout", 0.0)
        lengths = options.seqlen or (min(config.block_size, LONGEST),)
        heads, head_dim = config.num_heads, config.head_dim
        kv_heads = getattr(config, "num_kv_heads", heads)
        sizes += [(b, heads, kv_heads, t, t, head_dim) for b in options.batch_size for t in lengths]
    return [
        Problem(
            device,
            dtype,
            *size,
            direction=direction,
            causal="bottom_right" if options.causal else "none",
            dropout_p=dropout_p if direction == "fwbw" else 0.0,
        )
        for size in sizes
        for direction in options.directions
    ]


def _config(name: str) -> GPTConfig | LlamaConfig:
    from fuseline.models import gpt_config, llama_config

    known = (*gpt_config.PRESETS, *llama_config.PRESETS)
    if name not in known:
        raise unknown_name("preset", name, known)
    if name in gpt_config.PRESETS:
        return gpt_config.preset(name)
    return llama_config.preset(name)


def _parsed(shape: str) -> tuple[int, int, int, int, int, int]:
    """batch, heads, key heads, T, S, D of a shape in words."""
    parts = shape.lower().split("x")
    try:
        if len(parts) not in (4, 5):
            raise ValueError
        heads, _, kv_heads = parts[1].partition("/")
        queries = int(parts[2])
        keys = int(parts[3]) if len(parts) == 5 else queries
        found = (int(parts[0]), int(heads), int(kv_heads or heads), queries, keys, int(parts[-1]))
    except ValueError:
        raise InputError(f"--shapes {shape} is not of the form {SHAPE}, as 1x32/8x1x4096x128.") from None
    if min(found) < 1 or found[1] % found[2]:
        raise InputError(f"--shapes {shape}: sizes are 1 and more, and H is a multiple of Hkv.")
    return found


def _print(entries: Sequence[Entry]) -> None:
    for entry in entries:
        print(entry.problem)
        for name, time_us in sorted(entry.times_us.items(), key=lambda pair: pair[1]):
            print(f"  {name:<12}{time_us:>10.1f} us")
        if not entry.times_us:
            print("  nothing ran")
