"""Batches: which crops, for whom, again after a resume, and how the thread ends."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fuseline.data.batches as batches_module
from fuseline.data.batches import Batch, BatchLoader, validation_batches
from fuseline.errors import InputError

TOKENS = np.arange(5000, dtype=np.uint16)  # each token says where it stands


def loader(tokens: np.ndarray = TOKENS, **options: object) -> BatchLoader:
    return BatchLoader(
        tokens, **{"batch_size": 4, "block_size": 16, "seed": 1, "device": "cpu", "start": 0, **options}
    )


def take(count: int, **options: object) -> list[Batch]:
    with loader(**options) as batches:
        return list(itertools.islice(batches, count))


def same(a: list[Batch], b: list[Batch]) -> bool:
    return all(
        torch.equal(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True)
    )


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fuseline")]


def test_batches_are_crops_with_targets_one_ahead() -> None:
    for tokens, targets in take(20):
        assert tokens.shape == targets.shape == (4, 16)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(16))
        assert torch.equal(targets, tokens + 1)


def test_crops_reach_both_ends_and_are_spread_evenly() -> None:
    starts = torch.cat([tokens[:, 0] for tokens, _ in take(250, tokens=TOKENS[: 17 + 9], batch_size=40)])
    counts = torch.bincount(starts, minlength=10)
    assert len(counts) == 10  # 26 tokens hold crops at 0..9
    assert (counts - 1000).abs().max() < 5 * 1000**0.5


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(-(2**70), 2**70), stop=st.integers(0, 12), rank=st.integers(0, 3))
def test_a_resumed_loader_goes_on_where_the_first_stopped(seed: int, stop: int, rank: int) -> None:
    whole = take(15, seed=seed, rank=rank, world_size=4)
    with loader(seed=seed, rank=rank, world_size=4) as first:
        list(itertools.islice(first, stop))
        position = first.position
    assert position == stop
    assert same(take(15 - stop, seed=seed, rank=rank, world_size=4, start=position), whole[stop:])


def test_the_stream_does_not_change_between_versions() -> None:
    # Drawn once and written down: a resumed run depends on it.
    starts = [tokens[:, 0].tolist() for tokens, _ in take(2, seed=1337)]
    assert starts == [[689, 2787, 1398, 797], [4545, 3773, 2535, 1370]]


def test_seeds_ranks_and_batches_share_no_draws() -> None:
    tokens = np.arange(2**20, dtype=np.uint32)
    drawn = [
        start
        for seed, rank in itertools.product((1, 2), (0, 1, 2))
        for batch, _ in take(50, tokens=tokens, seed=seed, rank=rank, world_size=3)
        for start in batch[:, 0].tolist()
    ]
    # 1200 draws of 2^20: a stream used twice would repeat 200 of them, chance repeats less than one.
    assert len(drawn) - len(set(drawn)) < 10


def test_prefetch_changes_nothing() -> None:
    assert same(take(10, prefetch=1), take(10, prefetch=5))


def test_given_batches_stay_as_they_are() -> None:
    batches = take(30)
    kept = [tuple(t.clone() for t in batch) for batch in take(30)]
    assert same(batches, kept)
    assert len({tokens.data_ptr() for tokens, _ in batches}) == 30


def test_waiting_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> None:
        time.sleep(0.1)
        crop(*arguments)

    crop = batches_module._crop
    monkeypatch.setattr(batches_module, "_crop", slow)
    with loader() as batches:
        for _ in range(4):
            next(batches)
        assert 0.25 < batches.wait_seconds < 1.0  # four batches, a tenth of a second each
        time.sleep(0.5)  # time enough to prefetch two
        before = batches.wait_seconds
        next(batches)
        assert batches.wait_seconds - before < 0.05


def test_close_ends_the_thread() -> None:
    before = threads()
    batches = loader()
    assert len(threads()) == len(before) + 1
    next(batches)
    batches.close()
    batches.close()
    assert threads() == before
    with pytest.raises(InputError, match="closed"):
        next(batches)


def test_a_dropped_loader_ends_its_thread() -> None:
    before = threads()
    batches = loader()
    next(batches)
    thread = batches._thread
    del batches
    gc.collect()
    thread.join(5)
    assert threads() == before


def test_an_exception_in_the_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(batches_module, "_crop", broken)
    with loader() as batches:
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                next(batches)


def test_a_memory_map_is_read(tmp_path: Path) -> None:
    TOKENS.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    assert same(take(3, tokens=mapped), take(3))


@pytest.mark.parametrize(
    "options,message",
    [
        ({"block_size": 5000}, "needs 5001 tokens .* there are 5000"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"rank": 2, "world_size": 2}, "rank is 2"),
        ({"prefetch": 0}, "prefetch 0"),
        ({"start": -1}, "start is -1"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, int], message: str) -> None:
    before = threads()
    with pytest.raises(InputError, match=message):
        loader(**options)
    assert threads() == before


def test_the_longest_block_that_fits_is_taken() -> None:
    tokens, targets = take(1, block_size=4999)[0]
    assert (tokens[0, 0], targets[0, -1]) == (0, 4999)


def test_validation_covers_the_split_evenly_and_repeats() -> None:
    options = {"batch_size": 4, "block_size": 16, "count": 5, "device": "cpu"}
    batches = list(validation_batches(TOKENS, **options))
    assert same(batches, list(validation_batches(TOKENS, **options)))
    starts = torch.cat([tokens[:, 0] for tokens, _ in batches])
    assert len(starts) == 20
    assert (starts[0], starts[-1]) == (0, 5000 - 17)
    gaps = starts.diff()
    assert gaps.max() - gaps.min() <= 1
    assert all(torch.equal(targets, tokens + 1) for tokens, targets in batches)
    ranks = [
        list(validation_batches(TOKENS, **{**options, "batch_size": 2}, rank=r, world_size=2)) for r in (0, 1)
    ]
    assert torch.equal(torch.cat([t[:, 0] for pair in zip(*ranks, strict=True) for t, _ in pair]), starts)


def test_validation_refuses_a_block_too_long_before_the_first_batch() -> None:
    with pytest.raises(InputError, match="there are 5000"):
        validation_batches(TOKENS, batch_size=1, block_size=5000, count=1, device="cpu")


@pytest.mark.gpu
def test_on_a_gpu_the_batches_are_the_same() -> None:
    gpu = take(30, device="cuda")
    assert all(t.is_cuda for batch in gpu for t in batch)
    assert same([tuple(t.cpu() for t in batch) for batch in gpu], take(30))


@pytest.mark.gpu
def test_a_graph_is_captured_while_batches_are_prefetched() -> None:
    with loader(device="cuda", prefetch=8) as batches:
        static = next(batches)[0].clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = static.sum()
        for tokens, _ in itertools.islice(batches, 5):
            static.copy_(tokens)
            graph.replay()
            assert total.item() == tokens.sum().item()
