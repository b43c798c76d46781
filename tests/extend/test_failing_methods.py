"""A method that a model's code does not support costs one row. A position map that would be
measured with a wrong rotation is not measured."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from posenc import extend as hf
from posenc.command_line.errors import RunFailed
from posenc.extend import methods, variants
from posenc.extend.measure import losses
from posenc.extend.methods import METHODS, Method
from posenc.extend.options import Options
from posenc.extend.variants import position_maps
from posenc.hf.attachment.stacks import ForwardWithHooksFailed
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.model_rotation import rotary_frequencies, settings_applied
from tests.hf_models import COMMON, LENGTH, save
from tests.hf_models import WORDS as DOCUMENTS

TARGET = 3 * LENGTH
QUICK = Options(windows=2, search_evaluations=0, task=["none"])
MAPS = ["self-extend", "rerope", "dual-chunk"]
INTERLEAVED = ("cohere", "glm", "helium", "ernie4_5")
"""Families that rotate neighbouring channels, where the maps rotate halves."""
PARTIAL = ("phi", "stablelm", "persimmon")
"""Families whose rotation is narrower than the head."""


def sizes(family: str) -> dict[str, Any]:
    return COMMON | ({"head_dim": 8} if family in ("glm", "helium") else {})


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", INTERLEAVED)
def test_a_map_with_another_rotation_than_the_models_is_not_measured(family, tmp_path):
    checkpoint = load_checkpoint(save(family, tmp_path, spread=0.3, **sizes(family)))
    tokens = torch.arange(3, 3 + LENGTH)[None]
    with torch.no_grad():
        before = checkpoint.model(tokens).logits
        found = position_maps(checkpoint, TARGET)
        assert [variant.name for variant in found] == MAPS
        for variant in found:
            with (
                pytest.raises(ValueError, match=r"within its window .* changes logits by"),
                variant.applied(),
            ):
                pass
        assert torch.equal(checkpoint.model(tokens).logits, before)


@pytest.mark.parametrize("in_trial", [True, False])
def test_a_model_whose_code_stops_at_another_attention_has_no_map(tmp_path, monkeypatch, in_trial):
    """Already where that attention is put in its place and tried (DeepSeek V3.2)."""

    def stops(*args: Any, **options: Any) -> Any:
        error = TypeError("'LazyMask' object is not subscriptable")
        if in_trial:
            raise ForwardWithHooksFailed("attach: it fails.") from error
        raise error

    checkpoint = load_checkpoint(save("llama", tmp_path))
    monkeypatch.setattr(variants, "attached", stops)
    said = r"the attention of LlamaForCausalLM cannot run with a map \(TypeError: 'LazyMask'"
    for variant in position_maps(checkpoint, TARGET):
        with pytest.raises(ValueError, match=said), variant.applied():
            pass


def test_a_map_beside_layers_that_keep_a_state_is_exact_inside_its_window(tmp_path):
    """Those layers tell the order of tokens, too, whatever attention does."""
    hybrid = COMMON | {
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "shared_intermediate_size": 64,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    }
    checkpoint = load_checkpoint(save("granitemoehybrid", tmp_path, spread=0.3, **hybrid))
    maps = position_maps(checkpoint, TARGET)
    assert [variant.name for variant in maps] == MAPS
    with maps[0].applied():  # which compares
        pass


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", [*PARTIAL, "gpt_oss"])
def test_a_map_on_part_of_the_channels_or_beside_sinks_is_exact_inside_its_window(family, tmp_path):
    checkpoint = load_checkpoint(save(family, tmp_path, spread=0.3, **sizes(family)))
    tokens = torch.arange(3, 3 + LENGTH // 2)[None]
    with torch.no_grad():
        before = checkpoint.model(tokens).logits
        maps = position_maps(checkpoint, TARGET)
        assert [variant.name for variant in maps] == MAPS
        for variant in maps:
            with variant.applied() as model:
                torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=1e-4)


def extend(folder: Path, **options):
    return hf.extend(folder, TARGET, DOCUMENTS, options=QUICK, **options)


def test_what_fails_is_a_row_with_its_reason(tmp_path, call, undrawn):
    """GLM's maps are left out; everything else is measured, recommended and shown."""
    folder = save("glm", tmp_path / "glm", spread=0.3, **sizes("glm"))
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join(DOCUMENTS))
    page = tmp_path / "extend.html"
    asked = ["--to", TARGET, "--text", text, "--windows", 1, "--search-evaluations", 0]
    code, out, _ = call("extend", folder, *asked, "--report", page)
    said = " ".join(out.split())
    assert code == 0, said
    for name in MAPS:
        assert f"{name}: not measured: within its window it must change nothing" in said
    assert all(f" {name}" in said for name in METHODS)
    shown = page.read_text(encoding="utf-8")
    assert "What could not be measured on this model" in shown


def broken(name: str, error: Exception) -> Method:
    def scale(setting, factor):
        raise error

    return Method(name, "a planted failure", scale)


@pytest.fixture
def few_methods(monkeypatch):
    """Two methods are tried, and no map: the others would take most of the time."""
    for name in METHODS.keys() - {"none", "linear", "yarn"}:
        monkeypatch.delitem(METHODS, name)
    monkeypatch.setattr("posenc.extend.variants.position_maps", lambda *given: [])


