"""A trial of a task: its identity, its training, its scores, and the gate before the means."""

import csv
import dataclasses
import io
import json

import numpy as np
import pytest
import torch

from posenc import generate
from posenc.compare.judging.answer import conclude
from posenc.compare.judging.summary import has_learned, summarise_tasks
from posenc.compare.options import Options
from posenc.compare.page.numbers import csv_text
from posenc.compare.page.report import report_of
from posenc.compare.plan.encodings import read_encodings
from posenc.compare.plan.plan import plan_one_trial_per_task
from posenc.compare.results import CaseScore, Study, TrialResult
from posenc.compare.trial import train
from posenc.compare.trial.config import TrialConfig, read_trial, write_trial
from posenc.compare.trial.evaluate import likeliest_tokens, positions_for, score_cases, target_loss
from posenc.encodings.registry import create
from posenc.report.html_page import page_of
from posenc.report.report import Cell
from posenc.tasks.grids import grid_positions
from posenc.tasks.registry import TASKS
from posenc.tasks.task import Batch, Case

pytestmark = pytest.mark.usefixtures("undrawn")

TEXT = TrialConfig(
    encoding="rope",
    seed=0,
    corpus="none",
    train_length=16,
    test_lengths=(16, 24),
    steps=12,
    batch=4,
    width=32,
    layers=1,
    heads=2,
    kv_heads=2,
    lr=1e-3,
    device="cpu",
    precision="float32",
    torch="2.13.0",
)
COPY = dataclasses.replace(TEXT, task="copy", train_length=4, test_lengths=(4, 8))
NOTHING = np.empty(0, np.uint16)


def planned(*encodings, **options):
    return plan_one_trial_per_task(Options(**options), read_encodings(encodings or ("rope",)))


def result(encoding="rope", seed=0, exact=(1.0, 0.5), task="copy", **changes):
    config = dataclasses.replace(COPY, encoding=encoding, seed=seed, task=task)
    cases = tuple(CaseScore(n, "", e, e, e, e) for n, e in zip((4, 8), exact, strict=True))
    return TrialResult(config, parameters=9, by_case=cases, **changes)


def study_of(*results):
    return Study(
        format="posenc study 2",
        command="",
        started="",
        versions={},
        hardware={},
        corpus=None,
        trials=tuple(r.config for r in results),
        results=results,
    )


def test_a_folder_says_which_trial_it_has():
    assert TEXT.folder == f"rope-seed0-{TEXT.hash}"
    assert COPY.folder == f"rope-copy-seed0-{COPY.hash}"


def test_a_config_of_before_tasks_is_one_of_text(tmp_path):
    home = tmp_path / TEXT.folder
    home.mkdir()
    write_trial(home, TEXT)
    path = home / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    del fields["task"]
    path.write_text(json.dumps(fields), encoding="utf-8")
    assert read_trial(home) == TEXT


def test_each_task_brings_its_own_lengths_steps_and_batch():
    text, copy = planned(task=["text", "copy"])
    assert (text.train_length, text.test_lengths, text.steps, text.batch) == (
        128,
        (128, 256, 512, 1024),
        250,
        32,
    )
    assert (copy.train_length, copy.test_lengths, copy.steps, copy.batch) == (
        20,
        (20, 24, 30, 40, 80),
        2500,
        64,
    )
    (short,) = planned(task=["copy"], train_length=10, steps=7)
    assert (short.train_length, short.test_lengths, short.steps) == (10, (10, 20, 40), 7)
    assert short.corpus != copy.corpus  # other sequences


