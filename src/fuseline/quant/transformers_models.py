"""Quantized models of transformers: what `save_pretrained` writes, `from_pretrained` reads.

`fuseline.quantize` notes in such a model's config which layers it replaced, as transformers' own quantizers
do. In the process that reads the model, `register_with_transformers()` comes first: transformers asks the
quantizer named in the config to put the layers in place before it loads their tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from fuseline.errors import InputError
from fuseline.files.schema import checked_values
from fuseline.quant.linears import replace
from fuseline.quant.storage import LayersSaid, descriptions, empty_layer

METHOD = "fuseline"


def is_of_transformers(model: torch.nn.Module) -> bool:
    """Whether `save_pretrained` is transformers'; who never imported it has no such model."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def note(model: torch.nn.Module) -> None:
    """Note the quantized layers of a model of transformers in its config, or take the note away if there are
    none; other models have no config to note it in."""
    if not is_of_transformers(model):
        return
    layers = descriptions(model)
    config: Any = model.config
    if layers:
        config.quantization_config = register_with_transformers()(layers=layers)
    elif getattr(config, "quantization_config", None) is not None:
        del config.quantization_config


def register_with_transformers() -> type[Any]:
    """Let `from_pretrained` read models that `fuseline.quantize` quantized and `save_pretrained` wrote. It
    may be called again. Raises `InputError` if transformers is not installed."""
    try:
        from transformers.quantizers.auto import (
            AUTO_QUANTIZATION_CONFIG_MAPPING,
            register_quantization_config,
            register_quantizer,
        )
        from transformers.quantizers.base import HfQuantizer
        from transformers.utils.quantization_config import QuantizationConfigMixin
    except ImportError as error:
        raise InputError("transformers is not installed: pip install 'fuseline[transformers]'.") from error
    if METHOD in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD]

    @register_quantization_config(METHOD)
    class FuselineConfig(QuantizationConfigMixin):
        """Which layers are quantized, and how."""

        def __init__(self, layers: Mapping[str, Any], quant_method: str = METHOD, **_: Any) -> None:
            self.quant_method: Any = quant_method
            said = checked_values(LayersSaid, {"layers": layers}, "The config's quantization_config")
            self.layers = said["layers"]

    @register_quantizer(METHOD)
    class FuselineQuantizer(HfQuantizer):
        """Puts quantized layers, empty, where the file has them."""

        requires_calibration = True  # what is not quantized yet, `fuseline.quantize` quantizes
        quantization_config: Any
        _dtype: torch.dtype | None = None

        def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
            self._dtype = dtype
            return dtype

        def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> None:
            """Scales and weights stay as they were saved."""

        def _process_model_before_weight_loading(self, model: torch.nn.Module, **_: Any) -> None:
            for name, fields in self.quantization_config.layers.items():
                layer = empty_layer(model, name, fields, "The config")
                replace(model, name, layer.to(dtype=self._dtype))

        def _process_model_after_weight_loading(self, model: torch.nn.Module, **_: Any) -> torch.nn.Module:
            return model.to(dtype=self._dtype)

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return False

    return FuselineConfig
