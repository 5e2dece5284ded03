"""Who decodes: Fuseline, the same model in plain torch, eager or compiled as gpt-fast does, gpt-fast's own
files, `transformers` as it comes and compiled.

All hold the same weights and go on from the same prompts. Greedy: drawing is not what is compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuseline.bench.decode.gptfast_files import GptFastFiles
from fuseline.bench.decode.plain_torch import FLOATS, in_plain_torch
from fuseline.errors import InputError
from fuseline.generation.decoder import Decoder
from fuseline.generation.static_cache import Continuation, StaticCache
from fuseline.models.llama import Llama
from fuseline.models.llama_hugging_face import described, places
from fuseline.models.pretrained import LanguageModel

PEERS = (
    "fuseline",
    "eager",
    "gptfast",
    "gptfast-files",
    "transformers",
    "transformers-compiled",
    "max-autotune",
)
DEFAULTS = tuple(peer for peer in PEERS if peer != "max-autotune")  # it compiles for minutes
COMPILED = ("gptfast", "gptfast-files", "transformers-compiled", "max-autotune")
# What each can decode; others' own quantized kernels are measured as products, by `fuseline bench linear`.
FORMATS = {
    "fuseline": (*FLOATS, "int8", "int4", "fp8"),
    "gptfast": (*FLOATS, "int8", "int4"),
    "gptfast-files": (*FLOATS, "int8", "int4"),
    "max-autotune": (*FLOATS, "int8", "int4"),
}


class Contender(Protocol):
    """`begin` reads the prompts and draws the first token, `advance` draws the next of each row."""

    def begin(self, prompts: Sequence[Sequence[int]]) -> object: ...
    def advance(self) -> object: ...
    def close(self) -> None: ...


def contender(
    peer: str, model: LanguageModel, *, batch: int, capacity: int, gptfast: Path | None = None
) -> Contender:
    """The contender of that name for `model`; `gptfast` is the folder of a checkout. Raises `InputError`
    where it cannot be had."""
    if peer == "fuseline":
        return Decoder(model, batch=batch, capacity=capacity)
    if peer == "transformers":
        return _Transformers(model, batch, capacity)
    if peer == "transformers-compiled":
        return CompiledTransformers(model, batch, capacity)
    if peer == "gptfast-files":
        if gptfast is None:
            raise InputError("name the folder of a checkout of gpt-fast by --gptfast")
        return GptFastFiles(model, gptfast, batch=batch, capacity=capacity)
    plain = in_plain_torch(model)
    if peer == "eager":
        return Decoder(plain, batch=batch, capacity=capacity, graphs=False)
    autotuned = peer == "max-autotune"
    if autotuned and next(model.parameters()).device.type != "cuda":
        raise InputError("max-autotune chooses among a GPU's kernels")
    return Compiled(plain, batch=batch, capacity=capacity, autotuned=autotuned)


class _LayeredCache(StaticCache):
    """Each layer's keys and values in tensors of their own, as gpt-fast has them: where a compiled step
    writes into a part of a tensor that it was given, it copies the whole tensor, once a layer."""

    def __init__(self, cache: StaticCache) -> None:
        vars(self).update(vars(cache))  # nothing is made twice: the peak of memory is told
        self.layers = [
            (k_BKSD.clone(), v_BKSD.clone()) for k_BKSD, v_BKSD in zip(self.k, self.v, strict=True)
        ]
        del self.k, self.v

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.layers[layer]


class Compiled(Decoder):
    """gpt-fast's way: a static cache as long as it will ever be, and the whole step under `torch.compile`,
    which fuses what it can, products of one row too, and replays it as a CUDA graph. `autotuned` tries
    Triton's templates of a product beside cuBLAS, too."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        batch: int,
        capacity: int,
        backend: str = "inductor",
        autotuned: bool = False,
    ) -> None:
        super().__init__(model, batch=batch, capacity=capacity, graphs=False)
        # "reduce-overhead", with the tuning by which inductor takes a product of one row for a reduction.
        tuned = {
            "triton.cudagraphs": True,
            "coordinate_descent_tuning": True,
            "max_autotune": autotuned,
        }
        options: dict[str, Any] = {"options": tuned} if backend == "inductor" else {}
        self.cache = cache = _LayeredCache(self.cache)
        # A cache written in place keeps a step from being recorded, unless it is known to stay where it is.
        kept = [tensor for layer in cache.layers for tensor in layer]
        for held in (*kept, cache.lengths_B, self.tokens_B):
            torch._dynamo.mark_static_address(held)
        self._compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(
            self._next, fullgraph=True, dynamic=False, backend=backend, **options
        )

    def _next(self, tokens_B: Tensor, lengths_B: Tensor) -> Tensor:
        attend = Continuation(self.cache, 1, self.cache.shape.capacity)
        x_BTC = self.model.hidden(tokens_B.unsqueeze(1), attend.positions_BT, attend)
        return self.model.logits(x_BTC[:, 0]).argmax(-1)

    @torch.no_grad()
    def step(self, bucket: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with sdpa_kernel(
            SDPBackend.MATH
        ):  # as gpt-fast: attention of one query, too, is left to the compiler
            self.tokens_B.copy_(self._compiled(self.tokens_B, self.cache.lengths_B))
        self.cache.lengths_B += 1


class _Transformers:
    """`transformers`' own Llama with its static cache, a token at a time."""

    def __init__(self, model: LanguageModel, batch: int, capacity: int) -> None:
        if not isinstance(model, Llama):
            raise InputError("only Llamas are compared with transformers here")
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise InputError("transformers is not installed: pip install transformers") from error
        self._model, self._cache_class = _theirs(model, transformers), transformers.StaticCache
        self._batch, self._capacity = batch, capacity
        self._device, self._position = model.norm.weight.device, 0

    @torch.no_grad()
    def begin(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self._cache = self._cache_class(config=self._model.config, max_cache_len=self._capacity)
        self._position = len(prompts[0])
        return self._taken(torch.tensor(prompts, device=self._device), 0)

    @torch.no_grad()
    def advance(self) -> Tensor:
        self._position += 1
        return self._taken(self._tokens_B1, self._position - 1)

    def _taken(self, tokens_BT: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + tokens_BT.shape[1], device=self._device)
        out = self._model(
            tokens_BT, past_key_values=self._cache, cache_position=positions, use_cache=True, logits_to_keep=1
        )
        self._tokens_B1 = out.logits[:, -1].argmax(-1, keepdim=True)
        return self._tokens_B1

    def close(self) -> None:
        del self._model, self._cache


class CompiledTransformers(_Transformers):
    """The same with its forward compiled for one token, as `generate` does it for a static cache: replayed as
    CUDA graphs. Prompts are read by the forward as it came."""

    def __init__(self, model: LanguageModel, batch: int, capacity: int, backend: str = "inductor") -> None:
        super().__init__(model, batch, capacity)
        mode: dict[str, Any] = {"mode": "reduce-overhead"} if backend == "inductor" else {}
        self._plain = self._model.forward
        self._compiled: Callable[..., Any] = torch.compile(
            self._plain, dynamic=False, backend=backend, **mode
        )

    def _taken(self, tokens_BT: Tensor, first: int) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        self._model.forward = self._compiled if tokens_BT.shape[1] == 1 else self._plain
        return super()._taken(tokens_BT, first)


def _theirs(model: Llama, transformers: Any) -> Any:
    """Their model over our weights' storage: rows of ours are matrices of theirs."""
    said = described(model.config)
    if said["model_type"] != "llama":
        raise InputError(f"{said['model_type']} is not compared with transformers here")
    config = transformers.LlamaConfig(**{k: v for k, v in said.items() if k != "sliding_window"})
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(config)
    state = model.state_dict()
    weights = {name: rows(state[ours]) for name, (ours, rows) in places(model.config).items()}
    theirs.load_state_dict(weights, assign=True)
    device = model.norm.weight.device
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config).to(device)
    return theirs.eval()
