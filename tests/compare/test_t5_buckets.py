"""T5's buckets that occur in training but that copying does not need, and the tables about them."""

import csv

import pytest
import torch

from tests.experiment import experiment

script = experiment("t5_buckets")


def read(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_buckets_lie_between_the_way_back_and_the_longest_sequence():
    (config,) = script.trials(1)
    assert (config.encoding, config.task, config.seed, config.train_length) == ("t5", "copy", 0, 20)
    encoding = script.T5Bias(4)
    unused = script.not_needed(encoding, config)
    shown = [script.ends(encoding)[bucket] for bucket in unused]
    # A sequence of 20 symbols has 42 tokens; the bucket of 40 to 45 is shown in part.
    assert shown == [(21, 23), (24, 26), (27, 30), (31, 34), (35, 39)]


@pytest.mark.slow
def test_both_tables_come_and_the_zeros_reach_the_model(tmp_path, monkeypatch, run):
    seen = []
    real = script.score_cases
    monkeypatch.setattr(
        script, "score_cases", lambda model, *rest: (
            seen.append(model.encoding.weight.detach().clone()), real(model, *rest)
        )[1],
    )  # fmt: skip
    asked = ["--seeds", 1, "--steps", 2, "--out", tmp_path, "--tables", tmp_path]
    run(script, *asked)
    before, after = seen
    changed = (before != after).any(1).nonzero().flatten().tolist()
    assert changed == [18, 19, 20, 21, 22] and not after[18:23].any()
    biases = read(tmp_path / "t5_biases.csv")
    assert len(biases) == 32 and biases[0]["head 0"] == f"{before[0, 0]:.3f}"
    copied = read(tmp_path / "t5_copies.csv")
    assert {row["weights"] for row in copied} == {"as trained", "zeros at distances 21 to 39"}
    assert [row["symbols"] for row in copied[:5]] == ["20", "24", "30", "40", "80"]
    monkeypatch.setattr(script, "run_trial", None)  # the trained model lies there
    run(script, *asked)
    torch.testing.assert_close(seen[2], before)


@pytest.mark.parametrize(
    "given, words",
    [
        (["--seeds", "0"], "--seeds must be at least 1, got 0."),
        (["--steps", "-1"], "--steps must be at least 1, got -1."),
        (["--tables", "file"], "--tables: file is not a folder."),
        (["--out", "file/deep"], "--out: file is not a folder."),
    ],
)
def test_what_is_wrong_is_refused_before_training(given, words, tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(script, "run_trial", lambda *a: pytest.fail("it was trained"))
    code, _, err = run(script, "--out", "new", "--tables", "tables", *given)
    assert code == 2 and words in err.replace(str(tmp_path) + "/", "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
