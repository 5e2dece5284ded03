"""Quantized models on disk: one safetensors file, weights as they are in memory, and what each layer is
beside them.

Reading executes nothing that a file contains. The description (metadata "fuseline") names format and sizes of
every quantized layer; it is checked against the model, and every tensor against its layer, before anything is
changed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fuseline.errors import InputError
from fuseline.nn.quant_linear import QuantLinear
from fuseline.quant.formats import Format
from fuseline.quant.quantize import replace

KIND = "fuseline quantized model"
VERSION = 1


def save_quantized(model: torch.nn.Module, path: Path | str, *, about: dict[str, Any] | None = None) -> None:
    """Write the whole state of a model with quantized layers to `path`; an older file stays until it is done.
    `about` is kept beside it for whoever makes the model again (`saved_about`), as JSON can say it.

    Raises `InputError` if no layer is quantized, or the file cannot be written.
    """
    path = Path(path)
    layers = {
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
    said = {"kind": KIND, "version": VERSION, "layers": layers, "shared": shared, "about": about or {}}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, temporary, {"fuseline": json.dumps(said)})
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def saved_about(path: Path | str) -> dict[str, Any] | None:
    """What was said `about` the model in a file of `save_quantized`, and under "layers" its quantized ones;
    None for any other file."""
    try:
        with safe_open(path, framework="pt") as file:
            said = _description(file.metadata(), Path(path))
    except (OSError, SafetensorError, InputError):
        return None
    about = said.get("about")
    return {**(about if isinstance(about, dict) else {}), "layers": said.get("layers", {})}


def load_quantized(
    model: torch.nn.Module, path: Path | str, *, device: torch.device | str | None = None
) -> torch.nn.Module:
    """Fill `model`, made as the saved one was before it was quantized, from `save_quantized`'s file; returns
    it.

    Layers that are quantized in the file are replaced; other parameters keep the model's dtype. A model on
    "meta" gets the file's tensors themselves, read to `device`, so that nothing else is ever held. Raises
    `InputError`, leaving the model as it was, for a file that is not there, foreign or cut off, or made from
    another model.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"There is no file {path}.")
    empty = any(parameter.is_meta for parameter in model.parameters())
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            said = _description(file.metadata(), path)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(
            f"{path} is not a whole safetensors file ({error}); was it cut off in writing or copying?"
        ) from error
    try:
        tensors |= {second: tensors[name] for second, name in said["shared"].items()}
        layers = {name: _layer(model, name, fields, path) for name, fields in said["layers"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: its description of the layers cannot be read ({error!r}).") from error
    _check_tensors(model, layers, tensors, path)
    for name, layer in layers.items():
        replace(model, name, layer)
    if empty:
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        cast: dict[int, torch.Tensor] = {}  # tensors with two names stay one
        tensors = {name: cast.setdefault(id(t), t.to(dtypes[name])) for name, t in tensors.items()}
    model.load_state_dict(tensors, assign=empty)
    if empty:
        for second, name in said["shared"].items():
            parent, _, last = second.rpartition(".")
            setattr(model.get_submodule(parent), last, model.get_parameter(name))
    return model


def _description(metadata: dict[str, str] | None, path: Path) -> dict[str, Any]:
    text = (metadata or {}).get("fuseline")
    try:
        said = json.loads(text) if text else None
    except json.JSONDecodeError:
        said = None
    if not isinstance(said, dict) or said.get("kind") != KIND:
        raise InputError(f"{path} was not written by fuseline's save_quantized.")
    if said.get("version") != VERSION:
        raise InputError(
            f"{path} is of version {said.get('version')}, and this program reads version {VERSION}. "
            "Quantize the model again."
        )
    return said


def _layer(model: torch.nn.Module, name: str, fields: dict[str, Any], path: Path) -> QuantLinear:
    """An empty layer to stand at `name`, where the model has a linear one of those sizes."""
    module = dict(model.named_modules()).get(name)
    if not isinstance(module, (torch.nn.Linear, QuantLinear)):
        raise InputError(f"{path} is of another model: it has a linear layer {name}, and this one has not.")
    theirs = (fields["in_features"], fields["out_features"], fields["bias"])
    ours = (module.in_features, module.out_features, module.bias is not None)
    if theirs != ours:
        raise InputError(
            f"{path} is of another model: {name} has inputs, outputs and bias {theirs} there, {ours} here."
        )
    format = Format(fields["format"], fields["group_size"], fields["zero_points"])
    plain = module.weight.dtype if isinstance(module, torch.nn.Linear) else None
    dtype = plain if module.bias is None else module.bias.dtype
    return QuantLinear(
        module.in_features,
        module.out_features,
        format.name,
        group_size=format.group_size,
        zero_points=format.zero_points,
        bias=module.bias is not None,
        device=module.weight.device,
        dtype=dtype,
    ).train(module.training)


def _check_tensors(
    model: torch.nn.Module, layers: dict[str, QuantLinear], tensors: dict[str, torch.Tensor], path: Path
) -> None:
    wanted: dict[str, torch.Tensor] = {
        name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in layers
    }
    for name, layer in layers.items():
        wanted |= {f"{name}.{part}": tensor for part, tensor in layer.state_dict().items()}
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
