"""A plain training loop over an accelerated model: run it, read the table, watch the loss.

python examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from torch import nn

import fuseline


def make_model() -> nn.Module:
    """Any module will do; this one is torch's own encoder with a head."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 10))


def main(steps: int = 20, device: str = "cuda" if torch.cuda.is_available() else "cpu") -> list[float]:
    torch.manual_seed(0)
    model = make_model().to(device)
    x, target = torch.randn(8, 16, 64, device=device), torch.randint(10, (8, 16), device=device)

    fast = fuseline.accelerate(model, x)
    print(fast)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def loss(output: torch.Tensor, batch: object) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    step = fast.training_step(optimizer, precision="bf16", grad_clip=1.0, scheduler=scheduler, loss=loss)
    losses = [step(x).item() for _ in range(steps)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} ({step.execution})")
    print(fast.report())

    fast.undo()  # bit for bit the code of before; the weights stay trained
    return losses


if __name__ == "__main__":
    main()
