"""What each suite's section says: the right figures in the right cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuseline.report.blocks import Details, Drawing, Headline, Table, Words
from fuseline.report.charts import Bars, Panels, Scatter
from fuseline.report.sections import compile_suite, decode, generic, ladder, op_suite
from fuseline.report.selection import Shelf


def blocks(section, kind):
    return [block for block in section.blocks if isinstance(block, kind)]


def tables(section):
    return {block.title: block for block in blocks(section, Table)}


def charts(section):
    return {block.figure.name: block.figure.chart for block in blocks(section, Drawing)}


def row(table, name, second=None):
    """Cells by column heading of the row so named."""
    found = next(
        r for r in table.rows if r.cells[0].text == name and (second is None or r.cells[1].text == second)
    )
    return {column.label: cell for column, cell in zip(table.columns, found.cells, strict=True)}


@pytest.fixture
def climb(all_records):
    (section,) = ladder.sections(Shelf(all_records))
    return section


@pytest.fixture
def compiled(all_records):
    (section,) = compile_suite.sections(Shelf(all_records), {})
    return section


@pytest.fixture
def op_section(all_records):
    (section,) = op_suite.sections(Shelf(all_records))
    return section


def test_the_ladders_bars_are_coloured_by_lever_and_pale_where_dropped(climb):
    chart = charts(climb)["ladder-gpt2-cumulative"]
    assert isinstance(chart, Bars)
    bars = {bar.label: bar for bar in chart.groups[0].bars}
    assert (bars["flash"].role, bars["bf16"].role, bars["graph"].role) == ("fuse", "tensor", "overhead")
    assert bars["graph"].faded
    assert not bars["flash"].faded
    assert bars["flash"].low < bars["flash"].value < bars["flash"].high
    assert "fp32" not in bars


def test_the_precision_chart_holds_the_baseline_at_one(climb):
    chart = charts(climb)["ladder-gpt2-cumulative-precision"]
    assert isinstance(chart, Scatter)
    dots = {dot.label: dot for dot in chart.dots}
    assert (dots["plain PyTorch"].x, dots["plain PyTorch"].y) == (0.0, 1.0)
    assert dots["tf32"].x == pytest.approx(4.1e-4)
    assert dots["tf32"].y == pytest.approx(412.3 / 231.6)


@pytest.mark.parametrize(
    "low, high, said",
    [
        (1.1, 1.3, "faster than plain PyTorch"),
        (0.7, 0.9, "the speed of plain PyTorch: slower"),
        (0.9, 1.1, "no difference beyond the noise"),
    ],
)
def test_the_headline_claims_no_more_than_its_interval(ladder_records, low, high, said):
    noisy = [
        replace(r, value=(low + high) / 2, low=low, high=high)
        if r.metric == "speedup" and r.case["rung"] == "inductor-graph"
        else r
        for r in ladder_records
    ]
    (section,) = ladder.sections(Shelf(noisy))
    (headline,) = blocks(section, Headline)
    assert said in headline.words


def test_headline_table_and_bars_agree_whatever_the_clocks_did_meanwhile(ladder_records):
    """The last rung's own milliseconds were taken when the machine was slow: nothing shows them."""
    slow = {"iteration_ms": 500.0, "tokens_per_s": 16 * 1024 / 0.5}
    drifted = [
        replace(r, value=slow[r.metric]) if r.metric in slow and r.case["rung"] == "inductor-graph" else r
        for r in ladder_records
    ]
    (section,) = ladder.sections(Shelf(drifted))
    (headline,) = blocks(section, Headline)
    cells = row(tables(section)["What each rung gained"], "inductor-graph")
    bars = {bar.label: bar for bar in charts(section)["ladder-gpt2-cumulative"].groups[0].bars}
    bar, first = bars["inductor-graph"], bars["plain PyTorch"].value
    assert bar.value == pytest.approx(first / 11.81, rel=1e-3)
    assert bar.low == pytest.approx(first / 11.88, rel=1e-3)
    assert headline.value == "11.81x"
    assert "34.9 ms an iteration" in headline.words
    assert cells["time, ms/iteration"].text == "34.9"
    assert bar.text.startswith("34.9 ms")
    tokens = 16 * 1024 / (first / 11.81) * 1e3
    told = {label: value for label, value, _ in headline.tiles}["tokens a second"]
    assert told == cells["throughput, tokens/s"].text
    assert int(told.replace("\u202f", "")) == pytest.approx(tokens, rel=0.01)


