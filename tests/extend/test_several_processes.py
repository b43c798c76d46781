"""Two processes under torchrun tune as one does, and no device holds a model."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from posenc.extend.export.stock_reader import stream_layers
from posenc.extend.options import Options
from posenc.extend.refusals import check_before_loading
from posenc.hf import sharding
from posenc.hf.tune_config import TuneConfig
from posenc.hf.tuning import next_token_loss, set_gradient_checkpointing
from tests.hf_models import LENGTH, WORDS, save, transformers

KINDS = {"full": (), "lora": ("--lora", 2), "adapter": ("--lora", 2, "--adapter", "--recompute")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_write_what_one_writes(kind, tmp_path):
    """The whole command: measured, tuned, gathered, written, and proved by a fresh process."""
    folder = save("llama", tmp_path / "llama", spread=0.1)
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join(WORDS))
    asked = ["extend", folder, "--to", 2 * LENGTH, "--method", "yarn", "--tune", 3, "--batch", 2]
    asked += [*KINDS[kind], "--text", text, "--bytes", "--anyway", "--windows", 2, "--task", "none"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    weights = {}
    for name, start in {"one": [], "two": torchrun}.items():
        command = [sys.executable, "-m", *start, "posenc", *asked, "--out", tmp_path / name]
        done = subprocess.run(
            [str(word) for word in command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("Perplexity by position, tokens") == 1
        weights[name] = load_file(tmp_path / name / "model.safetensors")
        assert (tmp_path / name / "adapter").exists() == (kind == "adapter")
    before = load_file(folder / "model.safetensors")
    assert weights["one"].keys() == weights["two"].keys() == before.keys()
    changes = {name: (w - before[name]).abs().max() for name, w in weights["one"].items()}
    assert max(changes.values()) > 1e-4
    for name, weight in weights["one"].items():
        torch.testing.assert_close(weights["two"][name], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "method, options, words",
    [
        ("yarn", Options(), "started 2 processes, and only tuning uses several"),
        (None, Options(tune=TuneConfig(1)), "which tune one method: name it with --method"),
        ("search", Options(tune=TuneConfig(1)), "which tune one method: name it with --method"),
        ("yarn", Options(tune=TuneConfig(1, batch=3)), "--batch 3 cannot be divided among 2"),
        (
            "yarn",
            Options(tune=TuneConfig(1), precision="float32"),
            "run in the dtype of the folder",
        ),
    ],
)
def test_what_processes_cannot_share_is_refused(method, options, words, tmp_path, monkeypatch):
    as_torchrun = {"TORCHELASTIC_RUN_ID": "here", "WORLD_SIZE": "2", "RANK": "0"}
    for name, value in as_torchrun.items():
        monkeypatch.setenv(name, value)
    folder = save("llama", tmp_path / "llama")
    with pytest.raises(ValueError, match=words):
        check_before_loading(folder, tmp_path / "out", method, options)


def test_without_torchrun_there_is_one_process(monkeypatch):
    """Though a cluster numbers its programs."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    assert (sharding.count(), sharding.rank(), sharding.is_first()) == (1, 0, True)
    rows = torch.arange(6)[:, None]
    assert torch.equal(sharding.rows_of_this_process(rows), rows)


def test_inputs_of_recomputed_layers_pass_through_main_memory(tmp_path, monkeypatch):
    """With torch's hooks, which here count what they are given: on the CPU nothing moves."""
    moved = []

    class Counted(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(lambda tensor: moved.append(tensor.shape) or tensor, lambda kept: kept)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Counted)
    model = transformers.AutoModelForCausalLM.from_pretrained(save("llama", tmp_path / "llama"))
    set_gradient_checkpointing(model, True)
    model.train()
    tokens = torch.arange(20)[None]
    with sharding.kept_in_main_memory():
        loss = next_token_loss(model, tokens, LENGTH, None)
    in_layers = [shape for shape in moved if shape == (1, 20, model.config.hidden_size)]
    assert len(in_layers) >= len(model.model.layers)
    # And nothing from the inside of a layer, such as the widened channels.
    assert not [shape for shape in moved if model.config.intermediate_size in shape]
    loss.backward()


def test_a_streamed_model_has_one_layer_on_the_device(tmp_path):
    """The device is another copy on the CPU: what is copied there is counted."""
    folder = save("llama", tmp_path / "llama", spread=0.1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(20)[None]
    expected = model(tokens).logits
    on_cpu = {id(p): p.data_ptr() for p in model.parameters()}
    seen = []

    def note_copies(_module, _inputs):
        seen.append(sum(p.data_ptr() != on_cpu[id(p)] for p in model.parameters()))

    stream_layers(model, "cpu")
    for layer in model.model.layers:
        layer.register_forward_pre_hook(note_copies)
    assert torch.equal(model(tokens).logits, expected)
    # Of the copies there are those of one layer at a time, and none afterwards.
    assert seen == [len(list(layer.parameters())) for layer in model.model.layers]
    assert all(p.data_ptr() == on_cpu[id(p)] for p in model.parameters())
