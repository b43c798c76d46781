"""The leaderboard: rows that stay as they were published, and the studies that they make."""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from posenc.command_line.errors import Stopped
from posenc.compare.defaults import ALL_TASKS
from posenc.compare.results import (
    CaseScore,
    CorpusInfo,
    LengthScore,
    PositionScore,
    Timing,
    TrainingPoint,
    TrialResult,
)
from posenc.compare.run_study import check_out_folder
from posenc.compare.trial.result_files import is_done, load_result
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
    tried = [
        changed(row, lr=0.5, test_lengths=(16,)) for row in rows() if row.result.config.is_on_text
    ]
    with pytest.raises(ValueError, match=r"has t5 seed 0 at lr 0.5 twice"):
        study_of(rows(), [*tried, tried[0]], "novel.jsonl")


def test_rows_of_two_sources_and_of_a_users_encoding_are_refused():
    made = rows()
    found = [changed(row, source="abc") for row in made]
    assert len(study_of([*found[:-1], changed(found[-1], source="")]).results) == 18
    with pytest.raises(ValueError, match=r"rope seed 2 of two codes .def and abc"):
        study_of([*found[:-1], changed(found[-1], source="def")])
    tried = [changed(found[-1], source="def", test_lengths=(16,), lr=0.5)]
    with pytest.raises(ValueError, match=r"rope seed 2 at lr 0.5 of two codes .def and abc"):
        study_of(found, tried)
    with pytest.raises(ValueError, match=r"rope seed 2 of two codes .0123"):
        study_of([*made[:-1], changed(made[-1], code="0123")])


def test_a_file_that_would_be_left_out_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "published"
    add_rows(folder / "novel.jsonl", rows())
    (folder / "board.json").touch()
    monkeypatch.setattr(published_trials, "published_file", lambda name: folder / name)
    assert list(published_trials.published_studies()) == ["novel"]
    *others, last = rows()
    (folder / "novel.jsonl").unlink()
    add_rows(folder / "novel.jsonl", others)
    name = last.result.config.encoding
    with pytest.raises(ValueError, match=rf"novel.jsonl lacks trials of {name}; run them"):
        published_trials.published_studies()
    add_rows(folder / "novel.jsonl", [last])
    (folder / "novel_rates.jsonl").touch()
    with pytest.raises(ValueError, match=r"novel_rates.jsonl has no row"):
        published_trials.published_studies()
    (folder / "novel_rates.jsonl").unlink()
    (folder / "novel.jsonl").rename(folder / "novel_rates.jsonl")
    with pytest.raises(
        ValueError, match=r"novel_rates.jsonl has rates for novel.jsonl, which is missing"
    ):
        published_trials.published_studies()
    (folder / "novel_rates.jsonl").unlink()
    add_rows(folder / "book.jsonl", [changed(r, lr=0.1 * (1 + i)) for i, r in enumerate(rows())])
    with pytest.raises(ValueError, match=r"^book.jsonl .* lr 0.*book_rates.jsonl"):
        published_trials.published_studies()


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


def test_each_text_is_a_study_of_its_own(tmp_path, monkeypatch):
    def of(text, base):
        made = [
            dataclasses.replace(r, config=dataclasses.replace(r.config, corpus=text))
            for name, bits in (("t5", base), ("rope", base + 0.2))
            for r in (of_text(name, seed, (bits, bits + 0.1 * seed)) for seed in SEEDS)
        ]
        return dataclasses.replace(study(*made), corpus=dataclasses.replace(INFO, hash=text))

    folder = tmp_path / "published"
    for name, each in {"code": of("a", 2.0), "novel": of("b", 1.5)}.items():
        add_rows(folder / f"{name}.jsonl", rows(each))
    (folder / "board.json").touch()
    monkeypatch.setattr(published_trials, "published_file", lambda name: folder / name)
    found = published_trials.published_studies()
    assert {name: board.corpus.hash for name, board in found.items()} == {"code": "a", "novel": "b"}


def test_rows_at_another_rate_than_the_chosen_one_are_refused():
    made = [of_text("rope", seed, (2.0, 2.1)) for seed in SEEDS]

    def tried(rate, valid):
        config = dataclasses.replace(made[0].config, lr=rate, test_lengths=(16,))
        return dataclasses.replace(made[0], config=config, training=(TrainingPoint(2, 2.0, valid),))

    one, other = tried(made[0].config.lr, 2.0), tried(0.5, 2.5)
    whole = study_of(rows(study(*made)), rows(study(one, other)))
    assert [check.chosen for check in whole.rates] == [made[0].config.lr]
    with pytest.raises(ValueError, match=r"at a learning rate of 0\.\d+, and 0\.5 was chosen"):
        study_of(
            rows(study(*made)),
            rows(study(one, dataclasses.replace(other, training=(TrainingPoint(2, 2.0, 1.5),)))),
        )
    wide = [
        dataclasses.replace(r, config=dataclasses.replace(r.config, width=99)) for r in (one, other)
    ]
    with pytest.raises(ValueError, match=r"different recipes for text: width .*99"):
        study_of(rows(study(*made)), rows(study(*wide)))
    with pytest.raises(ValueError, match="and None was chosen"):
        study_of(rows(board()), rows(study(one, other)))


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


