"""What a GPT is made of, as data; free of torch, so that a command line can list presets at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fuseline.errors import InputError, unknown_name

ACTIVATIONS = ("gelu", "gelu_tanh")
NORMS = ("torch", "fuseline")
MOST_HEADS = 1024  # that a suggestion names
LOSSES = ("float32", "logits", "fuseline", "fuseline-linear")


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT and what computes it.

    `vocab_multiple` pads the rows of the embedding and of the head to its next multiple: matrix products like
    sizes divisible by 64. The padding is never sampled and never learned, and the loss does not see it.
    `attention` names the backend of `fuseline.ops.attention` ("pick": the fastest known), `norm` who computes
    LayerNorm. OpenAI's GPT-2 weights want `activation="gelu_tanh"`; nanoGPT trains with the exact `gelu`.

    `loss` says how the cross-entropy is computed while training. "float32" is torch's, on widened logits.
    "logits" is torch's in the dtype of the logits, which under autocast to 16 bits is what nanoGPT's eager
    step does: the largest tensor of the step is never widened, and each log-probability (about 10 at the
    start) is good to 2 or 3 digits. "fuseline" reads the logits once, keeps float32 in registers and writes
    their gradient over them; "fuseline-linear" makes no more logits at a time than a few thousand rows of
    them.

    Raises `InputError` for sizes that cannot be.
    """

    block_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    embed_dim: int
    dropout: float = 0.0
    bias: bool = True
    vocab_multiple: int = 1
    attention: str = "pick"
    norm: str = "torch"
    activation: str = "gelu"
    loss: str = "float32"

    def __post_init__(self) -> None:
        sizes = ("block_size", "vocab_size", "num_layers", "num_heads", "embed_dim", "vocab_multiple")
        for name in sizes:
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be 1 or more.")
        if self.embed_dim % self.num_heads:
            fitting = [n for n in range(1, min(self.embed_dim, MOST_HEADS) + 1) if self.embed_dim % n == 0]
            near = sorted(fitting, key=lambda n: abs(n - self.num_heads))[:3]
            raise InputError(
                f"embed_dim {self.embed_dim} cannot be split among {self.num_heads} heads: each takes an "
                f"equal share. Use a num_heads that divides it: {', '.join(map(str, sorted(near)))}."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"dropout is {self.dropout}; it is a share, from 0 up to but not including 1.")
        if self.activation not in ACTIVATIONS:
            raise unknown_name("activation", self.activation, ACTIVATIONS)
        if self.norm not in NORMS:
            raise unknown_name("norm", self.norm, NORMS)
        if self.loss not in LOSSES:
            raise unknown_name("loss", self.loss, LOSSES)

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values: as many as of queries."""
        return self.num_heads

    @property
    def num_weights(self) -> int:
        """Numbers in the matrices and tables of the model, without padding, norms and biases."""
        C = self.embed_dim
        return 12 * C * C * self.num_layers + (self.vocab_size + self.block_size) * C

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def _gpt2(num_layers: int, num_heads: int, embed_dim: int) -> GPTConfig:
    return GPTConfig(
        block_size=1024, vocab_size=50257, num_layers=num_layers, num_heads=num_heads, embed_dim=embed_dim
    )


# tiny: a step of B=8, T=128 takes about 0.1 s in fp32 on two cores. shakespeare: nanoGPT's
# train_shakespeare_char. gpt2 and up: OpenAI's shapes, dropout 0 as nanoGPT pretrains them.
PRESETS: dict[str, GPTConfig] = {
    "tiny": GPTConfig(block_size=128, vocab_size=1000, num_layers=4, num_heads=6, embed_dim=192),
    "shakespeare": GPTConfig(
        block_size=256, vocab_size=65, num_layers=6, num_heads=6, embed_dim=384, dropout=0.2, bias=False
    ),
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
}


def preset(name: str, **overrides: Any) -> GPTConfig:
    """The preset of that name, with `overrides` replacing its fields; `InputError` for an unknown name."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    known = [f.name for f in fields(GPTConfig)]
    for field in overrides:
        if field not in known:
            raise unknown_name("GPT option", field, known)
    return replace(PRESETS[name], **overrides)


def as_dict(config: GPTConfig) -> dict[str, Any]:
    """The config as plain values, for records and checkpoints; `GPTConfig(**d)` makes it again."""
    return asdict(config)
