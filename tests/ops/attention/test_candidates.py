"""Every candidate computes what the reference defines, forward and backward, or says why it does not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseline.errors import InputError
from fuseline.ops import attention
from fuseline.ops.attention.call import Call, make_call
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.draw import Drawn, draw
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.reference import attend

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
# Relative, over a whole tensor: plain PyTorch in the same dtype is 0.3 of it and less away.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2, torch.float64: 1e-10}
OF_KERNELS = ("long rows", "wide heads", "widest heads", "narrow heads", "heads of 72")
# FlexAttention compiles for each of these, for ten seconds and more.
OURS = ("fuseline", "cudnn_fuseline", "flash_fuseline")
COMPILED = ("causal, more keys", "sinks, window", "trained mask, causal", "shared heads", "soft cap")


def problem(device: str = "cpu", dtype: torch.dtype = torch.float32, **fields: object) -> Problem:
    base = replace(Problem(torch.device(device), dtype, 2, 4, 4, 40, 40, 32), **fields)
    if not base.sequences:
        return base
    longest = [-(-rows // base.sequences) for rows in (base.seqlen_q, base.seqlen_k)]
    return replace(base, batch=1, max_seqlen_q=longest[0], max_seqlen_k=longest[1])


FEATURES: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "causal, more keys": {"causal": "bottom_right", "seqlen_q": 24, "seqlen_k": 72},
    "causal, fewer keys": {"causal": "bottom_right", "seqlen_q": 72, "seqlen_k": 24},
    "top left, more keys": {"causal": "top_left", "seqlen_q": 24, "seqlen_k": 72},
    "top left, fewer keys": {"causal": "top_left", "seqlen_q": 72, "seqlen_k": 24},
    "cross": {"seqlen_q": 17, "seqlen_k": 45},
    "one query": {"seqlen_q": 1, "seqlen_k": 77, "causal": "bottom_right"},
    "long rows": {"batch": 1, "heads": 2, "kv_heads": 2, "seqlen_q": 300, "seqlen_k": 300},
    "window": {"window_left": 9, "window_right": 4},
    "window, causal": {"window_left": 11, "causal": "bottom_right", "seqlen_q": 24, "seqlen_k": 72},
    "window, top left": {"window_left": 30, "causal": "top_left", "seqlen_q": 24, "seqlen_k": 30},
    "boolean mask": {"mask": "bool", "mask_dims": "bhts"},
    "padded keys": {"mask": "bool", "mask_dims": "bs"},
    "padded keys, causal": {"mask": "bool", "mask_dims": "bs", "causal": "bottom_right"},
    "additive mask": {"mask": "float", "mask_dims": "ts"},
    "additive mask, odd rows": {"mask": "float", "mask_dims": "hts", "seqlen_q": 33, "seqlen_k": 43},
    "trained mask": {"mask": "float_grad", "mask_dims": "hts"},
    "trained mask, causal": {
        "mask": "float_grad", "mask_dims": "bhts", "causal": "bottom_right", "seqlen_k": 43,
    },
    "shared heads": {"heads": 8, "kv_heads": 2, "causal": "bottom_right"},
    "one key head": {"heads": 4, "kv_heads": 1},
    "packed": {"sequences": 3, "seqlen_q": 100, "seqlen_k": 100, "causal": "bottom_right"},
    "packed, more keys": {"sequences": 4, "seqlen_q": 40, "seqlen_k": 130, "causal": "bottom_right"},
    "packed, shared heads": {"sequences": 2, "seqlen_q": 90, "seqlen_k": 90, "kv_heads": 2},
    "soft cap": {"soft_cap": True, "causal": "bottom_right"},
    "sinks": {"sinks": True, "causal": "bottom_right"},
    "sinks, window": {"sinks": True, "causal": "bottom_right", "window_left": 12},
    "dropout by a seed": {"dropout_p": 0.25, "seeded": True},
    "all": {
        "mask": "float_grad", "mask_dims": "hts", "causal": "bottom_right", "window_left": 20,
        "heads": 4, "kv_heads": 2, "soft_cap": True, "sinks": True, "dropout_p": 0.2, "seeded": True,
    },
    "wide heads": {"head_dim": 128, "causal": "bottom_right"},
    "widest heads": {"head_dim": 256, "causal": "bottom_right"},
    "narrow heads": {"head_dim": 16},
    "heads of 72": {"head_dim": 72, "causal": "bottom_right"},
}  # fmt: skip


def in_float64(drawn: Drawn) -> tuple[Call, list[torch.Tensor]]:
    """The call on the same numbers, and the tensors of it that want gradients."""
    wide: dict[int, torch.Tensor] = {}

    def widened(x: object) -> object:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        if id(x) not in wide:
            wide[id(x)] = x.detach().double().requires_grad_(x.requires_grad)
        return wide[id(x)]

    options = {name: widened(x) for name, x in drawn.options.items()}
    call = make_call(*(widened(x) for x in (drawn.q, drawn.k, drawn.v)), **options)
    return call, [wide[id(x)] for x in drawn.wanted]


def away(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative distance; of two zeros 0."""
    found, wanted = found.detach().double(), wanted.detach()
    norm = float(wanted.norm())
    return float((found - wanted).norm()) / norm if norm else float(found.norm())


