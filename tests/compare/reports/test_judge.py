"""Losses of other trainers get the verdicts of compare."""

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import posenc
from posenc.compare.judging.answer import answer_and_choices, conclude
from posenc.compare.judging.near_far import standings
from posenc.compare.page.figures import curve_plots
from posenc.compare.page.numbers import facts_of
from posenc.compare.page.report import report_of
from posenc.compare.reports.judge_losses import judge_file
from posenc.compare.results import Study, with_labels
from posenc.compare.rows import rows_of
from posenc.report.chart import split_by_series
from posenc.report.html_page import page_of
from posenc.report.report import cell_text
from tests.compare.judging.test_standing import verdicts_of_pairs
from tests.compare.reports.loss_tables import records_of, write_csv
from tests.experiment import experiment
from tests.texts import prose
from tests.tokenizers_of_tests import trained

published_studies = experiment("leaderboard_plan").published_studies
RESULTS = Path(__file__).parents[3] / "results"


def verdicts(study: Study):
    """Everything that the seeds of a study decide: in each place the order, the means, each pair's
    verdict, difference and half of its interval."""
    found = []
    for standing in standings(study):
        pairs = [
            (
                *pair,
                round(standing.gap(*pair[:2]).value, 9),
                round(standing.gap(*pair[:2]).half_width, 9),
            )
            for pair in verdicts_of_pairs(standing)
        ]
        named = {name: standing.verdict(name) for name in standing.order}
        means = [round(standing.mean(name), 9) for name in standing.order]
        found.append((standing.order, named, means, standing.contenders, pairs))
    return found


def test_the_rows_of_the_board_give_the_boards_verdicts(tmp_path):
    board = with_labels(published_studies()["code"])
    path = write_csv(tmp_path / "losses.csv", records_of(board))
    judged = posenc.compare.judge(path)
    assert verdicts(judged) == verdicts(board)
    assert answer_and_choices(judged).row_names == answer_and_choices(board).row_names


def as_a_table_knows(study: Study) -> Study:
    """The study without what a table cannot have: losses of single windows and with near context,
    the text, what searches tried, steps in turns."""
    results = []
    for result in study.results:
        by_length = without_windows(result.by_length)
        training = tuple(replace(point, train=None) for point in result.training)
        readings = [
            replace(each, by_length=without_windows(each.by_length), far=last_far(each.far))
            for each in result.readings
        ]
        changed = replace(result, by_length=by_length, training=training, by_context=())
        results.append(replace(changed, far=last_far(result.far), readings=tuple(readings)))
    known = {"results": tuple(results), "rates": (), "step_seconds": {}, "corpus": None}
    return conclude(replace(study, **known))


def without_windows(scores):
    return tuple(replace(score, windows=()) for score in scores)


def last_far(scores):
    """The far losses in the longest windows, without near context."""
    return tuple(replace(s, far_near=None, windows=(), near_windows=()) for s in scores[-1:])


def check_judged_alike(study: Study, path: Path) -> None:
    judged = posenc.compare.judge(write_csv(path, records_of(study)))
    study = as_a_table_knows(study)
    assert verdicts(judged) == verdicts(study)
    # The curve of a table is of the tested text: losses at equal time are others than in training.
    answer, judged_answer = (
        re.sub(r" At equal time .*? is ahead(: .*? by then| \([^)]*\))\.", "", each.recommendation)
        for each in (study, judged)
    )
    assert judged_answer == answer.replace("bytes", "tokens")
    assert answer_and_choices(judged)[1:] == answer_and_choices(study)[1:]
    tables, judged_tables = report_of(study).tables(), report_of(judged).tables()
    train_length = study.trials[0].train_length
    seeds = f"seeds-at-{train_length}-{study.trials[0].length_unit}"
    for name in ("text", "curves", seeds):
        shown, judged_shown = (
            [[cell_text(cell).replace("cannot", "–") for cell in row] for row in each.rows]
            for each in (tables[name], judged_tables[name.replace("bytes", "tokens")])
        )
        assert [row[:6] for row in judged_shown] == [row[:6] for row in shown]


