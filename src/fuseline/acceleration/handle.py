"""What `accelerate` returns: a report on every site, `undo`, and training steps over the faster model."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fuseline.acceleration.attention import MARK, NAME, REPLACED, AttentionMark, register, rename, runs_ours
from fuseline.acceleration.attention_study import AttentionStudy
from fuseline.acceleration.change import Change
from fuseline.acceleration.compiled_call import CompiledCall
from fuseline.acceleration.forms import KERNELS, CompiledBlocks, Form, repeated_blocks
from fuseline.acceleration.head_loss import KIND as HEAD
from fuseline.acceleration.head_loss import deferred
from fuseline.acceleration.layer import Layer, layers_of, put_in, take_out
from fuseline.acceleration.merged_products import MergedProducts
from fuseline.acceleration.pay import Clock, Verdict
from fuseline.acceleration.rebound import Rebound, StandIn
from fuseline.acceleration.rehearse import not_reached
from fuseline.acceleration.site import KEPT, REFUSED, Site
from fuseline.acceleration.study import STUDYING, Study, study, uncompiled
from fuseline.acceleration.table import report_text, table
from fuseline.acceleration.training_step import Scheduler, TrainingStep
from fuseline.acceleration.wanted import Loss, Wanted


@dataclass(frozen=True)
class Runs:
    """Calls of one kept site since it was swapped: those that ran Fuseline's op, and the others, with the
    reason.

    A replayed CUDA graph runs no Python: it counts once, when it is recorded.
    """

    path: str
    kind: str
    taken: int
    declined: dict[str, int]


TIMED_EAGERLY = "For a recorded step {1} comparisons were timed eagerly: they could not be recorded ({0})."


@dataclass(frozen=True)
class Report:
    """`sites` has the sites in the model's order; `eager` says how many training steps and compiled calls ran
    eagerly, by reason. `padded` counts those that were padded ("padded") and their positions ("given",
    "added"); `unpadded` says why none are. The printed report has a line for each site that ran its original,
    and totals."""

    sites: tuple[Runs, ...]
    eager: Mapping[str, int] = field(default_factory=dict)
    padded: Mapping[str, int] = field(default_factory=dict)
    unpadded: tuple[str, ...] = ()

    @property
    def declined(self) -> int:
        return sum(sum(runs.declined.values()) for runs in self.sites)

    @property
    def taken(self) -> int:
        return sum(runs.taken for runs in self.sites)

    def __str__(self) -> str:
        runs = [(f"{r.path} ({r.kind})", r.taken, r.declined) for r in self.sites]
        return report_text(runs, self.eager, self.padded, self.unpadded)


@dataclass
class Acceleration:
    """A model whose forwards run Fuseline's ops where that was proved right and faster.

    Call the model itself as before. `sites` has a result for each recognized place; print the handle for a
    table. `whole` compares the model's whole step before and after, if sites were timed. Where
    `pad_calls` is set to False before the first `compiled_call`, no call is padded.
    """

    model: nn.Module
    sites: tuple[Site, ...] = ()
    whole: Verdict | None = None
    notes: tuple[str, ...] = ()
    head: nn.Linear | None = None
    wanted: Wanted = field(default_factory=lambda: Wanted(train=True))
    pad_calls: bool = True
    _changes: dict[tuple[str, str], Change] = field(default_factory=dict, repr=False)
    _marked: dict[str, tuple[nn.Module, AttentionMark]] = field(default_factory=dict, repr=False)
    _call: CompiledCall | None = field(default=None, repr=False)
    _on_undo: list[Callable[[], object]] = field(default_factory=list, repr=False)
    _configs: list[Any] = field(default_factory=list, repr=False)
    _steps: weakref.WeakSet[TrainingStep] = field(default_factory=weakref.WeakSet, repr=False)

    def __str__(self) -> str:
        return table(self.sites, self.whole, self.notes)

    @property
    def kept(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if site.status == KEPT)

    def apply(self, found: Study) -> None:
        """Make the changes of a study. Layers that are in place already take over what is new for them."""
        for change in found.changes:
            layers = tuple((module, self._placed(module, layer)) for module, layer in change.layers)
            self._changes[change.path, change.kind] = replace(change, layers=layers)
        if found.head is not None:
            self.head = found.head.head
        if found.attention is not None and found.attention.marks:
            self._apply_attention(found.attention)

    @staticmethod
    def _placed(module: nn.Module, layer: Layer) -> Layer:
        for standing in layers_of(module):
            if type(standing) is type(layer):
                standing.merge(layer)
                return standing
        put_in(module, layer)
        return layer

    def _apply_attention(self, found: AttentionStudy) -> None:
        for path, module, mark in found.marks:
            if path in self._marked:
                self._marked[path][1].keys |= mark.keys
            else:
                self._marked[path] = (module, mark)
                module.__dict__[MARK] = mark
        register()
        rename(found.configs, NAME)
        self._configs += found.configs

    def on_undo(self, steps: Sequence[Callable[[], object]]) -> None:
        """Register something else for `undo` to take back."""
        self._on_undo += steps

    def rehearse(self, batch: Any) -> None:
        """Remove changes that span modules and that the batch never uses."""
        unused = not_reached(self.model, batch, self._changes, self._marked, train=self.wanted.train)
        for path, kind in unused:
            self.remove(path, kind)
        self.sites = tuple(
            replace(site, status=REFUSED, reason=unused[site.path, site.kind])
            if (site.path, site.kind) in unused
            else site
            for site in self.sites
        )

    def remove(self, path: str, kind: str) -> None:
        """Give what one site changed its own code back."""
        if kind == "attention" and path in self._marked:
            self._marked.pop(path)[0].__dict__.pop(MARK, None)
            return
        change = self._changes.pop((path, kind))
        kept = {id(layer) for other in self._changes.values() for _, layer in other.layers}
        for module, layer in change.layers:
            if isinstance(layer, Rebound) and change.name is not None:
                layer.drop(change.name)
            if id(layer) not in kept:
                take_out(module, layer)

    @contextlib.contextmanager
    def paused(self, *, attention: bool = True) -> Iterator[None]:
        """Inside this context the model runs its own code everywhere; its own attention only if asked."""
        standing = {id(module): module for change in self._changes.values() for module, _ in change.layers}
        forwards = [(module, module.__dict__.pop("forward")) for module in standing.values()]
        ours = [config for config in self._configs if attention and runs_ours(config)]
        rename(ours, REPLACED)
        try:
            yield
        finally:
            for module, forward in forwards:
                module.__dict__["forward"] = forward
            rename(ours, NAME)

    def undo(self) -> nn.Module:
        """Give every module its own forward back. The model then computes what it did before, bit for bit."""
        for change in self._changes.values():
            for module, layer in change.layers:
                take_out(module, layer)
        self._changes.clear()
        for module, _ in self._marked.values():
            module.__dict__.pop(MARK, None)
        while self._on_undo:
            self._on_undo.pop()()
        self._marked.clear()
        self.head = None
        # A config that somebody gave another implementation since keeps it.
        rename([config for config in self._configs if runs_ours(config)], REPLACED)
        self._configs.clear()
        if self._call is not None:
            self._call.close()
            self._call = None
        return self.model

    def report(self) -> Report:
        """How often each kept site has run Fuseline's op, how often and why it ran the original, and how many
        steps and compiled calls were not recorded, or were padded."""
        standing: list[tuple[str, str, Layer | StandIn | AttentionMark]] = [
            *((path, kind, change.counter) for (path, kind), change in self._changes.items()),
            *((path, "attention", mark) for path, (_, mark) in self._marked.items()),
        ]
        calls = () if self._call is None else (self._call,)
        eager = [*(call.eager_calls for call in calls), *(step.eager_steps for step in self._steps)]
        lengths = [one.lengths for one in (*calls, *self._steps)]
        return Report(
            tuple(Runs(path, kind, runs.taken, dict(runs.declined)) for path, kind, runs in standing),
            dict(sum(eager, Counter())),
            dict(sum((one.counts for one in lengths), Counter())),
            tuple(sorted({one.reason for one in lengths if one.reason})),
        )

    def training_step(
        self,
        optimizer: torch.optim.Optimizer,
        precision: str = "bf16",
        accumulation: int = 1,
        grad_clip: float = 1.0,
        scheduler: Scheduler | None = None,
        loss: Loss | None = None,
        compiled: bool = True,
        pad: bool = True,
    ) -> TrainingStep:
        """`step = fast.training_step(optimizer)`; `loss = step(batch)` trains one step and returns its loss.

        On a GPU the whole step is recorded as one CUDA graph for each set of shapes; see `TrainingStep` for
        the arguments. To be recorded, the optimizer must be torch's Adam, AdamW, Adamax, RAdam, RMSprop or
        Adadelta, or `fuseline.optim.CompactAdamW`. Its learning rates become tensors; schedulers, and code
        that sets `group["lr"]`, keep working. Sites are proved and timed again on the first batch, in this
        precision. A recorded step is also tried with the model's blocks compiled by `torch.compile` instead
        of with Fuseline's kernels. The fastest form is kept, and `step.choice` has the times. With
        `compiled=False` nothing is compiled. Batches with an `attention_mask` that differ in their length are
        padded to a few recorded lengths, after a proof that loss and gradients stay the same; not with
        `pad=False`.
        """
        step = TrainingStep(
            self.model,
            lambda batch: self._prepared(batch, compiled, loss),
            optimizer,
            precision=precision,
            accumulation=accumulation,
            grad_clip=grad_clip,
            scheduler=scheduler,
            loss=loss,
            pad=pad,
            own_code=self.paused,
        )
        self._steps.add(step)
        return step

    def compiled_call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward without gradients, on a GPU as a CUDA graph recorded for each set of shapes, in
        the fastest form: with Fuseline's kernels, or with the model's blocks compiled. There layers that read
        one tensor are one product: their weights move into one piece of memory, until `undo`. Calls with an
        `attention_mask=` that differ in their length are padded to a few recorded lengths, after a proof that
        the outputs, cut back, stay the same; not if `pad_calls` is False."""
        if self._call is None:
            self._call = CompiledCall(
                self.model,
                lambda: self._compiled_forms(backend=MergedProducts()),
                pad=self.pad_calls,
                own_code=self.paused,
            )
        return self._call(*args, **kwargs)

    def _prepared(self, batch: Any, compiled: bool, loss: Loss | None = None) -> list[Form]:
        """Prove the sites for the batch, and return the forms in which a step can run."""
        self._prepare(batch, loss)
        plain = Form(KERNELS, lambda: deferred(self.head))
        return [plain, *(self._compiled_forms(self.head) if compiled else ())]

    def _compiled_forms(
        self, head: nn.Linear | None = None, backend: MergedProducts | None = None
    ) -> list[Form]:
        """The model with its blocks compiled: unchanged, and with the kept attention. In both, `head` and its
        loss are computed together, unless the whole model is one block. Other kernels are left out: their
        guards differ from block to block, so that every block would be compiled by itself."""
        if self.device.type != "cuda" or self.wanted.dry_run:
            return []
        found = repeated_blocks(self.model)
        blocks = CompiledBlocks(found or [self.model], backend or "inductor")
        self.on_undo([blocks.close, *([] if backend is None else [backend.separate])])

        @contextlib.contextmanager
        def inside(pause: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
            with pause(), blocks.in_place(), deferred(head if found else None):
                yield

        forms = [Form("compiled", lambda: inside(self.paused))]
        if self._marked:
            picked = Form(
                "compiled, Fuseline's attention", lambda: inside(lambda: self.paused(attention=False))
            )
            forms.append(picked)
        return forms

    def _prepare(self, batch: Any, loss: Loss | None) -> None:
        """Prove and time the sites again under the current autocast, as they run inside a recording. If the
        loss is not the model's own, prove and time the head with it, too."""
        recorded = self.device.type == "cuda"
        autocast = torch.is_autocast_enabled(self.device.type)
        if self.wanted.dry_run or not (recorded or autocast or loss is not None):
            return
        with STUDYING, uncompiled(), self.paused():
            wanted = replace(self.wanted, train=True, loss=loss)
            clock = Clock(recorded=recorded)
            found = study(self.model, batch, wanted, clock)
        self.apply(found)
        self.notes = (*self.notes, *(TIMED_EAGERLY.format(*both) for both in clock.unrecorded.items()))
        kept = {(site.path, site.kind) for site in self.kept}
        fresh = {(site.path, site.kind): site for site in found.sites if site.status == KEPT}
        heads = [site for site in found.sites if site.kind == HEAD]
        standing = [site for site in self.sites if not heads or site.kind != HEAD]
        self.sites = (
            *(fresh.pop((s.path, s.kind), s) if s.status != KEPT else s for s in standing),
            *(site for place, site in fresh.items() if place not in kept),
            *heads,
        )
        self.rehearse(batch)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "An Acceleration is not copied or pickled: it holds on to one model. Copy or pickle the model, "
            "whose forwards stay swapped."
        )
