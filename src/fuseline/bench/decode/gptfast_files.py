"""gpt-fast's own files as a contender: its model, its quantized layers and its step, over our weights.

They are not part of this package: the user names the folder of a checkout. Their model turns pairs of
neighbors by a position's angle where ours turns the two halves of a head, so rows of queries and keys change
places. Integers are ours: one model is decoded by all. No text is read, so their tokenizers are not needed.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuseline.bench.decode.plain_torch import tinygemm_weight
from fuseline.errors import InputError
from fuseline.models.llama import Llama
from fuseline.models.llama_config import LlamaConfig
from fuseline.models.llama_hugging_face import places
from fuseline.models.pretrained import LanguageModel
from fuseline.nn import QuantLinear
from fuseline.ops.quant_layout import unpack_int8

USED = {
    "model": ("Transformer", "ModelArgs"),
    "generate": ("prefill", "decode_one_token"),
    "quantize": ("WeightOnlyInt8QuantHandler", "WeightOnlyInt4QuantHandler"),
}
"""Their files, and what is used of each."""
KNOWN = "commit c9f683e, the last without FlexAttention, and 6ecad9b, of August 2025"
INNER_TILES = 8  # tinygemm's, as gpt-fast has it
# Theirs: ours, by the names of transformers.
_PARTS = {
    "attention.wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.wo": ("self_attn.o_proj",),
    "feed_forward.w1": ("mlp.gate_proj",),
    "feed_forward.w3": ("mlp.up_proj",),
    "feed_forward.w2": ("mlp.down_proj",),
    "attention_norm": ("input_layernorm",),
    "ffn_norm": ("post_attention_layernorm",),
}
_WHOLE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class GptFast:
    """The modules of a checkout."""

    model: types.ModuleType
    generate: types.ModuleType
    quantize: types.ModuleType


class GptFastFiles:
    """Their step under `torch.compile` as their generate.py compiles it, greedy by a temperature of 0."""

    def __init__(
        self, model: LanguageModel, checkout: Path, *, batch: int, capacity: int, backend: str = "inductor"
    ) -> None:
        if not isinstance(model, Llama) or (why := _why_not(model.config)):
            raise InputError(f"gpt-fast's files: {why if isinstance(model, Llama) else 'they decode Llamas'}")
        with ExitStack() as stack:
            files = stack.enter_context(loaded(checkout))
            self._model = _theirs(model, files)
            self._device = model.norm.weight.device
            with self._device:
                self._model.setup_caches(max_batch_size=batch, max_seq_length=capacity)
            self._imports = stack.pop_all()
        self._prefill = files.generate.prefill
        self._masked = self._mask(files.generate)
        tuned = {
            "triton.cudagraphs": True,
            "coordinate_descent_tuning": True,
        }  # "reduce-overhead", and theirs
        options: dict[str, Any] = {"options": tuned} if backend == "inductor" else {}
        self._decode: Callable[..., tuple[Tensor, Tensor]] = torch.compile(
            files.generate.decode_one_token, fullgraph=True, dynamic=False, backend=backend, **options
        )

    @torch.no_grad()
    def begin(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        tokens_BT = torch.tensor(prompts, device=self._device, dtype=torch.int)
        length = tokens_BT.shape[1]
        positions_T = torch.arange(length, device=self._device)
        self._tokens_B1: Tensor = self._prefill(self._model, tokens_BT, positions_T, temperature=0.0).clone()
        self._position_1 = torch.tensor([length], device=self._device)
        return self._tokens_B1

    @torch.no_grad()
    def advance(self) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with sdpa_kernel(SDPBackend.MATH):  # theirs, too: the compiler writes attention of one query
            taken, _ = self._decode(
                self._model, self._tokens_B1, self._position_1, **self._masked, temperature=0.0
            )
        self._tokens_B1 = taken.clone()
        self._position_1 += 1
        return self._tokens_B1

    def close(self) -> None:
        del self._model, self._decode, self._masked
        self._imports.close()

    def _mask(self, generate: types.ModuleType) -> dict[str, Any]:
        """The causal mask that their step is given since it attends by FlexAttention, made as theirs is."""
        if "block_mask" not in inspect.signature(generate.decode_one_token).parameters:
            return {}
        length = self._model.max_seq_length
        make = generate.create_block_mask
        return {"block_mask": make(generate.causal_mask, 1, 1, length, length, device=self._device)}


@contextmanager
def loaded(checkout: Path) -> Iterator[GptFast]:
    """The modules of the folder `checkout`, known by their names until this is left, which compiling them
    asks for. What they set in torch for the whole process is put back at once. `InputError` where they are
    not gpt-fast's."""
    missing = [f"{name}.py" for name in USED if not (checkout / f"{name}.py").is_file()]
    if missing:
        raise InputError(
            f"--gptfast {checkout}: {', '.join(missing)} missing. Name the folder of a checkout of gpt-fast."
        )
    known = {name: sys.modules.pop(name, None) for name in (*USED, "tokenizer")}
    tokenizer = types.ModuleType("tokenizer")
    tokenizer.get_tokenizer = None  # type: ignore[attr-defined]
    sys.modules["tokenizer"] = tokenizer
    try:
        try:
            with _settings_kept(), _found_in(checkout):
                found = GptFast(**{name: importlib.import_module(name) for name in USED})
            for name, used in USED.items():
                for attribute in used:
                    getattr(getattr(found, name), attribute)
        except (ImportError, AttributeError, SyntaxError) as error:
            raise InputError(
                f"--gptfast {checkout}: not gpt-fast's files as they are known here ({KNOWN}): {error}"
            ) from error
        yield found
    finally:
        for name, module in known.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@contextmanager
