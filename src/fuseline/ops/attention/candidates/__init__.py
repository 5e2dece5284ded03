"""The candidates, one file each. A new one is a file with a `CANDIDATE`, and its line here."""

from fuseline.ops.attention.candidate import Candidate
from fuseline.ops.attention.candidates import (
    borrowed,
    cudnn,
    efficient,
    fa2,
    fa4,
    flash,
    flex,
    formula,
    fuseline,
    naive,
    sdpa,
)

CANDIDATES: dict[str, Candidate] = {
    candidate.name: candidate
    for candidate in (
        naive.NAIVE,
        naive.NAIVE_FUSED,
        naive.PLAIN,
        formula.CANDIDATE,
        efficient.CANDIDATE,
        flash.CANDIDATE,
        cudnn.CANDIDATE,
        flex.CANDIDATE,
        fa2.CANDIDATE,
        fa4.CANDIDATE,
        fuseline.CANDIDATE,
        *borrowed.CANDIDATES,
        sdpa.CANDIDATE,
    )
}

__all__ = ["CANDIDATES"]
