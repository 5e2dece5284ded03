"""The native op `fuseline::attention` against attention written out in PyTorch, over all its features."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from fuseline import native
from fuseline.ops.philox import multipliers

NONE, TOP_LEFT, BOTTOM_RIGHT = range(3)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GRADIENTS = ("q", "k", "v", "mask", "sinks")


@dataclass(frozen=True)
class Spec:
    """One call: q [B, H, T, D] and so on; mask_dims says which of b, h, t, s the mask has."""

    B: int = 2
    H: int = 2
    H_kv: int = 2
    T: int = 40
    S: int = 40
    D: int = 16
    dtype: torch.dtype = torch.float32
    causal: int = NONE
    window: tuple[int, int] = (-1, -1)
    mask: str = ""  # "", bool, same, float32
    mask_dims: str = "bhts"
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # packed sequences
    sinks: bool = False
    soft_cap: float = 0.0
    dropout_p: float = 0.0
    scale: float = 0.3
    layout: str = "bhtd"  # or bthd, or qkv: slices of one tensor
    seed: int = 0
    wanted: tuple[str, ...] = field(default=GRADIENTS)


@dataclass
class Inputs:
    spec: Spec
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]
    grad_out: torch.Tensor
    grad_lse: torch.Tensor

    def to(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Leaves of their own, floating ones as `dtype`."""
        made = {}
        for name, tensor in self.tensors.items():
            wide = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype)
            made[name] = wide.clone().requires_grad_(name in self.spec.wanted and wide.is_floating_point())
        return made


