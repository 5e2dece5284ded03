"""Training in fp8: measured times decide which linear layers of a model's blocks compute in it.

For every shape, a layer is timed forward and backward in bf16 and in fp8, as the step will run it (recorded
or not), with the conversion of its weight included. fp8 is kept where it is faster. The decision for a shape
on a GPU is kept on disk for as long as the kernels stay the same, so that a resumed run computes as before.
The head, the embedding and everything outside of the repeated blocks stay in 16 bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fuseline.acceleration.forms import repeated_blocks
from fuseline.acceleration.kept_proofs import KeptProof, KeptRecipe, keep, load, proof_key
from fuseline.acceleration.layer import layers_of
from fuseline.acceleration.observe import left_as_found
from fuseline.acceleration.pay import Clock
from fuseline.nn.fp8_linear import Fp8Linear, Fp8Step, put_on, take_off
from fuseline.ops.fp8_rows import E4M3, ROW_STEP
from fuseline.records.kernel_sources import family_hash

LEAST_GAIN = 1.02
"""bf16's time over fp8's, from which fp8 is worth its roundings."""
_FAMILIES = ("activations", "linear")
"""Of the kernels in what is timed: other sources of them need other times."""

Inside = Callable[[], contextlib.AbstractContextManager[object]]


@runtime_checkable
class ComputesTogether(Protocol):
    """A module that computes several linear layers as one op while they are plain."""

    def together(self) -> Sequence[nn.Linear]:
        """Those layers; none where it calls them one by one."""
        ...


@dataclass(frozen=True)
class Times:
    """Microseconds of forward and backward in both formats, and whether fp8 is faster for certain."""

    bf16_us: float
    fp8_us: float
    pays: bool


@dataclass(frozen=True)
class Fp8Layer:
    """A linear layer [rows, inputs] -> [rows, outputs]: whether it trains in fp8, else `reason` says why not.

    `times` are those of all layers that were timed `together` with it; None where it was not timed.
    """

    name: str
    inputs: int
    outputs: int
    rows: int
    reason: str
    times: Times | None
    together: int

    @property
    def in_fp8(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class _Call:
    """How a layer is called."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class _Site:
    """What is timed as one: a module, how it is called, and its layers."""

    module: nn.Module
    layers: tuple[nn.Linear, ...]
    call: _Call