def _settings_kept() -> Iterator[None]:
    import torch._functorch.config
    import torch._inductor.config

    configs = torch._inductor.config, torch._functorch.config
    saved = [config.save_config() for config in configs]
    try:
        yield
    finally:
        for config, before in zip(configs, saved, strict=True):
            config.load_config(before)


@contextmanager
def _found_in(folder: Path) -> Iterator[None]:
    path = list(sys.path)
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path[:] = path


def _why_not(config: LlamaConfig) -> str | None:
    """What of a model they do not know."""
    lacks = {
        "biases": config.qkv_bias or config.out_bias or config.mlp_bias,
        "norms of queries and keys": config.qk_norm,
        "windows": config.window is not None,
        "heads of another width than width / heads": config.head_dim * config.num_heads != config.embed_dim,
        "stretched rotary positions": config.rope_scaling.kind != "default",
    }
    found = [what for what, is_there in lacks.items() if is_there]
    return f"they have no {', no '.join(found)}" if found else None


def _theirs(model: Llama, files: GptFast) -> Any:
    """Their model with our weights, its linear layers in the format that ours are in."""
    config, formats = model.config, {layer.format for layer in _quantized(model).values()}
    with torch.device("meta"):
        theirs = files.model.Transformer(
            files.model.ModelArgs(
                block_size=config.block_size,
                vocab_size=config.vocab_size,
                n_layer=config.num_layers,
                n_head=config.num_heads,
                dim=config.embed_dim,
                intermediate_size=config.ffn_dim,
                n_local_heads=config.num_kv_heads,
                rope_base=config.rope_base,
                norm_eps=config.eps,
            )
        )
        if formats == {"int8"}:
            files.quantize.WeightOnlyInt8QuantHandler(theirs).convert_for_runtime()
        elif formats == {"int4"}:
            files.quantize.WeightOnlyInt4QuantHandler(
                theirs, _group_size(model), INNER_TILES, padding=False
            ).convert_for_runtime()
        elif formats:
            raise InputError(f"gpt-fast's files: they have int8 and int4, not {', '.join(sorted(formats))}")
    theirs.load_state_dict(_state(model, next(iter(formats), None), files), assign=True)
    return theirs.eval()


def _quantized(model: Llama) -> dict[str, QuantLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}


def _group_size(model: Llama) -> int:
    return next(layer.group_size for layer in _quantized(model).values())


def _state(model: Llama, format: str | None, files: GptFast) -> dict[str, Tensor]:
    config = model.config
    state: dict[str, Tensor] = {}
    for name, ours in _WHOLE.items():
        state |= _layer(name, [f"{ours}.weight"], model, format if name == "output" else None, files)
    for layer in range(config.num_layers):
        for name, parts in _PARTS.items():
            ours_named = [f"model.layers.{layer}.{part}.weight" for part in parts]
            own = None if name.endswith("norm") else format
            state |= _layer(f"layers.{layer}.{name}", ours_named, model, own, files)
    return state


def _layer(
    name: str, parts: Sequence[str], model: Llama, format: str | None, files: GptFast
) -> dict[str, Tensor]:
    """The tensors of their layer `name`, made of `parts` of ours, in `format`."""
    known = places(model.config)
    found = [known[part] for part in parts]
    ours = model.get_submodule(found[0][0].removesuffix(".weight"))

    def rows(tensor: Tensor) -> Tensor:
        """Those of a tensor of ours, one an output, that make theirs, in their order."""
        taken = [
            _turned(part, cut(tensor), model.config) for part, (_, cut) in zip(parts, found, strict=True)
        ]
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    if format is None:
        return {f"{name}.weight": rows(ours.weight)}  # type: ignore[arg-type]
    if not isinstance(ours, QuantLinear):  # ours stays as it is for so many rows; theirs does not
        weight = rows(ours.weight)  # type: ignore[arg-type]
        if format == "int8":
            values, scales, _ = files.quantize.dynamically_quantize_per_channel(
                weight.float(), -128, 127, torch.int8
            )
            return {f"{name}.weight": values, f"{name}.scales": scales.to(weight.dtype)}
        packed, groups = files.quantize.prepare_int4_weight_and_scales_and_zeros(
            weight.bfloat16(), _group_size(model), INNER_TILES
        )
        return {f"{name}.weight": packed, f"{name}.scales_and_zeros": groups}
    assert ours.scales is not None
    if format == "int8":
        values = unpack_int8(ours.weight, ours.out_features, ours.in_features)
        return {f"{name}.weight": rows(values), f"{name}.scales": rows(ours.scales)}
    pairs_NP, groups_GN2 = tinygemm_weight(ours)
    packed = torch.ops.aten._convert_weight_to_int4pack(rows(pairs_NP).contiguous(), INNER_TILES)
    groups = rows(groups_GN2.transpose(0, 1)).transpose(0, 1).contiguous()
    return {f"{name}.weight": packed, f"{name}.scales_and_zeros": groups}


def _turned(part: str, rows: Tensor, config: LlamaConfig) -> Tensor:
    """Queries' and keys' rows with the two halves of each head in turns."""
    if not part.endswith(("q_proj.weight", "k_proj.weight")):
        return rows
    halves = rows.unflatten(0, (-1, 2, config.head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)
