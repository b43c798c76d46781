"""Wrong input to `posenc extend`: one line, exit code 2, nothing written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc.extend import extension
from posenc.extend.options import DEFAULTS
from posenc.extend.refusals import check_before_loading
from posenc.hf.checkpoint.tokenization import require_mask_token_id
from tests.hf_models import LENGTH, save

TARGET = 3 * LENGTH
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A Llama, one without any positions that can be stretched, and one with a large vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    save("llama", folder / "llama")
    save("llama", folder / "words", vocab_size=300)
    save("falcon", folder / "falcon", alibi=True)
    save("mistral", folder / "mistral", sliding_window=16)
    save(
        "xglm",
        folder / "xglm",
        vocab_size=257,
        d_model=32,
        num_layers=1,
        attention_heads=2,
        ffn_dim=32,
        max_position_embeddings=LENGTH,
    )
    return folder


def config(**changes) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def yarn(**keys) -> Change:
    return config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, **keys})


def weights_in_8_bits(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = {name: w.to(torch.float8_e4m3fn) for name, w in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def packed_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    packed = {"model.layers.0.mlp.up_proj.qweight": torch.zeros(4, 8, dtype=torch.int32)}
    save_file(load_file(path) | packed, path, metadata={"format": "pt"})


LENGTHS = {"original_max_position_embeddings": LENGTH}
FOLDERS: dict[str, tuple[str, Change]] = {
    "its weights are quantised (awq, 4 bits), which posenc neither measures": (
        "llama",
        config(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128}),
    ),
    "its weights are quantised (fp8), which": ("llama", weights_in_8_bits),
    "model.layers.0.mlp.up_proj.qweight holds several numbers in one": ("llama", packed_weights),
    "no such folder": ("llama", shutil.rmtree),
    "it has no config.json": ("llama", lambda folder: (folder / "config.json").unlink()),
    "not valid JSON": ("llama", lambda folder: (folder / "config.json").write_text("{")),
    "safetensors, found only pytorch_model.bin": ("llama", only_pickles),
    "safetensors, found none": ("llama", lambda folder: (folder / "model.safetensors").unlink()),
    "model.safetensors: damaged safetensors file": ("llama", cut_weights),
    "9 weights that config.json needs are missing": ("llama", config(num_hidden_layers=3)),
    "lm_head.weight is stored as (257, 32), and config.json needs (257, 16).": (
        "llama",
        config(hidden_size=16),
    ),
    "neither rotary settings in its config nor a table": ("xglm", lambda folder: None),
    "it has ALiBi instead of a rotation": ("falcon", lambda folder: None),
    "all its layers have a window of 16 tokens": ("mistral", lambda folder: None),
    "mscale_all_dim with rope_type linear": (
        "llama",
        config(
            rope_parameters={
                "rope_type": "linear",
                "rope_theta": 1e4,
                "factor": 2.0,
                "mscale_all_dim": 1.0,
            }
        ),
    ),
    "T5's bias saturates": ("llama", config(model_type="t5")),
    "BLOOM needs no extension": ("llama", config(model_type="bloom")),
    "which is never run": (
        "llama",
        config(model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Mine"}),
    ),
    "unknown rotary keys fctr": (
        "llama",
        config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "fctr": 2}),
    ),
    "write attention_factor with the product": (
        "llama",
        yarn(attn_factor=1.0, attention_factor=1.1, **LENGTHS),
    ),
    "without original_max_position_embeddings": ("llama", yarn()),
    "rope_parameters without rope_theta": (
        "llama",
        config(rope_parameters={"rope_type": "linear", "factor": 2.0}),
    ),
    "rope_theta is 500000.0 outside and 10000.0 inside": (
        "llama",
        config(
            rope_theta=500000.0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
        ),
    ),
    "has rope_parameters and another rope_scaling": (
        "llama",
        config(rope_scaling={"type": "linear", "factor": 2.0}),
    ),
    "no tokenizer. Put tokenizer.json": ("words", lambda folder: None),
}

OPTIONS: dict[str, list[str]] = {
    f"not beyond the training length of {LENGTH}": ["--to", str(LENGTH)],
    "got 'yran'. Did you mean 'yarn'?": ["--method", "yran"],
    "Give --allow-cache-unsafe": ["--method", "dynamic"],
    "needs at least 192": ["--text", "{short}"],
    "missing.txt: no such file": ["--text", "missing.txt"],
    ": not a file": ["--text", "{folder}"],
    "text is not UTF-8 (byte 0xff at 4)": ["--text", "{binary}"],
    "no folder can be written in": ["--out", "{binary}/out"],
    "is not a folder": ["--method", "search", "--state", "{short}"],
    "is a folder; name a file in it": ["--report", "{there}"],
    "no text in it": ["--text", "{empty}"],
    "exists already": ["--out", "{there}"],
    "Token ids must lie in 0 .. 256": ["--ids", "--text", "{ids}"],
    "whole numbers between spaces": ["--ids", "--text", "{short}"],
    "none stretches nothing": ["--method", "none"],
    "leaves nothing to search": ["--method", "search", "--search-evaluations", "0"],
    "Invalid value for '--to'": ["--to", "far"],
    "--batch, --lora, --no-distill, --recompute: nothing is tuned": [
        *"--batch 8 --lora 4 --no-distill --recompute".split()
    ],
    "a text is one or the other": ["--ids", "--bytes"],
}


def refused(folder: Path, work: Path, call, *options: str) -> str:
    """The one line that says no."""
    command = ["extend", folder, "--to", TARGET, "--method", "ntk", *options]
    if "--out" not in options:
        command += ["--out", work / "out"]
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
    code, out, err = call(*command)
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*")} == before
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("posenc: ")
    return line


@pytest.fixture
def texts(tmp_path) -> dict[str, str]:
    contents = {
        "long": "the fox and the dog " * 200,
        "short": "a b",
        "empty": "\n",
        "ids": "1 257 " * 400,
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.txt").write_text(content)
    (tmp_path / "binary.txt").write_bytes(b"the \xff fox " * 100)
    found = {name: str(tmp_path / f"{name}.txt") for name in (*contents, "binary")}
    return {**found, "folder": str(tmp_path)}


@pytest.mark.parametrize("message", FOLDERS)
def test_a_folder_that_cannot_be_extended(message, models, texts, tmp_path, call):
    name, change = FOLDERS[message]
    folder = tmp_path / name
    shutil.copytree(models / name, folder)
    change(folder)
    assert message in refused(folder, tmp_path, call, "--text", texts["long"])


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "config_sentence_transformers.json",
        "1_Pooling/config.json",
    ],
)
def test_a_copied_file_that_is_no_strict_json(name, word, models, texts, tmp_path, call):
    """A copy would have it as well, and strict readers would stop at it."""
    folder = tmp_path / "model"
    shutil.copytree(models / "llama", folder)
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    (folder / name).write_text(f'{{"temperature": 1.0, "inner": [{{"x": {word}}}]}}')
    said = refused(folder, tmp_path, call, "--text", texts["long"])
    assert f"{folder / name}: not valid JSON (it has {word}, which JSON has no word for" in said


def test_an_infinity_next_to_a_text_config_is_refused_before_anything_is_measured(
    models, texts, tmp_path, call
):
    """That config.json is written as it was read."""
    folder = tmp_path / "model"
    shutil.copytree(models / "llama", folder)
    config(text_config={"limit": float("inf")})(folder)
    said = refused(folder, tmp_path, call, "--text", texts["long"])
    assert "config.json: text_config.limit is inf, which JSON has no word for" in said


def test_the_word_nan_in_a_string_is_copied(models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models / "llama", folder)
    (folder / "added_tokens.json").write_text('{"NaN": 3, "Infinity": 4, "large": 1e999}')
    check_before_loading(folder, tmp_path / "out", "ntk", DEFAULTS)


@pytest.mark.parametrize("message", OPTIONS)
def test_a_request_that_cannot_be_met(message, models, texts, tmp_path, call):
    (tmp_path / "there").mkdir()
    places = {**texts, "there": str(tmp_path / "there")}
    options = [option.format(**places) for option in OPTIONS[message]]
    if "--text" not in options:
        options += ["--text", texts["long"]]
    assert message in refused(models / "llama", tmp_path, call, *options)


@pytest.mark.parametrize("options", [("--bytes",), ("--ids",), ()])
def test_a_masked_model_without_a_tokenizer_gets_no_invented_mask(options, tmp_path, texts, call):
    """transformers makes a tokenizer with an empty vocabulary, whose mask would be a real byte."""
    folder = save("bert", tmp_path / "bert")
    with pytest.raises(ValueError, match=r"no tokenizer\. Put tokenizer\.json"):
        require_mask_token_id(folder)
    asked = ("--method", "tile", "--text", texts["long"], "--out", str(tmp_path / "out"))
    said = refused(folder, tmp_path, call, *asked, *options)
    assert "no tokenizer. Put tokenizer.json next to the weights." in said


def test_tuning_needs_a_folder_to_write_to(models, texts, call):
    asked = ["--to", 192, "--tune", 3, "--text", texts["long"]]
    code, _, err = call("extend", models / "llama", *asked)
    assert code == 2 and "say with --out" in err


def test_a_model_that_reads_best_as_it_is_is_not_written(
    models, texts, tmp_path, call, monkeypatch
):
    """A copy would promise a length that nothing was done for."""
    monkeypatch.setattr(extension, "recommend", lambda *_, **__: ("none", "It is best."))
    out = tmp_path / "out"
    asked = "--search-evaluations 0 --windows 1 --task none --bytes".split()
    where = ["--text", texts["long"], "--out", out]
    code, shown, said = call("extend", models / "llama", "--to", TARGET, *where, *asked)
    assert code == 1
    assert shown.startswith("It is best.")
    assert f"{out} is not written: It is best" in said.splitlines()[-1]
    assert not out.exists()