def with_torch_alone(records, value, low, high, **case):
    """The ladder, and beside it what torch does alone: `value` is the best rung's time over its."""
    best = next(r for r in records if r.metric == "iteration_ms" and r.case["rung"] == "inductor-graph")
    named = {"rung": "torch alone: inductor", "slot": "torch alone", "kept": False, "order": 99, **case}
    told = {**best.case, "baseline": "inductor-graph", "kernels": "torch", "execution": "inductor", **named}
    return [
        *records,
        replace(best, case=told, value=50.0),
        replace(best, case=told, metric="paired_speedup", value=value, low=low, high=high),
    ]


def test_the_best_that_torch_does_alone_is_the_headline(ladder_records):
    (section,) = ladder.sections(Shelf(with_torch_alone(ladder_records, 0.8, 0.78, 0.82)))
    (headline,) = blocks(section, Headline)
    assert headline.value == "1.25x"
    assert headline.words.startswith("[1.22, 1.28] faster than the best that torch does alone")
    assert "11.81x" not in headline.words
    assert headline.below.startswith("11.81x [11.77, 11.88] faster than plain PyTorch")
    assert headline.below.endswith("Torch alone was timed as inductor.")
    assert section.summary.startswith("1.25x")
    tokens = {label: (value, detail) for label, value, detail in headline.tiles}["tokens a second"]
    assert tokens == ("469\u202f456", "torch alone 375\u202f564")


def test_ratios_beside_bars_and_in_the_table_are_over_torch_alone(ladder_records):
    """Torch alone took 50 ms to the best rung's 40 in turn, whatever either took beside the first rung."""
    alone = with_torch_alone(ladder_records, 0.8, 0.78, 0.82)
    over_first = replace(alone[-1], metric="speedup", value=10.0, low=9.9, high=10.1)
    (section,) = ladder.sections(Shelf([*alone, over_first]))
    table = tables(section)["What each rung gained"]
    labels = [column.label for column in table.columns]
    assert labels.index("over torch alone") < labels.index("speed-up, of the baseline")
    wanted = {
        "inductor-graph": "1.25x",
        "torch alone: inductor": "1.00x",
        "plain PyTorch": "0.100x",
        "tf32": "0.178x",
    }
    assert {name: row(table, name)["over torch alone"].text for name in wanted} == wanted
    times = charts(section)["ladder-gpt2-cumulative"]
    texts = {bar.label: bar.text.split(" · ")[-1] for bar in times.groups[0].bars}
    assert {name: texts[name] for name in wanted} == wanted


def test_where_torch_alone_was_not_timed_that_is_said(ladder_records):
    (section,) = ladder.sections(Shelf(ladder_records))
    (headline,) = blocks(section, Headline)
    assert headline.value == "11.81x"
    assert headline.below == ladder.NOT_TIMED


def test_where_all_that_pays_is_torchs_own_that_is_said(ladder_records):
    same = {"kernels": "fuseline", "execution": "inductor-graph"}
    (section,) = ladder.sections(Shelf(with_torch_alone(ladder_records, 1.0, 1.0, 1.0, **same)))
    (headline,) = blocks(section, Headline)
    assert headline.value == "1.00x"
    assert headline.words.startswith(ladder.TORCHS)
    assert headline.below.startswith("11.81x")


