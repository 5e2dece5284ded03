"""The compiled libraries in this process: found, built if need be, loaded once, and the reason where they
are not.

`ready(device_type)` is what ops ask before each call; the first question loads. Nothing here raises for a
missing tool: ops then run their references, which is said once on stderr, with the reason and what mends
it. `FUSELINE_STRICT=1` makes that an error, `FUSELINE_NATIVE=0` asks for it.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fuseline.errors import InputError
from fuseline.native.build import Recipe, build
from fuseline.native.compilers import Compiler, Search, compilers, find_cxx, find_nvcc, toolkit_version
from fuseline.native.direct_calls import direct
from fuseline.native.progress import say
from fuseline.native.recipes import (
    KERNELS_NAME,
    TORCH_NAME,
    direct_recipe,
    kernels_recipe,
    majors_here,
    torch_recipe,
)
from fuseline.native.seals import is_whole

PREBUILT = Path(__file__).parent / "prebuilt"
MANIFEST = "manifest.json"
OLDEST_CAPABILITY = (8, 0)
# CUDA's table of minor version compatibility: the first driver of a toolkit's major version.
OLDEST_DRIVER = {12: "525", 13: "580"}


class NativeError(RuntimeError):
    """A fallback, under FUSELINE_STRICT=1."""


def is_strict() -> bool:
    """Whether FUSELINE_STRICT makes a fallback an error."""
    return os.environ.get("FUSELINE_STRICT", "0") not in ("", "0")


_completions: list[Callable[[], None]] = []


def when_loaded(complete: Callable[[], None]) -> Callable[[], None]:
    """Have `complete` called when `torch.ops.fuseline` is loaded: it adds what is in Python."""
    _completions.append(complete)
    if _loader.status(TORCH_NAME).loaded:
        complete()
    return complete


@dataclass(frozen=True)
class LibraryStatus:
    """One library: loaded and from where, or why not and what would mend it."""

    name: str
    loaded: bool = False
    path: Path | None = None
    reason: str = "nothing has asked for it yet"
    mend: str = ""


@dataclass(frozen=True)
class Status:
    """What stands of the native core in this process, and the compilers on this machine."""

    torch: LibraryStatus
    kernels: LibraryStatus
    compilers: dict[str, Search]


class _UnavailableError(Exception):
    """Why a library is not loaded; becomes its status."""

    def __init__(self, reason: str, mend: str = "", path: Path | None = None) -> None:
        super().__init__(reason)
        self.mend = mend
        self.path = path


class Loader:
    """Loads each library at most once; the outcome stays. The process has one (`_loader`), tests make
    more."""

    def __init__(
        self,
        prebuilt: Path = PREBUILT,
        cxx: Callable[[], Search] = find_cxx,
        nvcc: Callable[[], Search] = find_nvcc,
    ) -> None:
        self._prebuilt = prebuilt
        self._find = {"cxx": cxx, "nvcc": nvcc}
        self._lock = threading.RLock()
        self._status: dict[str, LibraryStatus] = {}
        self._ready: dict[str, bool] = {}

    def ready(self, device_type: str) -> bool:
        """Whether ops on that type of device run natively. The first call may build."""
        known = self._ready.get(device_type)
        return self._decide(device_type) if known is None else known

    def status(self, name: str) -> LibraryStatus:
        return self._status.get(name, LibraryStatus(name))

    def _decide(self, device_type: str) -> bool:
        with self._lock:
            if device_type not in self._ready:
                wanted = {"cpu": (TORCH_NAME,), "meta": (TORCH_NAME,), "cuda": (TORCH_NAME, KERNELS_NAME)}
                reasons = [] if device_type in wanted else [f"there are no kernels for {device_type}"]
                for name in wanted.get(device_type, ()):
                    status = self.load(name)
                    if not status.loaded:
                        reasons.append(f"lib{name}.so is not loaded: {status.reason} {status.mend}".rstrip())
                if reasons and is_strict():
                    raise NativeError(
                        f"FUSELINE_STRICT is set, and ops on {device_type} would run their references: "
                        f"{'; '.join(reasons)}"
                    )
                if reasons and os.environ.get("FUSELINE_NATIVE", "1") != "0":
                    say(
                        f"ops on {device_type} run their PyTorch references, which are slower: "
                        f"{'; '.join(reasons)} (FUSELINE_STRICT=1 makes this an error, FUSELINE_NATIVE=0 "
                        "asks for it.)"
                    )
                self._ready[device_type] = not reasons
            return self._ready[device_type]

    def load(self, name: str) -> LibraryStatus:
        """Load one library if that was not tried yet; the status says what came of it."""
        with self._lock:
            return self._load(name)

    def _load(self, name: str) -> LibraryStatus:
        if name not in self._status:
            open_library = self._open_torch if name == TORCH_NAME else self._open_kernels
            try:
                if os.environ.get("FUSELINE_NATIVE", "1") == "0":
                    raise _UnavailableError("FUSELINE_NATIVE=0 switches it off.", "Unset it.")
                self._status[name] = LibraryStatus(name, loaded=True, path=open_library(), reason="")
            except _UnavailableError as why:
                self._status[name] = replace(
                    LibraryStatus(name), path=why.path, reason=str(why), mend=why.mend
                )
        return self._status[name]

    def _open_torch(self) -> Path:
        path = self._prebuilt_path(TORCH_NAME)
        if path is None:
            path = _built(lambda: _build_torch(self._compiler("cxx")))
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise _UnavailableError(f"it does not load ({error}).", _rebuild(path), path) from error
        for complete in _completions:
            complete()
        return path

    def _open_kernels(self) -> Path:
        torch_status = self._load(TORCH_NAME)
        if not torch_status.loaded or torch_status.path is None:
            raise _UnavailableError(f"lib{TORCH_NAME}.so, which calls it, is not loaded.", torch_status.mend)
        _check_device()
        path = self._prebuilt_path(KERNELS_NAME)
        if path is None:
            nvcc, cxx = self._compiler("nvcc"), self._compiler("cxx")
            _check_driver(toolkit_version(nvcc)[0])
            path = _built(lambda: build(kernels_recipe(nvcc, cxx, majors_here())))
        else:
            _check_driver(int(_manifest(self._prebuilt)["toolkit"].split(".")[0]))
        complaint = _hand_over(torch_status.path, path)
        if complaint:
            raise _UnavailableError(f"it does not load ({complaint}).", _rebuild(path), path)
        return path

    def unbuilt(self, device_types: Sequence[str]) -> list[str]:
        """The libraries for such devices that loading would compile. Compiles and loads nothing."""
        cxx, nvcc = (self._find[role]().compiler for role in ("cxx", "nvcc"))
        recipes: list[Callable[[], Recipe]] = []
        if cxx is not None and self._prebuilt_path(TORCH_NAME) is None:
            recipes.append(lambda: torch_recipe(cxx))
        on_gpu = "cuda" in device_types and self._prebuilt_path(KERNELS_NAME) is None
        if cxx is not None and nvcc is not None and on_gpu:
            recipes.append(lambda: kernels_recipe(nvcc, cxx, majors_here()))
        return [recipe.name for recipe in (make() for make in recipes) if not is_whole(recipe.path())]

    def _compiler(self, role: str) -> Compiler:
        search = self._find[role]()
        if search.compiler is None:
            raise _UnavailableError(f"{search.reason}.", search.mend)
        return search.compiler

    def _prebuilt_path(self, name: str) -> Path | None:
        """The library inside the package, if this is a wheel with one that fits this torch."""
        path = self._prebuilt / f"lib{name}.so"
        if not path.is_file():
            return None
        if not is_whole(path):
            return None  # cut off or exchanged since it was installed: it is not loaded, another is built
        fits = name == KERNELS_NAME or _manifest(self._prebuilt).get("torch") == public_torch_version()
        return path if fits else None


def public_torch_version() -> str:
    """torch's version without its build's suffix: its C++ interface is that of the release."""
    return str(torch.__version__).partition("+")[0]


def _manifest(prebuilt: Path) -> dict[str, str]:
    return dict(json.loads((prebuilt / MANIFEST).read_text()))


def _built(make: Callable[[], Path]) -> Path:
    try:
        return make()
    except InputError as error:
        raise _UnavailableError(str(error), "`fuseline build` tries again.") from error


def _build_torch(cxx: Compiler) -> Path:
    """With the module for quick calls from Python, which is asked for next."""
    direct_calls = direct_recipe(cxx)
    return build(torch_recipe(cxx), beside=() if direct_calls is None else (direct_calls,))


def _rebuild(path: Path) -> str:
    return f"Delete {path} and run `fuseline build`."


def _check_device() -> None:
    if not torch.cuda.is_available():
        raise _UnavailableError(
            "torch sees no CUDA device.", "`fuseline build` compiles it for another machine."
        )
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        raise _UnavailableError(
            f"the GPU has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0 (A100)."
        )


def _check_driver(toolkit_major: int) -> None:
    """Refuse kernels of a CUDA the driver does not know yet: each launch would fail."""
    version = driver_version()
    major, minor = version // 1000, version % 1000 // 10
    if major < toolkit_major:
        raise _UnavailableError(
            f"the driver knows CUDA {major}.{minor}, the toolkit is CUDA {toolkit_major}.",
            f"Update the driver to {OLDEST_DRIVER.get(toolkit_major, 'a later one')} or later, "
            f"or put a toolkit of CUDA {major} first (CUDA_HOME).",
        )


def driver_version() -> int:
    """The newest CUDA the driver knows, as 1000 * major + 10 * minor."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError as error:
        raise _UnavailableError(f"the driver's libcuda.so.1 does not load ({error}).") from error
    return version.value


