"""What one rung runs: a training step, told as a handful of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from fuseline.errors import unknown_name
from fuseline.models.gpt_config import PRESETS, GPTConfig, preset
from fuseline.records.record import Scalar

# Batch and sequence length a preset is run at unless told otherwise: gpt2's and shakespeare's are those of
# nanoGPT and of the anchors; tiny's step takes about 0.1 s on two cores.
SHAPES: dict[str, tuple[int, int]] = {
    "tiny": (8, 128),
    "shakespeare": (64, 256),
    "gpt2": (16, 1024),
    "gpt2-medium": (8, 1024),
    "gpt2-large": (4, 1024),
    "gpt2-xl": (2, 1024),
}


class Spec(Protocol):
    """A training step as a climb sees it, whatever the model: `RunSpec` of a GPT, `ModelSpec` of a model of
    the user's own. Equal specs run the same step."""

    @property
    def batch(self) -> int: ...
    @property
    def preset(self) -> str: ...
    @property
    def execution(self) -> str: ...
    @property
    def kernels(self) -> str: ...
    @property
    def is_compiled(self) -> bool: ...
    def with_(self, change: Mapping[str, Any]) -> Self: ...
    def same_work(self, other: Any) -> bool: ...
    def case(self) -> dict[str, Scalar]: ...
    def __str__(self) -> str: ...


@dataclass(frozen=True)
class RunSpec:
    """A training step of a GPT. The defaults are plain PyTorch, with nothing done to make it fast.

    `seqlen` is the block size too. `optimizer` is `unfused` (torch's own default) or `fused`; `kernels` says
    who computes LayerNorm, `torch` or `fuseline`; `attention` is a backend of `fuseline.ops.attention`,
    `execution` one of `fuseline.training.execution`; `loss` is as in the GPT's config.
    """

    preset: str
    batch: int
    seqlen: int
    vocab_size: int
    dropout: float = 0.0
    bias: bool = False
    precision: str = "fp32"
    attention: str = "naive"
    vocab_multiple: int = 1
    optimizer: str = "unfused"
    kernels: str = "torch"
    execution: str = "eager"
    loss: str = "float32"

    def with_(self, change: Mapping[str, Any]) -> RunSpec:
        return replace(self, **change)

    @property
    def config(self) -> GPTConfig:
        return preset(
            self.preset,
            block_size=self.seqlen,
            vocab_size=self.vocab_size,
            vocab_multiple=self.vocab_multiple,
            dropout=self.dropout,
            bias=self.bias,
            attention=self.attention,
            norm=self.kernels,
            loss=self.loss,
        )

    @property
    def is_captured(self) -> bool:
        """Whether the optimizer's step is recorded in a CUDA graph, too."""
        return self.execution in ("graph", "inductor-graph")

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile is at work."""
        return self.execution not in ("eager", "graph")

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.seqlen

    def __str__(self) -> str:
        return f"a {self.preset} GPT, {self.batch} x {self.seqlen} tokens a step"

    def same_work(self, other: object) -> bool:
        """Whether both train the same model on batches of the same shape, so that times compare."""
        if not isinstance(other, RunSpec):
            return False
        mine = (self.preset, self.batch, self.seqlen, self.vocab_size, self.dropout, self.bias)
        return mine == (other.preset, other.batch, other.seqlen, other.vocab_size, other.dropout, other.bias)

    def case(self) -> dict[str, Scalar]:
        """The spec under the records' canonical names."""
        return {
            "model": "gpt",
            "preset": self.preset,
            "batch": self.batch,
            "seqlen_q": self.seqlen,
            "dtype": self.precision,
            "backend": self.attention,
            "vocab": self.config.padded_vocab_size,
            "vocab_size": self.vocab_size,
            "vocab_multiple": self.vocab_multiple,
            "optimizer": self.optimizer,
            "kernels": self.kernels,
            "execution": self.execution,
            "loss": self.loss,
            "dropout": self.dropout,
            "bias": self.bias,
        }

    @classmethod
    def of_case(cls, case: Mapping[str, Any]) -> RunSpec:
        """The spec a record was taken under; `KeyError` if the case does not hold one."""
        return cls(
            preset=case["preset"],
            batch=case["batch"],
            seqlen=case["seqlen_q"],
            vocab_size=case["vocab_size"],
            dropout=case["dropout"],
            bias=case["bias"],
            precision=case["dtype"],
            attention=case["backend"],
            vocab_multiple=case["vocab_multiple"],
            optimizer=case["optimizer"],
            kernels=case["kernels"],
            execution=case["execution"],
            loss=case["loss"],
        )


def baseline(
    preset_name: str, *, batch: int | None = None, seqlen: int | None = None, vocab_size: int | None = None
) -> RunSpec:
    """Plain PyTorch at the preset's usual batch and sequence length, or at those given."""
    if preset_name not in PRESETS:
        raise unknown_name("preset", preset_name, PRESETS)
    usual_batch, usual_seqlen = SHAPES[preset_name]
    return RunSpec(
        preset=preset_name,
        batch=batch or usual_batch,
        seqlen=seqlen or usual_seqlen,
        vocab_size=vocab_size or PRESETS[preset_name].vocab_size,
    )
