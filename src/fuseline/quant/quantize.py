"""`fuseline.quantize`: it quantizes a model's linear layers in place, reports on each, and can undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fuseline.errors import InputError
from fuseline.nn.quant_linear import QuantLinear
from fuseline.quant.formats import Format, Quantized, fill_fp8, fill_sparse, round_to_fitted, round_to_nearest
from fuseline.quant.gptq import gptq
from fuseline.quant.hessians import gather_hessians
from fuseline.quant.hqq import hqq
from fuseline.quant.linears import (
    LayerReport,
    NothingQuantizedError,
    as_linear,
    check_names,
    left,
    linear_layers,
    replace,
    sizes_of,
    why_left,
)
from fuseline.quant.methods import chosen_method
from fuseline.quant.sparsity import refuse_sparsity, why_unfit
from fuseline.quant.speed import can_time, layer_time_us
from fuseline.quant.storage import save_quantized
from fuseline.quant.transformers_models import note

HESSIAN_BYTES = 8 * 2**30
"""The most bytes of Hessians at a time. A model that needs more is calibrated in several runs."""


@dataclass
class Quantization:
    """What `quantize` did: the model (changed in place), a report on each linear layer, and `restore`."""

    model: torch.nn.Module
    layers: tuple[LayerReport, ...]
    _originals: dict[str, torch.nn.Module] = field(default_factory=dict, repr=False)

    @property
    def quantized(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.reason is None)

    @property
    def left(self) -> tuple[LayerReport, ...]:
        """The layers that were not changed; each report says why."""
        return tuple(layer for layer in self.layers if layer.reason is not None)

    def restore(self) -> torch.nn.Module:
        """Put the original layers back. Raises `InputError` unless they were kept (`keep_original=True`)."""
        if self.quantized and len(self._originals) < len(self.quantized):
            raise InputError(
                "The original layers were not kept; quantize with keep_original=True to go back."
            )
        for name, module in self._originals.items():
            self.model = replace(self.model, name, module)
        self._originals.clear()
        note(self.model)
        return self.model

    def save(self, path: Path | str, *, about: Mapping[str, Any] | None = None) -> None:
        """Write the quantized model to a file that `fuseline.quant.load_quantized` fills the same model from;
        see `save_quantized`."""
        save_quantized(self.model, path, about=about)

    def table(self) -> str:
        """A table with a line for each layer (size, format, errors), and the totals."""
        lines = []
        for layer in self.layers:
            size = f"{layer.in_features} x {layer.out_features}"
            if layer.reason is not None:
                lines.append(f"{layer.name}  {size}  {layer.format}: {layer.reason}")
                continue
            errors = f"weight error {layer.weight_error:.4f}"
            if layer.output_error is not None and layer.nearest_error is not None:
                errors += (
                    f", output error {layer.output_error:.4f} (to the nearest: {layer.nearest_error:.4f})"
                )
            lines.append(f"{layer.name}  {size}  {layer.format}  {errors}")
        before = sum(layer.bytes_before for layer in self.layers)
        after = sum(layer.bytes_after for layer in self.layers)
        sizes = f"{before / 2**20:.1f} to {after / 2**20:.1f} MiB"
        lines.append(f"{len(self.quantized)} of {len(self.layers)} layers, {sizes}")
        return "\n".join(lines)


def quantize(
    model: torch.nn.Module,
    format: str,
    *,
    group_size: int = 128,
    zero_points: bool = False,
    method: str | None = None,
    skip: str | Sequence[str] = (),
    calibrate: Iterable[Any] | None = None,
    max_rows: int | None = None,
    call: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor] | None = None,
    keep_original: bool = False,
) -> Quantization:
    """Replace the `torch.nn.Linear` layers of `model`, and transformers' `Conv1D`, by quantized ones, in
    place. If `model` is a linear layer itself, it stays as it is, and the result's `model` is the quantized
    one.

    Three kinds of layers are left, and the result lists them with the reason: subclasses of
    `torch.nn.Linear`; layers whose weight another module reads without calling them, which that module
    declares in a class attribute `reads_weight_of`; and the linears of a `torch.nn.TransformerEncoderLayer`,
    whose fast path passes their weights to one kernel.

    Args:
        model: any module; its dtype is the dtype of the activations. Embeddings are not changed, nor is a
            head that shares its weight with one.
        format: "int8" (a scale for each output channel), "int4" (a scale for each group of columns), "fp8"
            (weights and activations in e4m3, a scale for each row) or "plain" (the weight as it is; our
            kernels read it for few rows). "ternary", "int3", "fp4", "nf4", "mxfp4", "int5", "fp6_e2m3" and
            "fp6_e3m2" (`fuseline.ops.quant_codes`) save memory, but each call unpacks the weight, which is
            slower than not to quantize. "w8a8" multiplies int8 by int8, with a scale for each row of
            activations. "sparse24" keeps two of each four weights for torch's sparse products (float16 and
            bfloat16 on an NVIDIA GPU).
        group_size: for int4, the columns that share a scale: 32, 64 or 128.
        zero_points: for int4, whether grids may be off-centre.
        method: how weights are rounded; `fuseline.quant.methods` says which format has which. "nearest" uses
            a grid over each group's full range, "fitted" the grid with the least square error, "hqq" a grid
            fitted by half-quadratic quantization (`fuseline.quant.hqq`); these three need no data. "gptq"
            (`fuseline.quant.gptq`) compensates the error of each weight by others, for the inputs that
            `calibrate` shows. Where the format has both, None takes "gptq" with
            `calibrate`, which measures best by far, and "nearest" without: of the methods without data it
            cost the least perplexity, while HQQ diverged least (figures in `fuseline/quant/hqq.py`).
        skip: a module's name, a pattern ("*.head"), or several of them. Their linears are left; the name of a
            module covers everything inside it.
        calibrate: batches (each a tensor, or a tuple or mapping of arguments) to run the model on. GPTQ uses
            them, in formats that have it, and with any method the report then has output errors.
        max_rows: the most rows of activations (batch times tokens) that a call will have. For each size of
            layer the quantized layer is timed with that many rows, and the original is kept if it is faster.
            On a GPU this applies to models in 16 bits, on a CPU to every dtype.
        call: how the model runs a layer on x [rows, in_features], for that timing: `call(layer, x)`; None for
            the layer alone. It matters where one of the two layers includes a norm in its kernel.
        keep_original: keep the original layers, so that `restore()` can put them back.

    Returns a `Quantization`. Raises `InputError` for a format, group size, method or name that does not
    exist, for a method or batches that the format cannot use, for batches that reach no layer, for a model
    without linear layers, for sparse24 where the model's device has no sparse products, and
    (`NothingQuantizedError`, with the reasons) where no layer can be quantized. That all would be slower is
    no error.
    """
    chosen = Format(format, group_size if format == "int4" else 0, zero_points)
    if max_rows is not None and max_rows < 1:
        raise InputError(f"max_rows is {max_rows}; it is the most rows that a call has, 1 or more.")
    batches = None if calibrate is None else list(calibrate)
    method = chosen_method(format, method, batches is not None)
    linears = linear_layers(model)
    if not linears:
        raise InputError("This model has no torch.nn.Linear layers that are not quantized already.")
    skip = (skip,) if isinstance(skip, str) else skip
    check_names(model, skip)
    if format == "sparse24":
        refuse_sparsity(linears.values())
    reports: dict[str, LayerReport] = {}
    timed: dict[tuple[int, int, bool], str | None] = {}
    wanted: dict[str, torch.nn.Module] = {}
    for name, linear in linears.items():
        reason = why_left(model, name, linear, skip) or why_unfit(as_linear(linear), chosen)
        if reason is None:
            wanted[name] = linear
        else:
            reports[name] = left(name, linear, reason)
    if not wanted:
        raise NothingQuantizedError(tuple(reports.values()))
    for name, linear in tuple(wanted.items()):
        reason = _too_slow(linear, chosen, max_rows, timed, call)
        if reason is not None:
            reports[name] = left(name, wanted.pop(name), reason)
    originals: dict[str, torch.nn.Module] = {}
    for part in (wanted,) if batches is None else _parts(wanted):
        hessians = {} if batches is None else gather_hessians(model, part, batches)
        for name, linear in part.items():
            layer, report = quantize_linear(linear, chosen, hessians.pop(name, None), method)
            reports[name] = LayerReport(**{**vars(report), "name": name})
            model = replace(model, name, layer)
            if keep_original:
                originals[name] = linear
    note(model)
    return Quantization(model, tuple(reports[name] for name in linears), originals)


@torch.no_grad()
def quantize_linear(
    linear: torch.nn.Module,
    format: Format,
    hessian: torch.Tensor | None = None,
    method: str | None = None,
) -> tuple[QuantLinear, LayerReport]:
    """One layer, a `torch.nn.Linear` or transformers' Conv1D; `method` is None for GPTQ if the Hessian of its
    inputs is given, else to the nearest."""
    linear = as_linear(linear)
    method = chosen_method(format.name, method, hessian is not None)
    weight = linear.weight
    layer = QuantLinear(
        linear.in_features,
        linear.out_features,
        format.name,
        group_size=format.group_size,
        zero_points=format.zero_points,
        bias=linear.bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    layer.train(linear.training)
    if linear.bias is not None:
        layer.bias = linear.bias.detach().clone()
    nearest: Quantized | None = None
    if format.name == "plain":
        layer.weight = weight.detach()
    elif format.name == "fp8":
        fill_fp8(layer, weight)
    elif format.name == "sparse24":
        fill_sparse(layer, weight)
    else:
        nearest = round_to_nearest(weight, format)
        if method == "gptq":
            assert hessian is not None
            gptq(weight, hessian, format).fill(layer)
        else:
            rounded = {"nearest": lambda *_: nearest, "fitted": round_to_fitted, "hqq": hqq}[method]
            rounded(weight, format).fill(layer)
    wide = weight.float()
    difference = layer.dequantized() - wide
    output_error = nearest_error = None
    if hessian is not None and nearest is not None:
        output_error = _output_error(difference, wide, hessian)
        nearest_error = _output_error(nearest.dequantized() - wide, wide, hessian)
    report = LayerReport(
        name="",
        format=format.name,
        in_features=linear.in_features,
        out_features=linear.out_features,
        bytes_before=weight.nbytes,
        bytes_after=layer.weight_bytes,
        weight_error=float(difference.norm() / wide.norm().clamp(min=1e-30)),
        output_error=output_error,
        nearest_error=nearest_error,
    )
    return layer, report


def _output_error(difference: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """|D X| / |W X|, computed from X X^T."""

    def energy(matrix: torch.Tensor) -> float:
        return float(((matrix @ hessian) * matrix).sum().clamp(min=0))

    return (energy(difference) / max(energy(weight), 1e-30)) ** 0.5


def _too_slow(
    linear: torch.nn.Module,
    format: Format,
    max_rows: int | None,
    timed: dict[tuple[int, int, bool], str | None],
    call: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor] | None,
) -> str | None:
    """Why the layer would not pay, by a measurement that layers of one size share."""
    if max_rows is None or not can_time(linear.get_parameter("weight")):
        return None
    linear = as_linear(linear)
    weight = linear.weight
    size = linear.in_features, linear.out_features, linear.bias is not None
    if size not in timed:
        layer, _ = quantize_linear(linear, format)
        x = torch.randn((max_rows, linear.in_features), device=weight.device).to(weight.dtype)
        ours, theirs = (layer_time_us(of if call is None else partial(call, of), x) for of in (layer, linear))
        timed[size] = None
        if ours > theirs:
            rows = "row" if max_rows == 1 else "rows"
            timed[size] = (
                f"{format.name} takes {ours:.1f} us for {max_rows} {rows}, the original layer {theirs:.1f}"
            )
    return timed[size]


def _parts(layers: Mapping[str, torch.nn.Module]) -> list[dict[str, torch.nn.Module]]:
    """Layers in the model's order, as many at a time as Hessians may take."""
    parts: list[dict[str, torch.nn.Module]] = []
    room = 0
    for name, linear in layers.items():
        needed = 4 * sizes_of(linear)[0] ** 2
        if needed > room or not parts:
            parts.append({})
            room = HESSIAN_BYTES
        parts[-1][name] = linear
        room -= needed
    return parts
