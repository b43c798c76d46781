"""The folder written by save_pretrained suffices to attach the same encoding again; no other
encoding is accepted for it."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

import posenc
from posenc import Claims, DistanceBias
from posenc.encodings.numerics.precision import per_head
from posenc.hf import attach, detach, load, shape_of
from posenc.hf.attachment.save import encoding_from_json, encoding_to_json
from posenc.hf.checkpoint.loading import refuse_nonfinite_weights
from tests.hf.attachment.models import TOKENS, build, own_rope

pytestmark = pytest.mark.usefixtures("without_proof")

ALIBI = "posenc.encodings.scores.alibi:ALiBi"


class LogALiBi(DistanceBias):
    """Somebody's own encoding."""

    claims = Claims(places=(3,), source="a test", scope="layer")

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.ones(num_heads))

    def bias(self, distance):
        return -per_head(self.slope, distance) * distance.abs().float().log1p()


def saved(folder, name="fox", family="llama"):
    model = build(family)
    attach(model, posenc.create(name, shape_of(model)))
    for parameter in model.get_decoder().posenc_encoding.parameters():
        parameter.data = torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


IN_A_NEW_PROCESS = """
import sys, torch
models, tokens, expected = torch.load(sys.argv[1], weights_only=False)
torch.set_grad_enabled(False)
assert all(torch.equal(m(tokens).logits, e) for m, e in zip(models, expected, strict=True))
"""


@pytest.mark.slow
@torch.no_grad()
def test_a_pickled_model_keeps_its_encoding_in_a_new_process(tmp_path):
    models = [attach(build(family), "fire") for family in ("llama", "gpt2", "bloom")]
    torch.save((models, TOKENS, [m(TOKENS).logits for m in models]), tmp_path / "models.pt")
    command = [sys.executable, "-c", IN_A_NEW_PROCESS, str(tmp_path / "models.pt")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "family"),
    [("fox", "llama"), ("fire", "gpt2"), ("yarn", "llama"), ("learned", "bert"), ("dape", "bloom")],
)
def test_one_call_loads_what_was_saved(name, family, tmp_path):
    model = build(family)
    attach(model, posenc.create(name, shape_of(model)))
    for key, parameter in model.named_parameters():
        if "posenc" in key:
            parameter.data = torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    record = json.loads((tmp_path / "posenc.json").read_text())
    assert record["stacks"][0]["encoding"] == encoding_to_json(detach(again)[0])
    assert (again(TOKENS).logits - model(TOKENS).logits).abs().max() > 1e-3


@torch.no_grad()
def test_two_stacks_and_what_layers_share_come_back(tmp_path):
    model = build("t5")
    inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :5]}
    shared = posenc.create("t5", shape_of(model, encoder=True))
    first = posenc.PerLayer([shared, shared])
    attach(model, first, decoder=posenc.create("kerple", shape_of(model)))
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    one, two = again.encoder.posenc_encoding.layers
    assert one is not two  # the file holds numbers, not objects
    assert [type(e).__name__ for e in (one, two)] == ["T5Bias", "T5Bias"]


@torch.no_grad()
def test_an_encoding_of_ones_own_is_never_imported_from_a_file(tmp_path):
    model = build("llama")
    attach(model, LogALiBi(num_heads=4))
    for parameter in model.model.posenc_encoding.parameters():
        parameter.data = torch.rand_like(parameter)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"LogALiBi.* cannot be built from a file.*encoding="):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"it has .*LogALiBi.*, got .*ALiBi"):
        load(tmp_path, encoding=posenc.ALiBi(num_heads=4))
    with pytest.raises(
        ValueError, match="PerLayer has encodings for 3 layers, and the model has 2"
    ):
        load(tmp_path, encoding=posenc.PerLayer([LogALiBi(num_heads=4)] * 3))
    again = load(tmp_path, encoding=LogALiBi(num_heads=4))
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