def test_a_ladder_that_went_on_from_torchs_best_says_what_to_use(ladder_records):
    """Its records: torch alone ahead of the climb, taken over as a rung, then beside that rung."""
    ahead = with_torch_alone(ladder_records, 1.2, 1.18, 1.22, backend="naive")
    best, paired = ahead[-2:]
    own = {"rung": "torch's inductor, no SDPA", "slot": "torch's best", "kept": True, "order": 100}
    taken = {**best.case, **own}
    beside = {**best.case, "baseline": own["rung"]}
    even = replace(paired, case=beside, value=1.0, low=1.0, high=1.0, time="2099-01-01T00:00:00+00:00")
    over_plain = replace(paired, case=taken, metric="speedup", value=14.0, low=13.9, high=14.1)
    records = [*ahead, replace(best, case=taken), replace(paired, case=taken), over_plain, even]
    (section,) = ladder.sections(Shelf(records))
    (headline,) = blocks(section, Headline)
    assert headline.value == "1.00x"
    assert headline.words.startswith(ladder.TORCHS)
    assert headline.below.startswith("14.00x")
    assert "naive attention" in headline.source


def test_a_busy_machine_is_told_loudly(ladder_records):
    assert not any(w.text == ladder.BUSY for w in blocks(ladder.sections(Shelf(ladder_records))[0], Words))
    busy = [
        replace(r, low=361.0, high=3220.0)
        if r.metric == "iteration_ms" and r.case["rung"] == "plain PyTorch"
        else r
        for r in ladder_records
    ]
    (section,) = ladder.sections(Shelf(busy))
    assert any(w.text == ladder.BUSY and w.tone == "bad" for w in blocks(section, Words))


def test_products_of_many_microseconds_are_told_in_milliseconds(ladder_records, all_records):
    slow = [
        replace(r, value=r.value * 1000, low=None, high=None)
        for r in all_records
        if r.case.get("section") == "head_gemm"
    ]
    (section,) = ladder.sections(Shelf([*ladder_records, *slow]))
    bar = charts(section)["ladder-gpt2-head-gemm"].groups[0].bars[1]
    assert (bar.value, bar.text) == (pytest.approx(1730.0), "1730 ms · 2.70x")


def test_a_paired_loss_is_marked_as_one(climb):
    table = tables(climb)["What each rung gained"]
    assert row(table, "graph")["this step, paired"].tone == "bad"
    assert row(table, "flash")["this step, paired"].tone == "good"
    assert row(table, "flash")["this step, paired"].text == "1.086x"


def test_costs_say_whether_a_batch_was_tried(climb):
    table = tables(climb)["What each rung cost"]
    assert row(table, "flash")["largest batch, sequences"].detail == "tried"
    assert row(table, "graph")["largest batch, sequences"].detail == "predicted"


def test_memory_is_said_with_the_largest_batch(climb):
    chart = charts(climb)["ladder-gpt2-cumulative-memory"]
    assert next(b for b in chart.groups[0].bars if b.label == "flash").text == "16.0 GiB · batch 80"


def test_anchors_on_another_gpu_are_compared_by_ratio_only(ladder_records):
    elsewhere = [replace(r, device="NVIDIA A100-SXM4-80GB") for r in ladder_records]
    (section,) = ladder.sections(Shelf(elsewhere))
    table = next(t for t in tables(section).values() if t.title.startswith("nanoGPT's own"))
    assert "theirs / ours" not in [column.label for column in table.columns]
    cells = row(table, "eager flash 50304")
    assert cells["theirs, of the first row"].text == "3.37x"
    assert cells["ours, of the first row"].text == "3.39x"


def test_bars_of_the_seed_stand_beside_ours_as_ratios(ladder_records):
    """Another GPU's milliseconds do not compare, and what a row gained over the first one does."""
    elsewhere = [replace(r, device="NVIDIA A100-SXM4-80GB") for r in ladder_records]
    (section,) = ladder.sections(Shelf(elsewhere))
    drawn = charts(section)["ladder-gpt2-anchors-gains"]
    theirs, ours = ({bar.label: bar for bar in group.bars} for group in drawn.groups)
    assert "1 x H100" in drawn.groups[0].label
    assert "A100-SXM4" in drawn.groups[1].label
    assert (theirs["eager flash 50304"].text, ours["eager flash 50304"].text) == ("3.37x", "3.39x")
    assert "inductor default 50304 B=64" not in {**theirs, **ours}
    (here,) = ladder.sections(Shelf(ladder_records))
    assert "ladder-gpt2-anchors-gains" not in charts(here), "on the same GPU diamonds say it"


