"""Patch embeddings: convolutions whose kernels lie side by side, as a reordering and one product."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fuseline.acceleration.kinds.patch_embedding import patches_of

SIZES = {
    "one dimension": ((4,), (3, 3, 13)),
    "two dimensions": ((4, 4), (3, 3, 8, 16)),
    "uneven kernels": ((2, 3), (3, 5, 8, 9)),
    "images with something left over": ((4, 4), (3, 3, 11, 18)),
    "three dimensions": ((2, 3, 4), (2, 3, 4, 7, 9)),
    "one patch": ((32, 32), (2, 3, 32, 32)),
}


def convolution(kernel: tuple[int, ...], channels: int = 3, **options: Any) -> Any:
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(kernel) - 1]
    return kind(channels, 24, kernel, stride=kernel, **options)


class Maps(nn.Module):
    """What the convolution gives is read as it lies in memory, too."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.scale = part, nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.part(x) * self.scale
        return y.view(y.shape[0], -1) if y.is_contiguous() else y.flatten(1)


class Tokens(nn.Module):
    """As in vision transformers."""

    def __init__(self, turned: str = "transpose", cast: bool = False) -> None:
        super().__init__()
        self.projection, self.turned, self.cast = convolution((4, 4)), turned, cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.projection(x.to(self.projection.weight.dtype) if self.cast else x)
        if self.turned == "transpose":
            return y.flatten(2).transpose(1, 2)
        return y.reshape(y.shape[0], y.shape[1], -1).permute(0, 2, 1)


class Written(nn.Module):
    """The function, called by a class of its own on weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.Parameter(torch.randn(24, 3, 4, 4) / 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x, self.kernels, stride=4)


def found(fast: Any) -> list[tuple[str, str]]:
    return [(site.path, site.status) for site in fast.sites if site.kind == "patch_embedding"]


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check(keep_all: Any, model: nn.Module, x: torch.Tensor, path: str) -> Any:
    """Taken at `path`, and right; returns the handle."""
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    assert (path, "kept") in found(fast)
    for mine, theirs in zip(gradients(model, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    (runs,) = [runs for runs in fast.report().sites if runs.path == path]
    assert runs.taken
    assert not runs.declined
    return fast


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kernel, shape", SIZES.values(), ids=list(SIZES))
def test_convolutions_side_by_side_are_products(
    kernel: tuple[int, ...], shape: tuple[int, ...], bias: bool, keep_all: Any
) -> None:
    model = Maps(convolution(kernel, shape[1], bias=bias))
    fast = check(keep_all, model, torch.randn(shape), "part")
    forward = model.part.__dict__["forward"]
    assert forward.taken
    fast.undo()
    assert "forward" not in model.part.__dict__


@pytest.mark.parametrize(
    "part", [Tokens(), Tokens("permute"), Tokens(cast=True)], ids=lambda part: part.turned
)
def test_tokens_are_given_as_the_product_has_them(part: nn.Module, keep_all: Any) -> None:
    model = Maps(copy.deepcopy(part))
    x = torch.randn(3, 3, 8, 16)
    check(keep_all, model, x, "part")
    assert model.part(x).is_contiguous()


def test_classes_of_their_own_are_found(keep_all: Any) -> None:
    check(keep_all, Maps(Written()), torch.randn(3, 3, 8, 16), "part")


def test_channels_last_stay_so(keep_all: Any) -> None:
    model = Maps(convolution((4, 4)))
    x = torch.randn(3, 3, 8, 16).to(memory_format=torch.channels_last)
    check(keep_all, model, x, "part")
    assert model.part(x).is_contiguous(memory_format=torch.channels_last)


def test_autocast(keep_all: Any) -> None:
    model, x = Maps(convolution((4, 4))), torch.randn(3, 3, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.part(x)
        keep_all(model, x)
        mine = model.part(x)
    assert mine.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(mine, expected, rtol=0.02, atol=0.02)
    assert model.part.__dict__["forward"].taken


@pytest.mark.parametrize(
    "part, shape, reason",
    [
        (convolution((4, 4), padding=1), (3, 3, 8, 16), "padded"),
        (convolution((4, 4), dilation=2), (3, 3, 8, 16), "dilated"),
        (convolution((4, 4), 6, groups=2), (3, 6, 8, 16), "groups"),
        (convolution((4, 4)), (3, 8, 16), "batch dimension"),
    ],
    ids=["padding", "dilation", "groups", "no batch"],
)
def test_what_is_left_has_a_reason(
    part: nn.Module, shape: tuple[int, ...], reason: str, keep_all: Any
) -> None:
    fast = keep_all(Maps(part), torch.randn(shape))
    (site,) = [site for site in fast.sites if site.kind == "patch_embedding"]
    assert site.status == "refused"
    assert reason in site.reason


@pytest.mark.parametrize(
    "part",
    [nn.Conv2d(3, 24, 3, stride=2), nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(3, 24, 1)],
    ids=["overlapping", "a stride of one", "points"],
)
def test_other_convolutions_are_no_sites(part: nn.Module, keep_all: Any) -> None:
    assert found(keep_all(Maps(part), torch.randn(3, 3, 8, 16))) == []


def test_other_sizes_and_wrong_ones_get_the_original(keep_all: Any) -> None:
    model = Maps(convolution((4, 4)))
    plain = copy.deepcopy(model)
    keep_all(model, torch.randn(3, 3, 8, 16))
    for shape in ((2, 3, 8, 16), (3, 3, 12, 16), (3, 3, 9, 20)):
        x = torch.randn(shape)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    for shape in ((3, 3, 2, 16), (3, 4, 8, 16)):
        with pytest.raises(RuntimeError):
            model(torch.randn(shape))


def test_hooks_on_the_convolution_of_tokens_are_called(keep_all: Any) -> None:
    part, x, seen = Tokens(), torch.randn(3, 3, 8, 16), []
    model = Maps(part)
    fast = keep_all(model, x)
    assert ("part", "kept") in found(fast)
    part.projection.register_forward_hook(lambda *_: seen.append(1))
    model(x)
    assert seen == [1]


def test_parametrized_weights_are_left(keep_all: Any) -> None:
    model = Maps(convolution((4, 4)))
    parametrize.register_parametrization(model.part, "weight", nn.Tanh())
    assert ("part", "kept") not in found(keep_all(model, torch.randn(3, 3, 8, 16)))


def test_patches_are_those_of_unfold() -> None:
    x = torch.randn(2, 3, 9, 14)
    patches = patches_of(x, (4, 3))
    expected = torch.nn.functional.unfold(x, (4, 3), stride=(4, 3)).transpose(1, 2)
    assert torch.equal(patches.flatten(1, 2), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "part", [Tokens(), convolution((4, 4)), convolution((2, 4, 4))], ids=["tokens", "maps", "3d"]
)
def test_gradients_on_a_gpu_against_float64(part: nn.Module, keep_all: Any) -> None:
    sizes = (8, 16, 16) if isinstance(part, nn.Conv3d) else (48, 48)
    x = torch.randn(8, 3, *sizes, device="cuda").bfloat16()
    model = Maps(copy.deepcopy(part)).to("cuda", torch.bfloat16)
    wide, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    assert ("part", "kept") in found(keep_all(model, x))
    ours, theirs, exact = gradients(model, x), gradients(plain, x), gradients(wide, x.double())
    for mine, near, far in zip(ours, theirs, exact, strict=True):
        own = (near.double() - far).norm()
        assert (mine.double() - far).norm() <= 2 * own + torch.finfo(torch.bfloat16).eps * far.norm()
