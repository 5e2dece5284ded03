"""`model.generate` of a live `transformers` decoder through a static cache and recorded steps.

`fast = fuseline.accelerate_generate(model)` puts such a `generate` on that model, with the arguments and
the result of the model's own. Calls that it does not support (beams, logits processors, adapters, ..) go to
the model's own `generate`, and `fast.reason` says why. In fp32 greedy tokens are the same as the model's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuseline.errors import InputError, first_line
from fuseline.generation.choice import GREEDY, Sampling
from fuseline.generation.decoder import Decoder
from fuseline.generation.generate import stream
from fuseline.models.live import from_live
from fuseline.models.pretrained import LanguageModel

# What generation_config may say, with transformers' values where it says nothing.
TAKEN = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "max_new_tokens": None,
    "max_length": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# What changes nothing of one sequence a prompt that is returned as tokens.
WITHOUT_EFFECT = frozenset(
    ("transformers_version", "_from_model_config", "bos_token_id", "decoder_start_token_id", "use_cache")
) | frozenset(("cache_implementation", "cache_config", "disable_compile", "compile_config"))
WITHOUT_EFFECT |= frozenset(("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"))
WITHOUT_EFFECT |= frozenset(("num_assistant_tokens", "num_assistant_tokens_schedule", "target_lookbehind"))
WITHOUT_EFFECT |= frozenset(("assistant_confidence_threshold", "assistant_lookbehind"))
WITHOUT_EFFECT |= frozenset(("prefill_chunk_size", "return_legacy_cache", "token_healing"))
# The values at which the others change nothing.
NEUTRAL = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "typical_p", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0),
}
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of the logits, as a share of their norm: a model whose forward is not what its config says is not ours."""
CHECKED_TOKENS = 64
CAPACITY_STEP = 256
"""Caches are made for multiples of so many positions, so that the next prompt finds the same one."""


class NotTakenError(Exception):
    """Why a call goes to the model's own `generate`."""


