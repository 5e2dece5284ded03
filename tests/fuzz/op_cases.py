"""Every registered op over drawn shapes, dtypes, layouts, options and extreme values, with gradients.

What is right is what the op contract says: an error against the float64 reference no larger than that of the
reference in the op's own dtype, but for rounding. NaN and infinities stand where the reference has them, in
results and gradients, and nowhere else; where the reference leaves its range and float64 does not, either is
right. No argument is changed, and a second run gives the same bits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from drawn_cases import DRAWN, LAYOUTS, lay_out, log_uniform, results, to_double
from judged import judge, judge_same, products_leak
from suite import Suite, Trial

from fuseline import native, ops
from fuseline.ops import Case
from fuseline.ops.op import outputs

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
SPECIALS = ("nan", "inf", "-inf", "infs", "zeros", "huge", "tiny", "alike", "one huge", "signed zeros")
# So far below the largest number that sums of products stay below it, where a dtype leaves room for that.
HUGE = {
    torch.float64: 2.0**60,
    torch.float32: 2.0**60,
    torch.bfloat16: 2.0**60,
    torch.float16: 2.0**10,
}
INCOMING = {False: ("nan", "huge"), True: ("huge",)}  # one NaN for all rows leaves nothing to see
MOST = {"cpu": 3000, "cuda": 200_000}  # elements, mostly
LEVEL = {"zeros", "tiny", "alike", "signed zeros"}  # values without variance
LEAST_EPS = 1e-6  # of the norms' defaults
FEW = 64  # elements of a row, which may cancel


def draw(pick: random.Random, device: str) -> Trial:
    name = pick.choice(sorted(DRAWN))
    case = DRAWN[name](pick, log_uniform(pick, MOST[device]))
    shape = list(case.shape)
    if pick.random() < 0.08 and not TIED & set(case.options):
        shape[pick.randrange(len(shape) - 1)] = pick.choice([0, 1])
    scalar = case.options.get("reduction", "none") != "none"
    options = {key: _plain(value) for key, value in case.options.items()}
    names = ops.get(name).differentiable
    if name == "softmax" and pick.random() < 0.1:
        options["scale"] = pick.choice([0.0, -1.0, 1e-30, 1e4])
    specials = {n: pick.choice(SPECIALS) for n in names if pick.random() < 0.25}
    if name in ("linear_cross_entropy", "linear", "mlp"):  # one alone: products of two leave the range
        specials = dict(list(specials.items())[:1])
    return {
        "op": name,
        "shape": shape,
        "options": options,
        "dtype": pick.choice([*DTYPES] if device == "cpu" else [*DTYPES][:3]),
        "device": device,
        "seed": pick.randrange(10**6),
        "specials": specials,
        "layouts": {str(i): pick.choice(LAYOUTS) for i in range(8) if pick.random() < 0.3},
        "wanted": [n for n in names if pick.random() < 0.75],
        "incoming": pick.choice(["drawn", "drawn", "drawn", "expanded", "zeros", *INCOMING[scalar]]),
    }


def _plain(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _back(value: Any) -> Any:
    if isinstance(value, str) and value in DTYPES:
        return DTYPES[value]
    return tuple(value) if isinstance(value, list) else value


def check(trial: Trial) -> str | None:
    op, dtype = ops.get(trial["op"]), DTYPES[trial["dtype"]]
    arguments = _arguments(trial)
    before = {n: v.clone() for n, v in arguments.items() if isinstance(v, torch.Tensor)}
    floating = {n for n, v in before.items() if v.is_floating_point()}
    wanted = [n for n in trial["wanted"] if n in floating]
    plain = outputs(op.reference(**arguments))
    grads_out = [_incoming(o, i, trial) for i, o in enumerate(plain)]
    found = results(op.function, arguments, wanted, grads_out)
    near = results(op.reference, arguments, wanted, grads_out)
    far = results(op.reference, to_double(arguments), wanted, [g.double() for g in grads_out])
    few = ("norm" in op.name or "entropy" in op.name) and trial["shape"][-1] < FEW
    # Probabilities less one cancel in a product; what is rounded before a GELU counts many times behind it.
    few |= op.name in ("linear_cross_entropy", "linear", "mlp")
    names = [f"output {i}" for i in range(len(plain))] + [f"gradient of {n}" for n in wanted]
    sizes = [_largest(far[: len(plain)])] * len(plain) + [_largest(far[len(plain) :])] * len(wanted)
    if op.name == "softmax":  # what is subtracted from a gradient may be all of it
        given = _largest(grads_out) * sizes[0]
        # and the gradient of a mask is a sum of many that were rounded
        added = [math.sqrt(max(1, plain[0].numel() / max(1, before[n].numel()))) for n in wanted]
        sizes[len(plain) :] = [max(s, given * a) for s, a in zip(sizes[len(plain) :], added, strict=True)]
    # Two or three numbers may be alike by chance.
    level = "norm" in op.name and (LEVEL & set(trial["specials"].values()) or trial["shape"][-1] < 4)
    if few or level:
        given = _largest(grads_out) * max(
            1.0, _largest([t for t in before.values() if t.is_floating_point()])
        )
        if level:  # what is left of a gradient's own mean is divided by the root of epsilon alone
            given *= LEAST_EPS**-0.5
        sizes[len(plain) :] = [max(size, given) for size in sizes[len(plain) :]]
    smoothed = bool(trial["options"].get("label_smoothing"))
    if smoothed:  # the sum of all scores is subtracted from as many times the largest
        sizes[: len(plain)] = [
            max(size, _largest([before[n] for n in floating])) for size in sizes[: len(plain)]
        ]
    is_finite = all(bool(t.isfinite().all()) for t in [*before.values(), *grads_out] if t.is_floating_point())
    if not is_finite and op.by_blas and trial["device"] == "cpu" and products_leak(dtype):
        return None
    # Behind ReLU the result alone says what was dropped: of one that is no number it does not, and a gradient
    # that comes in where it is 0 counts for nothing, be it NaN.
    told_by_result = op.name == "dropout" and trial["options"].get("relu")
    for what, size, *three in zip(names, sizes, found, near, far, strict=True):
        if not is_finite and told_by_result and what.startswith("gradient"):
            continue
        row = -1 if op.name in ("softmax", "cross_entropy") else None
        complaint = judge(
            *three,
            dtype=dtype,
            few=few or smoothed or what == "gradient of mask",
            size=size,
            is_finite=is_finite,
            row=row,
            may_skip=op.name == "linear_cross_entropy" and what.startswith("gradient"),
        )
        if complaint is not None:
            return f"{what}: {complaint}"
    for name, value in before.items():
        if not torch.equal(arguments[name].nan_to_num(), value.nan_to_num()):
            return f"{name} was changed"
    for what, *two in zip(names, found, results(op.function, arguments, wanted, grads_out), strict=True):
        complaint = judge_same(*two)
        if complaint is not None:
            return f"{what}: {complaint}"
    return None


def _largest(some: list[torch.Tensor]) -> float:
    """The largest finite number among them."""
    return max((float(r[r.isfinite()].abs().max()) for r in some if r.isfinite().any()), default=0.0)


def _arguments(trial: Trial) -> dict[str, Any]:
    op, device = ops.get(trial["op"]), torch.device(trial["device"])
    options = {name: _back(value) for name, value in trial["options"].items()}
    case = Case("drawn", tuple(trial["shape"]), options)
    generator = torch.Generator(device).manual_seed(trial["seed"])
    arguments = op.inputs(case, device, DTYPES[trial["dtype"]], generator)
    pick = random.Random(trial["seed"])
    for i, (name, value) in enumerate(arguments.items()):
        if not isinstance(value, torch.Tensor):
            continue
        special = trial["specials"].get(name)
        if special is not None and value.is_floating_point():
            value = specialized(value, special, pick)
        arguments[name] = lay_out(value, trial["layouts"].get(str(i), "as it is"))
    return arguments


def specialized(x: torch.Tensor, kind: str, pick: random.Random) -> torch.Tensor:
    """Values that are extreme in one way."""
    info, huge = torch.finfo(x.dtype), HUGE[x.dtype]
    if kind == "zeros":
        return torch.zeros_like(x)
    if kind == "signed zeros":
        return x * 0.0
    if kind == "alike":
        return torch.full_like(x, pick.choice([1.0, -3.0, 1000.0]))
    if kind == "huge":
        return (x.double() * huge).clamp(info.min, info.max).to(x.dtype)
    if kind == "tiny":
        return (x.double() * info.tiny).to(x.dtype)
    x = x.clone().contiguous()
    values = {"nan": [math.nan], "inf": [math.inf], "-inf": [-math.inf], "infs": [math.inf, -math.inf]}
    for _ in range(pick.choice([1, 1, 3])):
        if x.numel():
            x.view(-1)[pick.randrange(x.numel())] = pick.choice(values.get(kind, [huge, -huge]))
    return x


def _incoming(out: torch.Tensor, i: int, trial: Trial) -> torch.Tensor:
    kind = trial["incoming"]
    generator = torch.Generator(out.device).manual_seed(trial["seed"] + 1 + i)
    if kind == "expanded":
        return out.new_full((), 0.75).expand(out.shape)
    drawn = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
    pick = random.Random(trial["seed"])
    if kind == "zeros":
        drawn = torch.zeros_like(drawn)
    if kind in ("nan", "huge"):
        drawn = specialized(drawn.to(DTYPES[trial["dtype"]]), kind, pick).to(out.dtype)
    return lay_out(drawn, trial["layouts"].get(str(7 - i), "as it is"))


def simpler(trial: Trial) -> Iterator[Trial]:
    for key, plain in (("layouts", {}), ("specials", {}), ("incoming", "drawn"), ("wanted", [])):
        if trial[key] != plain:
            yield {**trial, key: plain}
    for key in ("options", "specials", "layouts"):
        for name in trial[key]:
            if (trial["op"], name) not in NEEDED:
                yield {**trial, key: {n: v for n, v in trial[key].items() if n != name}}
    for name in trial["wanted"]:
        yield {**trial, "wanted": [n for n in trial["wanted"] if n != name]}
    for i, size in enumerate(trial["shape"]):
        for less in {1, 2, size // 2, size - 1}:
            shape = [*trial["shape"][:i], less, *trial["shape"][i + 1 :]]
            # Targets beyond the classes would stop a GPU in the reference.
            has_classes = shape[-1] >= trial["options"].get("vocab_size", 0)
            if 0 < less < size and has_classes and not TIED & set(trial["options"]):
                yield {**trial, "shape": shape}
    if trial["dtype"] != "float32":
        yield {**trial, "dtype": "float32"}


TIED = {"mask_shape", "positions", "table", "position_table"}  # options that follow the shape
NEEDED = {
    ("quant_linear", "n"),
    ("quant_linear", "format"),
    ("quant_linear", "group_size"),
    ("embedding", "vocabulary"),
}


def prepare(device: str) -> None:
    if not native.ready(device):
        raise SystemExit(
            f"The fuzz is of native ops, which are not loaded for {device}; see `fuseline doctor`."
        )


SUITE = Suite("ops", "every registered op, with gradients", draw, check, simpler, prepare, cases=100_000)
