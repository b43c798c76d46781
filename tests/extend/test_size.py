"""Weights keep their dtype and their files, are held once, and go where the user says."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from posenc import extend as hf
from posenc.extend import extension
from posenc.extend.measure import losses
from posenc.extend.options import Options
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.teacher import Teacher
from posenc.hf.tune_config import TuneConfig
from tests.hf_models import LENGTH, save, transformers
from tests.hf_models import WORDS as DOCUMENTS

TARGET = 3 * LENGTH
QUICK = {"windows": 2, "search_evaluations": 0, "task_trials": 1}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def halves(tmp_path) -> Path:
    """A Llama in bfloat16, in several files."""
    folder = save("llama", tmp_path / "float32", spread=0.1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
    model.save_pretrained(tmp_path / "halves", max_shard_size="40KB")
    assert len(list((tmp_path / "halves").glob("*.safetensors"))) == 2
    return tmp_path / "halves"


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors*")}


def test_a_method_without_tuning_copies_the_files_as_they_are(halves, tmp_path):
    out = tmp_path / "out"
    outcome = hf.extend(halves, TARGET, DOCUMENTS, method="yarn", out=out, options=Options(**QUICK))
    assert outcome.checkpoint.model.dtype == torch.bfloat16
    assert shards(out) == shards(halves)
    assert INDEX in shards(out)
    for path in out.iterdir():  # a link would be one file with two names
        assert path.stat().st_nlink == 1
        assert not path.is_symlink()
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_another_dtype_in_memory_changes_nothing_on_the_disk(dtype, halves, tmp_path):
    out, options = tmp_path / "out", Options(**QUICK, precision=dtype)
    outcome = hf.extend(halves, TARGET, DOCUMENTS, method="ntk", out=out, options=options)
    assert outcome.checkpoint.model.dtype == getattr(torch, dtype)
    assert shards(out) == shards(halves)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_tuned_weights_are_written_in_the_dtype_and_the_sizes_they_came_in(halves, tmp_path):
    out = tmp_path / "out"
    options = Options(**QUICK, tune=TuneConfig(1, batch=1))
    outcome = hf.extend(halves, TARGET, DOCUMENTS, method="ntk", out=out, options=options)
    assert outcome.tuned is not None
    largest = max(map(len, shards(halves).values()))
    assert len(shards(out)) >= 2
    for path in out.glob("*.safetensors"):
        assert path.stat().st_size < 1.2 * largest
        assert path.stat().st_mode == (out / "config.json").stat().st_mode
        with safe_open(path, framework="pt") as opened:
            assert {opened.get_slice(name).get_dtype() for name in opened.keys()} == {"BF16"}
    assert shards(out) != shards(halves)


def test_a_longer_table_keeps_its_dtype_and_its_one_file(tmp_path):
    folder = save("gpt2", tmp_path / "float32", spread=0.1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
    model.save_pretrained(tmp_path / "halves")
    out, options = tmp_path / "out", Options(**QUICK, precision="float32")
    given = {"method": "interpolate", "out": out, "options": options}
    hf.extend(tmp_path / "halves", 16 * LENGTH, DOCUMENTS * 4, **given)
    assert list(shards(out)) == ["model.safetensors"]
    with safe_open(out / "model.safetensors", framework="pt") as opened:
        assert {opened.get_slice(name).get_dtype() for name in opened.keys()} == {"BF16"}


def test_losses_in_half_precision_are_those_of_one_pass(halves, monkeypatch):
    model = load_checkpoint(halves, dtype="auto").model
    tokens = torch.randint(0, 256, (2, 130), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(tokens).logits[:, :-1].float()
    expected = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    monkeypatch.setattr(losses, "MAX_TOKENS_WIDENED_AT_ONCE", 7)
    got = losses.next_token_losses(model, tokens, in_one_piece=True)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_logits_are_never_widened_all_at_once(halves, monkeypatch):
    model, seen = load_checkpoint(halves, dtype="auto").model, []
    plain = losses.F.cross_entropy

    def counted(rows, *given, **named):
        seen.append(rows.shape[0])
        return plain(rows, *given, **named)

    monkeypatch.setattr(losses.F, "cross_entropy", counted)
    monkeypatch.setattr(losses, "MAX_TOKENS_WIDENED_AT_ONCE", 16)
    losses.next_token_losses(model, torch.zeros(1, 100, dtype=torch.long), in_one_piece=True)
    assert max(seen) == 16
    assert sum(seen) == 99


def test_weights_on_the_cpu_are_read_where_their_file_lies(halves):
    """Held once: a copy would be anonymous memory."""
    assert are_read_where_their_files_lie(load_checkpoint(halves, dtype="auto").model, halves)


def are_read_where_their_files_lie(model, folder: Path) -> bool:
    spans = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        where, _, rest = line.partition(" ")
        if str(folder) in rest:
            spans.append(tuple(int(end, 16) for end in where.split("-")))
    return all(any(low <= p.data_ptr() < high for low, high in spans) for p in model.parameters())


@pytest.mark.parametrize("precision", ["auto", "float32"])
def test_the_teacher_of_full_tuning_is_the_folder_and_teaches_what_a_copy_does(
    precision, halves, tmp_path, monkeypatch
):
    teachers, plain_teacher = [], extension._teacher

    def from_folder(*given):
        teachers.append(plain_teacher(*given))
        return teachers[-1]

    def copied(run, _variant):
        return Teacher(copy.deepcopy(run.checkpoint.model))

    config = TuneConfig(3, batch=1, lr=1e-2, short_share=0.5)
    options = Options(**QUICK, precision=precision, tune=config)
    losses = {}
    for name, teacher in {"folder": from_folder, "copy": copied}.items():
        monkeypatch.setattr(extension, "_teacher", teacher)
        given = {"method": "ntk", "out": tmp_path / name, "options": options}
        losses[name] = hf.extend(halves, TARGET, DOCUMENTS, **given).tuning_losses
    assert losses["folder"] == losses["copy"]
    assert len(set(losses["folder"])) == 3
    original = teachers[0].model
    # A mapped file is no second memory. Another dtype than the file's is one.
    assert are_read_where_their_files_lie(original, halves) == (precision == "auto")
    for name, weight in load_checkpoint(halves, dtype=precision).model.state_dict().items():
        assert torch.equal(original.state_dict()[name], weight)


WRONG = {
    "--device tpu": "--device must be auto, cpu, cuda or mps, got 'tpu'",
    "--precision float8": "--precision must be auto, float32, bfloat16 or float16, got 'float8'",
}
if not torch.cuda.is_available():
    WRONG["--device cuda"] = "torch sees no CUDA device here"


@pytest.mark.parametrize("asked", WRONG)
def test_a_device_or_dtype_that_is_none_is_one_line(asked, halves, call):
    code, _, said = call("extend", halves, "--to", 192, *asked.split())
    assert code == 2 and WRONG[asked] in said
    assert len(said.strip().splitlines()) == 1