def laid_out(drawn: Drawn, layout: str) -> Drawn:
    """The same numbers as another layout has them; it draws [B, T, H, D]."""
    q, k, v = (x.detach() for x in (drawn.q, drawn.k, drawn.v))
    if layout == "BHTD":
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    elif layout == "packed" and q.shape[2] == k.shape[2]:
        columns = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
        parts = torch.cat(columns, -1).split([x.shape[2] for x in columns], -1)
        q, k, v = (part.unflatten(-1, (-1, q.shape[3])).transpose(1, 2) for part in parts)
    if drawn.wanted:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    return replace(drawn, q=q, k=k, v=v, wanted=(q, k, v, *drawn.wanted[3:]) if drawn.wanted else ())


def check(backend: str, asked: Problem, seed: int = 0, layout: str = "BTHD") -> None:
    """Output, lse and all gradients against float64."""
    drawn = laid_out(draw(asked, seed), layout)
    call, wide = in_float64(drawn)
    wanted, wanted_lse = attend(call)
    found = drawn.run(backend)
    out, lse = found if asked.lse else (found, None)
    tolerance = TOLERANCE[asked.dtype]
    assert out.dtype == asked.dtype
    assert out.isfinite().all()
    assert away(out, wanted) < tolerance
    assert bool(((out == 0) | (wanted != 0)).all()), "a row that sees nothing is not zero"
    if lse is not None:
        assert lse.dtype == torch.promote_types(torch.float32, asked.dtype)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=tolerance, atol=tolerance)
    if asked.wants_grad:
        grad_out = torch.randn_like(out)
        ours = torch.autograd.grad(out, drawn.wanted, grad_out)
        theirs = torch.autograd.grad(wanted, wide, grad_out.double())
        # A mask that is the same for all keys has a gradient of zero: there rounding is all that comes.
        least = 1e-2 * float(grad_out.double().norm())
        for i, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
            assert mine.isfinite().all()
            distance = float((mine.double() - right).norm())
            assert distance <= 2 * tolerance * max(float(right.norm()), least), f"gradient {i}"


def able(backend: str, asked: Problem) -> None:
    reason = CANDIDATES[backend].refuses(asked)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("backend", [name for name in CANDIDATES if name != "naive"])
