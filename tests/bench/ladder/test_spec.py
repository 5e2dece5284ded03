"""A spec, its model config and its records' case."""

from __future__ import annotations

import pytest

from fuseline.bench.ladder.spec import RunSpec, baseline
from fuseline.errors import InputError


def test_the_baseline_is_plain_pytorch_at_the_presets_shape():
    spec = baseline("gpt2")
    assert (spec.batch, spec.seqlen, spec.vocab_size) == (16, 1024, 50257)
    assert (spec.precision, spec.attention, spec.optimizer) == ("fp32", "naive", "unfused")
    assert (spec.kernels, spec.execution, spec.dropout, spec.bias) == ("torch", "eager", 0.0, False)
    assert baseline("gpt2", batch=2, seqlen=64, vocab_size=100).tokens == 128


def test_an_unknown_preset_is_told_with_what_is_near():
    with pytest.raises(InputError, match="'gpt2'"):
        baseline("gtp2")


def test_the_config_takes_every_choice_over():
    spec = RunSpec("tiny", 2, 32, 100, attention="flash", vocab_multiple=64, kernels="fuseline", bias=True)
    config = spec.config
    assert (config.block_size, config.vocab_size, config.padded_vocab_size) == (32, 100, 128)
    assert (config.attention, config.norm, config.bias, config.dropout) == ("flash", "fuseline", True, 0.0)


def test_a_case_says_all_that_the_spec_does():
    spec = RunSpec("tiny", 2, 32, 100, 0.1, True, "bf16", "flash", 64, "fused", "fuseline", "inductor-graph")
    assert RunSpec.of_case(spec.case()) == spec
    assert spec.case()["vocab"] == 128


def test_work_is_the_same_if_model_and_batch_are(base):
    assert base.same_work(base.with_({"precision": "bf16", "vocab_multiple": 64, "execution": "graph"}))
    assert not base.same_work(base.with_({"batch": 4}))
    assert not base.same_work(base.with_({"bias": True}))
