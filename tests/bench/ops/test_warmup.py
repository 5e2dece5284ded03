"""Compiling beforehand: every peer that compiles, on every case, in other processes."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from fuseline.bench.ops import warmup as module
from fuseline.bench.ops.plan import Place
from fuseline.bench.ops.warmup import Warmup
from fuseline.bench.peers import PEERS
from fuseline.ops import get

CPU = torch.device("cpu")
PLACES = [Place(get("softmax"), torch.float32, 4, n) for n in (16, 32, 64)]


class Pool:
    """Runs what is submitted at once, and notes it; a task of length 32 fails."""

    def __init__(self, *_: object, **__: object) -> None:
        self.tasks: list[tuple[Any, ...]] = []

    def submit(self, function: object, *task: Any) -> Future[None]:
        self.tasks.append(task)
        future: Future[None] = Future()
        future.set_exception(RuntimeError("cannot")) if task[3] == 32 else future.set_result(None)
        return future

    def shutdown(self, **_: object) -> None:
        pass


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    made: list[Pool] = []

    def make(*arguments: object, **options: object) -> Pool:
        made.append(Pool(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(module, "ProcessPoolExecutor", make)
    return made


def test_every_case_is_compiled_for_every_peer_that_compiles_even_after_a_failure(pools: list[Pool]) -> None:
    told: list[tuple[int, int]] = []
    peers = [PEERS[name] for name in ("fuseline", "eager", "inductor", "liger")]
    with Warmup(CPU, jobs=2, seed=7) as warmup:
        warmup.compile(PLACES, peers, lambda done, total: told.append((done, total)))
        warmup.compile(PLACES[:1], peers, lambda *_: None)
    (pool,) = pools  # the processes are kept between calls
    assert sorted(pool.tasks[:6]) == sorted(
        ("softmax", "float32", 4, n, peer, "cpu", 7) for n in (16, 32, 64) for peer in ("inductor", "liger")
    )
    assert told == [(i, 6) for i in range(1, 7)]


def test_as_many_cases_at_once_as_the_memory_holds(
    pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3 GiB each, on a GPU with 7 GiB left; one of 33 GiB is left to the measuring process."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * 2**30, 80 * 2**30))
    at_once: list[int] = []

    def finish(
        running: dict[Future[None], int], **_: object
    ) -> tuple[list[Future[None]], list[Future[None]]]:
        at_once.append(len(running))
        return list(running)[:1], list(running)[1:]

    monkeypatch.setattr(module, "wait", finish)
    bf16 = [Place(get("softmax"), torch.bfloat16, 2**27 // n, n) for n in (128, 256, 512)]
    huge = Place(get("softmax"), torch.bfloat16, 2**22, 512)
    told: list[tuple[int, int]] = []
    with Warmup(torch.device("cuda"), jobs=8, seed=0) as warmup:
        warmup.compile([*bf16, huge], [PEERS["inductor"]], lambda done, total: told.append((done, total)))
    assert at_once == [2, 2, 1]
    assert [task[3] for task in pools[0].tasks] == [512, 256, 128]  # few rows first
    assert told == [(1, 4), (2, 4), (3, 4)]


def test_after_its_seconds_no_more_are_begun(pools: list[Pool]) -> None:
    told: list[tuple[int, int]] = []
    with Warmup(CPU, jobs=2, seed=0) as warmup:
        warmup.compile(PLACES, [PEERS["inductor"]], lambda done, total: told.append((done, total)), within=-1)
        warmup.compile(PLACES[:2], [PEERS["inductor"]], lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]


def test_processes_that_do_not_answer_are_ended_and_asked_nothing_more(
    pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "wait", lambda running, **_: (set(), set(running)))
    with Warmup(CPU, jobs=2, seed=0) as warmup:
        for _ in range(2):
            warmup.compile(PLACES, [PEERS["inductor"]], lambda *_: pytest.fail("none was compiled"))
    assert [len(pool.tasks) for pool in pools] == [2]


def test_nothing_is_started_where_nothing_compiles_or_no_jobs_are_given(pools: list[Pool]) -> None:
    with Warmup(CPU, jobs=2, seed=0) as warmup:
        warmup.compile(PLACES, [PEERS["fuseline"], PEERS["eager"]], lambda *_: None)
    with Warmup(CPU, jobs=0, seed=0) as warmup:
        warmup.compile(PLACES, [PEERS["inductor"]], lambda *_: None)
    assert pools == []


def test_what_drops_is_also_run_without_for_its_errors() -> None:
    dropped: list[float] = []

    class Watched:
        name, overwrites, compiles = "watched", False, True

        def bind(self, op: Any, inputs: dict[str, Any]) -> Any:
            dropped.append(inputs["p"])
            return lambda: op.reference(**inputs)

    place = Place(get("dropout_add_rms_norm"), torch.float32, 4, 16)
    module._run_once(place, Watched(), CPU, 0)  # type: ignore[arg-type]
    assert len(dropped) == 3
    assert dropped.count(0.0) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inductor's own imports
def test_another_process_fills_the_cache_that_this_one_reads(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with Warmup(CPU, jobs=1, seed=0) as warmup:
        warmup.compile(PLACES[:2], [PEERS["inductor"]], lambda *_: None)
    assert any((tmp_path / "fxgraph").rglob("*"))
