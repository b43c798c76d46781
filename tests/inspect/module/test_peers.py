"""Other people's modules as installed: their known bugs are found, and what is right is not blamed.

Where a library is missing its test is skipped; `planted.py` has each bug again. Not met here:
flash-attn's re-centred table, whose rotary layer is a CUDA kernel (`planted.Recentred`).
"""

import json
from pathlib import Path

import pytest

from posenc.inspect.module.measurements import ModuleSheet, measure_module
from tests.inspect.module.test_checks import (
    ACTIVATIONS,
    ALIKE,
    ALONE,
    APART,
    BESIDE,
    BEYOND,
    CAST,
    FREQUENCIES,
    GRAPHS,
    GROWTH,
    HISTORY,
    PAIRS,
    REACH,
    SHIFT,
    SLOPES,
    STILL,
    UNTOUCHED,
)

HF = "transformers.models"
LLAMA = f"{HF}.llama.modeling_llama:LlamaRotaryEmbedding"
CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 1}
DYNAMIC = CONFIG | {
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
}
XT = "x_transformers.x_transformers"
MILLION = CONFIG | {"max_position_embeddings": 2**20}
ADAPTERS = Path(__file__).parent / "adapters"

BROKEN = {
    "rotary-embedding-torch": (
        f"{ADAPTERS}/rotary_embedding_torch.py:rotate",
        None,
        {},
        {ACTIVATIONS, CAST, HISTORY, GRAPHS},
    ),
    "x-transformers rotary": (f"{ADAPTERS}/x_transformers.py:cos_sin", None, {}, {CAST}),
    "x-transformers sinusoidal": (
        f"{XT}:ScaledSinusoidalEmbedding",
        "add",
        {"dim": 64},
        {CAST},
    ),
    "positional-encodings": (
        "positional_encodings.torch_encodings:PositionalEncoding1D",
        "add",
        {"channels": 64},
        {CAST, HISTORY, GRAPHS},
    ),
    "dynamic NTK": (LLAMA, "cos-sin", {"config": DYNAMIC}, {GROWTH, BESIDE}),
    "a million positions": (LLAMA, "cos-sin", {"config": MILLION}, {CAST, REACH}),
    "bloom": (f"{ADAPTERS}/transformers.py:bias", None, {}, {ACTIVATIONS}),
    "attention-gym": ("attn_gym.mods:generate_alibi_bias", "scores", {"H": 12}, {SLOPES}),
    "torchtune": (f"{ADAPTERS}/torchtune.py:rotate", None, {}, {BEYOND}),
}
FINE = {
    "x-transformers table": (
        f"{XT}:AbsolutePositionalEmbedding",
        "add",
        {"dim": 64, "max_seq_len": 512},
    ),
    "bert": (f"{ADAPTERS}/bert.py:add", None, {}),
    "t5": (f"{ADAPTERS}/t5.py:bias", None, {}),
    "neox": (
        f"{HF}.gpt_neox.modeling_gpt_neox:GPTNeoXRotaryEmbedding",
        "cos-sin",
        {"config": {"model_type": "gpt_neox", "hidden_size": 512}},
    ),
}


def measured(path: str, way: str | None, arguments: dict) -> ModuleSheet:
    library = path.removeprefix(f"{ADAPTERS}/").partition(":")[0].partition(".")[0]
    of_transformers = library in ("bert", "t5")
    pytest.importorskip("transformers" if of_transformers else library, exc_type=ImportError)
    heads = arguments.get("H", 8)
    return measure_module(path, way, arguments=arguments, heads=heads)


def split(sheet: ModuleSheet) -> tuple[set[str], set[str]]:
    yes = {v.check for v in sheet.checks if v.holds}
    no = {v.check for v in sheet.checks if v.holds is False or v.note}
    return yes, no


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BROKEN)
def test_known_bugs_are_found(name):
    path, way, arguments, broken = BROKEN[name]
    assert split(measured(path, way, arguments))[1] == broken


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FINE)
def test_right_modules_fail_no_check(name):
    yes, no = split(measured(*FINE[name]))
    assert {CAST, HISTORY, GROWTH, GRAPHS, *((BESIDE,) if name == "neox" else ())} <= yes and not no


@pytest.mark.slow
def test_llama_is_right_in_float32():
    """Only a cast of the whole module rounds its frequencies, which loading a checkpoint does not
    do."""
    yes, no = split(measured(LLAMA, "cos-sin", {"config": CONFIG}))
    known = {STILL, PAIRS, FREQUENCIES, UNTOUCHED}
    assert yes == known | {
        APART,
        ACTIVATIONS,
        HISTORY,
        GROWTH,
        ALONE,
        BESIDE,
        REACH,
        GRAPHS,
    }
    assert no == {CAST}


@pytest.mark.slow
def test_the_functions_of_llama_are_right_too():
    """The rotation, and not only its cosines and sines, by an adapter."""
    yes, no = split(measured(f"{ADAPTERS}/transformers.py:rotate", None, {}))
    assert {STILL, PAIRS, SHIFT, ALIKE, FREQUENCIES, REACH} <= yes and no <= {CAST}


def test_command_prints_verdicts(call):
    line = ("tests.inspect.module.mistakes:Learned", "--as", "add", "--width", "32", "--json")
    printed = json.loads(call("inspect", "module", *line)[1])
    assert printed["called_as"] == "Learned(x, positions), x (1, n, width)"
    assert len(printed["checks"]) == 21
