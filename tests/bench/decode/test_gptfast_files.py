"""gpt-fast's own files as a contender: the same tokens as ours, and nothing of them left in the process.

A stand-in with their interface and layout is written here; `FUSELINE_GPTFAST=FOLDER` runs the same tests with
a checkout of theirs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config

from fuseline.bench.decode import DecodeBench, run
from fuseline.bench.decode.contenders import contender
from fuseline.bench.decode.gptfast_files import GptFastFiles
from fuseline.cli.main import run as command
from fuseline.errors import InputError
from fuseline.models.gpt import GPT, GPTConfig
from fuseline.models.llama import Llama, preset
from fuseline.quant import quantize

PROMPTS = [[5, 6, 7], [9, 8, 1]]

MODEL = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class ModelArgs:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    dim: int
    intermediate_size: int
    n_local_heads: int
    rope_base: float
    norm_eps: float

def turned(x, angles):
    z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * angles[:, None]).flatten(-2).to(x.dtype)

class Attention(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.heads, self.shared, self.width = a.n_head, a.n_local_heads, a.dim // a.n_head
        self.wqkv = nn.Linear(a.dim, (a.n_head + 2 * a.n_local_heads) * self.width, bias=False)
        self.wo = nn.Linear(a.dim, a.dim, bias=False)
    def forward(self, x, positions, angles):
        B, T, C = x.shape
        cut = [C, self.shared * self.width, self.shared * self.width]
        q, k, v = (y.view(B, T, -1, self.width) for y in self.wqkv(x).split(cut, -1))
        q, k, v = turned(q, angles).transpose(1, 2), turned(k, angles).transpose(1, 2), v.transpose(1, 2)
        self.k[:, :, positions], self.v[:, :, positions] = k, v
        seen = torch.arange(self.k.shape[2])[None] <= positions[:, None]
        more = self.heads // self.shared
        k, v = self.k.repeat_interleave(more, 1), self.v.repeat_interleave(more, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))

class FeedForward(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(a.dim, a.intermediate_size, bias=False) for _ in range(2))
        self.w2 = nn.Linear(a.intermediate_size, a.dim, bias=False)
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

class Block(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.attention, self.feed_forward = Attention(a), FeedForward(a)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(a.dim, a.norm_eps) for _ in range(2))
    def forward(self, x, positions, angles):
        x = x + self.attention(self.attention_norm(x), positions, angles)
        return x + self.feed_forward(self.ffn_norm(x))

class Transformer(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.a = a
        self.tok_embeddings = nn.Embedding(a.vocab_size, a.dim)
        self.layers = nn.ModuleList(Block(a) for _ in range(a.n_layer))
        self.norm = nn.RMSNorm(a.dim, a.norm_eps)
        self.output = nn.Linear(a.dim, a.vocab_size, bias=False)
    def setup_caches(self, max_batch_size, max_seq_length):
        self.max_seq_length = max_seq_length
        a, width = self.a, self.a.dim // self.a.n_head
        for layer in self.layers:
            layer.attention.k, layer.attention.v = (
                torch.zeros(max_batch_size, a.n_local_heads, max_seq_length, width) for _ in range(2)
            )
        slow = a.rope_base ** -(torch.arange(0, width, 2) / width)
        angles = torch.arange(a.block_size)[:, None] * slow
        self.angles = torch.polar(torch.ones_like(angles), angles)
    def forward(self, tokens, positions):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, positions, self.angles[positions])
        return self.output(self.norm(x))
"""

GENERATE = """
import torch
import torch._inductor.config
torch._inductor.config.coordinate_descent_tuning = True
from model import Transformer
from tokenizer import get_tokenizer

def prefill(model, x, positions, temperature):
    return decode_one_token(model, x, positions, temperature)[0]

def decode_one_token(model, x, positions, temperature):
    logits = model(x, positions)[:, -1] / max(temperature, 1e-5)
    return logits.argmax(-1, keepdim=True).int(), logits.softmax(-1)
"""

MASKED = """
def causal_mask(b, h, q, kv):
    return q >= kv

def create_block_mask(seen, batch, heads, q, kv, device):
    return seen(0, 0, torch.arange(q, device=device)[:, None], torch.arange(kv, device=device)[None])

def prefill(model, x, positions, temperature):
    return sampled(model(x, positions))

def sampled(logits):
    return logits[:, -1].argmax(-1, keepdim=True).int()

def decode_one_token(model, x, positions, block_mask, temperature):
    logits = model(x, positions)
    wrong = block_mask[positions].sum() - positions - 1
    return sampled(logits + 1e9 * wrong * torch.arange(logits.shape[-1])), None
"""
"""In the place of what GENERATE has, as later commits have it: the step is given a mask of all positions."""

