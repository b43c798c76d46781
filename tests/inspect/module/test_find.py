"""How foreign modules are called: by name, and only if positions reach what they return."""

import json

import pytest
import torch
from torch import nn

from posenc.inspect.module.find import find_subject
from posenc.inspect.module.form import from_expression
from posenc.inspect.module.sheet import measure_module
from tests.inspect.module import planted

HERE = "tests.inspect.module.planted"


@pytest.mark.parametrize(
    ("module", "form", "how"),
    [
        (planted.CosSin(), "(x, position_ids)", "cos and sin"),
        (planted.Turned(), "(q, k, positions)", "turned content"),
        (planted.Tutorial(), "(x)", "sinusoids"),
        (planted.Table(), "(x, pos)", "values"),
        (planted.Alibi(), "(q_len, kv_len, dtype)", "bias"),
        (planted.CachedKeys(), "rotate_queries_with_cached_keys(q, k)", "turned content"),
        (nn.Embedding(64, 8), "(input)", "values"),
    ],
)
def test_arguments_are_bound_by_name(module, form, how):
    subject = find_subject(module)
    assert subject.form.name == form and subject.view.how == how


def test_pairs_of_channels_are_found_in_both_layouts():
    import posenc

    neighbours = find_subject(posenc.RoPE(8, interleaved=True), ["head_dim=8"])
    halves = find_subject(posenc.RoPE(8, interleaved=False), ["head_dim=8"])
    assert neighbours.view.pairs == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert halves.view.pairs == ((0, 4), (1, 5), (2, 6), (3, 7))


class _Layer(nn.Module):
    """A whole attention layer with a bias of its own, which is not asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(64, 4, batch_first=True)

    def forward(self, hidden_states, mask=None, position_bias=None):
        return self.inner(hidden_states + torch.arange(hidden_states.shape[1])[:, None] / 10)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.GRU(64, 64, batch_first=True), "no position module"),
        (nn.GRU(64, 64), "no position module"),
        (nn.Conv1d(64, 64, 3, padding=1), "is not judged"),
        (_Layer().eval(), "reads the sequence"),
        (nn.Linear(64, 64), "no position reaches"),
        (nn.LayerNorm(64), "no position reaches"),
        (planted.AddsMask(), "no position reaches"),
        (planted.Noise(), "random"),
        (planted.NeedsData(), "its argument graph may be anything"),
    ],
)
def test_what_shows_no_positions_is_not_judged(module, said):
    with pytest.raises(ValueError, match="is not judged") as refused:
        find_subject(module)
    assert said in str(refused.value) and "--call" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("module(x,", "must be a Python expression"),
        ("module(y)", "got y in"),
        ("module(x, z=positions)", "got positions in"),
    ],
)
def test_call_knows_its_names(text, said):
    with pytest.raises(ValueError, match="--call") as refused:
        from_expression(text)
    assert said in str(refused.value)


def test_call_says_how():
    """Positions in a mask are the caller's word; the mask alone is refused."""
    found = find_subject(planted.AddsMask(), call="module(x, attention_mask=p[None].to(x.dtype))")
    assert found.view.kind == "values" and found.form.places_tokens
    with pytest.raises(ValueError, match="no position reaches"):
        find_subject(planted.AddsMask(), call="module(x, attention_mask=mask)")
    with pytest.raises(ValueError, match="nothing with an axis"):
        find_subject(nn.Embedding(64, 8), call="module(torch.arange(5))")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere:Class"], "there is no module 'nowhere'"),
        (["posenc:RoPE"], "interleaved"),
        (["torch.nn:Linear", "--arg", "in_features"], "name=value"),
        (["torch.nn:Linear", "--arg", "in_features=3", "--arg", "out_features=2"], "Tried (input)"),
        ([f"{HERE}:ResetsBad"], "no licence file"),
        ([f"{HERE}:NeedsData"], "--call"),
        ([f"{HERE}:Noise"], "random"),
        ([f"{HERE}:frequencies", "--arg", "dim=8"], "made a Tensor"),
        ([f"{HERE}:turn", "--arg", "width=8"], "unexpected keyword argument 'width'. It takes (x"),
        ([f"{HERE}:CosSin", "--call", "module("], "must be a Python expression"),
        ([f"{HERE}:CosSin", "--compare"], "No such option: --compare"),
    ],
)
def test_bad_input_is_one_line_and_2(arguments, said, call):
    code, _, err = call("inspect", "module", *arguments)
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_file_that_fails_on_import_is_one_line(tmp_path, call):
    for text in ("import nowhere_at_all", "raise SystemExit(3)", "def broken(:", "1 / 0"):
        file = tmp_path / "own.py"
        file.write_text(text)
        code, _, err = call("inspect", "module", f"{file}:Thing")
        assert code == 2 and "cannot be imported" in err
        assert err.count("\n") == 1


def test_a_class_in_a_file_is_measured(tmp_path, call):
    file = tmp_path / "own.py"
    file.write_text("from tests.inspect.module.planted import Tutorial\n")
    code, out, _ = call("inspect", "module", f"{file}:Tutorial", "--json")
    printed = json.loads(out)
    assert code == 0 and printed["called_as"] == "(x)" and printed["length"] == 512


def test_the_answer_comes_first(call):
    first, second = call("inspect", "module", f"{HERE}:CastFrequencies")[1].splitlines()[:2]
    assert first.startswith("CastFrequencies returns cosines and sines") and "1 of" in first
    assert "called as (x, position_ids)" in second


def test_score_mods_and_functions_are_modules_too(monkeypatch):
    def plain(score, b, h, q_idx, kv_idx):
        return score - (q_idx - kv_idx).abs() * 0.5 ** (h + 1)

    monkeypatch.setattr(planted, "plain_score_mod", plain, raising=False)
    sheet = measure_module(f"{HERE}:plain_score_mod", ["heads=8"])
    found = {verdict.check: verdict.holds for verdict in sheet.checks}
    assert sheet.shows == "a bias of the scores" and found["slopes of ALiBi are the authors'"]
