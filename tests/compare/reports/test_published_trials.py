"""The leaderboard: rows that stay as they were published, and the studies that they make."""

import dataclasses
import json
from pathlib import Path

import pytest

from posenc.compare.defaults import ALL_TASKS
from posenc.compare.results import (
    CorpusInfo,
    LengthScore,
    PositionScore,
    TrainingPoint,
    TrialResult,
)
from tests.compare.test_tasks import TEXT, result
from tests.compare.test_tasks import study_of as study
from tests.experiment import experiment

ROOT = Path(__file__).parents[3]
published_trials = experiment("published_trials")
read_rows, study_of = published_trials.read_rows, published_trials.study_of
add_rows, rows_of = published_trials.add_rows, published_trials.rows_of
SEEDS = (0, 1, 2)
INFO = CorpusInfo("a book", "none", 1, 900, 50, 50, "by contiguous stretches")


def of_text(encoding, seed, bits):
    config = dataclasses.replace(TEXT, encoding=encoding, seed=seed)
    points = tuple(TrainingPoint(step, 2.0, 2.0) for step in (6, 12))
    lengths = tuple(LengthScore(n, b) for n, b in zip((16, 24), bits, strict=True))
    places = tuple(PositionScore(start, start + 8, 2.0) for start in (0, 8, 16))
    return TrialResult(
        config,
        training=points,
        by_length=lengths,
        by_position=places,
        by_context=lengths,
        parameters=9,
    )


def board():
    results = [
        r
        for seed in SEEDS
        for name, base in (("t5", 0.8), ("rope", 0.4))
        for r in (
            result(name, seed, (1.0, base + 0.01 * seed), "copy"),
            result(name, seed, (1.0, base - 0.01 * seed), "reverse"),
            of_text(name, seed, (2.0, 3.0 - base)),
        )
    ]
    return dataclasses.replace(study(*results), corpus=INFO)


def rows(made=None, commit="abc1234"):
    return rows_of(board() if made is None else made, commit)


def test_rows_come_back_as_the_study_they_were(tmp_path):
    path = tmp_path / "board" / "trials.jsonl"
    assert add_rows(path, rows()) == 18
    assert add_rows(path, rows()) == 0
    assert len(path.read_text(encoding="utf-8").splitlines()) == 18
    back = study_of(read_rows(path))
    made = sorted(board().results, key=lambda result: result.config.folder)
    assert list(back.results) == made and back.corpus == INFO
    assert back.versions["commit"] == "abc1234"
    fields = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    assert {"hash", "commit", "versions", "hardware", "result"} <= set(fields)
    assert fields["result"]["config"]["recipe"] == TEXT.recipe


@pytest.mark.parametrize("change", ["0.41", "seed"])
def test_a_changed_row_is_refused_with_its_line(tmp_path, change):
    path = tmp_path / "trials.jsonl"
    add_rows(path, rows())
    lines = path.read_text(encoding="utf-8").splitlines()
    index = next(i for i, line in enumerate(lines) if "0.41" in line)
    lines[index] = lines[index].replace(change, "0.42" if change == "0.41" else "sead")
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ValueError, match=f"trials.jsonl, line {index + 1}: "):
        read_rows(path)


def test_a_published_row_keeps_the_name_that_it_was_given(tmp_path):
    path = tmp_path / "trials.jsonl"
    old = dataclasses.replace(rows()[0], hash="0" * 12)
    assert add_rows(path, [old]) == 1
    assert add_rows(path, [rows()[0]]) == 0
    assert [row.hash for row in read_rows(path)] == ["0" * 12]


def test_published_numbers_do_not_change_under_one_recipe(tmp_path):
    path = tmp_path / "trials.jsonl"
    add_rows(path, rows())
    before = path.read_text(encoding="utf-8")
    (first, *_) = board().results
    other = dataclasses.replace(first, parameters=first.parameters + 1)
    with pytest.raises(ValueError, match=r"other numbers there .*needs a new recipe number"):
        add_rows(path, rows(study(other), "def5678"))
    assert path.read_text(encoding="utf-8") == before


def test_rows_of_other_recipes_and_texts_are_not_mixed():
    later = dataclasses.replace(
        board().results[0], config=dataclasses.replace(board().results[0].config, recipe=99)
    )
    with pytest.raises(ValueError, match=r"different recipes for .*recipe \d+/99"):
        study_of([*rows(), *rows(study(later))])
    longer = dataclasses.replace(
        board().results[1], config=dataclasses.replace(board().results[1].config, steps=99, seed=7)
    )
    with pytest.raises(ValueError, match="different recipes for reverse: steps 12/99"):
        study_of([*rows(), *rows(study(longer))])
    other = dataclasses.replace(INFO, hash="other")
    with pytest.raises(ValueError, match="rows of 2 texts"):
        study_of([*rows(), dataclasses.replace(rows()[-1], corpus=other)])
    with pytest.raises(ValueError, match="has no row"):
        study_of([])


