"""Quantization: formats and their grids, GPTQ and HQQ, the walk over a model, files."""

from fuseline.ops.quant_bits import add_uint4, pack_uint4, unpack_uint4
from fuseline.ops.quant_codes import CODES
from fuseline.ops.quant_packing import pack_codes, unpack_codes
from fuseline.quant.formats import Format, Quantized, round_to_fitted, round_to_nearest
from fuseline.quant.gptq import gptq
from fuseline.quant.hqq import hqq
from fuseline.quant.linears import LayerReport, NothingQuantizedError
from fuseline.quant.methods import chosen_method, methods_of
from fuseline.quant.quantize import Quantization, quantize, quantize_linear
from fuseline.quant.storage import load_quantized, save_quantized, saved_about
from fuseline.quant.transformers_models import register_with_transformers

__all__ = [
    "CODES",
    "Format",
    "LayerReport",
    "NothingQuantizedError",
    "Quantization",
    "Quantized",
    "add_uint4",
    "chosen_method",
    "gptq",
    "hqq",
    "load_quantized",
    "methods_of",
    "pack_codes",
    "pack_uint4",
    "quantize",
    "quantize_linear",
    "register_with_transformers",
    "round_to_fitted",
    "round_to_nearest",
    "save_quantized",
    "saved_about",
    "unpack_codes",
    "unpack_uint4",
]
