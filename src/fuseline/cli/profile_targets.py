"""What `fuseline profile` profiles, made ready: a step as a function, and what is known of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fuseline.acceleration.fp8 import Fp8Layers
from fuseline.acceleration.precision import autocast, check_precision, compute_dtype, matmul_format
from fuseline.cli import profile_models
from fuseline.cli.profile_asked import Asked
from fuseline.errors import InputError, unknown_name
from fuseline.generation.decoder import Decoder
from fuseline.models import gpt_config, llama_config
from fuseline.models.gpt import GPT
from fuseline.models.llama import Llama
from fuseline.profiling import user_code
from fuseline.records.record import Scalar
from fuseline.training import text_generator
from fuseline.training.execution import compile_forward, find_execution
from fuseline.training.optimizer import make_optimizer
from fuseline.training.step import TrainStep

# Batch and sequence length of a training step where none is given; the GPTs' are those of the ladder.
SHAPES = {
    "tiny": (8, 128),
    "shakespeare": (64, 256),
    "gpt2": (16, 1024),
    "gpt2-medium": (8, 1024),
    "gpt2-large": (4, 1024),
    "gpt2-xl": (2, 1024),
    "llama-tiny": (4, 128),
    "llama-160m": (8, 1024),
    "llama3.2-1b": (4, 2048),
}
LARGE = (1, 1024)
PROMPT = 256  # tokens in the cache before a decoded one, where no length is given
ROOM = 256  # positions that decoding goes on through before it begins anew
TWINS = {
    "graph": "eager",
    "inductor-graph": "inductor",
    "reduce-overhead": "inductor",
    "max-autotune": "max-autotune-no-cudagraphs",
    "cudagraphs": "eager",
}
"""The execution that launches kernel by kernel what the other replays."""
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Ready:
    """`step` to profile; `unrecorded` the same launched kernel by kernel, where `step` replays a graph;
    `eager` whether modules run in that which launches kernels; `precision` for what is fp32 in it; after
    the first step `decided` says which linear layers compute in fp8, if that was asked for."""

    step: Callable[[], object]
    case: dict[str, Scalar]
    device: torch.device
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    unrecorded: Callable[[], object] | None = None
    precision: str = "fp32"
    eager: bool = True
    close: Callable[[], None] = field(default=lambda: None)
    decided: Callable[[], list[str]] = field(default=list)


def case_of(asked: Asked) -> dict[str, Scalar]:
    """What would run, under the records' names. Raises `InputError` for what there is not."""
    _check(asked)
    case: dict[str, Scalar] = {
        "task": asked.task,
        "dtype": asked.precision,
        "execution": asked.execution,
    }
    if _is_user_code(asked.target):
        return {"model": asked.target, **case}
    if (other := profile_models.find(asked)) is not None:
        return {**other.case, **case}
    config = _config(asked)
    batch, seqlen = _shape(asked, config)
    llama = isinstance(config, llama_config.LlamaConfig)
    named = "checkpoint" if Path(asked.target).exists() else "preset"
    case = {"model": "llama" if llama else "gpt", named: asked.target, **case}
    case |= {"batch": batch, "seqlen_q": 1 if asked.task == "decode" else seqlen, "kernels": asked.kernels}
    if asked.task == "decode":
        case["position"] = seqlen
    if not llama:
        case |= {"backend": asked.attention}
        if asked.task == "train":
            case |= {"loss": asked.loss, "dropout": config.dropout, "vocab": config.padded_vocab_size}
    return case


