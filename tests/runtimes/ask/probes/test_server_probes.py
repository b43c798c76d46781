"""The probes say what vLLM and SGLang compute, as other code recorded it. They need no card."""

from dataclasses import replace

import pytest

from posenc.runtimes.ask import RuntimeAnswer, ask
from posenc.runtimes.known import RUNTIMES
from tests.runtimes.ask.probes.other_runtimes import (
    answers_to_recorded_cases,
    installed,
    plant,
    recorded_cases,
)
from tests.runtimes.test_golden import assert_reproduced

PYTHONS = {name: python for name in ("vllm", "sglang") if (python := installed(name))}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHONS, reason="needs vLLM or SGLang in .venv-oracles: make nightly"),
]
SERVED_OTHERWISE = {
    ("vllm", "47_qwen2_sliding"),  # a window in some layers of Qwen 2 is refused before it rotates
    ("vllm", "51_smollm3_norope"),  # by the modules of transformers
    ("sglang", "54_deepseek_v3_yarn"),  # the recorded config is too short for the model's class
    ("sglang", "67_deepseek_v3_yarn_v5_only"),
}
"""Cases whose rotary modules were recorded by themselves, and of which no whole model is built."""
CASES = [
    (name, cell)
    for name in PYTHONS
    for cell in recorded_cases(name)
    if (name, cell.case) not in SERVED_OTHERWISE
]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def answer(runtime: str, config: dict, *lengths: int) -> RuntimeAnswer:
    (said,) = ask([(config, lengths or (64,))], PYTHONS[runtime], runtime)
    return said


@pytest.fixture(scope="module")
def emulators():
    return {name: answers_to_recorded_cases(name, python) for name, python in PYTHONS.items()}


@pytest.mark.parametrize(("name", "cell"), CASES, ids=[f"{n} {c.case}" for n, c in CASES])
def test_the_probe_gives_what_was_recorded(name, cell, emulators):
    asked = emulators[name](cell)
    rotations = {tuple(row.inv_freq) for row in cell.rows}

    def emulate(config: dict, length: int | None):
        answer = asked(config, length)
        # A rule was recorded by which frequencies change, also where both are the same.
        same = len(rotations) == 1 and answer.switch == "static"
        return replace(answer, switch=cell.switch or "static") if same else answer

    assert_reproduced(cell, emulate)


@pytest.mark.parametrize("name", PYTHONS)
@pytest.mark.parametrize(
    ("mistake", "config"),
    [
        (("turned_units(module, 1, length)", "turned_units(module, 2, length)"), {}),
        (
            ("max(max(row) for row in turned_units(module, 0, length))", "1.0"),
            {"rope_scaling": YARN},
        ),
        (("rows[first][second], rows[first][first]", "rows[first][first], 1.0"), {}),
    ],
    ids=["wrong position", "no multiplier", "no sine"],
)
def test_a_probe_with_a_mistake_is_found(monkeypatch, tmp_path, name, mistake, config):
    config = {**LLAMA, **config}
    known = RUNTIMES[name](config).rotations["all"]

    def agrees() -> bool:
        (row,) = answer(name, config).rotations
        return row.inv_freq == pytest.approx(known.inv_freq, rel=1e-5) and (
            row.multiplier == pytest.approx(known.multiplier, rel=1e-5)
        )

    assert agrees()
    plant(monkeypatch, tmp_path, "server_probing.py", mistake)
    assert not agrees()


@pytest.mark.parametrize("name", PYTHONS)
def test_a_length_that_is_not_admitted_is_refused_and_the_longest_is_said(name):
    said = answer(name, LLAMA, 65)
    assert "65" in said.refusal and said.longest_admitted == 64
    assert answer(name, LLAMA, 64).longest_admitted == 64


@pytest.mark.parametrize("name", PYTHONS)
def test_code_of_a_stranger_is_never_run(name):
    own = {"AutoConfig": "modeling_own.Config", "AutoModel": "modeling_own.Model"}
    said = answer(name, {"model_type": "of_a_stranger", "auto_map": own})
    assert "custom code" in said.refusal or "trust_remote_code" in said.refusal
