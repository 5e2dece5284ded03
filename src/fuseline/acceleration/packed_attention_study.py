"""Torch's whole layer of self-attention, as one module's forward calls it: proved as one and timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fuseline.acceleration.change import Change
from fuseline.acceleration.find import Candidate
from fuseline.acceleration.judge import Outcome, judge, site_of
from fuseline.acceleration.kept_proofs import KeptRecipe
from fuseline.acceleration.observe import Observed, Sample
from fuseline.acceleration.packed_attention import Form, LayerCall, PackedAttention, torch_layer
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.rebound import Name, Rebound
from fuseline.acceleration.recipe import Match
from fuseline.acceleration.site import KEPT, REFUSED, Site
from fuseline.acceleration.trace import UntraceableError, trace
from fuseline.acceleration.wanted import Wanted
from fuseline.errors import first_line
from fuseline.ops.attention.call import make_call
from fuseline.ops.attention.reference import attend
from fuseline.timing import ran_out_of_memory

KIND = "attention"
WEIGHTS = ("in_weight", "in_bias", "out_weight", "out_bias")


class SelfAttention(nn.Module):
    """What is proved: torch's function of x, [B, T, E], with masks of the call's form."""

    in_weight: torch.Tensor
    in_bias: torch.Tensor | None
    out_weight: torch.Tensor
    out_bias: torch.Tensor | None

    def __init__(self, call: LayerCall) -> None:
        super().__init__()
        self.form, self.p = call.form, call.dropout
        for name, weight in zip(WEIGHTS, call.weights, strict=True):
            own = None if weight is None else nn.Parameter(weight.detach(), weight.requires_grad)
            self.register_parameter(name, own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, call = x.transpose(0, 1), self.call(x)
        mask = call.mask
        if call.causal:  # torch asks for a mask beside the flag, and does not look at it
            mask = x.new_zeros(x.shape[1], x.shape[1])
        out, _ = torch_layer(
            given,
            given,
            given,
            x.shape[2],
            call.heads,
            *call.weights[:2],
            None,
            None,
            False,
            self.p,
            *call.weights[2:],
            training=self.training,
            key_padding_mask=call.padding,
            need_weights=False,
            attn_mask=mask,
            is_causal=call.causal,
        )
        return out.transpose(0, 1)

    def call(self, x: torch.Tensor) -> LayerCall:
        """The call of x, with masks under which every query sees a key."""
        B, T, _ = x.shape
        t, form = torch.arange(T, device=x.device), self.form
        mask = padding = None
        if form.mask is not None:
            distance = t[:, None] - t
            mask = _masked(distance.abs() > T // 2, form.mask[0], distance.cos())
            mask = mask if form.mask[1] == 2 else mask.repeat(B * form.heads, 1, 1)
        if form.padding is not None:
            first = torch.arange(B, device=x.device) * (T // 2) // max(B - 1, 1)
            padding = _masked(t < first[:, None], form.padding, torch.zeros(B, T, device=x.device))
        weights = self.in_weight, self.in_bias, self.out_weight, self.out_bias
        return LayerCall(x, weights, form.heads, self.p if self.training else 0.0, form.causal, mask, padding)


@dataclass(frozen=True)
class PackedRecipe:
    """`SelfAttention` by Fuseline's ops, with the mask of a seed."""

    op: ClassVar[str] = "attention_packed"
    own_mask: ClassVar[bool] = True
    form: Form
    p: float
    weights: tuple[str, ...]

    @property
    def drops(self) -> bool:
        return self.p > 0

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.run_seeded(module, tensors, None)

    def run_seeded(
        self, module: nn.Module, tensors: Sequence[torch.Tensor], seed: torch.Tensor | None
    ) -> torch.Tensor:
        return _call_of(module, tensors).run(seed)

    def define_seeded(
        self, module: nn.Module, tensors: Sequence[torch.Tensor], seed: torch.Tensor
    ) -> torch.Tensor:
        """What `run_seeded` computes, in plain PyTorch and in the dtype of the tensor."""
        call = _call_of(module, tensors)
        in_weight, in_bias, out_weight, out_bias = call.weights
        packed = F.linear(call.x, in_weight, in_bias)
        q, k, v = (part.unflatten(2, (call.heads, -1)).transpose(1, 2) for part in packed.chunk(3, dim=2))
        causal = "top_left" if call.causal else False
        mask = call.merged(packed.dtype)
        out = attend(make_call(q, k, v, causal=causal, mask=mask, dropout_p=call.dropout, seed=seed))[0]
        return F.linear(out.transpose(1, 2).flatten(2), out_weight, out_bias)


def study_packed(
    observed: Observed,
    name: Name,
    calls: Sequence[LayerCall | str],
    known: dict[Any, Outcome],
    wanted: Wanted,
    clock: Clock,
) -> tuple[Site, Change | None] | None:
    """What becomes of a module's calls of torch's function; None where one of them is none of these."""
    keys, site = [], None
    for call in calls:
        if isinstance(call, str):
            return None
        candidate = _candidate(observed, call)
        if candidate is None:
            return None
        if candidate.family not in known:
            known[candidate.family] = _judged(candidate, wanted, clock)
        outcome = known[candidate.family]
        site = site_of(candidate, outcome, wanted)
        if outcome.recipe is None:
            return site, None
        keys.append(call.key(lengths=not outcome.numbers.any_length))
    if site is None or site.status != KEPT:
        return None if site is None else (site, None)
    stand_in = PackedAttention(keys, wanted.strict)
    layer = Rebound(observed.module, {name: stand_in}, wanted.strict)
    return site, Change(observed.path, KIND, ((observed.module, layer),), name)


def _candidate(observed: Observed, call: LayerCall) -> Candidate | None:
    module = SelfAttention(call)
    module.train(observed.module.training)
    sample = Sample((call.x.detach().requires_grad_(call.x.requires_grad),), {})
    weights = tuple(path for path, weight in zip(WEIGHTS, call.weights, strict=True) if weight is not None)
    match = Match(KIND, (PackedRecipe(call.form, call.dropout, weights),))
    learned = tuple(weight is not None and weight.requires_grad for weight in call.weights)
    like = call.key(lengths=True), call.x.stride(), call.x.requires_grad, call.dropout, learned
    try:
        return Candidate(module, observed.paths, (sample,), match, trace(module, sample), like)
    except UntraceableError:
        return None


def _judged(candidate: Candidate, wanted: Wanted, clock: Clock) -> Outcome:
    assert isinstance(candidate.verdict, Match)
    try:
        return judge(candidate, candidate.verdict, wanted, clock)
    except RuntimeError as error:
        if ran_out_of_memory(error):
            raise
        return Outcome(None, REFUSED, first_line(error), KeptRecipe())


def _call_of(module: nn.Module, tensors: Sequence[torch.Tensor]) -> LayerCall:
    assert isinstance(module, SelfAttention)
    return module.call(tensors[0])


def _masked(hidden: torch.Tensor, dtype: torch.dtype, added: torch.Tensor) -> torch.Tensor:
    """What hides those keys, in that dtype: True, or -inf, where `added` says what the others are added."""
    return hidden if dtype is torch.bool else added.to(dtype).masked_fill(hidden, float("-inf"))
