"""Nonsense in any rotary key ends in a judgement or in one clear error, never in a traceback."""

import collections
import copy
import json
import random

import pytest

from posenc.doctor.command import Options
from posenc.doctor.misreadings import Case
from posenc.doctor.report import Judgement, report_of
from posenc.doctor.rules import findings
from posenc.doctor.run_command import _first_finding_to_correct_by_hand
from posenc.report.html_page import page_of
from posenc.report.report import as_json
from posenc.report.terminal import as_text
from posenc.runtimes.files.source import load
from posenc.runtimes.files.spelling import as_transformers
from posenc.runtimes.meaning import meaning_of
from posenc.runtimes.writers.overrides import override_options
from posenc.runtimes.writers.recipes import best_recipe, require_static
from tests.doctor.judging import case, run
from tests.doctor.threads import BASE
from tests.runtimes.golden_cases import FOLDER

CONFIGS = [json.loads(p.read_text())["config"] for p in sorted(FOLDER.glob("[0-9]*.json"))]
VALUES = [
    None,
    0,
    -1,
    1,
    1.0,
    0.0,
    -2.5,
    1e308,
    1e-308,
    "x",
    "4.0",
    "",
    True,
    False,
    [],
    [1.0],
    {},
    {"a": 1},
    [None] * 8,
    ["a"] * 8,
    10**20,
    2**31,
    0.5,
    3.0,
    "yarn",
    "longrope",
    "default",
    "linear",
    "dynamic",
    "llama3",
    "su",
    "ntk",
    "mrope",
    "proportional",
    [0.0] * 8,
    [-1.0] * 8,
    4096,
    1024,
    8,
]
INSIDE = (
    "rope_theta factor type rope_type original_max_position_embeddings attention_factor "
    "attn_factor mscale mscale_all_dim beta_fast beta_slow truncate short_factor long_factor "
    "low_freq_factor high_freq_factor partial_rotary_factor alpha mrope_section short_mscale "
    "long_mscale full_attention sliding_attention"
).split()
OUTSIDE = (
    "rope_theta rope_scaling rope_parameters max_position_embeddings head_dim hidden_size "
    "num_attention_heads num_key_value_heads num_hidden_layers layer_types sliding_window "
    "sliding_window_pattern no_rope_layers no_rope_layer_interval partial_rotary_factor model_type "
    "rope_local_base_freq original_max_position_embeddings query_pre_attn_scalar qk_rope_head_dim "
    "kv_lora_rank architectures use_sliding_window model_max_length text_config"
).split()


def spoiled(draw):
    raw = copy.deepcopy(draw.choice(CONFIGS))
    for _ in range(draw.randint(1, 4)):
        value = copy.deepcopy(draw.choice(VALUES))
        if draw.random() < 0.4:
            raw[draw.choice(OUTSIDE)] = value
            continue
        name = draw.choice(("rope_scaling", "rope_parameters"))
        if not isinstance(raw.get(name), dict):
            raw[name] = {}
        raw[name][draw.choice(INSIDE)] = value
    return raw


@pytest.mark.quick(4)
@pytest.mark.parametrize("seed", range(6))
def test_nonsense_is_judged_or_refused(seed):
    draw = random.Random(seed)
    judged = 0
    for _ in range(50):
        raw = spoiled(draw)
        try:
            under = case(raw, length=draw.choice((None, None, 64, 100000)))
            found = findings(under)
        except ValueError as error:
            assert str(error)
            continue
        judged += 1
        report = report_of(Judgement(under, found))
        assert as_text(report) and page_of(report).html()
        assert "NaN" not in as_json(report)
        try:
            meaning = meaning_of(as_transformers(raw))
            require_static(meaning, None)
            best_recipe(raw, meaning)
            override_options(raw, meaning, "vllm")
        except ValueError as error:
            assert str(error)
    assert judged > 10


def test_infinity_outside_of_the_rotary_keys_is_as_transformers_writes_it(tmp_path):
    """Mamba hybrids keep "time_step_limit": [0.0, Infinity]."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BASE, "rope_theta": 1e4, "time_step_limit": [0.0, float("inf")]}))
    assert "Infinity" in path.read_text()
    assert run(Options((path,), for_="vllm"))[1] == 0
    path.write_text(json.dumps({**BASE, "rope_theta": float("inf")}))
    with pytest.raises(ValueError, match="rope_theta must be a finite number, got inf"):
        run(Options((path,)))


def test_a_copy_is_promised_only_where_fix_writes_one(tmp_path):
    path, counts = tmp_path / "config.json", collections.Counter()
    unknown = {**BASE, "rope_theta": 1e4, "rope_scaling": {"rope_type": "yarnn", "factor": 2.0}}
    for config in (unknown, *CONFIGS):
        path.write_text(json.dumps(config))
        try:
            said = run(Options((path,)))[0]
        except ValueError:
            continue
        promised = "`--fix --out NEW` writes a mended copy" in said
        by_hand = (
            _first_finding_to_correct_by_hand(found := Case(load(path)), findings(found))
            is not None
        )
        counts[by_hand, promised] += 1
    assert not counts[True, True] and counts[True, False] and counts[False, True]
