"""2:4 sparsity: of each four weights in a row, the two largest stay. torch's sparse products multiply.

A weight [N, K] is kept as the values [N, K / 2] that stay and a bit for each place, [N, K / 8] bytes, that
says where they stood. The first product on a GPU makes torch's own form of it
(`torch.sparse.to_sparse_semi_structured`), which stays beside these: together they take 1 1/8 of the dense
weight in 16 bits, so the format is for speed. In a file it takes 9/16.
Source: Mishra et al., Accelerating Sparse Deep Neural Networks, 2021.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn import functional as F

from fuseline.errors import InputError
from fuseline.ops.quant_codes import Word
from fuseline.ops.quant_packing import pack_codes, unpack_codes

DTYPES = (torch.float16, torch.bfloat16)
ROWS, COLUMNS = 32, 64  # sizes of which N and K are multiples, for both of torch's libraries
BITS = Word(base=2, codes=8, bytes=1)
CAPABILITY = (8, 0)


def largest_of_four(weight: torch.Tensor) -> torch.Tensor:
    """Which weights stay, [N, K] of bool: the two largest magnitudes of four, the first of equal ones."""
    if weight.dim() != 2 or weight.shape[1] % 4:
        raise InputError(
            f"2:4 sparsity takes [N, K] with K a multiple of 4; this weight is {list(weight.shape)}."
        )
    blocks = weight.unflatten(-1, (weight.shape[1] // 4, 4))
    order = blocks.abs().argsort(dim=-1, descending=True, stable=True)
    kept = torch.zeros(blocks.shape, dtype=torch.bool, device=weight.device)
    return kept.scatter_(-1, order[..., :2], True).flatten(-2)


def compress_24(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [N, K / 2], bits [N, K / 8]) of a weight whose K is a multiple of 8."""
    kept = largest_of_four(weight)
    return weight[kept].view(len(weight), weight.shape[1] // 2), pack_codes(kept.to(torch.uint8), BITS)


def expand_24(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The dense weight [N, K], with zeros where nothing stayed."""
    n, half = values.shape
    kept = unpack_codes(bits, 2 * half, BITS).bool()
    return values.new_zeros((n, 2 * half)).masked_scatter_(kept, values)


def refusal(device: torch.device) -> str | None:
    """Why a device has no 2:4 products; None if it has them."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"2:4 products run on NVIDIA GPUs, and this weight is on {device}"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"2:4 products need compute capability 8.0 or newer, which {name} does not have"
    return None


def unfit(n: int, k: int, dtype: torch.dtype) -> str | None:
    """Why a weight [n, k] cannot take part in 2:4 products; None if it can."""
    if dtype not in DTYPES:
        return f"2:4 products are for float16 and bfloat16, and its weight is {dtype}"
    if n % ROWS or k % COLUMNS or not n or not k:
        return (
            f"2:4 products take outputs in multiples of {ROWS} and inputs in multiples of {COLUMNS}, and it "
            f"has {n} and {k}"
        )
    return None


class Product24:
    """x W^T + bias through torch's 2:4 form of W. The first call makes it, and each call after W changed."""

    def __init__(self) -> None:
        self._of: tuple[Any, ...] | None = None
        self._sparse: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Product24:
        return Product24()  # torch's form cannot be copied, and is made again

    def __reduce__(self) -> tuple[type[Product24], tuple[()]]:
        return Product24, ()

    @_disable_dynamo  # as torch.compiler.disable, which would import the compiler with this module
    def __call__(
        self, x: torch.Tensor, values: torch.Tensor, bits: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [.., K] in the dtype of `values`. Raises InputError on other devices and in other dtypes."""
        reason = refusal(values.device)
        if reason is not None:
            raise InputError(f"{reason}. Move the model to a GPU, or quantize it to another format.")
        if x.dtype != values.dtype:
            raise InputError(f"A 2:4 weight of {values.dtype} was given x of {x.dtype}; both have one dtype.")
        of = (values.device, values.dtype, *(_state(tensor) for tensor in (values, bits)))
        if self._sparse is None or self._of != of:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message=".*SparseSemiStructuredTensor is in prototype stage"
                )
                self._sparse = torch.sparse.to_sparse_semi_structured(expand_24(values, bits))
            self._of = of
        y = F.linear(x.reshape(-1, x.shape[-1]), self._sparse, bias)
        return y.view(*x.shape[:-1], len(values))


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
