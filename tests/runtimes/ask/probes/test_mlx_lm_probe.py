"""The probe says what mlx-lm computes, as other code recorded it."""

import re

import pytest

from posenc.runtimes.ask import RuntimeAnswer, ask
from posenc.runtimes.known import RUNTIMES
from tests.runtimes.ask.probes.other_runtimes import (
    answers_to_recorded_cases,
    interpreter,
    plant,
    published_cases,
    recorded_cases,
    rows_of_layer,
)
from tests.runtimes.test_golden import assert_reproduced

PYTHON = interpreter("mlx")
RUNTIME = "mlx-lm"
PROBE = "mlx_lm_probe.py"
CELLS = recorded_cases(RUNTIME)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def answer(config: dict, *lengths: int) -> RuntimeAnswer:
    (said,) = ask([(config, lengths or (64,))], PYTHON, RUNTIME)
    return said


@pytest.fixture(scope="module")
def emulator_of():
    return answers_to_recorded_cases(RUNTIME, PYTHON)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=[cell.case for cell in CELLS])
def test_the_probe_gives_what_was_recorded(cell, emulator_of):
    assert_reproduced(cell, emulator_of(cell))


@pytest.mark.slow
def test_configs_that_people_publish():
    cases = published_cases("mlx-lm-0.32.2")
    if not cases:
        pytest.skip("needs the cases beside a checkout")
    questions = [(config, [length]) for _, config, length, _ in cases]
    answers = ask(questions, PYTHON, RUNTIME, seconds=600)
    for (name, _, _, truth), said in zip(cases, answers, strict=True):
        assert bool(said.refusal) == ("error" in truth), name
        for path, recorded in truth.get("layers", {}).items():
            index = int(re.search(r"layers\.(\d+)", path)[1])
            frequencies = recorded["frequencies_of_pairs"]
            rows = rows_of_layer(said, index)
            assert bool(rows) == bool(frequencies), name
            for row in rows:  # the record leaves out pairs that do not turn in float32
                assert row[: len(frequencies)] == pytest.approx(frequencies, rel=1e-5), name
                assert max(row[len(frequencies) :], default=0.0) < 1e-8, name


@pytest.mark.parametrize(
    ("mistake", "config"),
    [
        (("offset=0)[0, 0, 1]", "offset=0)[0, 0, 0]"), {}),
        (
            ("max(max(row[0]) for row in module(unit_vectors, offset=0)[0].tolist())", "1.0"),
            {"rope_scaling": YARN},
        ),
        (("turned[second], turned[first]", "turned[first], turned[second]"), {}),
    ],
    ids=["wrong position", "no multiplier", "sine and cosine taken for each other"],
)
def test_a_probe_with_a_mistake_is_found(monkeypatch, tmp_path, mistake, config):
    config = {**LLAMA, **config}
    known = RUNTIMES[RUNTIME](config).rotations["all"]

    def agrees() -> bool:
        (row,) = answer(config).rotations
        return row.inv_freq == pytest.approx(known.inv_freq, rel=1e-5) and (
            row.multiplier == pytest.approx(known.multiplier, rel=1e-5)
        )

    assert agrees()
    plant(monkeypatch, tmp_path, PROBE, mistake)
    assert not agrees()


def test_pairs_that_are_adjacent_are_seen():
    assert answer(LLAMA).interleaved is False
    adjacent = {**LLAMA, "model_type": "helium", "num_key_value_heads": 4, "head_dim": 16}
    more = {"attention_bias": False, "mlp_bias": False, "rope_theta": 1e4}
    more |= {"tie_word_embeddings": False}
    assert answer({**adjacent, **more}).interleaved is True


def test_dynamic_frequencies_are_those_of_the_length():
    dynamic = {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    base = 10000.0 * (2.0 * 256 / 64 - 1) ** (16 / 14)
    said = answer(dynamic, 256, 2)
    assert said.changes
    assert said.rotations[0].inv_freq[1] == pytest.approx(base ** (-2 / 16), rel=1e-5)
    assert not answer(LLAMA, 256, 2).changes


def test_what_mlx_lm_refuses_is_refused_and_what_it_lacks_is_said():
    missing = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
    assert "rms_norm_eps" in answer(missing).refusal
    nobody = answer({**LLAMA, "model_type": "nobody_has_heard_of_it"})
    assert nobody.no_model and "not supported" in nobody.refusal


def test_code_of_a_folder_is_never_run(tmp_path):
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    said = answer({**LLAMA, "model_file": str(tmp_path / "own.py")})
    assert "model_file" in said.why_unmeasured and not (tmp_path / "ran").exists()


def test_a_layer_that_keeps_a_rotary_module_and_passes_it_over_does_not_rotate():
    """Cohere 2 rotates in its windowed layers only, every layer but the fourth."""
    config = {
        **LLAMA,
        "model_type": "cohere2",
        "num_key_value_heads": 4,
        "num_hidden_layers": 8,
        "head_dim": 16,
        "sliding_window_pattern": 4,
    }
    said = answer(config)
    assert said.without_rotation == (3, 7)
    assert RUNTIMES[RUNTIME](config).without_rotation == said.without_rotation
    (row,) = said.rotations
    assert row.layers == (0, 1, 2, 4, 5, 6)