@pytest.mark.parametrize(
    "options, words",
    [
        ({"task": ["copi"]}, r"Unknown task 'copi'\. Did you mean 'copy'"),
        (
            {"task": ["copy", "recall"], "test_lengths": "40"},
            "--test-lengths: tasks have different",
        ),
        ({"task": ["copy", "recall"], "train_length": 9}, "--train-length: tasks have different"),
        ({"task": ["copy_512"], "test_lengths": "600"}, r"takes 2 to 512 symbols, got 600"),
        ({"task": ["offset"], "train_length": 9}, r"--train-length: the task offset takes 14"),
        ({"task": ["copy"], "test_lengths": "8"}, "8 is below --train-length 20"),
        ({"task": ["copy"], "text": ["book.txt"]}, "--text: none of the tasks reads a text"),
        ({"task": ["grid"]}, "--task grid: rope encodes one-dimensional positions"),
        ({"task": ["grid_count"]}, "--task grid_count: rope encodes one-dimensional positions"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options, words):
    with pytest.raises(ValueError, match=words) as refused:
        planned(**options)
    assert "\n" not in str(refused.value)


@pytest.mark.quick(3)  # a table, a rotation by rows and columns, one by three numbers
@pytest.mark.parametrize(
    "encoding", ["learned_2d", "sincos_2d", "axial_rope", "mixed_rope", "nope", "mrope"]
)
def test_encodings_of_rows_and_columns_learn_the_grid(encoding, tmp_path):
    (config,) = planned(encoding, task=["grid"])
    config = dataclasses.replace(
        config,
        width=64,
        layers=1,
        heads=2,
        kv_heads=2,
        steps=2,
        batch=2,
        device="cpu",
        precision="float32",
        test_lengths=(8, 9),
    )
    model, cursor = train.train_model(config, NOTHING, NOTHING, tmp_path, lambda *a, **k: None, 9)
    assert cursor.step == 2
    near, far = score_cases(model, TASKS["grid"], config)
    assert near.token_accuracy is not None
    reason = "it has 8 positions along an axis, and 9 are needed"
    assert far.cannot == (reason if encoding == "learned_2d" else None)


@pytest.mark.parametrize("task", ["grid_direction", "grid_count"])
def test_every_token_of_a_picture_sees_all_others(task, tmp_path):
    (config,) = planned("axial_rope", task=[task])
    assert config.test_lengths == (8, 16, 32)
    sizes = {"width": 32, "layers": 1, "heads": 2, "kv_heads": 2, "steps": 2, "batch": 2}
    here = {"device": "cpu", "precision": "float32", "test_lengths": (8, 9)}
    config = dataclasses.replace(config, **sizes, **here)
    model, _ = train.train_model(config, NOTHING, NOTHING, tmp_path, lambda *a, **k: None, 9)
    for score in score_cases(model, TASKS[task], config):
        assert score.exact_match == score.token_accuracy
    assert not train.encoding_shape(config).causal
    assert train.encoding_shape(dataclasses.replace(config, task="grid")).causal
    tokens, cells = torch.full((1, 17), 11), torch.from_numpy(grid_positions(4, 4))
    before = model(tokens, cells)
    tokens[0, -1] = 12
    assert not torch.allclose(model(tokens, cells)[0, 0], before[0, 0])


def test_what_works_in_causal_attention_only_reads_no_picture():
    with pytest.raises(ValueError, match="--task grid_count: nope works in causal attention only"):
        planned("nope", task=["grid_count"])
    planned("nope", task=["grid"])


def test_positions_of_the_grid_as_each_encoding_takes_them():
    batch = Batch(np.zeros((1, 5)), np.zeros((1, 5)), grid_positions(2, 2))
    shape = train.encoding_shape(dataclasses.replace(TEXT, width=64))
    three = positions_for(create("mrope", shape), batch, TEXT)
    assert three is not None
    assert three.tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2]]
    two = positions_for(create("axial_rope", shape), batch, TEXT)
    assert two is not None
    np.testing.assert_array_equal(two, grid_positions(2, 2))  # NaN equals NaN
    assert positions_for(create("nope", shape), batch, TEXT) is None


def test_the_grid_refuses_coordinates_that_are_no_cells():
    with pytest.raises(
        ValueError, match=r"axial_rope:frequencies_in_turns=true takes coordinates from -1 to"
    ):
        planned("axial_rope:frequencies_in_turns=true", task=["grid"])


def test_padding_changes_nothing():
    model = train.build_model(COPY)
    batch = TASKS["copy"].test_batch(Case(3), 4, 4)
    longer = Batch(
        np.pad(batch.tokens, ((0, 0), (0, 5))),
        np.pad(batch.targets, ((0, 0), (0, 5)), constant_values=-100),
    )
    losses = [target_loss(model, each, COPY).item() for each in (batch, longer)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_interrupted_training_on_a_task_gives_the_same_bits(tmp_path):
    def run(folder, event):
        folder.mkdir(exist_ok=True)
        return train.train_model(COPY, NOTHING, NOTHING, folder, event, 5)

    def stop(kind, **values):
        if kind == "step" and values["step"] == 7:
            raise InterruptedError

    whole, a = run(tmp_path / "whole", lambda *x, **y: None)
    with pytest.raises(InterruptedError):
        run(tmp_path / "halves", stop)
    resumed, b = run(tmp_path / "halves", lambda *x, **y: None)
    assert a.training == b.training
    assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))


