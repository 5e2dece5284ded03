"""One place in a model: what it was recognized as, and whether an op runs there now."""

from __future__ import annotations

from dataclasses import dataclass

KEPT, REFUSED, NOT_FASTER, FOUND = "kept", "refused", "not faster", "found"

SLOWER = "slower here"
NOT_CERTAIN = "faster in the median, but the 95% interval of the ratio reaches below 1"


@dataclass(frozen=True)
class Site:
    """A module that computes something that Fuseline may have an op for.

    Attributes:
        path: the module's name in the model; `also` are other names of the same module. A residual_norm has
            the path of the norm, even if another module makes the sum. A rotary has the path of the module
            that rotates queries and keys. ReLU with dropout is an activation, with the path of the module
            before it.
        kind: "layer_norm", "rms_norm", "gated_mlp", "mlp", "activation", "linear",
            "residual_norm", "embedding", "patch_embedding", "rotary", "attention" or "head_loss".
        status: "kept" (Fuseline's op runs there), "refused" (`reason` says why), "not faster" (the op is
            right, but not faster on this device), "found" (nothing was done: in a dry run, or because an op
            replaces the module around it).
        reason: why it is not kept; empty if it is.
        op: the op that takes its place.
        error, original_error: the largest relative errors (of norms, against float64) of the op's output and
            of the original's, over all inputs that were tried.
        time_us, original_time_us: microseconds of one call, with its backward if the model trains; None if
            nothing was timed. Linear layers that read the same tensor are timed together.
    """

    path: str
    kind: str
    status: str
    reason: str = ""
    op: str = ""
    error: float | None = None
    original_error: float | None = None
    time_us: float | None = None
    original_time_us: float | None = None
    also: tuple[str, ...] = ()

    @property
    def gain(self) -> float | None:
        """The original's time divided by the op's; None if nothing was timed."""
        if self.time_us is None or self.original_time_us is None or self.time_us <= 0:
            return None
        return self.original_time_us / self.time_us