class FastGenerate:
    """The `generate` of one model on a static cache; see `accelerate_generate`.

    `reason` says why the last call went to the model's own `generate`; it is empty if the call ran here.
    `calls` counts the calls that ran here, `declined` the others by reason.
    """

    def __init__(self, model: nn.Module) -> None:
        if not callable(getattr(model, "generate", None)):
            raise InputError(
                f"{type(model).__name__} has no generate(): give a decoder of transformers with its head."
            )
        self.model = model
        self.reason = ""
        self.calls = 0
        self.declined: dict[str, int] = {}
        self._own: Callable[..., Any] = model.generate  # type: ignore[assignment]
        self._before = model.__dict__.get("generate")
        self._copy: LanguageModel | None = None
        self._copied_from: tuple[object, ...] = ()
        self._decoder: tuple[object, Decoder] | None = None
        self._lock = threading.Lock()
        model.__dict__["generate"] = self

    def undo(self) -> nn.Module:
        """Give the model its own `generate` back, and free the copy of its weights."""
        self.model.__dict__.pop("generate", None)
        if self._before is not None:
            self.model.__dict__["generate"] = self._before
        self._forget()
        return self.model

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: it makes its own copy of the weights, cache and lock."""
        return {**self.__dict__, "_copy": None, "_copied_from": (), "_decoder": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_lock": threading.Lock()})

    def __call__(
        self, inputs: Tensor | None = None, generation_config: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """As `model.generate`: tokens [B, T] in, tokens [B, T + new] out."""
        if not self._lock.acquire(blocking=False):
            return self._declined("another thread generates", inputs, generation_config, *rest, **options)
        try:
            # What is made inside outlives the caller's inference mode.
            with torch.inference_mode(False), torch.no_grad():
                if rest:
                    raise NotTakenError("more is given by position than tokens and a generation_config")
                tokens_BT = inputs if inputs is not None else options.get("input_ids")
                call = _Call.read(self.model, tokens_BT, generation_config, options)
                decoder = self._decoder_for(self._current(call), call)
                self.reason = ""
                self.calls += 1
                return call.written(decoder)
        except (NotTakenError, InputError) as error:
            reason = first_line(error)
        finally:
            self._lock.release()
        return self._declined(reason, inputs, generation_config, *rest, **options)

    def _declined(self, reason: str, *args: Any, **options: Any) -> Any:
        self.reason = reason
        self.declined[reason] = self.declined.get(reason, 0) + 1
        return self._own(*args, **options)

    def _current(self, call: _Call) -> LanguageModel:
        """Our model with the weights as they are now, compared with theirs on this prompt when it is made."""
        if any(one.training for one in self.model.modules()):
            raise NotTakenError("the model, or a part of it, is in training mode")
        hooked = any(one._forward_hooks or one._forward_pre_hooks for one in self.model.modules())
        if hooked or torch.nn.modules.module._has_any_global_hook():
            raise NotTakenError("a module has hooks, which would not be called")
        state = _state(self.model)
        if self._copy is None or state != self._copied_from:
            self._forget()
            copy = from_live(self.model)
            if call.longest > copy.config.block_size:
                raise NotTakenError(f"the context has {copy.config.block_size} positions")
            _check_alike(self.model, copy)
            self._copy, self._copied_from = copy, state
        if call.longest > self._copy.config.block_size:
            raise NotTakenError(f"the context has {self._copy.config.block_size} positions")
        return self._copy

    def _decoder_for(self, ours: LanguageModel, call: _Call) -> Decoder:
        """One with a cache that is long enough: that of the last call where it fits, recordings and all."""
        steps = -(-call.longest // CAPACITY_STEP)
        capacity = min(steps * CAPACITY_STEP, ours.config.block_size)
        key = len(call.prompts), capacity, call.sampling
        if self._decoder is None or self._decoder[0] != key:
            self._let_go_of_cache()
            made = Decoder(ours, batch=len(call.prompts), capacity=capacity, sampling=call.sampling)
            self._decoder = key, made
        decoder = self._decoder[1]
        if not call.sampling.is_greedy:
            decoder.generator.manual_seed(int(torch.randint(2**62, ())))  # torch.manual_seed is followed
        return decoder

    def _let_go_of_cache(self) -> None:
        if self._decoder is not None:
            self._decoder[1].close()
        self._decoder = None

    def _forget(self) -> None:
        self._let_go_of_cache()
        self._copy, self._copied_from = None, ()


def accelerate_generate(model: nn.Module) -> FastGenerate:
    """Run `model.generate` on a static cache, and on a GPU with steps recorded as CUDA graphs.

    Args:
        model: a decoder of `transformers` with its head: GPT-2, Llama, Mistral, Qwen2 or Qwen3. The model
            does not change. Generation uses a copy of its weights, in which q, k and v (and gate and up) are
            one matrix, and copies them again when they have changed.

    Returns a handle: `undo()` gives the model its own `generate` back, and `reason` says why the last call
    ran that one. Raises `InputError` for a model without `generate`.
    """
    return FastGenerate(model)


class _Call:
    """A call of `generate` that can be run here."""

    def __init__(
        self,
        tokens_BT: Tensor,
        prompts: list[list[int]],
        new: int,
        sampling: Sampling,
        stop_ids: frozenset[int],
        pad_id: int,
    ) -> None:
        self.tokens_BT, self.prompts, self.new = tokens_BT, prompts, new
        self.sampling, self.stop_ids, self.pad_id = sampling, stop_ids, pad_id

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts)) + self.new

    @classmethod
    def read(cls, model: nn.Module, tokens_BT: Any, given: Any, options: Mapping[str, Any]) -> _Call:
        """Raises NotTakenError, with the reason, for what `generate` is asked that is not done here."""
        if not isinstance(tokens_BT, Tensor) or tokens_BT.dim() != 2 or not tokens_BT.numel():
            raise NotTakenError("it is not called with tokens [B, T]")
        said: dict[str, Any] = dict(TAKEN)
        for source in (getattr(model, "generation_config", None), given):
            if source is not None:
                said.update({k: v for k, v in source.to_dict().items() if v is not None})
        told = {k: v for k, v in options.items() if k not in ("input_ids", "attention_mask")}
        said.update({k: v for k, v in told.items() if v is not None})
        for name, value in said.items():
            known = name in TAKEN or name in WITHOUT_EFFECT
            if not known and value is not None and value is not False and value != NEUTRAL.get(name):
                raise NotTakenError(f"{name} is given")
        stop_ids = _ids(said["eos_token_id"])
        pad_id = said["pad_token_id"]
        mask_BT = options.get("attention_mask")
        if mask_BT is None and pad_id is not None and pad_id not in stop_ids:
            mask_BT = tokens_BT.ne(pad_id)  # as transformers does where pads are among the tokens
        prompts = _prompts(tokens_BT, mask_BT)
        new = said["max_new_tokens"]
        if new is None and said["max_length"] is not None and "max_length" in options:
            new = said["max_length"] - tokens_BT.shape[1]
        if new is None or new < 1:
            raise NotTakenError("max_new_tokens is not given")
        ended_by = pad_id if pad_id is not None else (*stop_ids, 0)[0]
        return cls(tokens_BT, prompts, new, _sampling(said), frozenset(stop_ids), ended_by)

    def written(self, decoder: Decoder) -> Tensor:
        """The prompts and what was drawn; rows that ended are filled up with `pad_id`."""
        open_rows = set(range(len(self.prompts)))
        found: list[Sequence[int]] = []
        for step in stream(decoder, self.prompts, self.new):
            found.append([token if row in open_rows else self.pad_id for row, token in enumerate(step)])
            open_rows -= {row for row in open_rows if step[row] in self.stop_ids}
            if not open_rows:
                break
        new_BN = torch.tensor(found, dtype=self.tokens_BT.dtype, device=self.tokens_BT.device).T
        return torch.cat((self.tokens_BT, new_BN), dim=1)


def _ids(said: Any) -> tuple[int, ...]:
    if isinstance(said, Tensor):
        said = said.tolist()
    return () if said is None else (said,) if isinstance(said, int) else tuple(said)


def _sampling(said: Mapping[str, Any]) -> Sampling:
    penalty = said["repetition_penalty"]
    if not said["do_sample"]:
        return GREEDY if penalty == 1 else Sampling(temperature=0, repetition_penalty=penalty)
    top_p = said["top_p"]
    return Sampling(
        temperature=said["temperature"],
        top_k=said["top_k"] or None,
        top_p=None if top_p is None or top_p >= 1 else top_p,
        min_p=said["min_p"],
        repetition_penalty=penalty,
    )


def _prompts(tokens_BT: Tensor, mask_BT: Any) -> list[list[int]]:
    """The rows without their padding, which stands on the left."""
    rows = tokens_BT.tolist()
    if mask_BT is None:
        return rows
    if not isinstance(mask_BT, Tensor) or mask_BT.shape != tokens_BT.shape:
        raise NotTakenError("attention_mask has another shape than the tokens")
    kept = mask_BT.ne(0).tolist()
    if any(seen != sorted(seen) or not seen[-1] for seen in kept):
        raise NotTakenError("the padding does not stand on the left of the prompts")
    return [row[len(seen) - sum(seen) :] for row, seen in zip(rows, kept, strict=True)]


def _state(model: nn.Module) -> tuple[object, ...]:
    """What the copy stands on: the values of all weights and buffers, each module's class and plain
    attributes, and whether it has a forward of its own. Values, since writes through `.data` and replays of
    recorded steps leave no other trace: each call reads them once."""
    tensors = (*model.parameters(), *model.buffers())
    if len({tensor.device for tensor in tensors}) > 1:
        raise NotTakenError("the model is spread over several devices")
    sums: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        whole = flat[: flat.numel() * flat.element_size() // 8 * 8 // flat.element_size()]
        sums.append(whole.view(torch.int64).sum() if whole.numel() else flat.double().sum().long())
    plain = tuple(
        (
            type(one),
            one.__dict__.get("forward"),
            tuple((k, v) for k, v in one.__dict__.items() if isinstance(v, str | int | float | bool)),
            tuple(id(v) for v in one.__dict__.values() if callable(v)),
        )
        for one in model.modules()
    )
    config = model.config.to_json_string() if hasattr(model.config, "to_json_string") else ""  # type: ignore[operator]
    return tuple(torch.stack(sums).tolist()), plain, config, sums[0].device


def _check_alike(model: nn.Module, ours: LanguageModel) -> None:
    """NotTakenError if the two give other logits: somebody changed the model's forward, or its config."""
    parameter = next(model.parameters())
    length = min(CHECKED_TOKENS, ours.config.block_size)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(ours.config.vocab_size, (2, length), generator=generator)
    tokens_BT = tokens_BT.to(parameter.device)
    mask_BT = torch.ones_like(tokens_BT)
    theirs = model(input_ids=tokens_BT, attention_mask=mask_BT, use_cache=False).logits.double()
    mine = ours(tokens_BT)[..., : theirs.shape[-1]].double()
    error = float((mine - theirs).norm() / theirs.norm())
    most = LARGEST_DIFFERENCE.get(parameter.dtype, 0.0)
    if not error <= most:
        raise NotTakenError(
            f"the model computes something else than its config says: its logits differ by {error:.1e}, and "
            f"{most:.0e} is rounding"
        )
