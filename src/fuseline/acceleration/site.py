"""One place in a model: what it was recognized as, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

KEPT, REFUSED, NOT_FASTER, FOUND = "kept", "refused", "not faster", "found"


@dataclass(frozen=True)
class Site:
    """A module that computes something that Fuseline may have an op for.

    Attributes:
        path: its name in the model; `also` are other names of the same module. A residual_norm stands at the
            norm, also where the sum is another module's; rotary at the module that turns queries and keys;
            ReLU with the dropout after it, an activation, at the module whose result they are given.
        kind: "layer_norm", "rms_norm", "gated_mlp", "mlp", "activation", "linear",
            "residual_norm", "embedding", "rotary", "attention" or "head_loss".
        status: "kept" (Fuseline's op runs there), "refused" (the reason says why), "not faster" (right, but
            it does not pay on this device), "found" (nothing was done: a dry run, or the module around it was
            taken whole).
        reason: why it is not kept; empty for what is.
        op: what takes its place.
        error, original_error: relative errors against float64 as norms, of the op's output and of the
            original's, the worst of all that was tried.
        time_us, original_time_us: of one call, with its backward where the model trains; None where nothing
            was timed. Linear layers that read one tensor are timed together.
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
        """How many times as fast; None where nothing was timed."""
        if self.time_us is None or self.original_time_us is None or self.time_us <= 0:
            return None
        return self.original_time_us / self.time_us
