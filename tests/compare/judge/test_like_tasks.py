"""Text among the tasks, and what a study says of tasks like its own."""

import dataclasses
import html
import io
import math

import pytest
from rich.console import Console

from posenc.compare.judge import like_tasks, pooled
from posenc.compare.judge.pooled import text_scores
from posenc.compare.judge.summary import summarise_tasks
from posenc.compare.judge.verdict import say_for_what
from posenc.compare.page import tables
from posenc.compare.page.page import make_page
from posenc.compare.results import LengthScore, TrialResult
from tests.compare.test_tasks import TEXT, result, study_of

LOSSES = {  # bits per byte at the training length and at both longer ones
    ("nope", 0): (3.0, 4.0, 5.0),
    ("nope", 1): (3.2, 4.4, 5.4),
    ("t5", 0): (2.1, 2.1, 2.2),
    ("t5", 1): (1.9, 1.9, 2.0),
    ("rope", 0): (2.0, 3.0, 9.0),
    ("rope", 1): (2.2, 2.4, 2.6),
}


def text_trial(encoding, seed, losses, **changes):
    lengths = tuple(16 * 2**i for i in range(len(losses)))
    config = dataclasses.replace(
        TEXT, encoding=encoding, seed=seed, train_length=16, test_lengths=lengths, **changes
    )
    found = tuple(
        LengthScore(n, bits, "it ends" if bits is None else None)
        for n, bits in zip(lengths, losses, strict=True)
    )
    return TrialResult(config, parameters=9, by_length=found)


def text_study(losses=LOSSES, *more):
    return study_of(*(text_trial(*key, each) for key, each in losses.items()), *more)


def test_text_goes_from_the_loss_of_nope_to_the_lowest_at_the_training_length():
    found = text_scores(text_study())
    zero, best = (4.5 + 4.9) / 2, 2.0  # t5 at 16, not the 1.95 that its second seed has beyond
    assert found["t5", 0] == pytest.approx((zero - 2.15) / (zero - best))
    assert found["rope", 1] == pytest.approx((zero - 2.5) / (zero - best))
    assert found["rope", 0] == 0 and found["t5", 1] == 1  # cut
    assert found["nope", 0] == pytest.approx(0.2 / (zero - best)) and found["nope", 1] == 0


@pytest.mark.parametrize(
    "losses",
    [
        {key: value for key, value in LOSSES.items() if key[0] != "nope"},
        LOSSES | {("t5", s): (6.0, 6.0, 6.0) for s in (0, 1)}
        | {("rope", s): (6.0, 6.0, 6.0) for s in (0, 1)}
        | {("nope", s): (6.0, 4.0, 5.0) for s in (0, 1)},
        {("nope", 0): (3.0, 4.0, math.nan), ("t5", 0): (2.1, 2.1, 2.2)},
    ],
    ids=["without nope", "nope is not above the best", "nope has no number"],
)  # fmt: skip
def test_without_a_scale_text_has_no_score(losses):
    assert text_scores(text_study(losses)) == {}
    assert "text" not in pooled.scores_of(text_study(losses)).tasks


def test_a_class_of_that_name_and_what_was_not_checked_give_no_scale():
    trials = [text_trial(*key, each, code="x" * 8 if key[0] == "nope" else "")
              for key, each in LOSSES.items()]  # fmt: skip
    assert text_scores(study_of(*trials)) == {}
    unchecked = dataclasses.replace(text_study(), unchecked={"t5": "it sees later tokens"})
    found = text_scores(unchecked)
    assert {name for name, _ in found} == {"nope", "rope"}
    assert found["rope", 1] == pytest.approx((4.7 - 2.5) / (4.7 - 2.1))  # and t5 is not the best


@pytest.mark.parametrize("losses", [(1.0, None, None), (math.nan, 2.0, 2.0), (1.0, math.inf, 2.0)])
def test_who_cannot_run_a_length_or_has_no_number_there_has_no_score(losses):
    found = text_scores(text_study({("learned", 0): losses} | LOSSES))
    assert ("learned", 0) not in found and found == text_scores(text_study())


def with_tasks(tasks=("copy", "recall", "offset"), seeds=3):
    far = {"nope": 0.2, "t5": 0.5, "rope": 0.4}
    cases = [
        result(name, seed, (1.0, value + 0.05 * i * (-1) ** seed + 0.01 * seed), task)
        for name, value in far.items()
        for i, task in enumerate(tasks)
        for seed in range(seeds)
    ]
    text = {(name, seed): (2.0 + 0.1 * seed, 2.0 + i, 2.0 + i)
            for i, name in enumerate(("t5", "rope", "nope")) for seed in range(seeds)}  # fmt: skip
    study = text_study(text, *cases)
    return dataclasses.replace(study, tasks=summarise_tasks(study))


def rows_of(study):
    return like_tasks.like_task_rows(study, pooled.counted_names(pooled.pooled_rows(study)))


def test_text_is_pooled_and_has_no_sentence_of_a_task():
    study = with_tasks()
    assert not [line for line in say_for_what(study, study.tasks) if "For text" in line]
    assert pooled.scores_of(study).tasks[0] == "text"
    assert {row[0]: row[3] for row in pooled.pooled_rows(study)[1:]} == {
        "t5": "12/12", "rope": "12/12", "nope": "12/12",
    }  # fmt: skip


def test_differences_and_probabilities_stand_beside_the_pooled_scores():
    header, *rows = rows_of(with_tasks())
    assert header == [
        "encoding", "against rope", "better than rope", "against nope", "better than nope",
    ]  # fmt: skip
    found = {row[0]: row[1:] for row in rows}
    assert found["rope"][:2] == found["nope"][2:] == ["–", "–"]
    assert found["t5"][0].startswith("+0.") and " ± " in found["t5"][0]
    assert found["t5"][3] == "1.00"  # every pair says it, which is no evidence of another task
    value, _, interval = found["t5"][1].partition(" (")
    low, high = map(float, interval.removesuffix(")").split("–"))
    assert 0 <= low < float(value) < high <= 1
    rope, nope = float(found["rope"][2].split()[0]), float(found["nope"][0].split()[0])
    assert rope == -nope and float(found["rope"][3][:4]) + float(found["nope"][1][:4]) == 1


def test_two_tasks_have_no_interval_and_one_has_no_row():
    two = study_of(*(r for r in with_tasks().results if r.config.task in ("copy", "recall")))
    found = {row[0]: row[1:] for row in rows_of(two)[1:]}
    assert found["t5"][0].endswith(", few tasks") and "(" not in found["t5"][1]
    one = study_of(*(r for r in two.results if r.config.task == "copy"))
    assert rows_of(one) == []
    no_anchor = study_of(*(r for r in two.results if r.config.encoding == "t5"))
    assert rows_of(no_anchor) == []


def test_terminal_and_page_show_it(tmp_path):
    study, out = with_tasks(), io.StringIO()
    for table in tables.pooled_tables(study):
        Console(file=out, width=200).print(table)
    make_page(study).write(tmp_path / "report.html")
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    for words in (like_tasks.TITLE, "better than rope", "1.00"):
        assert words in out.getvalue() and words in page
    assert like_tasks.MEANING in page and pooled.SCORE in page
