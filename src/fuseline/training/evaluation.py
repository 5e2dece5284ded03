"""The validation loss: always over the same crops, so that two figures of a run can be compared."""

from __future__ import annotations

import numpy as np
import torch

from fuseline.acceleration.precision import autocast, matmul_format
from fuseline.data.batches import validation_batches
from fuseline.models.gpt import GPT
from fuseline.training.distributed import Group


@torch.no_grad()
def evaluate(
    model: GPT,
    tokens: np.ndarray,
    *,
    batches: int,
    batch_size: int,
    block_size: int,
    precision: str,
    group: Group,
) -> float:
    """Mean loss in nats a token over `batches` batches, whose crops stand at even distances over `tokens`.

    The processes share the batches out (rounded up to as many for each). The model is in eval mode meanwhile,
    and in training mode afterwards. Random numbers are left alone.
    """
    mine = -(-batches // group.world_size)
    total = torch.zeros((), dtype=torch.float64, device=group.device)
    model.eval()
    try:
        with matmul_format(precision), autocast(precision, group.device):
            for tokens_BT, targets_BT in validation_batches(
                tokens,
                batch_size=batch_size,
                block_size=block_size,
                count=mine,
                device=group.device,
                rank=group.rank,
                world_size=group.world_size,
            ):
                total += model(tokens_BT, targets_BT).double()
    finally:
        model.train()
    return float(group.mean(total)) / mine
