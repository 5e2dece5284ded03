"""examples/custom_op/relu_triton.py: right and compiled on a GPU; it explains itself without one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "custom_op"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_relu_triton", FOLDER / "relu_triton.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_is_missing(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main()
    said = capsys.readouterr().out
    assert "Triton is not installed" in said or "there is no CUDA device" in said
    assert "relu.py" in said


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(33, 70), (0, 4), (1,), (4097,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_relu(example: ModuleType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    y = example.relu(x)
    assert torch.equal(y, torch.relu(x))
    (grad,) = torch.autograd.grad(y.sum(), x)  # an expanded gradient
    assert torch.equal(grad, (x > 0).to(dtype))


@pytest.mark.gpu
def test_nan_stays_nan_and_a_transposed_input_is_right(example: ModuleType) -> None:
    x = torch.tensor([[float("nan"), -1.0, 2.0]], device="cuda").t()
    torch.testing.assert_close(example.relu(x), torch.relu(x), equal_nan=True)


@pytest.mark.gpu
def test_it_compiles_to_one_graph_with_its_backward(example: ModuleType) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: 3 * example.relu(x - 1), fullgraph=True, dynamic=True)
    for rows in (3, 4, 9):
        x = torch.randn(rows, 2 * rows, device="cuda", requires_grad=True)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, 3 * (x > 1).float())


@pytest.mark.gpu
def test_the_operators_pass_opcheck(example: ModuleType) -> None:
    x = torch.randn(5, 7, device="cuda", requires_grad=True)
    torch.library.opcheck(torch.ops.relu_triton.relu.default, (x,))


@pytest.mark.gpu
def test_the_script_prints_its_times() -> None:
    script = [sys.executable, str(FOLDER / "relu_triton.py")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "in one graph" in done.stdout
    assert "Triton  " in done.stdout
