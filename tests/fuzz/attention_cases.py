"""Attention over drawn shapes, limits, masks, features and extreme values, by every candidate that takes it.

The reference in float64 says what is right, the same in the tensors' dtype how near that is. Rows that see
nothing are zeros with zero gradients, whoever computes them. By this project's own code, a NaN or an infinity
in q or in a key stands in the rows that the reference has it in, and in no other. Torch's kernels add what
hides a key, so that one that is NaN is not hidden; on a CPU its flash kernel makes zeros of some such rows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from judged import judge, products_leak
from op_cases import DTYPES, specialized
from suite import Suite, Trial

from fuseline.ops import attention
from fuseline.ops.attention.call import Call, make_call
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.choice import choose
from fuseline.ops.attention.reference import attend

LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 64, 65)
LONG = (100, 127, 128, 130, 160, 256, 300)
HEAD_DIMS = (1, 2, 8, 16, 24, 32, 40, 56, 64, 72, 80, 96, 128)
OWN = ("math", "plain", "naive_fused", "fuseline")
# The blind rows of `naive` are NaN; what compiles for each shape takes ten seconds a case.
BACKENDS = [name for name, each in CANDIDATES.items() if name != "naive" and not each.compiles]
NARROW = ("plain", "naive_fused", "auto")  # scores and weights are rounded to the tensors' dtype


def draw(pick: random.Random, device: str) -> Trial:
    lengths = LENGTHS + LONG if device == "cuda" or pick.random() < 0.1 else LENGTHS
    T, S = pick.choice(lengths), pick.choice(lengths)
    if pick.random() < 0.5:
        S = T
    H_kv = pick.choice([1, 1, 2, 3])
    trial: Trial = {
        "device": device,
        "dtype": pick.choice(["float32", "float16", "bfloat16", "float64"]),
        "B": pick.choice([1, 1, 2, 3]),
        "H": H_kv * pick.choice([1, 1, 2, 3]),
        "H_kv": H_kv,
        "T": T,
        "S": S,
        "D": pick.choice(HEAD_DIMS),
        "causal": pick.choice([False, False, True, "top_left", "bottom_right"]),
        "seed": pick.randrange(10**6),
        "backend": pick.choice(["pick", *BACKENDS]),
        "wanted": [n for n in ("q", "k", "v") if pick.random() < 0.5],
        "layout": pick.choice(["BHTD", "BTHD", "packed"]),
        "special": None,
    }
    if pick.random() < 0.25:
        trial["window"] = [pick.choice([-1, 0, 1, 5, S]), pick.choice([-1, 0, 1, 5, S])]
    if pick.random() < 0.35:
        trial["mask"] = pick.choice(["bool", "blind", "all hidden", "float", "float blind", "trained"])
        trial["mask_dims"] = "".join(d for d in "bhts" if pick.random() < 0.7)
    if pick.random() < 0.15:
        trial["softmax_scale"] = pick.choice([0.0, 1.0, -0.3, 0.05])
    if pick.random() < 0.1:
        trial["soft_cap"] = pick.choice([1.0, 20.0])
    if pick.random() < 0.1:
        trial["sinks"] = True
    if pick.random() < 0.1:
        trial["return_lse"] = True
    if pick.random() < 0.1:
        trial["dropout_p"] = pick.choice([0.25, 0.5])
    if pick.random() < 0.12 and T > 2 and S > 2:
        trial |= {"B": 1, "packed": pick.choice([1, 2, 3])}
    if pick.random() < 0.12:
        kinds = ["nan", "inf", "-inf", "zeros"] + ["huge"] * (trial["dtype"] in ("float32", "float64"))
        trial["special"] = [pick.choice("qk"), pick.choice(kinds)]
    return trial


def check(trial: Trial) -> str | None:
    tensors, options = _arguments(trial)
    named = dict(tensors)
    wanted = list(trial["wanted"])
    if trial.get("mask") == "trained":
        named["mask"] = options["mask"]
        wanted.append("mask")
    for name in wanted:
        named[name].requires_grad_()
    call = make_call(*tensors.values(), **options)
    backend = trial["backend"]
    if backend != "pick" and CANDIDATES[backend].refuses(call.problem()) is not None:
        backend = "pick"  # whom the candidates refuse is the tests' to check
    backend = choose(call, backend)
    special = trial["special"]
    is_finite = special is None or special[1] in ("huge", "zeros")
    if not is_finite and (backend not in OWN or (backend == "plain" and special[1] != "nan")):
        return None  # and a row of -inf, which is 0 by the others, is NaN by torch's softmax
    if not is_finite and trial["device"] == "cpu" and products_leak(DTYPES[trial["dtype"]]):
        return None

    def ours(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        given = {**options, **({"mask": inputs["mask"]} if "mask" in inputs else {})}
        made = attention(inputs["q"], inputs["k"], inputs["v"], **given, backend=backend)
        return made if isinstance(made, tuple) else (made,)

    def defined(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        given = {**options, **({"mask": inputs["mask"]} if "mask" in inputs else {})}
        own = make_call(inputs["q"], inputs["k"], inputs["v"], **given)
        out, lse = attend(own)
        return (out, lse) if own.return_lse else (out,)

    found = _results(ours, named, wanted, trial)
    near = _results(defined, named, wanted, trial)
    far = _results(defined, {n: x.double() for n, x in named.items()}, wanted, trial)
    count = len(found) - len(wanted)
    names = ["out", "lse"][:count] + [f"gradient of {n}" for n in wanted]
    size = max(1.0, float(tensors["v"].detach().abs().max()))
    if special is not None and special[1] == "huge":  # errors of scores are factors of weights
        size *= 64
    blind = _blind(call)
    for i, (what, one, plain, exact) in enumerate(zip(names, found, near, far, strict=True)):
        if not is_finite and i >= count:
            break  # a hidden key's NaN times a weight of 0 reaches gradients, in the reference too
        if not is_finite and _only_rows(one, plain, blind, call.dropout_p > 0):
            continue
        reach = size * (8 if backend in NARROW else 1)
        other = {"gradient of q": "k", "gradient of k": "q"}.get(what)
        if other is not None:  # what cancels in a score's gradient is multiplied by it
            largest = float(tensors[other].detach().abs().max())
            reach *= max(1.0, call.softmax_scale * math.sqrt(call.q.shape[-1]) * largest)
        if what == "gradient of mask":  # many roundings add up
            reach *= math.sqrt(max(1, call.q.shape[:3].numel() * call.k.shape[2] / one.numel()))
            reach *= math.sqrt(call.q.shape[-1])
        complaint = judge(
            one, plain, exact, dtype=DTYPES[trial["dtype"]], size=reach, few=True, is_finite=is_finite
        )
        if complaint is not None:
            return f"{what} by {backend}: {complaint}"
    if blind is not None and is_finite and bool(found[0].masked_select(blind).ne(0).any()):
        return f"out by {backend}: rows that see nothing are not 0"
    return None


def _only_rows(ours: torch.Tensor, plain: torch.Tensor, blind: torch.Tensor | None, drops: bool) -> bool:
    """Whether ours and the reference have the same rows without NaN and infinities, and these are near. What
    they have in rows that see nothing is another question: -inf that is added to inf is NaN in one."""
    clear = plain.isfinite().all(-1) if plain.dim() == 4 else plain.isfinite()
    mine = ours.isfinite().all(-1) if ours.dim() == 4 else ours.isfinite()
    if drops and plain.dim() == 4:  # what is dropped is 0, as by torch's flash kernels, and not NaN times 0
        mine &= clear | ours.ne(0).any(-1)
    if blind is not None:
        clear, mine = clear & ~blind.squeeze(-1), mine & ~blind.squeeze(-1)
    if not torch.equal(clear, mine):
        return False
    tolerance = 64 * torch.finfo(ours.dtype).eps
    return torch.allclose(ours[clear].double(), plain[clear].double(), rtol=tolerance, atol=tolerance * 4)


def _blind(call: Call) -> torch.Tensor | None:
    """[B, H, T, 1], True for rows that see nothing."""
    if call.sinks is not None or call.dropout_p > 0:
        return None
    everything = replace(
        call,
        q=torch.zeros_like(call.q, dtype=torch.float32),
        k=torch.zeros_like(call.k, dtype=torch.float32),
        v=torch.zeros_like(call.v, dtype=torch.float32),
    )
    return attend(everything)[1].eq(-math.inf)[..., None]


def _results(
    function: Any, named: dict[str, torch.Tensor], wanted: list[str], trial: Trial
) -> list[torch.Tensor]:
    own = {n: x.detach().requires_grad_() if n in wanted else x for n, x in named.items()}
    torch.manual_seed(trial["seed"])
    out = function(own)
    if not wanted:
        return [o.detach() for o in out]
    generator = torch.Generator(out[0].device).manual_seed(trial["seed"] + 1)
    shape = out[0].shape
    drawn = torch.randn(shape, generator=generator, device=out[0].device).to(DTYPES[trial["dtype"]])
    grads = torch.autograd.grad(
        out[0], [own[n] for n in wanted], drawn.to(out[0].dtype), allow_unused=True, materialize_grads=True
    )
    return [*(o.detach() for o in out), *grads]


def _arguments(trial: Trial) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    device, dtype = torch.device(trial["device"]), DTYPES[trial["dtype"]]
    generator = torch.Generator(device).manual_seed(trial["seed"])
    B, H, H_kv, T, S, D = (trial[n] for n in ("B", "H", "H_kv", "T", "S", "D"))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def heads(length: int, count: int) -> torch.Tensor:
        if trial["layout"] == "BHTD":
            return drawn(B, count, length, D).to(dtype)
        if trial["layout"] == "BTHD":
            return drawn(B, length, count, D).to(dtype).transpose(1, 2)
        return drawn(B, length, 3, count, D).to(dtype)[:, :, 1].transpose(1, 2)

    tensors = {"q": heads(T, H), "k": heads(S, H_kv), "v": heads(S, H_kv)}
    if trial["special"] is not None:
        name, kind = trial["special"]
        if kind == "huge":
            tensors[name] = tensors[name] * 100
        else:
            tensors[name] = specialized(tensors[name], kind, random.Random(trial["seed"]))
    options: dict[str, Any] = {"causal": trial["causal"]}
    for name in ("softmax_scale", "soft_cap", "return_lse", "dropout_p"):
        if name in trial:
            options[name] = trial[name]
    if "dropout_p" in options:
        options["seed"] = torch.tensor([trial["seed"]], device=device)
    if "window" in trial:
        options["window"] = tuple(trial["window"])
    if trial.get("sinks"):
        options["sinks"] = drawn(H)
    if "mask" in trial:
        full = {"b": B, "h": H, "t": T, "s": S}
        shape = [full[d] if d in trial["mask_dims"] else 1 for d in "bhts"]
        options["mask"] = _mask(trial["mask"], shape, generator, device, dtype)
    if "packed" in trial:
        for name, rows in (("q", T), ("k", S)):
            pick = random.Random(f"{trial['seed']} {name}")
            cuts = sorted(pick.randint(0, rows) for _ in range(trial["packed"] - 1))
            options[f"cu_seqlens_{name}"] = torch.tensor([0, *cuts, rows], dtype=torch.int32, device=device)
    return tensors, options


def _mask(
    kind: str, shape: list[int], generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    chance = torch.rand(shape, generator=generator, device=device)
    rows = torch.rand((*shape[:3], 1), generator=generator, device=device)
    if kind in ("bool", "blind", "all hidden"):
        kept = chance < {"bool": 0.7, "blind": 0.6, "all hidden": -1.0}[kind]
        return kept & (rows < 0.6) if kind == "blind" else kept
    added = torch.randn(shape, generator=generator, device=device)
    if kind == "float blind":
        added = added.masked_fill((chance > 0.7) | (rows > 0.6), -math.inf)
    return added.to(dtype)


def simpler(trial: Trial) -> Iterator[Trial]:
    optional = ("window", "mask", "softmax_scale", "soft_cap", "sinks", "return_lse", "dropout_p", "packed")
    for key in optional:
        if key in trial:
            yield {k: v for k, v in trial.items() if k != key and (key != "mask" or k != "mask_dims")}
    for key, plain in (("special", None), ("causal", False), ("layout", "BHTD"), ("wanted", [])):
        if trial[key] != plain:
            yield {**trial, key: plain}
    for name in trial["wanted"]:
        yield {**trial, "wanted": [n for n in trial["wanted"] if n != name]}
    for key in ("B", "T", "S", "D"):
        for less in (1, trial[key] // 2, trial[key] - 1):
            if 0 < less < trial[key]:
                yield {**trial, key: less}
    if trial["H"] > 1:
        yield {**trial, "H": 1, "H_kv": 1}
    if trial["dtype"] != "float32":
        yield {**trial, "dtype": "float32"}


SUITE = Suite(
    "attention", "ops.attention by every candidate, with gradients", draw, check, simpler, cases=5_000
)
