"""Greedy and beam search: the likeliest text, or one of the likeliest, token by token.

Beam search keeps the K best beginnings of each sentence. Of their continuations those that end the text are
set aside as finished, the K best others go on. A finished text is judged by its log-probability over
((5 + length) / 6) ** length_penalty (Wu et al., 2016, equation 14), so that short ones do not win by being
short.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fuseline.errors import InputError
from fuseline.generation.writers import Writer

# Whether all are done is a question to the device, and so is asked only now and then.
_STEPS_BETWEEN_QUESTIONS = 8


def greedy_search(writer: Writer, *, eos_id: int, max_new_tokens: int) -> Tensor:
    """The likeliest token at each step: [B, up to max_new_tokens] int64, `eos_id` from each text's end on."""
    steps = _steps(writer, max_new_tokens)
    logits_BV = writer.begin()
    done_B = torch.zeros(logits_BV.shape[0], dtype=torch.bool, device=logits_BV.device)
    written = []
    for step in range(steps):
        tokens_B = logits_BV.argmax(-1).masked_fill(done_B, eos_id)
        written.append(tokens_B)
        done_B = done_B | (tokens_B == eos_id)
        if step + 1 == steps or (step % _STEPS_BETWEEN_QUESTIONS == 0 and bool(done_B.all())):
            break
        logits_BV = writer.write(tokens_B)
    return torch.stack(written, dim=1)


def beam_search(
    writer: Writer, *, beams: int, eos_id: int, max_new_tokens: int, length_penalty: float = 1.0
) -> Tensor:
    """The best text found for each sentence: [B, up to max_new_tokens] int64, `eos_id` from its end on.

    Raises `InputError` if `beams` is below 1 or no token can be written.
    """
    if beams < 1:
        raise InputError(f"beams is {beams}; the search keeps 1 or more.")
    if beams == 1:
        return greedy_search(writer, eos_id=eos_id, max_new_tokens=max_new_tokens)
    steps = _steps(writer, max_new_tokens)
    first_BV = torch.log_softmax(writer.begin().float(), -1)
    B, V = first_BV.shape
    search = _Search(B, beams, V, steps, eos_id, length_penalty, first_BV.device)
    writer.pick(search.rows_BK.flatten())
    # All beams of a sentence are still alike: only the first may be continued.
    alike_BK = torch.full((B, beams), -math.inf, device=first_BV.device)
    alike_BK[:, 0] = 0.0
    search.live_BK = alike_BK
    logs_BKV = first_BV.unsqueeze(1).expand(B, beams, V)
    for step in range(steps):
        rows_R, tokens_R = search.advance(step, logs_BKV)
        if step + 1 == steps or (step % _STEPS_BETWEEN_QUESTIONS == 0 and search.is_over(step)):
            break
        writer.pick(rows_R)
        logs_BKV = torch.log_softmax(writer.write(tokens_R).float(), -1).view(B, beams, V)
    return search.best()


class _Search:
    """The beams of a batch: B sentences, K beams, V words."""

    def __init__(
        self,
        B: int,
        beams: int,
        V: int,
        steps: int,
        eos_id: int,
        length_penalty: float,
        device: torch.device,
    ) -> None:
        self.beams, self.eos_id, self.length_penalty, self.steps = beams, eos_id, length_penalty, steps
        self.rows_BK = torch.arange(B, device=device).unsqueeze(1).expand(B, beams)
        self.first_row_B1 = torch.arange(0, B * beams, beams, device=device).unsqueeze(1)
        self.live_BK = torch.zeros(B, beams, device=device)
        self.texts_BKT = torch.full((B, beams, steps), eos_id, dtype=torch.int64, device=device)
        self.finished_BK = torch.full((B, beams), -math.inf, device=device)
        self.finished_BKT = self.texts_BKT.clone()
        # As many candidates that K go on even if K of them end.
        self.candidates = min(2 * beams, beams * V)

    def advance(self, step: int, logs_BKV: Tensor) -> tuple[Tensor, Tensor]:
        """Continue every beam by the best tokens; returns the rows to go on with and their new tokens."""
        B, K, V = logs_BKV.shape
        scores_BN = (self.live_BK.unsqueeze(-1) + logs_BKV).view(B, K * V)
        scores_BC, places_BC = scores_BN.topk(self.candidates)
        from_BC, tokens_BC = places_BC // V, places_BC % V
        texts_BCT = self._gathered(self.texts_BKT, from_BC)
        texts_BCT[:, :, step] = tokens_BC
        ends_BC = tokens_BC == self.eos_id
        self._finish(scores_BC.masked_fill(~ends_BC, -math.inf) / self._penalty(step + 1), texts_BCT)
        self.live_BK, kept_BK = scores_BC.masked_fill(ends_BC, -math.inf).topk(K)
        self.texts_BKT = self._gathered(texts_BCT, kept_BK)
        rows_BK = self.first_row_B1 + from_BC.gather(1, kept_BK)
        return rows_BK.flatten(), tokens_BC.gather(1, kept_BK).flatten()

    def is_over(self, step: int) -> bool:
        """Whether no live beam can still beat the finished ones, however it goes on."""
        most = max(self._penalty(step + 1), self._penalty(self.steps))
        best_B = self.live_BK.amax(1) / most
        return bool((self.finished_BK.amin(1) >= best_B).all())

    def best(self) -> Tensor:
        """The best finished text of each sentence; the best unfinished one where none is."""
        none_B = self.finished_BK.amax(1) == -math.inf
        best_B, live_B = self.finished_BK.argmax(1), self.live_BK.argmax(1)
        rows_B = torch.arange(len(best_B), device=best_B.device)
        return torch.where(
            none_B.unsqueeze(1), self.texts_BKT[rows_B, live_B], self.finished_BKT[rows_B, best_B]
        )

    def _finish(self, scores_BC: Tensor, texts_BCT: Tensor) -> None:
        all_scores = torch.cat([self.finished_BK, scores_BC], dim=1)
        all_texts = torch.cat([self.finished_BKT, texts_BCT], dim=1)
        self.finished_BK, kept_BK = all_scores.topk(self.beams)
        self.finished_BKT = self._gathered(all_texts, kept_BK)

    def _penalty(self, length: int) -> float:
        return float(((5 + length) / 6) ** self.length_penalty)

    @staticmethod
    def _gathered(texts_BKT: Tensor, picked_BC: Tensor) -> Tensor:
        index = picked_BC.unsqueeze(-1).expand(-1, -1, texts_BKT.shape[-1])
        return texts_BKT.gather(1, index)


def _steps(writer: Writer, max_new_tokens: int) -> int:
    steps = min(max_new_tokens, writer.room)
    if steps < 1:
        raise InputError(
            f"There is no room for a token: {max_new_tokens} may be written, and the model has room for "
            f"{writer.room} after the prompt."
        )
    return steps
