"""Device memory and streams by the CUDA driver alone (libcuda.so.1), through ctypes."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Sequence

HANDLE = ctypes.c_void_p
ADDRESS = ctypes.c_uint64


class Driver:
    """The first GPU's primary context: the one that the kernel library, as any CUDA runtime, works in."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise SystemExit(f"There is no CUDA driver here: {error}.") from error
        device, context = ctypes.c_int(), HANDLE()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def stream(self) -> int:
        """A new stream, which waits for nothing but its own work; a cudaStream_t is the same thing."""
        stream = HANDLE()
        non_blocking = 1
        self._call("cuStreamCreate", ctypes.byref(stream), non_blocking)
        assert stream.value is not None
        return stream.value

    def empty(self, count: int) -> int:
        """The address of memory for `count` fp32 values."""
        address = ADDRESS()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * count))
        return address.value

    def to_device(self, values: Sequence[float], stream: int) -> int:
        """The address of a copy of `values` as fp32, made on `stream`."""
        host = array.array("f", values)
        source, size = host.buffer_info()
        address = self.empty(size)
        self._call(
            "cuMemcpyHtoDAsync_v2",
            ADDRESS(address),
            HANDLE(source),
            ctypes.c_size_t(4 * size),
            HANDLE(stream),
        )
        self.synchronize(stream)  # before `host` goes
        return address

    def to_host(self, address: int, count: int, stream: int) -> list[float]:
        """`count` fp32 values, after all that was queued on `stream`."""
        host = array.array("f", bytes(4 * count))
        target, _ = host.buffer_info()
        self._call(
            "cuMemcpyDtoHAsync_v2",
            HANDLE(target),
            ADDRESS(address),
            ctypes.c_size_t(4 * count),
            HANDLE(stream),
        )
        self.synchronize(stream)
        return host.tolist()

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", HANDLE(stream))

    def free(self, *addresses: int) -> None:
        for address in addresses:
            self._call("cuMemFree_v2", ADDRESS(address))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            words = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(words))
            raise SystemExit(f"{name} answered {code}: {(words.value or b'not known').decode()}.")
