"""posenc inspect on a model's folder, with tiny random models of each family."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from posenc.encodings.scores.alibi import ALiBi
from posenc.encodings.scores.t5 import T5Bias
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.inspect.checkpoint import figures, measurements
from posenc.inspect.checkpoint.figures import attention_plots, position_plots
from posenc.inspect.checkpoint.measurements import CheckpointSheet, Request, measure_checkpoint
from posenc.inspect.checkpoint.positions import Bias, Disentangled, MeasuredTable, Rotation
from posenc.inspect.checkpoint.reading import (
    attention_by_group,
    mean_distance,
    read_sentence,
    tokenize_sentence,
)
from posenc.inspect.checkpoint.report import report_of, verdicts_in_words
from posenc.inspect.checkpoint.sentences import answer_in_words, judge, judge_swap
from posenc.inspect.checkpoint.swap import Swap, exchanged_order, without_positions
from posenc.report.drawing import to_svg
from posenc.report.html_page import Page, page_of
from tests.browser import DESKTOP, PHONE, needs_chromium
from tests.charts import assert_drawn_from_its_table
from tests.hf_models import COMMON, LENGTH, save

TEXT, WORDS = "The dog saw its cat.", ("dog", "cat")
KINDS = {
    "llama": Rotation,
    "qwen2": Rotation,
    "gpt_neox": Rotation,
    "bert": MeasuredTable,
    "gpt2": MeasuredTable,
    "opt": MeasuredTable,
    "bloom": Bias,
    "t5": Bias,
    "deberta": Disentangled,
    "deberta-v2": Disentangled,
    "falcon": Rotation,
    "gptj": Rotation,
    "mpt": Bias,
}
LLAMA2XS = Path(__file__).parents[3].parent / "shared/checkpoints/llama2xs"


class Made(dict):
    """What `make` gives for a family, made when it is first asked for."""

    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, family: str):
        self[family] = self.make(family)
        return self[family]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Made(lambda family: save(family, tmp_path_factory.mktemp(family), spread=0.3))


@pytest.fixture(scope="module")
def sheets(folders):
    def measured(family):
        return measure_checkpoint(Request(folders[family], TEXT, WORDS, as_bytes=True))

    return Made(measured)


def page_about(sheet: CheckpointSheet, layers=()) -> Page:
    return page_of(report_of(judge(sheet), "posenc inspect", layers, has_figures=True))


def verdicts(swap: Swap) -> list[str]:
    return verdicts_in_words(swap, judge_swap(swap))


@pytest.mark.parametrize("family", KINDS)
def test_structure_and_positions_of_each_family(sheets, folders, family):
    sheet = sheets[family]
    assert json.loads(json.dumps(sheet.to_json(), allow_nan=False))  # JSON has no NaN
    model = load_checkpoint(folders[family], allow_encoder_decoder=True).model
    assert sheet.structure.parameters == model.num_parameters()
    assert sheet.structure.layers == 2 and sheet.structure.parts["other"] == 0
    assert sheet.structure.parts["attention"] and sheet.structure.parts["feed-forward"]
    learned = family in ("bert", "gpt2", "opt", "t5", "deberta", "deberta-v2")
    assert bool(sheet.structure.parts["positions"]) == learned
    assert sheet.position_sources and all(
        isinstance(p, KINDS[family]) for p in sheet.position_sources
    )
    assert sheet.reading.causal == (family not in ("bert", "t5", "deberta", "deberta-v2"))
    for weights in sheet.reading.attention.values():
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


@pytest.mark.parametrize("family", KINDS)
def test_without_positions_the_order_of_words_is_lost_as_far_as_the_mask_allows(sheets, family):
    found = sheets[family].swap
    assert found.removed and found.last_stays
    if found.causal:
        assert found.without.last_by_layer[1] < 1e-5 < 1e-4 < found.without.last_by_layer[2]
        assert found.with_positions.last_by_layer[1] > 1e-4
        assert "same after one layer" in verdicts(found)[0]
        assert "two layers or more it differs" in verdicts(found)[1]
    else:
        assert max(found.without.all_by_layer) < 1e-5
        assert max(found.with_positions.all_by_layer) > 1e-2
        assert found.without.logits < 1e-4 < found.with_positions.logits
        assert "blind to order" in verdicts(found)[0]


@pytest.mark.parametrize("family", KINDS)
def test_positions_come_back_after_the_removal(folders, family):
    model = load_checkpoint(
        folders[family], allow_encoder_decoder=True, attention_implementation="eager"
    ).model
    ids = list(range(5, 17))
    before = read_sentence(model, ids).hidden_states
    with without_positions(model):
        assert (read_sentence(model, ids).hidden_states - before).abs().max() > 1e-3
    assert torch.equal(read_sentence(model, ids).hidden_states, before)


@pytest.mark.parametrize(
    ("family", "norm"), [("llama", "model.norm"), ("gpt2", "transformer.ln_f")]
)
def test_the_last_state_is_that_before_the_final_norm(folders, family, norm):
    model = load_checkpoint(
        folders[family], allow_encoder_decoder=True, attention_implementation="eager"
    ).model
    ids = list(range(5, 17))
    with torch.inference_mode():
        out = model(torch.tensor([ids]), output_hidden_states=True)
        state = read_sentence(model, ids).hidden_states[-1]
        assert torch.allclose(model.get_submodule(norm)(state), out.hidden_states[-1][0], atol=1e-5)
        assert (state - out.hidden_states[-1][0]).abs().max() > 1e-2


def test_a_decoder_without_a_start_token_is_refused():
    model = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True, model_type="t5"))
    with pytest.raises(ValueError, match="has no decoder_start_token_id"):
        read_sentence(model, [5, 6, 7])


@pytest.mark.parametrize(
    ("last", "message"), [((2, 8), "hand on states of different shapes"), ((8,), None)]
)
def test_layers_that_hand_on_several_streams_are_refused(last, message):
    """As hyper-connections do, whose last state is one stream again."""

    class Streams(torch.nn.Module):
        config = SimpleNamespace(is_encoder_decoder=False, model_type="streams")

        def forward(self, input_ids, **kwargs):
            length = input_ids.shape[1]
            return SimpleNamespace(
                attentions=(torch.zeros(1, 2, length, length),),
                hidden_states=(torch.zeros(1, length, *last), torch.zeros(1, length, 8)),
                logits=torch.zeros(1, length, 9),
            )

    if message is None:
        assert read_sentence(Streams(), [5, 6, 7]).hidden_states.shape == (2, 3, 8)
        return
    with pytest.raises(ValueError, match=message):
        read_sentence(Streams(), [5, 6, 7])


def test_a_rotation_by_complex_numbers_is_taken_out(tmp_path):
    """Llama 4 and DeepSeek-V2 keep cosine and sine as one complex number."""
    sizes = {**COMMON, "head_dim": 8, "intermediate_size_mlp": 32, "num_local_experts": 2}
    save("llama4_text", tmp_path, spread=0.3, attention_chunk_size=32, **sizes)
    found = measure_checkpoint(Request(tmp_path, TEXT, WORDS, as_bytes=True)).swap
    assert found is not None and found.without is not None
    assert found.removed == ["the rotation model.rotary_emb"]
    assert found.without.last_by_layer[1] < 1e-5 < found.with_positions.last_by_layer[1]


def test_layers_without_a_rotation_are_not_counted(tmp_path):
    save("smollm3", tmp_path)
    (kind,) = measure_checkpoint(Request(tmp_path, TEXT, as_bytes=True)).position_sources
    assert isinstance(kind, Rotation) and kind.layers == "3 of 4 layers"


def test_a_window_of_attention_is_not_blamed_on_positions(tmp_path):
    save("gemma3_text", tmp_path, spread=0.3)
    long = "The dog was seen by nobody but its cat."
    found = measure_checkpoint(Request(tmp_path, long, WORDS, as_bytes=True)).swap
    assert "windowed attention" in verdicts(found)[0]


@pytest.mark.parametrize(("family", "theta"), [("llama", 200.0), ("gpt_neox", 10000.0)])
def test_unfinished_pairs_are_those_of_the_models_own_frequencies(tmp_path, family, theta):
    """With theta 200 one pair takes 88.9 tokens for a turn, a little more than the 64 trained."""
    share = {"partial_rotary_factor": 0.25} if family == "gpt_neox" else {}
    save(family, tmp_path, rope_parameters={"rope_type": "default", "rope_theta": theta, **share})
    (kind,) = measure_checkpoint(Request(tmp_path, TEXT, as_bytes=True)).position_sources
    (rotary,) = (
        m
        for m in load_checkpoint(tmp_path).model.modules()
        if "RotaryEmbedding" in type(m).__name__
    )
    turns = rotary.inv_freq * LENGTH / (2 * math.pi)
    assert kind.unfinished == (turns < 1).nonzero().flatten().tolist()
    assert kind.rotary_dim == 2 * len(turns)


FACTOR = {"partial_rotary_factor": 0.5}
SCALED = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
UNREAD = {
    "llama, in the dict": ("llama", {"rope_parameters": {**FACTOR, "rope_theta": 5000.0}}),
    "llama, at the top": ("llama", {**FACTOR, "rope_theta": 5000.0}),
    "gemma2": ("gemma2", {**FACTOR, "head_dim": 16}),
    "starcoder2": ("starcoder2", {**FACTOR, "rope_theta": 8e6}),
    "smollm3": ("smollm3", {**FACTOR, "num_hidden_layers": 4}),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", UNREAD)
def test_a_rotation_is_that_of_the_models_module_where_a_key_is_not_read(name, tmp_path, call):
    family, keys = UNREAD[name]
    save(family, tmp_path, **{**COMMON, **keys})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | keys), "utf-8")
    rotary = load_checkpoint(tmp_path).model.model.rotary_emb
    (kind,) = measure_checkpoint(Request(tmp_path, TEXT, as_bytes=True)).position_sources
    waves = [2 * math.pi / float(frequency) for frequency in rotary.inv_freq]
    assert kind.wavelengths == pytest.approx(waves) and kind.unscaled == kind.wavelengths
    assert kind.rotary_dim == kind.head_dim == 2 * len(waves)
    assert kind.unfinished == [i for i, wave in enumerate(waves) if wave > LENGTH]
    pairs = len(waves)
    assert f"The config says {pairs // 2} pairs" in kind.differs
    assert f"rotary module has {pairs} pairs" in kind.differs
    _, out, _ = call("inspect", "model", tmp_path, "--bytes", "--out", tmp_path / "page.html")
    said = " ".join(out.split())
    assert kind.differs in said and f"of its {pairs} rotary pairs" in said
    assert "posenc extend" not in said  # which refuses such a model


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_wavelengths_are_drawn_twice_only_if_the_scaling_changes_them(factor):
    waves = [6.3, 63.0, 630.0, 6300.0]
    scaled = [factor * wave for wave in waves]
    rotation = Rotation("all layers", 10000.0, 8, 8, "DynamicNTK", 64, 128, scaled, waves)
    (plot,) = position_plots(SimpleNamespace(position_sources=[rotation]))
    curves = list(dict.fromkeys(plot.chart.data["series"]))
    assert curves == ["as trained", "as it runs, DynamicNTK"][: 1 + (factor > 1)]


def test_a_model_whose_own_code_does_not_run_its_config_is_refused(tmp_path):
    """Llama's linear scaling reads the factor, and its attention does not."""
    save("llama", tmp_path, rope_parameters={**FACTOR, **SCALED})
    with pytest.raises(ValueError, match=r"llama model of this config does not run: .*size of"):
        measure_checkpoint(Request(tmp_path, TEXT, as_bytes=True))


