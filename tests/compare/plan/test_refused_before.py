"""Encodings that cannot be trained and invalid options are refused before anything is written."""

import re
from pathlib import Path

import pytest

from posenc import compare
from posenc.compare import run_study
from posenc.compare.options import Options, check_options
from posenc.compare.plan.cost import check_cost
from posenc.compare.plan.learning_rate_search import RATE_FACTORS
from tests.compare.test_tasks import planned as of_options

NUMPY = '''
import numpy as np
import torch
from dataclasses import replace
from posenc import Learned


class Mine(Learned):
    """Reads a number that it computes, which has none without memory."""

    def __init__(self, embed_dim):
        super().__init__(64, embed_dim)
        self.first = float(self.weight.detach().numpy()[0, 0])

    @classmethod
    def from_shape(cls, shape, **options):
        return cls(shape.embed_dim, **options)
'''


@pytest.mark.parametrize("spelt", ["needle-by-meaning", "needle_by_meaning"])
def test_a_task_may_be_spelt_with_hyphens(spelt):
    (trial,) = of_options("rope", task=[spelt, "needle_by_meaning"])
    assert trial.task == "needle_by_meaning"


def planned(encoding="rope", **options):
    """The trials, once their cost was looked at."""
    trials = of_options(encoding, **options)
    check_cost(trials, [encoding], 1, 1, yes=True)
    return trials


@pytest.mark.parametrize(
    "encoding, options, why",
    [
        ("learned_2d", {}, "12 positions, and 128 are needed"),
        ("learned_2d", {"objective": "masked"}, "12 positions, and 128 are needed"),
        ("learned_2d", {"objective": "seq2seq"}, "8 positions, and 64 are needed"),
        ("learned_2d", {"task": ["copy"]}, "7 positions, and 42 are needed"),
        ("learned_2d", {"task": ["text", "flip_flop"]}, "12 positions, and 128 are needed"),
        ("learned_2d", {"task": ["flip_flop"], "train_length": 30}, "8 positions, and 59 are"),
        ("learned:max_positions=64", {}, "64 positions, and 128 are needed"),
        ("learned:max_positions=64+rope", {}, "64 positions, and 128 are needed"),
        ("learned:max_positions=63", {"objective": "seq2seq"}, "63 positions, and 64 are needed"),
        ("learned:max_positions=41", {"task": ["copy"]}, "41 positions, and 42 are needed"),
        (
            "learned_2d:height=7,width=9",
            {"task": ["grid"]},
            "7 positions along an axis, and 8 are needed",
        ),
    ],
)
def test_fewer_positions_than_training_has_tokens_are_refused(encoding, options, why):
    with pytest.raises(ValueError, match=r" cannot be trained on \w+ at --train-length \d+: ") as e:
        planned(encoding, **options)
    assert str(e.value).startswith(encoding) and f"it has {why}" in str(e.value)
    assert "Use a shorter one, give the encoding more positions, or leave it out." in str(e.value)


@pytest.mark.parametrize(
    "encoding, options",
    [
        ("learned", {}),
        ("learned", {"task": ["copy", "flip_flop", "copy_512"]}),
        ("learned:max_positions=128", {}),
        ("learned:max_positions=64", {"objective": "seq2seq"}),
        ("learned:max_positions=42", {"task": ["copy"]}),
        ("learned_2d", {"task": ["grid"]}),
        ("learned_2d:height=8,width=9", {"task": ["grid"]}),
    ],
)
def test_what_lacks_positions_for_the_tests_alone_is_planned(encoding, options):
    assert planned(encoding, **options)