def test_a_study_of_compare_is_judged_alike(tmp_path):
    study = with_labels(Study.read(RESULTS / "compare/study.json"))
    check_judged_alike(study, tmp_path / "losses.csv")


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["bytes", "tokens"])
def test_a_run_with_all_readings_is_judged_alike(unit, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(prose(60_000))
    sizes = {"train_length": 16, "test_lengths": [32, 64], "width": 16, "layers": 1, "heads": 2}
    if unit == "tokens":
        sizes["tokenizer"] = trained(tmp_path / "bpe.json", text.read_text("utf-8"), 300)
    study = posenc.compare.run(
        ["rope", "alibi", "nope"],
        text=text,
        out=tmp_path / "run",
        **sizes,
        **{"steps": 40, "batch": 4, "seeds": 2, "tune": False, "tune_steps": 2, "workers": 1},
    )
    names = {row.name for row in rows_of(study)}
    assert {"rope", "rope in a window", "rope tuned", "alibi"} <= names
    check_judged_alike(study, tmp_path / "losses.csv")


LOSSES = {"rope": (3.30, 3.312), "alibi": (3.52, 3.507), "nope": (3.71, 3.722)}


def table_of(column: str, factor: float = 1.0) -> list[dict[str, object]]:
    """Losses of three encodings and two seeds, in nats times a factor."""
    return [
        {"encoding": name, "seed": seed, "length": 512, column: factor * loss}
        for name, of_seeds in LOSSES.items()
        for seed, loss in enumerate(of_seeds)
    ]


@pytest.mark.parametrize(
    ("column", "factor", "unit"),
    [
        ("loss", 1.0, "bits per token"),
        ("bits", 1 / math.log(2), "bits per token"),
        ("bits_per_token", 1 / math.log(2), "bits per token"),
        ("bits_per_byte", 1 / math.log(2), "bits per byte"),
    ],
)
def test_losses_are_read_in_their_unit_and_shown_in_bits(column, factor, unit):
    judged = posenc.compare.judge(table_of(column, factor))
    (near,) = facts_of(judged)["places"]
    assert near["unit"] == unit and near["where"] == "512 tokens"
    assert near["encodings"][0]["mean"] == pytest.approx(3.306 / math.log(2))
    assert judged.recommendation.startswith(
        "rope leads after this training: 4.77 bits (alibi +0.30"
    )
    assert ("was chosen for bits per byte" in judged.limits) == (unit == "bits per token")
    assert ("taken as nats per token" in " ".join(judged.table.notes)) == (column == "loss")
    page = page_of(report_of(judged)).html()
    assert f"Losses of the table, in {unit}: trained on 512 tokens at a time" in page
    text = re.sub(r"<style.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL)
    assert not re.findall(r"(?<!per )(?<!for bits per )\bbytes?\b", text)


def test_columns_for_each_length_are_the_same_table():
    long, wide = [], []
    for name, of_seeds in LOSSES.items():
        for seed, loss in enumerate(of_seeds):
            trial = {"encoding": name, "seed": seed}
            long += [
                {**trial, "length": 128, "bits": loss},
                {**trial, "length": 512, "bits": loss + 1},
            ]
            wide.append({**trial, "bits_128": loss, "bits_512": loss + 1})
    assert posenc.compare.judge(long).summary == posenc.compare.judge(wide).summary
    # An encoding without a loss at a length is not judged there.
    del wide[-1]["bits_512"], wide[-2]["bits_512"]
    judged = posenc.compare.judge(wide)
    assert judged.results[-1].by_length[1].cannot == "the table has no loss there"
    assert cell_text(report_of(judged).tables()["text"].rows[-1][2]) == "–"


class Frame:
    """What of a pandas DataFrame is used, where pandas is not installed."""

    def __init__(self, records):
        self.records = records
        self.columns = [*records[0]]

    def to_dict(self, orient):
        assert orient == "records"
        return self.records


def test_a_data_frame_is_read_without_pandas_as_a_dependency():
    judged = posenc.compare.judge(Frame(table_of("loss")))
    assert judged.recommendation == posenc.compare.judge(table_of("loss")).recommendation


def test_a_data_frame_of_pandas_is_read():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(table_of("loss")).assign(steps=None, size=pandas.NA)
    judged = posenc.compare.judge(frame)
    assert judged.recommendation == posenc.compare.judge(table_of("loss")).recommendation
    wide = frame.pivot(index=["encoding", "seed"], columns="length", values="loss").reset_index()
    assert {*posenc.compare.judge(wide).summary} == {*judged.summary}


def test_nothing_is_written_but_by_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    posenc.compare.judge(table_of("loss"))
    assert not list(tmp_path.iterdir())
    posenc.compare.judge(table_of("loss"), out="page")
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == [
        "report.html",
        "results.csv",
    ]
    rows = [*csv.DictReader((tmp_path / "page/results.csv").read_text("utf-8").splitlines())]
    unknown = {"batch", "width", "lr", "objective", "precision", "recipe", "encoding_lr", "steps"}
    assert {row[name] for row in rows for name in unknown} == {""}
    posenc.compare.judge(table_of("loss"), out="page")  # over its own
    (tmp_path / "page/results.csv").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match=r"is not posenc's\. Choose another folder"):
        posenc.compare.judge(table_of("loss"), out="page")


def test_seconds_of_the_table_say_what_training_costs():
    seconds = {"rope": 100.0, "alibi": 101.0, "nope": 150.0}
    table = [row | {"seconds": seconds[row["encoding"]]} for row in table_of("loss")]
    judged = posenc.compare.judge(table)
    costs = {row[0]: cell_text(row[1]) for row in report_of(judged).tables()["rows"].rows}
    assert costs == {"rope": "1.00", "alibi": "1.01", "nope": "1.50"}
    assert "seconds of training" not in judged.limits
    without = posenc.compare.judge(table_of("loss"))
    assert "rows" not in report_of(without).tables()
    assert "Not in the table: the size of the models, steps, seconds of training," in without.limits


def test_a_curve_in_the_table_tells_use_from_leads():
    """Rows of fewer steps: the last doubling saves less than the lead."""
    curve = [
        row | {"steps": steps, "loss": row["loss"] + more}
        for row in table_of("loss")
        for steps, more in ((100, 0.8), (250, 0.06), (500, 0.02), (1000, 0.0))
    ]
    judged = posenc.compare.judge(curve)
    assert judged.recommendation.startswith("Use rope: 4.77 bits")
    assert "1,000 steps: " in judged.limits and "fell by 0.03 bits" in judged.limits
    last = [row for row in curve if row["steps"] == 1000]
    assert posenc.compare.judge(last).recommendation.startswith("rope leads after this training")
    (training,) = [p for p in curve_plots(judged) if p.name == "training"]
    assert {*split_by_series(training.chart.data)} == {*LOSSES}  # no curves of training batches


def table_of_sizes() -> list[dict[str, object]]:
    """Losses of models of two sizes; alibi is 0.2 bits behind in the smaller, 0.1 in the larger."""
    return [
        {"encoding": name, "seed": seed, "size": size, "length": length, "bits_per_byte": bits}
        for size, behind in (("10M", 0.2), ("40M", 0.1))
        for length in (128, 512)
        for name, more in (("rope", 0.0), ("alibi", behind))
        for seed, bits in enumerate((1.0 + more, 1.01 + 0.99 * more))
    ]


def test_models_of_several_sizes_are_judged_each_and_their_leads_over_size(tmp_path, capsys):
    path = write_csv(tmp_path / "losses.csv", table_of_sizes())
    out = tmp_path / "page"
    judge_file(path, out=out, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["answer"].startswith("rope leads by 0.20 at 10.0 M, 0.10 at 40.0 M at the")
    assert [*facts["answers"]] == ["10M", "40M"] and "another size" not in facts["cannot_say"]
    for size, lead in (("10M", "+0.20"), ("40M", "+0.10")):
        assert f"(alibi {lead}" in facts["answers"][size]
        page_of_size = (out / size / "report.html").read_text("utf-8")
        assert facts["answers"][size].split("(")[0] in page_of_size
    page = (out / "report.html").read_text("utf-8")
    assert "How many tokens each size was trained on is not in the table." in page
    judged = posenc.compare.judge(path)
    assert judged.recommendation == facts["answers"]["40M"]
    (out / "40M/results.csv").write_text("mine", encoding="utf-8")
    before = (out / "10M/report.html").stat().st_mtime_ns
    with pytest.raises(ValueError, match=r"is not posenc's\. Choose another folder"):
        judge_file(path, out=out)
    assert (out / "10M/report.html").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="alibi lacks one of the sizes 10,000,000 and 40,000,000"):
        posenc.compare.judge(
            [row for row in table_of_sizes() if (row["encoding"], row["size"]) != ("alibi", "40M")]
        )


def test_figures_without_a_curve_are_left_out():
    assert [plot.name for plot in curve_plots(posenc.compare.judge(table_of("loss")))] == []
    longer = [row | {"length": 1024, "loss": row["loss"] + 1} for row in table_of("loss")]
    (plot,) = curve_plots(posenc.compare.judge(table_of("loss") + longer))
    assert plot.name == "by-length" and plot.caption.startswith("Loss by test length; broken lines")


def test_one_of_several_texts_is_judged():
    table = [row | {"task": "code"} for row in table_of("loss")]
    table += [row | {"task": "novel", "loss": 5 - row["loss"]} for row in table_of("loss")]
    judged = posenc.compare.judge(table, task="novel")
    assert (
        judged.recommendation.startswith("nope leads") and judged.table.name == "the table, novel"
    )
    with pytest.raises(ValueError, match="has no 'news', but code and novel"):
        posenc.compare.judge(table, task="news")


def test_a_curve_ends_with_the_loss_of_the_last_step_also_by_position():
    rows = [row | {"steps": steps} for row in table_of("bits") for steps in (100, 1000)]
    for row in rows:
        if row["steps"] == 1000:
            row["position"] = 0
    curve = posenc.compare.judge(rows).results[0].training
    assert [(point.step, point.valid) for point in curve] == [(100, 3.3), (1000, 3.3)]


def test_the_name_of_an_encoding_stays_where_bytes_become_tokens():
    table = [
        row | {"encoding": row["encoding"].replace("rope", "my bytes")} for row in table_of("bits")
    ]
    judged = posenc.compare.judge(table)
    assert judged.recommendation.startswith("my bytes leads after this training: 3.31 bits")
    assert " at 512 tokens." in judged.recommendation


def test_the_next_command_of_a_table_is_the_one_that_was_given(tmp_path, monkeypatch, capsys):
    """With its --columns, without which the table cannot be read."""
    records = [
        {"pe": row["encoding"], "seed": row["seed"], "length": row["length"], "loss": row["loss"]}
        for row in table_of("loss")
    ]
    write_csv(tmp_path / "losses.csv", records)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["posenc", "judge", "losses.csv", "--columns", "encoding=pe"])
    judge_file(Path("losses.csv"), "encoding=pe", out=Path("page"))
    assert "posenc judge losses.csv --columns encoding=pe\n" in capsys.readouterr().out


def test_how_the_table_was_read_is_said_on_the_terminal_the_page_and_in_json(tmp_path, capsys):
    path = write_csv(tmp_path / "losses.csv", table_of("loss"))
    judge_file(path, out=tmp_path / "page")
    shown = " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "page/report.html").read_text("utf-8")
    judge_file(path, out=tmp_path / "page", as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["table"]["loss_unit"] == "nats per token"
    for note in facts["table"]["notes"]:
        assert note in page
    for note in ("are taken as nats per token", "The shortest length, 512, is taken as that of"):
        assert note in shown and note in " ".join(facts["table"]["notes"])
