"""Quantized models on disk: one safetensors file with the weights as they are in memory and a description.

Reading executes nothing that a file contains. The description (metadata "fuseline") names format and sizes of
every quantized layer; it is checked against a schema and the model, and every tensor against its checksum and
its layer, before anything is changed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict

from fuseline.errors import InputError, first_line
from fuseline.files.reading import regular_size
from fuseline.files.schema import checked_values, parse_json, shown
from fuseline.files.torch_files import save_tensors
from fuseline.nn.quant_linear import QuantLinear
from fuseline.quant.formats import Format
from fuseline.quant.linears import is_conv1d, replace, sizes_of

KIND = "fuseline quantized model"
VERSION = 1


class _ForeignError(InputError):
    """A file of somebody else's."""


class LayerSaid(TypedDict):
    format: str
    in_features: Annotated[int, Field(ge=1, le=2**31)]
    out_features: Annotated[int, Field(ge=1, le=2**31)]
    group_size: Annotated[int, Field(ge=0, le=2**16)]
    zero_points: bool
    bias: bool


class LayersSaid(TypedDict):
    layers: dict[str, LayerSaid]


class Description(LayersSaid):
    """Files of older versions have no checksums."""

    kind: str
    version: int
    shared: dict[str, str]
    about: NotRequired[dict[str, Any]]
    checksums: NotRequired[dict[str, str]]


def save_quantized(
    model: torch.nn.Module, path: Path | str, *, about: Mapping[str, Any] | None = None
) -> None:
    """Write the whole state of a model with quantized layers to `path`; an older file stays until it is done.
    `about` is kept beside it for whoever makes the model again (`saved_about`), as JSON can say it.

    The file also holds `about` (JSON), for the code that builds the model again (`saved_about`).
    Raises `InputError` if no layer is quantized, or the file cannot be written.
    """
    path = Path(path)
    layers = descriptions(model)
    if not layers:
        raise InputError(
            "No layer of this model is quantized: quantize it first, or save it as any other model."
        )
    tensors: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}  # a second name of a tensor, and its first
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            shared[name] = first[place]
        else:
            first[place] = name
            tensors[name] = tensor.contiguous()
    said = {
        "kind": KIND,
        "version": VERSION,
        "layers": layers,
        "shared": shared,
        "about": dict(about or {}),
        "checksums": {name: checksum(tensor) for name, tensor in tensors.items()},
    }
    save_tensors(tensors, path, {"fuseline": json.dumps(said)})


def descriptions(model: torch.nn.Module) -> dict[str, LayerSaid]:
    """What each quantized layer of a model is, by name."""
    return {
        name: {
            "format": module.format,
            "in_features": module.in_features,
            "out_features": module.out_features,
            "group_size": module.group_size,
            "zero_points": module.zeros is not None,
            "bias": module.bias is not None,
        }
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear)
    }


def saved_about(path: Path | str) -> dict[str, Any] | None:
    """The `about` of a file that `save_quantized` wrote, with its quantized layers under "layers".

    None for any other file.
    """
    try:
        regular_size(Path(path))
        with safe_open(path, framework="pt") as file:
            said = _description(file.metadata(), Path(path))
    except (OSError, SafetensorError, _ForeignError):
        return None
    return {**said["about"], "layers": said["layers"]}


def checksum(tensor: torch.Tensor) -> str:
    """Of a tensor's bytes, as they are in a file."""
    held = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{zlib.crc32(held.tobytes()):08x}"


