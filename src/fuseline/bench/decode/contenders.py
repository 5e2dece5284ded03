"""Who decodes: Fuseline, the same model in plain torch, eager or compiled as gpt-fast does, `transformers` as
it comes and compiled.

All hold the same weights and go on from the same prompts. Greedy: drawing is not what is compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuseline.errors import InputError
from fuseline.generation.decoder import Decoder
from fuseline.generation.static_cache import Continuation, StaticCache
from fuseline.models.gpt import GPT
from fuseline.models.llama import Llama
from fuseline.models.llama_hugging_face import described, places
from fuseline.models.pretrained import LanguageModel
from fuseline.nn import QuantLinear
from fuseline.ops.quant_layout import unpack_groups, unpack_int4, unpack_int8
from fuseline.quant.linears import replace as replace_module

PEERS = ("fuseline", "eager", "gptfast", "transformers", "transformers-compiled")
FLOATS = ("bf16", "fp32")
# What each can decode; others' own quantized kernels are measured as products, by `fuseline bench linear`.
FORMATS = {"fuseline": (*FLOATS, "int8", "int4", "fp8"), "gptfast": (*FLOATS, "int8", "int4")}


class Contender(Protocol):
    """`begin` reads the prompts and draws the first token, `advance` draws the next of each row."""

    def begin(self, prompts: Sequence[Sequence[int]]) -> object: ...
    def advance(self) -> object: ...
    def close(self) -> None: ...


def contender(peer: str, model: LanguageModel, *, batch: int, capacity: int) -> Contender:
    """The contender of that name for `model`. Raises `InputError` where it cannot be had."""
    if peer == "fuseline":
        return Decoder(model, batch=batch, capacity=capacity)
    if peer == "transformers":
        return _Transformers(model, batch, capacity)
    if peer == "transformers-compiled":
        return CompiledTransformers(model, batch, capacity)
    plain = in_plain_torch(model)
    if peer == "eager":
        return Decoder(plain, batch=batch, capacity=capacity, graphs=False)
    return Compiled(plain, batch=batch, capacity=capacity)


class Int8Linear(torch.nn.Module):
    """gpt-fast's: the weight takes the dtype of x within the product, where a compiler fuses that.

    The product is of two dimensions. With three, torch 2.11's inductor takes it for one of its own, whose
    kernel computes each result in a thread alone: 326 us for 8 rows of 4096 x 4096 in the place of 29."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        for name, tensor in (("weight", weight), ("scales", scales), ("bias", bias)):
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.flatten(0, -2), self.weight.to(x.dtype)) * self.scales.to(x.dtype)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], -1)


class Int4Linear(torch.nn.Module):
    """gpt-fast's: torch's own kernel, tinygemm, over pairs of integers and what a group of columns is scaled
    and shifted by."""

    pairs: Tensor
    groups: Tensor
    bias: Tensor | None

    def __init__(self, pairs: Tensor, groups: Tensor, bias: Tensor | None, group_size: int) -> None:
        super().__init__()
        self.group_size = group_size
        for name, tensor in (("pairs", pairs), ("groups", groups), ("bias", bias)):
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.aten._weight_int4pack_mm(x.flatten(0, -2), self.pairs, self.group_size, self.groups)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], -1)


def tinygemm_weight(layer: QuantLinear) -> tuple[Tensor, Tensor]:
    """The pairs [N, K / 2] of an int4 layer as tinygemm packs them, the first column of two above the second;
    and [K / group_size, N, 2], by which it multiplies q - 8 and what it then adds."""
    N, K = layer.out_features, layer.in_features
    assert layer.scales is not None
    integers_NK = unpack_int4(layer.weight, N, K)
    scales_NG = unpack_groups(layer.scales, N)
    added_NG = torch.zeros_like(scales_NG)
    if layer.zeros is not None:
        added_NG = scales_NG * (8 - unpack_groups(layer.zeros, N).to(scales_NG.dtype))
    groups_GN2 = torch.stack((scales_NG, added_NG), -1).transpose(0, 1).contiguous()
    return integers_NK[:, ::2] << 4 | integers_NK[:, 1::2], groups_GN2


def _in_int4(layer: QuantLinear) -> Int4Linear:
    if layer.weight.device.type != "cuda":
        raise InputError("others' int4, tinygemm, has another layout on a CPU, and is compared on a GPU")
    if layer.in_features % max(128, layer.group_size) or layer.out_features % 8:
        raise InputError(
            "others' int4, tinygemm, takes columns in whole groups and in 128s, and rows in eights"
        )
    pairs, groups = tinygemm_weight(layer)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    return Int4Linear(packed, groups, layer.bias, layer.group_size)


def _in_torch(layer: QuantLinear) -> Int8Linear | Int4Linear:
    if layer.format == "int4":
        return _in_int4(layer)
    if layer.format != "int8":
        raise InputError(
            f"others are compared in {', '.join((*FLOATS, 'int8', 'int4'))}, not in {layer.format}"
        )
    assert layer.scales is not None
    weight = unpack_int8(layer.weight, layer.out_features, layer.in_features)
    return Int8Linear(weight, layer.scales, layer.bias)


def in_plain_torch(model: LanguageModel) -> LanguageModel:
    """The same weights in a model that calls none of Fuseline's ops."""
    plain: LanguageModel
    with torch.device("meta"):
        if isinstance(model, Llama):
            plain = Llama(replace(model.config, kernels="torch"))
        else:
            plain = GPT(replace(model.config, norm="torch"))
    state = model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            small = _in_torch(layer)
            replace_module(plain, name, small)
            state = {key: tensor for key, tensor in state.items() if not key.startswith(f"{name}.")}
            state |= {f"{name}.{key}": tensor for key, tensor in small.state_dict().items()}
    plain.load_state_dict(state, assign=True)
    if isinstance(plain, Llama) and isinstance(model, Llama):
        plain.rotary.cos, plain.rotary.sin = model.rotary.cos, model.rotary.sin
    return plain.eval()


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
    which fuses what it can, products of one row too, and replays it as a CUDA graph."""

    def __init__(self, model: LanguageModel, *, batch: int, capacity: int, backend: str = "inductor") -> None:
        super().__init__(model, batch=batch, capacity=capacity, graphs=False)
        # "reduce-overhead", with the tuning by which inductor takes a product of one row for a reduction.
        tuned = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
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
