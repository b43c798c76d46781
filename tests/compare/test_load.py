"""A model that a comparison has trained, with its tokenizer, in one line."""

import shutil

import pytest
import torch
import transformers

import posenc
from tests.texts import prose
from tests.tokenizers_of_tests import trained

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL = {"train_length": 16, "batch": 2, "width": 16, "layers": 1, "heads": 2, "steps": 2}
SMALL |= {"test_lengths": [16, 32], "seeds": 2, "tune_steps": 0}


ENCODINGS = ["rope", "steep=alibi:learned=true"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a text, and a run on its bytes."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_bytes(prose(9000))
    posenc.compare.run(ENCODINGS, text=text, out=folder / "bytes", **SMALL)
    return folder


@pytest.mark.parametrize("run", ["bytes", pytest.param("bpe", marks=pytest.mark.slow)])
def test_a_model_and_its_tokenizer_come_back(runs, run):
    if run == "bpe":
        text = runs / "text.txt"
        tokenizer = trained(runs / "bpe.json", text.read_text(encoding="utf-8"), 300)
        posenc.compare.run(ENCODINGS, text=text, out=runs / "bpe", tokenizer=tokenizer, **SMALL)
    model, tokenizer, trial, folder = posenc.compare.load(runs / run, "rope", seed=1)
    assert (trial.encoding, trial.seed, model.training) == ("rope", 1, False)
    ids = tokenizer.encode("the quick brown fox")
    assert tokenizer.decode(ids) == "the quick brown fox" and (len(ids) < 19) == (run == "bpe")
    logits = model(torch.tensor([ids]))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(theirs(torch.tensor([ids])).logits, logits, atol=1e-5, rtol=1e-5)
    if run == "bpe":
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
        text = "the quick, brown\n fox! 鲸鱼"
        assert loaded(text)["input_ids"] == tokenizer.encode(text)


def test_an_encoding_is_found_by_its_label_and_by_its_text(runs):
    by_label = posenc.compare.load(runs / "bytes", "steep")
    by_text = posenc.compare.load(runs / "bytes", "alibi:learned=true")
    assert by_label.trial == by_text.trial and by_label.huggingface is None


@pytest.mark.parametrize(
    "arguments, why",
    [
        (("bytes", "t5"), r"has no encoding 't5'; it has rope, steep"),
        (("bytes", "rope", 7), r"has no seed 7 of rope; it has 0, 1"),
        (("nowhere", "rope"), r"holds no study.json"),
    ],
)
def test_what_a_run_has_not_is_refused(runs, arguments, why):
    run, *others = arguments
    with pytest.raises(ValueError, match=why) as refused:
        posenc.compare.load(runs / run, *others)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="has no trial on 'copy'; its tasks are text"):
        posenc.compare.load(runs / "bytes", "rope", task="copy")


def test_a_trial_without_weights_or_with_others_is_refused(runs, tmp_path):
    run = shutil.copytree(runs / "bytes", tmp_path / "run")
    home = run / posenc.compare.load(run, "rope").trial.folder
    weights = home / "model.safetensors"
    steep = run / posenc.compare.load(run, "steep").trial.folder
    weights.write_bytes((steep / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="does not hold the weights of rope"):
        posenc.compare.load(run, "rope")
    weights.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors is not in .*rope-seed0-"):
        posenc.compare.load(run, "rope")
    (home / "result.json").unlink()
    with pytest.raises(ValueError, match="has not finished"):
        posenc.compare.load(run, "rope")


def test_weights_of_a_reused_trial_are_those_of_the_first_run(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reused = posenc.compare.run(
        ["rope"], text=runs / "text.txt", out="again", reuse=[str(runs)], **SMALL
    )
    assert reused.reused
    again, first = (posenc.compare.load(run, "rope").model for run in ("again", runs / "bytes"))
    assert torch.equal(again.tokens.weight, first.tokens.weight)
