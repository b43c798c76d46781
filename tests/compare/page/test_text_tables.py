"""The table of rows, and the figures that draw them."""

import csv
import io
import math
from dataclasses import replace
from statistics import fmean

import pytest

from posenc.compare.judging.answer import conclude
from posenc.compare.page.figures import curve_plots
from posenc.compare.page.numbers import csv_text, facts_of
from posenc.compare.page.report import report_of
from posenc.compare.page.settings import facts_to_repeat, specs_table, tuning_sections
from posenc.compare.page.tables import _sort_key, reading_sections
from posenc.compare.results import FORMAT, CorpusInfo, Study, Timing, TrainingPoint, TrialResult
from posenc.compare.rows import rows_of
from posenc.compare.scores import FarScore, LengthScore, Reading
from posenc.compare.trial.config import SCHEDULES
from posenc.compare.trial.train import learning_rate
from posenc.report.report import Table
from tests.compare.plan.test_equal_tuning import TRIAL, checks

CONFIG = replace(TRIAL, steps=200, corpus="0" * 16, test_lengths=(128, 256, 1024), num_windows=16)


def far(bits, near, count=16):
    windows = tuple(bits + 0.1 * i for i in range(count))
    near_windows = tuple(near + 0.1 * i for i in range(count))
    return tuple(
        FarScore(n, fmean(windows), fmean(near_windows), None, windows, near_windows)
        for n in (256, 1024)
    )


def by_length(bits):
    return tuple(LengthScore(n, bits) for n in CONFIG.test_lengths)


def result(encoding, seed, bits, window=None):
    config = replace(CONFIG, encoding=encoding, seed=seed)
    curve = tuple(TrainingPoint(n, 3.0, 3.0 - n / 100) for n in (20, 40, 100, 200))
    readings = ()
    if window is not None:
        readings = (Reading("window", by_length(window), far(window, 2.0)),)
    seconds = {"alibi": 20.0}.get(encoding, 10.0)
    timing = Timing(100.0, seconds, 1.0, "one")
    return TrialResult(
        config,
        training=curve,
        by_length=by_length(bits),
        timing=timing,
        far=far(bits, 2.0),
        readings=readings,
    )


def study_of(*results):
    trials = tuple(each.config for each in results)
    return Study(FORMAT, "", "", {}, {}, None, trials, results)


STUDY = study_of(
    *(result("rope", seed, 4.0, window=1.9) for seed in (0, 1)),
    *(result("alibi", seed, 2.1) for seed in (0, 1)),
)


def table_of(study):
    section, *_ = reading_sections(study)
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    return table


def test_every_reading_has_a_row_with_far_losses_and_what_it_costs():
    table = table_of(STUDY)
    names = [row[0] for row in table.rows]
    assert names == ["rope in a window", "alibi", "rope"]
    window = table.rows[0]
    assert [cell.value for cell in window[1:3]] == pytest.approx([2.75, 0.1])
    assert window[2].unit == " ± 0.000"  # the same in all windows
    assert [row[3] for row in table.rows] == [
        "more than 64 and at most 256",
        "at most 128",
        "at most 128",
    ]
    assert [row[4].value for row in table.rows] == [1.0, 2.0, 1.0]
    # After half of its steps alibi's curve has 2.0 bits; a window is no training.
    assert table.rows[0][5] is None
    assert table.rows[1][5].value == pytest.approx(2.0)
    assert table.rows[2][5].value == pytest.approx(1.0)


def test_costs_name_the_encoding_and_the_machine_of_their_base():
    table = table_of(STUDY)
    assert table.header[4].meaning == "times rope's training; range"
    assert table.caption == (
        "Lowest far loss first. Costs are multiples of rope's training time, with "
        f"{TRIAL.precision} on the {TRIAL.device} of this run at 128 bytes; elsewhere they differ."
    )
    # By steps in turns alibi is cheaper by its median ratio, and rope by its median step.
    steps = {"rope": (1.0, 2.0, 3.0), "alibi": (0.9, 2.1, 2.7)}
    costs = {row[0]: row[4].value for row in table_of(replace(STUDY, step_seconds=steps)).rows}
    assert costs["rope"] == 1.0 and costs["alibi"] == pytest.approx(0.9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0.0, 0.05, 30.0])
