"""`fuseline bench decode`: tokens a second of a language model, ours against the ways others take."""

from fuseline.bench.decode.contenders import DEFAULTS, PEERS
from fuseline.bench.decode.problems import DecodeBench, Problem
from fuseline.bench.decode.suite import left, run

__all__ = ["DEFAULTS", "PEERS", "DecodeBench", "Problem", "left", "run"]
