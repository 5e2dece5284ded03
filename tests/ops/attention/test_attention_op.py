"""The native op `fuseline::attention` against attention written out in PyTorch, over all its features."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from .native_calls import BOTTOM_RIGHT, DEVICES, GRADIENTS, NONE, TOP_LEFT, Spec, check

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
    "packed_grouped": Spec(
        B=1, T=190, S=205, H=4, H_kv=2, causal=BOTTOM_RIGHT, lengths=((60, 7, 0, 121), (70, 10, 4, 120)),
        dropout_p=0.2,
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
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_packed_forward_and_backward_by_different_kernels(dtype: torch.dtype) -> None:
    """Which they are at this head dim, and they drop the same elements."""
    check(replace(FEATURES["packed_grouped"], D=64, scale=0.125, dtype=dtype), "cuda")


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
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("causal", [NONE, TOP_LEFT, BOTTOM_RIGHT])
@pytest.mark.parametrize("T", [129, 192, 300, 515, 1000, 1023, 1024])
def test_self_attention(T: int, causal: int, dtype: torch.dtype) -> None:
    """On Hopper the backward takes one pass over the scores here: tiles of 64 rows and of 128 keys, full or
    not, views of one tensor, heads that share keys."""
    check(Spec(H=4, H_kv=2, T=T, S=T, D=64, dtype=dtype, causal=causal, scale=0.125, layout="qkv"), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("causal", [NONE, TOP_LEFT, BOTTOM_RIGHT])
@pytest.mark.parametrize("T", [136, 256, 515, 1000, 1024, 2056])
def test_self_attention_with_dropout(T: int, causal: int, dtype: torch.dtype) -> None:
    """On Hopper the pass over the scores reads bits of what is kept, to 2,048 rows of whole blocks of Philox;
    515 and 2,056 rows go another way, and so does what keeps nothing: lse has gradients there."""
    spec = Spec(H=4, H_kv=2, T=T, S=T, D=64, dtype=dtype, causal=causal, scale=0.125, layout="qkv")
    check(replace(spec, dropout_p=0.2), "cuda")
    check(replace(spec, D=40, H_kv=4, dropout_p=0.5), "cuda")
    check(replace(spec, dropout_p=1.0), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("heads, kv_heads, B, T", [(7, 1, 2, 2048), (6, 2, 1, 640), (16, 2, 8, 1024)])
def test_heads_that_share_keys_add_in_turn(heads: int, kv_heads: int, B: int, T: int) -> None:
    """In the pass over the scores each head adds to what the head before it left; more blocks than run at
    once, too."""
    spec = Spec(B=B, H=heads, H_kv=kv_heads, T=T, S=T, D=64, causal=TOP_LEFT, scale=0.125)
    check(replace(spec, dtype=torch.bfloat16), "cuda")


DROPPED = {"sinks": True, "dropout_p": 0.2, "T": 304, "S": 304}


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [NONE, TOP_LEFT])
@pytest.mark.parametrize(
    "change", [{"D": 40}, {"D": 56, "sinks": True}, {"wanted": ("q", "k")}, {"S": 301}, DROPPED]
)
def test_near_self_attention(change: dict[str, Any], causal: int) -> None:
    """Heads that do not fill their columns and sinks in one pass, gradients that are not wanted and more keys
    than rows in two."""
    spec = Spec(H=4, H_kv=2, T=300, S=300, D=64, dtype=torch.bfloat16, causal=causal, scale=0.125)
    check(replace(spec, **change), "cuda")


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


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 16])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(("B", "S"), [(2, 1500), (40, 700), (150, 700)])
def test_long_caches_in_few_parts_and_in_one(T: int, D: int, B: int, S: int) -> None:
    """Few parts a warp adds up; where there is one it is the result."""
    spec = Spec(B=B, H=4, H_kv=2, T=T, S=S, D=D, dtype=torch.bfloat16, causal=BOTTOM_RIGHT, scale=D**-0.5)
    spec = replace(spec, wanted=())
    check(spec, "cuda")
    check(replace(spec, window=(300, -1), sinks=True, layout="bthd"), "cuda")
    check(replace(spec, mask="bool", mask_dims="bs", causal=TOP_LEFT, sinks=B > 2), "cuda")
