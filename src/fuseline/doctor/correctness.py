"""Every registered op once on every device, against its reference in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fuseline import native, ops
from fuseline.doctor.check import Check
from fuseline.ops import Case, Op
from fuseline.ops.op import Outputs, outputs

GROUP = "Correctness"
SEED = 1234
CASES = 3  # of an op's own, the first ones: enough to see whether it works at all
MEND = "Run with FUSELINE_NATIVE=0 to use the references, and report what `fuseline doctor --json` says."


@dataclass(frozen=True)
class Errors:
    """Relative errors against float64 of the op and of its reference, and their dtype's ulp."""

    op: float
    reference: float
    ulp: float

    @property
    def excess(self) -> float:
        """How far the op is beyond twice the reference's error plus one ulp; right is what is not."""
        return self.op - 2 * self.reference - self.ulp


def checks() -> Iterator[Check]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for op in ops.registered():
        for name in devices:
            yield _check(op, torch.device(name))


def not_tried() -> Iterator[Check]:
    """Where the native core is not built: trying an op would build it."""
    found = "no op was tried: that would build the native core, which takes a minute or more"
    yield Check(GROUP, "ops", "absent", found, "fuseline doctor --build")


def _check(op: Op, device: torch.device) -> Check:
    name = f"{op.name} on {device}"
    try:
        by = "natively" if native.ready(device.type) else "by its reference"
        found = {dtype: _errors(op, device, dtype) for dtype in op.dtypes}
    except (RuntimeError, ValueError, TypeError) as error:  # what torch, CUDA and our own library raise
        first_line = str(error).strip().partition("\n")[0]
        return Check(GROUP, name, "bad", f"failed with {type(error).__name__}: {first_line}", MEND)
    told = ", ".join(f"{_short(dtype)} {_largest(errors):.1e}" for dtype, errors in found.items())
    wrong = [_short(dtype) for dtype, errors in found.items() if not all(e.excess <= 0 for e in errors)]
    if wrong:
        return Check(GROUP, name, "bad", f"wrong in {', '.join(wrong)}: errors {told}", MEND)
    return Check(GROUP, name, "ok", f"computed {by}; errors {told}")


def _errors(op: Op, device: torch.device, dtype: torch.dtype) -> list[Errors]:
    """Those of the output and of every gradient, over the first cases."""
    return [errors for case in op.cases[:CASES] for errors in _compare(op, case, device, dtype)]


def _largest(errors: list[Errors]) -> float:
    """The op's largest error. A NaN is the worst there is, and compares as nothing."""
    return max((e.op for e in errors), key=lambda error: math.inf if math.isnan(error) else error)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compare(op: Op, case: Case, device: torch.device, dtype: torch.dtype) -> list[Errors]:
    inputs = op.inputs(case, device, dtype, torch.Generator(device).manual_seed(SEED))
    with torch.no_grad():
        shapes = [tensor.shape for tensor in _floating(op.reference(**inputs))]
    generator = torch.Generator(device).manual_seed(SEED + 1)
    grads_out = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    truth = _results(op, op.reference, {k: _as_float64(v) for k, v in inputs.items()}, grads_out)
    ours = _results(op, op.function, inputs, grads_out)
    plain = _results(op, op.reference, inputs, grads_out)
    ulp = torch.finfo(dtype).eps
    return [Errors(_error(o, t), _error(p, t), ulp) for o, p, t in zip(ours, plain, truth, strict=True)]


def _results(
    op: Op, function: Callable[..., Outputs], inputs: dict[str, Any], grads_out: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The outputs and the gradients of what has some."""
    given = {
        k: v.detach().requires_grad_() if k in op.differentiable and _is_floating(v) else v
        for k, v in inputs.items()
    }
    leaves = [v for k, v in given.items() if k in op.differentiable and _is_floating(v)]
    out = _floating(function(**given))
    grads = [grad.to(tensor.dtype) for grad, tensor in zip(grads_out, out, strict=True)]
    return [*(tensor.detach() for tensor in out), *torch.autograd.grad(out, leaves, grads)]


def _floating(returned: Outputs) -> list[torch.Tensor]:
    return [tensor for tensor in outputs(returned) if tensor.is_floating_point()]


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _as_float64(value: Any) -> Any:
    return value.double() if _is_floating(value) else value


def _error(computed: torch.Tensor, truth: torch.Tensor) -> float:
    norm = float(truth.norm())
    return float((computed.double() - truth).norm()) / (norm or 1.0)
