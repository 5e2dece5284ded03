"""Times the kernels of the norms as shares of the copy bandwidth of this GPU, with other layouts beside.

    python benchmarks/norms.py

One line an op, direction, dtype and row length; `layouts` adds a line for each layout tried in place of the
one that is chosen. Traffic counts each input read once and each output written once; the L2 is overwritten
before every run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import tyro

from fuseline import native
from fuseline.native.kernels import NORMS, Kernels, open_kernels
from fuseline.native.layouts import VECTOR_BYTES, Layout
from fuseline.native.norm_layouts import norm_layouts
from fuseline.timing import copy_bandwidth_gbs, time_calls

LENGTHS = (
    8,
    31,
    128,
    512,
    768,
    1000,
    1024,
    1600,
    2048,
    4096,
    8192,
    12288,
    16384,
    32768,
    50257,
    65536,
    131072,
)
NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Options:
    """What to time."""

    kinds: tuple[str, ...] = NORMS
    directions: tuple[str, ...] = ("fw", "bw")
    dtypes: tuple[str, ...] = ("bf16",)
    lengths: tuple[int, ...] = LENGTHS
    layouts: bool = False
    """Also layouts other than the one chosen."""
    rows: int = 0
    """Rows; 0 for as many as fill 256 MB."""
    repeats: int = 20


def work(kind: str, direction: str, x: torch.Tensor) -> tuple[int, Callable[[], object]]:
    """Bytes that have to move, and a call."""
    n = x.shape[1]
    weight, bias, x_bias = torch.randn(3, n, device=DEVICE, dtype=x.dtype)
    added, centred, drops = "add" in kind, "layer" in kind, "dropout" in kind
    residual = torch.randn_like(x) if added else None
    seed = torch.ones(1, dtype=torch.int64, device=DEVICE) if drops else None
    p = 0.1 if drops else 0.0
    given_bias = bias if centred else None
    given_x_bias = x_bias if drops else None
    ops = torch.ops.fuseline
    forward = (kind, x, residual, (n,), weight, given_bias, 1e-5, given_x_bias, p, seed, centred)
    if direction == "fw":
        op, shape = getattr(ops, kind), (n,)
        affine = (shape, weight, bias, 1e-5) if centred else (weight, 1e-5)
        drop = {"x_bias": x_bias, "p": p, "seed": seed} if drops else {}
        return x.nbytes * (4 if added else 2), lambda: op(x, *([residual] if added else []), *affine, **drop)
    _, total, mean, rstd = ops.norm_forward(*forward)
    saved = total if added else x
    grad_y, grad_sum = torch.randn_like(x), torch.randn_like(x) if added else None
    wanted = [True, drops, True, centred, drops]
    arguments = kind, grad_y, grad_sum, saved, (n,), mean, rstd, weight, given_bias, given_x_bias, p, seed
    tensors = 5 if drops else 4 if added else 3
    return x.nbytes * tensors, lambda: ops.norm_backward(*arguments, wanted)


def measure(
    kernels: Kernels, kind: str, direction: str, dtype: torch.dtype, n: int, options: Options
) -> Iterator[tuple[Layout | None, float, int]]:
    """The layout (None: the one that is chosen), the time in microseconds and the bytes to move."""
    rows = options.rows or 2**28 // (n * dtype.itemsize)
    traffic, call = work(kind, direction, torch.randn(rows, n, device=DEVICE, dtype=dtype))
    whole = "forward" if direction == "fw" else "backward"
    family = f"many_{kind}_{whole}"
    aligned = n * dtype.itemsize % VECTOR_BYTES == 0
    layouts = norm_layouts(kind, whole, n, dtype.itemsize) if options.layouts and aligned else ()
    for layout in (None, *layouts):
        kernels.override_plan(family, layout)
        try:
            yield layout, time_calls(call, DEVICE, repeats=options.repeats).median, traffic
        except RuntimeError:  # no kernel holds it
            continue
        finally:
            kernels.override_plan(family, None)


def main(options: Options) -> int:
    if not torch.cuda.is_available():
        print("This times CUDA kernels, and torch sees no CUDA device.", file=sys.stderr)
        return 2
    native.load()
    kernels = open_kernels()
    copy = copy_bandwidth_gbs(DEVICE)
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, copy {copy:.0f} GB/s")
    print(f"{'op':<24}{'':<4}{'dtype':<6}{'n':>7}{'us':>10}{'GB/s':>7}  share")
    for kind in options.kinds:
        for direction in options.directions:
            for dtype in options.dtypes:
                for n in options.lengths:
                    for layout, time_us, traffic in measure(
                        kernels, kind, direction, NAMES[dtype], n, options
                    ):
                        bandwidth = traffic / time_us / 1e3
                        line = f"{kind:<24}{direction:<4}{dtype:<6}{n:>7}{time_us:>10.1f}{bandwidth:>7.0f}"
                        print(f"{line}{bandwidth / copy:>7.3f}  {layout or ''}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