def _hand_over(torch_path: Path, kernels_path: Path) -> str:
    """Tell libfuseline_torch where the kernels are. Returns its complaint, or nothing."""
    try:
        load = ctypes.CDLL(str(torch_path)).fuseline_torch_load_kernels
    except (OSError, AttributeError) as error:
        return str(error)
    load.argtypes, load.restype = [ctypes.c_char_p], ctypes.c_char_p
    return str(load(str(kernels_path).encode()).decode())


_loader = Loader()
_enabled: set[str] = set()  # types of devices whose ops may be called directly


def ready(device_type: str) -> bool:
    """Whether ops on that type of device ("cpu", "cuda", "meta") run natively. The first call may build.

    Raises `NativeError` under FUSELINE_STRICT=1 where they would not.
    """
    outcome = _loader.ready(device_type)
    if outcome and device_type not in _enabled:
        direct.enable(device_type)
        _enabled.add(device_type)
    return outcome


# torch.compile evaluates it at trace time instead of tracing into the build. This is all that
# torch.compiler.assume_constant_result does, but that imports the compiler, which takes a second.
ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def load() -> bool:
    """Load the native core, building it if need be, kernels included where there is a GPU.

    Returns whether `torch.ops.fuseline` is registered. Raises `NativeError` under FUSELINE_STRICT=1 only.
    """
    ready("cpu")
    if torch.cuda.is_available():
        ready("cuda")
    else:
        _loader.load(KERNELS_NAME)
    return _loader.status(TORCH_NAME).loaded


def unbuilt() -> list[str]:
    """The libraries for this machine's devices that the first use would have to compile."""
    return _loader.unbuilt(["cpu", *(["cuda"] if torch.cuda.is_available() else [])])


def status() -> Status:
    """What is loaded and why not; loads nothing itself."""
    return Status(_loader.status(TORCH_NAME), _loader.status(KERNELS_NAME), compilers())