def planted(monkeypatch, folder, change, family="llama", **keys):
    """Positions of a model whose rotary module was changed as by another release's code."""

    def load(*args, **options):
        checkpoint = load_checkpoint(*args, **options)
        change(checkpoint.model.model.rotary_emb)
        return checkpoint

    monkeypatch.setattr(measurements, "load_checkpoint", load)
    save(family, folder, **keys)
    return measure_checkpoint(Request(folder, TEXT, as_bytes=True)).position_sources


def test_other_frequencies_than_the_keys_say_are_those_of_the_module(tmp_path, monkeypatch):
    def one(rotary):
        rotary.inv_freq[1] *= 1.001

    (kind,) = planted(monkeypatch, tmp_path / "one", one)
    assert kind.wavelengths[1] == pytest.approx(2 * math.pi * 10000 ** (1 / 4) / 1.001)
    assert kind.rope_theta is None and "has 4 pairs, frequencies of no theta." in kind.differs

    def base(rotary):
        rotary.inv_freq.copy_(700.0 ** (-torch.arange(4) / 4))

    (kind,) = planted(monkeypatch, tmp_path / "base", base)
    assert kind.rope_theta == pytest.approx(700.0) and kind.differs == (
        "The config says 4 pairs, theta 10,000; the model's rotary module has 4 pairs, theta 700."
    )


