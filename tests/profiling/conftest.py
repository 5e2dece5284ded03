"""A step on a GPU as torch's profiler exports it, made by hand: ops, launches, kernels that overlap, gaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Events = list[dict[str, Any]]


class GpuTrace:
    """Writes events. Times are microseconds from the step's begin; `at` shifts all that is written after."""

    def __init__(self) -> None:
        self.events: Events = []
        self.at = 1000.0
        self._id = 0

    def op(
        self,
        name: str,
        begin: float,
        end: float,
        dims: list[Any] | None = None,
        types: list[str] | None = None,
        *,
        thread: int = 1,
        sequence: int | None = None,
        concrete: list[str] | None = None,
    ) -> int:
        self._id += 1
        args: dict[str, Any] = {"External id": self._id}
        if sequence is not None:
            args["Sequence number"] = sequence
        if dims is not None:
            kinds = types or ["c10::BFloat16"] * len(dims)
            args |= {"Input Dims": dims, "Input type": kinds, "Input Strides": [_strides(d) for d in dims]}
            args["Concrete Inputs"] = concrete or [""] * len(dims)
        self._add("cpu_op", name, begin, end, args, thread)
        return self._id

    def range(self, name: str, begin: float, end: float, thread: int = 1) -> None:
        self._add("user_annotation", name, begin, end, {}, thread)

    def kernel(
        self, name: str, begin: float, end: float, *, launched: float | None = None, by: int | None = None
    ) -> None:
        """A kernel, and the call of the runtime that launched it for the op numbered `by`."""
        self._id += 1
        correlation = self._id
        if launched is not None:
            args: dict[str, Any] = {"correlation": correlation}
            if by is not None:
                args["External id"] = by
            self._add("cuda_runtime", "cudaLaunchKernel", launched, launched + 3, args, 1)
        kernel_args: dict[str, Any] = {"correlation": correlation, "stream": 7, "device": 0}
        if by is not None:
            kernel_args["External id"] = by
        self._add("kernel", name, begin, end, kernel_args, 7)

    def memory(self, at: float, size: int, address: int, total: int, thread: int = 1) -> None:
        args = {"Bytes": size, "Addr": address, "Total Allocated": total, "Device Type": 1, "Device Id": 0}
        event = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": self.at + at, "tid": thread}
        self.events.append({**event, "args": args})

    def _add(self, cat: str, name: str, begin: float, end: float, args: dict[str, Any], thread: int) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "ts": self.at + begin, "dur": end - begin}
        self.events.append({**event, "tid": thread, "args": args})


def _strides(dims: list[int]) -> list[int]:
    strides, size = [], 1
    for dim in reversed(dims):
        strides.append(size)
        size *= dim
    return strides[::-1]


@pytest.fixture
def gpu_trace() -> GpuTrace:
    return GpuTrace()


@pytest.fixture
def one_step() -> Callable[[GpuTrace], None]:
    """Writes a step: a product, two kernels of one norm that overlap, and after a gap a cast."""

    def write(trace: GpuTrace) -> None:
        mm = trace.op("aten::mm", 10, 30, [[1024, 512], [512, 2048]], sequence=3)
        norm = trace.op("aten::native_layer_norm_backward", 32, 60, [[64, 64], [64, 64]], ["float", "float"])
        cast = trace.op("aten::copy_.default", 190, 220, [[256, 256], [256, 256], []],
                        ["c10::BFloat16", "float", "Scalar"], concrete=["", "", "False"])  # fmt: skip
        trace.kernel("nvjet_sm90_tst_192x192", 50, 90, launched=20, by=mm)
        trace.kernel("fuseline::norm_backward_ring", 92, 142, launched=40, by=norm)
        trace.kernel("fuseline::norm_add_partials", 100, 150, launched=45, by=norm)
        trace.kernel("void at::elementwise_kernel<direct_copy_kernel_cuda>", 210, 215, launched=200, by=cast)

    return write