def ready(asked: Asked) -> Ready:
    """Build what is asked for. Raises `InputError` for what there is not or what cannot be done here."""
    case = case_of(asked)
    if _is_user_code(asked.target):
        work = user_code.load(asked.target).to(asked.device)
        return _trained(asked, case, work) if asked.task == "train" else _forward(asked, case, work)
    torch.manual_seed(asked.seed)
    if (other := profile_models.find(asked)) is not None:
        work = other.make().to(asked.device)
        if asked.task == "train":
            return _trained(asked, case, work)
        return _forward(asked, case, replace(work, tensors=work.tensors[:-1]))
    config = _config(asked)
    batch, seqlen = _shape(asked, config)
    if asked.task == "decode":
        return _decoded(asked, case, batch, seqlen)
    model = _model(asked, config)
    generator = torch.Generator().manual_seed(asked.seed)
    tokens = torch.randint(config.vocab_size, (batch, seqlen + 1), generator=generator).to(asked.device)
    if asked.task == "forward":
        return _forward(asked, case, user_code.Work(model, (tokens[:, :-1].contiguous(),), alone=True))
    pair = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return _trained(asked, case, user_code.Work(model, pair))


def _check(asked: Asked) -> None:
    check_precision(asked.precision, asked.device, train=asked.task == "train")
    find_execution(asked.execution, asked.device)
    if asked.task == "decode" and asked.execution not in ("eager", "graph"):
        raise InputError(f"--execution {asked.execution}: decoding runs eager, or as a graph on a GPU.")
    if asked.task == "forward" and asked.execution == "inductor-graph":
        raise InputError(
            "--execution inductor-graph is a training step's; of a forward pass take reduce-overhead."
        )
    for name, value in (("batch-size", asked.batch), ("seqlen", asked.seqlen)):
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}: it must be 1 or more.")
    if asked.kernels not in gpt_config.NORMS:
        raise unknown_name("kind of --kernels", asked.kernels, gpt_config.NORMS)
    if _is_user_code(asked.target):
        if asked.task == "decode":
            raise InputError("--decode profiles GPTs and Llamas of Fuseline: name a preset or a checkpoint.")
        if asked.batch is not None or asked.seqlen is not None:
            raise InputError(
                "--batch-size and --seqlen are for presets; the function that makes the batch decides."
            )


def _is_user_code(target: str) -> bool:
    return ":" in target and not Path(target).exists()


def _config(asked: Asked) -> Any:
    """The shape of a preset or of a checkpoint, with the kernels that are asked for."""
    path = Path(asked.target)
    if asked.target in gpt_config.PRESETS or asked.target in llama_config.PRESETS:
        config = text_generator.config_of(None, asked.target)
    elif path.exists():
        config = text_generator.config_of(path, None)
    else:
        known = [*gpt_config.PRESETS, *llama_config.PRESETS, *profile_models.NAMES]
        raise InputError(
            f"{unknown_name('preset or checkpoint', asked.target, known)} A function of your own is named "
            "MODULE:FUNCTION."
        )
    if config is None:
        raise InputError(f"{path} does not say what model it holds. Name a folder of `fuseline train gpt`.")
    if isinstance(config, gpt_config.GPTConfig):
        changes: dict[str, Any] = {"norm": asked.kernels, "attention": asked.attention, "loss": asked.loss}
        if asked.target in gpt_config.PRESETS:
            changes["vocab_multiple"] = asked.vocab_multiple
        changes |= {k: v for k, v in (("dropout", asked.dropout), ("bias", asked.bias)) if v is not None}
        return replace(config, **changes)
    return replace(config, kernels=asked.kernels)


