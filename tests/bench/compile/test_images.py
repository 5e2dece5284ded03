"""The synthetic images: repeatable, standardized, in the layout convolutions want."""

from __future__ import annotations

import pytest
import torch

from fuseline.bench.compile.images import SyntheticImages

CPU = torch.device("cpu")


def loader(seed: int = 3, device: torch.device = CPU) -> SyntheticImages:
    return SyntheticImages(batch_size=16, image_size=24, num_classes=7, seed=seed, device=device, pool=3)


def test_a_seed_gives_its_batches_and_the_pool_goes_round() -> None:
    one, two, other = loader(), loader(), loader(seed=4)
    batches = [next(one) for _ in range(4)]
    for images, labels in batches:
        again_images, again_labels = next(two)
        assert torch.equal(images, again_images)
        assert torch.equal(labels, again_labels)
    assert torch.equal(batches[0][0], batches[3][0])
    assert not torch.equal(batches[0][0], batches[1][0])
    assert not torch.equal(batches[0][0], next(other)[0])


def test_images_are_standardized_and_channels_last() -> None:
    images, labels = next(loader())
    assert images.shape == (16, 3, 24, 24)
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert abs(float(images.mean())) < 0.02
    assert abs(float(images.std()) - 1) < 0.02
    assert labels.dtype == torch.int64
    assert set(labels.tolist()) <= set(range(7))


@pytest.mark.gpu
def test_a_gpu_is_sent_the_same_batches() -> None:
    here, there = loader(), loader(device=torch.device("cuda"))
    for _ in range(5):
        (images, labels), (gpu_images, gpu_labels) = next(here), next(there)
        assert gpu_images.device.type == "cuda"
        assert gpu_images.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(gpu_images.cpu(), images)
        assert torch.equal(gpu_labels.cpu(), labels)
