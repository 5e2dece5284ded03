"""The suite itself: every model builds, runs forward and backward, and has the sites listed for it."""

from __future__ import annotations

import pytest
import torch

from .architecture import Model
from .exactness import named_tensors, run
from .home_made import HOME_MADE
from .site_list import listed_names, site_list
from .transformers_models import QUICK, TRANSFORMERS_MODELS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ALL = [
    pytest.param(model, id=model.name, marks=[] if model.name in QUICK else pytest.mark.full)
    for model in TRANSFORMERS_MODELS
] + [pytest.param(model, id=model.name) for model in HOME_MADE]


@pytest.fixture(autouse=True)
def _needs_transformers(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    if callspec and callspec.params["model"] in TRANSFORMERS_MODELS:
        pytest.importorskip("transformers", reason="needs transformers to build its models")


@pytest.mark.parametrize("model", ALL)
def test_runs_forward_and_backward(model: Model) -> None:
    built = model.build()
    for training in (True, False):
        built.train(training)
        for batch in (model.training_batch(), model.evaluation_batch()):
            result = run(built, batch)
            assert result.outputs
            assert result.gradients
            for name, value in {**result.outputs, **result.gradients}.items():
                assert value.isfinite().all(), name
            moved = sum(float(gradient.abs().sum() > 0) for gradient in result.gradients.values())
            assert moved > 0.8 * len(result.gradients)  # a few biases that softmax cancels may have none


@pytest.mark.parametrize("model", ALL)
def test_is_built_the_same_every_time_and_its_batches_differ(model: Model) -> None:
    one, two = model.build(), model.build()
    assert all(
        torch.equal(left, right)
        for left, right in zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    )
    training, evaluation = named_tensors(model.training_batch()), named_tensors(model.evaluation_batch())
    assert training.keys() == evaluation.keys()
    assert all(training[name].shape != evaluation[name].shape for name in training)
    again = named_tensors(model.training_batch())
    assert all(torch.equal(training[name], again[name]) for name in training)


@pytest.mark.parametrize("model", ALL)
def test_listed_sites_are_modules_that_run(model: Model) -> None:
    built = model.build()
    listed = site_list(model.name, built)
    called: set[int] = set()
    for module in built.modules():
        module.register_forward_hook(lambda module, arguments, output: called.add(id(module)))
    for batch in (model.training_batch(), model.evaluation_batch()):
        built(**batch)
    modules = dict(built.named_modules(remove_duplicate=False))
    for site in listed.must:
        assert id(modules[site.path]) in called, str(site)
        assert all(path in modules for _, path in site.others), str(site)
    must = {(site.kind, site.path) for site in listed.must}
    assert len(must) == len(listed.must)
    for site in (*listed.may, *listed.refuse):
        assert site.why, str(site)
        assert (site.kind, site.path) not in must, str(site)


def test_forty_models_of_which_at_most_a_third_is_like_llama() -> None:
    assert len(TRANSFORMERS_MODELS) == 40
    assert 3 * sum(model.llama_like for model in TRANSFORMERS_MODELS) <= 40
    assert len(HOME_MADE) >= 15
    names = [model.name for model in (*TRANSFORMERS_MODELS, *HOME_MADE)]
    assert len(set(names)) == len(names)
    assert set(QUICK) < set(names)
    assert len(QUICK) == 8


def test_every_model_has_its_sites_listed_and_no_other_has() -> None:
    assert sorted(listed_names()) == sorted(model.name for model in (*TRANSFORMERS_MODELS, *HOME_MADE))
