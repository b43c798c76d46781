"""The folder that extend writes: how its config differs from the old one."""

import json
import re
from types import SimpleNamespace

import pytest

from posenc.extend.export.folder import (
    _original_config_with_defaults,
    increase_generation_limit,
    increase_limit,
    settings_text,
)

transformers = pytest.importorskip("transformers")


def test_config_with_an_infinite_number_is_compared(tmp_path):
    transformers.BambaConfig(time_step_limit=(0.0, float("inf"))).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    checkpoint = SimpleNamespace(
        config=transformers.BambaConfig.from_pretrained(tmp_path), raw_config=raw, folder=tmp_path
    )
    assert raw["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert _original_config_with_defaults(checkpoint, raw) == raw  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "word"), [("Infinity", "inf"), ("NaN", "nan")])
def test_settings_with_a_number_that_json_lacks_are_refused_by_name(value, word, tmp_path):
    path = tmp_path / "tokenizer_config.json"
    text = f'{{"model_max_length": 64, "inner": {{"x": {value}}}}}'
    path.write_text(text)
    said = f"tokenizer_config.json: inner.x is {word}, which JSON has no word for. Give a number"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        increase_limit(path, "model_max_length", 128)
    assert path.read_text() == text


def test_settings_with_half_a_character_are_written(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"model_max_length": 64, "unk_token": "\ud800"}))
    increase_limit(path, "model_max_length", 128)
    assert json.loads(path.read_text()) == {"model_max_length": 128, "unk_token": "\ud800"}


def test_no_config_is_written_with_a_number_that_json_lacks():
    with pytest.raises(ValueError, match=r"config\.json: text_config\.limits\[1\] is inf"):
        settings_text({"text_config": {"limits": [0.0, float("inf")]}}, "config.json")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(64, 256), (100, 256), (20, 20), (300, 300), (None, None), (True, True), ("64", "64")],
)
def test_generation_reads_as_far_as_the_model_if_it_did_before(limit, expected, tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"max_length": limit, "top_p": 0.9}))
    increase_generation_limit(tmp_path, train_length=64, new_length=256)
    assert json.loads(path.read_text()) == {"max_length": expected, "top_p": 0.9}


def test_without_settings_of_generation_none_are_written(tmp_path):
    increase_generation_limit(tmp_path, train_length=64, new_length=256)
    assert not [*tmp_path.iterdir()]
