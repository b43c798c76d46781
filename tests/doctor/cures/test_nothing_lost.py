"""--fix loses nothing that a file says: each number counts in what is written, or stops it."""

import copy
import json
import random
import re
import shutil
from pathlib import Path

import pytest

from posenc.doctor.command import Options
from tests.doctor.judging import run
from tests.doctor.threads import BASE, EIGHT
from tests.runtimes.golden_cases import FOLDER

ABOUT_POSITIONS = re.compile(r"rope|rotary|yarn|theta|mscale|factor|beta|mrope|llama_4|truncate")
NO_ROPE = re.compile(r"vision|audio|quantization|\.name$|finetuned|attn_factor")
FOREIGN = Path(__file__).parents[3].parent / "shared/dialects/cases"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS = [
    YARN,
    {"type": "linear", "factor": 8.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "longrope",
        "short_factor": EIGHT,
        "long_factor": EIGHT,
        "original_max_position_embeddings": 1024,
    },
    {**YARN, "rope_theta": 5e6, "attention_factor": 1.3},
]
VALUES = {
    "rope_scaling": SCALINGS,
    "rope_parameters": SCALINGS,
    "rope_theta": [123456.0, 7e6],
    "rope_local_base_freq": [54321.0],
    "partial_rotary_factor": [0.5, 0.75],
    "rotary_pct": [0.5],
    "rotary_emb_base": [77777.0],
}
SIZES = {k: v for k, v in BASE.items() if k not in ("model_type", "architectures")}
INNER = ("text_config", "language_config", "llm_config", "thinker_config")


def cases():
    """Configs by name: the golden ones, and those of the folder beside the repository."""
    found = {p.stem: json.loads(p.read_text())["config"] for p in FOLDER.glob("[0-9]*.json")}
    for path in sorted(FOREIGN.glob("*.json")) if FOREIGN.is_dir() else ():
        config = json.loads(path.read_text()).get("config")
        if isinstance(config, dict) and not path.name.startswith(("gguf", "params")):
            found[path.stem] = config
    return found


def outcome(raw, folder):
    """What --fix writes, or why it writes nothing; and what it says that it leaves out."""
    path, out = folder / "config.json", folder / "out"
    path.write_text(json.dumps(raw))
    shutil.rmtree(out, ignore_errors=True)
    try:
        said, code = run(Options((path,), fix=True, out=out))
    except ValueError as refused:
        return "refused", str(refused)
    if code == 3:
        return "unknown", said
    left_out = [line for line in said.splitlines() if line.startswith("left out, as it is not")]
    return "written", "\n".join([(out / "config.json").read_text(), *left_out])


def leaves(raw, where=()):
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from leaves(value, (*where, key))
        else:
            yield (*where, key), value


