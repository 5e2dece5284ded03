"""What is picked and why: by name, by wish, by measurement, by neighbours, by rule; eager and traced."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import fuseline
from fuseline import native
from fuseline.errors import InputError
from fuseline.ops import attention
from fuseline.ops.attention import choice, rule, table_store
from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import Attended, UnfitError
from fuseline.ops.attention.candidates import CANDIDATES, flex
from fuseline.ops.attention.choice import Decision, decide
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.tables import Entry, Table

CPU = torch.device("cpu")
BASE = Problem(CPU, torch.float32, 2, 4, 4, 64, 64, 32)
picker = fuseline.picker

pytestmark = pytest.mark.usefixtures("nothing_is_remembered")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Entry]]:
    """Tables of a made-up GPU, which the test fills."""
    tables: dict[str, list[Entry]] = {"kept": [], "shipped": []}
    monkeypatch.setattr(table_store, "gpu_name", lambda device: "a-gpu")
    monkeypatch.setattr(table_store, "measured_here", lambda gpu: Table.of(tables["kept"]))
    monkeypatch.setattr(table_store, "shipped", lambda gpu: Table.of(tables["shipped"]))
    monkeypatch.setattr(table_store, "fitted", lambda gpu: None)
    monkeypatch.setattr(table_store, "combined", lambda gpu: Table.of(tables["shipped"] + tables["kept"]))
    monkeypatch.setattr(table_store, "clear_caches", lambda: None)
    return tables


def qkv(T: int = 64, S: int = 64, H: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, H, T, 32), torch.randn(2, H, S, 32), torch.randn(2, H, S, 32)


def test_by_rule_where_nothing_was_measured() -> None:
    decision = decide(BASE)
    assert decision.name == "flash"
    assert decision.why.startswith("by rule, nothing near was measured: on a CPU")
    assert decide(replace(BASE, sinks=True)).name == "math"


def test_the_rule_of_a_cpu_goes_by_what_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    def picked(dtype: torch.dtype, length: int, **fields: object) -> str:
        return decide(replace(BASE, dtype=dtype, seqlen_q=length, seqlen_k=length, **fields)).name

    monkeypatch.setattr(rule, "_multiplies_bfloat16", lambda: True)
    assert [picked(torch.bfloat16, n) for n in (8, 64, 512, 4096)] == ["flash", "plain", "plain", "flash"]
    assert picked(torch.bfloat16, 1024, causal="bottom_right") == "flash", "it skips what is hidden"
    assert picked(torch.bfloat16, 24, direction="fwbw") == "plain"
    assert picked(torch.bfloat16, 512, batch=512) == "flash", "scores would not fit"
    assert picked(torch.bfloat16, 64, sinks=True) == "math"
    monkeypatch.setattr(rule, "_multiplies_bfloat16", lambda: False)
    for dtype in (torch.bfloat16, torch.float16):
        assert [picked(dtype, n) for n in (32, 512)] == ["math", "flash"]
        assert picked(dtype, 512, direction="fwbw") == "math"


def test_the_fastest_measured_of_those_that_can(measured: dict[str, list[Entry]]) -> None:
    measured["shipped"].append(Entry(BASE, {"flash": 3.0, "math": 5.0, "cudnn": 1.0}))
    decision = decide(BASE)
    assert (decision.name, decision.why) == ("flash", "the fastest in the package's table")
    assert decision.times_us == {"flash": 3.0, "math": 5.0}
    assert decision.refused["cudnn"] == "it is a CUDA kernel; the device is cpu"
    measured["kept"].append(Entry(BASE, {"flash": 3.0, "math": 2.0}))
    decision = decide(BASE)
    assert (decision.name, decision.why) == ("math", "the fastest measured on this machine")


def test_what_was_not_measured_is_estimated(measured: dict[str, list[Entry]]) -> None:
    measured["shipped"] += [
        Entry(replace(BASE, seqlen_q=n, seqlen_k=n), {"flash": flash, "math": 10.0})
        for n, flash in ((32, 20.0), (512, 2.0), (1024, 2.0))
    ]
    assert decide(replace(BASE, seqlen_q=40, seqlen_k=40)).name == "math"
    decision = decide(replace(BASE, seqlen_q=700, seqlen_k=700))
    assert decision.name == "flash"
    assert decision.estimated_us["math"] > 2 * decision.estimated_us["flash"]
    assert decision.why.startswith("the fastest as estimated from 3 measured problems, the nearest 0.")
    assert decide(replace(BASE, dtype=torch.float64)).why.startswith("by rule"), "another size of numbers"


def test_networks_come_before_neighbours_and_after_measurements(
    measured: dict[str, list[Entry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fitted:
        problems = 7

        def estimate(self, problem: Problem, names: list[str]) -> dict[str, float]:
            times = {"flash": 3.0, "math": 2.0, "flex": 1.0, "plain": 4.0}
            return {name: times[name] for name in names if problem.dtype == torch.float32}

    monkeypatch.setattr(table_store, "fitted", lambda gpu: Fitted())
    flex = replace(choice.CANDIDATES["flex"], supports=lambda problem: None, offered_on=("cpu", "cuda"))
    monkeypatch.setitem(choice.CANDIDATES, "flex", flex)
    decision = decide(BASE)
    assert (decision.name, decision.estimated_us["math"]) == ("math", 2.0)
    assert decision.why == "the fastest as estimated from 7 problems measured on such a GPU"
    assert decide(BASE, may_compile=True).name == "flex"
    traced = decide(BASE, is_traced=True)
    assert (traced.name, traced.refused["flex"]) == ("math", "it wants inductor to compile what is traced")
    assert decide(BASE, is_traced=True, may_compile=True).name == "flex", "inductor compiles anyway"
    with picker.compiling():
        assert decide(BASE).name == "flex"
    assert decide(replace(BASE, dtype=torch.float64)).why.startswith("by rule"), "nothing is told of it"
    measured["kept"].append(Entry(BASE, {"flash": 3.0, "math": 5.0}))
    assert decide(BASE).name == "flash"


def test_what_compiles_is_picked_for_what_was_measured_alone(
    measured: dict[str, list[Entry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = replace(choice.CANDIDATES["flash"], compiles=True)
    monkeypatch.setitem(choice.CANDIDATES, "flash", flash)
    measured["kept"].append(Entry(BASE, {"flash": 1.0, "math": 10.0}))
    assert decide(BASE).name == "flash"
    assert decide(replace(BASE, batch=3)).name == "math"


def test_what_compiles_is_picked_by_the_packages_table_where_compiling_is_welcome(
    measured: dict[str, list[Entry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = replace(choice.CANDIDATES["flash"], compiles=True)
    monkeypatch.setitem(choice.CANDIDATES, "flash", flash)
    measured["shipped"].append(Entry(BASE, {"flash": 1.0, "math": 10.0}))
    assert decide(BASE).name == "math"
    assert decide(BASE, may_compile=True).name == "flash"
    with picker.compiling():
        assert decide(BASE).why == "the fastest in the package's table"


def test_determinism_drops_what_varies(
    measured: dict[str, list[Entry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = replace(choice.CANDIDATES["flash"], varies=lambda problem: "it varies")
    monkeypatch.setitem(choice.CANDIDATES, "flash", flash)
    measured["kept"].append(Entry(BASE, {"flash": 1.0, "math": 10.0}))
    assert decide(BASE).name == "flash"
    decision = decide(replace(BASE, deterministic=True))
    assert decision.name == "math"
    assert decision.refused["flash"] == "it varies"


def test_use_and_forbid() -> None:
    q, k, v = qkv()
    assert picker.explain(q, k, v).picked == "flash"
    with picker.use("math"):
        explained = picker.explain(q, k, v)
        assert (explained.picked, explained.why) == ("math", "fuseline.picker asks for it")
        with picker.use("naive", "cudnn"):
            assert picker.explain(q, k, v).picked == "naive", "also what is not offered, and what can"
        assert picker.explain(q, k, v).picked == "math"
    with picker.forbid("flash"):
        explained = picker.explain(q, k, v)
        assert explained.picked == "math"
        with (
            picker.forbid("math"),
            picker.forbid("fuseline", "plain"),
            pytest.raises(InputError, match="nothing runs"),
        ):
            attention(q, k, v)
    assert picker.explain(q, k, v).picked == "flash"
    with (
        picker.use("cudnn"),
        pytest.raises(InputError, match=r"nothing runs here \(cudnn: it is a CUDA kernel"),
    ):
        attention(q, k, v)
    with pytest.raises(InputError, match=r"no attention candidate named 'flsh'\. Did you mean 'flash'"):
        picker.use("flsh")


def test_the_environment_asks_and_forbids(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    monkeypatch.setenv(choice.VARIABLE, "math, naive")
    explained = picker.explain(q, k, v)
    assert explained.picked == "math"
    with picker.use("flash"):
        assert picker.explain(q, k, v).picked == "flash", "the context comes before the environment"
    monkeypatch.setenv(choice.VARIABLE, "-flash")
    explained = picker.explain(q, k, v)
    assert explained.picked == "math"
    reasons = {one.name: one.reason for one in explained.considered}
    assert reasons["flash"] == "FUSELINE_ATTENTION forbids it"
    monkeypatch.setenv(choice.VARIABLE, "pick")
    assert picker.explain(q, k, v).picked == "flash"
    monkeypatch.setenv(choice.VARIABLE, "fast")
    with pytest.raises(InputError, match="no attention candidate named 'fast'"):
        attention(q, k, v)


def test_what_is_picked_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name in ("math", "flash"):
        candidate = choice.CANDIDATES[name]
        spied = replace(candidate, run=lambda call, n=name, c=candidate: (ran.append(n), c.run(call))[1])
        monkeypatch.setitem(choice.CANDIDATES, name, spied)
    q, k, v = qkv()
    attention(q, k, v)
    with picker.use("math"):
        attention(q, k, v)
    attention(q, k, v, backend="math")
    monkeypatch.setenv(choice.VARIABLE, "math")
    attention(q, k, v)
    assert ran == ["flash", "math", "math", "math"]


def test_explains_in_words(measured: dict[str, list[Entry]]) -> None:
    measured["shipped"].append(Entry(replace(BASE, causal="bottom_right"), {"flash": 3.0, "math": 5.0}))
    q, k, v = qkv()
    text = str(picker.explain(q, k, v, causal=True))
    assert text.splitlines()[:2] == [
        "B=2 H=4 T=64 S=64 D=32 float32 fw on cpu, causal (bottom right)",
        "picked: flash (the fastest in the package's table)",
    ]
    assert " * flash       3.0 us\n" in text
    assert "   math        5.0 us\n" in text
    assert "   cudnn       it is a CUDA kernel; the device is cpu\n" in text
    assert "   naive       it runs on request\n" in text
    explained = picker.explain(q, k, v, causal=True, backend="math")
    assert (explained.picked, explained.why) == ("math", "the call names it")


def test_traced_the_pick_is_that_of_static_shapes(measured: dict[str, list[Entry]]) -> None:
    measured["shipped"].append(Entry(BASE, {"flash": 9.0, "math": 1.0}))
    torch._dynamo.reset()
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes if "attention" in str(node.target))
        return graph.forward

    compiled = torch.compile(attention, fullgraph=True, dynamic=False, backend=backend)
    q, k, v = qkv()
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))
    assert seen == ["aten._scaled_dot_product_attention_math"]
    q, k, v = qkv(T=48)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))


@pytest.mark.parametrize("backend, expected", [("inductor", True), ("aot_eager", False), ("eager", False)])
def test_a_trace_knows_whether_inductor_takes_it(backend: str, expected: bool) -> None:
    torch._dynamo.reset()
    found: list[bool] = []

    def probe() -> bool:
        found.append(choice._goes_to_inductor())
        return True

    probe._dynamo_marked_constant = True  # type: ignore[attr-defined]
    torch.compile(lambda x: x if probe() else -x, backend=backend, fullgraph=True)(torch.ones(1))
    assert found == [expected]
    assert not choice._goes_to_inductor(), "nothing is traced now"


def test_traced_again_when_another_is_asked_for() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    q, k, v = qkv()
    compiled(q, k, v)
    compiled(q, k, v)
    assert counter.frame_count == 1
    with picker.use("math"):
        compiled(q, k, v)
        compiled(q, k, v)
    assert counter.frame_count == 2
    compiled(q, k, v)
    assert counter.frame_count == 2, "the first trace serves again"


def test_a_context_inside_of_what_is_traced() -> None:
    torch._dynamo.reset()

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with picker.use("math"):
            return attention(q, k, v)

    q, k, v = qkv()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v, backend="math"), rtol=0, atol=0)
    assert choice.SETTINGS.used == ()


def test_lengths_that_vary_take_one_graph() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    for T, S in ((8, 24), (12, 32), (16, 65)):
        q, k, v = qkv(T, S)
        torch.testing.assert_close(
            compiled(q, k, v, causal=True), attention(q, k, v, causal=True), rtol=1e-5, atol=1e-5
        )
    assert counter.frame_count == 1


def test_a_candidate_of_two_parts_costs_what_its_parts_do(
    measured: dict[str, list[Entry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = replace(CANDIDATES["cudnn_fuseline"], supports=lambda problem: None, offered_on=("cpu",))
    own = replace(CANDIDATES["fuseline"], supports=lambda problem: None, offered_on=("cpu",))
    monkeypatch.setitem(choice.CANDIDATES, "cudnn_fuseline", mixed)
    monkeypatch.setitem(choice.CANDIDATES, "fuseline", own)
    trained = replace(BASE, direction="fwbw")
    measured["shipped"].append(Entry(trained, {"fuseline": 10.0, "flash": 11.0}))
    measured["shipped"].append(Entry(BASE, {"fuseline": 4.0, "cudnn": 3.0}))
    decision = decide(trained)
    assert decision.name == "cudnn_fuseline"
    assert decision.times_us == {"fuseline": 10.0, "flash": 11.0, "cudnn_fuseline": 9.0}
    measured["shipped"].append(Entry(BASE, {"fuseline": 4.0, "cudnn": 5.0}))
    assert decide(trained).name == "fuseline", "a slower forward pass is not borrowed"
    measured["kept"].append(Entry(trained, {"fuseline": 10.0, "cudnn_fuseline": 8.0}))
    assert decide(trained).times_us == {"fuseline": 10.0, "cudnn_fuseline": 8.0}, "what was measured counts"
    measured["kept"].clear()
    near = replace(trained, batch=3)
    assert "cudnn_fuseline" in decide(near).estimated_us


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """This machine seems to have an H200 with all kernels; what the package ships decides."""
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path))
    monkeypatch.setattr("fuseline.native.ready", lambda device: True)
    monkeypatch.setattr(torch.ops.fuseline, "attention", None, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(table_store, "gpu_name", lambda device: "nvidia-h200")
    table_store.clear_caches()
    yield
    table_store.clear_caches()


# batch, heads, key heads, length, causality as the models' attention asks for it
MODELS = {
    "Llama-1B": (4, 32, 8, 2048, "top_left"),
    "Qwen2-0.5B": (4, 14, 2, 2048, "top_left"),
    "GPT-2, 16": (16, 12, 12, 1024, "bottom_right"),
    "GPT-2, 64": (64, 12, 12, 1024, "bottom_right"),
    "ViT-B/16": (64, 12, 12, 197, "none"),
}


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("model", list(MODELS))
def test_on_an_h200_models_train_with_cudnns_forward_and_our_backward(model: str) -> None:
    batch, heads, kv_heads, T, causal = MODELS[model]
    asked = Problem(
        torch.device("cuda"), torch.bfloat16, batch, heads, kv_heads, T, T, 64, "fwbw", causal=causal
    )
    explained = picker.explain_problem(asked)
    assert (explained.picked, explained.why) == ("cudnn_fuseline", "the fastest in the package's table")
    assert picker.explain_problem(replace(asked, deterministic=True)).picked == "cudnn_fuseline"
    decision = decide(asked)
    assert choice._name_of(decision, True) == "cudnn_fuseline", "of one packed tensor, too"
    assert min(t for n, t in decision.times_us.items() if n != "cudnn_fuseline") == min(
        decision.times_us["fuseline"], decision.times_us["cudnn"]
    )
    with picker.forbid("cudnn", "cudnn_fuseline"):
        assert picker.explain_problem(asked).picked == "fuseline"
    forward = replace(asked, direction="fw")
    assert picker.explain_problem(forward).picked == "cudnn"
    with picker.forbid("cudnn"):
        assert picker.explain_problem(forward).picked == "fuseline", "its time is of the kernel that stands"


@pytest.mark.usefixtures("h200")
def test_on_an_h200_the_table_leaves_other_picks_to_what_is_faster() -> None:
    bert = Problem(torch.device("cuda"), torch.bfloat16, 64, 12, 12, 128, 128, 64, "fwbw", dropout_p=0.1)
    assert picker.explain_problem(bert).picked == "fuseline"
    gpt2 = replace(bert, seqlen_q=1024, seqlen_k=1024, causal="bottom_right")
    assert picker.explain_problem(gpt2).picked == "fuseline"
    llama_7b = replace(gpt2, batch=8, heads=32, kv_heads=32, seqlen_q=2048, seqlen_k=2048, head_dim=128)
    assert picker.explain_problem(replace(llama_7b, dropout_p=0.0)).picked == "cudnn"
    not_there = replace(gpt2, seqlen_q=1000, seqlen_k=1000, dropout_p=0.0)
    assert "estimated" in picker.explain_problem(not_there).why, "the nearest GPU's networks"


def test_autocast_picks_for_what_it_casts_to() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert picker.explain(q, k, v).problem.dtype == torch.bfloat16
        assert attention(q, k, v).dtype == torch.bfloat16


def test_the_package_knows_its_picker_without_being_asked_twice() -> None:
    code = (
        "import fuseline, sys\n"
        "print('torch' in sys.modules)\n"
        "fuseline.picker.use('flash'), fuseline.picker.use('math')\n"
        "print(fuseline.picker.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "fuseline.picker"], "the command line answers without torch"


def test_a_decision_says_what_was_refused() -> None:
    assert decide(BASE, "math") == Decision(BASE, "math", "the call names it")
    decision = decide(BASE)
    assert decision.refused["fa2"] == "flash-attn is not installed"
    assert decision.refused["naive"] == "it runs on request"


def test_a_cpu_is_not_asked_for_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking builds it, for a minute, and torch's kernels are faster there."""
    asked: list[str] = []
    monkeypatch.setattr(native, "ready", lambda device: asked.append(device) or False)
    q, k, v = qkv()
    attention(q, k, v)
    with picker.use("math"):
        attention(q, k, v)
    attention(q, k, v, backend="math")
    assert asked == []
    with pytest.raises(InputError, match="the native library is not loaded for cpu"):
        attention(q, k, v, backend="fuseline")
    assert asked == ["cpu"]


