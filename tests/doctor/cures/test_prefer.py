"""--prefer: what contradicts a key is taken out, moved or made equal, and nothing else is lost."""

import copy
import json

import pytest

from posenc.doctor import choose_interpreters
from posenc.doctor.command import Options
from posenc.doctor.cures.preferred import contradictions, with_preferred
from posenc.files.sealed_json import strict_json
from posenc.runtimes.ask import Rotation, RuntimeAnswer
from posenc.runtimes.meaning import meaning_of
from tests.doctor.judging import run
from tests.doctor.threads import BASE

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}
SIMPLE = {**BASE, "rope_theta": 500000.0}
WHOLE = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {k: v for k, v in SIMPLE.items() if k != "architectures"},
}
ORIGINAL = "original_max_position_embeddings"
CONTRADICTING = {
    "two dicts": {**SIMPLE, "rope_scaling": YARN, "rope_parameters": LINEAR},
    "two bases": {**SIMPLE, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "two types": {**SIMPLE, "rope_scaling": {**YARN, "type": "linear"}},
    "two lengths": {**SIMPLE, ORIGINAL: 32, "rope_scaling": YARN},
    "the wrong level": {**WHOLE, "rope_scaling": YARN},
    "two levels": {
        **WHOLE,
        "rope_scaling": YARN,
        "text_config": {**WHOLE["text_config"], "rope_scaling": {**YARN, "factor": 2.0}},
    },
}
CHOICES = [(name, 0) for name in CONTRADICTING] + [
    (name, 1) for name in CONTRADICTING if name != "the wrong level"
]


def written(tmp_path, config, **options):
    path = tmp_path / "config.json"
    path.write_text(strict_json(config))
    said, code = run(Options((path,), fix=True, out=tmp_path / "new", **options))
    return said, code, json.loads((tmp_path / "new/config.json").read_text())


@pytest.mark.parametrize("name", CONTRADICTING)
def test_a_contradiction_is_refused_and_the_choices_are_named(tmp_path, name):
    (found,) = contradictions(CONTRADICTING[name])
    with pytest.raises(ValueError, match=found.in_words):
        written(tmp_path, CONTRADICTING[name])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("name", "which"), CHOICES)
def test_the_preferred_key_decides_and_the_copy_says_nothing_else(tmp_path, name, which):
    config = CONTRADICTING[name]
    (found,) = contradictions(config)
    path = found.paths[which]
    settled = with_preferred(config, ".".join(path))
    assert not list(contradictions(settled))
    said, code, copied = written(tmp_path, config, prefer=".".join(path))
    assert code == 0 and f"as --prefer {'.'.join(path)} says:" in said
    meant = meaning_of(settled).computed
    assert meaning_of(copied).computed.rotations["all"].inv_freq == pytest.approx(
        meant.rotations["all"].inv_freq
    )


def test_a_scaling_at_the_wrong_level_is_moved_and_not_dropped(tmp_path):
    _, _, copied = written(tmp_path, CONTRADICTING["the wrong level"], prefer="rope_scaling")
    assert "rope_scaling" not in copied
    assert copied["text_config"]["rope_scaling"]["factor"] == 4.0


def test_a_base_that_only_the_dropped_dict_has_is_kept():
    config = {"rope_scaling": YARN, "rope_parameters": LINEAR}
    assert with_preferred(config, "rope_scaling") == {"rope_scaling": YARN, "rope_theta": 500000.0}
    assert config["rope_parameters"] == LINEAR


@pytest.mark.parametrize(
    ("config", "key", "why"),
    [
        (SIMPLE, "rope_theta", "nothing in the config contradicts rope_theta"),
        (SIMPLE, "rope_scaling", "the config has no rope_scaling"),
        (CONTRADICTING["two bases"], "model_type", "needs --prefer rope_theta or --prefer rope_p"),
        (CONTRADICTING["two bases"], "rope_theta.a.b", "the config has no rope_theta.a.b"),
    ],
)
def test_a_key_that_settles_nothing_is_refused(config, key, why):
    before = copy.deepcopy(config)
    with pytest.raises(ValueError, match=why):
        with_preferred(config, key)
    assert config == before


def test_prefer_goes_with_fix_of_a_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(strict_json(SIMPLE))
    with pytest.raises(ValueError, match="--prefer goes with --fix"):
        run(Options((path,), prefer="rope_theta"))


@pytest.fixture
def asked(monkeypatch):
    """Have one interpreter answer about any config as transformers 5 does; return how to set the
    frequencies that it answers."""
    frequencies = []

    def ask(questions, python, runtime):
        rotation = Rotation("model.rotary_emb", "", tuple(frequencies), 1.0, called=True)
        answer = RuntimeAnswer(
            "transformers",
            "5.23.0",
            model="LlamaForCausalLM",
            rotations=(rotation,),
            softmax_scales=(meaning_of(SIMPLE).computed.softmax_scale,),
        )
        return [answer] * len(questions)

    monkeypatch.setattr(choose_interpreters, "ask", ask)
    monkeypatch.setattr(
        choose_interpreters, "runtimes_of", lambda python: {"transformers": "5.23.0"}
    )
    return frequencies


def test_a_copy_is_proved_by_asking_where_the_user_says_whom(tmp_path, asked):
    broken = {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    asked[:] = meaning_of(broken).computed.rotations["all"].inv_freq
    said, code, _ = written(tmp_path, broken, ask=["/python"])
    assert code == 0 and "proved by asking them: transformers-5 5.23.0" in said
    assert "proved by their emulators, from config.json: transformers-4" in said


def test_a_copy_that_an_asked_runtime_reads_otherwise_is_not_written(tmp_path, asked):
    broken = {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    asked[:] = [f / 2 for f in meaning_of(broken).computed.rotations["all"].inv_freq]
    with pytest.raises(ValueError, match="asked about the copy, computes something else"):
        written(tmp_path, broken, ask=["/python"])
    assert not (tmp_path / "new").exists()
