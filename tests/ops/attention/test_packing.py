"""cu_seqlens that do not rise from 0 to the number of rows are refused, by the host or on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseline.errors import InputError
from fuseline.ops import attention
from fuseline.ops.attention import packing

GOOD = [0, 4, 10]


def call(starts: list[int], device: str = "cpu", **options: Any) -> torch.Tensor:
    q = torch.randn(1, 2, 10, 16, device=device)
    held = torch.tensor(starts, dtype=torch.int32, device=device)
    return attention(q, q, q, cu_seqlens_q=held, cu_seqlens_k=held.clone(), **options)


@pytest.mark.parametrize(
    "starts, options, message",
    [
        ([0, 6, 4, 10], {}, r"cu_seqlens_q falls from 6 to 4"),
        ([0, 4, 9], {}, r"cu_seqlens_q goes from 0 to 9. It goes from 0 to the number of rows, 10"),
        ([0, 4, 11], {}, r"goes from 0 to 11"),
        ([1, 4, 10], {}, r"goes from 1 to 10"),
        ([-1, 4, 10], {}, r"goes from -1 to 10"),
        (GOOD, {"max_seqlen_q": 5}, r"cu_seqlens_q holds a sequence of 6 rows and max_seqlen_q is 5"),
        (GOOD, {"max_seqlen_k": 5}, r"cu_seqlens_k holds a sequence of 6 rows and max_seqlen_k is 5"),
    ],
)
def test_refuses(starts: list[int], options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(starts, **options)


def test_takes_empty_sequences() -> None:
    assert call([0, 0, 4, 4, 10, 10]).isfinite().all()


def test_checks_again_what_was_written() -> None:
    q, starts = torch.randn(1, 2, 10, 16), torch.tensor(GOOD, dtype=torch.int32)
    attention(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts)
    starts[1] = 12
    with pytest.raises(InputError, match="falls from 12 to 10"):
        attention(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts)
    with pytest.raises(InputError, match="goes from 0 to 10"):
        attention(q[:, :, :8], q, q, cu_seqlens_q=starts, cu_seqlens_k=starts)


def test_checks_once_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    fits = packing._fits
    monkeypatch.setattr(packing, "_fits", lambda *given: seen.append(given) or fits(*given))
    q, starts = torch.randn(1, 2, 10, 16), torch.tensor(GOOD, dtype=torch.int32)
    for _ in range(3):
        attention(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts)
    assert len(seen) == 1


def test_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    q, starts = torch.randn(1, 2, 10, 16), torch.tensor(GOOD, dtype=torch.int32)

    def attend(q: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return attention(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, starts), attend(q, starts))
    with pytest.raises(RuntimeError, match="cu_seqlens_q does not rise from 0"):
        compiled(q, torch.tensor([0, 12, 10], dtype=torch.int32))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"softmax_scale": torch.nan}, "softmax_scale=nan is not finite"),
        ({"softmax_scale": torch.inf}, "softmax_scale=inf is not finite"),
        ({"soft_cap": torch.nan}, "soft_cap=nan bounds no score"),
        ({"soft_cap": torch.inf}, "soft_cap=inf bounds no score"),
        ({"dropout_p": torch.nan}, "p=nan is not between 0 and 1"),
    ],
)
def test_refuses_numbers_that_are_none(options: dict[str, float], message: str) -> None:
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(InputError, match=message):
        attention(q, q, q, **options)


@pytest.mark.gpu
def test_the_device_asserts() -> None:
    """In a process of its own: a failed assertion ends the device's work for good."""
    import subprocess
    import sys

    program = (
        "import torch; from fuseline.ops import attention; "
        "q = torch.randn(1, 2, 10, 16, device='cuda', dtype=torch.bfloat16); "
        "starts = torch.tensor([0, 12, 10], dtype=torch.int32, device='cuda'); "
        "attention(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts); torch.cuda.synchronize()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "cu_seqlens_q does not rise from 0 to the number of rows" in ended.stderr + ended.stdout