def test_rows_at_another_batch_have_no_ratio_to_the_first(climb):
    table = next(t for t in tables(climb).values() if t.title.startswith("nanoGPT's own"))
    assert row(table, "inductor default 50304 B=64")["theirs, of the first row"].text == ""


def test_a_climb_of_a_preset_nobody_measured_is_held_against_the_seeds_gpt2(make_ladder, cpu):
    records = [r for r in make_ladder(cpu, "tiny") if r.case.get("combination") == "seed-001"]
    (section,) = ladder.sections(Shelf(records))
    (table,) = (t for t in tables(section).values() if t.title.startswith("Accelerating"))
    assert "They ran gpt2, ours is tiny" in table.reading


def test_overflow_is_said_where_it_begins(climb):
    cells = row(tables(climb)["Who agrees with float64, and where it ends"], "product, then scale (nanoGPT)")
    assert (cells["fp16: range"].text, cells["fp16: range"].detail) == ("overflows", "from 32")
    assert cells["bf16: range"].text == "finite"


def test_a_section_that_did_not_run_says_why(ladder_records):
    reason = "not reached: the budget of 60 s was spent"
    record = next(r for r in ladder_records if r.metric == "skipped")
    skipped = replace(record, case={"section": "stability", "reason": reason})
    (section,) = ladder.sections(Shelf([*ladder_records, skipped]))
    assert f"Not run: {reason}." in [block.text for block in blocks(section, Words)]


def test_the_sample_keeps_its_lines_and_loses_control_characters(ladder_records, all_records):
    sample = next(r for r in all_records if r.case.get("section") == "sample")
    odd = replace(sample, case={**sample.case, "text": "a\n\tb\x07\x1b[1mc\x00"})
    (section,) = ladder.sections(Shelf([*ladder_records, odd]))
    (details,) = (d for d in blocks(section, Details) if d.summary.startswith("A sample"))
    ((told, text),) = details.items
    assert text == "a\n\tb��[1mc�"
    assert told == "validation loss 1.47, after 900 steps"
    assert details.unfolded


def test_compile_shows_mean_sigma_ratio_and_geometric_mean(compiled):
    cells = row(tables(compiled)["All figures"], "gpt2", "inductor")
    assert cells["median, ms/iteration"].detail.startswith("[")
    assert (cells["mean and sigma, ms"].text, cells["mean and sigma, ms"].detail) == ("34.06", "± 1.35")
    assert cells["MFU and sigma"].detail == "± 0.90%"
    assert cells["ratio, old/new, paired"].text == "1.408x"
    (headline,) = blocks(compiled, Headline)
    assert headline.value == "1.515x"
    assert "reduce-overhead, the geometric mean over 5 models" in headline.words


def test_compile_tells_why_a_back_end_did_not_run(compiled):
    cells = row(tables(compiled)["All figures"], "lstm", "cudagraphs")
    assert "cannot be captured" in cells["back end"].detail


def test_compile_whiskers_are_one_sigma(compiled):
    panels = charts(compiled)["compile"]
    assert isinstance(panels, Panels)
    bar = panels.charts[1].groups[0].bars[0]
    assert (bar.label, bar.value) == ("eager", pytest.approx(47.5 * 1.01))
    assert bar.high - bar.value == pytest.approx(47.5 * 0.04)


def test_compile_stands_beside_the_seeds_table(compiled):
    table = next(t for title, t in tables(compiled).items() if title.endswith("(C. Dalinghaus), shakespeare"))
    cells = row(table, "inductor")
    assert cells["theirs, ms/iteration"].text == "12.2"
    assert cells["ours, of the first row"].text == "1.41x"


