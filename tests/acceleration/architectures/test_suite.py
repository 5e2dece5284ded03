"""Acceleration over the whole suite: right on every model, and at least 95 % of the listed sites found."""

from __future__ import annotations

import pytest
import torch

from fuseline.acceleration import accelerate

from .architecture import Model
from .check import check_model, count_sites, share_found
from .exactness import without_dropout
from .home_made import HOME_MADE
from .transformers_models import TRANSFORMERS_MODELS

pytestmark = [pytest.mark.usefixtures("proofs_shared"), pytest.mark.filterwarnings("ignore")]

EVERY_DAY = ("llama", "vit", "nanogpt", "encoder_pre_gelu", "learned_bias")
"""Home-made traps that take a moment run every day as well."""
SLOWER = ("encoder_post_relu", "encoder_post_gelu", "encoder_pre_relu", "decoder", "complex_llama")
LEAST = 0.95

ALL = [
    pytest.param(
        model,
        id=model.name,
        marks=[]
        if model.name in EVERY_DAY or (model in HOME_MADE and model.name not in SLOWER)
        else pytest.mark.full,
    )
    for model in (*TRANSFORMERS_MODELS, *HOME_MADE)
]


@pytest.mark.parametrize("model", ALL)
def test_is_right_and_nothing_is_left_without_a_reason(model: Model) -> None:
    if model in TRANSFORMERS_MODELS:
        pytest.importorskip("transformers", reason="needs transformers to build its models")
    checked = check_model(model, accelerate, time_sites=False)
    assert checked.problems == []
    assert [str(site) for site in checked.silent] == []


@pytest.mark.full
@pytest.mark.parametrize("model", (*TRANSFORMERS_MODELS, *HOME_MADE), ids=lambda m: m.name)
def test_is_right_in_bfloat16(model: Model) -> None:
    if model in TRANSFORMERS_MODELS:
        pytest.importorskip("transformers", reason="needs transformers to build its models")
    checked = check_model(model, accelerate, time_sites=False, dtype=torch.bfloat16)
    assert checked.problems == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", (*TRANSFORMERS_MODELS, *HOME_MADE), ids=lambda m: m.name)
def test_is_right_on_a_gpu(model: Model, dtype: torch.dtype) -> None:
    if model in TRANSFORMERS_MODELS:
        pytest.importorskip("transformers", reason="needs transformers to build its models")
    checked = check_model(model, accelerate, time_sites=False, dtype=dtype, device="cuda")
    assert checked.problems == []


@pytest.mark.full
def test_of_all_listed_sites_95_percent_are_found() -> None:
    pytest.importorskip("transformers", reason="needs transformers to build its models")
    counted = []
    for model in (*TRANSFORMERS_MODELS, *HOME_MADE):
        built = without_dropout(model.build())
        rows = accelerate(built, model.training_batch(), time_sites=False).sites
        counted.append(count_sites(model.name, built, rows))
    missed = [str(site) for one in counted for site in one.missed]
    assert share_found(counted) >= LEAST, missed