def test_equal_time_is_that_of_a_shorter_training_where_its_rates_are(schedule, warmup):
    """As long as the rates of the first 100 steps of 200 are those of a training of 100."""

    def with_schedule(result):
        return replace(result, config=replace(result.config, schedule=schedule, warmup=warmup))

    study = study_of(*map(with_schedule, STUDY.results))
    *_, section = reading_sections(study)
    (words,) = section.blocks
    *_, end_of_note = words.split("; ")
    longer = study.trials[0]
    shorter = replace(longer, steps=100)
    rates = [[learning_rate(trial, step) for step in range(100)] for trial in (longer, shorter)]
    if rates[0] == rates[1]:
        assert end_of_note == "at a constant rate a training of so many steps gives the same."
    elif rates[0][30:] == rates[1][30:]:
        assert "about the same, as its warm-up is shorter." in end_of_note
    else:
        # At a rate that falls earlier, more of it has come down by the same step.
        assert rates[1][-1] < rates[0][99]
        assert end_of_note == "a schedule for so many steps would do better."


def test_a_tuning_counts_in_what_a_row_costs():
    tuned = replace(
        result("rope", 0, 4.0),
        readings=(Reading("tuned", by_length(2.0), far(1.8, 2.0)),),
        timing=Timing(100.0, 10.0, 1.0, "one", tuning_seconds=5.0),
    )
    table = table_of(study_of(tuned, result("alibi", 0, 2.1)))
    assert {row[0]: row[4].value for row in table.rows}["rope tuned"] == pytest.approx(1.5)


def test_an_encoding_that_cannot_run_far_says_why():
    cannot = tuple(FarScore(n, None, None, "it has 128 positions") for n in (256, 1024))
    short = replace(result("learned", 0, 2.0), far=cannot)
    table = table_of(study_of(short, result("alibi", 0, 2.1)))
    assert [row[0] for row in table.rows] == ["alibi", "learned"]
    assert "it has 128 positions" in table.rows[1][1].note


def test_too_few_windows_are_said():
    section, *_ = reading_sections(
        study_of(*(replace(r, config=replace(r.config, num_windows=128)) for r in STUDY.results))
    )
    assert any("16 windows, not 128" in str(block) for block in section.blocks)
    section, *_ = reading_sections(STUDY)
    assert not any("windows, not" in str(block) for block in section.blocks)


def test_an_old_run_says_that_it_has_no_far_losses():
    old = study_of(*(replace(r, far=(), readings=()) for r in STUDY.results))
    (section,) = reading_sections(old)
    assert section.blocks == ["Losses on far bytes alone were not measured in this run."]
    assert len([*curve_plots(old)]) == 4


def test_figures_and_csv_have_every_reading():
    plots = {plot.name: plot.chart for plot in curve_plots(STUDY)}
    for name in ("by-length", "by-context"):
        data = plots[name].data
        assert "rope in a window" in set(map(str, next(iter(v for v in data.values()))))
        plots[name].draw(data)
    rows = csv_text(STUDY).splitlines()
    measures = {row.split(",")[0] for row in rows}
    assert {"far", "far_near", "window by_length", "window far", "window far_near"} <= measures


def test_a_study_that_was_tuned_shows_the_choices_and_what_they_turn():
    section, _ = tuning_sections(replace(STUDY, rates=tuple(checks()), rates_from="a test"))
    table, made, turned, turned_by_rates = section.blocks
    assert [row[0] for row in table.rows] == ["rope", "t5"]
    assert table.rows[0][2] == "rope:rope_theta=100"
    assert "recorded, from a test" in made
    trials = "the search's trials, one seed each, are in another order"
    assert turned == (
        f"Before tuning (rate 0.002, tables 20 times that, usual setting) {trials}: t5 before rope."
    )
    assert turned_by_rates == f"With one rate for all parameters no two of {trials}."
    # Of t5 another rate of tables was tried, but not the model's own.
    assert [row[7] and row[7].value for row in table.rows] == [2.5, None]


