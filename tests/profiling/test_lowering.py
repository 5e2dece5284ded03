"""What torch.compile does to a model: the logs' messages become stages; a compilation has all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fuseline.cli.main import run
from fuseline.profiling.lowering import Lowered, Stage, lower, stage_of
from fuseline.profiling.lowering_text import guards_in_short, summary, text_of
from fuseline.profiling.small_models import MODELS
from fuseline.records import describe
from fuseline.report.lowering import save, sections

FORWARD = """TRACED GRAPH
 ===== Forward graph 0 =====
 /somewhere/torch/fx/_lazy_graph_module.py class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8]cpu"):
        # File: /home/me/model.py:16 in forward, code: x.sin().cos()
        sin: "f32[8]cpu" = torch.ops.aten.sin.default(primals_1)
        var_mean = torch.ops.aten.var_mean.correction(sin, [0])
        getitem: "f32[]cpu" = var_mean[0];  var_mean = None
        return (getitem, primals_1)
"""
CODE = """Output code:
# AOT ID: ['3_backward']
import torch
async_compile = AsyncCompile()
empty_strided_p2p = torch.empty

cpp_fused_sin_0 = async_compile.cpp_pybinding([], 'code')
def call(args): pass

def get_args(): pass
"""
GUARDS = """
TREE_GUARD_MANAGER:
+- RootGuardManager
| +- GLOBAL_STATE: ___check_global_state() against {"allow_bf16_reduce":0}
| +- GuardManager: source=L['x'], accessed_by=FrameLocalsGuardAccessor(key='x')
| | +- TENSOR_MATCH: check_tensor(L['x'], Tensor, torch.float32, size=[8])  # x.sin()
"""


def test_a_graph_is_told_by_its_title_and_counted() -> None:
    stage = stage_of(FORWARD)
    assert stage is not None
    assert (stage.key, stage.operations) == ("forward", 2)  # a part of var_mean is not computed
    assert stage.text.startswith("class GraphModule(torch.nn.Module):")
    assert "# File: model.py:16 in forward" in stage.text


def test_what_is_captured_counts_calls_and_not_the_names_of_arguments() -> None:
    message = (
        "TRACED GRAPH\n ===== __compiled_fn_1_ab =====\n x.py class GraphModule(torch.nn.Module):\n"
        '    def forward(self, L_x_: "f32[8]"):\n        l_x_ = L_x_\n'
        '        add: "f32[8]" = l_x_ + 1\n        y: "f32[8]" = add.sin()\n        return (y,)'
    )
    stage = stage_of(message)
    assert stage is not None
    assert (stage.key, stage.operations) == ("captured", 2)


@pytest.mark.parametrize(
    ("inputs", "key"), [("primals_1", "forward optimized"), ("x, tangents_1", "backward optimized")]
)
def test_inductors_graphs_are_told_apart_by_their_inputs(inputs: str, key: str) -> None:
    message = (
        f"TRACED GRAPH\n ===== AFTER POST GRAD =====\n class G(torch.nn.Module):\n def f({inputs}):\n  pass"
    )
    stage = stage_of(message)
    assert stage is not None
    assert stage.key == key


def test_code_is_without_imports_and_benchmark() -> None:
    stage = stage_of(CODE)
    assert stage is not None
    assert stage.key == "backward code"
    assert stage.text.startswith("cpp_fused_sin_0")
    assert stage.text.endswith("def call(args): pass")


@pytest.mark.parametrize(
    "message", ["GUARDS:", "Guard eval latency = 93 us", "Output code written to: /x.py"]
)
def test_other_messages_are_no_stage(message: str) -> None:
    assert stage_of(message) is None


def test_guards_in_short_name_tensors_and_count_the_rest() -> None:
    assert guards_in_short(GUARDS).splitlines() == [
        "TENSOR_MATCH: check_tensor(L['x'], Tensor, torch.float32, size=[8])",
        "and 1 other, of modules and flags",
    ]


def test_the_page_leaves_out_compilers_that_had_nothing_to_do(tmp_path: Path) -> None:
    stages = [Stage("captured", "class G: <b>", 1), Stage("ptx", ".visible .entry")]
    lowered = Lowered("mine", "", "cpu", describe("cpu"), 1.5, stages)
    assert [section.title for section in sections(lowered)] == ["The source", "TorchDynamo", "Triton"]
    html = save(lowered, tmp_path / "page").read_text()
    assert "class G: &lt;b&gt;" in html
    assert "What torch.compile does to mine" in html


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    return lower(MODELS["norm"](), torch.device("cpu"), name="norm")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inductor's own imports
def test_a_real_compilation_has_every_stage(lowered: Lowered) -> None:
    (captured,) = lowered.of("captured")
    assert captured.operations == 4  # bias, GELU, residual, norm
    for key in ("guards", "joint", "forward", "backward", "forward optimized", "backward optimized"):
        assert len(lowered.of(key)) == 1, key
    (joint,), (forward,), (backward,) = (lowered.of(key) for key in ("joint", "forward", "backward"))
    assert joint.operations is not None
    assert joint.operations > captured.operations
    assert "tangents_1" in backward.text
    assert "aten.rsqrt" in forward.text
    assert "kernel(" in lowered.of("forward code")[0].text
    assert "kernel(" in lowered.of("backward code")[0].text
    assert any("native_layer_norm" in one.operations and "gelu" in one.operations for one in lowered.fusions)
    text = text_of(lowered)
    assert text.startswith(f"norm on {lowered.environment.device}: {summary(lowered)}")
    assert [s.title for s in sections(lowered)] == [
        "The source",
        "TorchDynamo",
        "AOTAutograd",
        "TorchInductor",
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inductor's own imports
def test_four_sines_become_one_kernel_and_the_forward_alone_has_no_joint_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["explain", "compile", "sines", "--forward", "--device", "cpu", "--json", "--out", str(tmp_path)]
    assert run(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["operations"] for one in said["stages"] if one["stage"] == "captured"] == [4]
    assert [one["stage"] for one in said["stages"] if "joint" in one["stage"] or "back" in one["stage"]] == []
    assert len(said["kernels"]) == 1
    assert "sin" in said["kernels"][0]["operations"]
    assert (tmp_path / "index.html").is_file()


@pytest.mark.gpu
def test_on_a_gpu_the_code_is_tritons_and_a_kernels_ptx_is_kept() -> None:
    found = lower(MODELS["norm"](), torch.device("cuda"), name="norm")
    assert "triton" in found.of("forward code")[0].text
    (ptx,) = found.of("ptx")
    assert ".entry" in ptx.text


def test_unknown_models_are_met_with_the_names_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "compile", "nrm", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "Did you mean 'norm'" in said
    assert "MODULE:FUNCTION" in said


def test_a_dry_run_compiles_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "compile", "--device", "cpu", "--dry-run", "--out", str(tmp_path / "a")]) == 0
    assert "norm: compile forward and backward" in capsys.readouterr().out
    assert not (tmp_path / "a").exists()