def test_a_candidate_that_finds_it_cannot_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FlexAttention does where its kernel needs more shared memory than the GPU has."""
    q = torch.randn(1, 2, 6, 8)
    wanted = attention(q, q, q, causal=True)
    tried = []

    def fail(call: Call) -> Attended:
        tried.append(call)
        raise UnfitError("it is too large")

    first = picker.explain(q, q, q, causal=True).picked
    monkeypatch.setitem(CANDIDATES, first, replace(CANDIDATES[first], run=fail))
    monkeypatch.setattr(choice, "_unfit", {})
    for _ in range(2):
        torch.testing.assert_close(attention(q, q, q, causal=True), wanted)
    assert len(tried) == 1
    explained = picker.explain(q, q, q, causal=True)
    assert explained.picked != first
    assert "it is too large" in str(explained)
    with pytest.raises(InputError, match=f"{first} does not run here: it is too large"):
        attention(q, q, q, causal=True, backend=first)
    choice.forget()


@pytest.mark.parametrize(
    "error, expected",
    [
        (RuntimeError("No valid triton configs. OutOfResources: out of resource: shared memory"), True),
        (RuntimeError("CUDA error: an illegal memory access"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_flex_knows_lack_of_shared_memory(error: RuntimeError, expected: bool) -> None:
    wrapped = RuntimeError("InductorError")
    wrapped.__cause__ = error
    assert flex._lacks_room(error) is expected
    assert flex._lacks_room(wrapped) is expected
