"""`fuseline <verb> ...`: find the verb, parse its options, run its workflow, turn errors into messages.

A verb is a module with a dataclass `Options` and `run(options) -> int`. It is imported when it is asked for,
so that `fuseline --help` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import os
import sys
from typing import NoReturn

from fuseline.cli.waiting import spin_briefly
from fuseline.errors import InputError, unknown_name
from fuseline.version import __version__

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Make a model faster": {
        "accelerate": (
            "fuseline.cli.accelerate",
            "say what Fuseline's ops gain in a model of yours: found, proved and timed",
        ),
        "ladder": (
            "fuseline.cli.ladder",
            "add one optimization after the other to a training step, and show what each is worth",
        ),
        "profile": (
            "fuseline.cli.profile",
            "show where a step's time goes: kinds of work, kernels against their floors, gaps, memory",
        ),
    },
    "Train and generate": {
        "train gpt": ("fuseline.cli.train_gpt", "train a GPT on text"),
        "train translate": (
            "fuseline.cli.train_translate",
            "train a translation model and measure its BLEU",
        ),
        "generate": ("fuseline.cli.generate", "continue prompts with a language model, also quantized"),
        "translate": ("fuseline.cli.translate", "translate sentences with a trained model"),
    },
    "This machine": {
        "doctor": ("fuseline.cli.doctor", "say what this machine has, what is missing, and what helps"),
        "build": ("fuseline.cli.build", "compile the native libraries ahead of time"),
        "tune": ("fuseline.cli.tune", "measure the attention kernels on your shapes, and keep the times"),
    },
    "Look inside": {
        "explain": ("fuseline.cli.explain", "say which kernel computes a shape, and why, on any GPU"),
        "explain compile": (
            "fuseline.cli.explain_compile",
            "show what torch.compile does to a small model: graphs, guards, generated code",
        ),
        "inspect": (
            "fuseline.cli.inspect",
            "show registers, memory and occupancy of the compiled CUDA kernels; SASS, PTX",
        ),
    },
    "Measure against others": {
        "bench acceleration": (
            "fuseline.cli.bench_acceleration",
            "models that people use: eager, torch.compile, Liger and fuseline.accelerate",
        ),
        "bench step": (
            "fuseline.cli.bench_step",
            "whole training steps of a GPT or a Llama: ours against compiled nanoGPT",
        ),
        "bench ops": ("fuseline.cli.bench_ops", "Fuseline's ops against their peers: bandwidth and error"),
        "bench attention": (
            "fuseline.cli.bench_attention",
            "attention by every kernel, and by the one that the picker takes",
        ),
        "bench linear": (
            "fuseline.cli.bench_linear",
            "linear layers for few rows, in int8, int4 and bf16, against cuBLAS, inductor and tinygemm",
        ),
        "bench decode": (
            "fuseline.cli.bench_decode",
            "tokens a second: ours, compiled as gpt-fast does it, eager, transformers",
        ),
        "bench quality": (
            "fuseline.cli.bench_quality",
            "the perplexity that each format of quantized weights costs a trained model",
        ),
        "bench translation": (
            "fuseline.cli.bench_translation",
            "a translation model with and without fused kernels: loss curves, epoch time, BLEU",
        ),
        "bench compile": (
            "fuseline.cli.bench_compile",
            "the backends of torch.compile on five models, without Fuseline's kernels",
        ),
        "bench hardware": (
            "fuseline.cli.bench_hardware",
            "the ceilings of this machine, and how near to them the ops come",
        ),
        "report": ("fuseline.cli.report", "draw records as one HTML page and PNG files"),
    },
}
VERBS = {verb: entry for verbs in GROUPS.values() for verb, entry in verbs.items()}

EXIT_INPUT = 2
EXIT_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> NoReturn:
    spin_briefly()
    code = run(sys.argv[1:] if arguments is None else arguments)
    if code == EXIT_INTERRUPTED:
        _leave_at_once(code)
    sys.exit(code)


def _leave_at_once(code: int) -> NoReturn:
    """End the process without waiting for its threads, in which native code may compute for many seconds."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"fuseline {__version__}")
        return 0
    try:
        verb, rest = _split(arguments)
        module = importlib.import_module(VERBS[verb][0])
        import tyro

        from fuseline.cli.help import described, flowing
        from fuseline.cli.options import Recorded, Seeded, check_folder
        from fuseline.cli.renamed import check_renamed
        from fuseline.training.schema import check_seed

        check_renamed(verb, rest, [field.name for field in dataclasses.fields(module.Options)])
        options = tyro.cli(
            described(module.Options),
            prog=f"fuseline {verb}",
            args=rest,
            description=flowing(module.__doc__ or ""),
        )
        if isinstance(options, Seeded):
            check_seed(options.seed)
        if isinstance(options, Recorded) and options.out is not None and not options.dry_run:
            check_folder(options.out, "--out")
        return int(module.run(options))
    except InputError as error:
        _complain(str(error))
        return EXIT_INPUT
    except KeyboardInterrupt as interrupt:
        _complain(str(interrupt) or "Interrupted.")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`| head`): not our error, and nothing is left to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno is None:  # not the system's: a mistake of ours
            raise
        _complain(_of_the_system(error))
        return EXIT_INPUT
    except MemoryError:
        _complain("This machine's memory is not enough for that.")
        return EXIT_INPUT


def _of_the_system(error: OSError) -> str:
    """What the system refused (a full disk, a folder that may not be read), and where, in a line."""
    place = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
    mend = " Free some space, or name another disk." if error.errno == errno.ENOSPC else ""
    return f"{place}{error.strerror}.{mend}"


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The verb, of one word or two, and what follows it."""
    for words in (2, 1):
        verb = " ".join(arguments[:words])
        if verb in VERBS:
            return verb, arguments[words:]
    seconds = [v.split()[1] for v in VERBS if v.startswith(f"{arguments[0]} ")]
    if seconds:
        if len(arguments) > 1 and not arguments[1].startswith("-"):
            raise unknown_name(f"{arguments[0]} verb", arguments[1], seconds)
        raise InputError(f"`fuseline {arguments[0]}` needs a second word: {', '.join(seconds)}.")
    raise unknown_name("verb", arguments[0], VERBS)


def _overview() -> str:
    width = max(map(len, VERBS)) + 2
    lines = []
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {verb:<{width}}{summary}" for verb, (_, summary) in verbs.items())]
    return "\n".join(
        [
            f"fuseline {__version__}: make a PyTorch transformer fast, and prove it.",
            "",
            "usage: fuseline VERB [options]",
            *lines,
            "",
            "New here? `fuseline doctor` checks this machine, and `fuseline ladder` shows what each",
            "optimization gives on it. `fuseline VERB --help` lists a verb's options.",
        ]
    )


def _complain(message: str) -> None:
    """Print the message in one line. If an error quotes names from a file, their line breaks and control
    characters do not reach the terminal."""
    said = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    print(f"fuseline: {said}", file=sys.stderr)
