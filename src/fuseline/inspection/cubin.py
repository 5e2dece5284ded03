"""What a kernel's launch may be, read from the ELF file of its machine code.

ptxas writes a section `.nv.info.KERNEL` for each kernel: entries of a format, an attribute, and a value of
one, two or more bytes, as `cuobjdump -elf` prints them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little endian
_SECTIONS_AT = struct.Struct("<Q")
_SECTION_COUNTS = struct.Struct("<HHH")  # size of a header, number of them, which one has the names
_SECTION = struct.Struct("<II8x8xQQ")  # name, type, (flags, address,) offset, size
_ENTRY = struct.Struct("<BBH")
_SIZED = 4  # the format whose value follows, of as many bytes as the entry's last field says
_MAX_THREADS, _REQUIRED_THREADS, _BARRIERS = 0x05, 0x10, 0x4C
_INFO = ".nv.info."


@dataclass(frozen=True)
class Bounds:
    """The most threads a block (`__launch_bounds__`; None where the source names none) and the named barriers
    that a block takes."""

    threads: int | None = None
    barriers: int = 0


def read_bounds(cubin: bytes) -> dict[str, Bounds]:
    """The bounds of every kernel in an ELF file of machine code, by its mangled name.

    Raises `ValueError` for what is no such file.
    """
    if not cubin.startswith(_MAGIC):
        raise ValueError("not a 64-bit ELF file")
    try:
        return {
            name[len(_INFO) :]: _bounds(data) for name, data in _sections(cubin) if name.startswith(_INFO)
        }
    except struct.error as error:
        raise ValueError(f"an ELF file that is cut off ({error})") from error


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    (start,) = _SECTIONS_AT.unpack_from(elf, 0x28)
    size, count, names = _SECTION_COUNTS.unpack_from(elf, 0x3A)
    headers = [_SECTION.unpack_from(elf, start + size * index) for index in range(count)]
    _, _, names_at, names_size = headers[names]
    table = elf[names_at : names_at + names_size]
    for name, _, offset, length in headers:
        yield table[name : table.index(b"\0", name)].decode(), elf[offset : offset + length]


def _bounds(info: bytes) -> Bounds:
    threads: int | None = None
    barriers = 0
    for attribute, value, data in _entries(info):
        if attribute in (_MAX_THREADS, _REQUIRED_THREADS):
            x, y, z = struct.unpack("<III", data)
            threads = x * y * z
        elif attribute == _BARRIERS:
            barriers = value & 0xFF
    return Bounds(threads, barriers)


def _entries(info: bytes) -> Iterator[tuple[int, int, bytes]]:
    at = 0
    while at < len(info):
        form, attribute, value = _ENTRY.unpack_from(info, at)
        at += _ENTRY.size
        size = value if form == _SIZED else 0
        yield attribute, value, info[at : at + size]
        at += size
