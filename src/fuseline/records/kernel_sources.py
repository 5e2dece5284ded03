"""Which of our kernels stood behind a figure: a short hash of the sources of each family that may have run.

A family is a folder of csrc/kernels with the headers that its sources include; `cpu` is all that runs on a
processor. Comments and spacing do not count, since no kernel changes with them.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from fuseline.files.includes import included_headers

CSRC = Path(__file__).parent.parent / "csrc"
KERNELS = CSRC / "kernels"
TORCH = CSRC / "torch"
HASH_LENGTH = 10
CPU = "cpu"

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAINING = ("activations", "attention", "embedding", "linear", "loss", "norms", "softmax")
_DECODING = ("activations", "attention", "embedding", "linear", "norms", "step")
# The families that an op may use; those of a suite whose cases name no op, or one that is not here.
_OF_OP: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gelu", "geglu", "swiglu", "dropout"), ("activations",)),
    "mlp": ("activations", "linear"),
    **dict.fromkeys(("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"), ("norms",)),
    **dict.fromkeys(("dropout_add_layer_norm", "dropout_add_rms_norm"), ("norms",)),
    "softmax": ("softmax",),
    "cross_entropy": ("loss",),
    "linear_cross_entropy": ("loss",),
    "embedding": ("embedding",),
    **dict.fromkeys(("linear", "quant_linear"), ("linear",)),
    **dict.fromkeys(("rope", "attention", "decode_attention"), ("attention",)),
    "self_attention": ("attention", "layer"),
    **dict.fromkeys(("copy", "empty kernel", "lstm_cell"), ()),
}
_OF_SUITE: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "linear": ("linear",),
    **dict.fromkeys(("decode", "quality"), _DECODING),
    **dict.fromkeys(("acceleration", "ladder", "step", "translation"), _TRAINING),
    "profile": tuple(sorted({*_TRAINING, *_DECODING})),
    **dict.fromkeys(("hardware", "compile"), ()),  # torch's kernels, and probes
}


@functools.cache
def families() -> tuple[str, ...]:
    """The folders of csrc/kernels that hold kernels; none where Fuseline came without its sources."""
    return tuple(sorted({source.parent.name for source in KERNELS.glob("*/*.cu")}))


def families_of(
    suite: str, case: Mapping[str, object], peer: str, metric: str, *, on_gpu: bool
) -> tuple[str, ...]:
    """The families whose kernels may have run for a figure: those of its op, else those of its suite. None
    for a peer that runs no kernels of ours; its ratio to ours rests on ours all the same."""
    if not (peer.startswith("fuseline") or peer == "pick" or metric == "paired_speedup"):
        return ()
    found = _by_case(suite, case)
    if found is None:
        found = _OF_OP.get(str(case.get("op")), _OF_SUITE.get(suite, families()))
    return found if on_gpu or not found else (CPU,)


def _by_case(suite: str, case: Mapping[str, object]) -> tuple[str, ...] | None:
    """The families of a rung or row that says itself which kernels are ours; None where none says so."""
    section, kernels = case.get("section"), case.get("kernels")
    if suite == "ladder" and section == "head_gemm":
        return ()
    if suite == "ladder" and section == "stability":
        return ("softmax",) if case.get("variant") == "fused_softmax" else ()
    if suite == "decode" and section == "climb" and case.get("rung") in ("eager", "compiled"):
        return ()
    if suite == "translation" and kernels is not None:
        return _TRAINING if kernels == "fuseline" else ()
    if suite != "ladder" or not {"kernels", "backend", "loss"} <= case.keys():
        return None
    parts = {
        "activations": kernels == "fuseline",
        "attention": case["backend"] in ("fuseline", "pick"),
        "embedding": kernels == "fuseline",
        "linear": kernels == "fuseline",
        "loss": str(case["loss"]).startswith("fuseline"),
        "norms": kernels == "fuseline",
        "softmax": case["backend"] == "naive_fused",
    }
    return tuple(family for family, is_used in parts.items() if is_used)


@functools.cache
def family_hash(family: str) -> str | None:
    """Of the sources of `family` as they are now; None where there are none."""
    sources = sorted(TORCH.rglob("*.cpp") if family == CPU else (KERNELS / family).glob("*.cu"))
    return sources_hash(sources, (TORCH, KERNELS, CSRC / "include")) if sources else None


def sources_hash(sources: list[Path], folders: tuple[Path, ...]) -> str:
    """Of `sources` and all that they include from `folders`, by name, without comments and spacing."""
    read = {file for source in sources for file in (source.resolve(), *included_headers(source, folders))}
    total = hashlib.sha256()
    for file in sorted(read, key=lambda path: (path.name, str(path))):
        text = _COMMENT.sub(" ", file.read_text(encoding="utf-8", errors="replace"))
        total.update(f"{file.name}\n{' '.join(text.split())}\n".encode())
    return total.hexdigest()[:HASH_LENGTH]


def hashes(suite: str, case: Mapping[str, object], peer: str, metric: str, *, on_gpu: bool) -> dict[str, str]:
    """The hashes of `families_of` a figure, by family."""
    found = {family: family_hash(family) for family in families_of(suite, case, peer, metric, on_gpu=on_gpu)}
    return {family: known for family, known in found.items() if known is not None}
