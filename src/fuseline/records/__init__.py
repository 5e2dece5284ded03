"""How a measurement is kept: one JSON line each, with everything needed to read it later."""

from fuseline.records.environment import Environment, describe
from fuseline.records.record import Record
from fuseline.records.store import append, read, read_same, results_path

__all__ = ["Environment", "Record", "append", "describe", "read", "read_same", "results_path"]