def test_ops_have_a_panel_for_each_direction_and_dtype_with_ours_on_top(op_section):
    panels = charts(op_section)["ops-softmax"]
    assert {panel.title for panel in panels.charts} == {
        f"{direction}, {dtype}" for direction in ("forward", "backward") for dtype in ("fp32", "fp16", "bf16")
    }
    assert all(panel.lines[-1].label == "fuseline" for panel in panels.charts)
    assert all(len(line.points) == 6 for panel in panels.charts for line in panel.lines)
    assert all(panel.level == 1.0 for panel in panels.charts)


def test_ops_name_the_worst_error_and_the_peers_that_are_absent(op_section):
    table = tables(op_section)["Largest error against float64"]
    assert row(table, "forward, bf16")["fuseline"].text.startswith("3.1")
    (details,) = (d for d in blocks(op_section, Details) if d.summary.startswith("Peers"))
    assert details.items == (("quack", "not installed: `pip install quack-kernels`"),)


def test_ops_are_summed_up_by_how_many_sizes_lead_or_nearly(all_records, op_section):
    assert op_section.summary.startswith("72 of 72 sizes as fast as the fastest peer or within 3% of it, 1.")
    ops = [r for r in all_records if r.suite == "ops"]
    (first, *_) = (r for r in ops if r.metric == "time_us" and r.peer == "eager")
    ours = next(
        r for r in ops if (r.metric, r.peer, r.case) == ("time_us", "fuseline", first.case) and r.value
    )
    for ahead, told in ((0.98, "72 of 72"), (0.96, "71 of 72")):
        beaten = [replace(r, value=ours.value * ahead) if r is first else r for r in ops]
        (section,) = op_suite.sections(Shelf(beaten))
        assert section.summary.startswith(told)
    alone = [r for r in ops if r.peer in ("fuseline", "copy")]
    (section,) = op_suite.sections(Shelf(alone))
    assert section.summary == "layer_norm, softmax"


def test_drawn_lengths_of_ops_are_counted_and_drawn_apart(all_records):
    ours = [r for r in all_records if r.suite == "ops" and "n" in r.case]
    apart = [replace(r, case={**r.case, "n": int(str(r.case["n"])) + 1, "drawn": True}) for r in ours]
    (section,) = op_suite.sections(Shelf(all_records + apart))
    (before,) = op_suite.sections(Shelf(all_records))
    assert section.summary.startswith(f"{before.summary}; at lengths drawn at random ")
    titles = [d.figure.chart.title for d in blocks(section, Drawing)]
    assert any("lengths drawn at random" in title for title in titles)
    assert len(titles) > len(blocks(before, Drawing))


def test_ops_on_the_reference_say_so(all_records):
    fallen = [
        replace(r, case={**r.case, "native": False}) if "native" in r.case else r
        for r in all_records
        if r.suite == "ops"
    ]
    (section,) = op_suite.sections(Shelf(fallen))
    assert any("not loaded" in block.text for block in blocks(section, Words))


def test_of_two_sizes_at_one_length_the_larger_is_drawn(all_records):
    ops = [r for r in all_records if r.suite == "ops"]
    small = [replace(r, value=0.01, case={**r.case, "rows": 4}) for r in ops if r.metric == "share_of_copy"]
    (section,) = op_suite.sections(Shelf([*ops, *small]))
    values = [
        p.y for panel in charts(section)["ops-softmax"].charts for line in panel.lines for p in line.points
    ]
    assert min(values) > 0.1


def test_leftovers_of_a_known_suite_are_shown(all_records):
    odd = replace(next(r for r in all_records if r.suite == "ops"), case={"what": "no op at all"})
    shelf = Shelf([odd])
    assert op_suite.sections(shelf) == []
    (section,) = generic.sections(shelf)
    assert section.title == "Ops: other measurements"
    assert "what no op at all" in blocks(section, Table)[0].reading


