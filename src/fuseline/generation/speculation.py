"""Speculative decoding: a small model drafts some tokens, the large one reads them all at once and keeps what
it would have said itself.

A round costs one step of the large model, which reads its weights once whether it looks at one token or at
five, and gives between one and `ahead + 1` tokens a row. Token d, drawn with probability q(d), is kept with
probability min(1, p(d) / q(d)), p being the large model's; at the first that is not, one is drawn from what
p has over q. What comes out is distributed exactly as p alone would have it, and greedy it is the same
tokens. Source: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023.

Shapes: B batch, K tokens drafted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fuseline.errors import InputError
from fuseline.generation.choice import GREEDY, Sampling, drawn, probabilities
from fuseline.generation.decoder import CausalModel, Decoder
from fuseline.generation.static_cache import Continuation

NOTHING = -1  # in the place of a token that was not kept


class Sized(Protocol):
    """What of a model's config says whether a draft fits it."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def block_size(self) -> int: ...


def check_draft(model: Sized, draft: Sized, *, capacity: int, ahead: int, sampling: Sampling) -> None:
    """`InputError` for configs that do not go together, too little context, and a repetition penalty."""
    if ahead < 1:
        raise InputError(f"ahead is {ahead}; a draft has a token or more.")
    if sampling.repetition_penalty != 1:
        raise InputError("A draft and a repetition penalty do not go together: leave one of them out.")
    if model.vocab_size != draft.vocab_size:
        raise InputError(
            f"The draft knows {draft.vocab_size} tokens and the model {model.vocab_size}: both must have one "
            "tokenizer."
        )
    room = capacity + ahead + 1
    if room > min(model.block_size, draft.block_size):
        raise InputError(
            f"Prompt, new tokens and a draft of {ahead} take {room} positions; the contexts are "
            f"{model.block_size} and the draft's {draft.block_size}. Ask for fewer."
        )


