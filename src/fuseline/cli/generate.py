"""Continue prompts with a language model: a Hugging Face folder (GPT-2, Llama, Mistral, Qwen), a checkpoint
of `fuseline train gpt` or nanoGPT, or a preset's shape with random weights. Prints tokens as they come, and
then the speed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuseline.cli.options import Seeded, check_folder, check_text, resolve_device
from fuseline.cli.precisions import checked
from fuseline.errors import InputError, unknown_name

if TYPE_CHECKING:
    from fuseline.generation.choice import Sampling
    from fuseline.training.text_generator import TextGenerator, Vocabulary, Wanted

FEW_BITS = ("ternary", "int3", "fp4", "nf4", "mxfp4", "int5", "fp6_e2m3", "fp6_e3m2")
"""Those of `fuseline.ops.quant_codes`, named here so that the help needs no torch."""
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
QUANTS = ("none", "int8", "int4", "fp8", "w8a8", *FEW_BITS)
METHODS = ("nearest", "fitted", "hqq")
"""Those of `fuseline.quantize` that need no data."""


@dataclass(frozen=True)
class Options(Seeded):
    model: Path | None = None
    """Folder or .safetensors file in Hugging Face's format."""
    checkpoint: Path | None = None
    """Folder of a run of `fuseline train gpt`, its best.pt or latest.pt, or nanoGPT's ckpt.pt."""
    preset: str | None = None
    """A model with random weights: gpt2, llama2-7b, .. Prompts are read as bytes, tokens are printed as
    numbers."""
    tokenizer: Path | None = None
    """The tokenizer.json to use (default: the one beside the weights)."""
    prompt: tuple[str, ...] = ()
    """Texts to continue; several share a batch."""
    prompt_ids: str | None = None
    """Token ids to continue, separated by commas."""
    batch_size: int = 1
    """How many times to continue each prompt."""
    max_new_tokens: int = 128
    """The most tokens to write; fewer if the model's context is full earlier."""
    temperature: float | None = None
    """0 takes the most likely token; above 0, tokens are drawn. Default: 1 with --top-k, --top-p or --min-p,
    else 0."""
    top_k: int | None = None
    """Draw from the k most likely tokens."""
    top_p: float | None = None
    """Draw from the smallest set of tokens whose probabilities add up to this."""
    min_p: float | None = None
    """Draw from tokens with at least this share of the probability of the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that have occurred before become less likely."""
    stop: tuple[str, ...] = ()
    """Texts that end a continuation (they are not printed)."""
    precision: str = "auto"
    """fp32, bf16, fp16; auto: bf16 on a GPU, fp32 on a CPU."""
    quant: str = "none"
    """Format of the linear layers: none, int8, int4 (with an int8 head), fp8. w8a8 also has int8
    activations. ternary, int3, fp4, nf4, mxfp4, int5, fp6_e2m3 and fp6_e3m2 save memory and cost time."""
    group_size: int = 128
    """int4: how many weights share a scale: 32, 64 or 128."""
    method: str = "nearest"
    """How weights are rounded: nearest, fitted (least squares) or hqq. fp8 takes only nearest; fp4, fp6, nf4
    and mxfp4 take nearest and fitted."""
    save: Path | None = None
    """Folder to write the quantized model to; later, --model FOLDER reads it."""
    cache: str = "model"
    """How keys and values are kept: model (in the model's dtype), int8 or fp8."""
    draft: str | None = None
    """A smaller model that drafts tokens: a folder, a checkpoint, or a preset."""
    draft_tokens: int = 4
    """Tokens drafted at a time."""