QUANTIZE = """
import torch
from torch import nn
from torch.nn import functional as F
from tokenizer import get_tokenizer
from model import Transformer

def dynamically_quantize_per_channel(x, low, high, dtype):
    scales = x.abs().amax(1) / 127.5
    return (x / scales[:, None]).round().clamp(low, high).to(dtype), scales, None

class Int8(nn.Module):
    def __init__(self, K, N):
        super().__init__()
        self.register_buffer("weight", torch.empty(N, K, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(N))
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype)) * self.scales

class WeightOnlyInt8QuantHandler:
    def __init__(self, model):
        self.model = model
    def convert_for_runtime(self):
        for module in list(self.model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Int8(child.in_features, child.out_features))
        return self.model

class WeightOnlyInt4QuantHandler(WeightOnlyInt8QuantHandler):
    pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    named = os.environ.get("FUSELINE_GPTFAST")
    return Path(named) if named else stand_in(tmp_path / "gpt-fast", GENERATE)


def stand_in(folder: Path, generate: str) -> Path:
    folder.mkdir()
    for name, text in (("model", MODEL), ("generate", generate), ("quantize", QUANTIZE)):
        (folder / f"{name}.py").write_text(text)
    return folder


def made_model(**changes: Any) -> Llama:
    torch.manual_seed(0)
    model = Llama(replace(preset("llama-tiny"), **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def written(made: Any, count: int = 6) -> list[list[int]]:
    made.begin(PROMPTS)
    rows = [torch.as_tensor(made.advance()).flatten().tolist() for _ in range(count)]
    made.close()
    return rows


# Their prefill calls FlexAttention as it is, which torch advises against.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("format", ["fp32", "int8", "int8 but for one"])
def test_they_write_what_ours_writes(checkout: Path, format: str) -> None:
    model = made_model()
    if format != "fp32":
        quantize(model, "int8", skip="blocks.0.mlp.down" if "one" in format else ())
    expected = written(contender("fuseline", model, batch=2, capacity=32))
    theirs = GptFastFiles(model, checkout, batch=2, capacity=32, backend="eager")
    assert written(theirs) == expected


@pytest.mark.skipif("FUSELINE_GPTFAST" in os.environ, reason="dynamo keeps theirs by the same names")
def test_the_step_is_given_the_mask_that_it_wants(tmp_path: Path) -> None:
    model = made_model()
    masked = stand_in(tmp_path / "masked", GENERATE + MASKED)
    theirs = GptFastFiles(model, masked, batch=2, capacity=32, backend="eager")
    assert written(theirs) == written(contender("fuseline", model, batch=2, capacity=32))


def test_nothing_of_them_is_left_in_the_process(checkout: Path) -> None:
    before = dict(sys.modules), list(sys.path), torch._inductor.config.coordinate_descent_tuning
    theirs = GptFastFiles(made_model(), checkout, batch=1, capacity=32, backend="eager")
    assert (sys.path, torch._inductor.config.coordinate_descent_tuning) == before[1:]
    theirs.close()
    for name in ("model", "generate", "quantize", "tokenizer"):
        assert sys.modules.get(name) is before[0].get(name)


def test_what_they_cannot_decode_is_refused(checkout: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch": 1, "capacity": 32}
    with pytest.raises(InputError, match="no biases"):
        GptFastFiles(made_model(qkv_bias=True), checkout, **options)
    with pytest.raises(InputError, match="they decode Llamas"):
        GptFastFiles(GPT(GPTConfig(32, 100, 1, 2, 32)), checkout, **options)
    with pytest.raises(InputError, match="by --gptfast"):
        contender("gptfast-files", made_model(), **options)
    (tmp_path / "model.py").write_text("")
    with pytest.raises(InputError, match=r"generate\.py, quantize\.py missing"):
        GptFastFiles(made_model(), tmp_path, **options)
    for name in ("generate", "quantize"):
        (tmp_path / f"{name}.py").write_text("")
    with pytest.raises(InputError, match=r"not gpt-fast's files as they are known here \(commit c9f683e"):
        GptFastFiles(made_model(), tmp_path, **options)


def test_a_bench_without_a_checkout_says_what_to_name(tmp_path: Path) -> None:
    bench = DecodeBench(
        *(torch.device("cpu"), "llama-tiny"), batches=(1,), positions=(20,), capacity=32, formats=("fp32",),
        peers=("gptfast-files",), steps=1, runs=1,
    )  # fmt: skip
    (record,) = run(bench, tmp_path, lambda *_: None)
    assert record.metric == "skipped"
    assert record.case["reason"] == "name the folder of a checkout of gpt-fast by --gptfast"
    assert command(["bench", "decode", "--gptfast", str(tmp_path), "--dry-run"]) == 0
