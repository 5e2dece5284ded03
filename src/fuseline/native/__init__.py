"""The native core: compilers found, libraries built, cached and loaded. Nothing happens at import."""

from fuseline.native.build import BuildError
from fuseline.native.cache import cache_dir
from fuseline.native.compilers import Compiler, Search, compilers
from fuseline.native.direct_calls import direct
from fuseline.native.extension import build_extension
from fuseline.native.library import (
    LibraryStatus,
    NativeError,
    Status,
    is_strict,
    load,
    ready,
    status,
    unbuilt,
    when_loaded,
)

__all__ = [
    "BuildError",
    "Compiler",
    "LibraryStatus",
    "NativeError",
    "Search",
    "Status",
    "build_extension",
    "cache_dir",
    "compilers",
    "direct",
    "is_strict",
    "load",
    "ready",
    "status",
    "unbuilt",
    "when_loaded",
]
