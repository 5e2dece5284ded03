"""Tokens drawn one after another from what a GPT expects next.

Each new token reads the last block_size tokens anew: the plainest way there is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fuseline.errors import InputError
from fuseline.models.gpt import GPT


@torch.no_grad()
def sample(
    model: GPT,
    tokens_BT: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The prompts with `max_new_tokens` more tokens each: [B, T + max_new_tokens], int64.

    Logits are divided by `temperature`: below 1 likely tokens become likelier still, and 0 takes the
    likeliest (greedy). `top_k` draws among the k likeliest only. The same `generator` state (on the tokens'
    device) gives the same tokens. The model is in eval mode meanwhile, and as it was afterwards.

    `tokens_BT`: [B, T] int64 with T of 1 or more, ids below vocab_size; of prompts longer than block_size the
    model sees the end. Raises `InputError` for an empty prompt, foreign ids, or options out of range.
    """
    vocab_size = model.config.vocab_size
    _check(tokens_BT, vocab_size, max_new_tokens, temperature, top_k)
    B, T = tokens_BT.shape
    out_BT = torch.empty(B, T + max_new_tokens, dtype=torch.int64, device=tokens_BT.device)
    out_BT[:, :T] = tokens_BT
    was_training = model.training
    model.eval()
    try:
        for end in range(T, T + max_new_tokens):
            context_BT = out_BT[:, max(0, end - model.config.block_size) : end]
            logits_BV = model.next_token_logits(context_BT).float()
            out_BT[:, end] = _draw(logits_BV, temperature, top_k, generator)
    finally:
        model.train(was_training)
    return out_BT


def _draw(
    logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1)
    if top_k is None or top_k >= logits_BV.shape[-1]:
        probabilities_BV = torch.softmax(logits_BV / temperature, dim=-1)
        return torch.multinomial(probabilities_BV, 1, generator=generator).squeeze(-1)
    # Drawn among the k themselves, so that ties at the border never let more than k through.
    best_BK, ids_BK = logits_BV.topk(top_k)
    choice_B1 = torch.multinomial(torch.softmax(best_BK / temperature, dim=-1), 1, generator=generator)
    return ids_BK.gather(-1, choice_B1).squeeze(-1)


def _check(
    tokens_BT: Tensor, vocab_size: int, max_new_tokens: int, temperature: float, top_k: int | None
) -> None:
    if tokens_BT.dim() != 2 or tokens_BT.shape[1] == 0:
        raise InputError(
            f"The prompt has shape {list(tokens_BT.shape)}; it must be [B, T], with a token or more each."
        )
    if tokens_BT.numel() and not 0 <= int(tokens_BT.min()) <= int(tokens_BT.max()) < vocab_size:
        raise InputError(
            f"The prompt has ids from {int(tokens_BT.min())} to {int(tokens_BT.max())}, and the model knows "
            f"0..{vocab_size - 1}. Encode it with the tokenizer that the model was trained with."
        )
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens is {max_new_tokens}; it must be 0 or more.")
    if not 0 <= temperature < math.inf:
        raise InputError(
            f"temperature is {temperature}; it must be 0 (the likeliest token) or a number above."
        )
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k is {top_k}; it must be 1 or more.")
