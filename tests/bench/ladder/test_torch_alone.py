"""The second baseline does what torch does best by itself, on a processor too."""

from __future__ import annotations

from fuseline.bench.ladder.machine import Machine
from fuseline.bench.ladder.spec import RunSpec
from fuseline.bench.ladder.torch_alone import rung_of, torch_alone


def test_on_a_processor_attention_written_out_is_tried_beside_sdpa(
    base: RunSpec, cpu: Machine, gpu: Machine
) -> None:
    ours = base.with_({"attention": "naive_fused", "loss": "fuseline"})
    eager = [spec for spec in torch_alone(ours, cpu) if spec.execution == "inductor"] or torch_alone(
        ours, cpu
    )
    assert [spec.attention for spec in eager] == ["naive", "auto"]
    assert {(spec.kernels, spec.loss, spec.optimizer) for spec in eager} == {("torch", "float32", "fused")}
    assert len({rung_of(spec).name for spec in eager}) == 2
    assert {spec.attention for spec in torch_alone(ours.with_({"attention": "flash"}), cpu)} == {"flash"}
    assert {spec.attention for spec in torch_alone(ours, gpu)} == {"auto"}
