"""The GPUs, their driver, and whether it is recent enough for torch and for the toolkit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from fuseline import native
from fuseline.doctor.check import Check
from fuseline.native.compilers import toolkit_version
from fuseline.native.library import OLDEST_CAPABILITY, OLDEST_DRIVER

GROUP = "GPU"
GIB = 2**30


def checks() -> Iterator[Check]:
    known = driver_cuda()
    yield from _devices(known is not None)
    yield _driver(known)
    yield from _nvml()


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA (major, minor) that the driver knows; None without a driver."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def _devices(has_driver: bool) -> Iterator[Check]:
    if not torch.cuda.is_available():
        yield _no_device(has_driver)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = (device.major, device.minor)
        found = f"{device.name}, compute {device.major}.{device.minor}, {device.total_memory / GIB:.0f} GiB"
        if capability < OLDEST_CAPABILITY:
            need = ".".join(map(str, OLDEST_CAPABILITY))
            mend = f"Fuseline's kernels need compute {need} (A100) or later; torch's own are used here."
            yield Check(GROUP, f"cuda:{index}", "warn", found, mend)
        else:
            yield Check(GROUP, f"cuda:{index}", "ok", found)


def _no_device(has_driver: bool) -> Check:
    if not has_driver:
        return Check(GROUP, "devices", "absent", "none: everything runs on the CPU", "")
    if torch.version.cuda is None:
        found = f"there is a driver, but torch {torch.__version__} is built without CUDA"
        mend = "Install a CUDA build of torch: pytorch.org/get-started/locally names the command."
        return Check(GROUP, "devices", "warn", found, mend)
    found = "there is a driver, but torch sees no device"
    return Check(GROUP, "devices", "warn", found, "nvidia-smi, and look at $CUDA_VISIBLE_DEVICES")


def _driver(known: tuple[int, int] | None) -> Check:
    """Against the CUDA of torch and of nvcc: within a major version a driver serves all minor ones."""
    if known is None:
        return Check(GROUP, "driver", "absent", "no NVIDIA driver")
    found = f"knows CUDA {known[0]}.{known[1]}"
    wanted = {}
    if torch.version.cuda:
        wanted["torch"] = int(torch.version.cuda.split(".")[0])
    nvcc = native.compilers()["nvcc"].compiler
    if nvcc is not None:
        wanted["nvcc"] = toolkit_version(nvcc)[0]
    behind = {who: major for who, major in wanted.items() if major > known[0]}
    if behind:
        newest = max(behind.values())
        told = " and ".join(f"{who} is CUDA {major}" for who, major in behind.items())
        mend = (
            f"Update the driver to {OLDEST_DRIVER.get(newest, 'a later one')} or later, or use torch and a "
            f"toolkit of CUDA {known[0]}."
        )
        return Check(GROUP, "driver", "bad" if "torch" in behind else "warn", f"{found}, but {told}", mend)
    return Check(GROUP, "driver", "ok", ", ".join([found, *(f"{who} is {m}.x" for who, m in wanted.items())]))


def _nvml() -> Iterator[Check]:
    """Only looked at where there is a GPU: without it records hold no clocks and no power."""
    if not torch.cuda.is_available():
        return
    mend = "pip install nvidia-ml-py"
    try:
        import pynvml
    except ImportError:
        yield Check(GROUP, "clocks and power", "warn", "cannot be read: nvidia-ml-py is not installed", mend)
        return
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        yield Check(GROUP, "clocks and power", "warn", f"cannot be read: {error}", "nvidia-smi says more")
        return
    yield Check(GROUP, "clocks and power", "ok", f"read through NVML, driver {version}")
