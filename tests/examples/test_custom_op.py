"""examples/custom_op: the operators are right, differentiate, and trace."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fuseline import native, report
from fuseline.records import read

EXAMPLES = Path(__file__).parents[2] / "examples" / "custom_op"
pytestmark = pytest.mark.skipif(
    native.compilers()["cxx"].compiler is None,
    reason=f"needs a C++ compiler: {native.compilers()['cxx'].reason}",
)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
WAYS = [("cpp", "cpu"), pytest.param("cpp", "cuda", marks=pytest.mark.gpu)]
WAYS += [pytest.param("cuda", "cuda", marks=pytest.mark.gpu)]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", DEVICES)
def test_relu_is_relu(device: str) -> None:
    relu = example("relu").ReLU()
    x = torch.randn(33, 70, device=device).t().requires_grad_()
    y = relu(x)
    assert torch.equal(y, torch.relu(x))
    (ours,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(ours, (x > 0).float())
    torch.library.opcheck(torch.ops.relu_example.relu.default, (x,))


@pytest.mark.parametrize("device", DEVICES)
def test_relu_compiles_to_one_graph(device: str) -> None:
    torch._dynamo.reset()
    relu = example("relu").ReLU()
    compiled = torch.compile(relu, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 4, 9):
            x = torch.randn(rows, 2 * rows, device=device, requires_grad=True)
            compiled(x).square().sum().backward()
            torch.testing.assert_close(x.grad, 2 * torch.relu(x.detach()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(33, 70), (1, 5), (64, 32), (0, 3), (257, 1)])
def test_shared_memory_changes_no_value(
    shape: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    ops = example("shared_memory").load_operators()
    x = torch.randn(shape, device=device)
    x[:1, :1] = math.nan
    assert torch.equal(ops.relu(x.flatten()).nan_to_num(7.0), torch.relu(x.flatten()).nan_to_num(7.0))
    for shared in (False, True):
        assert torch.equal(ops.transpose(x, shared).nan_to_num(7.0), x.t().nan_to_num(7.0))
        assert torch.equal(ops.transpose(x.t(), shared).nan_to_num(7.0), x.nan_to_num(7.0))
    with pytest.raises(TypeError, match="takes float32"):
        ops.relu(x.flatten().double())


def cells(way: str, device: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The cell built that way, and torch's own with the same weights."""
    ours = example("lstm_cell").LSTMCell(5, 7, way).to(device)
    theirs = torch.nn.LSTMCell(5, 7).to(device)
    with torch.no_grad():
        theirs.weight_ih.copy_(ours.weight[:, :5])
        theirs.weight_hh.copy_(ours.weight[:, 5:])
        theirs.bias_ih.copy_(ours.bias)
        theirs.bias_hh.zero_()
    return ours, theirs


@pytest.mark.parametrize("way, device", [("python", "cpu"), *WAYS])
def test_lstm_cell_is_torchs(way: str, device: str) -> None:
    ours, theirs = cells(way, device)
    x = torch.randn(4, 5, device=device, requires_grad=True)
    h, c = (torch.randn(4, 7, device=device, requires_grad=True) for _ in range(2))
    weights = torch.randn(2, 4, 7, device=device)
    found, wanted = ours(x, h, c), theirs(x, (h, c))
    torch.testing.assert_close(found, wanted)
    mine = torch.autograd.grad((torch.stack(found) * weights).sum(), (x, h, c, ours.weight, ours.bias))
    other = torch.autograd.grad(
        (torch.stack(wanted) * weights).sum(), (x, h, c, theirs.weight_ih, theirs.weight_hh, theirs.bias_ih)
    )
    expected = (*other[:3], torch.cat(other[3:5], dim=1), other[5])
    for one, two in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("way, device", WAYS)
def test_lstm_cell_passes_opcheck(way: str, device: str) -> None:
    ours, _ = cells(way, device)
    x = torch.randn(4, 5, device=device)
    h, c = (torch.randn(4, 7, device=device) for _ in range(2))
    arguments = (x, h, c, ours.weight, ours.bias, way == "cuda")
    torch.library.opcheck(torch.ops.lstm_example.cell.default, arguments)
    if way == "cpp":
        double = [t.detach().double().requires_grad_() for t in arguments[:5]]
        assert torch.autograd.gradcheck(
            lambda *t: torch.ops.lstm_example.cell(*t, False), double, fast_mode=True
        )


@pytest.mark.parametrize("way, device", WAYS)
def test_lstm_cell_compiles_to_one_graph(way: str, device: str) -> None:
    torch._dynamo.reset()
    ours, theirs = cells(way, device)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (3, 4, 9):
            x, h, c = (torch.randn(batch, n, device=device) for n in (5, 7, 7))
            found = compiled(x, h, c)
            sum(t.sum() for t in found).backward()
            torch.testing.assert_close(found, theirs(x, (h, c)))


def test_lstm_script_prints_its_table_and_keeps_it(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    script = [sys.executable, str(EXAMPLES / "lstm_cell.py"), "--calls", "3", "--runs", "2", *out]
    done = subprocess.run(script, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "forward us" in done.stdout
    for way in ("python", "cpp"):
        assert f"│ {way} " in done.stdout
    if not torch.cuda.is_available():
        assert "Going without cuda: there is no CUDA device." in done.stdout
    records = read(tmp_path / "ops.jsonl")
    found = {(r.peer, r.case["direction"], r.metric) for r in records}
    assert found >= {(peer, way, "time_us") for peer in ("python", "aten") for way in ("fw", "bw")}
    assert ("aten", "fw", "paired_speedup") in found
    assert ("python", "fw", "paired_speedup") not in found
    page = report.build(records, tmp_path / "page").read_text()
    assert "An LSTM cell in Python, in C++ and with a kernel" in page
