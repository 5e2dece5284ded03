"""Which rungs gain most, on which kind of device: they are tried before the time runs out."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.bench.ladder.combinations import COMBINATION
from fuseline.bench.ladder.rungs import Rung
from fuseline.bench.ladder.torch_alone import TORCH_ALONE

# On a GPU: the rungs whose paired ratio is 1.1 or more in one of the committed ladders of an H100 (gpt2,
# shakespeare), the largest first. No ladder of a CPU is on record: those are what is expected to pay there. A
# compiled step takes most of a minute on a CPU before its first timed step, so the other rungs are tried
# before it if there is time for both.
LARGEST_GAINS: dict[str, tuple[str, ...]] = {
    "cpu": ("bf16", "fused-adamw", "inductor", "flash"),
    "cuda": (
        *("tf32", "fused-softmax", "padded-vocabulary", "cudagraphs", "reduce-overhead"),
        *("bf16", "fused-loss", "efficient", "inductor", "16-bit-loss"),
    ),
}
# For a user's own model on a GPU. In `bench acceleration` on an H200 the recorded step gains 1.1 to 1.7 over
# the fastest of torch's modes, so its time is set aside before a compiler's.
LARGEST_GAINS_OF_A_MODEL = ("recorded-step", "accelerate")
_WRAPPERS = ("execution", TORCH_ALONE)


def is_kept_for(later: Rung, rung: Rung, device: str) -> bool:
    """Whether time is kept for `later`, which gains more, rather than spent on `rung`. On a GPU time is kept
    first for a recorded step, then for a compiled one, then for the other largest gains. The rows of a named
    set are equally important, and so is the baseline that others are compared with."""
    if is_set_aside_first(later):
        return rung.slot not in ("baseline", COMBINATION)
    if rung.slot in ("baseline", COMBINATION, *_WRAPPERS) or not _gains_much(later, device):
        return False
    if device == "cpu":
        return _place(later) < _place(rung)
    return later.slot in _WRAPPERS or not _gains_much(rung, device)


def _place(rung: Rung) -> int:
    """Its place among the largest gains on a CPU. Torch alone counts as a compiler there."""
    known = LARGEST_GAINS["cpu"]
    name = "inductor" if rung.slot == TORCH_ALONE else rung.name
    return known.index(name) if name in known else len(known)


def _gains_much(rung: Rung, device: str) -> bool:
    kind = device.partition(":")[0]
    of_a_model = LARGEST_GAINS_OF_A_MODEL if kind == "cuda" else ()
    return rung.slot == TORCH_ALONE or rung.name in (*LARGEST_GAINS[kind], *of_a_model)


def is_set_aside_first(later: Rung) -> bool:
    """Whether time is set aside for it before all other rungs that are still to come."""
    return later.name == LARGEST_GAINS_OF_A_MODEL[0]


def by_expected_gain(rungs: Sequence[Rung], device: str) -> list[Rung]:
    """`rungs` in the order in which to climb them on a CPU: the largest gains first, but what wraps all
    others (execution) last. On a GPU, where time reaches for all of them, slot by slot as they are."""
    if device != "cpu":
        return list(rungs)
    return sorted(rungs, key=lambda rung: (rung.slot == "execution", _place(rung)))
