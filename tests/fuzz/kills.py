"""Processes killed in the middle of what they write: nothing is torn or left, and the next one goes on.

A case forks, kills its fork with SIGKILL at some moment, and looks at what stands on the disk.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from apart import apart
from suite import Suite

import files
from files import Trial

PATIENCE_S = 120.0
LONGEST_MS = {"train": 4000, "resume": 3000, "append": 300, "weights": 300, "build": 2500, "report": 4000}
"""How long after the fork the kill comes at most: about as long as the work takes."""


def prepare(device: str = "cpu") -> None:
    files.prepare(device)
    _recipe()


def draw(pick: random.Random, device: str = "cpu") -> Trial:
    kind = pick.choice(sorted(LONGEST_MS))
    return {"kind": kind, "after_ms": pick.randrange(LONGEST_MS[kind])}


def check(trial: Trial) -> str | None:
    """What is wrong after the kill; None if nothing is."""
    with tempfile.TemporaryDirectory(prefix="fuseline-kills-") as room:
        return KINDS[trial["kind"]](Path(room), trial["after_ms"] / 1000)


def _killed(work: Callable[[], int], room: Path, after_s: float) -> None:
    apart(work, room, patience_s=PATIENCE_S, kill_after_s=after_s)


def _afterwards(work: Callable[[], int], room: Path) -> str | None:
    """What is wrong with work that nobody kills."""
    ended = apart(work, room, patience_s=PATIENCE_S)
    if ended.code != 0:
        return f"afterwards: exit code {ended.code}: {ended.crashed or ended.error[-300:]}"
    return None


def _train(room: Path, after_s: float, *, resumed: bool = False) -> str | None:
    """A run killed at some moment, then resumed, or begun anew where it had not begun."""
    from fuseline.training.checkpoint import LATEST, load_checkpoint, peek
    from fuseline.training.metrics import METRICS, read_metrics
    from fuseline.training.train import train

    config = peek(files.whole() / "run" / LATEST)[0]
    config = replace(config, steps=10**6, checkpoint_interval=2, log_interval=1, eval_interval=3)
    folder = room / "run"

    def begin(steps: int, resume: bool) -> Callable[[], int]:
        return lambda: 0 * len(str(train(replace(config, steps=steps), folder=folder, resume=resume)))

    if resumed and (wrong := _afterwards(begin(3, False), room)):
        return wrong
    _killed(begin(10**6, resumed), room, after_s)
    begun = (folder / LATEST).exists()
    reached = load_checkpoint(folder / LATEST).step if begun else 0
    if wrong := _afterwards(begin(reached + 2, begun), room):
        return wrong
    steps = [entry["step"] for entry in read_metrics(folder / METRICS) if entry["kind"] == "step"]
    if steps != list(range(1, reached + 3)):
        return f"metrics: of {reached + 2} steps there are {steps[:3]} .. {steps[-3:]}"
    left = [path.name for path in folder.rglob(".*")]
    return f"left: {left}" if left else None


def _append(room: Path, after_s: float) -> str | None:
    """Records appended while the process is killed: whole batches of them, and more can be added."""
    from fuseline.records import append, read

    records = read(files.whole() / "records" / "records.jsonl")[:40]
    path = room / "records.jsonl"

    def work() -> int:
        while True:
            append(path, records)

    _killed(work, room, after_s)
    before = len(read(path)) if path.exists() else 0
    append(path, records[:1])
    lines = path.read_bytes().split(b"\n")
    if len(read(path)) != before + 1 or lines[-1] != b"" or len(lines) != before + 2:
        return f"records: {before} before, {len(read(path))} after one more, {len(lines) - 1} lines"
    return None


def _weights(room: Path, after_s: float) -> str | None:
    """A model saved over and over: its folder holds none, or a whole one."""
    from fuseline.models.llama_hugging_face import load_llama, save_llama

    model = load_llama(files.whole() / "llama")
    folder = room / "saved"

    def work() -> int:
        while True:
            save_llama(model, folder)

    _killed(work, room, after_s)
    if (folder / "config.json").exists():
        again = load_llama(folder)
        if not all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)):
            return "weights: not those that were saved"
    save_llama(model, folder)
    left = sorted(path.name for path in folder.iterdir())
    return None if left == ["config.json", "model.safetensors"] else f"left: {left}"


def _build(room: Path, after_s: float) -> str | None:
    """A library whose builder is killed: the next builds it, and no room of the first is left."""
    import ctypes

    from fuseline.native.build import build

    recipe = _recipe()
    if recipe is None:
        return None
    units = []
    for unit in recipe.units:  # another source for each case, so that nothing is built already
        source = room / unit.source.name
        source.write_text(unit.source.read_text() + f"// {room.name}\n")
        units.append(replace(unit, source=source))
    mine = replace(recipe, units=tuple(units))
    kept = os.environ.get("FUSELINE_CACHE")
    os.environ["FUSELINE_CACHE"] = str(room / "cache")
    try:
        _killed(lambda: 0 * len(str(build(mine))), room, after_s)
        if wrong := _afterwards(lambda: 0 * ctypes.CDLL(str(build(mine))).a(), room):
            return wrong
        rooms = [str(path) for path in (room / "cache").rglob("*.building")]
        return f"left: {rooms}" if rooms else None
    finally:
        os.environ.pop("FUSELINE_CACHE") if kept is None else os.environ.update(FUSELINE_CACHE=kept)


def _report(room: Path, after_s: float) -> str | None:
    """A page drawn over the one before: it is the old one or the new one."""
    from fuseline.cli.main import run

    out = room / "page"
    arguments = ["report", str(files.whole() / "records" / "records.jsonl"), "--out", str(out)]
    _killed(lambda: run(arguments), room, after_s)
    page = out / "index.html"
    if page.exists() and not page.read_text().rstrip().endswith("</html>"):
        return "page: half of it"
    if wrong := _afterwards(lambda: run(arguments), room):
        return wrong
    left = [path.name for path in out.iterdir() if path.name.startswith(".")]
    return f"left: {left}" if left else None


@functools.cache
def _recipe() -> Any:
    """A small library of two files; None where there is no compiler."""
    from fuseline.native.build import Recipe, Unit
    from fuseline.native.compilers import find_cxx

    compiler = find_cxx().compiler
    if compiler is None:
        return None
    place = files.whole() / "sources"
    place.mkdir(exist_ok=True)
    units = []
    for name in "ab":
        (place / f"{name}.cpp").write_text(f'#include <string>\nextern "C" int {name}() {{ return 3; }}\n')
        units.append(Unit(place / f"{name}.cpp", compiler, ("-fPIC", "-O2"), (), (), f"{name}.cpp"))
    return Recipe("pair", tuple(units), compiler, ("-shared",))


KINDS: dict[str, Callable[[Path, float], str | None]] = {
    "train": _train,
    "resume": functools.partial(_train, resumed=True),
    "append": _append,
    "weights": _weights,
    "build": _build,
    "report": _report,
}


SUITE = Suite(
    "kills",
    "programs killed at any moment: nothing they had written is lost, and the next run goes on",
    draw,
    check,
    prepare=prepare,
    cases=200,
)