def test_exact_match_is_that_of_greedy_decoding():
    config = dataclasses.replace(COPY, train_length=2, batch=64, lr=1e-2, width=64, steps=40)
    model = train.build_model(config)
    optimizer, task = train.optimizer_for(model, config), TASKS["copy"]
    batch = task.test_batch(Case(1), 60, 2)
    step, exact = 0, np.zeros(60, bool)
    while step < 40 and not 5 <= exact.sum() <= 55:  # until some are right and some are not
        train.take_step(model, optimizer, config, NOTHING, step)
        step += 1
        said, _ = likeliest_tokens(model, batch, config, task.end_token, 7)
        exact = ((said == batch.targets) | (batch.targets == -100)).all(1)
    assert 0 < exact.sum() < 60
    prompts = torch.from_numpy(batch.tokens[:, :3])
    written = generate(model, prompts, 2)[:, 3:].numpy()
    greedy = (written == batch.targets[:, 2:]).all(1)
    assert (exact == greedy).all()


def test_the_gate_reads_the_training_length_only():
    assert has_learned(result(exact=(0.9, 0.0)))
    assert not has_learned(result(exact=(0.89, 1.0)))
    assert not has_learned(result(exact=(float("nan"), 1.0)))


def test_what_was_not_learned_is_counted_and_enters_the_means():
    study = study_of(
        result(seed=0, exact=(1.0, 0.6)),
        result(seed=1, exact=(0.5, 0.0)),
        result("t5", seed=0, exact=(0.2, 0.1)),
    )
    rows = summarise_tasks(study)
    assert [(row.encoding, row.learned, row.num_seeds) for row in rows] == [
        ("rope", 1, 2),
        ("t5", 0, 1),
    ]
    assert [(case.mean, case.seeds) for case in rows[0].cases] == [
        (0.75, (1.0, 0.5)),
        (0.3, (0.6, 0.0)),
    ]
    cells = report_of(conclude(study)).tables()["scores-copy"].rows[1][2:4]
    assert [(str(cell.text), cell.second_line) for cell in cells] == [
        ("0.200", "0.20"),
        ("0.100", "0.10"),
    ]


def test_what_cannot_run_says_why():
    cannot = dataclasses.replace(
        result("learned"),
        by_case=(CaseScore(4, "", 1.0, 1.0, 1.0, 1.0), CaseScore(8, cannot="it has 10 positions")),
    )
    study = study_of(cannot)
    (row,) = summarise_tasks(study)
    assert row.cases[1].mean is None and row.cases[1].seeds == ()
    shown, *without_a_model = report_of(conclude(study)).tables()["scores-copy"].rows
    assert {policy[1] for policy in without_a_model} == {"no model"}
    assert shown[3] == Cell("cannot", note="learned: it has 10 positions")


def test_page_and_spreadsheet_of_a_study_without_text_hold_the_tasks(tmp_path):
    study = study_of(result(seed=0), result(seed=1, exact=(0.5, 0.0)), result("t5"))
    study = conclude(study)
    assert Study.from_json(study.to_json()) == study
    page_of(report_of(study)).write(tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    for words in (
        "The task copy",
        "0.250<small>0.50, 0.00</small>",
        "<small>1/2</small>",
        "training on copy",
        "highest exact match on copy",
    ):
        assert words in html
    rows = list(csv.DictReader(io.StringIO(csv_text(study))))
    found = [r for r in rows if r["measure"] == "exact_match" and r["at"] == "8"]
    assert [(r["encoding"], r["seed"], r["task"], float(r["bits_per_byte"])) for r in found] == [
        ("rope", "0", "copy", 0.5),
        ("rope", "1", "copy", 0.0),
        ("t5", "0", "copy", 0.5),
    ]
