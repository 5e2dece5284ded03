"""The learning rate over the steps: linear warm-up, then half a cosine (as nanoGPT has it)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CosineSchedule:
    """`schedule(step)` is the learning rate of that step, the first being step 0.

    It rises linearly to `highest` over `warmup_steps`, falls along half a cosine to `lowest` at
    `decay_steps`, and stays there.
    """

    highest: float
    lowest: float
    warmup_steps: int
    decay_steps: int

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.highest * (step + 1) / (self.warmup_steps + 1)
        if step >= self.decay_steps:
            return self.lowest
        progress = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return self.lowest + 0.5 * (1 + math.cos(math.pi * progress)) * (self.highest - self.lowest)