class Speculator:
    """A model with a draft, each with a cache; both on one device, with the same vocabulary.

    `ahead` tokens are drafted a round. `capacity` counts the tokens to keep; there is room for those that are
    not. Other arguments are `Decoder`'s. `InputError` for models that do not go together, and for a
    repetition penalty, which would have to see tokens not yet kept.
    """

    def __init__(
        self,
        model: CausalModel,
        draft: CausalModel,
        *,
        batch: int,
        capacity: int,
        ahead: int = 4,
        sampling: Sampling = GREEDY,
        seed: int | None = None,
        storage: str = "model",
        graphs: bool | None = None,
    ) -> None:
        check_draft(model.config, draft.config, capacity=capacity, ahead=ahead, sampling=sampling)
        room = capacity + ahead + 1
        self.ahead, self.sampling, self.capacity = ahead, sampling, capacity
        self.target = Decoder(
            model,
            batch=batch,
            capacity=room,
            sampling=sampling,
            seed=seed,
            storage=storage,
            graphs=graphs,
        )
        self.draft = Decoder(
            draft, batch=batch, capacity=room, sampling=sampling, storage=storage, graphs=False
        )
        self.kept_BK = torch.zeros(batch, ahead + 1, dtype=torch.int64, device=self.target.device)
        self.target.companions = (self.draft.cache.lengths_B, self.kept_BK)
        self.target.draws = True  # greedy too: what is kept is a draw, if only of certainties

    def begin(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read a prompt for each row and draw the first token of each, [B]."""
        self.draft.begin(prompts)
        return self.target.begin(prompts)

    def advance(self) -> list[list[int]]:
        """The next tokens of each row, one to `ahead + 1` of them."""
        held = self.target.longest
        self.target.reserve(self.ahead + 1)
        bucket = self.target.bucket(self.target.longest)
        self.target.run(bucket, lambda: self.round(bucket))
        rows = [[token for token in row if token != NOTHING] for row in self.kept_BK.tolist()]
        # The longest row grew by no more than the most that any was given.
        self.target.settle(min(held + max(map(len, rows)), self.capacity))
        return rows

    @torch.no_grad()
    def round(self, bucket: int) -> None:
        """Draft, read, keep; nothing here waits for the device."""
        target, draft, K = self.target, self.draft, self.ahead
        tokens_B = target.tokens_B
        drafted, likely = [], []
        for number in range(K + 1):
            attend = Continuation(draft.cache, 1, bucket)
            x_B1C = draft.model.hidden(tokens_B.unsqueeze(1), attend.positions_BT, attend)
            draft.cache.lengths_B += 1
            if number == K:  # read only to be in the cache, in case all are kept
                break
            q_BV = probabilities(draft.model.logits(x_B1C[:, 0]), self.sampling)
            tokens_B = drawn(q_BV, target.generator)
            drafted.append(tokens_B)
            likely.append(q_BV)
        drafted_BK = torch.stack(drafted, 1)
        attend = Continuation(target.cache, K + 1, bucket)
        read_BK = torch.cat([target.tokens_B.unsqueeze(1), drafted_BK], 1)
        logits_BKV = target.model.logits(target.model.hidden(read_BK, attend.positions_BT, attend))
        B, _, V = logits_BKV.shape
        p_BKV = probabilities(logits_BKV.flatten(0, 1), self.sampling).view(B, K + 1, V)
        q_BKV = torch.stack([*likely, torch.zeros_like(likely[0])], 1)
        count_B, next_B = kept(p_BKV, q_BKV, drafted_BK, target.generator)
        places_K = torch.arange(K + 1, device=target.device)
        out_BK = torch.cat([drafted_BK, next_B.unsqueeze(1)], 1)
        out_BK = torch.where(places_K < count_B.unsqueeze(1), out_BK, NOTHING)
        self.kept_BK.copy_(torch.where(places_K == count_B.unsqueeze(1), next_B.unsqueeze(1), out_BK))
        target.tokens_B.copy_(next_B)
        # A row that runs ahead of the others stays at the end of its room, and what it writes goes unread.
        target.cache.lengths_B.copy_((target.cache.lengths_B + count_B + 1).clamp(max=self.capacity))
        draft.cache.lengths_B.copy_(target.cache.lengths_B)

    def close(self) -> None:
        self.target.close()


def kept(
    p_BKV: Tensor, q_BKV: Tensor, drafted_BK: Tensor, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """How many of the drafted tokens are kept, [B], and the token after them, [B].

    `p_BKV`: the model's probabilities at the K drafted tokens and after the last, [B, K + 1, V]; `q_BKV`: the
    draft's, zeros at the end.
    """
    at_BK1 = drafted_BK.unsqueeze(-1)
    p_BK, q_BK = p_BKV[:, :-1].gather(-1, at_BK1).squeeze(-1), q_BKV[:, :-1].gather(-1, at_BK1).squeeze(-1)
    chance_BK = torch.empty_like(p_BK).uniform_(generator=generator)
    count_B = (chance_BK * q_BK < p_BK).long().cumprod(-1).sum(-1)
    here_B1V = count_B.view(-1, 1, 1).expand(-1, 1, p_BKV.shape[-1])
    p_BV, q_BV = p_BKV.gather(1, here_B1V).squeeze(1), q_BKV.gather(1, here_B1V).squeeze(1)
    over_BV = (p_BV - q_BV).clamp(min=0)
    # Equal but for rounding: nothing is left over, and then p itself is right.
    over_BV = torch.where(over_BV.sum(-1, keepdim=True) > 0, over_BV, p_BV)
    return count_B, drawn(over_BV, generator)


def speculate(
    speculator: Speculator, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Iterator[list[list[int]]]:
    """The tokens of each round, some for each row, until every row has `max_new_tokens`; none more."""
    if max_new_tokens < 1:
        return
    first = speculator.begin(prompts).tolist()
    yield [[token] for token in first]
    counts = [1] * len(prompts)
    while min(counts) < max_new_tokens:
        rows = speculator.advance()
        yield [row[: max(0, max_new_tokens - count)] for row, count in zip(rows, counts, strict=True)]
        counts = [count + len(row) for row, count in zip(rows, counts, strict=True)]
