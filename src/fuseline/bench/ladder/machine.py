"""What the machine in hand can do, as far as the rungs ask."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from fuseline import native
from fuseline.records.environment import device_name

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """Facts, each with the reason where the answer is no.

    `bf16` names what makes bf16 pay (`tensor cores`, `AMX`, `AVX512-BF16`), None where nothing does.
    `compiler_missing` is why inductor cannot compile for this device, `native_missing` why Fuseline's own
    kernels cannot run here; None where they can.
    """

    device: str
    name: str
    capability: tuple[int, int] | None = None
    memory_gib: float | None = None
    bf16: str | None = None
    fp16: str | None = None
    compiler_missing: str | None = None
    native_missing: str | None = None

    @property
    def is_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def label(self) -> str:
        """How a reason speaks of it."""
        return self.name if self.is_cuda else "a CPU"


def examine(device: str, *, load_native: bool = True) -> Machine:
    """Look at `device`. With `load_native` the native library is loaded, which builds it at first use;
    without, a library that could be built counts as present."""
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        tensor_cores = "tensor cores" if properties.major >= 8 else None
        return Machine(
            device=device,
            name=device_name(device),
            capability=(properties.major, properties.minor),
            memory_gib=properties.total_memory / GIB,
            bf16=tensor_cores,
            fp16="tensor cores" if properties.major >= 7 else None,
            compiler_missing=_triton_missing(),
            native_missing=_native_missing(cuda=True, load=load_native),
        )
    return Machine(
        device=device,
        name=device_name(device),
        bf16=cpu_bf16(),
        compiler_missing=_cpp_missing(),
        native_missing=_native_missing(cuda=False, load=load_native),
    )


def cpu_bf16() -> str | None:
    """The instructions this processor multiplies bf16 matrices with, None if it has none that torch uses."""
    flags = _cpu_flags()
    # torch keeps to what ATEN_CPU_CAPABILITY allows, whatever the processor has.
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX", "AVX2"):
        return None
    for flag, name in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-BF16")):
        if flag in flags:
            return name
    return None


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()  # not Linux: nothing known, and bf16 is left out
    for line in lines:
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def _cpp_missing() -> str | None:
    search = native.compilers()["cxx"]
    return None if search.compiler else f"inductor compiles C++ for a CPU, and {search.reason}"


def _triton_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "inductor writes Triton for a GPU, and the package triton is not installed"
    search = native.compilers()["cxx"]
    return None if search.compiler else f"Triton compiles what launches its kernels, and {search.reason}"


def _native_missing(*, cuda: bool, load: bool) -> str | None:
    """Why Fuseline's kernels are not loaded; without `load`, why they could not be built."""
    roles = ("cxx", "nvcc") if cuda else ("cxx",)
    if not load:
        reasons = [native.compilers()[role].reason for role in roles if not native.compilers()[role].compiler]
        return f"Fuseline's kernels: {'; '.join(reasons)}" if reasons else None
    if native.ready("cuda" if cuda else "cpu"):
        return None
    status = native.status()
    library = status.kernels if cuda and status.torch.loaded else status.torch
    return f"Fuseline's kernels are not loaded: {library.reason}".splitlines()[0]