def test_a_study_with_recorded_choices_says_from_which_trials():
    made = "44 trials of 200 steps with one seed"
    section, _ = tuning_sections(replace(STUDY, rates=tuple(checks()), rates_from=made))
    assert "from 44 trials of 200 steps with one seed" in section.blocks[1]


def test_encodings_whose_untuned_rates_differ_are_not_said_to_share_one():
    rope, t5 = checks()
    section, _ = tuning_sections(replace(STUDY, rates=(rope, t5)))
    assert section.blocks[0].header[6].meaning == "rate 0.002, tables 20 times that, usual setting"
    rates = (rope, replace(t5, plain_at=0))
    section, _ = tuning_sections(replace(STUDY, rates=rates))
    assert section.blocks[0].header[6].meaning == "their own rates, usual setting"


def test_the_page_names_the_rates_of_the_model_and_of_tables():
    table = dict(result("t5", 0, 2.0).spec)
    learned = replace(result("t5", 0, 2.0), encoding_parameters=32, spec=table)
    plain = result("rope", 0, 2.0)
    rows = {row[0]: row[3] for row in specs_table(study_of(learned, plain)).rows}
    assert rows["t5"].endswith("learning rate 0.002, its tables 20 times that")
    assert rows["rope"].endswith("learning rate 0.002")
    facts = facts_to_repeat(study_of(learned, plain))
    assert "peak learning rate 0.002, tables of encodings 20 times it" in facts["training"]


def test_several_training_lengths_are_named_wherever_one_is():
    def with_lengths(result):
        config = replace(result.config, train_lengths=(32, 64, 128))
        return replace(result, config=config)

    study = study_of(*map(with_lengths, STUDY.results))
    sentence = "200 steps of 4,096 bytes in windows of 32, 64 or 128, drawn for each step, peak"
    assert facts_to_repeat(study)["training"].startswith(sentence)
    assert facts_to_repeat(STUDY)["training"].startswith("200 steps of 32 × 128 bytes, peak")
    config = replace(study.trials[0], micro_batch=4)
    in_pieces = study_of(replace(study.results[0], config=config))
    pieces = ", 4 windows of the longest, or as many tokens, at a time"
    assert facts_to_repeat(in_pieces)["training"].endswith(pieces)
    assert "at 32, 64 and 128 bytes; elsewhere" in table_of(study).caption
    assert "at 128 bytes; elsewhere" in table_of(STUDY).caption
    text = CorpusInfo("a text", "0" * 16, 1, 9000, 900, 900, "each 20th")
    for of_text, words in ((study, "32, 64 and 128"), (STUDY, "128")):
        of_text = conclude(replace(of_text, corpus=text))
        assert report_of(of_text).subtitle.startswith(f"Trained on {words} bytes at a time, test")
    assert facts_of(conclude(study))["trials"]["train_lengths"] == [32, 64, 128]
    assert "train_lengths" not in facts_of(conclude(STUDY))["trials"]
    for of_csv, cell in ((study, "32 64 128"), (STUDY, "")):
        rows = csv.DictReader(io.StringIO(csv_text(of_csv)))
        assert {row["train_lengths"] for row in rows} == {cell}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("rnope_swa:rope_theta=100", "window size 64 in layers with rotation"),
        ("rnope_swa:window_size=16", "window size 16 in layers with rotation"),
        ("rnope", None),
    ],
)
def test_the_window_that_follows_the_training_length_is_a_setting(name, says):
    spec = {"name": name, "class": "RNoPE", "window_size": "None"}
    (row,) = specs_table(study_of(replace(result(name, 0, 2.0), spec=spec))).rows
    assert ("window size" in row[3]) is bool(says)
    assert says is None or says in row[3]


