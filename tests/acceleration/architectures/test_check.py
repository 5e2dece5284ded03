"""The checker against accelerations that are honest, and against ones that are wrong in one way each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from fuseline import ops

from .architecture import Batch, Model
from .check import Checked, check_model, share_found
from .exactness import differences, float64_copy, in_float64, run
from .home_made import HOME_MADE
from .site_list import ListedSite, site_list
from .transformers_models import TRANSFORMERS_MODELS

MODELS = {model.name: model for model in (*TRANSFORMERS_MODELS, *HOME_MADE)}


@dataclass
class Row:
    path: str
    kind: str
    status: str = "kept"
    reason: str = ""


@dataclass
class FakeHandle:
    sites: list[Row] = field(default_factory=list)
    undoes: list[Callable[[], None]] = field(default_factory=list)

    def undo(self) -> None:
        for undo in self.undoes:
            undo()


def swap(handle: FakeHandle, module: nn.Module, forward: Callable[..., Any]) -> None:
    """Puts `forward` on the instance, as an acceleration does, and takes it away again in `undo`."""
    module.forward = forward  # type: ignore[method-assign]
    handle.undoes.append(lambda: delattr(module, "forward"))


class Swapped:
    """A forward that belongs to its module, and in a deep copy to the copied one."""

    def __init__(self, module: nn.Module, compute: Callable[..., torch.Tensor]) -> None:
        self.module, self.compute = module, compute

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.module, x)


def our_layer_norm(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    return ops.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def linear_in_two_steps(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    product = (x.reshape(-1, x.shape[-1]) @ linear.weight.t()).view(*x.shape[:-1], -1)
    return product if linear.bias is None else product + linear.bias


def norm_of(model: nn.Module) -> nn.Module:
    return model.get_submodule("transformer.ln_f")


def checked(acceleration: Callable[[nn.Module, FakeHandle], None], name: str = "nanogpt") -> Checked:
    def accelerate(model: nn.Module, batch: Batch) -> FakeHandle:
        handle = FakeHandle()
        acceleration(model, handle)
        return handle

    return check_model(MODELS[name], accelerate)


def assert_caught(result: Checked, *words: str) -> None:
    assert any(all(word in problem for word in words) for problem in result.problems), result.problems


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=model.name, marks=pytest.mark.full if model in TRANSFORMERS_MODELS else [])
        for model in MODELS.values()
    ],
)
def test_doing_nothing_is_right_and_finds_nothing(model: Model) -> None:
    if model in TRANSFORMERS_MODELS:
        pytest.importorskip("transformers", reason="needs transformers to build its models")
    result = check_model(model, lambda model, batch: FakeHandle())
    assert result.problems == []
    assert result.found == []
    assert result.silent == result.missed
    assert result.share == (0.0 if result.missed else 1.0)


def test_a_refusal_with_its_reason_is_not_silent() -> None:
    def refuse(model: nn.Module, handle: FakeHandle) -> None:
        for site in site_list("nanogpt", model).must:
            handle.sites.append(Row(site.path, site.kind, "refused", "this acceleration does nothing"))

    result = checked(refuse)
    assert result.problems == []
    assert result.share == 0
    assert result.missed
    assert not result.silent


def test_the_share_counts_sites_and_knows_their_other_names() -> None:
    def take(model: nn.Module, handle: FakeHandle) -> None:
        handle.sites += [
            Row("transformer.h.0.ln_2", "residual_norm"),  # the norm and the sum before it
            Row("transformer.h.1.mlp", "mlp", "not faster", "1.02 of the original's time"),
            Row("", "head_loss", "found"),
            Row("transformer.h.1.attn", "attention", "refused", "the GPU has no kernel for it"),
        ]

    result = checked(take)
    assert result.problems == []
    assert {(site.kind, site.path) for site in result.found} == {
        ("layer_norm", "transformer.h.0.ln_2"),
        ("residual_norm", "transformer.h.0.ln_2"),
        ("mlp", "transformer.h.1.mlp"),
        ("head_loss", "lm_head"),
    }
    assert result.share == 4 / 15
    assert share_found([result, Checked(found=[ListedSite("mlp", "a")])]) == 5 / 16
    silent = {(site.kind, site.path) for site in result.silent}
    assert ("attention", "transformer.h.0.attn") in silent
    assert ("attention", "transformer.h.1.attn") not in silent


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("nanogpt", "encoder_pre_gelu") else pytest.mark.full)
        for name in ("nanogpt", "encoder_pre_gelu", *(model.name for model in TRANSFORMERS_MODELS))
    ],
)
def test_right_swaps_everywhere_raise_no_alarm(name: str) -> None:
    """All layer norms by our op and all products in another order: other roundings, as good as the first."""
    if name in {model.name for model in TRANSFORMERS_MODELS}:
        pytest.importorskip("transformers", reason="needs transformers to build its models")
    computes = {nn.LayerNorm: our_layer_norm, nn.Linear: linear_in_two_steps}

    def swap_all(model: nn.Module, handle: FakeHandle) -> None:
        for module in model.modules():
            if compute := computes.get(type(module)):
                swap(handle, module, Swapped(module, compute))
        assert handle.undoes

    assert checked(swap_all, name).problems == []


def test_another_order_of_rounding_is_right() -> None:
    def reorder(model: nn.Module, handle: FakeHandle) -> None:
        norm = norm_of(model)

        def forward(input: torch.Tensor) -> torch.Tensor:
            variance, mean = torch.var_mean(input, -1, correction=0, keepdim=True)
            return (
                input * ((variance + 1e-5) ** -0.5 * norm.weight)
                - mean / (variance + 1e-5).sqrt() * norm.weight
            )

        swap(handle, norm, forward)

    problems = [problem for problem in checked(reorder).problems if not problem.startswith("copied")]
    assert problems == []


@pytest.mark.parametrize("factor", [1.01, 1 + 1e-5, float("nan")])
def test_a_norm_that_is_a_little_wrong_is_caught(factor: float) -> None:
    def break_norm(model: nn.Module, handle: FakeHandle) -> None:
        norm = norm_of(model)
        swap(handle, norm, lambda input: type(norm).forward(norm, input) * factor)

    result = checked(break_norm)
    word = "is not finite" if factor != factor else "has an error of"
    for mode in ("training mode, ", "evaluation mode, ", "evaluation mode without gradients, "):
        for batch in ("training batch", "evaluation batch"):
            assert_caught(result, f"accelerated, {mode}{batch}: output.0 {word}")


def test_a_wrong_gradient_under_a_right_output_is_caught() -> None:
    def detach_half(model: nn.Module, handle: FakeHandle) -> None:
        norm = norm_of(model)

        def forward(input: torch.Tensor) -> torch.Tensor:
            output = type(norm).forward(norm, input)
            return output.detach() + 0.5 * (output - output.detach())

        swap(handle, norm, forward)

    result = checked(detach_half)
    assert_caught(result, "transformer.wte.weight", "has an error of")
    assert not any("output" in problem for problem in result.problems if problem.startswith("accelerated"))


def test_a_missing_gradient_is_caught() -> None:
    def freeze(model: nn.Module, handle: FakeHandle) -> None:
        norm = norm_of(model)
        weight = norm.weight
        swap(handle, norm, lambda x: nn.functional.layer_norm(x, weight.shape, weight.detach(), None, 1e-5))

    assert_caught(checked(freeze), "transformer.ln_f.weight is missing")


@pytest.mark.parametrize("name", ["encoder_post_gelu", pytest.param("bert", marks=pytest.mark.full)])
def test_a_lost_padding_mask_is_caught(name: str) -> None:
    if name == "bert":
        pytest.importorskip("transformers", reason="needs transformers to build its models")

    def lose_mask(model: nn.Module, handle: FakeHandle) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if "padding" in kwargs:
                kwargs["padding"] = torch.zeros_like(kwargs["padding"])
            else:
                kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])
            return type(model).forward(model, *args, **kwargs)

        swap(handle, model, forward)

    result = checked(lose_mask, name)
    assert_caught(result, "accelerated, training mode, training batch: output", "has an error of")


def test_a_swap_that_works_on_the_training_batch_alone_is_caught() -> None:
    def remember(model: nn.Module, handle: FakeHandle) -> None:
        swap(handle, model, lambda x: model.positive(x))

    result = checked(remember, "data_dependent")
    assert_caught(result, "evaluation batch: output has an error of")
    assert not any("training batch" in problem for problem in result.problems)


def test_an_undo_that_leaves_something_is_caught() -> None:
    def stay(model: nn.Module, handle: FakeHandle) -> None:
        norm = norm_of(model)
        norm.forward = norm.forward  # type: ignore[method-assign]
        model.get_submodule("lm_head").register_forward_hook(lambda *arguments: None)

    result = checked(stay)
    assert_caught(result, "undo left forward on 'transformer.ln_f'")
    assert_caught(result, "undo left other hooks on 'lm_head'")


def test_an_undo_that_is_not_bit_exact_is_caught() -> None:
    def shift(model: nn.Module, handle: FakeHandle) -> None:
        def undo() -> None:
            weight = norm_of(model).weight
            nn.Module.register_forward_hook(norm_of(model), lambda module, _, out: out * (1 + 2**-22))
            assert weight.requires_grad

        handle.undoes.append(undo)

    assert_caught(checked(shift), "undone, training mode, training batch: not the bits of the original")


def test_a_copy_that_computes_with_the_weights_of_the_model_is_caught() -> None:
    def bind(model: nn.Module, handle: FakeHandle) -> None:
        norm = norm_of(model)
        swap(handle, norm, lambda input: type(norm).forward(norm, input))

    result = checked(bind)
    assert result.problems
    assert all(problem.startswith("copied: ") for problem in result.problems)


def test_a_model_that_no_longer_drops_is_caught() -> None:
    def keep_all(model: nn.Module, handle: FakeHandle) -> None:
        for module in model.modules():
            for name in ("p", "dropout"):
                if type(getattr(module, name, None)) is float:
                    setattr(module, name, 0.0)

    assert_caught(checked(keep_all), "nothing is dropped")


def test_dropout_that_does_not_follow_the_seed_is_caught() -> None:
    generator = torch.Generator().manual_seed(0)

    def own_noise(model: nn.Module, handle: FakeHandle) -> None:
        norm = norm_of(model)

        def forward(input: torch.Tensor) -> torch.Tensor:
            output = type(norm).forward(norm, input)
            drops = norm.training and model.get_submodule("transformer.drop").p > 0
            return output * (torch.rand(output.shape, generator=generator) > 0.1) if drops else output

        swap(handle, norm, forward)

    assert_caught(checked(own_noise), "two calls under the same seed differ")


def test_disturbed_parameters_modules_and_state_are_caught() -> None:
    def disturb(model: nn.Module, handle: FakeHandle) -> None:
        block = model.get_submodule("transformer.h.0")
        block.ln_1 = copy.deepcopy(block.ln_1)
        block.mlp.eval()
        with torch.no_grad():
            model.get_submodule("lm_head").weight.mul_(1 + 1e-6)
        model.get_submodule("transformer.h.1.attn").c_proj.weight.requires_grad_(False)

    result = checked(disturb)
    assert_caught(result, "'transformer.h.0.ln_1' is another module")
    assert_caught(result, "parameter transformer.h.0.ln_1.weight is another one")
    assert_caught(result, "'transformer.h.0.mlp' is in evaluation mode")
    assert_caught(result, "the value of lm_head.weight in state_dict changed")
    assert_caught(result, "parameter transformer.h.1.attn.c_proj.weight")


def test_a_replaced_module_and_a_new_state_key_are_caught() -> None:
    def replace(model: nn.Module, handle: FakeHandle) -> None:
        norm = norm_of(model)
        norm.__class__ = type("FastNorm", (type(norm),), {})
        norm.register_buffer("cache", torch.zeros(1))

    result = checked(replace)
    assert_caught(result, "the class of 'transformer.ln_f' became FastNorm")
    assert_caught(result, "the keys of state_dict changed")


def test_a_running_state_that_was_moved_is_caught() -> None:
    def call_once_more(model: nn.Module, handle: FakeHandle) -> None:
        model(MODELS["parametrized"].training_batch()["x"])

    assert_caught(checked(call_once_more, "parametrized"), "in state_dict changed")


def test_a_trap_that_was_taken_and_rows_without_sense_are_caught() -> None:
    def take(model: nn.Module, handle: FakeHandle) -> None:
        handle.sites += [
            Row("outside", "rms_norm", "kept"),
            Row("inside", "rms_norm", "refused", " "),
            Row("elsewhere", "layer_norm"),
            Row("middle", "convolution", "perhaps"),
        ]

    result = checked(take, "odd_epsilon")
    assert_caught(result, "rms_norm at outside was taken", "epsilon is added outside of the root")
    assert_caught(result, "rms_norm at 'inside' is refused without a reason")
    assert_caught(result, "no module 'elsewhere'")
    assert_caught(result, "'convolution' at 'middle' is none of the kinds")
    assert_caught(result, "unknown status 'perhaps'")


def test_the_traps_are_outside_of_the_rule() -> None:
    """Each almost-norm differs from the norm that it looks like by far more than rounding."""
    model = MODELS["odd_epsilon"].build()
    x = MODELS["odd_epsilon"].training_batch()
    right = run(model, x)
    with in_float64():
        exact = run(float64_copy(model), {"x": x["x"].double()})
    outside = model.get_submodule("outside")
    outside.forward = lambda v: nn.functional.rms_norm(v, (32,), outside.scale, 0.05)  # type: ignore[method-assign]
    wrong = run(model, x)
    assert differences(right.outputs, right.outputs, exact.outputs, torch.float32) == []
    assert (
        "output has an error of" in differences(wrong.outputs, right.outputs, exact.outputs, torch.float32)[0]
    )


def test_the_float64_run_is_not_rounded_inside() -> None:
    """A norm that says `.float()` is computed in float64 all the same."""

    class Narrowing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float().square().mean(dtype=torch.float32) * torch.full((), 1 / 3, dtype=torch.float32)

    x = torch.randn(64, dtype=torch.float64)
    with in_float64():
        result = Narrowing()(x)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, x.square().mean() / 3, rtol=1e-14, atol=0)
    assert torch.get_default_dtype() == torch.float32
