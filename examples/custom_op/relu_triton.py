"""The operator of relu.py once more, as a Triton kernel of one's own: in autograd, under torch.compile, and
timed beside the CUDA kernel.

python examples/custom_op/relu_triton.py

Triton compiles for GPUs alone. Without one this file can be imported and says what is missing; then `relu`
and `relu_backward` are not there.
"""

import statistics

import torch
from torch.library import triton_op, wrap_triton

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = None

BLOCK = 1024
ELEMENTS = 2**24
CALLS = 20


def why_not() -> str | None:
    """What the kernels lack here; None where they run."""
    if triton is None:
        return "Triton is not installed; torch for CUDA brings it."
    if not torch.cuda.is_available():
        return "Triton compiles for GPUs, and there is no CUDA device."
    return None


if triton is not None:

    @triton.jit
    def _forward(x, y, count, BLOCK: tl.constexpr):
        # A program owns BLOCK elements that are neighbours in memory; Triton divides them among threads.
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        value = tl.load(x + at, mask=inside)
        tl.store(y + at, tl.where(value < 0, 0.0, value), mask=inside)  # NaN stays NaN

    @triton.jit
    def _backward(grad_y, y, grad_x, count, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        grad = tl.load(grad_y + at, mask=inside)
        tl.store(grad_x + at, tl.where(tl.load(y + at, mask=inside) > 0, grad, 0.0), mask=inside)

    # `triton_op` makes an operator of a function that launches kernels, and `wrap_triton` lets torch.compile
    # see into it: the graph stays whole, and inductor puts the launches into its own code.

    @triton_op("relu_triton::relu", mutates_args=())
    def relu(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        if x.numel() > 0:  # a grid of no programs is an error
            wrap_triton(_forward)[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
        return y

    @triton_op("relu_triton::relu_backward", mutates_args=())
    def relu_backward(grad_y: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # A gradient may come expanded, with strides of 0.
        grad_y = grad_y.contiguous()
        grad_x = torch.empty_like(y)
        if y.numel() > 0:
            wrap_triton(_backward)[(triton.cdiv(y.numel(), BLOCK),)](
                grad_y, y, grad_x, y.numel(), BLOCK=BLOCK
            )
        return grad_x

    def _keep(ctx, inputs, output):
        ctx.save_for_backward(output)

    def _gradient(ctx, grad_y):
        return relu_backward(grad_y, *ctx.saved_tensors)

    relu.register_autograd(_gradient, setup_context=_keep)


def microseconds(call) -> float:
    """The median time of a call on the device."""
    times = []
    for _ in range(CALLS + 3):  # the first ones compile and fill caches
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def main() -> None:
    missing = why_not()
    if missing is not None:
        print(f"relu_triton.py: {missing} relu.py shows the same operator in C++ on a processor.")
        return
    x = torch.randn(1000, 77, device="cuda", requires_grad=True)
    compiled = torch.compile(lambda x: 2 * relu(x) + 1, fullgraph=True)
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x > 0).float())
    print("Triton's ReLU, compiled in one graph, has torch's values and gradients.")

    from relu import load_operators

    load_operators()
    large = torch.randn(ELEMENTS, device="cuda")
    ways = {"torch": torch.relu, "Triton": relu}
    if torch._C._dispatch_has_kernel_for_dispatch_key("relu_example::relu", "CUDA"):
        ways["CUDA"] = torch.ops.relu_example.relu
    for name, way in ways.items():
        us = microseconds(lambda way=way: way(large))
        print(f"{name:<8}{us:8.1f} us, {2 * large.nbytes / us / 1e3:,.0f} GB/s")


if __name__ == "__main__":
    main()
