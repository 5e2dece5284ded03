"""Tensors reach the kernels as they lie: [B, H, T, D], [B, T, H, D] and a packed QKV are not copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuseline.ops import attention
from fuseline.ops.attention.call import make_call
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.candidates.arguments import aligned, in_pieces

Views = tuple[torch.Tensor, ...]
LAYOUTS: dict[str, Callable[[torch.Tensor, int, int], Views]] = {
    "BHTD": lambda x, H, D: x.view(x.shape[0], -1, 3, H, D).permute(2, 0, 3, 1, 4).contiguous().unbind(0),
    "BTHD": lambda x, H, D: tuple(
        y.contiguous().unflatten(-1, (H, D)).transpose(1, 2) for y in x.split(H * D, -1)
    ),
    "packed": lambda x, H, D: tuple(y.unflatten(-1, (H, D)).transpose(1, 2) for y in x.split(H * D, -1)),
    "packed by head": lambda x, H, D: x.unflatten(-1, (H, 3 * D)).transpose(1, 2).chunk(3, -1),
}


def views(layout: str, device: str, dtype: torch.dtype, B: int, T: int, H: int, D: int) -> Views:
    return LAYOUTS[layout](torch.randn(B, T, 3 * H * D, device=device).to(dtype), H, D)


class Copies(TorchDispatchMode):
    """Notes the operators that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::clone", "aten::copy_", "aten::_to_copy", "aten::contiguous"):
            self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["flash", "fuseline", "pick"])
def test_no_operator_copies(backend: str, layout: str) -> None:
    q, k, v = views(layout, "cpu", torch.float32, 2, 24, 4, 16)
    assert all(aligned(x) is x for x in (q, k, v))
    with Copies() as copies:
        attention(q, k, v, causal=True, backend=backend)
    assert copies.seen == []


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["efficient", "flash", "cudnn", "fuseline", "pick"])
def test_a_call_needs_room_for_its_result_alone(backend: str, layout: str) -> None:
    q, k, v = views(layout, "cuda", torch.bfloat16, 4, 1024, 16, 64)
    if backend != "pick" and (reason := CANDIDATES[backend].refuses(make_call(q, k, v).problem())):
        pytest.skip(reason)
    attention(q, k, v, causal=True, backend=backend)  # plans and libraries' workspaces
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(q, k, v, causal=True, backend=backend)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 1.9 * out.numel() * out.element_size(), "one tensor more would be a copy"


@pytest.mark.parametrize("S", [16, 17])
def test_rows_of_a_bias_whose_heads_stand_side_by_side_become_contiguous(S: int) -> None:
    """As T5 adds it to a mask: [B, T, S, H] in memory. The vendors' kernels read pieces of 16 bytes."""
    bias = torch.randn(2, 5, S, 4).permute(0, 3, 1, 2)
    rows = in_pieces(bias, S)
    assert torch.equal(rows, bias)
    assert rows.stride(-1) == 1
    assert all(stride % 4 == 0 for stride in rows.stride()[:-1])
