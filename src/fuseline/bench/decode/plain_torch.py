"""A model of ours without Fuseline's ops: the same weights, and the same integers, in torch's layers."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseline.errors import InputError
from fuseline.models.gpt import GPT
from fuseline.models.llama import Llama
from fuseline.models.pretrained import LanguageModel
from fuseline.nn import QuantLinear
from fuseline.ops.quant_layout import unpack_groups, unpack_int4, unpack_int8
from fuseline.quant.linears import replace as replace_module

FLOATS = ("bf16", "fp32")


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
