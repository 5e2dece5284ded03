"""`fuseline.quantize`: a model's linear layers quantized in place, an account of each, and a way back."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fuseline.errors import InputError, unknown_name
from fuseline.nn.quant_linear import QuantLinear
from fuseline.quant.formats import Format, Quantized, fill_fp8, round_to_fitted, round_to_nearest
from fuseline.quant.gptq import gptq
from fuseline.quant.hessians import gather_hessians
from fuseline.quant.hqq import hqq
from fuseline.quant.speed import can_time, layer_time_us

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDED = ("int8", "int4")
"""Formats whose weights lie on grids."""
METHODS = ("nearest", "fitted", "hqq", "gptq")
TORCH_READS = {torch.nn.TransformerEncoderLayer: ("linear1", "linear2")}
"""Layers of torch's whose fast path for inference hands linears' weights to one kernel."""
READS = "reads_weight_of"
"""What a module of any other kind may name so: its linears whose weight it takes past their forward."""
HESSIAN_BYTES = 8 * 2**30
"""Of Hessians at a time; a model with more is calibrated in several runs, the first layers first."""


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


@dataclass
class Quantization:
    """What `quantize` did: the model (changed in place), a report for each linear layer, the way back."""

    model: torch.nn.Module
    layers: tuple[LayerReport, ...]
    _originals: dict[str, torch.nn.Module] = field(default_factory=dict, repr=False)

    @property
    def quantized(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.reason is None)

    @property
    def left(self) -> tuple[LayerReport, ...]:
        """Layers that stayed as they were; each says why."""
        return tuple(layer for layer in self.layers if layer.reason is not None)

    def restore(self) -> torch.nn.Module:
        """Put the original layers back. Raises `InputError` unless they were kept (`keep_original=True`)."""
        if self.quantized and len(self._originals) < len(self.quantized):
            raise InputError(
                "The original layers were not kept; quantize with keep_original=True to go back."
            )
        for name, module in self._originals.items():
            replace(self.model, name, module)
        self._originals.clear()
        return self.model

    def table(self) -> str:
        """A line a layer: what it became, its size and its errors; then the sums."""
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
    """Replace the `torch.nn.Linear` layers of `model` by quantized ones, in place.

    Subclasses of `torch.nn.Linear` are left, and so are layers whose weight another module takes past their
    forward, as modules say in a class attribute `reads_weight_of`: the answer lists them with the reason. A
    `torch.nn.TransformerEncoderLayer` is left whole, for its fast path hands the linears' weights to one
    kernel.

    Args:
        model: any module; its dtype is that of the activations. Embeddings are not touched, and a head that
            shares its weight with one is left.
        format: "int8" (a scale for each output channel), "int4" (for each group of columns), "fp8" (weights
            and activations in e4m3, a scale a row) or "plain" (the weight as it is, read by our kernels for
            few rows).
        group_size: of int4: 32, 64 or 128.
        zero_points: of int4: grids that need not be centred at zero.
        method: how weights of int8 and int4 are rounded. "nearest": on grids of each group's full range;
            "fitted": on the grids with the least square error; "hqq": on grids fitted by half-quadratic
            quantization (`fuseline.quant.hqq`), no data needed either; "gptq": each weight's error made good
            by others (`fuseline.quant.gptq`), for what `calibrate` runs the model on. None: "gptq" with
            `calibrate`, which measures best by far, and "nearest" without: of those that need no data it cost
            the least perplexity, HQQ diverged least (`fuseline/quant/hqq.py` has the figures).
        skip: a module's name, a pattern ("*.head"), or several of them: their linears are left; a module's
            name takes all within.
        calibrate: batches (a tensor, a tuple or a mapping of arguments each) that the model is run on, of
            int8 and int4: for GPTQ, and for the report's output errors by any method.
        max_rows: the most rows of activations a call will have (batch times tokens). Each size of layer is
            timed with that many against the layer it replaces, and left if it is slower: in 16 bits on a
            GPU, in any dtype on a CPU.
        call: how the model runs a layer on x [rows, in_features], for that timing: `call(layer, x)`. None:
            the layer alone. Where a norm is part of the kernels of one and not of the other, this says so.
        keep_original: hold on to the original layers, so that `restore()` can put them back.

    Returns a `Quantization`. Raises `InputError` for a format, group size, method or name that does not
    exist, for a method or batches that the format has no use for, for batches that reach no layer, and for a
    model without linear layers.
    """
    chosen = Format(format, group_size if format == "int4" else 0, zero_points)
    if max_rows is not None and max_rows < 1:
        raise InputError(f"max_rows is {max_rows}; it is the number of rows a call has at most, 1 or more.")
    batches = None if calibrate is None else list(calibrate)
    method = chosen_method(format, method, batches is not None)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if not linears:
        raise InputError("This model has no torch.nn.Linear layers that are not quantized already.")
    skip = (skip,) if isinstance(skip, str) else skip
    _check_names(model, skip)
    reports: dict[str, LayerReport] = {}
    timed: dict[tuple[int, int, bool], str | None] = {}
    wanted: dict[str, torch.nn.Linear] = {}
    for name, linear in linears.items():
        reason = _why_left(model, name, linear, skip) or _too_slow(linear, chosen, max_rows, timed, call)
        if reason is None:
            wanted[name] = linear
        else:
            reports[name] = _left(name, linear, reason)
    originals: dict[str, torch.nn.Module] = {}
    for part in (wanted,) if batches is None else _parts(wanted):
        hessians = {} if batches is None else gather_hessians(model, part, batches)
        for name, linear in part.items():
            layer, report = quantize_linear(linear, chosen, hessians.pop(name, None), method)
            reports[name] = LayerReport(**{**vars(report), "name": name})
            replace(model, name, layer)
            if keep_original:
                originals[name] = linear
    return Quantization(model, tuple(reports[name] for name in linears), originals)


@torch.no_grad()
def quantize_linear(
    linear: torch.nn.Linear,
    format: Format,
    hessian: torch.Tensor | None = None,
    method: str | None = None,
) -> tuple[QuantLinear, LayerReport]:
    """One layer; `method` is None for GPTQ if the Hessian of its inputs is given, else to the nearest."""
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
        size = format.columns(linear.in_features)
        scales, zeros = (
            t.repeat_interleave(size, 1)[:, : linear.in_features] for t in (nearest.scales, nearest.zeros)
        )
        nearest_error = _output_error((nearest.integers - zeros) * scales - wide, wide, hessian)
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


def replace(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Put `module` where `name` ("blocks.0.out") stands in `model`."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _output_error(difference: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """|D X| / |W X|, from X X^T."""

    def energy(matrix: torch.Tensor) -> float:
        return float(((matrix @ hessian) * matrix).sum().clamp(min=0))

    return (energy(difference) / max(energy(weight), 1e-30)) ** 0.5


def chosen_method(format: str, method: str | None, calibrated: bool) -> str:
    """The method meant. Raises `InputError` for one that does not exist, and for a format without a use for
    it or for batches to calibrate with."""
    if method is not None and method not in METHODS:
        raise unknown_name("method", method, METHODS)
    if format not in ROUNDED and (calibrated or method not in (None, "nearest")):
        given = "calibrate=" if calibrated else f"method={method!r}"
        becomes = "stays as it is" if format == "plain" else "becomes the nearest number"
        raise InputError(
            f"{given} goes with int8 and int4; {format} has nothing to calibrate or fit: each weight "
            f"{becomes}. Leave it out."
        )
    if method == "gptq" and not calibrated:
        raise InputError(
            'method="gptq" rounds weights for the inputs they will meet: give batches of them as calibrate=, '
            'or take "hqq", which needs none.'
        )
    return method or ("gptq" if calibrated else "nearest")


def _check_names(model: torch.nn.Module, skip: Sequence[str]) -> None:
    names = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise unknown_name("module to skip", pattern, names[1:])


def _why_left(model: torch.nn.Module, name: str, linear: torch.nn.Linear, skip: Sequence[str]) -> str | None:
    path = name.split(".")
    parts = [".".join(path[: i + 1]) for i in range(len(path))]
    for pattern in skip:
        if any(fnmatch.fnmatchcase(part, pattern) for part in parts):
            return f"left out by skip={pattern!r}"
    kind = type(linear)
    if kind is not torch.nn.Linear:
        own = "with a forward of its own" if kind.forward is not torch.nn.Linear.forward else "a subclass"
        return f"it is a {kind.__name__}, {own}, whose weight others may read past it"
    within, _, last = name.rpartition(".")
    parent = model.get_submodule(within)
    read = getattr(type(parent), READS, ())
    read = (read,) if isinstance(read, str) else read
    for known, names in TORCH_READS.items():
        read = (*read, *(names if isinstance(parent, known) else ()))
    if last in read:
        return f"{type(parent).__name__} reads its weight past it"
    if linear.weight.dtype not in DTYPES:
        return f"its weight is {linear.weight.dtype}"
    if linear.weight.is_meta:
        return "its weight is on the meta device, and has no numbers"
    shared = [
        other
        for other, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is linear.weight and other != f"{name}.weight"
    ]
    return f"its weight is also {shared[0]}" if shared else None


def _too_slow(
    linear: torch.nn.Linear,
    format: Format,
    max_rows: int | None,
    timed: dict[tuple[int, int, bool], str | None],
    call: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor] | None,
) -> str | None:
    """Why the layer would not pay, by a measurement that layers of one size share."""
    weight = linear.weight
    if max_rows is None or not can_time(weight):
        return None
    size = linear.in_features, linear.out_features, linear.bias is not None
    if size not in timed:
        layer, _ = quantize_linear(linear, format)
        x = torch.randn((max_rows, linear.in_features), device=weight.device).to(weight.dtype)
        ours, theirs = (layer_time_us(of if call is None else partial(call, of), x) for of in (layer, linear))
        timed[size] = None
        if ours > theirs:
            rows = "row" if max_rows == 1 else "rows"
            timed[size] = (
                f"{format.name} takes {ours:.1f} us for {max_rows} {rows}, the layer itself {theirs:.1f}"
            )
    return timed[size]


def _left(name: str, linear: torch.nn.Linear, reason: str) -> LayerReport:
    weight = getattr(linear, "weight", None)  # a subclass may keep its own
    if not isinstance(weight, torch.Tensor):
        return LayerReport(name, "?", linear.in_features, linear.out_features, 0, 0, reason)
    dtype = str(weight.dtype).removeprefix("torch.")
    size = weight.nbytes
    return LayerReport(name, dtype, linear.in_features, linear.out_features, size, size, reason)


def _parts(layers: Mapping[str, torch.nn.Linear]) -> list[dict[str, torch.nn.Linear]]:
    """Layers in the model's order, as many at a time as Hessians may take."""
    parts: list[dict[str, torch.nn.Linear]] = []
    room = 0
    for name, linear in layers.items():
        needed = 4 * linear.in_features**2
        if needed > room or not parts:
            parts.append({})
            room = HESSIAN_BYTES
        parts[-1][name] = linear
        room -= needed
    return parts
