"""Lightning over an accelerated model: a callback accelerates the module inside on the first batch.

python examples/accelerate_lightning.py
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn

import fuseline


class Accelerate(lightning.Callback):
    """Finds, proves and swaps in `module.model` on the first batch; gives it back at the end."""

    def __init__(self) -> None:
        self.fast: Any = None

    def on_train_batch_start(
        self, trainer: lightning.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.fast is None:
            with trainer.precision_plugin.forward_context():
                self.fast = fuseline.accelerate(module.model, batch[0], train=True)
            print(self.fast)

    def on_train_end(self, trainer: lightning.Trainer, module: Any) -> None:
        print(self.fast.report())
        self.fast.undo()


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True)
        self.model = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Flatten(), nn.Linear(32 * 8, 5))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, target = batch
        return nn.functional.cross_entropy(self.model(x), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int = 4) -> None:
    rows = torch.utils.data.TensorDataset(torch.randn(16, 8, 32), torch.randint(5, (16,)))
    trainer = lightning.Trainer(
        max_steps=steps, callbacks=[Accelerate()], logger=False, enable_checkpointing=False
    )
    trainer.fit(Classifier(), torch.utils.data.DataLoader(rows, batch_size=4))


if __name__ == "__main__":
    main()
