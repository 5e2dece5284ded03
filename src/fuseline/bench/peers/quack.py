"""QuACK (Dao AI Lab): CuTe-DSL kernels for memory-bound ops. `pip install quack-kernels`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fuseline.bench.peers.peer import UnsupportedError, package_version, refuse_options, why_not_importable
from fuseline.ops import Op
from fuseline.ops.op import Outputs


class Quack:
    name = "quack"

    def why_not(self, device: torch.device) -> str | None:
        return why_not_importable("quack", "quack-kernels", device)

    def version(self) -> str:
        return package_version("quack-kernels")

    def bind(self, op: Op, inputs: Mapping[str, Any]) -> Callable[[], Outputs]:
        x = inputs["x"]
        if x.dim() != 2:
            raise UnsupportedError("quack takes matrices only")
        if op.name == "softmax":
            refuse_options(self.name, inputs, dim=-1, scale=1.0, causal=False, mask=None)
            from quack.softmax import softmax

            return functools.partial(softmax, x)
        if op.name == "layer_norm":
            weight, bias = inputs.get("weight"), inputs.get("bias")
            if weight is None or bias is None:
                raise UnsupportedError("quack's LayerNorm is adapted with a weight and a bias only")
            in_fp32 = weight.detach().float(), bias.detach().float()
            return functools.partial(_LayerNorm.apply, x, weight, bias, *in_fp32, inputs.get("eps", 1e-5))
        raise UnsupportedError(f"quack has no {op.name}")


class _LayerNorm(torch.autograd.Function):
    """quack's two LayerNorm functions, joined; they want weight and bias in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        weight_fp32: torch.Tensor,
        bias_fp32: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        from quack.rmsnorm import layernorm_fwd

        y, rstd, mean = layernorm_fwd(x, weight_fp32, bias_fp32, eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, weight_fp32, rstd, mean)
        ctx.dtypes = weight.dtype, bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        try:
            from quack.rmsnorm import layernorm_bwd
        except ImportError as error:
            raise UnsupportedError("this version of quack has no LayerNorm backward") from error
        x, weight_fp32, rstd, mean = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = layernorm_bwd(x, weight_fp32, grad_out, rstd, mean)
        return grad_x, grad_weight.to(ctx.dtypes[0]), grad_bias.to(ctx.dtypes[1]), None, None, None
