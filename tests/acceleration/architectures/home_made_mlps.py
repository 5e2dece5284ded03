"""Home-made models around an MLP: odd gates, odd activations, shared, tied, wrapped and parametrized weights.

Most take x [rows, length, 32]; the width is `WIDTH`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 32
INNER = 48


class SwappedGate(nn.Module):
    """The projection called `up_proj` is activated, the one called `gate_proj` is not: names mislead."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * F.silu(self.up_proj(x)))


class PackedBackwards(nn.Module):
    """One projection of both; the second half is activated."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.both(x).chunk(2, dim=-1)
        return self.down(up * F.gelu(gate))


class WrongGates(nn.Module):
    """Two gated MLPs that no table of names gets right."""

    def __init__(self) -> None:
        super().__init__()
        self.swapped = SwappedGate()
        self.packed = PackedBackwards()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed(x + self.swapped(x))


class RoughGELU(nn.Module):
    """A polynomial in place of the error function: within 0.02 of GELU, and not GELU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = (x / 2**0.5).abs().clamp(max=1.769)
        erf = 1 - 0.2888 * (z - 1.769).square() / 0.9037
        return x * 0.5 * (1 + torch.sign(x) * erf)


class RoughMLP(nn.Module):
    """I-BERT's GELU between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, INNER)
        self.act = RoughGELU()
        self.fc2 = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class InPlaceGELU(nn.Module):
    """Writes its result over its input and returns it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(F.gelu(x.clone()))


class InPlaceActivations(nn.Module):
    """What was activated in place is read again: a copy in its place changes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, INNER)
        self.gelu = InPlaceGELU()
        self.relu = nn.ReLU(inplace=True)
        self.fc2 = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc1(x)
        activated = self.gelu(hidden)
        shifted = hidden * 1.5 - 0.1  # reads what `gelu` wrote
        self.relu(shifted)
        return self.fc2(activated + shifted)


class DropoutBetween(nn.Module):
    """An MLP that drops between its linear layers, and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, INNER)
        self.act = nn.GELU(approximate="tanh")
        self.between = nn.Dropout(0.2)
        self.fc2 = nn.Linear(INNER, WIDTH)
        self.after = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.fc2(self.between(self.act(self.fc1(x)))))


class PlainMLP(nn.Module):
    """Linear, exact GELU, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, INNER)
        self.fc2 = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class SharedTwice(nn.Module):
    """One norm and one MLP, each under two names and called twice, with other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = PlainMLP()
        self.again = self.mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mlp(self.norm(x))
        half = x[:, ::2]
        return x + F.pad(self.again(self.norm(half)), (0, 0, 0, x.shape[1] - half.shape[1]))


class TiedThrice(nn.Module):
    """Embedding, a soft re-embedding and the head share one weight [vocabulary, width]."""

    def __init__(self, vocabulary: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.guess = nn.Linear(WIDTH, vocabulary, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.guess.weight = self.embed.weight
        self.head.weight = self.embed.weight

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embed(input_ids) * attention_mask[..., None]
        hidden = hidden + self.guess(hidden).softmax(-1) @ self.guess.weight
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100), logits


class DataDependent(nn.Module):
    """Which MLP runs depends on the values: the evaluation batch takes the other branch."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = PlainMLP()
        self.negative = SwappedGate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.positive(x) if x.mean() > 0 else self.negative(x)


class LoRALinear(nn.Module):
    """A linear layer with a low-rank addition; `weight` shows the base's, as PEFT's wrapper does."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 2 * self.lora_b(self.lora_a(x))


class LoRAMLP(nn.Module):
    """A SwiGLU MLP with two of its three linear layers wrapped, the base frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj: nn.Module = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = LoRALinear(nn.Linear(WIDTH, INNER, bias=False))
        self.down_proj = LoRALinear(nn.Linear(INNER, WIDTH, bias=False))
        for wrapped in (self.up_proj, self.down_proj):
            wrapped.base_layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LoRA(nn.Module):
    """A norm and an MLP with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.mlp = LoRAMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Parametrized(nn.Module):
    """Weight norm, and spectral norm whose buffers move with every training call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = weight_norm(nn.Linear(WIDTH, INNER))
        self.act = nn.GELU()
        self.fc2 = spectral_norm(nn.Linear(INNER, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


class Checkpointed(nn.Module):
    """Two blocks whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlps = nn.ModuleList(PlainMLP() for _ in range(2))

    def _block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.mlps[index](self.norms[index](x))
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(2):
            x = checkpoint(self._block, index, x, use_reentrant=False)
        return x
