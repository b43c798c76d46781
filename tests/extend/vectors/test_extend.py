"""Folders of models without a head, extended from end to end."""

import json

import pytest
import torch

from posenc import extend as hf
from posenc.extend.options import Options
from posenc.extend.report import facts_of, report_of
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.tune_config import TuneConfig
from posenc.report.terminal import as_text
from tests.extend.export.test_embedding_models import FAMILIES
from tests.hf_models import skip_if_absent, skip_if_yarn_is_for_all_layers, transformers

TRAINED, TARGET = 192, 384
DOCUMENTS = [" ".join(f"w{(7 * i + j) % 200 + 20}" for j in range(900)) for i in range(16)]
QUICK = Options(windows=4, device="cpu")
OFFSET = {"mpnet": 2}
METHOD = {"mpnet": "hierarchical", "modernbert": "yarn", "nomic_bert": "linear", "qwen3": "ntk"}
OF_QWEN = {"num_key_value_heads": 4, "head_dim": 8}


def save_bare(folder, family):
    skip_if_absent(family)
    torch.manual_seed(0)
    sizes = dict(FAMILIES["nomic_bert" if family == "qwen3" else family])
    sizes |= OF_QWEN if family == "qwen3" else {}
    sizes["max_position_embeddings"] = TRAINED + OFFSET.get(family, 0)
    config = transformers.AutoConfig.for_model(family, **sizes)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", METHOD)
def test_a_model_without_a_head_is_measured_written_and_proved(family, tmp_path):
    if family == "modernbert":
        skip_if_yarn_is_for_all_layers()
    folder, out = save_bare(tmp_path / family, family), tmp_path / "out"
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    method = METHOD[family]
    outcome = hf.extend(
        folder, TARGET, DOCUMENTS, method=method, out=out, as_bytes=True, options=QUICK
    )
    assert list(outcome.measured) == ["none", method, "window"]
    assert outcome.proof is not None
    assert outcome.proof.logits_error <= 1e-5
    assert (out / "1_Pooling/config.json").exists()
    again = load_checkpoint(out, allow_no_head=True)
    assert not again.has_head
    assert again.trained_length == TARGET
    facts = facts_of(outcome)["measured"]
    lengths = [row["length"] for row in facts[method]["texts_found"]]
    assert lengths == [TRAINED, TARGET]
    assert [row["of"] for row in facts[method]["texts_found"]] == [4, 4]
    # A table has no row beyond its last, and texts that are cut are read up to there.
    unread = [row["length"] for row in facts["none"]["texts_found"]]
    assert unread == ([TRAINED] if family == "mpnet" else lengths)
    assert facts["window"]["short_texts"]["cosine"] == pytest.approx(1, abs=1e-6)
    said = as_text(report_of(outcome, "posenc extend"))
    assert "Fraction of texts found" in said
    assert "window: as trained, reading only the first 192 tokens" in said
    loaded = f'AutoModel.from_pretrained("{out.name}")'
    assert loaded in (out / "SERVE.md").read_text()


def test_a_folder_of_sentence_transformers_may_name_a_head_that_it_lacks(tmp_path):
    """As all-mpnet-base-v2: its config names the class that it was trained from."""
    folder = save_bare(tmp_path / "mpnet", "mpnet")
    config = json.loads((folder / "config.json").read_text())
    named = {**config, "architectures": ["MPNetForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(named))
    with pytest.raises(ValueError, match=r"weights that config\.json needs are missing"):
        load_checkpoint(folder, allow_no_head=True)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert not load_checkpoint(folder, allow_no_head=True).has_head


def test_a_head_is_not_thrown_away_for_a_pooling(tmp_path):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("mpnet", **FAMILIES["mpnet"])
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert load_checkpoint(tmp_path, allow_no_head=True).masked


REFUSED = {
    "tuning": ({"tune": TuneConfig(steps=1)}, {"out": "out"}, "so that --tune has no loss"),
    "a search": ({}, {"method": "search"}, "so that search has no loss to lower"),
    "a task": ({"task": ["needle"]}, {}, "so that it answers no --task"),
    "ids": ({}, {"as_ids": True, "as_bytes": False}, "--ids leaves no words"),
    "few windows": ({"windows": 3}, {}, "--windows 3: as many texts are searched"),
    "no room": ({}, {}, "63 tokens have no room for four facts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_predictions_is_refused_in_a_sentence(case, tmp_path):
    fields, arguments, words = REFUSED[case]
    folder = save_bare(tmp_path / "modernbert", "modernbert")
    if case == "no room":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    if "out" in arguments:
        arguments = arguments | {"out": tmp_path / "out"}
    options = Options(**({"windows": 4, "device": "cpu"} | fields))
    with pytest.raises(ValueError, match=words) as refused:
        hf.extend(folder, TARGET, DOCUMENTS, options=options, **({"as_bytes": True} | arguments))
    assert str(refused.value).count(". ") == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_writes_the_table_beside_the_page(tmp_path, call, undrawn):
    folder = save_bare(tmp_path / "mpnet", "mpnet")
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join(DOCUMENTS))
    asked = ("--to", TARGET, "--method", "tile", "--windows", 4, "--bytes", "--text", text)
    code, _, said = call("extend", folder, *asked, "--report", tmp_path / "page.html")
    assert code == 0, said
    header, *rows = (tmp_path / "page.csv").read_text().splitlines()
    assert header == "method,measure,tokens,value,low,high,texts"
    assert {row.partition(",")[0] for row in rows} == {"none", "tile", "window"}
