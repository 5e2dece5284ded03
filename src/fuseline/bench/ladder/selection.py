"""What `--rungs` and `--mode` ask for: names of rungs, slots and combinations made into things to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuseline.bench.ladder.combinations import COMBINATIONS, Combination
from fuseline.bench.ladder.rungs import NO_LEVER, RUNGS, Rung
from fuseline.errors import InputError, unknown_name

MODES = ("cumulative", "alone", "combination")


@dataclass(frozen=True)
class Selection:
    """Rungs to climb (in the order of the slots) and combinations to run."""

    mode: str
    rungs: tuple[Rung, ...]
    combinations: tuple[Combination, ...]
    is_whole: bool = False
    """Nothing was named: all that is for the device is climbed, and torch alone is held beside it."""


def select(
    names: Sequence[str],
    mode: str,
    preset: str,
    device: str = "cuda",
    rungs: Sequence[Rung] = RUNGS,
    combinations: Sequence[Combination] = COMBINATIONS,
) -> Selection:
    """Everything that is for such a device, if no names are given; else the rungs, slots and combinations
    named, of those that there are.

    Raises:
        InputError: an unknown name or mode, or names of rungs where `mode` is `combination`.
    """
    if mode not in MODES:
        raise unknown_name("mode", mode, MODES)
    climbable = tuple(rung for rung in rungs if rung.lever != NO_LEVER)
    if not names:
        if mode == "combination":
            fitting = tuple(c for c in combinations if preset in c.rows or "any" in c.rows)
            return Selection(mode, (), fitting)
        kind = device.partition(":")[0]
        return Selection(mode, tuple(rung for rung in climbable if kind not in rung.named_on), (), True)
    found_rungs: list[Rung] = []
    found_sets: list[Combination] = []
    for name in names:
        combination = next((one for one in combinations if one.name == name), None)
        if combination is not None:
            if combination not in found_sets:
                found_sets.append(combination)
            continue
        found = [rung for rung in rungs if name in (rung.name, rung.slot)]
        if not found:
            slots = dict.fromkeys(rung.slot for rung in rungs)
            known = [rung.name for rung in rungs] + list(slots) + [c.name for c in combinations]
            raise unknown_name("rung, slot or combination", name, known)
        found_rungs += found
    if mode == "combination" and found_rungs:
        raise InputError(
            f"{found_rungs[0].name!r} is a rung, and --mode combination runs named sets "
            f"({', '.join(c.name for c in combinations)}). Use --mode cumulative or --mode alone."
        )
    asked = tuple(rung for rung in climbable if rung in found_rungs)
    if found_rungs and not asked:
        raise InputError(
            f"{found_rungs[0].name!r} is where the ladder stands already. Name a rung that changes "
            f"something: {', '.join(rung.name for rung in climbable)}."
        )
    return Selection(mode, asked, tuple(found_sets))
