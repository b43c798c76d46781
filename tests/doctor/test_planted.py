"""Planted mistakes are found by their rule, and published configs raise no error that is not known.

sound.json has one line per published model: the line of vendors.json whose family and small sizes
it has, and the rotary keys that its own config changes, from memory. `known`: the errors; llama.cpp
reads EXAONE 4 32B right, and its copy of a few layers without windows.
"""

import copy
import json
from pathlib import Path

import pytest

from posenc.doctor.command import Options
from posenc.runtimes.files.json_object import read_json
from tests.doctor.judging import judge, run
from tests.doctor.planted import GONE, PLANTED

VENDORS = read_json(Path(__file__).parents[1] / "runtimes/known/vendors.json")
GUESSED = (
    "PD004",
    "PD011",
    "PD043",
    "PD044",
    "PD045",
    "PD046",
    "PD047",
    "PD048",
    "PD049",
    "PD050",
    "PD053",
    "PD057",
)
"""Rules after whose errors a fix would have to guess."""
SOUND = read_json(Path(__file__).with_name("sound.json"))


def changed(base, changes):
    """A published config with other values."""
    config = copy.deepcopy(VENDORS[base])
    for key, value in changes.items():
        place, _, name = key.rpartition(".")
        holder = config.setdefault(place, {}) if place else config
        if value == GONE:
            holder.pop(name, None)
        else:
            holder[name] = value
    return config


def found_in(config):
    """The codes of errors; for bad input, the line that refuses it."""
    try:
        return {f.code for f in judge(config) if f.severity == "E"}
    except ValueError as refused:
        return str(refused)


def runtimes_of(config):
    """By rule, the runtimes that an error names."""
    errors = {}
    for f in judge(config):
        if f.severity == "E":
            errors.setdefault(f.code, []).extend(f.runtimes)
    return errors


def missed():
    return [row for row in PLANTED if row[2] not in found_in(changed(*row[:2]))]


def test_planted_mistakes_are_errors_of_the_right_rule():
    assert len(PLANTED) >= 120 and len({base for base, *_ in PLANTED}) >= 30
    assert not missed()  # at least 95 % are asked for


def test_a_rule_that_is_silent_is_seen(monkeypatch):
    from posenc.doctor import rules

    monkeypatch.setattr(rules, "RULES", {k: v for k, v in rules.RULES.items() if k != "PD045"})
    assert {code for *_, code in missed()} == {"PD045"}


def test_published_configs_raise_only_known_errors():
    configs = {**{name: (name, {}) for name in VENDORS}, **SOUND["models"]}
    assert len(configs) >= 150
    found = {
        name: errors for name, row in configs.items() if (errors := runtimes_of(changed(*row)))
    }
    assert found == SOUND["known"]
    assert len(found) <= 0.1 * len(configs)


@pytest.mark.parametrize("name", SOUND["known"])
def test_a_known_error_is_about_a_runtime_and_not_about_the_file(name):
    every = ["transformers-4", "transformers-5", "vllm", "sglang", "mlx-lm", "llama.cpp"]
    assert all(runtimes and runtimes != every for runtimes in SOUND["known"][name].values())


@pytest.mark.parametrize("row", [row for row in PLANTED if row[2] in GUESSED], ids=str)
def test_fix_guesses_at_nothing(tmp_path, row):
    """A file that contradicts itself is not fixed, and nothing is called proved of it."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(*row[:2])))
    try:
        said, _ = run(Options((path,), fix=True, out=tmp_path / "new"))
    except ValueError as refused:
        assert f"{row[2]}: " in str(refused) or "by hand" in str(refused)
        assert not (tmp_path / "new").exists()
    else:  # a base under a name that can only be meant for rope_theta
        assert row[2] == "PD043" and '"rope_theta"' in (tmp_path / "new/config.json").read_text()
        assert "proved by their emulators" in said