def load_quantized(
    model: torch.nn.Module, path: Path | str, *, device: torch.device | str | None = None
) -> torch.nn.Module:
    """Fill `model` from a file that `save_quantized` wrote, and return it.

    `model` must be built as the saved model was before it was quantized. Layers that are quantized in the
    file are replaced; other parameters keep the model's dtype. A model on "meta" gets the file's tensors,
    read to `device`, so that no second copy is held. Raises `InputError` and leaves the model as it was if
    the file is missing, foreign, cut off, or made from another model.
    """
    path = Path(path)
    regular_size(path)
    empty = any(parameter.is_meta for parameter in model.parameters())
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            said = _description(file.metadata(), path)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path} is not a complete safetensors file ({first_line(error)[:200]}); was it cut off in "
            "writing or copying?"
        ) from error
    _check_sums(tensors, said, path)
    if device is not None:
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    for second, name in said["shared"].items():
        if name not in tensors:
            raise InputError(f"{path}: {shown(second)} shares {shown(name)}, which the file does not hold.")
        tensors[second] = tensors[name]
    layers = {name: empty_layer(model, name, fields, str(path)) for name, fields in said["layers"].items()}
    _check_tensors(model, layers, tensors, path)
    for name, layer in layers.items():
        model = replace(model, name, layer)
    if empty:
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        cast: dict[int, torch.Tensor] = {}  # a tensor with two names stays one tensor
        tensors = {name: cast.setdefault(id(t), t.to(dtypes[name])) for name, t in tensors.items()}
    model.load_state_dict(tensors, assign=empty)
    if empty:
        for second, name in said["shared"].items():
            parent, _, last = second.rpartition(".")
            setattr(model.get_submodule(parent), last, model.get_parameter(name))
    return model


def _description(metadata: dict[str, str] | None, path: Path) -> Description:
    text = (metadata or {}).get("fuseline")
    try:
        said = parse_json(text, str(path)) if text else None
    except InputError:
        said = None
    if not isinstance(said, dict) or said.get("kind") != KIND:
        raise _ForeignError(f"{path} was not written by fuseline's save_quantized.")
    if said.get("version") != VERSION:
        raise InputError(
            f"{path} is of version {shown(said.get('version'))}, and this program reads version {VERSION}. "
            "Quantize the model again."
        )
    description = checked_values(Description, said, f"{path}: its description of the layers cannot be read")
    return {**description, "about": description.get("about", {})}


def _check_sums(tensors: dict[str, torch.Tensor], said: Description, path: Path) -> None:
    for name, wanted in said.get("checksums", {}).items():
        if name in tensors and checksum(tensors[name]) != wanted:
            raise InputError(
                f"{path} is damaged: {name} does not match its checksum. Take another copy, or quantize the "
                "model again."
            )


def empty_layer(model: torch.nn.Module, name: str, fields: LayerSaid, source: str) -> QuantLinear:
    """An empty layer to stand at `name`, where the model has a linear one of those sizes."""
    module = dict(model.named_modules()).get(name)
    if module is None or not (isinstance(module, (torch.nn.Linear, QuantLinear)) or is_conv1d(module)):
        raise InputError(f"{source} is of another model: it has a linear layer {name}, and this has none.")
    inputs, outputs = sizes_of(module)
    bias = getattr(module, "bias", None)
    theirs = (fields["in_features"], fields["out_features"], fields["bias"])
    ours = (inputs, outputs, bias is not None)
    if theirs != ours:
        raise InputError(
            f"{source} is of another model: {name} has inputs, outputs and bias {theirs} there, {ours} here."
        )
    format = Format(fields["format"], fields["group_size"], fields["zero_points"])
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    plain = None if isinstance(module, QuantLinear) else weight.dtype
    return QuantLinear(
        inputs,
        outputs,
        format.name,
        group_size=format.group_size,
        zero_points=format.zero_points,
        bias=bias is not None,
        device=weight.device,
        dtype=plain if bias is None else bias.dtype,
    ).train(module.training)


def _check_tensors(
    model: torch.nn.Module, layers: dict[str, QuantLinear], tensors: dict[str, torch.Tensor], path: Path
) -> None:
    wanted: dict[str, torch.Tensor] = {
        name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in layers
    }
    for name, layer in layers.items():
        within = f"{name}." if name else ""
        wanted |= {f"{within}{part}": tensor for part, tensor in layer.state_dict().items()}
    for name, tensor in wanted.items():
        if name not in tensors:
            raise InputError(f"{path} is of another model, or incomplete: it has no {name}.")
        found = tensors[name]
        if found.shape != tensor.shape or found.is_floating_point() != tensor.is_floating_point():
            raise InputError(
                f"{path}: {name} is {list(found.shape)} of {found.dtype} there, and {list(tensor.shape)} of "
                f"{tensor.dtype} in this model."
            )
    extra = sorted(set(tensors) - set(wanted))
    if extra:
        raise InputError(f"{path} is of another model: this one has no {extra[0]}.")
