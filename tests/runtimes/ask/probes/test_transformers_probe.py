"""The probe says what transformers computes: as recorded by other code, and as models do."""

import contextlib
import importlib.metadata
import json
import runpy
from functools import cache
from pathlib import Path

import pytest
import torch

from posenc.runtimes.ask import AskError, RuntimeAnswer, as_computed, ask, installed_runtime_version
from posenc.runtimes.known import RUNTIMES
from tests.runtimes.ask.probes.other_runtimes import PROBES, plant
from tests.runtimes.golden_cases import Cell, cells
from tests.runtimes.test_golden import assert_reproduced

transformers = pytest.importorskip("transformers")
VERSION = importlib.metadata.version("transformers")
ROW = "transformers-4" if VERSION.startswith("4.") else "transformers-5"
RECORDED_AT = {"transformers-4": "4.57", "transformers-5": "5.2"}
"""The releases whose answers are recorded, or have not changed since."""
CELLS = [cell for cell in cells() if cell.runtime == ROW]
CASES = Path(__file__).parents[5] / "shared" / "dialects" / "cases"

needs_the_recorded_release = pytest.mark.skipif(
    not VERSION.startswith(RECORDED_AT[ROW]),
    reason=f"nothing is recorded of transformers {VERSION}",
)


def lengths(cell: Cell, length: int | None) -> list[int]:
    longest = int(cell.config.get("max_position_embeddings") or 4096)
    return [length or longest, 2, 1025, longest]


@cache
def answers() -> dict[tuple[str, int | None], RuntimeAnswer]:
    """The probe's answer for each recorded case, at each recorded length; asked in one process."""
    keys, questions = [], []
    for cell in CELLS:
        for length in {None, *(row.length for row in cell.rows)}:
            keys.append((cell.case, length))
            questions.append((cell.config, lengths(cell, length)))
    return dict(zip(keys, ask(questions, seconds=600), strict=True))


def of_the_probe(cell: Cell):
    """An emulator that gives the probe's answers. Which layers rotate, a module may not tell."""

    def emulate(config, length):
        return as_computed(answers()[cell.case, length], RUNTIMES[ROW](config, length))

    return emulate


@pytest.mark.slow
@needs_the_recorded_release
@pytest.mark.parametrize("cell", CELLS, ids=[cell.case for cell in CELLS])
def test_the_probe_gives_what_was_recorded(cell):
    assert_reproduced(cell, of_the_probe(cell))


WRONG_BUFFER = ('f"{prefix}inv_freq"', 'f"{prefix}original_inv_freq"')
NOT_CORRECTED = (
    "if not nearly_equal(kept_frequencies, ",
    "if False and not nearly_equal(kept_frequencies, ",
)
WRONG_POSITION = ("torch.tensor([[0, 1, length - 1]])", "torch.tensor([[0, 2, length - 1]])")
NO_MULTIPLIER = ("multiplier = float(cos[0].max())", "multiplier = 1.0")
YARN, LONGROPE = "10_", "27_"


@needs_the_recorded_release
@pytest.mark.parametrize(
    ("mistakes", "case"),
    [
        ([WRONG_BUFFER, NOT_CORRECTED], LONGROPE),
        ([WRONG_POSITION], YARN),
        ([NO_MULTIPLIER], YARN),
    ],
    ids=["wrong buffer", "wrong position", "no multiplier"],
)
def test_a_probe_with_a_mistake_is_found(monkeypatch, tmp_path, mistakes, case):
    plant(monkeypatch, tmp_path, "transformers_probe.py", *mistakes)
    assert not agrees(case)


@needs_the_recorded_release
def test_a_call_corrects_a_buffer_that_is_not_applied(monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, "transformers_probe.py", WRONG_BUFFER)
    assert agrees(LONGROPE)


def agrees(case: str) -> bool:
    """Whether the probe gives what was recorded for the case, asked anew."""
    cell = next(cell for cell in CELLS if cell.case.startswith(case))
    (answer,) = ask([(cell.config, lengths(cell, None))])
    layers = as_computed(answer, RUNTIMES[ROW](cell.config)).rotations
    long = max(cell.rows, key=lambda row: row.length or 0)
    return layers["all"].inv_freq == pytest.approx(long.inv_freq, rel=1e-6) and layers[
        "all"
    ].multiplier == pytest.approx(long.multiplier, rel=1e-6)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "mistral": {"rope_scaling": STRETCHED},
    "qwen2": {"rope_theta": 1000000.0},
    "qwen3": {"head_dim": 32, "rope_scaling": STRETCHED},
    "gemma": {"head_dim": 16},
    "phi": {"partial_rotary_factor": 0.5},
    "stablelm": {"partial_rotary_factor": 0.25},
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "starcoder2": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
}


@cache
def tiny_answers() -> dict[str, RuntimeAnswer]:
    questions = [({"model_type": name, **SIZES, **own}, [32]) for name, own in FAMILIES.items()]
    return dict(zip(FAMILIES, ask(questions), strict=True))


