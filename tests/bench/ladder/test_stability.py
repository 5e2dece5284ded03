"""Seed 001's Appendix A, in numbers."""

from __future__ import annotations

import math

import pytest
import torch

from fuseline.bench.ladder import stability
from fuseline.records import describe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def records():
    found = stability.measure(CPU, describe("cpu"), magnitudes=(1.0, 64.0))
    return {(r.case["variant"], r.case["dtype"], r.case["magnitude"]): r for r in found}


def test_every_formula_is_right_for_ordinary_inputs(records):
    for variant in stability.VARIANTS:
        assert records[variant, "fp32", 1.0].value < 1e-5
        assert records[variant, "bf16", 1.0].value < 2e-2
        assert records[variant, "fp16", 1.0].value < 2e-3


def test_scaling_the_product_overflows_where_scaling_the_factors_does_not(records):
    after, before = records["scale_after", "fp16", 64.0], records["scale_before", "fp16", 64.0]
    assert after.case["overflow"] is True
    assert after.value is None
    assert before.case["overflow"] is False
    assert before.value < 5e-2


def test_the_unscaled_scores_overflow_sooner_by_the_fourth_root_of_the_head_dim():
    after = stability.overflow_magnitude(stability.scale_after, CPU)
    before = stability.overflow_magnitude(stability.scale_before, CPU)
    assert before / after == pytest.approx(math.sqrt(math.sqrt(stability.SHAPE["head_dim"])), rel=0.1)


def test_a_formula_that_cannot_overflow_has_no_magnitude():
    assert stability.overflow_magnitude(lambda q, k, v: v, CPU) is None


def test_agreement_with_sdpa_is_torchs_own_verdict(records):
    assert records["sdpa", "fp32", 1.0].case["allclose_sdpa"] is True
    assert records["scale_after", "fp16", 64.0].case["allclose_sdpa"] is False
