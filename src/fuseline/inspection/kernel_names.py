"""Names of kernels as people write them: `norm_forward_rows<fp32, bf16, true>` for
`_ZN8fuseline17norm_...`."""

from __future__ import annotations

import ctypes
import functools
import re

_TYPES = {
    "__nv_bfloat16": "bf16",
    "__half": "fp16",
    "float": "fp32",
    "double": "fp64",
    "signed char": "int8",
    "__nv_fp8_e4m3": "e4m3",
    "__nv_fp8_e5m2": "e5m2",
}
_TYPE = re.compile("|".join(rf"\b{name}\b" for name in _TYPES))
_CAST = re.compile(r"\((?:unsigned )?(?:int|long|short|char|bool)\)(?=-?\d)")
_ENUM = re.compile(r"\((\w+)\)(?=-?\d)")
_SCOPE = re.compile(r"\b\w+::|\(anonymous namespace\)::")


def readable(mangled: str) -> str:
    """The kernel with its template's arguments; without scopes, result and parameters."""
    name = _without_parameters(demangle(mangled))
    name = _SCOPE.sub("", name.removeprefix("void "))
    name = _ENUM.sub(r"\1=", _CAST.sub("", name))
    name = _TYPE.sub(lambda found: _TYPES[found[0]], name)
    return name.replace("> >", ">>").replace("> >", ">>").strip()


def family(name: str) -> str:
    """Of a readable name, the template."""
    return name.partition("<")[0]


def demangle(mangled: str) -> str:
    """A C++ name as it was declared; what is no mangled name stays."""
    library = _standard_library()
    if library is None or not mangled.startswith("_Z"):
        return mangled
    status = ctypes.c_int(0)
    text = library.__cxa_demangle(mangled.encode(), None, None, ctypes.byref(status))
    if status.value != 0 or not text:
        return mangled
    try:
        return str(ctypes.cast(text, ctypes.c_char_p).value.decode())  # type: ignore[union-attr]
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(text))


@functools.cache
def _standard_library() -> ctypes.CDLL | None:
    """The C++ runtime, which torch has loaded; None where there is none by that name."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    library.__cxa_demangle.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3]
    return library


def _without_parameters(name: str) -> str:
    """Cut at the parenthesis that opens the parameters: the first outside `<...>` that opens no namespace."""
    depth = 0
    for at, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0 and not name.startswith("(anonymous namespace)", at):
            return name[:at]
    return name
