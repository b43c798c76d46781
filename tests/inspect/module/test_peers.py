"""Other people's modules as installed: their known bugs are found, and what is right is not blamed.

Where a library is missing its test is skipped; `planted.py` has each bug again. Not met here:
flash-attn's re-centred table, whose rotary layer is a CUDA kernel (`planted.Recentred`).
"""

import json

import pytest

from posenc.inspect.module.sheet import ModuleSheet, measure_module
from tests.inspect.module.test_checks import (
    ACTIVATIONS,
    ALIKE,
    ALONE,
    APART,
    BESIDE,
    BEYOND,
    CAST,
    GRAPHS,
    GROWTH,
    HISTORY,
    REACH,
    SLOPES,
    START,
)

HF = "transformers.models"
LLAMA = f"{HF}.llama.modeling_llama:LlamaRotaryEmbedding"
CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 1}
DYNAMIC = CONFIG | {
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
}
ROTARY = "rotary_embedding_torch:RotaryEmbedding"
XT = "x_transformers.x_transformers"
MILLION = CONFIG | {"max_position_embeddings": 2**20}


def config(values: dict) -> list[str]:
    return [f"config={json.dumps(values)}"]


BROKEN = {
    "rotary-embedding-torch": (ROTARY, ["dim=64"], None, {ACTIVATIONS, CAST, HISTORY, GRAPHS}),
    "rotary-embedding-torch xpos": (
        ROTARY,
        ["dim=64", "use_xpos=true"],
        None,
        {ACTIVATIONS, CAST, HISTORY, GROWTH, ALONE, GRAPHS},
    ),
    "x-transformers rotary": (f"{XT}:RotaryEmbedding", ["dim=64"], None, {CAST}),
    "x-transformers sinusoidal": (
        f"{XT}:ScaledSinusoidalEmbedding",
        ["dim=64"],
        None,
        {CAST, START},
    ),
    "positional-encodings": (
        "positional_encodings.torch_encodings:PositionalEncoding1D",
        ["channels=64"],
        None,
        {CAST, HISTORY, GRAPHS},
    ),
    "dynamic NTK": (LLAMA, config(DYNAMIC), None, {GROWTH, BESIDE}),
    "a million positions": (LLAMA, config(MILLION), None, {CAST, REACH}),
    "bloom": (
        f"{HF}.bloom.modeling_bloom:build_alibi_tensor",
        ["num_heads=8"],
        "module(mask, dtype=dtype)",
        {ACTIVATIONS},
    ),
    "attention-gym": ("attn_gym.mods:generate_alibi_bias", ["H=12"], None, {SLOPES}),
    "torchtune": (
        "torchtune.modules.position_embeddings:RotaryPositionalEmbeddings",
        ["dim=64", "max_seq_len=512"],
        None,
        {BEYOND},
    ),
}
FINE = {
    "x-transformers table": (
        f"{XT}:AbsolutePositionalEmbedding",
        ["dim=64", "max_seq_len=512"],
        None,
        {ACTIVATIONS, CAST, HISTORY, GROWTH, ALONE, BESIDE, START, GRAPHS},
    ),
    "bert": (
        f"{HF}.bert.modeling_bert:BertEmbeddings",
        config({"model_type": "bert", "hidden_size": 64}),
        None,
        {ACTIVATIONS, CAST, HISTORY, GROWTH, ALONE, BESIDE, START, GRAPHS},
    ),
    "t5": (
        f"{HF}.t5.modeling_t5:T5Attention",
        [*config({"model_type": "t5"}), "has_relative_attention_bias=true"],
        "module.compute_bias(n, n)",
        {CAST, HISTORY, GROWTH, GRAPHS},
    ),
    "posenc rope": (
        "posenc:RoPE",
        ["head_dim=16", "interleaved=false"],
        None,
        {APART, ACTIVATIONS, CAST, HISTORY, GROWTH, ALONE, ALIKE, BESIDE, REACH, GRAPHS},
    ),
    "posenc sinusoidal": (
        "posenc:Sinusoidal",
        ["embed_dim=16"],
        None,
        {APART, ACTIVATIONS, CAST, HISTORY, GROWTH, ALONE, BESIDE, REACH, GRAPHS},
    ),
    "posenc alibi": (
        "posenc:ALiBi",
        ["num_heads=4"],
        None,
        {CAST, HISTORY, GROWTH, ALONE, BESIDE, SLOPES, GRAPHS},
    ),
    "diffusers": (
        "diffusers.models.embeddings:Timesteps",
        ["num_channels=64", "flip_sin_to_cos=true", "downscale_freq_shift=0"],
        None,
        {APART, CAST, HISTORY, GROWTH, ALONE, REACH, GRAPHS},
    ),
}


def measured(path: str, arguments: list[str], call: str | None) -> ModuleSheet:
    library = path.partition(":")[0].partition(".")[0]
    pytest.importorskip(library, exc_type=ImportError)
    return measure_module(path, arguments, call)


def split(sheet: ModuleSheet) -> tuple[set[str], set[str]]:
    yes, no = ({v.check for v in sheet.checks if v.holds is want} for want in (True, False))
    return yes, no


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BROKEN)
def test_known_bugs_are_found(name):
    path, arguments, call, broken = BROKEN[name]
    assert split(measured(path, arguments, call))[1] == broken


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FINE)
def test_right_modules_fail_no_check(name):
    path, arguments, call, holds = FINE[name]
    yes, no = split(measured(path, arguments, call))
    assert yes == holds and not no


def test_llama_is_right_in_float32():
    """Only a cast of the whole module rounds its frequencies, which loading a checkpoint does not
    do."""
    yes, no = split(measured(LLAMA, config(CONFIG), None))
    assert yes == {APART, ACTIVATIONS, HISTORY, GROWTH, ALONE, BESIDE, REACH, GRAPHS}
    assert no == {CAST}


def test_command_prints_verdicts(call):
    out = call("inspect", "module", "posenc:Sinusoidal", "--arg", "embed_dim=16", "--json")[1]
    printed = json.loads(out)
    assert printed["called_as"] == "(x, positions)" and len(printed["checks"]) == 13