def draw(spec: Spec, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(spec.seed)

    def normal(*shape: int, dtype: torch.dtype = spec.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    B, H, H_kv, T, S, D = spec.B, spec.H, spec.H_kv, spec.T, spec.S, spec.D
    options: dict[str, Any] = {"cu_seqlens_q": None, "cu_seqlens_k": None, "seed": None}
    longest_q, longest_k = T, S
    if spec.lengths is not None:
        for name, lengths in zip(("cu_seqlens_q", "cu_seqlens_k"), spec.lengths, strict=True):
            starts = torch.tensor([0, *lengths]).cumsum(0)
            options[name] = starts.to(device, torch.int32)
        longest_q, longest_k = max(spec.lengths[0]), max(spec.lengths[1])
    if spec.layout == "qkv":
        packed = normal(B, T, H + 2 * H_kv, D)
        q, k, v = (x.transpose(1, 2) for x in packed.split([H, H_kv, H_kv], 2))
    elif spec.layout == "bthd":
        q, k, v = (normal(B, n, h, D).transpose(1, 2) for n, h in ((T, H), (S, H_kv), (S, H_kv)))
    else:
        q, k, v = (normal(B, h, n, D) for n, h in ((T, H), (S, H_kv), (S, H_kv)))
    tensors = {"q": q, "k": k, "v": v}
    if spec.mask:
        shape = [
            size if name in spec.mask_dims else 1 for name, size in zip("bhts", (B, H, T, S), strict=True)
        ]
        if spec.mask == "bool":
            tensors["mask"] = normal(*shape, dtype=torch.float32) > -0.5
        else:
            mask = normal(*shape, dtype=torch.float32 if spec.mask == "float32" else spec.dtype)
            tensors["mask"] = mask.masked_fill(normal(*shape, dtype=torch.float32) > 1.5, -math.inf)
    if spec.sinks:
        tensors["sinks"] = normal(H, dtype=torch.float32)
    if spec.dropout_p > 0:
        options["seed"] = torch.tensor([spec.seed * 7919 + 12345678901], device=device)
    options |= {
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
        "causal": spec.causal,
        "window_left": spec.window[0],
        "window_right": spec.window[1],
        "softmax_scale": spec.scale,
        "soft_cap": spec.soft_cap,
        "dropout_p": spec.dropout_p,
    }
    return Inputs(
        spec, tensors, options, normal(B, T, H, D).transpose(1, 2), normal(B, H, T, dtype=torch.float32)
    )


def seen_keys(spec: Spec, device: torch.device) -> torch.Tensor:
    """[T, S]: which keys a row sees by causality, windows and packing, row by row as it is said."""
    seen = torch.zeros(spec.T, spec.S, dtype=torch.bool)
    lengths_q, lengths_k = spec.lengths or ((spec.T,), (spec.S,))
    first_t = first_s = 0
    for T, S in zip(lengths_q, lengths_k, strict=True):
        shift = S - T if spec.causal == BOTTOM_RIGHT else 0
        t, s = torch.arange(T)[:, None], torch.arange(S)
        block = torch.ones(T, S, dtype=torch.bool)
        if spec.causal != NONE or spec.window[1] >= 0:
            block &= s <= t + shift + (0 if spec.causal != NONE else spec.window[1])
        if spec.window[0] >= 0:
            block &= s >= t + shift - spec.window[0]
        seen[first_t : first_t + T, first_s : first_s + S] = block
        first_t, first_s = first_t + T, first_s + S
    return seen.to(device)


def written_out(inputs: Inputs, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in plain PyTorch, in the tensors' dtype."""
    spec, q, mask, sinks = inputs.spec, tensors["q"], tensors.get("mask"), tensors.get("sinks")
    k, v = (tensors[name].repeat_interleave(spec.H // spec.H_kv, 1) for name in "kv")
    y = q @ k.mT * spec.scale
    if spec.soft_cap > 0:
        y = spec.soft_cap * torch.tanh(y / spec.soft_cap)
    hidden = ~seen_keys(spec, q.device)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        y = y + mask
    hidden = (hidden | (y == -math.inf)).expand_as(y)
    y = y.masked_fill(hidden, -math.inf)
    if sinks is None:  # a column that no value belongs to, and that counts in no row that sees anything
        column = torch.where(hidden.all(-1, keepdim=True), 0.0, -math.inf).to(y.dtype)
    else:
        column = sinks[:, None, None].expand(*y.shape[:-1], 1)
    joined = torch.cat([y, column], -1)
    lse = torch.logsumexp(joined, -1)
    if sinks is None:
        lse = lse.masked_fill(hidden.all(-1), -math.inf)
    p = torch.softmax(joined, -1)[..., :-1]
    seed = inputs.options["seed"]
    if seed is not None:
        p = p * multipliers(seed, p.shape, spec.dropout_p).to(p.dtype)
    return p @ v, lse


def run_native(
    inputs: Inputs, tensors: dict[str, torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The op's results and gradients. Without `tensors` they keep the layout they were drawn in."""
    if tensors is None:
        tensors = {
            name: x.detach().requires_grad_(name in inputs.spec.wanted and x.is_floating_point())
            for name, x in inputs.tensors.items()
        }
    out, lse = torch.ops.fuseline.attention(**tensors, **inputs.options)
    return results(inputs, tensors, out, lse)


def results(
    inputs: Inputs, tensors: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    leaves = {name: x for name, x in tensors.items() if x.requires_grad}
    finite = lse > -math.inf
    # -inf has no gradient to speak of
    total = (out * inputs.grad_out.to(out.dtype)).sum()
    total = total + (lse.masked_fill(~finite, 0.0) * inputs.grad_lse.to(lse.dtype)).sum()
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if leaves else ()
    made = {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }
    return {"out": out.detach(), "lse": lse.detach()}, made


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative to the whole of it; infinities must agree."""
    x = x.double()
    assert torch.equal(x == -math.inf, exact == -math.inf)
    x, exact = x.masked_fill(x == -math.inf, 0.0), exact.masked_fill(exact == -math.inf, 0.0)
    return ((x - exact).norm() / exact.norm().clamp_min(1e-30)).item() if exact.numel() else 0.0


def check(spec: Spec, device: str) -> None:
    """Results and gradients: at most twice as far from float64 as plain PyTorch is, and one rounding more."""
    assert native.load()
    inputs = draw(spec, device)
    exact = inputs.to(torch.float64)
    plain = inputs.to(spec.dtype)
    exact_all = results(inputs, exact, *written_out(inputs, exact))
    plain_all = results(inputs, plain, *written_out(inputs, plain))
    native_all = run_native(inputs)
    # Differences of near equals, dp - delta, lose some bits of fp32 more.
    rounding = torch.finfo(spec.dtype).eps + 4 * torch.finfo(torch.float32).eps
    for kind in range(2):
        assert native_all[kind].keys() == exact_all[kind].keys()
        for name, truth in exact_all[kind].items():
            x = native_all[kind][name]
            size = math.sqrt(truth.numel() + 1)
            if truth.norm() < 1e-9 * size:  # zero but for rounding: masks that reach nothing
                assert x.double().norm() <= 1e-2 * size, (name, spec)
                continue
            found, bound = error(x, truth), 2 * error(plain_all[kind][name], truth) + rounding
            assert found <= bound, f"{name}: {found:.3g} where {bound:.3g} is allowed, {spec}"


FEATURES = {
    "plain": Spec(),
    "causal": Spec(causal=TOP_LEFT),
    "fewer_rows": Spec(T=24, S=41, causal=BOTTOM_RIGHT),
    "fewer_keys": Spec(T=41, S=24, causal=BOTTOM_RIGHT),
    "top_left_uneven": Spec(T=41, S=24, causal=TOP_LEFT),
    "window": Spec(window=(7, 3)),
    "window_left": Spec(causal=BOTTOM_RIGHT, window=(5, -1)),
    "blind_rows": Spec(T=60, S=20, window=(4, 4)),
    "bool_mask": Spec(mask="bool"),
    "key_padding": Spec(mask="bool", mask_dims="bs"),
    "bias": Spec(mask="float32"),
    "head_bias": Spec(mask="same", mask_dims="hts"),
    "row_bias": Spec(mask="float32", mask_dims="bt"),
    "one_bias": Spec(mask="float32", mask_dims=""),
    "key_bias": Spec(mask="float32", mask_dims="s"),
    "grouped": Spec(H=6, H_kv=2),
    "one_key_head": Spec(H=3, H_kv=1, causal=TOP_LEFT),
    "soft_cap": Spec(soft_cap=2.0, scale=1.0),
    "capped_bias": Spec(soft_cap=2.0, scale=1.0, mask="float32", mask_dims="h"),
    "sinks": Spec(sinks=True),
    "sinks_blind": Spec(sinks=True, T=60, S=20, window=(4, 4)),
    "dropout": Spec(dropout_p=0.3),
    "dropout_odd": Spec(dropout_p=0.3, S=37),
    "dropout_bias": Spec(dropout_p=0.2, mask="float32", mask_dims="ts"),
    "negative_scale": Spec(scale=-0.3),
    "packed": Spec(B=1, T=70, S=65, lengths=((20, 0, 33, 12), (20, 10, 30, 5))),
    "packed_causal": Spec(B=1, T=70, S=65, causal=BOTTOM_RIGHT, lengths=((20, 7, 33), (20, 10, 25))),
    "packed_all": Spec(
        B=1, T=70, S=64, H=4, H_kv=2, lengths=((21, 7, 33), (21, 10, 24)), mask="float32", mask_dims="s",
        dropout_p=0.2, sinks=True, soft_cap=3.0, window=(9, 2),
    ),
    "packed_one_bias": Spec(B=1, T=64, S=64, lengths=((21, 43), (21, 43)), mask="float32", mask_dims="h"),
    "packed_bias": Spec(B=1, T=64, S=64, lengths=((21, 30), (21, 30)), mask="float32", mask_dims="hts"),
    "no_keys": Spec(S=0, T=5),
    "no_keys_sinks": Spec(S=0, T=5, sinks=True),
    "one_row": Spec(T=1, S=50, causal=BOTTOM_RIGHT),
    "heads_last": Spec(layout="bthd"),
    "packed_qkv": Spec(layout="qkv", H=4, H_kv=2, causal=TOP_LEFT),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("device", DEVICES)
def test_feature(name: str, device: str) -> None:
    check(FEATURES[name], device)


def longer(spec: Spec) -> Spec:
    """The same beyond what is computed whole on chip."""
    lengths = spec.lengths and tuple(tuple(4 * n for n in side) for side in spec.lengths)
    return replace(spec, T=4 * spec.T, S=4 * spec.S, lengths=lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", FEATURES)
def test_feature_in_16_bits(name: str, dtype: torch.dtype) -> None:
    spec = replace(FEATURES[name], dtype=dtype)
    check(spec, "cuda")
    check(longer(spec), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize("D", [8, 24, 32, 40, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("general", [False, True], ids=["plain", "general"])
def test_head_dim(D: int, dtype: torch.dtype, general: bool) -> None:
    spec = Spec(B=1, H=4, H_kv=2, T=200, S=333, D=D, dtype=dtype, causal=BOTTOM_RIGHT, scale=D**-0.5)
    if general:
        spec = replace(spec, mask="same", mask_dims="hts", dropout_p=0.1, S=332)
    check(spec, "cuda")


def random_spec(seed: int) -> Spec:
    """Rows that see one key are left to `FEATURES`: their gradients are differences of near equals, which
    plain PyTorch, holding all probabilities, takes without that loss. So are sums over whole rows."""
    pick = random.Random(seed)
    H_kv, group = pick.choice([1, 2, 3]), pick.choice([1, 1, 2, 4])
    T, S = (pick.choice([17, 33, 64, 100, 129, 200, 257, 300]) for _ in range(2))
    spec = Spec(
        B=pick.choice([1, 2, 3]),
        H=H_kv * group,
        H_kv=H_kv,
        T=T,
        S=pick.choice([T, S]),
        D=pick.choice([16, 32, 64, 64, 72, 128, 128, 256]),
        dtype=pick.choice([torch.float32, torch.float16, torch.bfloat16]),
        causal=pick.choice([NONE, TOP_LEFT, BOTTOM_RIGHT]),
        window=pick.choice([(-1, -1), (-1, -1), (20, -1), (70, 10), (6, 5)]),
        mask=pick.choice(["", "", "bool", "same", "float32"]),
        mask_dims="".join(name for name in "bht" if pick.random() < 0.6) + "s",
        sinks=pick.random() < 0.3,
        soft_cap=pick.choice([0.0, 0.0, 0.0, 5.0]),
        dropout_p=pick.choice([0.0, 0.0, 0.0, 0.2]),
        scale=pick.choice([0.1, 0.5]),
        layout=pick.choice(["bhtd", "bthd"]),
        seed=seed,
        wanted=tuple(name for name in GRADIENTS if pick.random() < 0.85),
    )
    if pick.random() < 0.25:
        sequences = pick.choice([1, 3, 5])
        lengths = tuple(tuple(pick.randint(10, n) for _ in range(sequences)) for n in (100, 130))
        spec = replace(
            spec, B=1, T=sum(lengths[0]) + pick.choice([1, 40]), S=sum(lengths[1]) + 1, lengths=lengths
        )
    return spec


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(150))
def test_combinations(seed: int) -> None:
    check(random_spec(seed), "cuda")


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_combinations_on_the_cpu(seed: int) -> None:
    spec = random_spec(seed)
    check(replace(spec, T=min(spec.T, 60), S=min(spec.S, 60), lengths=None, D=16, dtype=torch.float32), "cpu")


def test_rows_in_tiles_on_the_cpu() -> None:
    spec = Spec(B=1, H=4, H_kv=2, T=300, S=4000, causal=BOTTOM_RIGHT, sinks=True, dropout_p=0.1)
    check(replace(spec, mask="float32", mask_dims="ts"), "cpu")
    check(replace(spec, mask="float32", mask_dims="hs", window=(900, -1), dropout_p=0.0), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("causal", [NONE, TOP_LEFT])
def test_long(dtype: torch.dtype, causal: int) -> None:
    check(Spec(B=1, H=2, H_kv=1, T=2000, S=2000, D=64, dtype=dtype, causal=causal, scale=0.125), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 5, 16])
@pytest.mark.parametrize("D", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_long_cache(T: int, D: int, dtype: torch.dtype) -> None:
    spec = Spec(
        B=2, H=8, H_kv=2, T=T, S=3001, D=D, dtype=dtype, causal=BOTTOM_RIGHT, scale=D**-0.5, wanted=()
    )
    check(spec, "cuda")
    check(replace(spec, window=(700, -1), sinks=True, layout="bthd"), "cuda")
    check(replace(spec, H=2, mask="bool", mask_dims="bs", soft_cap=4.0), "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_same_bits_every_time(device: str) -> None:
    assert native.load()
    spec = Spec(
        B=2, H=4, H_kv=2, T=150, S=170, D=64, dtype=torch.bfloat16, mask="float32", mask_dims="h", sinks=True
    )
    inputs = draw(replace(spec, causal=BOTTOM_RIGHT, dropout_p=0.1), device)
    first, again = run_native(inputs), run_native(inputs)
    for one, other in zip(first, again, strict=True):
        for name in one:
            assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_layouts_keep_their_order(device: str) -> None:
    assert native.load()
    for layout in ("bhtd", "bthd"):
        inputs = draw(Spec(layout=layout), device)
        out, _ = torch.ops.fuseline.attention(**inputs.tensors, **inputs.options)
        assert out.stride() == inputs.tensors["q"].stride()


@pytest.mark.parametrize("device", DEVICES)
def test_expanded_gradient(device: str) -> None:
    assert native.load()
    inputs = draw(Spec(wanted=("q", "k", "v")), device)
    leaves, exact = inputs.to(torch.float32), inputs.to(torch.float64)
    torch.ops.fuseline.attention(**leaves, **inputs.options)[0].sum().backward()
    written_out(inputs, exact)[0].sum().backward()
    for name in "qkv":
        torch.testing.assert_close(leaves[name].grad, exact[name].grad.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_odd_addresses_and_strides(device: str) -> None:
    assert native.load()
    inputs = draw(Spec(), device)
    expected = torch.ops.fuseline.attention(**inputs.tensors, **inputs.options)[0]
    moved = {}
    for name, x in inputs.tensors.items():
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 3, device=device)
        moved[name] = wide[..., 1 : 1 + 2 * x.shape[-1] : 2].copy_(x)
    torch.testing.assert_close(torch.ops.fuseline.attention(**moved, **inputs.options)[0], expected)


def test_gradcheck() -> None:
    assert native.load()
    inputs = draw(
        Spec(B=1, T=5, S=6, D=4, mask="float32", mask_dims="hs", sinks=True, causal=BOTTOM_RIGHT), "cpu"
    )
    inputs = replace(inputs, tensors=inputs.tensors | {"mask": inputs.tensors["mask"].nan_to_num(neginf=0.5)})
    leaves = inputs.to(torch.float64)

    def attend(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named = dict(zip(leaves, tensors, strict=True))
        options = inputs.options | {"soft_cap": 3.0, "dropout_p": 0.2, "seed": torch.tensor([5])}
        return torch.ops.fuseline.attention(**named, **options)

    assert torch.autograd.gradcheck(attend, tuple(leaves.values()))


def test_no_second_derivative() -> None:
    assert native.load()
    inputs = draw(Spec(T=4, S=4), "cpu")
    leaves = inputs.to(torch.float32)
    out, _ = torch.ops.fuseline.attention(**leaves, **inputs.options)
    (grad,) = torch.autograd.grad(out.sum(), leaves["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    assert native.load()
    inputs = draw(Spec(T=9, S=8, mask="float32", mask_dims="hts", sinks=True, layout="bthd"), device)
    leaves = inputs.to(torch.float32)
    torch.library.opcheck(torch.ops.fuseline.attention.default, (), leaves | inputs.options)


@pytest.mark.parametrize("device", DEVICES)
def test_one_graph_for_all_lengths(device: str) -> None:
    assert native.load()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ops.fuseline.attention(
            q, k, v, max_seqlen_q=q.shape[2], max_seqlen_k=k.shape[2], softmax_scale=0.25, causal=TOP_LEFT
        )[0]

    compiled = torch.compile(attend, backend=count, dynamic=True, fullgraph=True)
    for T in (20, 33, 57):
        inputs = draw(Spec(T=T, S=T), device)
        torch.testing.assert_close(compiled(**inputs.tensors), attend(**inputs.tensors))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"causal": 3}, "causal is 3"),
        ({"window_left": -2}, "the window"),
        ({"dropout_p": 0.5}, "wants a seed"),
        ({"soft_cap": -1.0}, "soft_cap"),
        ({"k": torch.zeros(2, 2, 40, 8)}, "they are"),
        ({"k": torch.zeros(2, 3, 40, 16), "v": torch.zeros(2, 3, 40, 16)}, "do not divide"),
        ({"mask": torch.zeros(2, 2, 3, 40)}, "does not broadcast"),
        ({"mask": torch.zeros(40)}, "4 dimensions"),
        ({"sinks": torch.zeros(5)}, "one a head"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, "both or not"),
    ],
)
def test_refusals(change: dict[str, Any], said: str) -> None:
    assert native.load()
    inputs = draw(Spec(), "cpu")
    with pytest.raises(ValueError, match=said):
        torch.ops.fuseline.attention(**(inputs.tensors | inputs.options | change))
