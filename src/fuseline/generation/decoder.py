"""Prompts read at once, then token after token: the engine of generation.

A decoding step reads all weights for one token of each row, so it is short and bound by memory, and what the
host does between its kernels counts. On a GPU the step is recorded once as a CUDA graph and replayed:
lengths, last tokens and random numbers live on the device. The step looks at a *bucket* of cache positions,
a power of two, and there is one recording a bucket, whatever the lengths of the prompts.

Shapes: B batch, T time, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fuseline.errors import InputError
from fuseline.generation.choice import GREEDY, Sampling, choose, penalized
from fuseline.generation.static_cache import Beginning, CacheShape, Continuation, StaticCache
from fuseline.models.heads import Attend
from fuseline.models.whole_step import whole_step
from fuseline.ops.argmax_step import argmax_step
from fuseline.ops.decode_step import decode_step, workspace

SMALLEST_BUCKET = 128
# Tokens of prompts that go through the model at once; more of them only take memory.
PROMPT_TOKENS = 16384


class Shape(Protocol):
    """What generation asks of a model's config."""

    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class CausalModel(Protocol):
    """A model that can go on from a cache: GPT and Llama (`fuseline.models`), or yours.

    `hidden` takes tokens [B, T], their positions [B, T] (None: 0, 1, ..) and an `Attend`, and gives
    [B, T, C]; `logits` makes [..., vocab_size] of any part of that.
    """

    @property
    def config(self) -> Any: ...
    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor | None, attend: Attend) -> Tensor: ...
    def logits(self, x_C: Tensor) -> Tensor: ...


def activation_dtype(model: CausalModel) -> torch.dtype:
    """The dtype that the model computes in: its norms', which no quantization touches."""
    assert isinstance(model, torch.nn.Module)
    return next(p.dtype for p in model.parameters() if p.is_floating_point() and p.dim() == 1)


