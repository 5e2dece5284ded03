"""What a peer has to say: whether it is here, its version, and how it computes an op."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from fuseline.ops import Op
from fuseline.ops.op import Outputs

# Rotary embedding of whole heads in halves, at positions 0, 1, ...: what everyone has.
WHOLE_HEADS: Mapping[str, Any] = {
    **dict.fromkeys(("cos", "sin", "positions", "dims")),
    "interleaved": False,
    "seq_dim": -2,
}


class UnsupportedError(Exception):
    """This peer does not compute that op, or not with those options. The message says what is missing."""


class Peer(Protocol):
    """An implementation to measure against."""

    @property
    def name(self) -> str: ...

    @property
    def overwrites(self) -> bool:
        """Whether its kernels write into what they are given, inputs or gradients: it then gets copies."""

    @property
    def compiles(self) -> bool:
        """Whether it compiles something for each shape at the first call."""

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot run on `device`, or None if it can."""

    def version(self) -> str:
        """Of the package that computes."""

    def bind(self, op: Op, inputs: Mapping[str, Any]) -> Callable[[], Outputs]:
        """A call that computes `op` on `inputs`, the arguments of `op.reference`, differentiably.

        Raises `UnsupportedError`. Conversions that the peer needs are done here, outside the call.
        """


def why_not_importable(module: str, package: str, device: torch.device) -> str | None:
    """For a peer that is an optional package with GPU kernels only."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"not installed: `pip install {package}` ({error})"
    except Exception as error:  # what stands below it may not fit this torch or this driver
        return f"does not import: {type(error).__name__}: {error}"
    return None if device.type == "cuda" else "has kernels for GPUs only"


@functools.cache
def package_version(package: str) -> str:
    return importlib.metadata.version(package)


def refuse_options(peer: str, inputs: Mapping[str, Any], **plain: Any) -> None:
    """`UnsupportedError` if an option differs from the plain value given: the peer has no such option."""
    for option, value in plain.items():
        if option in inputs and inputs[option] != value:
            raise UnsupportedError(f"{peer} has no {option}")


def norm_eps(inputs: Mapping[str, Any]) -> float:
    """The eps of an RMSNorm: where none is given, that of the dtype, as torch takes it."""
    eps = inputs.get("eps")
    return float(torch.finfo(inputs["x"].dtype).eps if eps is None else eps)
