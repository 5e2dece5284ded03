"""A user's own operators: C++ and CUDA compiled, cached and loaded, as `torch.ops.<name>`.

What `torch.utils.cpp_extension.load_inline` does, with our cache, locks and search for compilers. The C++
registers its operators with TORCH_LIBRARY, so one library serves every Python; CUDA is compiled without
torch's headers, in seconds, and called from the C++ through functions that take pointers and a stream.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fuseline.errors import InputError
from fuseline.native import recipes
from fuseline.native.build import Recipe, Unit, build
from fuseline.native.cache import cache_dir, content_key, make_once
from fuseline.native.compilers import Compiler, Search, find_cxx, find_nvcc, toolkit_library_flags

HEADERS = ("*.h", "*.hpp", "*.cuh", "*.inl")
TAKEN = ("aten", "prim", "prims", "quantized", "fuseline", "c10d", "inductor")

_lock = threading.Lock()
_loaded: dict[str, str] = {}


def build_extension(
    name: str,
    *,
    cpp_sources: Sequence[str | Path] = (),
    cuda_sources: Sequence[str | Path] = (),
    cuda_needs_torch: bool = False,
    extra_cflags: Sequence[str] = (),
    extra_cuda_cflags: Sequence[str] = (),
    extra_ldflags: Sequence[str] = (),
    include_dirs: Sequence[Path] = (),
) -> Any:
    """Compile sources, load them, and return `torch.ops.<name>`.

    Args:
        name: an identifier; the sources register their operators with TORCH_LIBRARY(name, m).
        cpp_sources, cuda_sources: a `Path` is a file, a `str` is source text. C++ includes what it needs of
            torch (`<torch/library.h>`; the whole of `<torch/extension.h>` takes half a minute) and, for the
            stream, `<fuseline_extension.h>`. With CUDA sources, C++ sees the macro FUSELINE_WITH_CUDA.
        cuda_needs_torch: compile CUDA with torch's headers too (slow; they want a CUDA build of torch).
        extra_cflags, extra_cuda_cflags, extra_ldflags: more flags for g++, nvcc and the linker.
        include_dirs: folders of headers; those in them and beside the sources are part of the cache's key.

    Raises InputError if a compiler is missing, a source does not compile (with the compiler's output), the
    name cannot be used, or nothing was registered under it. The same call again costs nothing.
    """
    _check_name(name)
    if not cpp_sources and not cuda_sources:
        raise InputError(
            f"build_extension({name!r}) was given no sources; pass cpp_sources, cuda_sources or both."
        )
    cxx = _required(find_cxx(), name)
    nvcc = _required(find_nvcc(), name) if cuda_sources else None
    cpp = [_as_file(source, name, ".cpp") for source in cpp_sources]
    cuda = [_as_file(source, name, ".cu") for source in cuda_sources]
    include = tuple(f"-I{Path(path).resolve()}" for path in (*include_dirs, recipes.INCLUDE))
    depends = _headers([*map(Path, include_dirs), recipes.INCLUDE, *(f.parent for f in (*cpp, *cuda))])
    torch_include = tuple(f"-isystem{path}" for path in recipes.torch_include_paths())
    torch_flags = (*recipes.torch_abi_flags(), *torch_include)

    macros = (f"-DTORCH_EXTENSION_NAME={name}", *(("-DFUSELINE_WITH_CUDA",) if cuda else ()))
    cpp_flags = (
        *recipes.CXX_FLAGS,
        *recipes.openmp_flags(cxx),
        *macros,
        *include,
        *torch_flags,
        *extra_cflags,
    )
    units = [Unit(file, cxx, cpp_flags, depends, recipes.torch_identity(), file.name) for file in cpp]
    if nvcc is not None:
        flags = (*recipes.host_compiler_flags(cxx), *_gencode(), *recipes.NVCC_FLAGS, *macros, *include)
        identity: tuple[str, ...] = (cxx.version,)
        if cuda_needs_torch:
            flags = (*(f for f in flags if not f.startswith("-std=")), "-std=c++20", *torch_flags)
            identity = (cxx.version, *recipes.torch_identity())
        units += [
            Unit(
                file,
                nvcc,
                (*flags, *extra_cuda_cflags),
                depends,
                identity,
                file.name,
                cores=recipes.NVCC_CORES,
            )
            for file in cuda
        ]
    link: tuple[str, ...] = (*recipes.torch_link_flags(), *extra_ldflags)
    if nvcc is not None:
        link = (*recipes.host_compiler_flags(cxx), "--cudart=static", *toolkit_library_flags(nvcc), *link)
    return _load(name, Recipe(f"{name}_extension", tuple(units), nvcc or cxx, link))


def _load(name: str, recipe: Recipe) -> Any:
    key = recipe.key()
    with _lock:
        if _loaded.get(name, key) != key:
            raise InputError(
                f"An extension named {name!r} is loaded in this process from other sources, and operators "
                "are registered once. Choose another name, or start a new process."
            )
        if name not in _loaded:
            path = build(recipe)
            try:
                torch.ops.load_library(str(path))
            except (OSError, RuntimeError) as error:
                raise InputError(
                    f"The extension {name!r} was built but does not load: {error}. "
                    "Check that every function it calls is defined in its sources or named in extra_ldflags."
                ) from error
            _loaded[name] = key
    if not any(op.startswith(f"{name}::") for op in torch._C._dispatch_get_all_op_names()):
        raise InputError(
            f"The sources of extension {name!r} register no operator under that name. "
            f"They need TORCH_LIBRARY({name}, m) {{ m.def(...); }}."
        )
    return getattr(torch.ops, name)


def _check_name(name: str) -> None:
    if not (name.isascii() and name.isidentifier()):
        raise InputError(
            f"{name!r} cannot name an extension: letters, digits and underscores, no digit first."
        )
    if name in TAKEN or hasattr(torch._ops._OpNamespace, name):
        raise InputError(
            f"{name!r} is a namespace of torch's or ours; choose another name for the extension."
        )


def _required(search: Search, name: str) -> Compiler:
    if search.compiler is None:
        raise InputError(f"build_extension({name!r}) cannot compile: {search.reason}. {search.mend}")
    return search.compiler


def _as_file(source: str | Path, name: str, suffix: str) -> Path:
    """The source as a file: text goes to the cache, under a name made of its content."""
    if isinstance(source, Path):
        if not source.is_file():
            raise InputError(
                f"build_extension({name!r}): there is no file {source}. (Source text is passed as str.)"
            )
        return source.resolve()
    path = cache_dir() / "src" / content_key((source,), ()) / f"{name}{suffix}"
    return make_once(path, lambda temporary: _write(temporary, source))


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _headers(folders: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(sorted({file for folder in folders for pattern in HEADERS for file in folder.glob(pattern)}))


def _gencode() -> tuple[str, ...]:
    """Machine code for the GPU here; without one, what our own kernels are built for."""
    if not torch.cuda.is_available():
        return recipes.GENCODE
    major, minor = torch.cuda.get_device_capability()
    return (f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}",)
