"""Optimizers whose state takes less memory than the weights, and a step of torch's AdamW in one launch."""

from fuseline.optim.adamw import CompactAdamW, state_bytes
from fuseline.optim.update import Update

__all__ = ["CompactAdamW", "Update", "state_bytes"]
