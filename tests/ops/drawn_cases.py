"""Drawn cases of every registered op, and how a result is judged: for the random tests and the fuzz.

Rows of any length, contiguous at odd addresses, between NaN, transposed or stepped; any subset of gradients;
incoming gradients laid out as freely, or one number everywhere, expanded.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuseline.ops import Case
from fuseline.ops.op import outputs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (31, 40, 384, 768, 1000, 1600, 4096, 12288, 50257, 65536, 140000)


def log_uniform(pick: random.Random, most: int) -> int:
    return min(most, int(math.exp(pick.uniform(0, math.log(most + 1)))))


def rows_and_length(pick: random.Random, most: int) -> tuple[int, int]:
    n = pick.choice(
        [log_uniform(pick, 270_000), 2 ** pick.randint(0, 17) + pick.choice([-1, 0, 1]), pick.choice(LENGTHS)]
    )
    n = max(1, min(n, most))
    return log_uniform(pick, max(1, min(70_000, most // n))), n


def maybe(pick: random.Random, **options: Any) -> dict[str, Any]:
    """Some of these."""
    return {name: value for name, value in options.items() if pick.random() < 0.3}


def softmax_case(pick: random.Random, most: int) -> Case:
    rows, n = rows_and_length(pick, most)
    if pick.random() < 0.4:
        return Case("drawn", (rows, n), maybe(pick, scale=pick.uniform(-2, 2), spread=30.0))
    T = max(1, min(pick.choice([n, rows]), most // n))
    shape = (pick.randint(1, 3), pick.randint(1, 3), T, n)
    options = maybe(pick, causal=True, scale=0.3)
    kind = pick.choice(["none", "bool", "blind", "additive", "additive_fp32"])
    if kind != "none":
        mask_shape = tuple(1 if pick.random() < 0.4 else size for size in shape)
        options |= {"mask": kind, "mask_shape": mask_shape}
    return Case("drawn", shape, options)


def norm_case(pick: random.Random, most: int, *extras: str) -> Case:
    rows, n = rows_and_length(pick, most)
    options = maybe(pick, affine_dtype=torch.float32, **dict.fromkeys(extras, True))
    return Case("drawn", (rows, n), options)


def dropout_case(pick: random.Random, most: int) -> Case:
    case = norm_case(pick, most, "wide_residual", "x_bias")
    return Case("drawn", case.shape, {**case.options, "p": pick.choice([0.0, 0.1, 0.5])})


def dropout_alone_case(pick: random.Random, most: int) -> Case:
    options = maybe(pick, relu=True, spread=30.0)
    return Case("drawn", rows_and_length(pick, most), {**options, "p": pick.choice([0.0, 0.1, 0.5])})


def cross_entropy_case(pick: random.Random, most: int) -> Case:
    rows, n = rows_and_length(pick, most)
    options = maybe(
        pick,
        weighted=True,
        label_smoothing=0.1,
        soft_cap=5.0,
        z_loss=1e-3,
        int32=True,
        vocab_size=pick.randint(1, n),
    )
    options |= {"reduction": pick.choice(["mean", "sum", "none"]), "ignored": 0.2 if rows > 9 else 0.0}
    return Case("drawn", (rows, n), {**options, **maybe(pick, grad_in_forward=True)})


def linear_cross_entropy_case(pick: random.Random, most: int) -> Case:
    case = cross_entropy_case(pick, most // 8)
    options = {n: v for n, v in case.options.items() if n not in ("int32", "grad_in_forward")}
    extras = maybe(pick, with_bias=True, fp32_weights=True, chunk_size=pick.choice([7, 128]))
    if case.shape[0] > 2000:
        extras.pop("chunk_size", None)
    return Case("drawn", case.shape, {**options, **extras, "embed_dim": pick.choice([1, 8, 24, 100])})


def linear_case(pick: random.Random, most: int) -> Case:
    rows, n = rows_and_length(pick, most // 8)
    return Case("drawn", (rows, n), {"out": pick.choice([1, 9, 40, 256]), **maybe(pick, bias=False)})


def mlp_case(pick: random.Random, most: int) -> Case:
    rows, n = rows_and_length(pick, most // 8)
    sizes = {"inner": pick.choice([1, 24, 100, 257]), "out": pick.choice([1, 9, 40])}
    return Case("drawn", (rows, n), {**sizes, **maybe(pick, approximate="none", biases=(False, True))})


def gelu_case(pick: random.Random, most: int) -> Case:
    options = maybe(pick, bias=False, bias_dtype=torch.float32, approximate="none")
    return Case("drawn", rows_and_length(pick, most), options)


def rope_case(pick: random.Random, most: int) -> Case:
    D = pick.choice([64, 128, 80, log_uniform(pick, 300)])
    first = pick.random() < 0.4
    T, H, B = log_uniform(pick, max(1, most // D // 8)), pick.randint(1, 6), pick.randint(1, 3)
    options = maybe(pick, interleaved=True, dims=2 * pick.randint(0, D // 2), base=500000.0, swapped=True)
    options |= maybe(pick, positions=pick.choice([(T,), (B, T)]))
    if pick.random() < 0.4:
        options["table"] = T + pick.choice([0, 5])
        options.setdefault("dims", D - D % 2)
    if first:
        options["seq_dim"] = -3
    return Case("drawn", (B, T, H, D) if first else (B, H, T, D), options)


def embedding_case(pick: random.Random, most: int) -> Case:
    rows, n = rows_and_length(pick, min(most, 400_000))
    vocabulary = log_uniform(pick, max(1, min(100_000, most // n)))
    options = maybe(pick, position_table=rows + 3, padding_idx=vocabulary - 1, alike=0.5, p=0.3)
    if options.get("alike") and vocabulary < 3:
        del options["alike"]
    return Case("drawn", (rows, n), {**options, "vocabulary": vocabulary})


def quant_linear_case(pick: random.Random, most: int) -> Case:
    k, n = (min(rows_and_length(pick, 3000)[1], most // 10) for _ in range(2))
    options: dict[str, Any] = {
        "n": n,
        "format": pick.choice(["int8", "int4", "plain"]),
        **maybe(pick, bias=True),
    }
    if options["format"] == "int4":
        options |= {"group_size": pick.choice([32, 64, 128]), **maybe(pick, zeros=True)}
    return Case("drawn", (log_uniform(pick, 300), k), options)


DRAWN: dict[str, Callable[[random.Random, int], Case]] = {
    "softmax": softmax_case,
    "layer_norm": lambda pick, most: norm_case(pick, most, "narrowed"),
    "rms_norm": lambda pick, most: norm_case(pick, most, "narrowed"),
    "add_layer_norm": lambda pick, most: norm_case(pick, most, "wide_residual"),
    "add_rms_norm": lambda pick, most: norm_case(pick, most, "wide_residual"),
    "dropout_add_layer_norm": dropout_case,
    "dropout_add_rms_norm": dropout_case,
    "cross_entropy": cross_entropy_case,
    "linear_cross_entropy": linear_cross_entropy_case,
    "dropout": dropout_alone_case,
    "gelu": gelu_case,
    "linear": linear_case,
    "mlp": mlp_case,
    "swiglu": lambda pick, most: Case("drawn", rows_and_length(pick, most), maybe(pick, packed=True)),
    "geglu": lambda pick, most: Case("drawn", rows_and_length(pick, most), maybe(pick, packed=True)),
    "rope": rope_case,
    "embedding": embedding_case,
    "quant_linear": quant_linear_case,
}


LAYOUTS = ("as it is", "odd", "sliced", "transposed", "stepped")


def lay_out(x: torch.Tensor, kind: str, start: int = 1) -> torch.Tensor:
    """The same values somewhere in memory, with NaN (or what is no class and hides nothing) around them; of
    odd ones the first stands at `start`."""
    around = float("nan") if x.is_floating_point() else True if x.dtype == torch.bool else -1
    if kind == "as it is" or x.dim() == 0 or x.dtype == torch.uint8:
        return x
    if kind == "odd":
        view = x.new_full((start + x.numel() + 16,), around)[start : start + x.numel()].view(x.shape)
    elif kind == "sliced":
        view = x.new_full((*x.shape[:-1], x.shape[-1] + 4), around)[..., 1 : 1 + x.shape[-1]]
    elif kind == "transposed":
        view = x.new_full((x.shape[-1], *x.shape[:-1]), around).movedim(0, -1)
    else:
        view = x.new_full((*x.shape, 2), around)[..., 0]
    return view.copy_(x)


def drawn_layout(pick: random.Random) -> tuple[str, int]:
    return pick.choice(LAYOUTS), pick.choice([1, 2, 3, 8])


def incoming(out: torch.Tensor, pick: random.Random) -> torch.Tensor:
    """A gradient of `out`, some of them as that of a sum is: expanded."""
    if pick.random() < 0.2:
        return out.new_full((), pick.uniform(-1, 1)).expand(out.shape)
    return lay_out(torch.randn_like(out), *drawn_layout(pick))


def results(
    function: Callable[..., Any], arguments: dict[str, Any], wanted: list[str], grads_out: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Outputs and gradients; without `grads_out` outputs alone."""
    own = {n: v.detach().requires_grad_() if n in wanted else v for n, v in arguments.items()}
    out = outputs(function(**own))
    if not wanted or not grads_out:
        return [o.detach() for o in out]
    pairs = [(o, g.to(o.dtype)) for o, g in zip(out, grads_out, strict=True) if o.requires_grad]
    leaves = [own[n] for n in wanted]
    grads = torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    return [
        *(o.detach() for o in out),
        *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)),
    ]


