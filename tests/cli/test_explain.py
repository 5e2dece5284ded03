"""`fuseline explain OP`: words and JSON, on a GPU that is named."""

from __future__ import annotations

import json

import pytest

from fuseline import native
from fuseline.cli.main import run

pytestmark = pytest.mark.skipif(not native.ready("cpu"), reason="the native core, which decides, is missing")


def test_it_names_kernel_reason_and_layout(capsys) -> None:
    assert run(["explain", "softmax", "--shape", "64", "1024", "--dtype", "bfloat16", "--gpu", "h200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "softmax of [64, 1024] in bfloat16 on h200"
    assert lines[1:4] == [
        "forward: softmax_forward_few",
        "  because the rows are so few that all their threads run at once",
        "  64 blocks, 128 threads a row",
    ]


def test_it_prints_one_json_object(capsys) -> None:
    problem = ["--shape", "3000", "300000", "--dtype", "fp32", "--gpu", "h100"]
    assert run(["explain", "softmax", *problem, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    forward, _ = printed["plans"]
    assert printed["dtype"] == "float32"
    assert printed["gpu"]["processors"] == 132
    assert forward["blocks_per_row"] == 16
    assert forward["fallback"]["kernel"] == "softmax_forward_streamed"


def test_an_op_has_options_of_its_own(capsys) -> None:
    problem = ["cross_entropy", "--shape", "8192", "50257", "--gpu", "h200"]
    assert run(["explain", *problem, "--label-smoothing", "0.1"]) == 0
    assert "loss alone: cross_entropy_waiting" in capsys.readouterr().out
    assert run(["explain", *problem, "--causal"]) == 2
    assert "There is no option of cross_entropy named 'causal'" in capsys.readouterr().err


def test_attention_says_who_decides_between_libraries(capsys) -> None:
    problem = ["--shape", "2", "4", "128", "64", "--gpu", "h200"]
    assert run(["explain", "attention", *problem]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("These are Fuseline's own kernels.")
    assert run(["explain", "attention", *problem, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"]


def test_launches_of_a_small_layer_follow_one_another(capsys) -> None:
    problem = ["self_attention_layer", "--shape", "8", "64", "256", "--heads", "4", "--gpu", "h200"]
    assert run(["explain", *problem, "--captured"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("forward")] == [
        "forward: small_layer_heads",
        "forward: small_layer_out",
    ]
    assert "  64 blocks of 256 threads in clusters of 4, 117,392 bytes of shared memory a block" in lines


def test_a_step_of_adamw_is_explained(capsys) -> None:
    assert run(["explain", "adamw", "--shape", "768", "768", "--tensors", "148", "--gpu", "h200"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "adamw of [768, 768] in bfloat16 on h200",
        "step: adamw",
        "  because each element is computed alone: a block has a piece of 16 KB of one parameter",
        "  10,656 blocks of 256 threads",
    ]


def test_mistakes_are_named_in_one_line(capsys) -> None:
    assert run(["explain", "softmax", "--shape", "4", "--dtype", "int8", "--gpu", "h200"]) == 2
    assert "There is no dtype named 'int8'" in capsys.readouterr().err
