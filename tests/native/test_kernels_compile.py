"""Every kernel compiles, and none but the three named here puts registers aside. Every third source is
compiled for Hopper; in the full check (`make test-full`) all are, for every architecture we ship.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from fuseline.native.compilers import find_nvcc

KERNELS = Path(__file__).parents[2] / "src" / "fuseline" / "csrc" / "kernels"
ARCHITECTURES = ("sm_80", "sm_90")
SAMPLED = 3
# The C API's own code, with no kernel in it.
HOST_ONLY = (
    "attention_forward.cu",
    "errors.cu",
    "norms.cu",
    "quant_linear.cu",
    "tuning.cu",
)
FUNCTION = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
# Kernels that put registers aside: what sets apart the name that ptxas gives them, and the most
# bytes of a thread. One block fewer on a multiprocessor would leave registers enough.
SPARED = {
    # With a mask and heads of 64, at the registers of three blocks: what keys are copied by is put aside.
    r"attention_backward_rows_panelsI\w+?Li64ELb0E": 60,
    # At the 64 registers of two blocks of 512: a sum over rows, and what is read once.
    r"fp8_rows\w*GeluGradient": 20,
    # Heads of 128 in fp16 on an A100, for which nothing was laid out.
    r"short_backwardI6__halfLi128ELi32ELb1ELb0E\w+ for sm_80": 8,
}
FRAME_OF_8 = "8 bytes stack frame"
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def spills(report: str) -> list[str]:
    """The kernels that `ptxas -v` reports a frame or a spill for, of more bytes than they are spared."""
    found, function, spared = [], "?", 0
    for line in report.splitlines():
        if match := FUNCTION.search(line):
            function = f"{match[1]} for {match[2]}"
            spared = max((most for name, most in SPARED.items() if re.search(name, function)), default=0)
        elif (match := FRAME.search(line)) and any(int(count) > spared for count in match.groups()):
            found.append(f"{function}: {match[0]}")
    return found


def architectures_of(stem: str) -> tuple[str, ...]:
    if stem.endswith("_sm90a"):
        return ("sm_90a",)
    if stem.endswith("_not_sm90"):
        return ("sm_80",)
    return ARCHITECTURES if os.environ.get("FUSELINE_TEST_FULL") == "1" else ("sm_90",)


def compiled() -> list[ParameterSet]:
    """Every source; two thirds, and what Hopper does not use, for the full check."""
    return [
        pytest.param(
            path,
            id=path.stem,
            marks=pytest.mark.full if number % SAMPLED or path.stem.endswith("_not_sm90") else (),
        )
        for number, path in enumerate(sorted(KERNELS.rglob("*.cu")))
    ]


def test_spills_reads_the_report() -> None:
    panels = "_ZN8fuseline30attention_backward_rows_panelsI6__half"

    def told(function: str, architecture: str, stores: int, loads: int) -> str:
        return (
            f"ptxas info    : Compiling entry function '{function}' for '{architecture}'\n"
            f"    {FRAME_OF_8}, {stores} bytes spill stores, {loads} bytes spill loads\n"
        )

    report = (
        "ptxas info    : Compiling entry function 'good' for 'sm_90'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        + told("14short_backwardI6__halfLi128ELi32ELb1ELb0EEE", "sm_80", 8, 8)
        + told("14short_backwardI6__halfLi128ELi32ELb1ELb0EEE", "sm_90", 8, 8)
        + told(f"{panels}Li64ELb0ELb1EEE", "sm_90a", 28, 60)
        + told(f"{panels}Li64ELb0ELb1EEE", "sm_90a", 28, 64)
        + told(f"{panels}Li64ELb1ELb1EEE", "sm_90a", 4, 4)
        + told("bad", "sm_80", 4, 12)
        + told("near", "sm_90", 4, 4)
    )
    assert spills(report) == [
        f"14short_backwardI6__halfLi128ELi32ELb1ELb0EEE for sm_90: {FRAME_OF_8}, 8 bytes spill stores, "
        "8 bytes spill loads",
        f"{panels}Li64ELb0ELb1EEE for sm_90a: {FRAME_OF_8}, 28 bytes spill stores, 64 bytes spill loads",
        f"{panels}Li64ELb1ELb1EEE for sm_90a: {FRAME_OF_8}, 4 bytes spill stores, 4 bytes spill loads",
        f"bad for sm_80: {FRAME_OF_8}, 4 bytes spill stores, 12 bytes spill loads",
        f"near for sm_90: {FRAME_OF_8}, 4 bytes spill stores, 4 bytes spill loads",
    ]


def test_there_are_kernels() -> None:
    assert {"norm_forward_held.cu", "softmax_forward.cu"} <= {path.name for path in KERNELS.rglob("*.cu")}


def test_arguments_of_kernels_have_names_of_their_own() -> None:
    """The linker keeps one `launch` for all types of one name, and would pass one of another size."""
    namespace = re.compile(r"^namespace ([\w:]+) \{", re.MULTILINE)
    defined: dict[tuple[str, str], list[str]] = {}
    arguments: set[tuple[str, str]] = set()
    for path in sorted(KERNELS.rglob("*.cuh")):
        text = path.read_text()
        inside = match[1] if (match := namespace.search(text)) else ""
        for name in re.findall(r"^struct (?:\w+\([^)\n]*\) )?(\w+)[^;\n]*\{", text, re.MULTILINE):
            defined.setdefault((inside, name), []).append(path.name)
        kernels = re.findall(
            r"__global__[^{;]*?\((?:const |__grid_constant__ )*(\w+)(?:<[^>]*>)? \w+[,)]", text
        )
        arguments.update((inside, name) for name in kernels)
    assert len(arguments & defined.keys()) > 20
    assert not {name: files for name, files in defined.items() if name in arguments and len(files) > 1}


@pytest.mark.slow
@pytest.mark.parametrize("source", compiled())
def test_compiles_without_spills(source: Path, tmp_path: Path) -> None:
    search = find_nvcc()
    if search.compiler is None:
        pytest.skip(search.reason)
    architectures = architectures_of(source.stem)
    targets = [f"-gencode=arch=compute_{name.removeprefix('sm_')},code={name}" for name in architectures]
    command = [*search.compiler.command, "-std=c++17", "-O3", "-Xptxas=-v", "-Werror=all-warnings", *targets]
    command += ["-I", str(KERNELS), "-c", str(source), "-o", str(tmp_path / "kernel.o")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    report = run.stdout + run.stderr
    assert run.returncode == 0, report
    for architecture in architectures:
        assert (f"for '{architecture}'" in report) == (source.name not in HOST_ONLY), report
    assert not spills(report)
    assert "wgmma.mma_async instructions are serialized" not in report
