"""What `cu_seqlens` must hold, checked before a kernel reads rows by it.

On a CPU the check reads the numbers. On a GPU nothing waits for the device: the check runs there, and a
failure ends the work that stands behind it with an assertion whose message torch prints. What was checked
once, and was not written since, is not checked again: a model's layers share it.
"""

from __future__ import annotations

import itertools

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fuseline.errors import InputError

_Checked = tuple[int, int, int]  # version of the tensor, rows, the longest sequence
_checked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def check_starts(name: str, starts: torch.Tensor, rows: int, longest: int) -> None:
    """Raise InputError unless `starts` rises from 0 to `rows`, in steps of at most `longest`; on a GPU and in
    a trace, have the device assert it."""
    if starts.device.type == "meta":
        return
    if torch.compiler.is_compiling():
        torch._assert_async(_fits(starts, rows, longest), _rule(name))
        return
    # Tensors of inference count no versions, and what is captured now may be replayed over other numbers.
    is_known = not starts.is_inference() and not (
        starts.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    )
    key = (starts._version if is_known else 0, rows, longest)
    if is_known and _checked.get(starts) == key:
        return
    if starts.device.type == "cpu":
        if not bool(_fits(starts, rows, longest)):
            raise InputError(_complaint(name, starts, rows, longest))
    else:
        torch._assert_async(_fits(starts, rows, longest), _rule(name))
    if is_known:
        _checked[starts] = key


def _fits(starts: torch.Tensor, rows: int, longest: int) -> torch.Tensor:
    lengths = starts.diff()
    ends = (starts[0] == 0) & (starts[-1] == rows)
    return ends & ((lengths >= 0) & (lengths <= longest)).all()


def _rule(name: str) -> str:
    return (
        f"attention: {name} does not rise from 0 to the number of rows, or one sequence is longer than its "
        "max_seqlen"
    )


def _complaint(name: str, starts: torch.Tensor, rows: int, longest: int) -> str:
    held = starts.tolist()
    if held[0] != 0 or held[-1] != rows:
        wrong = f"goes from {held[0]} to {held[-1]}. It goes from 0 to the number of rows, {rows}."
    elif any(later < earlier for earlier, later in itertools.pairwise(held)):
        at = next(i for i in range(1, len(held)) if held[i] < held[i - 1])
        wrong = f"falls from {held[at - 1]} to {held[at]}. It holds the first row of each sequence, in order."
    else:
        found = max(later - earlier for earlier, later in itertools.pairwise(held))
        wrong = (
            f"holds a sequence of {found} rows and {name.replace('cu_seqlens', 'max_seqlen')} is {longest}."
        )
    return f"attention: {name} {wrong}"