def changed(row, **fields):
    config = dataclasses.replace(row.result.config, **fields)
    return dataclasses.replace(row, result=dataclasses.replace(row.result, config=config))


def test_a_trial_that_is_there_twice_is_refused():
    first, *others = rows()
    better = dataclasses.replace(first, result=dataclasses.replace(first.result, parameters=8))
    for again in (first, better, changed(first, source="abc")):
        with pytest.raises(ValueError, match=r"has t5 on (copy|reverse) seed 0 twice"):
            study_of([first, *others, again])


def test_rows_of_two_sources_and_of_a_users_encoding_are_refused():
    made = rows()
    found = [changed(row, source="abc") for row in made]
    assert len(study_of([*found[:-1], changed(found[-1], source="")]).results) == 18
    with pytest.raises(ValueError, match=r"rope seed 2 of two codes .def and abc"):
        study_of([*found[:-1], changed(found[-1], source="def")])
    with pytest.raises(ValueError, match=r"rope seed 2 of two codes .0123"):
        study_of([*made[:-1], changed(made[-1], code="0123")])


def test_a_file_without_rows_or_with_too_few_is_refused():
    published_trials.check_whole("book.jsonl", rows())
    *others, last = rows()
    name = last.result.config.encoding
    with pytest.raises(ValueError, match=rf"book.jsonl lacks trials of {name}; run them"):
        published_trials.check_whole("book.jsonl", others)
    with pytest.raises(ValueError, match=r"book.jsonl has no row"):
        published_trials.check_whole("book.jsonl", [])
    with pytest.raises(ValueError, match=r"^book.jsonl .* different recipes .* lr 0"):
        study_of([changed(r, lr=0.1 * (1 + i)) for i, r in enumerate(rows())], "book.jsonl")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"task": "juggling"}, "Unknown task 'juggling'. Known: text, copy"),
        ({"objective": "nonsense"}, "objective must be causal, masked or seq2seq"),
        ({"test_lengths": ()}, "test_lengths must begin with train_length"),
        (
            {"test_lengths": (16, 24, 99)},
            "expected scores at 16; 24; 99, its training length first, got 16; 24.",
        ),
        ({"bits": 1e50}, "expected losses of 0 to 100 bits, got 1e+50."),
        ({"bits": -0.1}, "expected losses of 0 to 100 bits, got -0.1."),
    ],
)
def test_a_row_that_no_trial_gives_is_refused_with_its_line(tmp_path, change, words):
    path = tmp_path / "rows.jsonl"
    if "bits" in change:
        bad = rows(study(of_text("t5", 0, (2.0, change["bits"]))))
    else:
        bad = [changed(rows(study(of_text("t5", 0, (2.0, 2.1))))[0], **change)]
    add_rows(path, bad)
    with pytest.raises(ValueError) as caught:
        read_rows(path)
    said = str(caught.value)
    assert (
        said.startswith(f"{path}, line 1: ")
        and words in said
        and ".." not in said.replace("...", "")
    )


def test_a_row_that_lacks_a_test_is_refused_and_what_is_no_text_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    whole = result("t5", 0, (1.0, 0.8), "copy")
    add_rows(path, rows(study(dataclasses.replace(whole, by_case=whole.by_case[:1]))))
    with pytest.raises(
        ValueError, match=r"line 1: .*expected scores at 4; 8, its training length first, got 4\."
    ):
        read_rows(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: .*0xff"):
        read_rows(path)


def test_a_line_separator_inside_a_row_does_not_end_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    info = dataclasses.replace(INFO, name="a\u2028book\x85")
    add_rows(path, rows(dataclasses.replace(board(), corpus=info)))
    assert study_of(read_rows(path)).corpus == info


def test_the_published_rows_are_of_the_suite():
    found = published_trials.published_rows()
    board = study_of(found)
    assert {trial.task for trial in board.trials} <= set(ALL_TASKS)
    sizes = {(t.width, t.layers, t.heads, t.kv_heads, t.lr) for t in board.trials}
    assert sizes == {(64, 3, 4, 4, 0.002)}
    for row in found:
        assert row.commit and row.versions["torch"] and row.hardware["processor"]


def test_the_rows_of_copying_for_longer_stand_by_themselves():
    longer = read_rows(ROOT / "results/ablations/copy_longer.jsonl")
    assert {t.steps for t in study_of(longer).trials} == {10000}
    assert not {row.hash for row in longer} & {
        row.hash for row in published_trials.published_rows()
    }
    with pytest.raises(ValueError, match="different recipes for copy: steps 10000/2500"):
        study_of([*longer, *published_trials.published_rows()])
