"""What the schemas of training runs share: a field with its help, bounds, and what may change over a resume.

Free of torch, so that a command line's help answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field, fields, replace
from typing import Any, TypeVar

from fuseline.errors import InputError, unknown_name

Config = TypeVar("Config", bound=Any)
OPTIMIZER_STATES = ("fp32", "bf16", "8bit")
LARGEST_SEED = 2**63 - 1


def described(default: Any, says: str) -> Any:
    """A dataclass field whose help stands in its metadata."""
    return field(default=default, metadata={"help": says})


def check_bounds(
    config: Any,
    *,
    least: Mapping[str, int],
    positive: Iterable[str],
    shares: Iterable[str],
    not_negative: Iterable[str],
) -> None:
    """`InputError` for the first field out of its bounds: at `least` so much, `positive` (or None), a share
    in 0..1 without the 1, or not negative."""
    for name, bound in least.items():
        if not getattr(config, name) >= bound:
            raise InputError(f"{name} is {getattr(config, name)}; it must be {bound} or more.")
    for name in positive:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{name} is {value}; it must be a number above 0.")
    for name in shares:
        if not 0 <= getattr(config, name) < 1:
            raise InputError(f"{name} is {getattr(config, name)}; it must lie in 0..1, without the 1.")
    for name in not_negative:
        if not 0 <= getattr(config, name) < math.inf:
            raise InputError(f"{name} is {getattr(config, name)}; it must be a number, and not negative.")


def check_seed(seed: int) -> None:
    """`InputError` for what no generator of random numbers takes."""
    if not 0 <= seed <= LARGEST_SEED:
        raise InputError(f"seed is {seed}; it is a whole number from 0 to 2**63 - 1.")


def check_optimizer_state(state: str, precision: str) -> None:
    """`InputError` for a state that AdamW does not have, or not in that precision."""
    if state not in OPTIMIZER_STATES:
        raise unknown_name("optimizer state", state, OPTIMIZER_STATES)
    if state != "fp32" and precision == "fp16":
        raise InputError(
            f"optimizer_state is {state!r} and precision fp16, whose gradient scaler needs torch's fused "
            "AdamW to skip steps that overflowed. Take precision bf16, or optimizer_state fp32."
        )


def when_validated(eval_interval: int, eval_seconds: float | None) -> str:
    """When a run validates, in words."""
    times = [f"every {eval_interval:,} steps"] if eval_interval else []
    if eval_seconds is not None:
        times.append(f"after {eval_seconds:g} s of training without one")
    return ", and ".join([*times, "at the end"])


def changed(config: Config, overrides: Mapping[str, Any]) -> Config:
    """`config` with some fields replaced; `InputError` for a field there is not."""
    known = [f.name for f in fields(config)]
    for name in overrides:
        if name not in known:
            raise unknown_name("training option", name, known)
    return replace(config, **overrides)


def continued(saved: Config, overrides: Mapping[str, Any], *, free: frozenset[str], instead: str) -> Config:
    """The config of a resumed run, with `overrides` where they leave the weights' course alone: in
    fields that are `free`, or where they say what the run had.

    Raises:
        InputError: an override would make this another run; `instead` says what to do then.
    """
    for name, value in overrides.items():
        if name not in free and value != getattr(saved, name, value):
            raise InputError(
                f"This run was begun with {name}={getattr(saved, name)!r}, and resuming cannot make it "
                f"{value!r}. Leave the option out, or {instead}."
            )
    return changed(saved, overrides)
