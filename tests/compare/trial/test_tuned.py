"""The reading after a tuning at the longest length."""

import dataclasses
import itertools

import pytest
import torch

from posenc.compare.defaults import TUNE_BATCH
from posenc.compare.options import Options
from posenc.compare.trial import readings, train
from posenc.compare.trial.objectives import OBJECTIVES
from posenc.compare.trial.run_trial import run_trial
from posenc.frequencies.scalings.registry import YaRN
from tests.compare.trial.test_far import SMALL, TEXT, trained_a_little
from tests.compare.trial.test_trial import quiet

TUNED = dataclasses.replace(SMALL, tune_steps=12, lr=0.01)


def test_a_tuning_changes_a_copy_and_is_scored_at_every_length(tmp_path):
    model = trained_a_little(TUNED)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    as_trained = OBJECTIVES["causal"].test(model, TEXT, TUNED)
    reading, seconds = readings.tune_and_read(model, TEXT, TEXT, TUNED, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.encoding.scaling is None
    assert [score.length for score in reading.by_length] == [8, 40]
    assert [score.length for score in reading.far] == [40]
    assert reading.by_length[-1].bits_per_byte < as_trained.by_length[-1].bits_per_byte - 0.05
    assert seconds > 0


def test_a_tuning_that_was_interrupted_gives_the_same_scores(tmp_path, monkeypatch):
    model = trained_a_little(TUNED)
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    whole, _ = readings.tune_and_read(model, TEXT, TEXT, TUNED, tmp_path / "whole")
    from posenc.hf import tuning

    monkeypatch.setattr(tuning, "SAVE_EVERY", 4)
    take_step, steps = tuning._take_optimizer_step, itertools.count()

    def stop_at_the_seventh(*arguments):
        if next(steps) == 6:
            raise KeyboardInterrupt
        return take_step(*arguments)

    monkeypatch.setattr(tuning, "_take_optimizer_step", stop_at_the_seventh)
    with pytest.raises(KeyboardInterrupt):
        readings.tune_and_read(model, TEXT, TEXT, TUNED, tmp_path / "halves")
    monkeypatch.setattr(tuning, "_take_optimizer_step", take_step)
    resumed, _ = readings.tune_and_read(model, TEXT, TEXT, TUNED, tmp_path / "halves")
    assert resumed == whole


def test_a_step_of_the_tuning_has_as_many_windows_as_is_announced(tmp_path, monkeypatch):
    recipes = []
    tune = readings.tune

    def record_recipe(model, windows, train_length, recipe, *arguments, **named):
        recipes.append((recipe.batch, recipe.steps, len(windows.tokens)))
        return tune(model, windows, train_length, recipe, *arguments, **named)

    monkeypatch.setattr(readings, "tune", record_recipe)
    readings.tune_and_read(trained_a_little(TUNED), TEXT, TEXT, TUNED, tmp_path)
    assert recipes == [(TUNE_BATCH, 12, 12 * TUNE_BATCH)]
    (option,) = Options.__annotations__["tune_steps"].__metadata__
    assert "two windows a step" in option.help and TUNE_BATCH == 2


@pytest.mark.parametrize(
    ("encoding", "is_rope"),
    [("rope", True), ("yarn:factor=4", True), ("rope:rope_theta=100", True), ("alibi", False)],
)
def test_only_rotations_of_all_layers_are_tuned(encoding, is_rope):
    model = train.build_model(dataclasses.replace(TUNED, encoding=encoding))
    assert readings.can_be_tuned(model) == is_rope


def test_rope_is_stretched_to_the_longest_length_and_scalings_stay():
    config = dataclasses.replace(TUNED, encoding="rope:rope_theta=100")
    shape = train.encoding_shape(config)
    plain = train.build_model(config).encoding
    stretched = readings._with_yarn(plain, 5.0, shape)
    assert stretched.scaling == YaRN(5.0, 8) and stretched.rope_theta == 100
    assert stretched.interleaved == plain.interleaved and stretched.rotary_dim == plain.rotary_dim
    scaled = train.build_model(dataclasses.replace(TUNED, encoding="linear:factor=4")).encoding
    assert readings._with_yarn(scaled, 5.0, shape) is scaled


def test_a_tuning_that_fails_is_said_and_the_trial_goes_on(tmp_path, monkeypatch):
    import json

    from posenc.command_line.errors import RunFailed
    from posenc.compare.trial import run_trial as module

    def fail(*arguments):
        raise RunFailed("tuning: the loss is nan")

    monkeypatch.setattr(module, "tune_and_read", fail)
    splits = tmp_path / f"corpus-{TUNED.corpus}"
    splits.mkdir()
    for split in ("train", "valid", "test"):
        (splits / f"{split}.u16").write_bytes(TEXT.astype("<u2").tobytes())
    home = tmp_path / TUNED.folder
    home.mkdir()
    run_trial(dataclasses.replace(TUNED, steps=2), tmp_path, home, quiet, 50)
    window, failed = json.loads((home / "result.json").read_text())["readings"]
    assert (window["name"], window["cannot"]) == ("window", None)
    assert (failed["name"], failed["cannot"]) == ("tuned", "tuning: the loss is nan")


def test_a_tuning_computes_in_the_precision_of_the_trial(tmp_path):
    config = dataclasses.replace(TUNED, precision="bfloat16", tune_steps=2)
    model = trained_a_little(config)
    logits = readings._LikeTransformers(model, config)(torch.zeros(1, 4, dtype=torch.long)).logits
    assert logits.dtype == torch.bfloat16
    reading, _ = readings.tune_and_read(model, TEXT, TEXT, config, tmp_path)
    assert reading.cannot is None