class Decoder:
    """A model, a cache, and what was drawn last; it serves one batch of prompts after another.

    Args:
        model: in eval mode, on the device to run on.
        batch: rows.
        capacity: positions of a row, prompt and new tokens together; at most the model's context.
        sampling: how tokens are drawn.
        seed: of the draws. None takes a seed of torch's.
        storage: "model", "int8" or "fp8": how keys and values are kept.
        graphs: record steps; None does on a GPU.
        whole: a step in one launch where the model is small enough for that to be faster; False: never.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        batch: int,
        capacity: int,
        sampling: Sampling = GREEDY,
        seed: int | None = None,
        storage: str = "model",
        graphs: bool | None = None,
        whole: bool = True,
    ) -> None:
        config: Shape = model.config
        if capacity > config.block_size:
            raise InputError(
                f"The cache would hold {capacity} positions, and the model's context is {config.block_size}. "
                "Shorten the prompt or ask for fewer new tokens."
            )
        assert isinstance(model, torch.nn.Module)
        self.model: CausalModel = model
        self.device = next(model.parameters()).device
        self.sampling = sampling
        shape = CacheShape(
            config.num_layers,
            batch,
            config.num_heads,
            config.num_kv_heads,
            capacity,
            config.head_dim,
            activation_dtype(model),
            storage,
        )
        self.cache = StaticCache(shape, self.device)
        self.tokens_B = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.generator = torch.Generator(self.device)
        self.generator.manual_seed(torch.initial_seed() if seed is None else seed)
        self.seen_BV: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen_BV = torch.zeros(batch, config.vocab_size, dtype=torch.bool, device=self.device)
        self.companions: tuple[Tensor, ...] = ()  # what else a recorded step changes
        self.draws = not sampling.is_greedy  # whether it takes random numbers
        self._graphs = self.device.type == "cuda" if graphs is None else graphs
        self._recorded: dict[int, torch.cuda.CUDAGraph] = {}
        self._longest = 0
        self._whole = whole_step(model) if whole and batch == 1 and storage == "model" else None
        self._workspace = None if self._whole is None else workspace(self._whole)

    @property
    def batch(self) -> int:
        return self.cache.shape.batch

    @property
    def longest(self) -> int:
        """Positions that the longest row holds, as the host knows it without asking."""
        return self._longest

    @torch.no_grad()
    def begin(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read a prompt for each row and draw the first token of each, [B]; `InputError` for bad prompts."""
        self._check(prompts)
        lengths = [len(prompt) for prompt in prompts]
        self._longest = max(lengths)
        self.cache.lengths_B.copy_(torch.tensor(lengths))
        if self.seen_BV is not None:
            self.seen_BV.zero_()
        rows = max(1, PROMPT_TOKENS // self._longest)
        logits = []
        for first in range(0, len(prompts), rows):
            logits.append(self._read(prompts[first : first + rows], first))
        self.tokens_B.copy_(self._drawn(torch.cat(logits)))
        return self.tokens_B

    def advance(self) -> Tensor:
        """Go on with the tokens drawn last and draw the next, [B], which the next call overwrites."""
        self.reserve(1)
        bucket = self.bucket(self._longest)
        self.run(bucket, lambda: self.step(bucket))
        return self.tokens_B

    def reserve(self, new: int) -> None:
        """Count `new` more positions for the longest row; `InputError` if the cache has no room for them."""
        if self._longest + new > self.cache.shape.capacity:
            raise InputError(
                f"The cache's {self.cache.shape.capacity} positions are full: make it with a larger capacity."
            )
        self._longest += new

    def settle(self, longest: int) -> None:
        """The longest row holds `longest` positions: fewer than were reserved."""
        self._longest = longest

    def bucket(self, positions: int) -> int:
        """The power of two over `positions`, or the capacity."""
        size = SMALLEST_BUCKET
        while size < positions:
            size *= 2
        return min(size, self.cache.shape.capacity)

    def prepare(self, first: int, last: int) -> None:
        """Record what steps of rows of `first` to `last` positions will replay, so that none records while
        it is waited for. Forgets the prompts."""
        size = self.bucket(first)
        while self._graphs:
            bucket = size
            if bucket not in self._recorded:
                self._recorded[bucket] = self._record(lambda: self.step(bucket))  # noqa: B023 - called at once
            if size >= min(last, self.cache.shape.capacity):
                return
            size = self.bucket(size + 1)

    @torch.no_grad()
    def run(self, key: int, work: Callable[[], None]) -> None:
        """Do `work`, which reads and writes the same tensors each time; on a GPU recorded under `key`."""
        if not self._graphs:
            work()
            return
        if key not in self._recorded:
            self._recorded[key] = self._record(work)
        self._recorded[key].replay()

    @torch.no_grad()
    def step(self, bucket: int) -> None:
        """One token for every row; nothing here waits for the device."""
        if self._whole is None or self._workspace is None:
            attend = Continuation(self.cache, 1, bucket)
            x_BTC = self.model.hidden(self.tokens_B.unsqueeze(1), attend.positions_BT, attend)
            logits_BV = self.model.logits(x_BTC[:, 0])
            if self.sampling.is_greedy and self.seen_BV is None:
                argmax_step(logits_BV, self.tokens_B, self.cache.lengths_B)
            else:
                self.tokens_B.copy_(self._drawn(logits_BV))
                self.cache.lengths_B += 1
        else:
            held = self.cache
            logits_BV = decode_step(
                self._whole, self.tokens_B, held.k, held.v, held.lengths_B, self._workspace
            )
            if not self.sampling.is_greedy or self.seen_BV is not None:
                self.tokens_B.copy_(self._drawn(logits_BV))

    def close(self) -> None:
        """Let go of the recordings and the memory they hold."""
        self._recorded.clear()

    def states(self) -> tuple[Tensor, ...]:
        """What a step changes beside the cache."""
        kept = (self.tokens_B, self.cache.lengths_B, *self.companions)
        return kept if self.seen_BV is None else (*kept, self.seen_BV)

    def generators(self) -> tuple[torch.Generator, ...]:
        return (self.generator,) if self.draws else ()

    def _read(self, prompts: Sequence[Sequence[int]], first: int) -> Tensor:
        """The logits [R, V] after each of R prompts, whose keys and values go to rows `first` and on."""
        width = max(map(len, prompts))
        filled = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        tokens_RT = torch.tensor(filled, dtype=torch.int64).to(self.device)
        x_RTC = self.model.hidden(tokens_RT, None, Beginning(self.cache, first))
        ends_R = self.cache.lengths_B[first : first + len(prompts)] - 1
        if self.seen_BV is not None:
            inside_RT = torch.arange(width, device=self.device) <= ends_R.unsqueeze(1)
            counts = torch.zeros(len(prompts), self.seen_BV.shape[1], device=self.device)
            counts.scatter_add_(1, tokens_RT, inside_RT.float())
            self.seen_BV[first : first + len(prompts)] = counts > 0
        return self.model.logits(x_RTC[torch.arange(len(prompts), device=self.device), ends_R])

    def _drawn(self, logits_BV: Tensor) -> Tensor:
        if self.seen_BV is None:
            return choose(logits_BV, self.sampling, self.generator)
        logits_BV = penalized(logits_BV, self.seen_BV, self.sampling.repetition_penalty)
        tokens_B = choose(logits_BV, self.sampling, self.generator)
        self.seen_BV.scatter_(1, tokens_B.unsqueeze(1), True)
        return tokens_B

    @torch.no_grad()
    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """`work` as a graph; what the trial run before it changed is put back."""
        before = [state.clone() for state in self.states()]
        random = [generator.get_state() for generator in self.generators()]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        for generator, state in zip(self.generators(), random, strict=True):
            generator.set_state(state)
            graph.register_generator_state(generator)
        for held, kept in zip(self.states(), before, strict=True):
            held.copy_(kept)
        gc.collect()  # a graph that goes meanwhile would free its memory and break the recording
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        if len(prompts) != self.batch:
            raise InputError(
                f"This decoder serves {self.batch} prompts at once, and {len(prompts)} were given."
            )
        for number, prompt in enumerate(prompts, 1):
            check_prompt(prompt, number, self.model.config.vocab_size)
            if len(prompt) > self.cache.shape.capacity:
                raise InputError(
                    f"Prompt {number} has {len(prompt)} tokens, and there is room for "
                    f"{self.cache.shape.capacity}. Shorten it, or make the cache larger."
                )


def check_prompt(prompt: Sequence[int], number: int, vocab_size: int) -> None:
    """`InputError` if it is empty or has ids that the model does not know."""
    if not len(prompt):
        raise InputError(f"Prompt {number} is empty. A model continues what is there: give a token or more.")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"Prompt {number} has token ids from {low} to {high}, and the model knows 0..{vocab_size - 1}. "
            "Encode it with the tokenizer that the model was trained with."
        )