def test_rotary_modules_are_found_beside_a_linear_layer_named_decoder(tmp_path, monkeypatch):
    """Which transformers takes for ModernBERT's decoder."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    both = ["full_attention", "sliding_attention"]  # 5.12 cannot build one kind alone
    config = AutoConfig.for_model("modernbert", **COMMON, layer_types=both)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)

    def change(rotary):
        rotary.full_attention_inv_freq.copy_(700.0 ** (-torch.arange(4) / 4))

    monkeypatch.setattr("tests.inspect.checkpoint.test_checkpoint.save", lambda *given: None)
    kinds = planted(monkeypatch, tmp_path, change)
    rotations = {kind.layers: kind for kind in kinds if isinstance(kind, Rotation)}
    full = rotations["full_attention layers"]
    assert full.rope_theta == pytest.approx(700.0) and "theta 700" in full.differs
    assert not rotations["sliding_attention layers"].differs


@pytest.mark.parametrize(
    ("wrong", "keys"), [(float("nan"), {}), (1.001, {"rope_parameters": SCALED})]
)
def test_frequencies_that_no_setting_explains_are_refused(tmp_path, monkeypatch, wrong, keys):
    """Of scaled ones nobody can tell which the model was trained with."""

    def change(rotary):
        rotary.inv_freq[1] *= wrong

    with pytest.raises(ValueError, match=r"transformers 5\S+ rotates by other frequencies"):
        planted(monkeypatch, tmp_path, change, **keys)


def test_a_kind_of_layer_that_the_model_has_not_has_no_rotation(tmp_path):
    """Gemma 3 keeps keys for layers without a window, even if each of its layers has one."""
    save("gemma3_text", tmp_path, layer_types=["sliding_attention"] * 6)
    found = measure_checkpoint(Request(tmp_path, TEXT, as_bytes=True)).position_sources
    assert [kind.layers for kind in found] == ["sliding_attention layers"]


def test_an_extended_checkpoint_meets_new_angles_only_where_its_frequencies_stay(tmp_path):
    longer = {"max_position_embeddings": 4 * LENGTH}
    parameters = {"rope_theta": 10000.0, "original_max_position_embeddings": LENGTH, "factor": 4.0}
    sheets = []
    for kind in ("linear", "yarn"):
        folder = tmp_path / kind
        save("llama", folder, rope_parameters={"rope_type": kind, **parameters}, **longer)
        sheets.append(measure_checkpoint(Request(folder, TEXT, as_bytes=True)).position_sources[0])
    assert [s.scaling for s in sheets] == ["Linear", "YaRN"]
    assert sheets[0].new_angles == [] and sheets[0].unfinished == [2, 3]
    assert sheets[1].trained == LENGTH and sheets[1].beyond == 4 * LENGTH


def test_the_own_bias_of_t5_bloom_and_mpt(folders, sheets):
    encoder, decoder = sheets["t5"].position_sources
    model = load_checkpoint(folders["t5"], allow_encoder_decoder=True).model
    for kind, stack, both in ((encoder, model.encoder, True), (decoder, model.decoder, False)):
        own = T5Bias(4, bidirectional=both)
        table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        own.weight.data.copy_(table.detach())
        want = own.bias(torch.tensor(kind.distances))
        torch.testing.assert_close(torch.tensor(kind.values), want.detach(), rtol=0, atol=0)
    for family in ("bloom", "mpt"):
        (alibi,) = sheets[family].position_sources
        assert alibi.slopes == pytest.approx(list(ALiBi(4).slopes))
        assert alibi.values[0][8] == pytest.approx(-8 * alibi.slopes[0])


def test_mpnets_bias_beside_its_table(folders, sheets):
    table, bias = sheets["mpnet"].position_sources
    assert isinstance(table, MeasuredTable) and isinstance(bias, Bias)
    encoder = load_checkpoint(folders["mpnet"]).model.mpnet.encoder
    own = T5Bias(4, bidirectional=True)
    own.weight.data.copy_(encoder.relative_attention_bias.weight.detach())
    want = own.bias(torch.tensor(bias.distances))
    torch.testing.assert_close(torch.tensor(bias.values), want.detach(), rtol=0, atol=0)
    sheet = sheets["mpnet"]
    assert bias.where == "mpnet.encoder.relative_attention_bias"
    answer = answer_in_words(sheet.position_sources, sheet.max_positions)
    assert "no length breaks it" not in answer and "scores also depend on the distance" in answer
    assert max(sheet.swap.without.all_by_layer) < 1e-5


def test_the_rotation_that_gptj_keeps_in_a_table(folders, sheets):
    (kind,) = sheets["gptj"].position_sources
    modules = load_checkpoint(folders["gptj"]).model.modules()  # in a layer, or one for all
    table = next(m.embed_positions for m in modules if hasattr(m, "embed_positions"))
    # sines, then cosines
    angles = torch.atan2(table[1, :2], table[1, 2:]).tolist()
    assert kind.rotary_dim == 4 and kind.head_dim == 8 and kind.trained == LENGTH
    assert kind.wavelengths == pytest.approx([2 * math.pi / angle for angle in angles])


def test_falcon_with_alibi_is_refused_because_transformers_counts_it_twice(tmp_path):
    save("falcon", tmp_path, spread=0.3, alibi=True)
    ids = torch.arange(5, 17)[None]
    shown, fused = (
        load_checkpoint(tmp_path, attention_implementation=name).model(ids).logits
        for name in ("eager", "sdpa")
    )
    assert (shown - fused).abs().max() > 1e-2  # once this fails, transformers is mended
    with pytest.raises(ValueError, match=r"Falcon with ALiBi: .* adds its bias twice"):
        measure_checkpoint(Request(tmp_path, TEXT, as_bytes=True))


def test_key_value_heads_of_falcon(sheets):
    assert sheets["falcon"].structure.kv_heads == 1


def test_similarity_of_a_table(folders, sheets):
    (kind,) = sheets["opt"].position_sources
    rows = load_checkpoint(folders["opt"]).model.model.decoder.embed_positions.weight.detach()[2:]
    want = torch.nn.functional.cosine_similarity(rows[1:], rows[:-1]).mean().item()
    assert kind.rows == LENGTH and kind.reserved == 2
    assert kind.neighbours == pytest.approx(want, abs=1e-6)
    assert np.allclose(np.diag(kind.similarity), 1)


def test_mean_distance_and_groups_of_tokens():
    weights = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.25, 0, 0.75]])
    assert mean_distance(weights).item() == pytest.approx((0 + 0.5 + 0.5) / 3)
    grouped = attention_by_group(weights, [(0, 1), (1, 3)])
    assert torch.equal(grouped, torch.tensor([[1.0, 0], [0.375, 0.625]]))


def test_bytes_of_a_chinese_character_are_one_label(tmp_path):
    sentence = tokenize_sentence(tmp_path, 257, "公司a", as_bytes=True)
    assert sentence.labels == ("[start]", "公", "司", "a")
    assert sentence.groups == ((0, 1), (1, 4), (4, 7), (7, 8))
    assert sentence.tokens_of("司") == (4, 7)


def test_token_ids_are_their_own_labels(tmp_path):
    sentence = tokenize_sentence(tmp_path, 100, "7 42 7", as_ids=True)
    assert sentence.ids == (7, 42, 7) and sentence.labels == ("7", "42", "7")
    assert sentence.tokens_of("42") == (1, 2)
    with pytest.raises(ValueError, match="--swap: no token covers ' '"):
        sentence.tokens_of(" ")


def test_exchanging_words_of_unlike_length_keeps_every_token():
    assert exchanged_order(7, (1, 2), (4, 6)) == [0, 4, 5, 2, 3, 1, 6]
    assert exchanged_order(7, (4, 6), (1, 2)) == [0, 4, 5, 2, 3, 1, 6]


@pytest.mark.skipif(not LLAMA2XS.exists(), reason="the shared checkpoint is not here")
def test_a_trained_checkpoint_with_its_tokenizer():
    sheet = measure_checkpoint(Request(LLAMA2XS, "公司收购了对手。", ("公司", "对手")))
    assert sheet.sentence.labels == ("<s>", *"公司收购了对手。")
    assert sheet.structure.parameters == 312_000 and sheet.structure.kv_heads == 4
    assert sheet.position_sources[0].unfinished == [2, 3]
    assert sheet.swap.without.last_by_layer[1] < 1e-5 < sheet.swap.without.last_by_layer[2]
    assert sheet.swap.with_positions.last_by_layer[1] > 1e-3


def test_the_command_prints_and_writes_a_page(folders, tmp_path, call):
    page = tmp_path / "inspect.html"
    code, said, err = call("inspect", "model", folders["llama"], "--out", page)
    assert code == 0, err
    for shown in ("key/value heads", "no full turn in 64 tokens", "farthest", "exchanged"):
        assert shown in said
    assert "No --sentence was given" in said
    assert page.read_text().count("<svg") == 6


def test_json_goes_to_stdout_alone(folders, call):
    asked = ["--sentence", "a b c", "--swap", "a", "c", "--json"]
    code, out, _ = call("inspect", "model", folders["bert"], *asked)
    said = json.loads(out)
    assert code == 0
    assert said["causal"] is False and said["swap"]["words"] == ["a", "c"]
    assert said["positions"][0]["kind"] == "table"
    assert np.shape(said["attention_distance"]["all"]) == (2, 4)


BAD = {
    "missing": ([], "no such folder"),
    "file": ([], "not a folder"),
    "no config": ([], "not a model folder, it has no config.json"),
    "pickle": ([], "weights must be safetensors, found only pytorch_model.bin"),
    "long": (["--sentence", "x" * LENGTH], f"65 tokens, .* takes {LENGTH} at most"),
    "empty": (["--sentence", " "], "--sentence is empty"),
    "word": (["--sentence", "a b", "--swap", "a", "z"], "'z' is not in the text 'a b'"),
    "twice": (["--sentence", "a b", "--swap", "a", "a"], "overlap or are the same"),
    "default words": (["--swap", "dog", "cat"], "'dog' is not in the text 'The company"),
    "ids": (["--ids", "--sentence", "5 900"], r"must lie in 0 \.\. 256"),
    "layer": (["--layer", "7"], r"layers are 0 \.\. 1, got 7"),
    "not for a model": (["--head-dim", "32"], "No such option:? '?--head-dim"),
    "no tokenizer": ([], "no tokenizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, folders, tmp_path, call):
    options, expected = BAD[case]
    folder = folders["llama"]
    if case == "missing":
        folder = tmp_path / "nothing"
    if case == "no config":
        folder = tmp_path
    if case == "file":
        folder = tmp_path / "model.txt"
        folder.write_text("no")
    if case == "pickle":
        folder = tmp_path
        shutil.copy(folders["llama"] / "config.json", folder)
        (folder / "pytorch_model.bin").write_bytes(b"never read")
    if case == "no tokenizer":
        folder = save("llama", tmp_path, vocab_size=300)
    code, _, error = call("inspect", "model", folder, *options)
    assert code == 2 and error.count("\n") == 1
    assert re.search(expected, error)


@pytest.mark.parametrize("name", ["ropee", "no/where", "README.md"])
def test_unknown_names_end_with_one_line(name, call):
    code, out, err = call("inspect", "model", name)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert name in err


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", ["opt", "bloom", "deberta-v2"])
def test_pages_of_other_families(sheets, tmp_path, family):
    page_about(sheets[family], (1,)).write(tmp_path / "inspect.html")
    page = (tmp_path / "inspect.html").read_text()
    assert page.count("<svg") == (6 if family == "bloom" else 5)
    assert "1 of 2 layers are drawn" in page


def test_a_layer_that_only_one_stack_has_is_drawn_of_that_stack_alone(sheets):
    reading = sheets["t5"].reading
    encoder, decoder = reading.attention["encoder"], reading.attention["decoder"]
    uneven = replace(reading, attention={"encoder": encoder, "decoder": decoder[:1]})
    blocks = list(attention_plots(replace(sheets["t5"], reading=uneven), (1,)))
    notes = [block for block in blocks if isinstance(block, str)]
    assert [note.partition(" are drawn")[0] for note in notes] == ["1 of 2 layers", "0 of 1 layers"]
    assert [plot.name for plot in blocks if not isinstance(plot, str)] == [
        "attention-encoder-layer-1"
    ]


def test_tokens_of_any_script_name_both_axes_of_attention():
    chart = figures.attention_chart(np.ones((5, 2, 2)) / 2, ["公司", "$收购"])
    svg = to_svg(chart.figure, "words")
    assert svg.count(">公司<") == svg.count(">$收购<") == 5 + 1


def test_the_table_of_attention_has_a_row_for_each_pair_of_tokens():
    weights = np.arange(8.0).reshape(2, 2, 2) / 8
    chart = figures.attention_chart(weights, ["a", "b"])
    rows = [*zip(*chart.data.values(), strict=True)]
    assert [*chart.data] == ["panel", "key", "query", "attention weight"]
    assert rows[0] == ("head 0", "a", "a", 0.0) and rows[1] == ("head 0", "b", "a", 1 / 8)
    assert rows[6] == ("head 1", "a", "b", 6 / 8) and len(rows) == 8
    assert_drawn_from_its_table(chart)


@pytest.fixture(scope="module")
def shown(folders, tmp_path_factory):
    """A page with Chinese tokens."""
    path = tmp_path_factory.mktemp("page") / "inspect.html"
    request = Request(folders["t5"], "公司收购了对手。", ("公司", "对手"), as_bytes=True)
    page = page_about(measure_checkpoint(request))
    page.write(path)
    assert all(plot.caption.endswith(".") for plot in page.plots())
    assert len({plot.name for plot in page.plots()}) == len(page.plots()) == 10
    for plot in page.plots():
        assert_drawn_from_its_table(plot.chart)
    return path


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_is_well_shown(browser, shown, width, dark):
    seen = browser.open(shown, width, dark=dark)
    seen.assert_well_shown(num_figures=10)
    assert "With 公司 and 对手 exchanged" in seen.text and "blind to order" in seen.text
    assert seen.text.index("exchanged") < seen.text.index("\nWho saw whom\n")
