"""Which kernel computes attention, why, and how to choose another (see `fuseline.ops.attention.picker`)."""

from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import Candidate
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.picker import (
    Considered,
    Explanation,
    compiling,
    explain,
    explain_problem,
    forbid,
    tune,
    tuning,
    use,
)
from fuseline.ops.attention.problem import Problem

__all__ = [
    "CANDIDATES",
    "Call",
    "Candidate",
    "Considered",
    "Explanation",
    "Problem",
    "compiling",
    "explain",
    "explain_problem",
    "forbid",
    "tune",
    "tuning",
    "use",
]
