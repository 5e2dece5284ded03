"""Compiling beforehand: every peer that compiles, on every case, in other processes."""

from __future__ import annotations

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


def test_every_case_is_compiled_for_every_peer_that_compiles_even_after_a_failure(pools: list[Any]) -> None:
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


def test_few_rows_come_first(pools: list[Any]) -> None:
    places = [Place(get("softmax"), torch.bfloat16, 2**12 // n, n) for n in (16, 32, 64)]
    with Warmup(CPU, jobs=2, seed=0) as warmup:
        warmup.compile(places, [PEERS["inductor"]], lambda *_: None)
    assert [task[3] for task in pools[0].tasks] == [64, 32, 16]


def test_nothing_is_started_where_nothing_compiles(pools: list[Any]) -> None:
    with Warmup(CPU, jobs=2, seed=0) as warmup:
        warmup.compile(PLACES, [PEERS["fuseline"], PEERS["eager"]], lambda *_: None)
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
