"""What a translation model is made of, as data; free of torch, so that a command line can list presets at
once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fuseline.errors import InputError, unknown_name

ARCHITECTURES = ("decoder-only", "encoder-decoder")
UNFUSED = ("formulas", "torch")


@dataclass(frozen=True)
class TranslationConfig:
    """The shape of a translation model and what computes it. The defaults are the decoder-only model's of
    LightSeq2's teaching (4 layers, width 256, 8 heads, feed-forward 256, 40 tokens).

    `num_layers` counts the decoder's blocks, and as many of the encoder where there is one. `length` is the
    longest sequence: source and target together in a decoder-only model, each of them in an encoder-decoder.
    `norm_first` norms before each branch (pre-norm), else after each sum, as the original Transformer does.
    `tied` shares the token vectors with the head. `pad_id` fills sequences up and is never seen.

    `fused` computes norms, attention, activation, embedding and loss by Fuseline's ops. Without it
    `unfused` says what stands in their place: "formulas", each operator of them a kernel, or "torch", torch's
    own kernels.

    Raises `InputError` for sizes that cannot be.
    """

    vocab_size: int
    architecture: str = "decoder-only"
    num_layers: int = 4
    num_heads: int = 8
    embed_dim: int = 256
    ffn_dim: int = 256
    length: int = 40
    dropout: float = 0.1
    label_smoothing: float = 0.0
    norm_first: bool = True
    tied: bool = False
    pad_id: int = 0
    fused: bool = True
    unfused: str = "formulas"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "num_heads", "embed_dim", "ffn_dim", "length"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be 1 or more.")
        if self.architecture not in ARCHITECTURES:
            raise unknown_name("architecture", self.architecture, ARCHITECTURES)
        if self.unfused not in UNFUSED:
            raise unknown_name("way to compute unfused", self.unfused, UNFUSED)
        if self.embed_dim % self.num_heads:
            raise InputError(
                f"embed_dim {self.embed_dim} cannot be split among {self.num_heads} heads: each takes an "
                "equal share. Use a num_heads that divides it."
            )
        if self.architecture == "encoder-decoder" and self.embed_dim % 2:
            raise InputError(f"embed_dim is {self.embed_dim}; sine positions come in pairs: make it even.")
        for name in ("dropout", "label_smoothing"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(
                    f"{name} is {getattr(self, name)}; it is a share, from 0 up to but not including 1."
                )
        if not 0 <= self.pad_id < self.vocab_size:
            raise InputError(f"pad_id {self.pad_id} does not lie in 0..{self.vocab_size - 1}.")

    @property
    def num_weights(self) -> int:
        """Numbers that the model has at least: of its feed-forward layers and its tokens' vectors."""
        return 2 * self.num_layers * self.embed_dim * self.ffn_dim + self.vocab_size * self.embed_dim

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads


def as_dict(config: TranslationConfig) -> dict[str, Any]:
    """The config as plain values, for records and checkpoints; `TranslationConfig(**d)` makes it again."""
    return asdict(config)
