"""Ways to damage a file: its bytes, its JSON, its tensors, or what it is. All of it is drawn from a seed."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

HUGE = 2**40
TEXT = (
    "null",
    "true",
    "1.5",
    "-1",
    "0",
    "1",
    "2",
    "7",
    "1000000000",
    "9223372036854775808",
    "1e400",
    "NaN",
    "-Infinity",
    '""',
    '"x"',
    '"1"',
    "[]",
    "{}",
    "[1]",
    '{"a":1}',
    "1e-9",
    '"../../outside"',
    '"\\u0000"',
    '"\\u2028"',
    '"\\ud800"',
    '"<img/onerror=alert(1)>"',
)


class Trap:
    """A pickle that would make a folder if it were executed."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def truncated(path: Path, pick: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: pick.choice((0, 1, 8, pick.randrange(len(content) + 1), len(content) - 1))])


def flipped(path: Path, pick: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(pick.choice((1, 1, 3, 50))):
        content[pick.randrange(len(content))] ^= 1 << pick.randrange(8)
    path.write_bytes(bytes(content))


def overwritten(path: Path, pick: random.Random) -> None:
    content = bytearray(path.read_bytes())
    begin = pick.randrange(len(content))
    length = min(pick.choice((1, 16, 4096)), len(content) - begin)
    content[begin : begin + length] = pick.choice((bytes(length), pick.randbytes(length)))
    path.write_bytes(bytes(content))


def inserted(path: Path, pick: random.Random) -> None:
    content = path.read_bytes()
    place = pick.randrange(len(content) + 1)
    more = pick.choice((b"\x00", b"\xff\xfe", b"}", b"\n", content[:64], pick.randbytes(200)))
    path.write_bytes(content[:place] + more + content[place:])


def something_else(path: Path, pick: random.Random) -> None:
    """A pipe, a device, a folder, a link to itself, a file of a terabyte that holds nothing; or nothing."""
    path.unlink()
    kind = pick.choice(("pipe", "device", "full", "folder", "loop", "sparse", "missing"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind in ("device", "full"):
        path.symlink_to("/dev/zero" if kind == "device" else "/dev/full")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(HUGE)


def odd_json(path: Path, pick: random.Random) -> None:
    """One value of a JSON file, or of a line of one, is another, is gone, or is endlessly deep."""
    lines = path.read_text().split("\n") if path.suffix == ".jsonl" else [path.read_text()]
    number = pick.randrange(len([line for line in lines if line.strip()]))
    value = json.loads(lines[number])
    marker = "@@"
    holder, key = _place(value, pick)
    if pick.random() < 0.25 and holder is not None:
        del holder[key]
    elif holder is None:
        value = marker
    else:
        holder[key] = marker
    text = json.dumps(value)
    odd = pick.choice((*TEXT, *TEXT, "[" * 100_000 + "]" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000))
    lines[number] = text.replace(f'"{marker}"', odd if pick.random() < 0.95 else json.dumps("y" * 3_000_000))
    path.write_text("\n".join(lines))


def odd_tensors(path: Path, pick: random.Random) -> None:
    """One value of a checkpoint of torch's is another: another type, size or layout, or code to execute."""
    content = torch.load(path, weights_only=True)
    holder, key = _place(content, pick)
    if holder is None:
        return
    if pick.random() < 0.25:
        del holder[key]
    else:
        holder[key] = pick.choice(ODD_VALUES)(path.parent)
    torch.save(content, path)


ODD_VALUES: tuple[Callable[[Path], Any], ...] = (
    lambda _: None,
    lambda _: True,
    lambda _: 1.5,
    lambda _: -1,
    lambda _: 3,
    lambda _: 10**9,
    lambda _: 10**400,
    lambda _: math.nan,
    lambda _: math.inf,
    lambda _: "x",
    lambda _: [],
    lambda _: {},
    lambda _: [[[[1]]]],
    lambda _: torch.zeros(0),
    lambda _: torch.zeros(3),
    lambda _: torch.zeros(2, 2).to_sparse(),
    lambda _: torch.zeros(2, 2, device="meta"),
    lambda _: torch.zeros(1).expand(2**20, 2**20),
    lambda _: torch.zeros(4, dtype=torch.int64),
    lambda _: torch.zeros(4, dtype=torch.complex64),
    lambda _: torch.full((4,), math.nan),
    lambda folder: Trap(str(folder / "trapped")),
    lambda _: _laughs(),
)


def _laughs() -> list[Any]:
    """A billion of laughs in a few hundred bytes."""
    value: list[Any] = ["ha"]
    for _ in range(40):
        value = [value, value]
    return value


def odd_safetensors(path: Path, pick: random.Random) -> None:
    """A tensor of another type or size, one more, one fewer, or another description."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    name = pick.choice(sorted(tensors))
    kind = pick.randrange(6)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[pick.choice(("x", "../x", "lm_head.weight", ""))] = torch.zeros(3)
    elif kind == 2:
        tensors[name] = torch.zeros(pick.choice(((0,), (3,), (1, 1), (2, 3, 4))), dtype=tensors[name].dtype)
    elif kind == 3:
        dtype = pick.choice((torch.int64, torch.bool, torch.float64, torch.float16, torch.uint8))
        tensors[name] = tensors[name].float().to(dtype)
    elif kind == 4:
        tensors[name] = torch.full_like(tensors[name].float(), math.nan).to(tensors[name].dtype)
    elif "fuseline" in metadata:
        said = json.loads(metadata["fuseline"])
        holder, key = _place(said, pick)
        if holder is not None:
            holder[key] = json.loads(pick.choice([t for t in TEXT if t not in ("NaN", "1e400", "-Infinity")]))
        metadata["fuseline"] = json.dumps(said)
    save_file(tensors, path, metadata)


def _place(value: Any, pick: random.Random) -> tuple[Any, Any]:
    """A place somewhere in lists and mappings: what holds it and its key; (None, None) for the whole."""
    holder, key = None, None
    while isinstance(value, (dict, list)) and value and (holder is None or pick.random() < 0.7):
        holder = value
        key = pick.choice(sorted(value, key=str)) if isinstance(value, dict) else pick.randrange(len(value))
        value = holder[key]
    return (None, None) if pick.random() < 0.02 else (holder, key)


BYTES = (truncated, flipped, overwritten, inserted, something_else)
BY_SUFFIX: dict[str, tuple[Callable[[Path, random.Random], None], ...]] = {
    ".json": (odd_json, odd_json, odd_json, *BYTES),
    ".jsonl": (odd_json, odd_json, odd_json, *BYTES),
    ".pt": (odd_tensors, odd_tensors, odd_tensors, *BYTES),
    ".safetensors": (odd_safetensors, odd_safetensors, *BYTES),
}


def damage(path: Path, pick: random.Random) -> str:
    """Damage the file at `path` in some way; returns what was done."""
    way = pick.choice(BY_SUFFIX.get(path.suffix, BYTES))
    way(path, pick)
    return way.__name__
