"""A step profiled for real, on the CPU; and one of a GPU, made by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import fuseline
import fuseline.nn
from fuseline.errors import InputError
from fuseline.profiling import difference, gained, profile_step, saved
from fuseline.profiling import session as session_module
from fuseline.profiling import step as step_module
from fuseline.profiling.ceilings import Ceilings
from fuseline.profiling.explained import explain
from fuseline.profiling.profile import WAITING, Profile
from fuseline.profiling.records import records_of
from fuseline.profiling.step import DETAILED, TRACE, assembled
from fuseline.profiling.text import next_thing
from fuseline.profiling.trace import STEP, parse
from fuseline.timing import summarize

CPU = torch.device("cpu")
CEILINGS = Ceilings(1000.0, {"bf16": 100.0, "fp32": 1.0})


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.norm = nn.LayerNorm(256)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.up(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor):
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).backward()
        optimizer.step()

    return step


@pytest.fixture(scope="module", autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Whatever tests of this process compiled before: modules are named in the profiles of these."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (step_module, session_module):
            patch.setattr(module, "anything_compiled", lambda: False)
        yield


@pytest.fixture(scope="module")
def small(nothing_compiled: None) -> Profile:
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = train_step(model, optimizer, torch.randn(512, 64))
    return profile_step(
        step, "cpu", model=model, optimizer=optimizer, ceilings=CEILINGS, steps=3, case={"model": "small"}
    )


def test_each_kind_of_work_has_a_row_and_the_most_to_save_comes_first(small):
    rows = small.by_kind()
    assert {"products", "norms", "pointwise", "optimizer", WAITING} <= {row.kind for row in rows}
    savings = [row.saving_ms or 0.0 for row in rows]
    assert savings == sorted(savings, reverse=True)


def test_a_product_is_counted_with_its_flops_in_its_modules(small):
    flops = sum(e.flops or 0.0 for e in small.entries if e.kind == "products")
    one, wide = 2 * 512 * 64 * 256, 2 * 512 * 256 * 256
    # Forward, and backward for weights and inputs; the first layer's input wants no gradient.
    assert flops == pytest.approx(2 * one + 4 * 3 * wide)
    rows = {row.name: row for row in small.by_kernel() if row.kind == "products"}
    assert "layers.*" in rows["aten::mm"].places
    assert rows["aten::mm"].calls == 2 * 4 + 1


def test_the_backward_pass_has_the_places_of_the_forward_pass(small):
    norm = [e for e in small.entries if e.name == "aten::native_layer_norm_backward"]
    assert [(e.place, e.part) for e in norm] == [("norm", "backward")]
    assert {e.part for e in small.entries} == {"forward", "backward", "optimizer"}


def test_memory_at_the_peak_is_told_apart(small):
    kinds = small.memory.by_kind()
    parameters = 4 * sum(p.numel() for p in Small().parameters())
    assert kinds["parameters"] == parameters
    assert kinds["optimizer state"] == pytest.approx(2 * parameters, rel=0.01)
    assert sum(kinds.values()) == pytest.approx(small.memory.bytes, rel=0.02)
    relu = [h for h in small.memory.holders if h.kind == "activations" and h.op == "aten::relu"]
    assert sum(h.bytes for h in relu) == 4 * 512 * 256 * 4


def test_the_first_line_says_what_to_do_next(small):
    assert str(small).splitlines()[4].startswith("Next: ")
    assert "By kind of work" in str(small)


def test_a_profile_is_read_as_it_was_written(small, tmp_path: Path):
    saved.write(small, tmp_path / "there")
    read = saved.read(tmp_path / "there")
    assert [row.name for row in read.by_kernel()] == [row.name for row in small.by_kernel()]
    assert read.by_kind()[0].ms == pytest.approx(small.by_kind()[0].ms, abs=1e-4)
    assert read.memory == small.memory
    assert read.environment == small.environment
    for name in (TRACE, DETAILED):
        assert json.loads(gzip.decompress((tmp_path / "there" / name).read_bytes()))["traceEvents"]


def test_what_is_no_profile_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="There is no profile in"):
        saved.read(tmp_path)
    (tmp_path / saved.PROFILE).write_text('{"format": "something else"}')
    with pytest.raises(InputError, match="not a profile that this version"):
        saved.read(tmp_path)
    (tmp_path / saved.PROFILE).write_text("{")
    with pytest.raises(InputError, match="Cannot read a profile"):
        saved.read(tmp_path)


def test_records_are_of_the_suite_and_finite(small):
    records = records_of(small)
    assert {r.suite for r in records} == {"profile"}
    by_metric = {r.metric for r in records}
    assert {"iteration_ms", "kernel_ms", "share_of_floor", "saving_ms", "peak_memory_gib"} <= by_metric
    kinds = {r.case["kind"] for r in records if r.metric == "kernel_ms" and "kernel" not in r.case}
    assert kinds == {row.kind for row in small.by_kind()}


def test_a_model_runs_the_same_ops_when_its_modules_are_named():
    """Fuseline's MLP is one op where its layers are plain, which a hook on one of them would end."""
    model = fuseline.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).train()
    x = torch.randn(2, 16, 64)

    def step() -> None:
        model(x).sum().backward()

    profile = profile_step(step, "cpu", model=model, ceilings=CEILINGS, steps=2)
    assert profile.notes == ()