def run(options: Options) -> int:
    import torch

    from fuseline.generation.generate import check_prompts, check_room, steps
    from fuseline.generation.speculation import check_draft
    from fuseline.generation.stopping import TextStream
    from fuseline.training import text_generator

    _check(options)
    check_text("--stop", options.stop)
    device = torch.device(resolve_device(options.device))
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    usual = "bf16" if device.type == "cuda" else "fp32"
    dtype = dtypes[usual if options.precision == "auto" else options.precision]
    path = options.model or options.checkpoint
    # Prompts are checked before a model is loaded that may take minutes.
    vocabulary = _vocabulary(options, path)
    sampling = _sampling(options)
    prompts = _prompts(options, vocabulary)
    longest = max(map(len, prompts))
    config = text_generator.config_of(path, options.preset)
    place = None if options.draft is None else _place(options.draft)
    draft_config = None if place is None else text_generator.config_of(*place)
    new_tokens = _fitting(options, longest, [c.block_size for c in (config, draft_config) if c is not None])
    capacity = longest + new_tokens
    if config is not None:
        check_prompts(prompts, new_tokens, config.block_size, config.vocab_size)
    batch = len(prompts) * options.batch_size
    wanted = text_generator.Wanted(batch, longest, capacity, options.cache)
    draft = None
    if place is not None:
        if config is not None and draft_config is not None:
            ahead = options.draft_tokens
            check_draft(config, draft_config, capacity=capacity, ahead=ahead, sampling=sampling)
        draft = text_generator.memory(*place, dtype=dtype, wanted=wanted)
    if options.dry_run:
        name = options.preset or path
        print(f"{name} on {device} would write {new_tokens} tokens after {batch} prompt(s).")
        return 0
    if options.save is not None:
        check_folder(options.save, "--save")
    generator = text_generator.load(
        path,
        options.preset,
        device=device,
        dtype=dtype,
        wanted=wanted,
        quant=None if options.quant == "none" else options.quant,
        group_size=options.group_size,
        method=options.method,
        vocabulary=vocabulary,
        seed=options.seed,
        timed=options.save is None,
        draft=draft,
        progress=lambda now: print(f"fuseline: {now} ...", file=sys.stderr),
    )
    # Only now, after the check that there is memory for so many.
    prompts = [ids for ids in prompts for _ in range(options.batch_size)]
    check_room(generator.model, prompts, new_tokens)
    if options.save is not None:
        tokenizer = _tokenizer_file(options, path)
        print(f"fuseline: wrote {text_generator.save(generator, options.save, tokenizer)}", file=sys.stderr)
    source = _source(options, generator, wanted, sampling, device, dtype)
    rows = [TextStream(generator.vocabulary.decode, options.stop) for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    live = len(prompts) == 1 and not options.json
    if live and options.prompt:
        apart = " " if isinstance(generator.vocabulary, text_generator.Numbers) else ""
        sys.stdout.write(options.prompt[0] + apart)
    begin = first = time.perf_counter()
    taken = 0
    for step in steps(source, prompts, new_tokens):
        taken += 1
        if taken == 1:
            first = time.perf_counter()
        for row, new in enumerate(step):
            if rows[row].ended:
                continue
            kept = [token for token in new if token not in generator.stop_ids]
            text = rows[row].add(kept)
            tokens[row] += kept
            rows[row].ended |= len(kept) < len(new)
            if live:
                sys.stdout.write(text)
                sys.stdout.flush()
        if all(row.ended for row in rows):
            break
    end = time.perf_counter()
    tails = [row.close() for row in rows]
    figures = _figures(generator, device, tokens, taken, first - begin, end - first)
    if options.json:
        texts = [row.text for row in rows]
        print(
            json.dumps({"prompts": prompts, "tokens": tokens, "texts": texts, **figures}, ensure_ascii=False)
        )
        return 0
    if live:
        print(tails[0])
    else:
        for number, stream in enumerate(rows, 1):
            print(f"--- {number}\n{stream.text}")
    print(_summary(figures), file=sys.stderr)
    return 0


def _check(options: Options) -> None:
    from fuseline.generation.static_cache import STORAGES
    from fuseline.quant.formats import GROUP_SIZES
    from fuseline.quant.methods import methods_of

    named = [name for name in ("model", "checkpoint", "preset") if getattr(options, name) is not None]
    if len(named) != 1:
        raise InputError(
            "Name one model: --model DIR (Hugging Face), --checkpoint FILE (fuseline or nanoGPT) or --preset "
            f"NAME (random weights); {', '.join(named) or 'none'} given."
        )
    checked(options.precision, PRECISIONS)
    if options.quant not in QUANTS:
        raise unknown_name("format of weights", options.quant, QUANTS)
    if options.quant == "int4" and options.group_size not in GROUP_SIZES:
        raise InputError(f"--group-size is {options.group_size}; groups of int4 are 32, 64 or 128 columns.")
    if options.method == "gptq":
        raise InputError(
            "--method gptq rounds weights for the inputs they will meet, and there are none here: take "
            "--method hqq, which needs none, or fuseline.quantize in Python, which takes batches of them."
        )
    if options.method not in METHODS:
        raise unknown_name("method", options.method, METHODS)
    having = [name for name in QUANTS if options.method in methods_of(name)]
    if options.method not in methods_of(options.quant):
        raise InputError(
            "--method rounds quantized weights: name a format with --quant int8 or int4."
            if options.quant == "none"
            else f"--method {options.method} goes with --quant {', '.join(having)}; {options.quant} has "
            f"{' and '.join(methods_of(options.quant))}."
        )
    if options.cache not in STORAGES:
        raise unknown_name("cache storage", options.cache, STORAGES)
    if options.draft_tokens < 1:
        raise InputError(f"--draft-tokens is {options.draft_tokens}; a draft has a token or more.")
    if options.save is not None and options.quant == "none":
        raise InputError("--save writes quantized models: name a format with --quant int8, int4 or fp8.")
    if options.batch_size < 1 or options.max_new_tokens < 1:
        raise InputError(
            f"--batch-size is {options.batch_size} and --max-new-tokens {options.max_new_tokens}; "
            "each is 1 or more."
        )


def _fitting(options: Options, longest: int, contexts: Sequence[int]) -> int:
    """The new tokens that fit beside the longest prompt in all `contexts`, and a word about it if they are
    fewer than asked. A draft needs room for the tokens that it is ahead."""
    if not contexts:
        return options.max_new_tokens
    context = min(contexts)
    room = context - longest - (0 if options.draft is None else options.draft_tokens + 1)
    if room < 1:
        raise InputError(
            f"The longest prompt has {longest} tokens, and the model's context is {context}: that leaves no "
            "room for new ones. Shorten the prompt."
        )
    if room < options.max_new_tokens:
        print(
            f"fuseline: writing {room} new tokens, not {options.max_new_tokens}: the model's context is "
            f"{context} tokens, and the longest prompt has {longest}.",
            file=sys.stderr,
        )
    return min(room, options.max_new_tokens)


def _vocabulary(options: Options, path: Path | None) -> Vocabulary:
    from fuseline.training.text_generator import Numbers, vocabulary_of

    if options.tokenizer is None and options.prompt_ids is not None:
        return Numbers()
    return vocabulary_of(path if options.tokenizer is None else options.tokenizer)


def _tokenizer_file(options: Options, path: Path | None) -> Path | None:
    from fuseline.training.text_generator import TOKENIZER

    if options.tokenizer is not None:
        return options.tokenizer / TOKENIZER if options.tokenizer.is_dir() else options.tokenizer
    if path is None:
        return None
    beside = (path if path.is_dir() else path.parent) / TOKENIZER
    return beside if beside.exists() else None


def _prompts(options: Options, vocabulary: Vocabulary) -> list[list[int]]:
    if options.prompt_ids is not None:
        if options.prompt:
            raise InputError("Give --prompt or --prompt-ids, not both.")
        try:
            return [[int(word) for word in options.prompt_ids.split(",") if word.strip()]]
        except ValueError as error:
            raise InputError(f"--prompt-ids are numbers separated by commas: {error}.") from error
    if not options.prompt:
        raise InputError('There is no prompt. Give --prompt "Once upon a time", or --prompt-ids 1,2,3.')
    check_text("--prompt", options.prompt)
    return [vocabulary.encode(text) for text in options.prompt]


def _sampling(options: Options) -> Sampling:
    from fuseline.generation.choice import Sampling

    filtered = any(one is not None for one in (options.top_k, options.top_p, options.min_p))
    temperature = options.temperature if options.temperature is not None else float(filtered)
    try:
        return Sampling(temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty)
    except InputError as error:  # it begins with the field's name, which is the option's
        field, _, said = str(error).partition(" ")
        for name in ("top_k", "top_p", "min_p"):
            said = said.replace(name, f"--{name.replace('_', '-')}")
        raise InputError(f"--{field.replace('_', '-')} {said}") from None


def _place(model: str) -> tuple[Path | None, str | None]:
    """A folder or file, or else the name of a preset."""
    path = Path(model)
    return (path, None) if path.exists() else (None, model)


def _source(
    options: Options,
    generator: TextGenerator,
    wanted: Wanted,
    sampling: Sampling,
    device: Any,
    dtype: Any,
) -> Any:
    """What writes, with its steps recorded already."""
    from fuseline.generation.decoder import Decoder
    from fuseline.generation.speculation import Speculator
    from fuseline.training import text_generator

    chosen: dict[str, Any] = {
        "batch": wanted.batch,
        "capacity": wanted.capacity,
        "sampling": sampling,
        "seed": options.seed,
        "storage": options.cache,
    }
    if options.draft is None:
        decoder = Decoder(generator.model, **chosen)
        decoder.prepare(wanted.prompt + 1, wanted.capacity)
        return decoder
    draft = text_generator.load(
        *_place(options.draft),
        device=device,
        dtype=dtype,
        wanted=wanted,
        vocabulary=generator.vocabulary,
        seed=options.seed,
    )
    return Speculator(generator.model, draft.model, **chosen, ahead=options.draft_tokens)


def _figures(
    generator: TextGenerator,
    device: Any,
    tokens: Sequence[Sequence[int]],
    taken: int,
    first_s: float,
    rest_s: float,
) -> dict[str, float | int | None]:
    """How fast: the first token apart, which reads the prompt."""
    from fuseline.timing import copy_bandwidth_gbs, peak_memory_gib

    later = sum(map(len, tokens)) - len(tokens)
    read_gbs = generator.weight_bytes * (taken - 1) / max(rest_s, 1e-9) / 1e9
    return {
        "new_tokens": sum(map(len, tokens)),
        "ttft_ms": first_s * 1e3,
        "tokens_per_s": max(0, later) / max(rest_s, 1e-9),
        "steps": taken,
        "weight_gib": generator.weight_bytes / 2**30,
        "bandwidth_gbs": read_gbs,
        "share_of_copy": read_gbs / copy_bandwidth_gbs(device),
        "peak_memory_gib": peak_memory_gib(device),
    }


def _bytes(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"


def _summary(figures: dict[str, Any]) -> str:
    memory = figures["peak_memory_gib"]
    return (
        f"{figures['new_tokens']} tokens in {figures['steps']} steps: first after "
        f"{figures['ttft_ms']:.1f} ms, "
        f"then {figures['tokens_per_s']:.1f} tokens/s. Weights {_bytes(figures['weight_gib'])} read at "
        f"{figures['bandwidth_gbs']:.3g} GB/s, {figures['share_of_copy']:.2f} of the copy bandwidth."
        + ("" if memory is None else f" Memory {memory:.2f} GiB.")
    )