def test_computes_what_the_reference_defines(backend: str, feature: str, device: str) -> None:
    if CANDIDATES[backend].compiles and feature not in COMPILED:
        pytest.skip("it compiles for each shape; a few stand for all")
    if device == "cpu" and feature in OF_KERNELS:
        pytest.skip("on a CPU its code is that of other sizes")
    if (backend, device) == ("auto", "cuda") and FEATURES[feature].keys() - {"head_dim", "kv_heads"}:
        pytest.skip("torch's own choice is cuDNN, whose backward with a mask is not right (see cudnn.py)")
    dtypes = (torch.float32,) if device == "cpu" else (torch.bfloat16, torch.float32)
    ran = False
    for dtype in dtypes:
        for direction in ("fwbw",) if device == "cpu" else ("fwbw", "fw"):
            asked = problem(device, dtype, direction=direction, **FEATURES[feature])
            if asked.mask == "float_grad" and direction == "fw":
                continue
            if CANDIDATES[backend].compiles and (direction == "fw" or dtype != dtypes[0]):
                continue
            if CANDIDATES[backend].refuses(asked) is None:
                ran = True
                check(backend, asked)
    if not ran:
        pytest.skip(str(CANDIDATES[backend].refuses(asked)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("feature", ["plain", "causal, more keys", "causal, fewer keys", "packed", "window"])
@pytest.mark.parametrize("backend", ["math", "efficient", "flash", "cudnn", "fa2", *OURS])
def test_returns_the_lse(backend: str, feature: str, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    direction = "fwbw" if backend in OURS else "fw"  # the others' lse has no gradient
    asked = problem(device, dtype, direction=direction, lse=True, **FEATURES[feature])
    able(backend, asked)
    check(backend, asked)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["bool", "float"])
@pytest.mark.parametrize(
    "backend", ["math", "efficient", "flash", "cudnn", "fuseline", "auto", "naive_fused"]
)
def test_rows_that_see_nothing_are_zero(backend: str, mask: str, causal: bool, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if (backend, device) == ("auto", "cuda"):
        pytest.skip("torch's own choice is cuDNN, which gives such rows a mean")
    direction = "fw" if backend == "cudnn" else "fwbw"
    able(backend, problem(device, dtype, direction=direction, mask=mask, mask_dims="bts"))
    drawn = draw(problem(device, dtype, direction=direction), seed=3)
    seen = torch.rand(2, 1, 40, 40, generator=torch.Generator().manual_seed(0)) < 0.03
    seen = seen.to(device)
    if mask == "float":
        seen = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)
    drawn = replace(drawn, options={"mask": seen, "causal": causal})
    call, wide = in_float64(drawn)
    wanted, _ = attend(call)
    assert (wanted == 0).all(-1).any(), "the case has such rows"
    out = drawn.run(backend)
    assert away(out, wanted) < TOLERANCE[dtype]
    if direction == "fw":
        return
    grad_out = torch.randn_like(out)
    theirs = torch.autograd.grad(wanted, wide, grad_out.double())
    for mine, right in zip(torch.autograd.grad(out, drawn.wanted, grad_out), theirs, strict=True):
        assert away(mine, right) < 2 * TOLERANCE[dtype]


def _layouts(device: str, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    B, H, T, D = 2, 3, 24, 16
    packed = normal(B, T, 3, H, D)
    interleaved = normal(B, T, H, 3 * D)
    odd = normal(3, B * H * T * D + 1)[:, 1:].reshape(3, B, H, T, D)
    shifted = torch.empty(3 * B * H * T * D + 1, dtype=dtype, device=device)[1:].view(3, B, H, T, D)
    shifted.copy_(odd)
    return {
        "BHTD": tuple(normal(B, H, T, D) for _ in range(3)),
        "BTHD": tuple(normal(B, T, H, D).transpose(1, 2) for _ in range(3)),
        "packed": tuple(x.transpose(1, 2) for x in packed.unbind(2)),
        "packed by head": tuple(x.transpose(1, 2) for x in interleaved.chunk(3, -1)),
        "rows of columns": tuple(normal(B, H, D, T).transpose(2, 3) for _ in range(3)),
        "misaligned": tuple(shifted.unbind(0)),
        "expanded": tuple(normal(1, 1, T, D).expand(B, H, T, D) for _ in range(3)),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", list(_layouts("cpu", torch.float32)))
@pytest.mark.parametrize("backend", ["math", "efficient", "flash", "cudnn", *OURS, "pick"])
def test_takes_any_layout(backend: str, layout: str, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = tuple(x.detach().requires_grad_() for x in _layouts(device, dtype)[layout])
    if backend != "pick":
        able(backend, make_call(*tensors, causal=True).problem())
    drawn = Drawn(*tensors, {"causal": True}, tensors)
    call, wide = in_float64(drawn)
    out = drawn.run(backend)
    wanted, _ = attend(call)
    assert away(out, wanted) < TOLERANCE[dtype]
    grad_out = torch.randn_like(out)
    theirs = torch.autograd.grad(wanted, wide, grad_out.double())
    for mine, right in zip(torch.autograd.grad(out, tensors, grad_out), theirs, strict=True):
        assert away(mine, right) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["BHTD", "BTHD", "packed"])
@pytest.mark.parametrize("backend", ["math", "efficient", "flash", "cudnn", *OURS, "auto"])
def test_takes_gradients_of_any_layout(backend: str, layout: str, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = tuple(x.detach().requires_grad_() for x in _layouts(device, dtype)[layout])
    able(backend, make_call(*tensors, causal=True).problem())
    drawn = Drawn(*tensors, {"causal": True}, tensors)
    call, wide = in_float64(drawn)
    wanted, _ = attend(call)
    B, H, T, D = wanted.shape
    # One after another over one shape: what is kept of the first must not be taken for the second.
    for grad_out in (
        torch.randn(B, T, H, D, device=device).to(dtype).transpose(1, 2),
        torch.randn(B, H, T, D, device=device).to(dtype),
        torch.randn(1, 1, 1, D, device=device).to(dtype).expand(B, H, T, D),
        torch.randn(B, H, D, T, device=device).to(dtype).transpose(2, 3),
    ):
        theirs = torch.autograd.grad(wanted, wide, grad_out.double(), retain_graph=True)
        for mine, right in zip(
            torch.autograd.grad(drawn.run(backend), tensors, grad_out), theirs, strict=True
        ):
            assert away(mine, right) < 2 * TOLERANCE[dtype]


SIZES = st.integers(1, 24)


@settings(max_examples=30, deadline=None)
@given(
    T=SIZES,
    S=SIZES,
    kv_heads=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([8, 16, 24]),
    causal=st.sampled_from(["none", "top_left", "bottom_right"]),
    window=st.tuples(st.integers(-1, 12), st.integers(-1, 12)),
    mask=st.sampled_from(["none", "bool", "float", "float_grad"]),
    mask_dims=st.sampled_from(["bhts", "hts", "ts", "bs", "s", "t", "b", ""]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    layout=st.sampled_from(["BTHD", "BHTD", "packed"]),
    data=st.data(),
)
def test_any_case_by_any_candidate(data: st.DataObject, layout: str, **drawn: object) -> None:
    T, S, kv_heads, groups, window = (drawn.pop(n) for n in ("T", "S", "kv_heads", "groups", "window"))
    masked = drawn["mask"] != "none"
    asked = Problem(
        torch.device("cpu"),
        batch=2,
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        seqlen_q=T,
        seqlen_k=S,
        window_left=window[0],
        window_right=window[1],
        direction="fwbw",
        **{**drawn, "mask_dims": drawn["mask_dims"] if masked else ""},
    )
    names = [n for n in CANDIDATES if n != "naive" and CANDIDATES[n].refuses(asked) is None]
    check(data.draw(st.sampled_from(names)), asked, layout=layout)


def test_every_feature_alone_and_combined_has_a_kernel_in_linear_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fuseline.native.ready", lambda device: True)
    monkeypatch.setattr(torch.ops.fuseline, "attention", None, raising=False)
    kernels = [c for c in CANDIDATES.values() if c.is_linear and "cuda" in c.offered_on]
    for (
        causal,
        window,
        mask,
        heads,
        length,
        sequences,
        extras,
        dtype,
        direction,
        head_dim,
    ) in itertools.product(
        ("none", "top_left", "bottom_right"),
        ((-1, -1), (9, 4)),
        ("none", "bool", "float", "float_grad"),
        (1, 4),
        (1, 40, 300),
        (0, 3),
        (
            {},
            {"soft_cap": True},
            {"sinks": True, "lse": True},
            {"soft_cap": True, "sinks": True, "lse": True, "dropout_p": 0.1, "seeded": True},
        ),
        (torch.float32, torch.bfloat16),
        ("fw", "fwbw"),
        (8, 72, 256),
    ):
        asked = problem(
            "cuda", dtype, causal=causal, window_left=window[0], window_right=window[1], mask=mask,
            mask_dims="bhts" if mask != "none" else "", kv_heads=heads, seqlen_q=length, seqlen_k=300,
            sequences=sequences, direction=direction, head_dim=head_dim, deterministic=True, **extras,
        )  # fmt: skip
        assert any(kernel.refuses(asked) is None for kernel in kernels), str(asked)


def test_a_candidate_that_does_not_do_it_says_why() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(InputError, match=r"flash does not run here: it has no sinks\. Take 'pick'"):
        attention(q, q, q, sinks=torch.zeros(2), backend="flash")
    with pytest.raises(InputError, match="cudnn does not run here: it is a CUDA kernel"):
        attention(q, q, q, backend="cudnn")


def test_reasons_name_what_is_missing() -> None:
    on_gpu = {"device": "cuda", "dtype": torch.bfloat16}
    asked = problem(**on_gpu, mask="float_grad", mask_dims="ts", direction="fwbw")
    assert CANDIDATES["cudnn"].supports(asked) == "it gives the mask no gradient"
    asked = problem(**on_gpu, mask="bool", mask_dims="bs", direction="fwbw")
    assert str(CANDIDATES["cudnn"].supports(asked)).startswith("its backward is not right with a mask")
    asked = problem(**on_gpu, mask="float", mask_dims="ts")
    assert CANDIDATES["flash"].supports(asked) == "it takes no mask"
    asked = problem(**on_gpu, dropout_p=0.1)
    assert CANDIDATES["cudnn"].supports(asked) == "its dropout is in sixteenths, over more than one query"
    assert CANDIDATES["flash"].supports(asked) is None
    assert CANDIDATES["flex"].supports(asked) == "it has no dropout"
    asked = problem(**on_gpu, batch=2048, heads=64, kv_heads=64)
    assert CANDIDATES["flex"].supports(asked) == "it takes batch times heads up to 65535"
    asked = problem(**on_gpu, direction="fwbw", lse=True)
    assert CANDIDATES["flash"].supports(asked) == "its lse has no gradient"
    asked = problem(**on_gpu, direction="fwbw", deterministic=True)
    assert CANDIDATES["cudnn"].varies(asked) == "its backward does not repeat its bits"
    assert CANDIDATES["cudnn"].refuses(asked) is not None
    assert CANDIDATES["flash"].refuses(asked) is None
    asked = problem(**on_gpu, causal="top_left", window_left=3, seqlen_q=40, seqlen_k=30)
    assert "counted from the bottom right" in str(CANDIDATES["flash"].supports(asked))


def test_a_borrowed_forward_pass_is_taken_only_where_the_two_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuseline.native.ready", lambda device: True)
    monkeypatch.setattr(torch.ops.fuseline, "attention", None, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    on_gpu = {"device": "cuda", "dtype": torch.bfloat16}
    training = {**on_gpu, "direction": "fwbw"}
    for name in ("cudnn", "flash"):
        mixed = CANDIDATES[f"{name}_fuseline"]
        assert mixed.parts == (name, "fuseline")
        assert mixed.supports(problem(**on_gpu)) == f"without a gradient it is {name}"
        assert mixed.refuses(problem(**training, causal="top_left", deterministic=True)) is None
        assert mixed.supports(problem(**training, lse=True)) is None, "our backward takes its gradient"
        assert mixed.supports(problem(**training, seqlen_q=24)) is None
        assert mixed.supports(problem(**training, mask="bool", mask_dims="bs")) == "it takes no mask"
        assert mixed.supports(problem(**training, dropout_p=0.125)) == "it has no dropout"
        assert mixed.supports(problem(**training, window_left=3)) == "it has no sliding window"
        asked = problem(**training, causal="bottom_right", seqlen_q=72)
        assert mixed.supports(asked) == "with causality it takes as many keys as queries"
        assert mixed.supports(problem("cuda", torch.float32, direction="fwbw")) is not None
    asked = problem(**training, head_dim=256)
    assert CANDIDATES["cudnn_fuseline"].supports(asked) == "it takes head dims up to 128, not 256"
