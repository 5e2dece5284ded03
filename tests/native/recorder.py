"""Launchers linked to a CUDA runtime that only writes launches down (launch_recorder.cpp), on no GPU."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Collection
from pathlib import Path

from fuseline.native.build import Recipe, Unit, build
from fuseline.native.compilers import find_cxx, find_nvcc
from fuseline.native.recipes import kernels_recipe
from fuseline.ops.plans import Gpu, Plan


class Recorder:
    """The launchers' library; `launched` is the first launch of a call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.recorder_take.restype = library.recorder_kernels.restype = ctypes.c_char_p

    def set(self, index: int, gpu: Gpu, most_cluster: int) -> None:
        major = 9 if gpu.warpgroups else 10 if gpu.clusters else 8
        shared = gpu.shared_per_block, gpu.shared_per_processor
        numbers = (index, gpu.processors, *shared, gpu.memory_gbs, int(gpu.clusters), major, most_cluster)
        self.library.recorder_set_gpu((ctypes.c_int * len(numbers))(*numbers))

    def kernels(self) -> set[str]:
        """The mangled names of all kernels that could be launched."""
        return set(self.library.recorder_kernels().decode().split())

    def launched(self, function: str, *arguments: object) -> tuple[str, int, int, int, int]:
        """Mangled name, blocks, threads of a block, blocks of a cluster, bytes of shared memory."""
        assert getattr(self.library, function)(*arguments) == 0
        return self.taken()[0]

    def taken(self) -> list[tuple[str, int, int, int, int]]:
        """The same of all launches since the last question."""
        launches = []
        for line in self.library.recorder_take().decode().splitlines():
            name, *numbers = line.split()
            blocks, across, down, cluster, shared = map(int, numbers)
            launches.append((name, blocks, across * down, cluster, shared))
        return launches


def recorder_of(name: str, sources: Collection[str]) -> Recorder:
    """The launchers of these sources, by their stems."""
    nvcc, cxx = find_nvcc().compiler, find_cxx().compiler
    assert nvcc is not None
    assert cxx is not None
    units = [unit for unit in kernels_recipe(nvcc, cxx, (9,)).units if unit.source.stem in sources]
    assert {unit.source.stem for unit in units} == set(sources)
    source = Path(__file__).with_name("launch_recorder.cpp")
    flags = ("-std=c++17", "-Xcompiler=-fPIC")
    units.append(Unit(source, nvcc, flags, (), (cxx.version,), source.name))
    recipe = Recipe(name, tuple(units), cxx, ("-shared", "-Wl,-Bsymbolic"))
    return Recorder(ctypes.CDLL(str(build(recipe))))


def agree(plan: Plan, most_cluster: int, launched: tuple[str, int, int, int, int]) -> None:
    """The launch is the plan's, or its fallback's on a GPU that grants no larger cluster."""
    if plan.fallback is not None and plan.blocks_per_row > most_cluster:
        plan = plan.fallback
    name, *layout = launched
    assert re.search(rf"\d{plan.kernel}I", name), f"{name} is not {plan}"
    threads = plan.threads_per_row * plan.rows_per_block
    assert layout == [plan.blocks, threads, plan.blocks_per_row, plan.shared_bytes], plan