def test_a_constructor_that_needs_memory_is_counted_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(NUMPY, encoding="utf-8")
    assert planned("./mine.py:Mine", train_length=64)
    with pytest.raises(ValueError, match=r"Mine cannot .* it has 64 positions, and 65 are needed"):
        planned("./mine.py:Mine", train_length=65)


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_the_command_refuses_it_in_one_line_and_writes_nothing(dry, tmp_path, call, text):
    options = ("--steps", 2, "--seeds", 1, *dry, "--text", text, "--out", tmp_path / "out")
    code, _, said = call("compare", "rope", "learned:max_positions=64", *options)
    assert code == 2 and said.count("\n") == 1
    assert "it has 64 positions, and 128 are needed" in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "given, words",
    [
        *(
            ({name: value}, rf"--{name.replace('_', '-')} must be a whole number{least}, got ")
            for name, least in {
                "seeds": " of at least 1",
                "steps": " of at least 1",
                "batch": " of at least 1",
                "workers": " of at least 1",
                "width": " of at least 1",
                "checkpoint_steps": " of at least 1",
                "train_length": " of at least 2",
            }.items()
            for value in (0, -1, "2", 2.0, True)
        ),
        ({"warmup": -0.1}, "--warmup must be a number of at least 0, got -0.1"),
        ({"warmup": 1.5}, "--warmup must be a whole number of steps, or a part .*, got 1.5"),
        ({"warmup": float("nan")}, "--warmup must be a whole number of steps, .*, got nan"),
        ({"warmup": float("inf")}, "--warmup must be a whole number of steps, .*, got inf"),
        ({"warmup": 3, "steps": 2}, "--warmup 3 is more than the 2 steps of training"),
        ({"warmup": 9, "search_lr": True}, "--warmup 9 counts steps, and trials that choose"),
        ({"schedule": "cosin"}, "--schedule must be cosine, linear, constant or wsd, got 'cosin'"),
        ({"lr": "1"}, "--lr must be a number, got '1'"),
        ({"lr": True}, "--lr must be a number, got True"),
        ({"lr": 10**400}, "--lr must be a positive number"),
        ({"small": 1}, "--small must be True or False, got 1"),
        ({"objective": None}, "--objective must be text, got None"),
        ({"out": 5}, "--out must be a path, got 5"),
        ({"test_lengths": "32"}, "test_lengths must be a list of whole numbers, got '32'"),
        ({"test_lengths": 256}, "test_lengths must be a list of whole numbers, got 256"),
        ({"test_lengths": [256, True]}, "test_lengths must be a list of whole numbers"),
        ({"test_lengths": []}, r"test_lengths must be a list of whole numbers, got \[\]"),
        ({"train_lengths": "32,64"}, "train_lengths must be a list of whole numbers, got '32,64'"),
        ({"train_lengths": [8, 16]}, "--train-lengths is for text: the task copy chooses the len"),
        ({"encodings": "rope"}, "encodings must be a list of names, got 'rope'"),
        ({"text": []}, r"text must be a list of paths, got \[\]"),
        ({"text": 5}, "text must be a list of paths, got 5"),
        ({"task": [5]}, r"task must be a list of names, got \[5\]"),
        ({"text": "", "task": "text"}, "^--text is empty; it must name something"),
        ({"text": ["a.txt", ""], "task": "text"}, "^--text is empty; it must name something"),
        *(({n: ""}, f"^--{n} is empty") for n in ("task", "config", "address")),
        ({"encodings": [""]}, "^encodings is empty"),
    ],
)
def test_python_refuses_what_the_command_line_would(given, words, monkeypatch):
    monkeypatch.setattr(run_study, "dry_run", lambda *a: pytest.fail("it was measured"))
    with pytest.raises(ValueError, match=words):
        compare.run(**{"encodings": ["rope"], "task": "copy", "dry_run": True, **given})


def test_planning_checks_the_options_of_whoever_made_them():
    with pytest.raises(ValueError, match="--steps must be a whole number of at least 1, got 0"):
        planned(steps=0)
    with pytest.raises(ValueError, match=r"encodings must be a list of texts, got \[1\]"):
        check_options(Options([1]))  # type: ignore[list-item]
    check_options(Options(["rope"], ["a.txt"], out=Path("out"), lr=1, seeds=1, suite=True))


@pytest.mark.parametrize("lr", [1e308, 5e-324])
def test_rates_to_try_that_are_no_numbers_are_refused(lr):
    assert planned(lr=lr)
    with pytest.raises(ValueError, match=rf"--search-lr tries --lr {re.escape(f'{lr:g}')} times"):
        planned(lr=lr, search_lr=True)
    assert planned(lr=1e308 / max(RATE_FACTORS), search_lr=True)
