"""Several processes: everything is found once, what kills its process is told, what wants room gets it."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import torch

from fuseline.bench.attention.side_by_side import Lock, SideBySide
from fuseline.ops.attention.gpu_turn import Turn

CPU = torch.device("cpu")
DEADLY, CROWDED = 3, 5


def work(item: tuple[int, str], turn: Turn) -> str:
    number, folder = item
    with turn:
        if number == DEADLY:  # with its turn, which the next one gets
            os._exit(7)
        with (Path(folder) / "log").open("a") as log:
            log.write(f"{number} begins\n")
            log.write(f"{number} ends\n")
    if number == CROWDED:
        seen = Path(folder) / "crowded"
        if not seen.exists():
            seen.touch()
            return "again"
    return f"found {number}"


def died(item: tuple[int, str], reason: str) -> str:
    return reason


def again(found: str) -> bool:
    return found == "again"


def test_all_is_found_though_a_process_dies(tmp_path: Path) -> None:
    items = [(number, str(tmp_path)) for number in range(12)]
    side_by_side = SideBySide(work, CPU, 2, died, again)
    found = dict(side_by_side.run(items, lambda: False))
    assert found == {
        number: "its process ended with 7" if number == DEADLY else f"found {number}" for number in range(12)
    }
    lines = (tmp_path / "log").read_text().splitlines()
    for begins, ends in zip(lines[::2], lines[1::2], strict=True):
        assert begins.split()[0] == ends.split()[0], "one has its turn at a time"


def test_alone_it_stops_when_time_is_over(tmp_path: Path) -> None:
    items = [(number, str(tmp_path)) for number in range(3)]
    found = SideBySide(work, CPU, 1, died, again).run(items, iter([False, True]).__next__)
    assert list(found) == [(0, "found 0")]


def test_a_turn_waits_for_those_beside_each_other(tmp_path: Path) -> None:
    order: list[str] = []

    def take_turn(turn: Turn) -> None:
        with turn:
            order.append("timed")

    with contextlib.ExitStack() as files:
        first, second, third = (Lock(files.enter_context((tmp_path / "turn").open("w"))) for _ in range(3))
        waiting = threading.Thread(target=take_turn, args=(third,))
        with first.beside(), second.beside():
            waiting.start()
            waiting.join(0.2)
            order.append("beside")
        waiting.join()
    assert order == ["beside", "timed"]