@pytest.mark.usefixtures("few_methods")
def test_a_method_that_raises_leaves_the_others_as_they_were(tmp_path, monkeypatch):
    folder = save("llama", tmp_path / "llama")
    expected = extend(folder)
    assert not expected.not_measured
    monkeypatch.setitem(METHODS, "linear", broken("linear", KeyError("partial_rotary_factor")))
    found = extend(folder)
    assert found.not_measured == {"linear": "KeyError: 'partial_rotary_factor'"}
    assert found.measured.keys() == {"none", "yarn", "window"}
    for name, (_, evaluation) in found.measured.items():
        same = dataclasses.replace(evaluation, seconds=expected.measured[name][1].seconds)
        # As text: intervals of few texts are NaN, with which Python 3.13 finds no two equal.
        assert repr(same) == repr(expected.measured[name][1])


@pytest.mark.usefixtures("few_methods")
def test_a_long_message_of_a_compiler_is_cut(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "linear", broken("linear", RuntimeError("a line\n" * 1000)))
    said = extend(save("llama", tmp_path / "llama")).not_measured["linear"]
    assert said.startswith("RuntimeError: a line a line") and len(said) < 350


def test_a_method_whose_code_breaks_half_way_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    """The new config is written and the rotary module refuses it."""
    checkpoint = load_checkpoint(save("llama", tmp_path))
    before = checkpoint.config.to_dict()
    plain = type(checkpoint.model.model.rotary_emb)
    monkeypatch.setattr(
        plain, "__init__", lambda self, config, _init=plain.__init__: _refuse(config, self, _init)
    )
    from posenc.extend.variants import rope_variant

    with (
        pytest.raises(RuntimeError, match="planted"),
        rope_variant(checkpoint, "linear", TARGET).applied(),
    ):
        pass
    assert checkpoint.config.to_dict() == before


def _refuse(config, module, init) -> None:
    if config.max_position_embeddings != LENGTH:
        raise RuntimeError("planted")
    init(module, config)


def test_the_method_that_was_asked_for_ends_the_run_with_its_reason(tmp_path, monkeypatch):
    folder = save("llama", tmp_path / "llama")
    monkeypatch.setitem(METHODS, "linear", broken("linear", KeyError("partial_rotary_factor")))
    with pytest.raises(RunFailed, match="linear cannot be measured on this model: KeyError"):
        extend(folder, method="linear", out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@pytest.mark.usefixtures("few_methods")
def test_losses_that_are_no_numbers_are_no_row_of_dashes(tmp_path, monkeypatch):
    folder = save("llama", tmp_path / "llama")
    plain = losses.next_token_losses

    def wrong(model, tokens, **options):
        found = plain(model, tokens, **options).clone()
        if model.config.rope_parameters["rope_type"] == "yarn":
            found[0, 3] = torch.nan
        return found

    monkeypatch.setattr(losses, "next_token_losses", wrong)
    assert extend(folder).not_measured == {"yarn": "1 of 191 losses are NaN or infinite"}


def test_a_family_with_few_words_is_exported_with_them(tmp_path):
    """Phi-3's config takes default and longrope only."""
    folder = save("phi3", tmp_path / "phi3")
    outcome = extend(folder, method="linear", out=tmp_path / "out")
    assert outcome.proof is not None
    assert load_checkpoint(tmp_path / "out").config.rope_parameters["rope_type"] == "longrope"
    with pytest.raises(RunFailed, match="in this family no config can say so"):
        options = dataclasses.replace(QUICK, allow_cache_unsafe=True)
        hf.extend(folder, TARGET, DOCUMENTS, method="dynamic", options=options)


def test_a_linear_scaling_of_the_training_is_kept_and_stretched_further(tmp_path):
    """Trained with factor 4: twice its length is factor 8, in memory and in the export."""
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    folder = save("llama", tmp_path / "llama", rope_parameters=linear)
    checkpoint = load_checkpoint(folder)
    (setting,) = methods.stretch(checkpoint.rope_settings, METHODS["linear"], 2 * LENGTH)
    plain = [1e4 ** (-t / 4) for t in range(4)]
    assert [float(f) for f in setting.frequencies().inv_freq] == pytest.approx(
        [f / 8 for f in plain]
    )
    (ntk,) = methods.stretch(checkpoint.rope_settings, METHODS["ntk"], 2 * LENGTH)
    fastest, *_, slowest = [float(f) for f in ntk.frequencies().inv_freq]
    assert (fastest, slowest) == pytest.approx((plain[0] / 4, plain[3] / 8))
    for method in ("linear", "ntk", "yarn", "llama3", "by-parts", "proportional"):
        settings = methods.stretch(checkpoint.rope_settings, METHODS[method], 2 * LENGTH)
        meant = [float(f) for f in settings[0].frequencies().inv_freq]
        with settings_applied(checkpoint.model, settings, 2 * LENGTH) as model:
            assert rotary_frequencies(model)[None][0].tolist() == pytest.approx(meant)
    out = tmp_path / "out"
    hf.extend(folder, 2 * LENGTH, DOCUMENTS, method="linear", out=out, options=QUICK)
    assert load_checkpoint(out).rope_settings[0].compression == 8.0
    options = dataclasses.replace(QUICK, allow_cache_unsafe=True)
    with pytest.raises(RunFailed, match="no config can say so"):
        hf.extend(folder, 2 * LENGTH, DOCUMENTS, method="dynamic", options=options)
