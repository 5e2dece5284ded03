"""Processes that compile beforehand: how many tasks at once, for how long, and what if they hang."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline.bench import compiling as module
from fuseline.bench.compiling import Compilers, Task, default_jobs, one_task

CPU = torch.device("cpu")


def tasks(*numbers: int, room: int = 0) -> Sequence[Task]:
    return [Task(lambda n: None, (n,), room) for n in numbers]


def test_the_processes_are_kept_and_a_failure_stops_nothing(pools: list[Any]) -> None:
    told: list[tuple[int, int]] = []
    with Compilers(CPU, jobs=2) as compilers:
        compilers.run(tasks(16, 32, 64), lambda done, total: told.append((done, total)))
        compilers.run(tasks(128, 256), lambda *_: None)
    (pool,) = pools
    assert pool.tasks == [(n,) for n in (16, 32, 64, 128, 256)]
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_as_many_at_once_as_the_memory_holds(pools: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 GiB each with the process's own, on a GPU with 7 GiB left; one of 33 GiB is left out."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * 2**30, 80 * 2**30))
    at_once: list[int] = []

    def finish(
        running: dict[Future[None], int], **_: object
    ) -> tuple[list[Future[None]], list[Future[None]]]:
        at_once.append(len(running))
        return list(running)[:1], list(running)[1:]

    monkeypatch.setattr(module, "wait", finish)
    told: list[tuple[int, int]] = []
    with Compilers(torch.device("cuda"), jobs=8) as compilers:
        given = [*tasks(1, 2, 3, room=2 * 2**30), *tasks(4, room=32 * 2**30)]
        compilers.run(given, lambda done, total: told.append((done, total)))
    assert at_once == [2, 2, 1]
    assert pools[0].tasks == [(1,), (2,), (3,)]
    assert told == [(1, 4), (2, 4), (3, 4)]


def test_after_its_seconds_no_more_are_begun(pools: list[Any]) -> None:
    told: list[tuple[int, int]] = []
    with Compilers(CPU, jobs=2) as compilers:
        compilers.run(tasks(1, 2, 3), lambda done, total: told.append((done, total)), within=-1)
        compilers.run(tasks(1, 2), lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]


def test_processes_that_do_not_answer_are_ended_and_asked_nothing_more(
    pools: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "wait", lambda running, **_: (set(), set(running)))
    with Compilers(CPU, jobs=2) as compilers:
        for _ in range(2):
            compilers.run(tasks(1, 2, 3), lambda *_: pytest.fail("none was compiled"))
    assert [pool.tasks for pool in pools] == [[(1,), (2,)]]


def test_nothing_is_started_for_less_than_two_tasks_or_without_jobs(pools: list[Any]) -> None:
    with Compilers(CPU, jobs=2) as compilers:
        compilers.run(tasks(1), lambda *_: None)
    with Compilers(CPU, jobs=0) as compilers:
        compilers.run(tasks(1, 2), lambda *_: None)
    assert pools == []


def test_jobs_are_the_cores_but_one_of_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "cpu_count", lambda: 6)
    assert (default_jobs(torch.device("cuda")), default_jobs(CPU)) == (5, 0)


def test_giving_up_ends_the_processes_of_the_pool_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATE_SECONDS", 0.1)
    spawn = multiprocessing.get_context("spawn")
    bystander = spawn.Process(target=time.sleep, args=(60,), daemon=True)
    bystander.start()
    try:
        compilers = Compilers(CPU, jobs=1)
        compilers.run([Task(time.sleep, (60,), 0)] * 2, lambda *_: None, within=0.1)
        until = time.monotonic() + 20
        while multiprocessing.active_children() != [bystander] and time.monotonic() < until:
            time.sleep(0.02)
        assert multiprocessing.active_children() == [bystander]
    finally:
        bystander.kill()
        bystander.join()


def test_a_task_fails_in_silence() -> None:
    reached: list[Any] = []
    with one_task(CPU):
        reached.append(1)
        raise RuntimeError("told where it is measured")
    assert reached == [1]


def test_within_a_search_configurations_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    theirs = CachingAutotuner.bench
    monkeypatch.setattr(CachingAutotuner, "bench", module._untimed)
    monkeypatch.setitem(module._kept, "bench", theirs)
    timed: list[Any] = []

    def clock(call: Callable[[], object]) -> float:
        timed.append(call())
        return 3.0

    with module.timed_briefly(clock):
        assert CachingAutotuner.bench is theirs
        assert benchmarker.benchmark(fn=lambda: 1, fn_args=(), fn_kwargs={}, device=None) == 3.0
        assert benchmarker.benchmark(lambda *a, **k: (a, k), (1,), {"out": 2}, device=None) == 3.0
        assert benchmarker.benchmark_gpu(lambda: 4) == 3.0
    assert timed == [1, ((1,), {"out": 2}), 4]
    assert CachingAutotuner.bench is module._untimed


def test_inductor_may_tune_by_its_own_clock() -> None:
    from torch._inductor.runtime.benchmarking import benchmarker

    own, gpu = benchmarker.benchmark, torch.device("cuda")
    with module.tuned_here(gpu):
        assert benchmarker.benchmark != own
    with module.tuned_here(gpu, own_clock=True):
        assert benchmarker.benchmark == own
        assert torch._inductor.config.autotune_local_cache is False


MEASURES = """
import os, sys, time
from pathlib import Path
import torch
from fuseline.bench.compiling import Compilers, Task

def compile(folder, number):
    Path(folder, f"{number}-{os.getpid()}").touch()
    time.sleep(600)

if __name__ == "__main__":
    with Compilers(torch.device("cpu"), jobs=2) as compilers:
        compilers.run([Task(compile, (sys.argv[1], number), 0) for number in range(4)], lambda *_: None)
"""


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_no_process_outlives_a_measuring_one_that_is_killed(tmp_path: Path) -> None:
    program, begun = tmp_path / "measures.py", tmp_path / "begun"
    program.write_text(MEASURES)
    begun.mkdir()
    measuring = subprocess.Popen([sys.executable, str(program), str(begun)])

    def compiling() -> list[int]:
        return [int(file.name.split("-")[1]) for file in begun.iterdir()]

    def wait_until(there: int, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if len(compiling()) >= 2 and sum(map(is_alive, compiling())) == there:
                return True
            time.sleep(0.05)
        return False

    try:
        assert wait_until(2, 60)
    finally:
        measuring.kill()
        measuring.wait()
    assert wait_until(0, 10)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # One that has ended stays by name until its new parent has asked after it.
    state = Path(f"/proc/{process}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"
