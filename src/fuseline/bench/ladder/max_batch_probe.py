"""The process that tries batches (see `max_batch`): a job as JSON on stdin, the outcome as JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import torch

from fuseline.bench.ladder.contender import Batch, GPTContender
from fuseline.bench.ladder.learner import TrainingState
from fuseline.bench.ladder.max_batch import TRIALS, Largest, predict
from fuseline.bench.ladder.spec import RunSpec
from fuseline.models.gpt import GPT
from fuseline.timing import peak_memory_gib, reset_peak_memory, synchronize

# What one trial takes for granted is lowered by this share (one sequence at least) for the next.
STEP_DOWN = 0.03


def search(
    spec: RunSpec,
    peaks: dict[int, float],
    capacity_gib: float,
    peak_of: Callable[[int], float | None],
) -> Largest:
    """The largest batch for which `peak_of(batch)` is not None, near where the line through `peaks` ends.

    `peak_of` trains a little at that batch and gives the peak in GiB, None if it did not fit.
    """
    for batch in (spec.batch, max(1, spec.batch // 2), 2 * spec.batch):
        if len(peaks) < 2 and batch not in peaks:
            peak = peak_of(batch)
            if peak is not None:
                peaks[batch] = peak
    candidate = predict(peaks, capacity_gib)
    if candidate is None:
        return Largest(
            None, False, len(peaks), "two batch sizes could not be measured to draw a line through"
        )
    largest_seen = max(peaks)
    for _ in range(TRIALS[spec.is_compiled]):
        if candidate <= largest_seen:
            break
        if peak_of(candidate) is not None:
            return Largest(candidate, True, len(peaks))
        candidate -= max(1, round(candidate * STEP_DOWN))
    if candidate <= largest_seen:
        return Largest(largest_seen, True, len(peaks))
    return Largest(None, False, len(peaks), f"still out of memory at {candidate} sequences and more")


def main() -> None:
    job = json.loads(sys.stdin.read())
    spec = RunSpec(**job["spec"])
    device = torch.device(job["device"])
    torch.cuda.set_device(device.index or 0)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    torch.manual_seed(job["seed"])
    with device:
        state = TrainingState.of(GPT(spec.config))

    def peak_of(batch: int) -> float | None:
        try:
            return _peak_gib(replace(spec, batch=batch), device, state)
        except torch.OutOfMemoryError:
            pass  # told by the return value; the handler must end before the memory can go
        torch.cuda.empty_cache()
        return None

    peaks = {int(batch): peak for batch, peak in job["peaks"].items()}
    print(json.dumps(asdict(search(spec, peaks, free_bytes / 2**30, peak_of))))


def _peak_gib(spec: RunSpec, device: torch.device, state: TrainingState) -> float:
    reset_peak_memory(device)
    contender = GPTContender(spec, device, state)
    try:
        contender.warm_up(_endless(_random_batch(spec, device)))
        synchronize(device)
        peak = peak_memory_gib(device)
    finally:
        contender.close()
    assert peak is not None
    return peak


def _random_batch(spec: RunSpec, device: torch.device) -> Batch:
    tokens_BT = torch.randint(spec.vocab_size, (spec.batch, spec.seqlen), device=device)
    return tokens_BT, tokens_BT.roll(-1, dims=1)


def _endless(batch: Batch) -> Iterator[Batch]:
    while True:
        yield batch


if __name__ == "__main__":
    main()
