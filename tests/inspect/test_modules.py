"""Other people's modules: known bugs of installed versions are found, right modules pass."""

from __future__ import annotations

import json

import pytest
from torch import nn

from posenc.cli import main
from posenc.inspect.module.sheet import build, find_form, verdicts

LLAMA = "transformers.models.llama.modeling_llama:LlamaRotaryEmbedding"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 1,
    "max_position_embeddings": 128,
}
DYNAMIC = CONFIG | {
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
}
ACTIVATIONS = "bfloat16 activations keep positions apart"
CAST = "module.bfloat16() keeps positions apart"
HISTORY = "earlier calls leave no trace"
LENGTHS = "a position keeps its values as the sequence grows"
ALONE = "a row does not depend on the batch's longest"
FAR = "angles right at position 1,000,000"


def checked(path: str, *arguments: str, length: int = 1024):
    pytest.importorskip(path.partition(":")[0].partition(".")[0])
    module = build(path, arguments)
    return {v.check: v for v in verdicts(module, find_form(module, arguments), length)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("path", "arguments", "broken"),
    [
        ("rotary_embedding_torch:RotaryEmbedding", ["dim=64"], {ACTIVATIONS, CAST, HISTORY}),
        ("x_transformers.x_transformers:RotaryEmbedding", ["dim=64"], {CAST, FAR}),
        (
            "positional_encodings.torch_encodings:PositionalEncoding1D",
            ["channels=64"],
            {CAST, HISTORY},
        ),
        (LLAMA, [f"config={json.dumps(DYNAMIC)}"], {LENGTHS, ALONE, FAR}),
        (LLAMA, [f"config={json.dumps(CONFIG)}"], {CAST, FAR}),
    ],
    ids=["rotary-embedding-torch", "x-transformers", "positional-encodings", "dynamic", "llama"],
)
def test_known_bugs_are_found(path, arguments, broken):
    found = checked(path, *arguments)
    assert {check for check, verdict in found.items() if verdict.holds is False} == broken


@pytest.mark.parametrize(
    ("path", "arguments", "form"),
    [
        ("posenc:RoPE", ["head_dim=16", "interleaved=false"], "(q, k, positions)"),
        ("posenc:Sinusoidal", ["embed_dim=16"], "(x, positions)"),
        ("posenc:ALiBi", ["num_heads=4"], "(positions, positions)"),
    ],
)
def test_right_modules_pass(path, arguments, form):
    assert find_form(build(path, arguments), arguments).name == form
    found = checked(path, *arguments, length=300)
    assert all(verdict.holds is not False for verdict in found.values())
    assert found[ACTIVATIONS].holds and found[HISTORY].holds
    if form == "(q, k, positions)":
        assert found[FAR].holds


class Remembers(nn.Module):
    def forward(self, positions):
        self.last = max(getattr(self, "last", 0), len(positions))
        return positions[:, None].float() / self.last


def test_memory_is_found():
    module = Remembers()
    found = {v.check: v.holds for v in verdicts(module, find_form(module, []), 128)}
    assert found[HISTORY] is False and found[LENGTHS] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere:Class"], "cannot be imported"),
        (["posenc:RoPE"], "refuses these arguments"),
        (["posenc:RoPE", "--arg", "head_dim"], "name=value"),
        (["torch.nn:Linear", "--arg", "in_features=3", "--arg", "out_features=2"], "tried (q, k"),
        (["rope", "--arg", "dim=3"], "package.module:Class"),
    ],
)
def test_bad_input_is_one_line_and_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", *arguments])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and said in printed.err and printed.err.count("\n") == 1


def test_command_prints_verdicts(capsys):
    with pytest.raises(SystemExit):
        main(["inspect", "posenc:Sinusoidal", "--arg", "embed_dim=16", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["called_as"] == "(x, positions)" and len(printed["checks"]) == 6