class Fp8Layers:
    """The linear layers of a model's blocks, some of which compute in fp8 between `prepare` and `close`.

    Args:
        module: the model, or a `DistributedDataParallel` of it.
        clock: what times both formats; by default pairs of calls on the model's device.
        gradient: the format of gradients in products, `torch.float8_e4m3fn` or `float8_e5m2`.

    Attributes:
        layers: what became of each linear layer; empty before `prepare`.
    """

    def __init__(
        self, module: nn.Module, *, clock: Clock | None = None, gradient: torch.dtype = E4M3
    ) -> None:
        self.model, self._group = module, None
        if isinstance(module, DistributedDataParallel):
            self.model, self._group = module.module, module.process_group
        self.layers: tuple[Fp8Layer, ...] = ()
        self._clock = Clock() if clock is None else clock
        self._gradient = gradient
        self._step = Fp8Step()
        self._changed: list[Fp8Linear] = []

    def prepare(self, forward: Callable[[], object], inside: Inside) -> None:
        """Decide for each layer. `forward` runs the model on a batch, `inside` is the context it runs in. The
        model, its gradients and all random numbers are left as they were found."""
        names = {m: name for name, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        in_blocks = {m for block in repeated_blocks(self.model) for m in block.modules()}
        reasons = {layer: _why_not(layer, layer in in_blocks) for layer in names}
        times: dict[nn.Linear, tuple[Times, int]] = {}
        with left_as_found(self.model):
            able = [layer for layer, reason in reasons.items() if not reason]
            holders = [m for m in self.model.modules() if _together(m)]
            calls = _calls([*able, *holders], forward, inside)
            sites = list(_sites(self.model, calls))
            for site, found in zip(sites, self._agreed(sites, inside), strict=True):
                times |= dict.fromkeys(site.layers, (found, len(site.layers)))
        for layer, reason in reasons.items():
            if not reason and layer not in times:
                reasons[layer] = "the batch does not reach it"
            elif not reason and not times[layer][0].pays:
                reasons[layer] = "bf16 is as fast"
        self.layers = tuple(
            Fp8Layer(
                name,
                layer.in_features,
                layer.out_features,
                _rows(calls[layer].shape) if layer in calls else 0,
                reasons[layer],
                *times.get(layer, (None, 0)),
            )
            for layer, name in names.items()
        )
        self._changed = [put_on(m, self._step, self._gradient) for m in names if not reasons[m]]

    def one_step(self) -> contextlib.AbstractContextManager[None]:
        """Forward and backward of one optimizer step: each weight becomes fp8 once."""
        return self._step.one()

    def close(self) -> None:
        """Make every layer the `nn.Linear` that it was."""
        while self._changed:
            take_off(self._changed.pop())

    def summary(self) -> list[str]:
        """A line for each shape: how many layers have it, their times, and what was decided."""
        alike: dict[tuple[object, ...], list[Fp8Layer]] = {}
        for layer in self.layers:
            key = layer.rows, layer.inputs, layer.outputs, layer.together, layer.reason
            alike.setdefault(key, []).append(layer)
        return [_line(layers) for layers in alike.values()]

    def _agreed(self, sites: Sequence[_Site], inside: Inside) -> list[Times]:
        """The times of each site; with several processes those of the first, so that all compute alike."""
        times: dict[str, Times] = {}  # sites that are alike are timed once, and decided alike
        keys = [self._key(site) for site in sites]
        for key, site in zip(keys, sites, strict=True):
            if key not in times:
                times[key] = self._times(key, site, inside)
        found = [times[key] for key in keys]
        if self._group is not None:
            torch.distributed.broadcast_object_list(found, group_src=0, group=self._group)
        return found

    def _key(self, site: _Site) -> str:
        """Equal for sites that take the same time."""
        kind = f"{type(site.module).__module__}.{type(site.module).__qualname__}"
        shapes = [(*layer.weight.shape, layer.weight.dtype, layer.bias is None) for layer in site.layers]
        kernels = [family_hash(family) for family in _FAMILIES]
        return proof_key("fp8", kind, shapes, site.call, self._clock.recorded, self._gradient, kernels)

    def _times(self, key: str, site: _Site, inside: Inside) -> Times:
        """What is kept of such a site, or else what the clock says."""
        if (kept := _kept(key)) is not None:
            return kept
        found = self._timed(site, inside)
        keep(key, KeptProof([KeptRecipe(0.0, 0.0, True, "", found.fp8_us, found.bf16_us, found.pays)]))
        return found

    def _timed(self, site: _Site, inside: Inside) -> Times:
        call, device = site.call, site.layers[0].weight.device
        x = torch.randn(call.shape, device=device).to(call.dtype).requires_grad_(call.requires_grad)
        sources = [p for p in (x, *site.module.parameters()) if p.requires_grad]
        gradients: dict[torch.dtype, torch.Tensor] = {}

        def run() -> object:
            with inside():
                y = site.module(x)
            if y.dtype not in gradients:
                gradients[y.dtype] = torch.randn_like(y)
            return torch.autograd.grad(y, sources, gradients[y.dtype])

        def run_in_fp8() -> object:
            changed = [put_on(layer, self._step, self._gradient) for layer in site.layers]
            try:
                with self._step.one():
                    return run()
            finally:
                for layer in changed:
                    take_off(layer)

        verdict = self._clock.compare(run, run_in_fp8, device)
        clear = verdict.original_us >= LEAST_GAIN * verdict.swapped_us
        return Times(verdict.original_us, verdict.swapped_us, verdict.pays and clear)


def _why_not(layer: nn.Linear, in_block: bool) -> str:
    """Why a layer cannot compute in fp8; empty if it can."""
    if type(layer) is not nn.Linear:
        return f"it is a {type(layer).__name__}"
    if not in_block:
        return "it is in no repeated block"
    if layer.in_features % ROW_STEP or layer.out_features % ROW_STEP:
        return f"its sizes are not multiples of {ROW_STEP}"
    return ""


def _calls(
    modules: Iterable[nn.Module], forward: Callable[[], object], inside: Inside
) -> dict[nn.Module, _Call]:
    """How each module is called first, of those that are called with one tensor."""
    calls: dict[nn.Module, _Call] = {}

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            x = args[0]
            calls.setdefault(module, _Call(tuple(x.shape), x.dtype, x.requires_grad))

    handles = [module.register_forward_pre_hook(look, with_kwargs=True) for module in modules]
    try:
        with inside():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _together(module: nn.Module) -> list[nn.Linear]:
    """The layers that a module computes as one op: by its own account, or where `accelerate` has put one
    in."""
    if isinstance(module, ComputesTogether):
        return list(module.together())
    return (
        [m for m in module.modules() if type(m) is nn.Linear and m is not module] if layers_of(module) else []
    )


def _sites(model: nn.Module, calls: Mapping[nn.Module, _Call]) -> Iterator[_Site]:
    """Modules that compute several of the called layers together, and the others of these one by one."""
    left = [layer for layer in calls if isinstance(layer, nn.Linear)]
    for module in model.modules():
        layers = _together(module)
        if layers and module in calls and all(layer in left for layer in layers):
            yield _Site(module, tuple(layers), calls[module])
            left = [layer for layer in left if layer not in layers]
    for layer in left:
        yield _Site(layer, (layer,), calls[layer])


def _kept(key: str) -> Times | None:
    proof = load(key)
    if proof is None or len(proof.recipes) != 1:
        return None
    of = proof.recipes[0]
    if of.original_time_us is None or of.time_us is None or of.pays is None:
        return None
    return Times(of.original_time_us, of.time_us, of.pays)


def _rows(shape: Sequence[int]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


def _line(layers: Sequence[Fp8Layer]) -> str:
    first, count = layers[0], len(layers)
    text = f"{count} x [{first.outputs}, {first.inputs}]"
    if first.rows:
        text += f", {first.rows:,} rows"
    if first.times is not None:
        text += f", bf16 {first.times.bf16_us:.0f} us, fp8 {first.times.fp8_us:.0f}"
    if first.together > 1:
        text += f" for {first.together} layers"
    return f"{text}: {'fp8' if first.in_fp8 else f'bf16, {first.reason}'}"
