"""The layers of a model that multiply by a weight, whoever made them: which can be quantized, and why others
are left."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fuseline.errors import InputError, unknown_name
from fuseline.nn.quant_linear import QuantLinear

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TORCH_READS = {torch.nn.TransformerEncoderLayer: ("linear1", "linear2")}
"""Layers of torch's whose fast path for inference hands linears' weights to one kernel."""
READS = "reads_weight_of"
"""What a module of any other kind may name so: its linears whose weight it takes past their forward."""
CONV1D = ("transformers.pytorch_utils", "Conv1D")
"""The linear layer of transformers' GPT-2, whose weight is [in, out]."""


@dataclass(frozen=True)
class LayerReport:
    """What became of one layer.

    `format` is what its weight is in now ("int8", .., or its dtype where it was left), `reason` why it was
    left. `weight_error` is |W - Q| / |W|; `output_error` |(W - Q) X| / |W X| on the calibration's inputs, if
    there were any, and `nearest_error` the same had each weight been rounded to the nearest.
    """

    name: str
    format: str
    in_features: int
    out_features: int
    bytes_before: int
    bytes_after: int
    reason: str | None = None
    weight_error: float | None = None
    output_error: float | None = None
    nearest_error: float | None = None


class NothingQuantizedError(InputError):
    """All layers were left as they were; `layers` say why."""

    def __init__(self, layers: Sequence[LayerReport]) -> None:
        reasons = [layer.reason or "" for layer in layers]
        named = [layers[reasons.index(reason)].name or "it" for reason in dict.fromkeys(reasons)]
        told = [f"{name}: {reason}" for name, reason in zip(named, dict.fromkeys(reasons), strict=True)]
        more = f"; and {len(told) - 3} more reasons" if len(told) > 3 else ""
        count = f"{len(layers)} linear layer" + ("s stay" if len(layers) > 1 else " stays")
        super().__init__(f"Nothing was quantized, {count} as before. {'; '.join(told[:3])}{more}.")
        self.layers = tuple(layers)


def linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The linear layers of a model by name, transformers' Conv1D among them; "" if it is one itself."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or is_conv1d(module)
    }


def is_conv1d(module: torch.nn.Module) -> bool:
    """Known by name, so that transformers is not imported for it."""
    return (type(module).__module__, type(module).__qualname__) == CONV1D


def as_linear(module: torch.nn.Module) -> torch.nn.Linear:
    """A layer as `torch.nn.Linear`: itself, or for a Conv1D one that has its weight the other way round."""
    if isinstance(module, torch.nn.Linear):
        return module
    weight, bias = module.get_parameter("weight"), module.get_parameter("bias")
    linear = torch.nn.Linear(weight.shape[0], weight.shape[1], device="meta").train(module.training)
    linear.weight = torch.nn.Parameter(weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = torch.nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def sizes_of(module: torch.nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer, quantized or not."""
    if isinstance(module, (torch.nn.Linear, QuantLinear)):
        return module.in_features, module.out_features
    inputs, outputs = module.get_parameter("weight").shape
    return inputs, outputs


def check_names(model: torch.nn.Module, skip: Sequence[str]) -> None:
    names = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise unknown_name("module to skip", pattern, names[1:])


def why_left(model: torch.nn.Module, name: str, linear: torch.nn.Module, skip: Sequence[str]) -> str | None:
    path = name.split(".")
    parts = [".".join(path[: i + 1]) for i in range(len(path))]
    for pattern in skip:
        if any(fnmatch.fnmatchcase(part, pattern) for part in parts):
            return f"left out by skip={pattern!r}"
    kind = type(linear)
    if kind is not torch.nn.Linear and not is_conv1d(linear):
        own = "with a forward of its own" if kind.forward is not torch.nn.Linear.forward else "a subclass"
        return f"it is a {kind.__name__}, {own}, whose weight others may read past it"
    within, _, last = name.rpartition(".")
    parent = model.get_submodule(within)
    read = getattr(type(parent), READS, ())
    read = (read,) if isinstance(read, str) else read
    for known, names in TORCH_READS.items():
        read = (*read, *(names if isinstance(parent, known) else ()))
    if last in read:
        return f"{type(parent).__name__} reads its weight without calling it"
    weight = linear.get_parameter("weight")
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}"
    if weight.is_meta:
        return "its weight is on the meta device, and has no numbers"
    shared = [
        other
        for other, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is weight and other != (f"{name}.weight" if name else "weight")
    ]
    return f"its weight is also {shared[0]}" if shared else None


def left(name: str, linear: torch.nn.Module, reason: str) -> LayerReport:
    weight = getattr(linear, "weight", None)  # a subclass may keep its own
    inputs, outputs = sizes_of(linear)
    if not isinstance(weight, torch.Tensor):
        return LayerReport(name, "?", inputs, outputs, 0, 0, reason)
    dtype = str(weight.dtype).removeprefix("torch.")
    size = weight.nbytes
    return LayerReport(name, dtype, inputs, outputs, size, size, reason)


def replace(model: torch.nn.Module, name: str, module: torch.nn.Module) -> torch.nn.Module:
    """Put `module` where `name` ("blocks.0.out") stands in `model`; returns the model, which is `module`
    itself for the name ""."""
    if not name:
        return module
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
    return model
