"""Models of the user's own: what may be returned, and what is said of anything else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseline.errors import InputError
from fuseline.profiling.user_code import load, loss_in, made

LAYER = nn.Linear(4, 2)
X = torch.ones(3, 4)


@pytest.mark.parametrize("batch", [X, (X,), {"input": X}], ids=["tensor", "tuple", "dict"])
def test_a_batch_is_a_tensor_a_tuple_or_a_dict(batch):
    work = made((LAYER, batch), "here:make")
    assert torch.equal(work.output(LAYER, work.tensors), LAYER(X))


def test_a_dicts_other_entries_go_to_the_model_as_they_are():
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return x * scale

    work = made((Scaled(), {"x": X, "scale": 3.0}), "here:make")
    assert work.tensors == (X,)
    assert torch.equal(work.output(work.model, (2 * X,)), 6 * X)


def test_the_loss_is_loss_fns_or_the_models():
    given = made((LAYER, X, lambda model, batch: model(batch).sum()), "here:make")
    assert given.loss(LAYER, given.tensors).item() == pytest.approx(LAYER(X).sum().item())
    loss = LAYER(X).mean()
    assert loss_in(loss) is loss
    assert loss_in({"loss": loss}) is loss
    assert loss_in((loss, X)) is loss

    class Output:
        def __init__(self) -> None:
            self.loss = loss

    assert loss_in(Output()) is loss


@pytest.mark.parametrize("output", [X, None, (X,), {"logits": X}, torch.tensor(1.0)])
def test_a_model_without_a_loss_is_told_so(output):
    with pytest.raises(InputError, match=r"no loss.*--forward"):
        loss_in(output)


@pytest.mark.parametrize("of_output", [lambda out, batch: out[1], lambda out, batch: out.logits.sum()])
def test_a_loss_fn_that_takes_the_model_for_its_output_is_told_so(of_output):
    with pytest.raises(InputError, match=r"called as loss_fn\(model, batch\), so call the model"):
        made((LAYER, X, of_output), "here").loss(LAYER, (X,))


def test_other_errors_of_a_loss_fn_are_its_own():
    with pytest.raises(TypeError, match="unsupported operand"):
        made((LAYER, X, lambda model, batch: model(batch).sum() + "1"), "here").loss(LAYER, (X,))


def test_a_loss_fn_must_return_a_scalar():
    work = made((LAYER, X, lambda model, batch: model(batch)), "here:make")
    with pytest.raises(InputError, match=r"a tensor of shape \(3, 2\); a loss is a tensor of one element"):
        work.loss(LAYER, work.tensors)


@pytest.mark.parametrize(
    "returned, said",
    [
        (3, "here:make returned an object of type int"),
        (None, "returned nothing"),
        ((LAYER,), "returned a tuple of 1"),
        ((X, LAYER), r"a tensor of shape \(3, 4\) where the model should be"),
        ((LAYER, "text"), "type str as the batch"),
        ((LAYER, ()), "a tuple of 0 as the batch"),
        ((LAYER, {"a": 1}), "type dict as the batch"),
        ((LAYER, X, 5), "type int as loss_fn"),
    ],
)
def test_anything_else_is_named_with_what_is_wanted(returned, said):
    with pytest.raises(InputError, match=said):
        made(returned, "here:make")


@pytest.mark.parametrize(
    "target, said",
    [
        ("plain", "names no function"),
        (":f", "names no function"),
        ("json:", "names no function"),
        ("no_such_module:f", "There is no module 'no_such_module' here"),
        ("json:no_such", "json has no function named 'no_such'"),
        ("json:__name__", "not a function"),
        ("missing.py:f", "There is no file missing.py"),
    ],
)
def test_a_function_that_cannot_be_found_is_told(target, said):
    with pytest.raises(InputError, match=said):
        load(target)


def test_a_file_is_named_by_its_path_and_its_imports_are_found(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it.py").write_text("WIDTH = 4\n")
    file = tmp_path / "my_model.py"
    file.write_text(
        "import torch\nfrom beside_it import WIDTH\n"
        "def make():\n    return torch.nn.Linear(WIDTH, 2), torch.ones(3, WIDTH)\n"
    )
    assert load(f"{file}:make").model.in_features == 4


def test_an_import_that_fails_inside_is_not_called_a_missing_module(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "needs_more.py").write_text("import no_such_package\n")
    with pytest.raises(InputError, match="Importing needs_more failed: No module named 'no_such_package'"):
        load("needs_more:make")