@pytest.mark.slow
def test_the_script_refuses_what_it_cannot_run_before_it_writes(tmp_path):
    where = ["--out", str(tmp_path / "runs"), "--rows", str(tmp_path / "trials.jsonl")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments/leaderboard.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--seeds" in done.stdout
    refused = subprocess.run(
        [sys.executable, str(ROOT / "experiments/leaderboard.py"), "roqe", "--commit", "x", *where],
        capture_output=True,
        text=True,
    )
    assert refused.returncode != 0 and "roqe" in refused.stderr
    assert not (tmp_path / "trials.jsonl").exists()


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "given, words",
    [
        (["nosuch"], "nosuch"),
        (["own.py:Mine"], "the leaderboard has posenc's own encodings only, and this one is of a"),
        (
            ["learned:max_positions=9", "--tasks", "text"],
            "cannot be trained on text at --train-length 128",
        ),
        (["--precision", "float16"], "--precision must be auto, float32 or bfloat16"),
        (["--seeds", "0"], "--seeds must be a whole number of at least 1, got 0."),
        (["--seeds", "-3"], "--seeds must be a whole number of at least 1, got -3."),
        (["--steps", "0"], "--steps must be a whole number of at least 1, got 0."),
        (
            [
                "--tasks",
                "text",
                "--steps",
                "9",
                "--rows",
                str(ROOT / "results/leaderboard/code.jsonl"),
            ],
            "--rows: its trials of text have steps 3000, and these would have 9; batch 16, ",
        ),
        (
            ["--tasks", "copy", "--rows", str(ROOT / "results/ablations/copy_longer.jsonl")],
            "--rows: its trials of copy have steps 10000, and these would have 2500",
        ),
        (["--workers", "0"], "--workers must be a whole number of at least 1, got 0."),
        (["--tasks"], "argument --tasks: expected at least one argument"),
        (["--out", "file"], "--out: file is not a folder."),
        (["--out", "others"], "was not written by posenc compare (it contains letter.txt)"),
        (["--rows", "others"], "--rows: others is not a file."),
        (["--rows", "file"], "file, line 1: "),
        (["--rows", "file/rows"], "--rows: file is not a folder."),
    ],
)
def test_what_is_wrong_is_refused_before_a_piece(given, words, tmp_path, monkeypatch, run):
    script = experiment("leaderboard")
    add_rows(tmp_path / "rows", rows(study(result("t5", 0, (1.0, 0.8), "copy"))))
    (tmp_path / "file").write_text("damaged", encoding="utf-8")
    mine = "from posenc import RoPE\nclass Mine(RoPE): pass\n"
    (tmp_path / "own.py").write_text(mine, encoding="utf-8")
    (tmp_path / "others").mkdir()
    (tmp_path / "others/letter.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "run_study", lambda *a, **k: pytest.fail("it was run"))
    code, _, err = run(script, "--out", "new", "--rows", "rows", "--commit", "x", *given)
    said = err.splitlines()[-1]
    assert code == 2 and words in said and said.startswith("leaderboard.py: error: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_trials_of_another_recipe_are_refused_before_any_is_trained(tmp_path, monkeypatch, run):
    script = experiment("leaderboard")
    monkeypatch.setattr(script, "run_study", lambda *a, **k: pytest.fail("it was run"))
    path, out = tmp_path / "known.jsonl", tmp_path / "runs"
    usual = ("t5", "--tasks", "copy", "--seeds", "1")
    given = argparse.Namespace(
        precision="bfloat16",
        workers=1,
        out=out,
        steps=None,
        lr=0.002,
        search_lr=True,
        text=None,
        batch=None,
    )
    (plan,) = script.make_plan(script.piece(["t5"], "copy", 1, given)).task_trials
    good = script.rate_trials([plan])

    def refused(config, *more, rates=()):
        for file, configs in ((path, [config]), (script.rates_file(path), rates)):
            file.unlink(missing_ok=True)
            cases = tuple(CaseScore(n, "", 1.0, 1.0, 1.0, 1.0) for n in plan.test_lengths)
            made = [
                TrialResult(c, by_case=cases[: len(c.test_lengths)], timing=Timing(9.0, 2.0, 0.1))
                for c in configs
            ]
            if made:
                add_rows(file, rows(study(*made)))
        where = ("--out", out, "--rows", path, "--commit", "x")
        code, _, err = run(script, *usual, *more, *where)
        assert code == 2 and not out.exists()
        return err.splitlines()[-1]

    for change, words in (
        ({"recipe": 4}, f"recipe 4, and these would have {plan.recipe}"),
        ({"torch": "1.0"}, "torch 1.0, and"),
        ({"batch": 3}, "batch 3, and these would have 64"),
        ({"lr": 0.5}, "lr 0.5, and these would have 0.002"),
        ({"source": "abc", "encoding": "t5"}, "t5 of source abc, and these would have "),
    ):
        said = refused(dataclasses.replace(plan, **change))
        assert words in said and "--rows copy-2.jsonl --out runs/copy-2" in said
    chosen = dataclasses.replace(plan, lr=0.004)
    said = refused(dataclasses.replace(plan, lr=0.5), "--search-lr", rates=good)
    assert "lr 0.5, and these would have 0.001/0.002/0.004" in said
    narrow = script.rate_trials([dataclasses.replace(plan, width=8)])
    said = refused(chosen, "--search-lr", rates=narrow)
    assert "known_rates.jsonl: its trials of copy have width 8, and these would have 64" in said
    for given, rates, has in (("--search-lr",), (), "no"), ((), good, "the"):
        said = refused(plan, *given, rates=rates)
        assert f"known_rates.jsonl has {has} trials that chose rates of copy" in said
    with pytest.raises(pytest.fail.Exception, match="it was run"):
        refused(chosen, "--search-lr", rates=good)


def test_code_without_a_commit_is_asked_for_it(tmp_path, monkeypatch):
    script = experiment("leaderboard")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="--commit: git knows none of"):
        script.commit()


def test_published_trials_are_not_run_again_and_others_are(tmp_path):
    script = experiment("leaderboard")
    timed = dataclasses.replace(result("t5", 0, (1.0, 0.8), "copy"), timing=Timing(9.0, 2.0, 0.1))
    assert script.lay_out(rows(study(timed)), tmp_path) == 1
    assert load_result(tmp_path, timed.config) == timed
    assert script.lay_out(rows(study(timed)), tmp_path) == 0
    other = dataclasses.replace(timed.config, recipe=TEXT.recipe + 1)
    older = rows(study(dataclasses.replace(timed, config=other)))
    assert script.lay_out(older, tmp_path / "older") == 0
    check_out_folder(tmp_path)  # what a study asks of its folder
    for change in ({"seed": 1}, {"recipe": TEXT.recipe + 1}):
        assert not is_done(tmp_path, dataclasses.replace(timed.config, **change))


@pytest.mark.parametrize("task, usual", [("copy", None), ("text", 600)])
def test_steps_take_the_place_of_the_suites(task, usual, tmp_path):
    script = experiment("leaderboard")
    given = argparse.Namespace(
        precision="bfloat16",
        workers=1,
        out=tmp_path,
        steps=None,
        lr=0.002,
        search_lr=False,
        text=["a.txt"],
        batch=None,
    )
    assert script.piece(["rope"], task, 1, given).steps == usual
    given.steps = 9
    assert script.piece(["rope"], task, 1, given).steps == 9
    assert script.piece(["rope"], task, 1, given).text == (["a.txt"] if task == "text" else None)


@pytest.mark.slow
def test_chosen_rates_have_rows_of_their_own_and_are_not_tried_again(tmp_path, monkeypatch, run):
    script = experiment("leaderboard")
    monkeypatch.setattr(script, "SUITE_SIZES", {"width": 8, "layers": 1, "heads": 2})
    path = tmp_path / "trials.jsonl"
    given = (
        "rope",
        "--tasks",
        "offset",
        "--steps",
        "5",
        "--search-lr",
        "--seeds",
        "1",
        "--rows",
        path,
        "--commit",
        "x",
        "--workers",
        "1",
    )
    assert run(script, *given, "--out", tmp_path / "first")[0] == 0
    rates = tmp_path / "trials_rates.jsonl"
    tried = read_rows(rates)
    assert next(row.result.config.lr for row in read_rows(path)) in (0.001, 0.002, 0.004)
    assert sorted(row.result.config.lr for row in tried) == [0.001, 0.002, 0.004]
    assert {row.result.config.steps for row in tried} == {1}
    path.unlink()
    code, out, _ = run(script, *given, "--out", tmp_path / "second")
    assert code == 0 and f"3 trials are taken from {rates}" in out
    assert [row.hash for row in read_rows(rates)] == [row.hash for row in tried]
    timed = [row.result.timing for row in read_rows(rates)]
    assert timed == [row.result.timing for row in tried]


def test_a_piece_that_is_stopped_keeps_the_rows_of_what_is_done(tmp_path, monkeypatch, run):
    script = experiment("leaderboard")
    made, out, path = board(), tmp_path / "runs", tmp_path / "trials.jsonl"

    def stopped(options, show):
        out.mkdir()
        (out / "study.json").write_text(made.to_json(), encoding="utf-8")
        raise Stopped("the same command goes on from here")

    monkeypatch.setattr(script, "run_study", stopped)
    where = ("--out", out, "--rows", path, "--commit", "x")
    assert run(script, "t5", "rope", *where)[0] == 130
    assert [row.result for row in read_rows(path)] == sorted(
        made.results, key=lambda result: result.config.folder
    )
