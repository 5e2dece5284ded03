"""Our libraries as recipes: what is compiled, with which flags.

`libfuseline_kernels.so` (nvcc, no torch headers, static CUDA runtime) serves every torch and Python; its
key knows nothing of torch. `libfuseline_torch.so` (C++ only) is built against the torch at hand, and
`libfuseline_direct.so`, which only makes calls from Python quicker, against the Python at hand as well.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Collection
from pathlib import Path

from fuseline.files.includes import included_headers
from fuseline.native.build import Recipe, Unit
from fuseline.native.compilers import Compiler, toolkit_library_flags
from fuseline.native.cores import available_cores
from fuseline.native.grouping import groups

CSRC = Path(__file__).parent.parent / "csrc"
INCLUDE = CSRC / "include"
KERNELS = CSRC / "kernels"
TORCH = CSRC / "torch"
PYTHON = CSRC / "python"

KERNELS_NAME = "fuseline_kernels"
TORCH_NAME = "fuseline_torch"
DIRECT_NAME = "fuseline_direct"

# Machine code for A100 (and its minors) and H100; PTX for what comes after.
GENCODE_OF_MAJOR = {
    8: "-gencode=arch=compute_80,code=sm_80",
    9: "-gencode=arch=compute_90,code=sm_90",
    10: "-gencode=arch=compute_90,code=compute_90",
}
GENCODE = tuple(GENCODE_OF_MAJOR.values())
# Sources named *_sm90a.cu use instructions that only Hopper has; those named *_not_sm90.cu hold kernels in
# whose place Hopper runs these.
HOPPER_GENCODE = ("-gencode=arch=compute_90a,code=sm_90a",)
NOT_HOPPER_GENCODE_OF_MAJOR = {**GENCODE_OF_MAJOR, 9: GENCODE_OF_MAJOR[10]}
NVCC_FLAGS = (
    *("-O3", "-std=c++17", "--threads=2", "--cudart=static", "-Xcompiler=-fPIC,-fvisibility=hidden"),
    # Machine code is packed, not PTX alone: a library takes a quarter of the room. A source's kernels are
    # unpacked when one of them first runs.
    "-Xfatbin=-compress-all",
)
NVCC_CORES = 2  # of one source, where there are several machines to compile it for

CXX_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas")
# The row loops vectorize through `omp simd`, which needs no OpenMP runtime; nobody reads errno or
# floating-point flags, and stores to them would keep the loops scalar. Products and sums are fused only where
# the code says so: a product rounded in one pass and not in the next would not cancel.
ROWS_FLAGS = ("-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
ISA_FLAGS = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ),
}


def kernels_recipe(nvcc: Compiler, cxx: Compiler, majors: Collection[int] = ()) -> Recipe:
    """`libfuseline_kernels.so` from every `.cu` in csrc/kernels, for GPUs of these major compute
    capabilities; for all that the kernels serve where none is named."""
    units = tuple(
        Unit(
            source,
            nvcc,
            (*host_compiler_flags(cxx), *gencode(source, majors), *NVCC_FLAGS, f"-I{KERNELS}"),
            included_headers(source, (KERNELS,)),
            (cxx.version,),
            source.name,
            cores=min(NVCC_CORES, len(gencode(source, majors))),
        )
        for source in sorted(KERNELS.rglob("*.cu"))
    )
    shared = ("-shared", "-Xlinker=-s", "--cudart=static")  # -s: a megabyte of local symbols is left out
    link = (*host_compiler_flags(cxx), *shared, *toolkit_library_flags(nvcc))
    return Recipe(KERNELS_NAME, units, nvcc, link)


def gencode(source: Path, majors: Collection[int] = ()) -> tuple[str, ...]:
    """The machines that a `.cu` is compiled for."""
    if source.stem.endswith("_sm90a"):
        return HOPPER_GENCODE
    of_major = NOT_HOPPER_GENCODE_OF_MAJOR if source.stem.endswith("_not_sm90") else GENCODE_OF_MAJOR
    wanted = {min(major, max(of_major)) for major in majors or of_major}
    return tuple(dict.fromkeys(of_major[major] for major in sorted(wanted)))


def majors_here() -> tuple[int, ...]:
    """The major compute capabilities of this machine's GPUs: a library that stays here is compiled for no
    other, which takes little more than half of the work. None without a GPU."""
    import torch

    here = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return tuple(sorted({torch.cuda.get_device_capability(device)[0] for device in here}))


def torch_recipe(cxx: Compiler) -> Recipe:
    """`libfuseline_torch.so` from every `.cpp` in csrc/torch, against the torch of this interpreter."""
    include = tuple(f"-isystem{path}" for path in torch_include_paths())
    flags = (
        *CXX_FLAGS,
        *torch_abi_flags(),
        *openmp_flags(cxx),
        *header_flags(cxx),
        f"-I{TORCH}",
        f"-I{KERNELS}",
        f"-I{INCLUDE}",
        *include,
    )
    folders = (TORCH, KERNELS, INCLUDE)
    units = [
        _together(group, cxx, flags, folders)
        for group in groups(sorted(TORCH.glob("*.cpp")), round(available_cores()))
    ]
    for source in sorted((TORCH / "cpu").glob("*_rows.cpp")):
        for isa, isa_flags in instruction_sets().items():
            row_flags = (*CXX_FLAGS, *ROWS_FLAGS, *isa_flags, f"-DFUSELINE_ISA={isa}")
            headers, machine = included_headers(source, ()), (platform.machine(),)
            units.append(Unit(source, cxx, row_flags, headers, machine, f"{source.name} for {isa}"))
    return Recipe(TORCH_NAME, tuple(units), cxx, torch_link_flags())


def _together(
    sources: tuple[Path, ...], cxx: Compiler, flags: tuple[str, ...], folders: tuple[Path, ...]
) -> Unit:
    """One unit of several sources of csrc/torch."""
    headers = {header for source in sources for header in included_headers(source, folders)}
    *before, last = sources
    label = last.name if not before else f"{before[0].name} to {last.name}"
    return Unit(last, cxx, flags, tuple(sorted(headers)), torch_identity(), label, before=tuple(before))


def direct_recipe(cxx: Compiler) -> Recipe | None:
    """`libfuseline_direct.so`, a module of this Python; None where Python's headers are not installed."""
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        return None
    include = tuple(f"-isystem{path}" for path in (*torch_include_paths(), headers))
    flags = (*CXX_FLAGS, *torch_abi_flags(), *header_flags(cxx), *include)
    identity = (*torch_identity(), str(sysconfig.get_config_var("SOABI")))
    source = PYTHON / "direct.cpp"
    unit = Unit(source, cxx, flags, (), identity, source.name)
    return Recipe(DIRECT_NAME, (unit,), cxx, (*torch_link_flags(), "-ltorch_python"))


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """The instruction sets the CPU kernels are compiled for; one of them is chosen at run time."""
    if platform.machine() in ("x86_64", "AMD64"):
        return ISA_FLAGS
    return {"baseline": ()}