def _shape(asked: Asked, config: Any) -> tuple[int, int]:
    if asked.task == "decode":
        usual = (1, min(PROMPT, config.block_size // 2))
    else:
        usual = SHAPES.get(asked.target, (LARGE[0], min(LARGE[1], config.block_size)))
    batch, seqlen = asked.batch or usual[0], asked.seqlen or usual[1]
    longest = config.block_size - 1 if asked.task == "decode" else config.block_size
    if seqlen > longest:
        raise InputError(f"--seqlen {seqlen}: this model's context is {config.block_size} positions.")
    return batch, seqlen


def _model(asked: Asked, config: Any) -> nn.Module:
    with asked.device:
        model = Llama(config) if isinstance(config, llama_config.LlamaConfig) else GPT(config)
    path = Path(asked.target)
    if path.exists():
        wanted = text_generator.Wanted(1, 1, 1)
        loaded = text_generator.load(path, None, device=asked.device, dtype=torch.float32, wanted=wanted)
        model.load_state_dict(loaded.model.state_dict(), strict=False)
    return model.train()


def _trained(asked: Asked, case: dict[str, Scalar], work: user_code.Work) -> Ready:
    model = work.model.train()
    captured = find_execution(asked.execution, asked.device).whole_step
    optimizer = make_optimizer(model, lr=LEARNING_RATE, fused=True, capturable=captured)

    def made(execution: str, fp8: Fp8Layers | None = None) -> TrainStep:
        return TrainStep(
            model,
            optimizer,
            loss=lambda module, tensors: work.loss(module, tensors),
            precision=asked.precision,
            execution=execution,
            fp8=fp8,
            kernels=asked.kernels == "fuseline" and not _is_user_code(asked.target),
        )

    step = made(asked.execution)
    twin = made(TWINS[asked.execution], step.fp8) if asked.execution in TWINS else None
    return Ready(
        lambda: step(work.tensors),
        case,
        asked.device,
        model,
        optimizer,
        None if twin is None else lambda: twin(work.tensors),
        asked.precision,
        _runs_modules(asked.execution),
        step.close,
        list if step.fp8 is None else step.fp8.summary,
    )


def _forward(asked: Asked, case: dict[str, Scalar], work: user_code.Work) -> Ready:
    model = work.model.eval()

    def plain(*tensors: torch.Tensor) -> Any:
        return work.output(model, tensors)

    how = find_execution(asked.execution, asked.device)
    call: Callable[..., Any] = plain if how.backend is None else compile_forward(plain, how.backend, how.mode)

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        with torch.no_grad(), matmul_format(asked.precision), autocast(asked.precision, asked.device):
            yield

    def run(call: Callable[..., Any]) -> None:
        with inside():
            if how.trees:
                torch.compiler.cudagraph_mark_step_begin()
            call(*work.tensors)

    graph = _captured(lambda: run(plain), asked.device) if how.whole_step else None
    twin: Callable[[], object] | None = None
    if asked.execution in TWINS:
        under = find_execution(TWINS[asked.execution], asked.device)
        launched = plain if under.backend is None else compile_forward(plain, under.backend, under.mode)
        twin = lambda: run(launched)  # noqa: E731
    step = graph.replay if graph is not None else lambda: run(call)
    return Ready(step, case, asked.device, model, None, twin, asked.precision, _runs_modules(asked.execution))


def _runs_modules(execution: str) -> bool:
    """Whether modules run one by one in the step that is recorded in detail. In compiled code they do not,
    and a hook on one would have it compiled again."""
    return TWINS.get(execution, execution) == "eager"


def _captured(work: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def _decoded(asked: Asked, case: dict[str, Scalar], batch: int, position: int) -> Ready:
    """One token for every row, after `position` of them."""
    config = _config(asked)
    path = Path(asked.target) if Path(asked.target).exists() else None
    capacity = min(position + ROOM, config.block_size)
    wanted = text_generator.Wanted(batch, position, capacity)
    dtype = compute_dtype(asked.precision)
    preset = None if path is not None else asked.target
    loaded = text_generator.load(
        path, preset, device=asked.device, dtype=dtype, wanted=wanted, seed=asked.seed
    )
    model = loaded.model
    generator = torch.Generator().manual_seed(asked.seed)
    prompts = torch.randint(config.vocab_size, (batch, position), generator=generator).tolist()

    def made(graphs: bool) -> Callable[[], object]:
        decoder = Decoder(model, batch=batch, capacity=capacity, graphs=graphs)
        decoder.begin(prompts)

        def step() -> None:
            if decoder.longest >= capacity:
                # The cache is full: go on from where it began, which costs a fill of the lengths.
                decoder.settle(position)
                decoder.cache.lengths_B.fill_(position)
            with matmul_format(asked.precision):
                decoder.advance()

        return step

    graphs = asked.execution == "graph"
    assert isinstance(model, nn.Module)
    return Ready(
        made(graphs), case, asked.device, model, None, made(False) if graphs else None, asked.precision
    )
