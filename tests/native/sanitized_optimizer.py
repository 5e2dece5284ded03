"""AdamW and the norm of gradients, of tensors that begin on whole vectors and of others.

Not a test: the program that `test_sanitizer.py` runs under compute-sanitizer.
"""

from __future__ import annotations

import torch

from fuseline import native
from fuseline.optim import Update

LENGTHS = (1, 7, 0, 768, 4097, 8193, 20_000)


def main() -> None:
    assert native.ready("cuda"), native.status()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for offset in (0, 1):
            weights = [torch.randn(n + offset, device="cuda").to(dtype)[offset:] for n in LENGTHS]
            parameters = [torch.nn.Parameter(weight) for weight in weights]
            optimizer = torch.optim.AdamW(parameters, fused=True)
            updated = Update(optimizer, grad_clip=1.0)
            for _ in range(3):
                for p in parameters:
                    p.grad = torch.randn(p.numel() + offset, device="cuda").to(dtype)[offset:]
                updated()
                torch.cuda.synchronize()  # so that an error comes with its call
            assert updated.reason is None
    print("optimizer ran", flush=True)


if __name__ == "__main__":
    main()