def test_the_text_table_has_means_over_seeds_in_every_reading():
    def with_seed(seed):
        each = result("rope", seed, 4.0 + seed, window=1.9)
        near = LengthScore(128, 4.0 + seed)
        (window,) = each.readings
        window = replace(window, by_length=(near, *window.by_length[1:]))
        return replace(each, by_length=(near, *each.by_length[1:]), readings=(window,))

    report = report_of(conclude(study_of(with_seed(0), with_seed(1), *STUDY.results[2:])))
    rows = {row[0]: row[1] for row in report.tables()["text"].rows}
    near = {name: getattr(cell, "text", cell) for name, cell in rows.items()}
    assert near["rope in a window"].value == near["rope"].value == 4.5


def far_cells(study):
    """The far column of the table of the text, by row: the number or the text of each cell."""
    table = report_of(conclude(study)).tables()["text"]
    headings = [getattr(heading, "text", heading) for heading in table.header]
    cells = {row[0]: row[headings.index("the last 128 of 1,024 bytes")] for row in table.rows}
    return {name: getattr(cell, "text", cell) for name, cell in cells.items()}, cells


def test_every_row_has_its_far_loss_in_the_table_of_the_text():
    """Once on the page: also of readings that are not judged, and of what was not checked."""
    texts, _ = far_cells(STUDY)
    far_losses = {"rope in a window": 2.65, "alibi": 2.85, "rope": 4.75}
    assert {name: cell.value for name, cell in texts.items()} == pytest.approx(far_losses)
    unchecked = replace(STUDY, unchecked={"rope": "sees later tokens", "alibi": "gives NaN"})
    texts, _ = far_cells(unchecked)
    assert {name: cell.value for name, cell in texts.items()} == pytest.approx(far_losses)
    cannot = tuple(FarScore(n, None, None, "it has 128 positions") for n in (256, 1024))
    texts, _ = far_cells(study_of(replace(result("learned", 0, 2.0), far=cannot), STUDY.results[2]))
    assert texts["learned"] == "cannot"


def test_a_row_with_failed_trials_has_the_far_loss_of_the_others():
    failed = TrialResult(STUDY.results[1].config, reason="the loss became nan")
    texts, cells = far_cells(study_of(STUDY.results[0], failed, *STUDY.results[2:]))
    assert texts["rope"] == "failed 1 of 2"
    assert cells["rope"].second_line == "4.750 in the others"
    assert cells["rope in a window"].second_line == "2.650 in the others"


def test_a_length_at_which_a_row_was_not_read_has_a_dash():
    """A window is read at the training length and at the longest only, and nothing hinders it."""

    def as_used(each):
        (window,) = each.readings
        judged = tuple(score for score in window.by_length if score.length != 256)
        return replace(each, readings=(replace(window, by_length=judged),))

    lengths = tuple(LengthScore(n, None, "it has 64 positions") for n in CONFIG.test_lengths[1:])
    short = replace(STUDY.results[2], by_length=(LengthScore(128, 2.1), *lengths))
    rope = [as_used(each) for each in STUDY.results[:2]]
    report = report_of(conclude(study_of(*rope, short)))
    table = report.tables()["text"]
    at_256 = [getattr(heading, "text", heading) for heading in table.header].index("256 bytes")
    cells = {row[0]: row[at_256] for row in table.rows}
    assert cells["rope in a window"] is None
    assert cells["rope"].value == 4.0
    assert cells["alibi"].text == "cannot"
    assert cells["alibi"].note == "alibi: it has 64 positions"


def test_a_row_without_a_loss_comes_last():
    """By far loss first, then by near loss; what could not run has neither."""
    near_only = replace(result("rope", 0, 2.0), far=())
    lengths = tuple(LengthScore(n, None, "has 64 positions") for n in CONFIG.test_lengths)
    nothing = replace(near_only, by_length=lengths)
    keys = [_sort_key(list(rows_of(study_of(r))), 1024) for r in (result("t5", 0, 3.0), near_only)]
    keys.append(_sort_key(list(rows_of(study_of(nothing))), 1024))
    assert keys == sorted(keys) and keys[2] == (math.inf, math.inf)