def test_few_rows_are_drawn_against_their_floor_with_a_panel_for_each_number_of_rows(all_records):
    ops = [r for r in all_records if r.suite == "ops"]
    shares = [r for r in ops if r.metric == "share_of_copy" and r.case["dtype"] == "bf16"]
    few = [
        replace(r, metric="share_of_floor", case={**r.case, "rows": rows, "captured": True})
        for r in shares
        for rows in (4, 512)
    ]
    (section,) = op_suite.sections(Shelf([*ops, *few]))
    captured = charts(section)["ops-softmax-1"]
    assert [panel.title for panel in captured.charts] == [
        f"{way}, bf16, {rows} rows" for way in ("forward", "backward") for rows in (4, 512)
    ]
    assert "share of floor" in captured.title


def test_speed_ups_are_drawn_for_every_peer_with_the_level_to_stay_above(op_section):
    chart = charts(op_section)["ops-softmax-speedup"]
    assert {line.label for panel in chart.charts for line in panel.lines} == {"eager", "inductor"}
    assert all(panel.level == 1.0 for panel in chart.charts)
    forward = next(line for line in chart.charts[0].lines if line.label == "eager")
    assert forward.points[0].y == pytest.approx(0.96 / 0.55)


def test_the_homeworks_shapes_have_a_table_of_their_own_judged_by_the_bars(all_records):
    template = next(r for r in all_records if r.suite == "ops" and r.metric == "time_us")

    def figure(op, peer, metric, value, captured=False):
        case = {"op": op, "dtype": "float32", "rows": 1024, "n": 512, "direction": "fw", "section": "seed"}
        return replace(
            template,
            case={**case, "captured": captured},
            peer=peer,
            metric=metric,
            value=value,
            low=None,
            high=None,
        )

    records = [
        figure("layer_norm", "fuseline", "time_us", 10.0),
        figure("layer_norm", "composed", "time_us", 70.0),
        figure("layer_norm", "composed", "paired_speedup", 7.0),
        figure("layer_norm", "composed", "launches", 9.0),
        figure("softmax", "composed", "paired_speedup", 4.0),
        figure("softmax", "composed", "paired_speedup", 4.5, captured=True),
    ]
    (section,) = op_suite.sections(Shelf(records))
    table, captured = blocks(section, Table)
    norm, softmax = row(table, "layer_norm, forward"), row(table, "softmax, forward")
    assert (norm["composed over ours"].text, norm["composed over ours"].tone) == ("7.00x", "good")
    assert (norm["to reach"].text, norm["to reach"].detail) == ("6x", "(15.8x)")
    assert norm["launches replaced"].text == "9"
    assert softmax["composed over ours"].tone == "bad"
    alone = row(captured, "softmax, forward")
    assert (alone["composed over ours"].text, alone["composed over ours"].tone) == ("4.50x", "")
    assert "to reach" not in alone  # the bars are those of calls
    assert charts(section) == {}


def test_the_levers_of_a_generation_are_over_torch_alone_and_over_eager(ladder_records):
    rates = {"eager": 50.0, "compiled": 200.0, "fused": 250.0}
    made = [
        replace(
            ladder_records[0],
            suite="decode",
            case={
                "preset": "llama",
                "rung": rung,
                "lever": "",
                "batch": 1,
                "position": 200,
                "format": "bf16",
            },
            metric=metric,
            value=value,
            low=None,
            high=None,
        )
        for rung, rate in rates.items()
        for metric, value in (("tokens_per_s", rate), ("speedup", rate / 50))
    ]
    (section,) = decode.sections(Shelf(made))
    table = tables(section)["Levers"]
    shown = {r: [row(table, r)[c].text for c in ("over torch alone", "over eager")] for r in rates}
    assert shown == {
        "eager": ["0.250x", "1.00x"],
        "compiled": ["1.00x", "4.00x"],
        "fused": ["1.25x", "5.00x"],
    }