def host_compiler_flags(cxx: Compiler) -> tuple[str, ...]:
    """nvcc looks for g++ on PATH by itself; a compiler named in $CXX has to be handed to it."""
    return (f"-ccbin={cxx.path}",) if os.environ.get("CXX") else ()


def openmp_flags(cxx: Compiler) -> tuple[str, ...]:
    """For at::parallel_for. torch's wheels bring GNU's OpenMP runtime, which is found in the process; linking
    another one, or clang's, would start a second pool of threads: clang's builds run rows serially."""
    return () if cxx.is_clang else ("-fopenmp",)


def header_flags(cxx: Compiler) -> tuple[str, ...]:
    """For less time in torch's headers, of which there are 12 MB: they include a part of each other, and
    g++ collects garbage less often (an eighth of its time; memory grows by a twentieth)."""
    collector = ("--param=ggc-min-expand=100", "--param=ggc-min-heapsize=400000")
    return ("-DAT_PER_OPERATOR_HEADERS", *(() if cxx.is_clang else collector))


def torch_include_paths() -> list[str]:
    """The same as in `torch.utils.cpp_extension`, which takes a third of a second to import."""
    include = _torch_folder() / "include"
    return [str(include), str(include / "torch" / "csrc" / "api" / "include")]


def torch_library_path() -> str:
    return str(_torch_folder() / "lib")


def _torch_folder() -> Path:
    import torch

    return Path(torch.__file__).resolve().parent


def torch_abi_flags() -> tuple[str, ...]:
    import torch

    return (f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",)


def torch_identity() -> tuple[str, ...]:
    """What of torch decides an object compiled against its headers."""
    import torch

    return (torch.__version__, str(torch.version.git_version), platform.machine())


def torch_link_flags() -> tuple[str, ...]:
    return ("-shared", f"-L{torch_library_path()}", "-ltorch_cpu", "-lc10", "-ldl", *standard_library_flags())


def standard_library_flags() -> tuple[str, ...]:
    """The C++ library that torch has loaded, before a static one that some compilers would link: two in a
    process do not know each other's locales, and an error message with a number in it ends the process."""
    import torch  # noqa: F401  loads it

    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    found = (Path(line.split(maxsplit=5)[5]) for line in lines if "libstdc++.so" in line)
    return next((("-Xlinker", str(path)) for path in found if path.is_file()), ())  # nvcc takes it so, too
