"""The vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929): an image is a sentence of patches.

The image is cut into square patches, each projected to a vector; a learned class token goes in front, a
learned position embedding is added, a pre-norm transformer encoder follows, and the class token's last state
is classified. `ViTConfig()` is ViT-B/16 at 224 pixels: 86.6M parameters, 197 tokens an image.

Shape suffixes: B batch, T tokens (patches + 1), C embedding, H heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseline.errors import InputError
from fuseline.ops import attention


@dataclass(frozen=True)
class ViTConfig:
    image_size: int = 224
    patch_size: int = 16
    num_layers: int = 12
    num_heads: int = 12
    embed_dim: int = 768
    mlp_dim: int = 3072
    num_classes: int = 1000
    attention: str = "pick"
    """A candidate of `fuseline.picker`, or its pick."""

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise InputError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}: "
                "the image cannot be cut into whole patches. Choose sizes that divide."
            )
        if self.embed_dim % self.num_heads:
            raise InputError(
                f"embed_dim {self.embed_dim} is not a multiple of num_heads {self.num_heads}: "
                "the heads share the width evenly. Choose sizes that divide."
            )

    @property
    def seqlen(self) -> int:
        """Tokens an image: its patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


class SelfAttention(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.backend = config.attention
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim)
        self.proj = nn.Linear(config.embed_dim, config.embed_dim)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        qkv = self.qkv(x_BTC).view(B, T, 3, self.num_heads, C // self.num_heads)
        q_BHTD, k_BHTD, v_BHTD = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y_BHTD = attention(q_BHTD, k_BHTD, v_BHTD, backend=self.backend)
        return self.proj(y_BHTD.transpose(1, 2).reshape(B, T, C))


class EncoderBlock(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.attention = SelfAttention(config)
        self.norm_2 = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.fc_1 = nn.Linear(config.embed_dim, config.mlp_dim)
        self.fc_2 = nn.Linear(config.mlp_dim, config.embed_dim)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm_1(x_BTC))
        return x_BTC + self.fc_2(F.gelu(self.fc_1(self.norm_2(x_BTC))))


class ViT(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(3, config.embed_dim, config.patch_size, stride=config.patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.embed_dim))
        self.positions = nn.Parameter(torch.zeros(1, config.seqlen, config.embed_dim))
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.embed_dim, eps=1e-6)
        self.head = nn.Linear(config.embed_dim, config.num_classes)
        nn.init.normal_(self.class_token, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        self.apply(_initialize)

    def forward(self, images: Tensor, labels_B: Tensor | None = None) -> Tensor:
        """Mean cross-entropy (scalar, fp32) if `labels_B` (int64) is given, else logits [B, num_classes].

        `images` is [B, 3, image_size, image_size], floating point.
        """
        x_BTC = self.patches(images).flatten(2).transpose(1, 2)
        x_BTC = torch.cat([self.class_token.expand(len(images), -1, -1), x_BTC], dim=1) + self.positions
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits = self.head(self.norm(x_BTC[:, 0]))
        return logits if labels_B is None else F.cross_entropy(logits.float(), labels_B)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