def test_a_step_that_does_nothing_is_told_so():
    with pytest.raises(InputError, match="saw no work by PyTorch in the step"):
        profile_step(lambda: None, "cpu", ceilings=CEILINGS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_gpu_that_is_not_there_is_told():
    with pytest.raises(InputError, match="torch sees no CUDA device here"):
        profile_step(lambda: None, "cuda")


def test_a_session_profiles_what_stands_inside_it(tmp_path: Path):
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    step = train_step(model, optimizer, torch.randn(64, 64))
    step()
    with fuseline.profile(model, optimizer, device="cpu") as p:
        for _ in range(2):
            step()
            p.step()
    assert len(p.profile.samples) == 2
    assert p.profile.step_ms.n == 2
    assert {"norm", "up"} <= {e.place for e in p.profile.entries}
    page = p.save(tmp_path / "saved")
    assert "Timeline of the step" in page.read_text()
    assert saved.read(tmp_path / "saved").by_kind()
    assert str(p).splitlines()[0]
    with pytest.raises(InputError, match="taken already"), p:
        pass


def test_a_session_has_no_profile_before_its_end():
    session = fuseline.profile(device="cpu")
    with pytest.raises(InputError, match="before"):
        session.by_kind()
    with pytest.raises(InputError, match="inside"):
        session.step()


def test_the_public_name_stays_a_function():
    for _ in range(2):  # a submodule of that name would take the function's place at the second look
        assert callable(fuseline.profile)
        assert not isinstance(fuseline.profile, ModuleType)


def made_by_hand(trace, one_step) -> Profile:
    """Two timed steps of kernels alone, and one in detail."""
    timed = type(trace)()
    for number in range(3):
        timed.at = 1000.0 + 1000 * number
        timed.kernel("spin_kernel(long)", 5, 6, launched=1)
        if number < 2:
            one_step(timed)
            timed.events = [e for e in timed.events if e["cat"] != "cpu_op"]
    trace.range(STEP, 0, 400)
    one_step(trace)
    for event in timed.events:
        event["args"].pop("External id", None)
    taken = explain(parse(timed.events), parse(trace.events), (), on_gpu=True)
    made = assembled(taken, CPU, CEILINGS, step_ms=summarize([1.0]))
    return replace(made, device="cuda")


def test_a_gpus_step_is_timed_by_one_trace_and_explained_by_another(gpu_trace, one_step):
    profile = made_by_hand(gpu_trace, one_step)
    rows = {row.name: row for row in profile.by_kernel()}
    product = rows["nvjet_sm90_tst_192x192"]
    assert (product.kind, product.calls, product.ops) == ("products", 1, "aten::mm")
    assert product.ms == pytest.approx(0.04)
    flops, size = 2 * 1024 * 512 * 2048, 2 * (1024 * 512 + 512 * 2048 + 1024 * 2048)
    assert product.flops == flops
    assert product.floor_ms == pytest.approx(max(flops / 100e12, size / 1e12) * 1e3)
    assert product.saving_ms == pytest.approx(0.04 - product.floor_ms)
    assert rows["fuseline::norm_add_partials"].ms == pytest.approx(0.008)
    # 103 us of kernels in a step of a millisecond: the rest waits.
    kinds = {row.kind: row for row in profile.by_kind()}
    assert profile.busy_ms == pytest.approx(0.103)
    assert kinds[WAITING].ms == pytest.approx(1.0 - 0.103)
    assert profile.by_kind()[0].kind == WAITING
    assert "the GPU waits for the host for 0.897 ms" in next_thing(profile)
    assert sum(row.ms for row in kinds.values()) == pytest.approx(1.0)


def test_the_gaps_of_a_gpu_say_what_came_next(gpu_trace, one_step):
    profile = made_by_hand(gpu_trace, one_step)
    rows = {row.where: row for row in profile.gaps_by_place()}
    cast = rows["aten::copy_"]
    assert (cast.count, cast.ms, cast.waited_ms, cast.launches) == (
        1,
        pytest.approx(0.06),
        pytest.approx(0.05),
        1,
    )
    # Between the steps: from 215 us of the first to 50 of the second.
    assert rows["aten::mm"].ms == pytest.approx(1.0 - 0.215 + 0.05)


def test_the_difference_of_two_profiles_is_told_by_kind_and_kernel(gpu_trace, one_step):
    old = made_by_hand(gpu_trace, one_step)
    faster = tuple(replace(e, us=e.us / 2) if e.kind == "products" else e for e in old.entries)
    samples = tuple(
        tuple(replace(s, us=s.us / 2) if s.kind == "products" else s for s in step) for step in old.samples
    )
    new = replace(old, entries=faster, samples=samples, step_ms=summarize([0.98]))
    found = difference(old, new)
    assert found.kinds[0].kind == "products"
    assert found.kinds[0].gained_ms == pytest.approx(0.02)
    assert sum(c.gained_ms for c in found.kinds) == pytest.approx(0.02)
    assert [c.kind for c in gained(old, new)] == ["products"]
    assert gained(new, old) == ()
    assert "products 0.04 -> 0.02 ms (-0.02)" in str(found)
