"""The translation suite's section: the right figures in the right cells. All figures are invented."""

from __future__ import annotations

import pytest

from fuseline.bench.translation.epoch_time import Timed
from fuseline.bench.translation.quality import Learned
from fuseline.bench.translation.results import curve_records, epoch_records, quality_records, work_records
from fuseline.bench.translation.step_work import StepWork, Work
from fuseline.records import Environment, Record
from fuseline.report.blocks import Drawing, Headline, Section, Table
from fuseline.report.sections import translation
from fuseline.report.selection import Shelf
from fuseline.training.bleu import Bleu

GPU = Environment(
    device="NVIDIA H100 80GB HBM3 (invented test data)",
    clocks=None,
    power_w=None,
    torch="2.11.0+cu130",
    cuda="13.0",
    fuseline="0.1.0",
    commit="0123456789ab",
)


@pytest.fixture
def section() -> Section:
    outcomes = [
        Timed("formulas", [10.0] * 8, batches_per_epoch=200),
        Timed("torch", skipped="failed with Oops"),
        Timed("fuseline", [8.0] * 8, batches_per_epoch=200),
        Timed("nothing", [5.0] * 8, batches_per_epoch=200),
    ]
    learned = [
        Learned(kernels, seed, Bleu(30.0 + seed + plus, "nrefs:1|tok:13a"), 1.0, 400)
        for kernels, plus in (("formulas", 0.0), ("fuseline", 0.5))
        for seed in range(3)
    ]
    works = [
        StepWork("formulas", {"products": Work(2.0, 50), "memory-bound": Work(6.0, 450)}),
        StepWork("fuseline", skipped="failed with Ouch"),
    ]
    curve = [5.0, 4.0, 3.0, 2.0]
    recipe_case = {"section": "recipe", "model": "encoder-decoder", "data": "made", "num_layers": 4}
    records = [
        *epoch_records(outcomes, {"execution": "eager", "dtype": "fp32"}, GPU),
        *work_records(works, {"execution": "eager", "dtype": "fp32"}, GPU),
        *curve_records({"formulas": curve, "fuseline": [5.0, 4.0, 3.0, 2.002]}, {}, GPU, 1),
        *quality_records(learned, {}, GPU),
        Record.of("translation", {**recipe_case, "epochs": 100.0}, "bleu", 38.25, GPU),
    ]
    (made,) = translation.sections(Shelf(records))
    return made


def tables(section: Section) -> dict[str, Table]:
    return {block.title: block for block in section.blocks if isinstance(block, Table)}


def test_the_headline_is_the_epochs_ratio(section: Section) -> None:
    headline = next(block for block in section.blocks if isinstance(block, Headline))
    assert headline.value.startswith("1.25")
    assert "the course asks 1.1" in headline.words
    assert any(label == "BLEU of the recipe" and "38.2" in value for label, value, _ in headline.tiles)


def test_without_epochs_the_recipe_is_the_summary() -> None:
    case = {"section": "recipe", "model": "decoder", "data": "made", "num_layers": 4}
    records = [
        Record.of("translation", case, "bleu", 97.5, GPU),
        Record.of("translation", case, "training_s", 153.0, GPU),
    ]
    (made,) = translation.sections(Shelf(records))
    assert made.summary == "BLEU 97.5 after 153 s of training"


def test_epochs_with_the_limit_and_what_failed(section: Section) -> None:
    rows = {row.cells[1].text: row.cells for row in tables(section)["Epochs"].rows}
    assert rows["operator by operator"][3].text.startswith("2")  # 10 ms x 200
    assert rows["nothing fusable"][6].text.startswith("50")
    assert "failed with Oops" in rows["torch's kernels"][1].detail


def test_a_compiled_step_is_held_against_the_graph_of_nothing() -> None:
    def timed(execution: str, **times: float) -> list[Record]:
        outcomes = [Timed(name, [ms] * 8, batches_per_epoch=1) for name, ms in times.items()]
        return epoch_records(outcomes, {"execution": execution, "dtype": "bf16"}, GPU)

    graph = timed("graph", formulas=8.0, nothing=1.5)
    (made,) = translation.sections(Shelf([*graph, *timed("inductor-graph", formulas=2.0, fuseline=1.6)]))
    assert "25.0% of the compiled step (inductor-graph, bf16)" in tables(made)["Epochs"].reading
    assert "a limit of 1.33" in tables(made)["Epochs"].reading
    (made,) = translation.sections(Shelf(graph))
    assert "compiled" not in tables(made)["Epochs"].reading


def test_what_a_steps_kernels_do_and_how_much_of_it_they_fill(section: Section) -> None:
    shown = tables(section)["What a step's kernels do"]
    rows = {row.cells[1].text: [cell.text for cell in row.cells] for row in shown.rows}
    heads = [column.label for column in shown.columns]
    told = dict(zip(heads, rows["operator by operator"], strict=True))
    assert told["all kernels, ms"].startswith("8")
    assert told["of the step"].startswith("80")
    assert told["launches, kernels a call"].startswith("500")
    assert told["limit, if it cost nothing"].startswith("4")
    assert "failed with Ouch" in shown.rows[1].cells[1].detail


def test_curves_and_scores_are_drawn(section: Section) -> None:
    words = {b.figure.name: b.figure for b in section.blocks if isinstance(b, Drawing)}
    assert set(words) == {"translation-epochs", "translation-curves", "translation-bleu"}
    assert "The means are 0.50 apart" in words["translation-bleu"].reading
    assert "mean: 31.5" in words["translation-bleu"].chart.words()
    assert "lowest 2" in words["translation-curves"].chart.words()
    errors = tables(section)["How far apart the curves are"].rows
    assert [row.cells[0].text for row in errors] == ["Fuseline's ops"]
    assert "10⁻³" in errors[0].cells[1].text
