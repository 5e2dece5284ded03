"""Keys and values of earlier positions at fixed addresses: what a recorded decoding step can read again.

Each row of a batch holds its own number of positions, kept on the device, so that prompts of different
lengths stand side by side from position 0 on and no step waits for the host. Keys and values are held in the
model's dtype, or in 8 bits with one scale a position and head.

Shapes: L layers, B batch, K key heads, S positions, D head_dim, T new positions, N of a packed product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fuseline.errors import InputError, unknown_name
from fuseline.models.heads import Heads, causal, merged, scaled_dot_product
from fuseline.ops import LayerCache, decode_attention
from fuseline.ops.decode_attention import quantized

STORAGES = ("model", "int8", "fp8")


@dataclass(frozen=True)
class CacheShape:
    """What a cache is for: `capacity` positions of `batch` rows."""

    num_layers: int
    batch: int
    num_heads: int
    num_kv_heads: int
    capacity: int
    head_dim: int
    dtype: torch.dtype
    storage: str = "model"

    def __post_init__(self) -> None:
        if self.storage not in STORAGES:
            raise unknown_name("cache storage", self.storage, STORAGES)
        if self.batch < 1 or self.capacity < 1:
            raise InputError(f"A cache of {self.batch} rows and {self.capacity} positions holds nothing.")

    @property
    def stored_dtype(self) -> torch.dtype:
        return {"model": self.dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[self.storage]

    @property
    def bytes(self) -> int:
        """Of keys, values and scales."""
        heads = self.num_layers * self.batch * self.num_kv_heads * self.capacity
        scales = 0 if self.storage == "model" else 4
        return 2 * heads * (self.head_dim * self.stored_dtype.itemsize + scales)


class StaticCache:
    """Room for keys and values, and how many positions of each row are held (`lengths_B`, int64)."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        sizes = (shape.num_layers, shape.batch, shape.num_kv_heads, shape.capacity)
        # Zeros: what a mask hides is still multiplied, by 0.
        self.k = torch.zeros(*sizes, shape.head_dim, dtype=shape.stored_dtype, device=device)
        self.v = torch.zeros_like(self.k)
        quantized = shape.storage != "model"
        self.k_scales = torch.zeros(sizes, device=device) if quantized else None
        self.v_scales = torch.zeros(sizes, device=device) if quantized else None
        self.lengths_B = torch.zeros(shape.batch, dtype=torch.int64, device=device)
        # Where blocks of a kernel that share a row's positions count themselves; zero between launches.
        self._arrivals = torch.zeros(shape.batch * shape.num_heads, dtype=torch.int32, device=device)
        self.rows_B1 = torch.arange(shape.batch, device=device).unsqueeze(1)

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, [B, K, S, D], as they are stored."""
        return self.k[layer], self.v[layer]

    def layer(self, layer: int) -> LayerCache:
        """One layer's part, views all."""
        return LayerCache(
            *self.held(layer),
            self.lengths_B,
            None if self.k_scales is None else self.k_scales[layer],
            None if self.v_scales is None else self.v_scales[layer],
            self._arrivals,
        )

    def write(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor, positions_BT: Tensor) -> None:
        """Keep those of T positions of each row; nothing may lie past the capacity."""
        for held, scales, new_BKTD in zip(
            self.held(layer), (self.k_scales, self.v_scales), (k_BKTD, v_BKTD), strict=True
        ):
            self._put(held, None if scales is None else scales[layer], new_BKTD, positions_BT)

    def fill(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor, first_row: int) -> None:
        """Keep those of positions 0 .. T - 1 of B rows from `first_row` on."""
        B, _, T, _ = k_BKTD.shape
        rows = slice(first_row, first_row + B)
        for held, scales, new_BKTD in zip(
            self.held(layer), (self.k_scales, self.v_scales), (k_BKTD, v_BKTD), strict=True
        ):
            if scales is None:
                held[rows, :, :T] = new_BKTD
            else:
                held[rows, :, :T], scales[layer, rows, :, :T] = quantized(new_BKTD, held.dtype)

    def read(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions 0 .. count - 1, [B, K, count, D] in the model's dtype."""
        k_BKSD, v_BKSD = (held[:, :, :count] for held in self.held(layer))
        if self.k_scales is None or self.v_scales is None:
            return k_BKSD, v_BKSD
        dtype = self.shape.dtype
        return (
            (k_BKSD.float() * self.k_scales[layer, :, :, :count, None]).to(dtype),
            (v_BKSD.float() * self.v_scales[layer, :, :, :count, None]).to(dtype),
        )

    def _put(
        self, held_BKSD: Tensor, scales_BKS: Tensor | None, new_BKTD: Tensor, positions_BT: Tensor
    ) -> None:
        if scales_BKS is not None:
            new_BKTD, new_scales_BKT = quantized(new_BKTD, held_BKSD.dtype)
            scales_BKS[self.rows_B1, :, positions_BT] = new_scales_BKT.transpose(1, 2)
        if held_BKSD.dtype is torch.float8_e4m3fn:  # indexed stores know no fp8: the bytes are the same
            held_BKSD, new_BKTD = held_BKSD.view(torch.uint8), new_BKTD.view(torch.uint8)
        held_BKSD[self.rows_B1, :, positions_BT] = new_BKTD.transpose(1, 2)


class Beginning:
    """The `Attend` of prompts, which begin at position 0: rows `first_row` and on of the cache are filled."""

    def __init__(self, cache: StaticCache, first_row: int = 0) -> None:
        self._cache, self._first_row = cache, first_row

    def __call__(self, layer: int, qkv_BTN: Tensor, heads: Heads) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = heads.split(qkv_BTN)
        self._cache.fill(layer, k_BHTD, v_BHTD, self._first_row)
        return merged(causal(q_BHTD, k_BHTD, v_BHTD, heads.window, fused=heads.fused))


class Rounded:
    """The `Attend` of whole sequences that see keys and values as a cache of that storage gives them back:
    what it costs in precision, without a token at a time."""

    def __init__(self, storage: str) -> None:
        self._stored = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[storage]

    def __call__(self, layer: int, qkv_BTN: Tensor, heads: Heads) -> Tensor:
        q_BHTD, k_BKTD, v_BKTD = heads.split(qkv_BTN)
        k_BKTD, v_BKTD = self._rounded(k_BKTD), self._rounded(v_BKTD)
        return merged(causal(q_BHTD, k_BKTD, v_BKTD, heads.window, fused=heads.fused))

    def _rounded(self, x_BKTD: Tensor) -> Tensor:
        small, scales = quantized(x_BKTD, self._stored)
        return (small.float() * scales.unsqueeze(-1)).to(x_BKTD.dtype)


class Continuation:
    """The `Attend` of T more positions for every row, after those held. `count` positions are looked at: a
    bucket that is fixed while a step is recorded, and no row may reach past it."""

    def __init__(self, cache: StaticCache, new: int, count: int) -> None:
        self._cache, self._count = cache, count
        self.positions_BT = cache.lengths_B.unsqueeze(1)
        if new > 1:  # of one token the length itself, without a launch
            self.positions_BT = self.positions_BT + torch.arange(new, device=cache.lengths_B.device)
        self._keep: dict[int | None, Tensor] = {}

    def __call__(self, layer: int, qkv_BTN: Tensor, heads: Heads) -> Tensor:
        if heads.fused and qkv_BTN.shape[1] == 1:
            y_BC = decode_attention(
                qkv_BTN[:, 0],
                self._cache.layer(layer),
                heads=heads.num_heads,
                count=self._count,
                cos=heads.cos,
                sin=heads.sin,
                q_norm=heads.q_norm,
                k_norm=heads.k_norm,
                eps=heads.eps,
                window=heads.window,
                overlap=True,  # a layer's last launch is its product of queries, keys and values
            )
            return y_BC.unsqueeze(1)
        q_BHTD, k_BHTD, v_BHTD = heads.split(qkv_BTN, self.positions_BT)
        self._cache.write(layer, k_BHTD, v_BHTD, self.positions_BT)
        k_BKSD, v_BKSD = self._cache.read(layer, self._count)
        return merged(scaled_dot_product(q_BHTD, k_BKSD, v_BKSD, self._visible(heads.window)))

    def _visible(self, window: int | None) -> Tensor:
        """[B, 1, T, S], True where a position may be seen; the same in all layers of one window."""
        if window not in self._keep:
            places_S = torch.arange(self._count, device=self.positions_BT.device)
            ages_BTS = self.positions_BT.unsqueeze(-1) - places_S
            keep_BTS = ages_BTS >= 0
            if window is not None:
                keep_BTS &= ages_BTS < window
            self._keep[window] = keep_BTS.unsqueeze(1)
        return self._keep[window]
