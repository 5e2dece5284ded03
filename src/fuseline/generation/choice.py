"""What to take from logits: the likeliest token, or a draw after filters; all on the device, without a wait.

Filters come in the order of `transformers`: repetition penalty, temperature, top-k, top-p, min-p.

Shapes: B batch, V vocabulary, K candidates left (V, or top_k of them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fuseline.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    `temperature` divides the logits; 0 takes the likeliest token (greedy), and then there is nothing to
    filter: `top_k`, `top_p` and `min_p` are refused. `top_k`
    draws among the k likeliest only; `top_p` among the fewest that together have that probability; `min_p`
    among those at least so likely, as a share of the likeliest. `repetition_penalty` divides the logits of
    tokens that were there before, prompt included, where they are positive, and multiplies them where not
    (Keskar et al., "CTRL", 2019). Raises `InputError` for values out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError(
                f"temperature is {self.temperature}; it must be 0 (the likeliest token) or a number above."
            )
        filters = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        if self.temperature == 0 and filters:
            raise InputError(
                f"temperature is 0, which takes the likeliest token: {' and '.join(filters)} would change "
                "nothing. Raise the temperature (1 draws by the model's probabilities), or leave them out."
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k is {self.top_k}; it must be 1 or more.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it is a probability, above 0 and at most 1.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise InputError(f"min_p is {self.min_p}; it is a share, from 0 to 1.")
        if not 0 < self.repetition_penalty < math.inf:
            raise InputError(
                f"repetition_penalty is {self.repetition_penalty}; it must be above 0, and 1 does nothing."
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


GREEDY = Sampling(temperature=0.0)


def penalized(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Logits with those of the tokens seen (True) made smaller."""
    smaller = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, smaller, logits_BV)


def candidates(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Log-weights [B, K] of the tokens that may be drawn, -inf for what a filter took away, and their ids
    [B, K] (None: in the vocabulary's order). For temperatures above 0."""
    weights_BK = logits_BV.float() / sampling.temperature
    ids_BK: Tensor | None = None
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[-1]:
        # The k themselves, so that ties at the border never let more than k through.
        weights_BK, ids_BK = weights_BK.topk(sampling.top_k)
    elif sampling.top_p is not None and sampling.top_p < 1:
        weights_BK, ids_BK = weights_BK.sort(descending=True)
    if sampling.top_p is not None and sampling.top_p < 1:
        probabilities_BK = weights_BK.softmax(-1)
        before_BK = probabilities_BK.cumsum(-1) - probabilities_BK  # of the likelier ones
        weights_BK = weights_BK.masked_fill(before_BK >= sampling.top_p, -math.inf)
    if sampling.min_p:
        least_B1 = weights_BK.amax(-1, keepdim=True) + math.log(sampling.min_p)
        weights_BK = weights_BK.masked_fill(weights_BK < least_B1, -math.inf)
    return weights_BK, ids_BK


def probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """What `choose` draws from, [B, V] in float32: one token's 1.0 if it is greedy."""
    if sampling.is_greedy:
        best_B1 = logits_BV.argmax(-1, keepdim=True)
        return torch.zeros_like(logits_BV, dtype=torch.float32).scatter_(-1, best_B1, 1.0)
    weights_BK, ids_BK = candidates(logits_BV, sampling)
    if ids_BK is None:
        return weights_BK.softmax(-1)
    return torch.zeros_like(logits_BV, dtype=torch.float32).scatter_(-1, ids_BK, weights_BK.softmax(-1))


def choose(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """A token for each row, [B] int64. The same state of `generator`, the same tokens."""
    if sampling.is_greedy:
        return logits_BV.argmax(-1)
    weights_BK, ids_BK = candidates(logits_BV, sampling)
    place_B1 = drawn(weights_BK.softmax(-1), generator).unsqueeze(-1)
    return (place_B1 if ids_BK is None else ids_BK.gather(-1, place_B1)).squeeze(-1)


def drawn(probabilities_BV: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A draw from each row, [B] int64, without the wait of `torch.multinomial`.

    Of independent exponential times with rates p the smallest is i's with probability p_i.
    """
    times_BV = torch.empty_like(probabilities_BV).exponential_(generator=generator)
    return (probabilities_BV / times_BV).argmax(-1)