def assert_near(
    ours: torch.Tensor,
    plain: torch.Tensor,
    exact: torch.Tensor,
    ulp: float,
    few: bool,
    what: str,
    size: float,
) -> None:
    """As the contract has it, with a floor for what plain PyTorch rounds well by luck: of the size of all
    that is computed with it, but where rows of few elements cancel."""
    assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype), what
    seen = exact.isfinite() & plain.isfinite()
    assert torch.equal(ours.isfinite(), plain.isfinite()), f"{what}: finite elsewhere than plain PyTorch"
    ours, plain, exact = (torch.where(seen, x.double(), 0.0) for x in (ours, plain, exact))
    size = 1.0 if few else min(1.0, 16 * size)
    for measure, floor in (
        (torch.linalg.vector_norm, size * ulp * math.sqrt(max(1, exact.numel()))),
        (lambda x: x.abs().max() if x.numel() else x.sum(), size * 4 * ulp),
    ):
        bound = (12 if few else 3) * measure(plain - exact) + 2 * ulp * measure(exact) + floor
        error = measure(ours - exact)
        assert error <= bound, f"{what}: error {error:.3e}, at most {bound:.3e}"


def largest(results: Sequence[torch.Tensor]) -> float:
    return max((float(r[r.isfinite()].abs().max()) for r in results if r.isfinite().any()), default=0.0)


def to_double(arguments: dict[str, Any]) -> dict[str, Any]:
    def widened(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.double()
        return torch.float64 if isinstance(value, torch.dtype) else value

    return {name: widened(value) for name, value in arguments.items()}