def changed(value):
    """Another value of the same kind; None where there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 if value else 3
    if isinstance(value, list) and all(isinstance(each, int | float) for each in value):
        return [each * 2 for each in value]
    return None


def put(raw, where, value):
    result = copy.deepcopy(raw)
    place = result
    for key in where[:-1]:
        place = place.setdefault(key, {})
    place[where[-1]] = value
    return result


def lost(raw, wheres, folder):
    """The places of numbers that can be anything without a word of --fix, or another copy."""
    before = outcome(raw, folder)
    found = []
    for where in wheres if before[0] == "written" else ():
        place = raw
        for key in where[:-1]:
            place = place[key]
        value, name = changed(place[where[-1]]), ".".join(where)
        nothing = place[where[-1]] in (None, 1, 1.0, False) or value is None
        if (
            nothing
            or NO_ROPE.search(name)
            or "original_max" in name
            or not ABOUT_POSITIONS.search(name)
        ):
            continue
        if outcome(put(raw, where, value), folder) == before:
            found.append(name)
    return found


@pytest.mark.parametrize(
    "share", [6, pytest.param(1, marks=pytest.mark.slow)], ids=["a sixth", "all"]
)
def test_no_number_of_a_file_is_lost(share, tmp_path):
    names = []
    for name, raw in [*cases().items()][::share]:
        places = [where for where, _ in leaves(raw)]
        names += [f"{name}: {place}" for place in lost(raw, places, tmp_path)]
    assert names == []


def added(raw, draw):
    """A config with one more rotary key, anywhere; and the places of its numbers."""
    # auto_map names classes of the folder's own code, which a copy leaves behind.
    inner = [
        k for k, v in raw.items() if isinstance(v, dict) and k not in VALUES and k != "auto_map"
    ]
    place = draw.choice([(), (), *((k,) for k in sorted({*inner, *INNER}))])
    key = draw.choice(sorted(VALUES))
    value = copy.deepcopy(draw.choice(VALUES[key]))
    own = [(*place, key, k) for k in value] if isinstance(value, dict) else [(*place, key)]
    return put(raw, (*place, key), value), own


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(12))
def test_no_number_is_lost_wherever_it_stands(seed, tmp_path):
    draw, names, written = random.Random(seed), [], 0
    every = cases()
    for _ in range(25):
        name = draw.choice(sorted(every))
        raw, own = added(every[name], draw)
        names += [f"{name}: {place}" for place in lost(raw, own, tmp_path)]
        written += outcome(raw, tmp_path)[0] == "written"
    assert names == [] and written > 1


def test_a_fix_that_drops_a_scaling_is_seen(tmp_path, monkeypatch):
    """The tests above fail where contradictions are settled without a word."""
    from posenc.doctor import run_command

    monkeypatch.setattr(run_command, "_first_finding_to_correct_by_hand", lambda case, found: None)
    text = {**SIZES, "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}
    raw = {"model_type": "llava", "text_config": text, "rope_scaling": YARN}
    assert lost(raw, [("rope_scaling", "factor")], tmp_path) == ["rope_scaling.factor"]


SECTIONS = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]}


@pytest.mark.parametrize(
    "inner",
    [
        {"rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}, "rope_theta": 5e6},
        {"rope_parameters": SECTIONS},
        {"rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
        {"rope_theta": 5e6},
        {"rope_theta": 5e6, "rope_scaling": None},
    ],
)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_scaling_next_to_text_config_is_never_deleted(inner, name, tmp_path, call):
    raw = {"model_type": "qwen3_vl", "text_config": {**SIZES, **inner}, name: YARN}
    path, out = tmp_path / "config.json", tmp_path / "new"
    path.write_text(json.dumps(raw))
    code, said, told = call("doctor", path, "--fix", "--out", out)
    assert (code, said, told.count("\n")) == (2, "", 1) and not out.exists()
    assert f"PD057: {name}" in told and "Move" in told


def test_the_same_scaling_in_both_places_is_no_contradiction(tmp_path, call):
    text = {**SIZES, "rope_parameters": {"rope_theta": 1e6, **YARN}}
    raw = {"model_type": "mistral3", "text_config": {"model_type": "mistral", **text}}
    raw["text_config"]["max_position_embeddings"] = 131072
    raw |= {"rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 1e6}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    assert "PD057" not in call("doctor", path)[1]
    assert call("doctor", path, "--fix", "--out", tmp_path / "new")[0] in (0, 1)


def test_sections_and_the_queries_temperature_are_kept(tmp_path):
    """A yarn that scales nothing is plain RoPE, with both of them."""
    own = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 1.0, "llama_4_scaling_beta": 0.1}
    own |= {"original_max_position_embeddings": 16384}
    sizes = {**SIZES, "model_type": "ministral3", "max_position_embeddings": 16384}
    kind, text = outcome({**sizes, "rope_parameters": own}, tmp_path)
    assert kind != "written" or json.loads(text)["rope_parameters"]["llama_4_scaling_beta"] == 0.1
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
    rope |= {"mrope_interleaved": True}
    raw = {"model_type": "qwen3_vl", "text_config": {**SIZES, "rope_parameters": rope}}
    kind, text = outcome(raw, tmp_path)
    assert kind == "written"
    got = json.loads(text)["text_config"]["rope_parameters"]
    assert (got["mrope_section"], got["mrope_interleaved"]) == ([4, 2, 2], True)


def test_a_model_that_rotates_nothing_has_nothing_to_fix(tmp_path):
    raw = {**SIZES, "model_type": "granitemoehybrid", "position_embedding_type": "nope"}
    kind, said = outcome(raw, tmp_path)
    assert kind == "refused" and "rotates no layer" in said


def test_a_copy_that_means_something_else_is_not_written(tmp_path):
    """SmolLM3's rotary modules read no share here, and without it the copy, judged by itself, would
    be as meant with all its pairs."""
    scaling = {"type": "linear", "factor": "2.0", "rope_theta": 1000}
    raw = {**SIZES, "model_type": "smollm3", "head_dim": 32, "rope_parameters": scaling}
    kind, said = outcome({**raw, "partial_rotary_factor": 0.75}, tmp_path)
    assert kind == "refused" and "says what the file means (12 rotated pairs)" in said
    kind, _ = outcome(raw, tmp_path)
    assert kind == "written"


def test_a_base_of_another_family_above_the_text_config_stops_a_fix(tmp_path):
    text = {**BASE, "model_type": "qwen3_vl_text", "rope_theta": 5e6, "head_dim": 128}
    raw = {"model_type": "qwen3_vl", "text_config": text}
    assert outcome(raw, tmp_path)[0] == "written"
    kind, said = outcome({**raw, "rotary_emb_base": 77777.0}, tmp_path)
    assert kind == "refused" and "rotary_emb_base 77777 at the top level is not read" in said