@pytest.mark.quick(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_rotates_as_the_probe_says_has_its_own_logits(family):
    config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    ids = torch.randint(1, 48, (1, 32))
    with torch.no_grad():
        own = model(ids).logits
    (rotation,) = tiny_answers()[family].rotations
    rotary = model.get_submodule(rotation.module)

    def logits(inv_freq: torch.Tensor, multiplier: float) -> torch.Tensor:
        def forward(x, position_ids, *_, **__):
            angle = position_ids[..., None].double() * inv_freq
            angle = torch.cat([angle, angle], -1)
            return multiplier * angle.cos(), multiplier * angle.sin()

        rotary.forward = forward
        with torch.no_grad():
            return model(ids).logits

    inv_freq = torch.tensor(rotation.inv_freq, dtype=torch.float64)
    error = (logits(inv_freq, rotation.multiplier) - own).abs().max()
    for wrong in (logits(0.9 * inv_freq, rotation.multiplier), logits(inv_freq, 1.5)):
        assert error < 1e-3 * (wrong - own).abs().max()


@pytest.mark.skipif(not CASES.is_dir(), reason="needs the cases beside a checkout")
@pytest.mark.slow
def test_configs_that_people_publish():
    """Configs and what the release computed of them, recorded by other code."""
    named, questions = [], []
    for path in sorted(CASES.glob("*.json")):
        case = json.loads(path.read_text("utf-8"))
        truths = case.get("truth", {})
        truth = truths.get(f"transformers-{VERSION}")
        truth = truths.get("transformers-5.23.0") if isinstance(truth, str) else truth
        if isinstance(truth, dict) and "not_measured" not in truth and "config" in case:
            named.append((case["name"], truth))
            questions.append((case["config"], [case["length"]]))
    if not named:
        pytest.skip(f"nothing is recorded of transformers {VERSION}")
    for (name, truth), answer in zip(named, ask(questions, seconds=600), strict=True):
        if "error" in truth:
            assert answer.refusal, name
            continue
        said = {(rounded(r.inv_freq), round(r.multiplier, 5)) for r in answer.rotations}
        recorded = truth["rotary"].values()
        assert said == {(rounded(r["inv_freq"]), round(r["multiplier"], 5)) for r in recorded}, name
        assert set(truth["softmax"]) <= set(answer.softmax_scales), name


NOTHING_LEFT_OUT = ("return WHOLE_FLAG not in sys.argv", "return False")
MORE_LEFT_OUT = (
    'modules["scipy"] = None',
    'sys.modules["scipy"] = sys.modules["transformers.models.llama.modeling_llama"] = None',
)
IMPORT_FAILS = ('modules["scipy"] = None', 'modules["transformers.utils"] = None')
NEVER_AGAIN = ("raise StartAgain from error", "raise error")


@pytest.mark.slow
def test_what_the_probe_does_without_decides_nothing(monkeypatch, tmp_path, fresh_process):
    questions = [(cell.config, lengths(cell, None)) for cell in CELLS]
    lean = ask(questions, seconds=600)
    plant(monkeypatch, tmp_path, "transformers_probe.py", NOTHING_LEFT_OUT)
    assert lean == ask(questions, seconds=600)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [MORE_LEFT_OUT, IMPORT_FAILS], ids=["a model", "all"])
def test_a_probe_that_lacks_what_it_does_without_starts_again(
    monkeypatch, tmp_path, fresh_process, missing
):
    question = [({"model_type": "llama", **SIZES}, [32])]
    plant(monkeypatch, tmp_path, "transformers_probe.py", missing)
    (answer,) = ask(question)
    assert answer.model == "LlamaForCausalLM" and answer.rotations
    plant(monkeypatch, tmp_path / "again", "transformers_probe.py", missing, NEVER_AGAIN)
    with contextlib.suppress(AskError):
        (answer,) = ask(question)
        assert not answer.rotations


@pytest.mark.slow
def test_the_probe_loads_no_compiler(monkeypatch, tmp_path, fresh_process):
    """Which takes as long as torch itself."""
    is_loaded = ('"class": type(model).__name__', '"class": str(COMPILER in sys.modules)')
    plant(monkeypatch, tmp_path, "transformers_probe.py", is_loaded)
    (answer,) = ask([({"model_type": "llama", **SIZES, "vocab_size": 2**15}, [32])])
    assert answer.model == "False"


KINDS = ["sliding_attention", "full_attention"]
KINDS_IN_TURN = {**SIZES, "num_hidden_layers": 2, "layer_types": KINDS}


@pytest.mark.slow
@pytest.mark.skipif(ROW == "transformers-4", reason="it has no dicts by kind")
def test_layers_of_a_null_kind_rest_or_stop_a_forward_pass():
    """Beam's rest; Gemma 4 asks their cos and sin; Olmo 3 had one dict for all kinds up to 5.12."""
    rope_parameters = {KINDS[0]: None, KINDS[1]: {"rope_type": "default", "rope_theta": 5e4}}
    families = ("beam", "gemma4_text", "olmo3")
    configs = [
        {"model_type": family, **KINDS_IN_TURN, "rope_parameters": rope_parameters}
        for family in families
    ]
    beam, gemma, olmo = ask([(config, [32]) for config in configs])
    assert not beam.stop_message and beam.without_rotation == (0,)
    assert gemma.stop_message == "KeyError: 'sliding_attention'"
    assert not olmo.stop_message and not olmo.without_rotation


def rounded(frequencies) -> tuple[str, ...]:
    return tuple(f"{frequency:.4g}" for frequency in frequencies)


@pytest.mark.parametrize(
    ("line", "cuts"),
    [
        ("q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]", True),
        ("query_rot, query_pass = torch.chunk(query_states, int(1 / self.share), dim=-1)", True),
        ("query_states, gate = torch.chunk(self.q_proj(hidden_states), 2, dim=-1)", False),
        ("query_states = self.q_proj(hidden_states)", False),
    ],
)
def test_attention_that_cuts_queries_itself_is_seen(monkeypatch, line, cuts):
    """The second line is of Recurrent Gemma up to transformers 5.15, which runs."""
    monkeypatch.syspath_prepend(PROBES)
    probe = runpy.run_path(str(PROBES / "rotating_functions.py"))
    assert bool(probe["SLICE_OF_QUERIES"].search(line)) is cuts


def test_the_installed_release_is_named():
    assert installed_runtime_version("transformers") == VERSION
    assert all(answer.version == VERSION for answer in tiny_answers().values())
