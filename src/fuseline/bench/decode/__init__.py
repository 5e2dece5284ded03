"""`fuseline bench decode`: tokens a second of a language model, ours against the ways others take."""

from fuseline.bench.decode.contenders import PEERS
from fuseline.bench.decode.problems import DecodeBench, Problem
from fuseline.bench.decode.suite import left, run

__all__ = ["PEERS", "DecodeBench", "Problem", "left", "run"]
