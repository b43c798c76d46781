"""Encoders: tables that start behind the padding token, masked tokens, folders of
sentence-transformers."""

import json
from pathlib import Path

import pytest
import torch

from posenc import extend as hf
from posenc.extend.options import Options
from posenc.hf import learned_tables
from posenc.hf.checkpoint.loading import load_checkpoint
from tests.experiment import experiment
from tests.hf_models import (
    LENGTH,
    save,
    skip_if_absent,
    skip_if_yarn_is_for_all_layers,
    transformers,
)

TARGET = 3 * LENGTH
DOCUMENTS = [" ".join(f"w{(7 * i + j) % 200 + 20}" for j in range(400)) for i in range(8)]
QUICK = Options(windows=1, search_evaluations=0, task=["none"])
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 257,
}
FAMILIES = {
    "camembert": {**SIZES, "pad_token_id": 1, "max_position_embeddings": LENGTH + 2},
    "xlm-roberta": {**SIZES, "pad_token_id": 0, "max_position_embeddings": LENGTH + 1},
    "roberta": {**SIZES, "pad_token_id": 5, "max_position_embeddings": LENGTH + 6},
    "mpnet": {**SIZES, "max_position_embeddings": LENGTH + 2},
    "electra": {**SIZES, "embedding_size": 32, "max_position_embeddings": LENGTH},
    "distilbert": {
        "vocab_size": 257,
        "dim": 32,
        "hidden_dim": 64,
        "n_layers": 1,
        "n_heads": 4,
        "max_position_embeddings": LENGTH,
    },
    "modernbert": {
        **SIZES,
        "num_hidden_layers": 2,
        "max_position_embeddings": LENGTH,
        "layer_types": ["full_attention", "sliding_attention"],
        "local_attention": 16,
        "pad_token_id": 0,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "nomic_bert": {**SIZES, "max_position_embeddings": LENGTH},
}
ROTARY = ("modernbert", "nomic_bert")


save_words = experiment("tiny_models").save_words


def save_encoder(family: str, folder: Path) -> Path:
    skip_if_absent(family)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForMaskedLM.from_config(config)
    model.save_pretrained(folder)
    save_words(folder)
    return folder


def skip_where_transformers_own_code_ends(folder: Path) -> None:
    """Skip if a rotary model, whose positions have no end, cannot be run past its trained length:
    NomicBERT of early releases looks up each position in a buffer of that length."""
    stock = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    with torch.inference_mode():
        try:
            stock(torch.full((1, TARGET), 9))
        except RuntimeError as ended:
            pytest.skip(f"this transformers' own model ends at its trained length: {ended}")


@pytest.mark.quick(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_reads_three_times_as_far_and_is_proved(family, tmp_path):
    folder, out = save_encoder(family, tmp_path / family), tmp_path / "out"
    if family in ROTARY:
        skip_where_transformers_own_code_ends(folder)
    if family == "modernbert":
        skip_if_yarn_is_for_all_layers()
    checkpoint = load_checkpoint(folder)
    assert checkpoint.masked
    assert checkpoint.trained_length == LENGTH
    assert (learned_tables.growable_table(checkpoint.model) is None) is (family in ROTARY)
    method = "yarn" if family in ROTARY else "interpolate"
    outcome = hf.extend(folder, TARGET, DOCUMENTS, method=method, out=out, options=QUICK)
    assert outcome.proof is not None
    tokens = sum(e.tokens for e in outcome.measured[method][1].loss_by_position)
    assert tokens == pytest.approx(0.15 * TARGET, rel=0.4)
    again = load_checkpoint(out)
    assert again.trained_length == TARGET
    with torch.inference_mode():
        read = again.model(torch.full((1, TARGET), 9)).logits
    assert read.isfinite().all()


@pytest.mark.parametrize("family", ["roberta", "mpnet"])
def test_a_table_behind_the_padding_token_ends_where_the_model_says(family, tmp_path):
    """One token further, its own code has no row left."""
    model = load_checkpoint(save_encoder(family, tmp_path / family)).model
    with torch.inference_mode():
        model(torch.full((1, LENGTH), 9))
        with pytest.raises(Exception, match=r"out of range|out of bounds|size of tensor|expanded"):
            model(torch.full((1, LENGTH + 1), 9))


def test_a_folder_of_sentence_transformers_keeps_its_pooling(tmp_path):
    folder, out = save_encoder("electra", tmp_path / "electra"), tmp_path / "out"
    modules = [
        {"idx": 0, "path": ""},
        {"idx": 1, "path": "1_Pooling"},
        {"idx": 2, "path": "2_Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LENGTH}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense/model.safetensors").write_bytes(b"weights")
    (folder / "2_Dense/pytorch_model.bin").write_bytes(b"a pickle")
    hf.extend(folder, TARGET, DOCUMENTS, method="tile", out=out, options=QUICK)
    assert json.loads((out / "modules.json").read_text()) == modules
    assert json.loads((out / "sentence_bert_config.json").read_text())["max_seq_length"] == TARGET
    assert (out / "1_Pooling/config.json").read_text() == '{"pooling_mode_mean_tokens": true}'
    assert (out / "2_Dense/model.safetensors").read_bytes() == b"weights"
    assert not (out / "2_Dense/pytorch_model.bin").exists()


@pytest.mark.parametrize("sentences", [False, True])
def test_serve_md_loads_an_encoder_with_the_head_that_it_has(sentences, tmp_path, monkeypatch):
    folder = save_encoder("electra", tmp_path / "electra")
    if sentences:
        (folder / "modules.json").write_text("[]")
    hf.extend(folder, TARGET, DOCUMENTS, method="tile", out=tmp_path / "out", options=QUICK)
    said = (tmp_path / "out/SERVE.md").read_text()
    assert ('SentenceTransformer("out")' in said) is sentences
    block = said.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(block, found)
    assert type(found["model"]).__name__ == "ElectraForMaskedLM"
    assert found["model"].config.max_position_embeddings == TARGET


@pytest.mark.parametrize("content", ['[{"path": "../outside"}]', '[{"path": ".."}]', "{", '["a"]'])
def test_a_list_of_modules_that_leads_elsewhere_is_refused(content, tmp_path):
    folder, out = save_encoder("electra", tmp_path / "electra"), tmp_path / "out"
    (tmp_path / "outside").mkdir()
    (folder / "modules.json").write_text(content)
    with pytest.raises(ValueError, match=r"modules\.json: "):
        hf.extend(folder, TARGET, DOCUMENTS, method="tile", out=out, options=QUICK)
    assert not out.exists()


def test_an_encoder_without_its_head_says_so(tmp_path):
    config = transformers.AutoConfig.for_model("bert", **SIZES, max_position_embeddings=LENGTH)
    transformers.BertModel(config).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"it has a BertModel, without .* could predict no token"):
        load_checkpoint(tmp_path / "bare")


def test_two_stacks_are_refused_by_their_name(tmp_path):
    sizes = {
        "vocab_size": 257,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "max_position_embeddings": LENGTH,
    }
    save("bart", tmp_path / "bart", **sizes)
    config = json.loads((tmp_path / "bart/config.json").read_text()) | {"is_encoder_decoder": True}
    (tmp_path / "bart/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="a bart model has an encoder and a decoder"):
        load_checkpoint(tmp_path / "bart")


def test_an_encoder_saved_with_other_heads_is_no_decoder(tmp_path):
    """transformers builds a decoder of BERT for the asking, and lets it see what comes next."""
    sizes = {**SIZES, "max_position_embeddings": LENGTH}
    encoder = transformers.BertForPreTraining(transformers.BertConfig(**sizes))
    encoder.save_pretrained(tmp_path / "encoder")
    assert load_checkpoint(tmp_path / "encoder").masked
    decoder = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, is_decoder=True))
    decoder.save_pretrained(tmp_path / "decoder")
    assert not load_checkpoint(tmp_path / "decoder").masked