@torch.no_grad()
def test_a_name_comes_back_and_a_file_that_it_names_is_never_run(tmp_path):
    model = build("llama")
    attach(model, "rope:rope_theta=500+alibi")
    model.save_pretrained(tmp_path / "named")
    assert torch.equal(load(tmp_path / "named")(TOKENS).logits, model(TOKENS).logits)
    detach(model)
    code = (
        "import torch, posenc\n"
        "class Mine(posenc.DistanceBias):\n"
        "    claims = posenc.Claims(places=(3,), source='a test')\n"
        "    def __init__(self, num_heads: int):\n"
        "        super().__init__()\n"
        "        self.slope = torch.nn.Parameter(torch.ones(num_heads))\n"
        "    def bias(self, distance):\n"
        "        return -self.slope.view(-1, *[1] * distance.ndim) * distance.abs()\n"
    )
    here, there = tmp_path / "here" / "mine.py", tmp_path / "there" / "mine.py"
    for path in (here, there):
        path.parent.mkdir()
        path.write_text(code)
    attach(model, f"rope+{here}:Mine")
    model.model.posenc_encoding.encodings[1].slope.data *= 0.3
    model.save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match=r"mine:Mine.* cannot be built from a file"):
        load(tmp_path / "own")
    again = load(tmp_path / "own", encoding=posenc.create(f"rope+{there}:Mine", shape_of(model)))
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_the_encoding_of_other_weights_is_refused(tmp_path):
    saved(tmp_path / "one", "fox")
    torch.manual_seed(1)
    other = build("llama", rms_norm_eps=1e-5)
    other.model.norm.weight.data += 1e-3  # one of a thousand numbers
    attach(other, posenc.create("fox", shape_of(other)))
    other.save_pretrained(tmp_path / "two")
    shutil.copy(tmp_path / "one" / "posenc.json", tmp_path / "mixed.json")
    shutil.copy(tmp_path / "one" / "posenc.json", tmp_path / "two")
    with pytest.raises(ValueError, match=r"posenc.safetensors is not the file"):
        load(tmp_path / "two")
    shutil.copy(tmp_path / "one" / "posenc.safetensors", tmp_path / "two")
    with pytest.raises(ValueError, match="the weights in the folder are not those"):
        load(tmp_path / "two")
    load(tmp_path / "one")


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", ["alibi", "rope", "fox"])
@pytest.mark.parametrize("model_positions", ["keep", "replace"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_saved_after_detach_is_not_given_the_encoding_again(
    name, model_positions, shards, tmp_path
):
    model = build("llama")
    sharded = {} if shards == 1 else {"max_shard_size": "30KB"}
    attach(model, name, model_positions=model_positions)
    model.save_pretrained(tmp_path, **sharded)
    load(tmp_path)
    detach(model)
    model.save_pretrained(tmp_path, **sharded)
    with pytest.raises(ValueError, match=r"saved again after detach.*delete posenc\.json"):
        load(tmp_path)
    attach(model, name, model_positions=model_positions)
    model.save_pretrained(tmp_path, **sharded)
    load(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 1}, "expected format 3"),
        ({"stacks": {}}, "stacks must be a list"),
        ({"stacks": [3]}, "must be an object with an encoding"),
        ({"stacks": [{"encoding": {"class": "os:system", "arguments": {}}}]}, "no encoding of pos"),
        (
            {"stacks": [{"encoding": {"class": "posenc.list:list_encodings", "arguments": {}}}]},
            "no encoding",
        ),
        (
            {"stacks": [{"encoding": {"class": ALIBI, "arguments": {"a": 1}}}]},
            "ALiBi: unknown argument a",
        ),
        (
            {"stacks": [{"repr": "x", "encoding": encoding_to_json(posenc.ALiBi(4))}]},
            r"builds ALiBi\(num_heads=4\) from it, and x was saved",
        ),
    ],
)
def test_a_record_that_says_something_else_is_refused(change, said, tmp_path):
    saved(tmp_path)
    path = tmp_path / "posenc.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=said):
        load(tmp_path)


