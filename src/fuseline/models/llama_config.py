"""What a Llama is made of, as data; free of torch, so that a command line can list presets at once.

Mistral, Qwen2 and Qwen3 are Llamas with a window, with biases, or with norms of queries and keys.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fuseline.errors import InputError, unknown_name

ROPE_KINDS = ("default", "linear", "llama3")
KERNELS = ("fuseline", "torch")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those first trained on.

    `linear` divides all by `factor`. `llama3` divides those whose wavelength is over `original_length /
    low_factor` positions, keeps those under `original_length / high_factor`, and goes smoothly from one to
    the other between (Llama 3.1).
    """

    kind: str = "default"
    factor: float = 1.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise unknown_name("rotary scaling", self.kind, ROPE_KINDS)
        if not self.factor > 0 or not self.low_factor > 0 or self.original_length < 1:
            raise InputError(f"{self} cannot be: factors and lengths are above 0.")
        if self.kind == "llama3" and not self.high_factor > self.low_factor:
            raise InputError(
                f"rotary scaling has high_factor {self.high_factor}; it must be over low_factor "
                f"{self.low_factor}."
            )


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama and what computes it.

    `num_kv_heads` under `num_heads` is grouped-query attention: heads in a row share keys and values.
    `window`: a position sees so many positions, itself among them, in the layers from `first_windowed_layer`
    on (Mistral, Qwen2). `qkv_bias` is Qwen2's, `qk_norm` (a norm over each head of queries and keys) Qwen3's.
    `tied`: the head is the token embedding. `kernels` says who computes norms, rotary positions, SwiGLU and
    the products of a few rows.

    Raises `InputError` for sizes that cannot be.
    """

    block_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embed_dim: int
    ffn_dim: int
    head_dim: int = 0  # 0: embed_dim / num_heads
    rope_base: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    eps: float = 1e-5
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    first_windowed_layer: int = 0
    tied: bool = False
    kernels: str = "fuseline"

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "vocab_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "embed_dim",
            "ffn_dim",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be 1 or more.")
        if not self.head_dim:
            if self.embed_dim % self.num_heads:
                raise InputError(
                    f"embed_dim {self.embed_dim} cannot be split among {self.num_heads} heads. Use a "
                    "num_heads that divides it, or say head_dim."
                )
            object.__setattr__(self, "head_dim", self.embed_dim // self.num_heads)
        if self.head_dim % 2:
            raise InputError(f"head_dim is {self.head_dim}; rotary positions turn pairs, so it must be even.")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} heads of keys evenly. Use a "
                "num_kv_heads that divides num_heads."
            )
        if self.window is not None and self.window < 1:
            raise InputError(f"window is {self.window}; it must be 1 or more, or None.")
        if self.kernels not in KERNELS:
            raise unknown_name("kernels", self.kernels, KERNELS)

    @property
    def num_weights(self) -> int:
        """Numbers in the matrices and tables of the model, without norms, biases and rotary tables."""
        C, D = self.embed_dim, self.head_dim
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * D * C
        tables = self.vocab_size * C * (1 if self.tied else 2)
        return self.num_layers * (attention + 3 * C * self.ffn_dim) + tables

    def window_of(self, layer: int) -> int | None:
        """Positions that a position of this layer sees at most, itself among them; None for all."""
        return self.window if layer >= self.first_windowed_layer else None


# tiny is for tests and processors; the others are the published shapes.
PRESETS: dict[str, LlamaConfig] = {
    "llama-tiny": LlamaConfig(256, 512, 2, 4, 2, 64, 176),
    "llama-160m": LlamaConfig(2048, 32000, 12, 12, 12, 768, 3072),
    "llama-1b": LlamaConfig(2048, 32000, 16, 32, 8, 2048, 8192, rope_base=500000.0),
    "llama2-7b": LlamaConfig(4096, 32000, 32, 32, 32, 4096, 11008),
    "llama2-13b": LlamaConfig(4096, 32000, 40, 40, 40, 5120, 13824),
    "llama3-8b": LlamaConfig(8192, 128256, 32, 32, 8, 4096, 14336, rope_base=500000.0),
    "llama3.2-1b": LlamaConfig(
        131072,
        128256,
        16,
        32,
        8,
        2048,
        8192,
        rope_base=500000.0,
        rope_scaling=RopeScaling("llama3", 32.0),
        tied=True,
    ),
    "mistral-7b": LlamaConfig(32768, 32000, 32, 32, 8, 4096, 14336, window=4096),
    "qwen2.5-0.5b": LlamaConfig(
        32768, 151936, 24, 14, 2, 896, 4864, rope_base=1e6, eps=1e-6, qkv_bias=True, tied=True
    ),
    "qwen3-0.6b": LlamaConfig(
        40960,
        151936,
        28,
        16,
        8,
        1024,
        3072,
        head_dim=128,
        rope_base=1e6,
        eps=1e-6,
        qk_norm=True,
        tied=True,
    ),
}


def preset(name: str, **overrides: Any) -> LlamaConfig:
    """The preset of that name, with `overrides` replacing its fields; `InputError` for an unknown name."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    known = [f.name for f in fields(LlamaConfig)]
    for field in overrides:
        if field not in known:
            raise unknown_name("Llama option", field, known)
    return replace(PRESETS[name], **overrides)


def as_dict(config: LlamaConfig) -> dict[str, Any]:
    """The config as plain values, for records."""
    return asdict(config)
