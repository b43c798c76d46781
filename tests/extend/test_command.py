"""`posenc extend` as a user runs it: after `posenc compare`, killed and run again, within bounds of
memory."""

import json
from pathlib import Path

import pytest
import torch

import posenc
from posenc.extend.measure import samples
from posenc.extend.measure.losses import LossReader
from posenc.hf.checkpoint.loading import load_checkpoint
from tests.fuzz import kills_extend
from tests.hf_models import LENGTH, save, transformers

TARGET = 3 * LENGTH
TEXT = "<|endoftext|>".join(f"{i} the fox and the dog " * 12 for i in range(40))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def test_a_folder_that_compare_exported_is_extended(text, tmp_path, call, undrawn):
    tiny = "--steps 5 --tune-steps 1 --seeds 1 --width 32 --layers 1 --heads 2 --workers 1"
    where = ("--text", text, "--out", tmp_path / "study")
    assert (
        call("compare", "rope", *tiny.split(), "--train-length", 64, "--batch", 2, *where)[0] == 0
    )
    (folder,) = tmp_path.glob("study/**/huggingface")
    where = ("--text", text, "--out", tmp_path / "longer")
    code, out, err = call(
        "extend", folder, "--to", TARGET, "--method", "linear", "--windows", 2, *where
    )
    assert code == 0 and "Written and proved" in err
    assert out.split()[0] in ("Extend", "Do", "Leave") and "Perplexity by position" in out
    config = json.loads((tmp_path / "longer" / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "linear"
    assert config["max_position_embeddings"] == TARGET


def test_stock_generation_reads_prompts_of_the_new_length(text, tmp_path, call):
    folder = save("llama", tmp_path / "old")
    (folder / "generation_config.json").write_text(json.dumps({"max_length": LENGTH}))
    (folder / "README.md").write_text("Of the old model.")
    (folder / "onnx").mkdir()
    where = ("--text", text, "--bytes", "--task", "none", "--out", tmp_path / "new")
    code, _, err = call(
        "extend", folder, "--to", TARGET, "--method", "yarn", "--windows", 2, *where
    )
    assert code == 0 and "Left behind: README.md, onnx" in err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    prompt = torch.arange(2 * LENGTH)[None] % 200 + 5
    written = model.generate(prompt, do_sample=False)
    assert written.shape[1] > prompt.shape[1]


@pytest.mark.parametrize("to", [96.0, "96", True, None])
def test_a_length_that_is_no_whole_number_is_refused(to, tmp_path):
    with pytest.raises(TypeError, match="extend: to must be a whole number of tokens, got"):
        posenc.extend.extend(save("llama", tmp_path / "old"), to, ["text " * 99])


def test_a_model_with_an_attached_encoding_is_not_taken_for_the_stock_one(text, tmp_path, call):
    """Its config and weights alone are another model, which nobody asked about."""
    model = transformers.AutoModelForCausalLM.from_pretrained(save("llama", tmp_path / "old"))
    posenc.hf.attach(model, "alibi")
    folder = tmp_path / "attached"
    model.save_pretrained(folder)
    said = "its model has an encoding attached by posenc (posenc.json)"
    for command in (
        ("extend", folder, "--to", TARGET, "--bytes", "--text", text),
        ("inspect", "model", folder, "--bytes"),
        ("doctor", folder, "--ask", "none"),
        ("doctor", tmp_path / "old", folder),
    ):
        code, out, err = call(*command)
        assert code == 2 and said in out + err, (out, err)
    beside = folder / "of another model.json"
    beside.write_bytes((folder / "config.json").read_bytes())
    assert call("doctor", beside, "--ask", "none")[0] == 0
    posenc.hf.detach(model)
    model.save_pretrained(folder)
    assert call("doctor", folder, "--ask", "none")[0] == 0


@pytest.mark.slow
def test_a_killed_command_ends_as_an_undisturbed_one():
    """Killed at a random time and inside a write; python -m tests.fuzz.kills_extend does more."""
    seen = kills_extend.main(2, seed=1)
    assert seen["kills"] == 2
    assert seen["at a random time"] == seen["inside a write"] == 1
    assert seen["runs that came through"] >= 1


def test_a_few_long_documents_are_cut_and_shared_out():
    text = " ".join(map(str, range(4000)))
    fit, measured = samples.split_for_fitting_and_measuring([text], 64)
    assert len(fit) == len(measured) == samples.FEWEST_DOCUMENTS_OR_PIECES // 2
    assert sorted("".join(fit + measured)) == sorted(text)
    assert min(map(len, fit + measured)) >= 8 * 64
    assert not set(fit) & set(measured)
    many = [str(i) for i in range(40)]
    fit, measured = samples.split_for_fitting_and_measuring(many, 64)
    assert sorted(fit + measured) == sorted(many)
    assert set(fit) == set(many[:20])
    assert fit != many[:20]
    assert samples.split_for_fitting_and_measuring(["short"], 64)[0] == []


def test_windows_come_from_as_many_documents_as_possible():
    texts = [f"{i} " * 4000 for i in range(8)]
    windows = samples.sample_windows(lambda said: list(said.encode()), texts, 64, 16)
    assert windows.tokens.shape == (16, 64) and windows.document_of_token.unique().tolist() == list(
        range(8)
    )
    short = samples.sample_windows(lambda said: list(said.encode()), ["ab" * 40] * 3, 64, 16)
    assert short.document_of_token.unique().tolist() == [0, 1, 2]


def test_a_window_reads_each_token_with_the_last_few_before_it(tmp_path):
    model = load_checkpoint(save("llama", tmp_path / "llama")).model
    tokens = torch.randint(0, 256, (2, 41), generator=torch.Generator().manual_seed(0))
    got = LossReader(model, window_length=16).losses(tokens)
    assert got.shape == tokens.shape
    for at in range(1, 41):
        # Of 16 tokens the newest four are scored, but for the first window and the last token.
        stop = max(16, min(41, -(-(at + 1) // 4) * 4))
        alone = LossReader(model).losses(tokens[:, stop - 16 : stop])[:, at - stop]
        torch.testing.assert_close(got[:, at], alone, rtol=1e-4, atol=1e-4)