@pytest.mark.parametrize("name", ["deberta", "transformer_xl", "fox"])
def test_parameters_that_layers_share_stay_shared(name, tmp_path):
    """Otherwise each layer would train a copy of its own."""
    model = saved(tmp_path, name)
    again = load(tmp_path)
    assert len(list(again.parameters())) == len(list(model.parameters()))
    for one in (model, again):
        out = one(TOKENS, labels=TOKENS).loss
        out.backward()
        with torch.no_grad():
            for parameter in one.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        ([["layers.0.table"]], "two names or more"),
        ("layers", "two names or more"),
        ([["layers.0.table", "layers.0.nothing"]], "were one parameter"),
        ([["layers.0.table", 3]], "two names or more"),
    ],
)
def test_shared_names_that_say_something_else_are_refused(shared, said, tmp_path):
    saved(tmp_path, "deberta")
    path = tmp_path / "posenc.json"
    record = json.loads(path.read_text())
    record["stacks"][0]["shared_parameters"] = shared
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=said):
        load(tmp_path)


def test_a_config_with_more_layers_than_tensors_is_refused(tmp_path):
    saved(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1000}))
    with pytest.raises(ValueError, match="num_hidden_layers is 1000, but there are only"):
        load(tmp_path)


def test_weights_and_parameters_that_are_not_finite_are_refused(tmp_path):
    model = saved(tmp_path)
    slope = next(model.model.posenc_encoding.parameters())
    for place, tensor in (("weight", model.model.norm.weight), ("encoding", slope)):
        kept = tensor.data.clone()
        tensor.data.view(-1)[0] = float("nan")
        model.save_pretrained(tmp_path / place)
        tensor.data = kept
        with pytest.raises(ValueError, match="NaN or infinite"):
            load(tmp_path / place)


@pytest.mark.parametrize(
    "option", [{"trust_remote_code": True}, {"use_safetensors": False}, {"local_files_only": False}]
)
def test_an_option_that_would_undo_the_checks_is_refused(option, tmp_path):
    saved(tmp_path)
    with pytest.raises(TypeError, match=next(iter(option))):
        load(tmp_path, **option)


def test_weights_that_are_not_in_memory_are_left_out(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta"), torch.nn.Linear(2, 2))
    refuse_nonfinite_weights(model, tmp_path)
    model[1].weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"1 of 4 elements of 1\.weight are NaN or infinite"):
        refuse_nonfinite_weights(model, tmp_path)


def test_a_folder_without_an_encoding_is_refused(tmp_path):
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"it has no posenc\.json"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["fox", "alibi"])
def test_a_stock_load_says_that_weights_are_left_over(name, tmp_path):
    from transformers import AutoModelForCausalLM

    saved(tmp_path, name)
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert any("posenc_encoding" in name for name in told["unexpected_keys"])


def test_uploading_without_the_encoding_is_refused(tmp_path):
    model = saved(tmp_path)
    with pytest.raises(ValueError, match="would upload the weights without their encoding"):
        model.save_pretrained(tmp_path, push_to_hub=True)
    detach(model)
    assert "save_pretrained" not in vars(model)


@pytest.mark.parametrize("name", posenc.names())
def test_every_registered_encoding_can_be_written_and_built_again(name):
    shape = posenc.ModelShape(64, 4, train_length=64)
    encoding = posenc.create(name, shape)
    record = encoding_to_json(encoding)
    again = encoding_from_json(json.loads(json.dumps(record)))
    assert str(again) == str(encoding)
    assert {k: v.shape for k, v in again.state_dict().items()} == {
        k: v.shape for k, v in encoding.state_dict().items()
    }


def test_compositions_and_layers_are_written_and_masks_are_not():
    model = build("gemma3_text")
    mixed = posenc.PerLayer([posenc.Compose(own_rope(build("llama")), posenc.ALiBi(4))] * 2)
    assert str(encoding_from_json(encoding_to_json(mixed))) == str(mixed)
    assert str(encoding_from_json(encoding_to_json(own_rope(model)))) == str(own_rope(model))
    windowed = posenc.PerLayer([posenc.ALiBi(4)], windows=[posenc.masks.sliding_window(4)])
    assert encoding_to_json(windowed) is None


def test_what_is_no_folder_is_answered(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    for given, error, said in (
        (None, TypeError, "folder must be the path of a folder"),
        (3, TypeError, "got 3"),
        (tmp_path / "away", ValueError, "is not there"),
        ("org/model", ValueError, "org/model is not there, .* downloaded first"),
        (file, ValueError, "is a file, and not a folder"),
    ):
        with pytest.raises(error, match=said):
            posenc.hf.load(given)
