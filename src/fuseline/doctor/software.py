"""Python, torch, the packages Fuseline needs, and those it can make use of."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

import fuseline
from fuseline.doctor.check import Check

GROUP = "Software"
OPTIONAL_GROUP = "Optional packages"
OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = "2.11"

# Package: what it is for.
OPTIONAL: Mapping[str, str] = {
    "tiktoken": "GPT-2's own tokenizer",
    "transformers": "Hugging Face models to compare with",
    "datasets": "OpenWebText",
    "tensorboard": "training curves",
    "wandb": "training curves",
    "triton": "torch.compile on a GPU",
    "liger-kernel": "a peer in benchmarks",
    "quack-kernels": "a peer in benchmarks",
    "flash-attn": "a peer in benchmarks",
    "flash-attn-4": "a peer in benchmarks",
    "torchao": "a peer in benchmarks",
}


def checks() -> Iterator[Check]:
    """Versions. The last one says `bad` where torch cannot be used at all."""
    yield _python()
    yield Check(GROUP, "fuseline", "ok", f"{fuseline.__version__} in {Path(fuseline.__file__).parent}")
    yield _required()
    yield torch_check()


def optional() -> Iterator[Check]:
    for package, purpose in OPTIONAL.items():
        version = _version(package)
        if version is None:
            mend = f"pip install {package}"
            yield Check(OPTIONAL_GROUP, package, "absent", f"not installed ({purpose})", mend)
        else:
            yield Check(OPTIONAL_GROUP, package, "ok", f"{version} ({purpose})")


def torch_check() -> Check:
    """Whether torch can be imported and is recent enough."""
    mend = f"pip install 'torch>={OLDEST_TORCH}'"
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        return Check(GROUP, "torch", "bad", f"cannot be imported: {error}", mend)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    found = f"{torch.__version__}, built {'for ' if torch.version.cuda else ''}{built}"
    if Version(torch.__version__).release < Version(OLDEST_TORCH).release:
        return Check(GROUP, "torch", "bad", f"{found}: too old, {OLDEST_TORCH} is needed", mend)
    return Check(GROUP, "torch", "ok", found)


def _python() -> Check:
    found = f"{platform.python_version()} in {sys.executable}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return Check(GROUP, "python", "bad", f"{found}: too old", f"Use Python {wanted} or later.")
    return Check(GROUP, "python", "ok", found)


def _required() -> Check:
    """The packages that the installed Fuseline says it needs."""
    try:
        lines = importlib.metadata.requires("fuseline") or []
    except importlib.metadata.PackageNotFoundError:
        found = "Fuseline runs from its source tree without being installed"
        return Check(GROUP, "required packages", "warn", found, "pip install -e .")
    needed = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"extra": ""})]
    wrong = []
    for requirement in needed:
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"'{requirement.name}{requirement.specifier}'")
    if wrong:
        found = f"missing or too old: {', '.join(wrong)}"
        return Check(GROUP, "required packages", "bad", found, f"pip install {' '.join(wrong)}")
    return Check(GROUP, "required packages", "ok", f"all {len(needed)} installed")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
