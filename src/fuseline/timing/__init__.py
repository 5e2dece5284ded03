"""How a number is taken: clocks, intervals, ceilings and FLOP conventions."""

from fuseline.timing.calls import host_time_us, queue_seconds, time_calls, time_captured
from fuseline.timing.flops import flops_per_token, mfu, peak_flops
from fuseline.timing.hardware import copy_bandwidth_gbs
from fuseline.timing.memory import (
    peak_memory_gib,
    ran_out_of_memory,
    recorded_graphs_gib,
    reset_peak_memory,
    synchronize,
)
from fuseline.timing.statistics import Ratio, Summary, geometric_mean, paired_ratio, summarize
from fuseline.timing.steps import time_steps

__all__ = [
    "Ratio",
    "Summary",
    "copy_bandwidth_gbs",
    "flops_per_token",
    "geometric_mean",
    "host_time_us",
    "mfu",
    "paired_ratio",
    "peak_flops",
    "peak_memory_gib",
    "queue_seconds",
    "ran_out_of_memory",
    "recorded_graphs_gib",
    "reset_peak_memory",
    "summarize",
    "synchronize",
    "time_calls",
    "time_captured",
    "time_steps",
]
