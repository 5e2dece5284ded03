"""Random images and labels, handed out as a real loader hands out decoded photographs.

A step's time does not depend on what the pixels show, so nothing has to be downloaded; what a loader costs
does depend on its bytes, so these travel as photographs do: 8-bit pixels in pinned memory, sent to the device
and normalized there one batch ahead of the step, on a stream of their own.
"""

from __future__ import annotations

import torch

Batch = tuple[torch.Tensor, torch.Tensor]


class SyntheticImages:
    """An endless iterator of (images [B, 3, S, S] fp32 channels-last, labels [B] int64) on `device`.

    Batch i is a function of (seed, i mod pool): `pool` batches are drawn once and go round.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        image_size: int,
        num_classes: int,
        seed: int,
        device: torch.device,
        pool: int = 8,
    ) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        generator = torch.Generator().manual_seed(seed)
        shape = (batch_size, image_size, image_size, 3)
        self._pool = [
            (
                self._pinned(torch.randint(256, shape, dtype=torch.uint8, generator=generator)),
                self._pinned(torch.randint(num_classes, (batch_size,), generator=generator)),
            )
            for _ in range(pool)
        ]
        self._sent = 0
        self._ahead = self._send()

    def __iter__(self) -> SyntheticImages:
        return self

    def __next__(self) -> Batch:
        batch = self._ahead
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in batch:
                tensor.record_stream(current)
        self._ahead = self._send()
        return batch

    def close(self) -> None:
        """Let go of the pool."""
        self._pool = []

    def _send(self) -> Batch:
        pixels_BHWC, labels_B = self._pool[self._sent % len(self._pool)]
        self._sent += 1
        with torch.cuda.stream(self._stream):
            pixels_BHWC = pixels_BHWC.to(self._device, non_blocking=True)
            # Uniform bytes have mean 127.5 and deviation 73.9: the images come out standardized.
            images_BCHW = pixels_BHWC.permute(0, 3, 1, 2).float().sub_(127.5).div_(73.9)
            return images_BCHW, labels_B.to(self._device, non_blocking=True)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._stream is None else tensor.pin_memory()
