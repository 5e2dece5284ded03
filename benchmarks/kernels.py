"""Times each kernel alone against torch eager and torch.compile, as shares of the copy bandwidth of this GPU.

    python benchmarks/kernels.py

Prints one line an op, direction, dtype and row length: microseconds (median), GB/s and share of copy for
each peer. Traffic counts each input read once and each output written once; the L2 is overwritten before
every run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import tyro
from torch.nn import functional as F

from fuseline.native.kernels import Kernels, open_kernels
from fuseline.timing import copy_bandwidth_gbs, time_calls

ROW_LENGTHS = (128, 256, 512, 768, 1024, 1600, 2048, 4096, 8192, 16384, 32768, 50257, 65536, 131072, 262144)
ELEMENTS = {torch.bfloat16: 2**27, torch.float16: 2**27, torch.float32: 2**26}
NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Options:
    """What to time."""

    ops: tuple[str, ...] = ("layer_norm", "softmax", "cross_entropy")
    directions: tuple[str, ...] = ("fw", "bw", "fwbw")
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    lengths: tuple[int, ...] = ROW_LENGTHS
    peers: tuple[str, ...] = ("fuseline", "eager", "inductor")
    repeats: int = 30


@dataclass(frozen=True)
class Work:
    """One op in one direction over rows: the bytes it must move and a call for each peer."""

    traffic: int
    calls: dict[str, Callable[[], object]]


def compiled(function: Callable[..., object], *arguments: object) -> Callable[[], object]:
    torch._dynamo.reset()
    fast = torch.compile(function, dynamic=False)
    return lambda: fast(*arguments)


def softmax_forward(kernels: Kernels, x: torch.Tensor) -> Work:
    y = torch.empty_like(x)

    def eager(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    calls = {"fuseline": lambda: kernels.softmax_forward(x, y), "eager": lambda: eager(x)}
    return Work(2 * x.nbytes, {**calls, "inductor": compiled(eager, x)})


def softmax_backward(kernels: Kernels, x: torch.Tensor) -> Work:
    y, grad_out, grad_x = torch.softmax(x, -1), torch.randn_like(x), torch.empty_like(x)

    def eager(grad_out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._softmax_backward_data(grad_out, y, -1, y.dtype)

    calls = {
        "fuseline": lambda: kernels.softmax_backward(grad_out, y, grad_x),
        "eager": lambda: eager(grad_out, y),
    }
    return Work(3 * x.nbytes, {**calls, "inductor": compiled(eager, grad_out, y)})


def layer_norm_forward(kernels: Kernels, x: torch.Tensor) -> Work:
    n = x.shape[1]
    weight, bias = torch.randn(2, n, device=DEVICE, dtype=x.dtype)
    y = torch.empty_like(x)
    mean, rstd = torch.empty(2, len(x), device=DEVICE)

    def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> object:
        return torch.ops.aten.native_layer_norm(x, (n,), weight, bias, 1e-5)

    calls = {
        "fuseline": lambda: kernels.layer_norm_forward(x, weight, bias, y, mean, rstd),
        "eager": lambda: F.layer_norm(x, (n,), weight, bias),
    }
    return Work(2 * x.nbytes, {**calls, "inductor": compiled(eager, x, weight, bias)})


def layer_norm_backward(kernels: Kernels, x: torch.Tensor) -> Work:
    n = x.shape[1]
    weight, bias = torch.randn(2, n, device=DEVICE, dtype=x.dtype)
    grad_out, grad_x = torch.randn_like(x), torch.empty_like(x)
    grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, (n,), weight, bias, 1e-5)
    workspace = kernels.layer_norm_backward_workspace(x)

    def eager(
        grad_out: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
    ) -> object:
        wanted = [True, True, True]
        return torch.ops.aten.native_layer_norm_backward(grad_out, x, (n,), mean, rstd, weight, bias, wanted)

    def fuseline() -> None:
        gradients = grad_x, grad_weight, grad_bias
        kernels.layer_norm_backward(grad_out, x, weight, mean, rstd, *gradients, workspace)

    inputs = grad_out, x, mean, rstd, weight
    calls = {"fuseline": fuseline, "eager": lambda: eager(*inputs)}
    return Work(3 * x.nbytes, {**calls, "inductor": compiled(eager, *inputs)})


def cross_entropy(kernels: Kernels, x: torch.Tensor) -> Work:
    """The loss and its gradient, which ours writes in the same pass."""
    target = torch.randint(x.shape[1], (len(x),), device=DEVICE)
    loss, statistics = torch.empty(len(x), device=DEVICE), torch.empty(len(x), 2, device=DEVICE)
    grad, leaf = torch.empty_like(x), x.detach().requires_grad_()

    def eager(x: torch.Tensor, target: torch.Tensor) -> object:
        return torch.autograd.grad(F.cross_entropy(x, target, reduction="sum"), x)

    forward = torch.compile(lambda x, target: F.cross_entropy(x, target, reduction="sum"), dynamic=False)
    calls = {
        "fuseline": lambda: kernels.cross_entropy_forward(x, target, loss, statistics, grad),
        "eager": lambda: eager(leaf, target),
        "inductor": lambda: torch.autograd.grad(forward(leaf, target), leaf),
    }
    return Work(2 * x.nbytes, calls)


WORKS: dict[tuple[str, str], Callable[[Kernels, torch.Tensor], Work]] = {
    ("layer_norm", "fw"): layer_norm_forward,
    ("layer_norm", "bw"): layer_norm_backward,
    ("softmax", "fw"): softmax_forward,
    ("softmax", "bw"): softmax_backward,
    ("cross_entropy", "fwbw"): cross_entropy,
}


def cases(options: Options) -> Iterator[tuple[str, str, str, int]]:
    for op in options.ops:
        for direction in options.directions:
            for dtype in options.dtypes:
                for n in options.lengths if (op, direction) in WORKS else ():
                    yield op, direction, dtype, n


def main(options: Options) -> int:
    if not torch.cuda.is_available():
        print("This times CUDA kernels, and torch sees no CUDA device.", file=sys.stderr)
        return 2
    kernels = open_kernels()
    copy = copy_bandwidth_gbs(DEVICE)
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, copy {copy:.0f} GB/s")
    columns = "".join(f"{peer:>12} us   GB/s  share" for peer in options.peers)
    print(f"{'op':<12}{'':<4}{'dtype':<6}{'n':>7}{columns}")
    for op, direction, dtype, n in cases(options):
        rows = ELEMENTS[NAMES[dtype]] // n
        x = torch.randn(rows, n, device=DEVICE, dtype=NAMES[dtype])
        work = WORKS[op, direction](kernels, x)
        line = f"{op:<12}{direction:<4}{dtype:<6}{n:>7}"
        for peer in options.peers:
            time_us = time_calls(work.calls[peer], DEVICE, repeats=options.repeats).median
            bandwidth = work.traffic / time_us / 1e3
            line += f"{time_us:>15.1f}{bandwidth:>7.0f}{bandwidth / copy:>7.3f}"
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
