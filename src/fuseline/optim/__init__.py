"""Optimizers whose state takes less memory than the weights."""

from fuseline.optim.adamw import CompactAdamW, state_bytes

__all__ = ["CompactAdamW", "state_bytes"]
