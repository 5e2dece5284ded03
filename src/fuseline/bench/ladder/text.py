"""The real text a ladder trains on: tokens, batches, batches held out, and a sample at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fuseline.bench.ladder.contender import Batch
from fuseline.bench.ladder.learner import TrainingState
from fuseline.bench.ladder.spec import RunSpec
from fuseline.bench.ladder.workload import Sources
from fuseline.data.batches import BatchLoader
from fuseline.data.corpora import load_corpus
from fuseline.data.token_files import TokenDataset, prepare
from fuseline.generation.choice import Sampling
from fuseline.generation.generate import generate
from fuseline.models.gpt import GPT

VALIDATION_BATCHES = 4
PROMPT_TOKENS = 16
SAMPLE_TOKENS = 200
# Tokenizer and size of its vocabulary by preset. Those of GPT-2's shape keep its 50257 rows whatever the
# tokenizer fills of them: what a step costs does not depend on it, and GPT-2's own needs a download.
TOKENIZERS: dict[str, tuple[str, int | None]] = {"tiny": ("bpe", 1000), "shakespeare": ("char", None)}
LARGE = ("bpe", 8192)


@dataclass(frozen=True)
class Text:
    """Tokens of one corpus, on their way to `device`."""

    dataset: TokenDataset
    device: torch.device
    seed: int

    @classmethod
    def prepare(cls, data: str, tokenizer: str | None, preset: str, device: torch.device, seed: int) -> Text:
        """Load and tokenize (cached by content) what `--data` and `--tokenizer` name."""
        kind, vocab_size = TOKENIZERS.get(preset, LARGE)
        if tokenizer is not None and tokenizer != kind:
            kind, vocab_size = tokenizer, LARGE[1] if tokenizer == "bpe" else None
        return cls(prepare(load_corpus(data), kind, vocab_size=vocab_size), device, seed)

    @property
    def vocab_size(self) -> int:
        return self.dataset.vocab_size

    @contextlib.contextmanager
    def open(self) -> Iterator[Sources]:
        """Streams of batches for a ladder, one a shape, closed on leaving."""
        streams: dict[tuple[int, int], BatchLoader] = {}

        def training(batch: int, seqlen: int) -> BatchLoader:
            if (batch, seqlen) not in streams:
                streams[batch, seqlen] = self._loader(self.dataset.train, batch, seqlen)
            return streams[batch, seqlen]

        try:
            yield Sources(training, lambda batch, seqlen: self.held_out(batch, seqlen)[0])
        finally:
            for stream in streams.values():
                stream.close()

    def held_out(self, batch: int, seqlen: int, count: int = 1) -> list[Batch]:
        """The first `count` batches of the validation part."""
        loader = self._loader(self.dataset.validation, batch, seqlen)
        try:
            return [next(loader) for _ in range(count)]
        finally:
            loader.close()

    def _loader(self, tokens: np.ndarray, batch: int, seqlen: int) -> BatchLoader:
        return BatchLoader(tokens, batch_size=batch, block_size=seqlen, seed=self.seed, device=self.device)

    def validation_loss(self, model: GPT, spec: RunSpec) -> float:
        """Mean loss in nats over a few held-out batches."""
        batches = self.held_out(spec.batch, spec.seqlen, VALIDATION_BATCHES)
        with torch.no_grad():
            losses = [model(tokens_BT, targets_BT) for tokens_BT, targets_BT in batches]
        return float(torch.stack(losses).mean())

    def continuation(self, model: GPT) -> str:
        """What the model writes after the beginning of the validation text (that beginning included)."""
        prompt = self.dataset.validation[:PROMPT_TOKENS].astype("int64").tolist()
        room = model.config.block_size - len(prompt)
        sampling = Sampling(temperature=0.8, top_k=min(50, model.config.vocab_size))
        (written,) = generate(
            model, [prompt], min(SAMPLE_TOKENS, room), sampling=sampling, seed=self.seed, graphs=False
        )
        # A model of 50257 rows can name ids that a smaller tokenizer does not have.
        return self.dataset.tokenizer.decode([t for t in (*prompt, *written) if t < self.vocab_size])


def trained_model(base: RunSpec, state: TrainingState, device: torch.device) -> GPT:
    """The ladder's model with the weights it ends with, to be asked things eagerly in fp32."""
    with device:
        model = GPT(base.with_({"attention": "pick"}).config)
    state.fill(model)
    return model.eval()
