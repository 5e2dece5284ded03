"""Texts written to their end: tokens of a batch as they come, without making the device wait for the host.

While the host looks at a token the device is already at work on later ones: each step's tokens are copied to
the host as they are drawn, and read two steps later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fuseline.errors import InputError
from fuseline.generation.choice import GREEDY, Sampling
from fuseline.generation.decoder import CausalModel, Decoder, check_prompt
from fuseline.generation.speculation import Speculator, speculate

AHEAD = 2  # steps that the device may be ahead of the host


def stream(
    decoder: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Iterator[tuple[int, ...]]:
    """The tokens of each step, one a row, `max_new_tokens` times; stop taking them when you have enough.

    Raises `InputError` for prompts that are empty, foreign, or leave no room for the new tokens.
    """
    if max_new_tokens < 1:
        return
    on_gpu = decoder.device.type == "cuda"
    kept = torch.empty(max_new_tokens, decoder.batch, dtype=torch.int64, pin_memory=on_gpu)
    pending: deque[tuple[int, torch.cuda.Event | None]] = deque()

    def read() -> tuple[int, ...]:
        place, event = pending.popleft()
        if event is not None:
            event.synchronize()
        return tuple(kept[place].tolist())

    for number in range(max_new_tokens):
        tokens_B = decoder.begin(prompts) if number == 0 else decoder.advance()
        kept[number].copy_(tokens_B, non_blocking=on_gpu)
        event = None
        if on_gpu:
            event = torch.cuda.Event()
            event.record()
        pending.append((number, event))
        if not on_gpu or number == 0 or len(pending) > AHEAD:
            yield read()
    while pending:
        yield read()


def generate(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int | None = None,
    stop_ids: Sequence[int] = (),
    stopped: Callable[[int, Sequence[int]], bool] | None = None,
    draft: CausalModel | None = None,
    ahead: int = 4,
    storage: str = "model",
    graphs: bool | None = None,
) -> list[list[int]]:
    """What the model writes after each prompt: up to `max_new_tokens` tokens, ended by an id of `stop_ids`
    (which is left out), or where `stopped(row, tokens so far)` says so.

    Prompts may have different lengths; each row is what it would be alone, to rounding. With a `draft`
    `ahead` tokens are drafted at a time (`generation/speculation.py`). See `Decoder` for the other arguments.
    Raises `InputError` for prompts that are empty, foreign, or too long for the context.
    """
    check_room(model, prompts, max_new_tokens)
    if max_new_tokens < 1:
        return [[] for _ in prompts]
    sizes: dict[str, Any] = {"batch": len(prompts), "capacity": max(map(len, prompts)) + max_new_tokens}
    options: dict[str, Any] = {"sampling": sampling, "seed": seed, "storage": storage, "graphs": graphs}
    source: Decoder | Speculator
    if draft is None:
        source = Decoder(model, **sizes, **options)
    else:
        source = Speculator(model, draft, **sizes, **options, ahead=ahead)
    found: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    for step in steps(source, prompts, max_new_tokens):
        for row in tuple(open_rows):
            for token in step[row]:
                if token in stop_ids:
                    open_rows.discard(row)
                    break
                found[row].append(token)
                if stopped is not None and stopped(row, found[row]):
                    open_rows.discard(row)
                    break
        if not open_rows:
            break
    source.close()
    return found


def steps(
    source: Decoder | Speculator, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Iterator[Sequence[Sequence[int]]]:
    """The tokens of each step or round, some for each row, whoever writes them."""
    if isinstance(source, Speculator):
        yield from speculate(source, prompts, max_new_tokens)
        return
    for tokens in stream(source, prompts, max_new_tokens):
        yield [(token,) for token in tokens]


def check_room(model: CausalModel, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """`InputError` for prompts that are empty, foreign, or leave too little of the context."""
    check_prompts(prompts, max_new_tokens, model.config.block_size, model.config.vocab_size)


def check_prompts(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, context: int, vocab_size: int
) -> None:
    """The same for a model that is not there yet."""
    if not prompts:
        raise InputError("There is no prompt. Give one or more.")
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens is {max_new_tokens}; it must be 0 or more.")
    for number, prompt in enumerate(prompts, 1):
        check_prompt(prompt, number, vocab_size)
        if len(prompt) > context:
            raise InputError(
                f"Prompt {number} has {len(prompt)} tokens, and the model's context is {context}. Shorten it."
            )
        if len(prompt) + max_new_tokens > context:
            raise InputError(
                f"Prompt {number} has {len(prompt)} tokens, which leaves {context - len(prompt)} of the "
                f"model's context of {context}; {max_new_tokens} new ones were asked for."
            )
