"""What the machine and the software were when a figure was taken."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from fuseline.version import __version__


@dataclass(frozen=True)
class Environment:
    """The part of a record that describes the machine. Clocks are "SM/memory MHz", power is in watts."""

    device: str
    clocks: str | None
    power_w: float | None
    torch: str
    cuda: str | None
    fuseline: str
    commit: str | None


def describe(device: torch.device | str) -> Environment:
    """Read the environment now. Clocks and power are those of this moment: call it right after the work.

    `FUSELINE_COMMIT` names the commit where the source tree is a copy without its history.
    """
    device = torch.device(device)
    clocks, power_w = _clocks_and_power(device) if device.type == "cuda" else (None, None)
    return Environment(
        device=device_name(device),
        clocks=clocks,
        power_w=power_w,
        torch=torch.__version__,
        cuda=torch.version.cuda if device.type == "cuda" else None,
        fuseline=__version__,
        commit=os.environ.get("FUSELINE_COMMIT") or _commit(),
    )


def device_name(device: torch.device | str) -> str:
    """The GPU's own name, or the processor's with the number of threads torch uses."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor_name()} ({torch.get_num_threads()} threads)"


@functools.cache
def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the platform module answers below
    return platform.processor() or platform.machine()


@functools.cache
def _commit() -> str | None:
    """The commit of the source tree this package is run from; None outside of one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _clocks_and_power(device: torch.device) -> tuple[str | None, float | None]:
    try:
        import pynvml
    except ImportError:
        return None, None
    index = device.index if device.index is not None else torch.cuda.current_device()
    try:
        pynvml.nvmlInit()
        # torch's order of devices can differ from NVML's: the UUID is the same in both.
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        sm = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        memory = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)
        return f"{sm}/{memory} MHz", pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0
    except pynvml.NVMLError:
        return None, None
