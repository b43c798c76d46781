"""The plan of memory is made without the weights, and is what a real step takes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posenc.extend.measure.losses import next_token_losses
from posenc.extend.memory import (
    GB,
    IN_PROCESSES,
    Stage,
    bytes_on_devices,
    device_sizes,
    plan_stages,
)
from posenc.extend.options import Options
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.tune_config import TuneConfig
from tests.hf_models import LENGTH, save, transformers
from tests.memory import MostBytes

ROOT = Path(__file__).parents[2]
TARGET = 8 * LENGTH
TUNING = ("--tune", 9, "--batch", 1, "--lora", 2, "--adapter")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save("llama", tmp_path_factory.mktemp("plan") / "llama")


def test_nothing_of_the_weights_is_read(folder, tmp_path, call):
    """Of the weights only the header is there: a sparse file has zeros behind it."""
    weights = folder / "model.safetensors"
    header_size = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / "config.json").write_bytes((folder / "config.json").read_bytes())
    with (copied / "model.safetensors").open("wb") as sparse:
        sparse.write(weights.read_bytes()[:header_size])
        sparse.truncate(weights.stat().st_size)
    where = ("--out", tmp_path / "out", "--plan", "--json")
    answers = []
    for model in (folder, copied):
        code, out, err = call("extend", model, "--to", TARGET, *TUNING, *where)
        assert code == 0, err
        answers.append(json.loads(out)["stages"])
    assert answers[0] == answers[1]
    assert [stage["name"] for stage in answers[0]] == ["measuring", "tuning", "proving"]
    assert not (tmp_path / "out").exists()


def test_a_plan_that_does_not_fit_ends_with_the_numbers(folder, tmp_path, call):
    where = ("--out", tmp_path / "out", "--plan", "--cards", "1.5,0.5")
    code, out, err = call("extend", folder, "--to", TARGET, *TUNING, *where)
    assert code == 2
    assert "does not fit" in out
    assert "tuning needs 1." in err and "--recompute" in err and "--lora" not in err


@pytest.mark.parametrize(
    "words, said",
    [
        (("--cards", "80"), "--cards: nothing is planned without --plan"),
        (("--plan", "--cards", "8x"), "--cards must be GB such as 80, 8x80 or 80,24, got '8x'"),
        (("--plan", "--cards", "0"), "--cards must be GB such as"),
        (("--plan", "--to", LENGTH), f"--to {LENGTH} is not beyond the training length of"),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_line(words, said, folder, call):
    code, out, err = call("extend", folder, "--to", TARGET, *words)
    assert (code, out) == (2, "") and said in err
    assert len(err.strip().splitlines()) == 1


def test_a_plan_takes_the_training_length_that_is_given(folder):
    options = Options(trained_length=LENGTH // 2)
    assert plan_stages(folder, LENGTH, options, is_exported=False)
    with pytest.raises(ValueError, match="not beyond the training length"):
        plan_stages(folder, LENGTH, Options(), is_exported=False)


def test_devices_of_different_size_get_what_they_have_room_for():
    assert device_sizes("cpu", "2x80,24") == ("cuda", [80 * GB, 80 * GB, 24 * GB])
    stage = Stage("tuning", weights=60 * GB, kept=10 * GB, at_work=4 * GB)
    assert bytes_on_devices(stage, [44 * GB, 44 * GB], 0) == [39 * GB, 39 * GB]
    assert bytes_on_devices(stage, [64 * GB, 24 * GB], 0) == [56_500 * 10**6, 21_500 * 10**6]
    assert bytes_on_devices(stage, [64 * GB, 4 * GB], 0) is None
    assert bytes_on_devices(stage, [38 * GB, 38 * GB], 0) is None
    # torchrun divides the layers equally: the smaller card decides.
    in_processes = replace(stage, name=IN_PROCESSES)
    assert bytes_on_devices(in_processes, [64 * GB, 39 * GB], 0) == [39 * GB, 39 * GB]
    assert bytes_on_devices(in_processes, [64 * GB, 24 * GB], 0) is None


def test_the_planned_tensors_are_those_of_a_real_pass(folder):
    model = load_checkpoint(folder).model
    tokens = torch.zeros(8, TARGET, dtype=torch.int64)  # as many windows as are read at once
    next_token_losses(model, tokens)  # what is made once
    weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
    with MostBytes() as real:
        next_token_losses(model, tokens)
    (planned,) = plan_stages(folder, TARGET, Options(), is_exported=False)
    # Views of weights count as alive in the real pass.
    assert real.peak - weights < planned.at_work * 1.15
    assert planned.at_work * 0.85 < real.peak
    assert planned.weights == pytest.approx(weights, rel=0.01)


def test_recomputing_and_adapters_take_less(folder):
    def tuning_stage(**config) -> Stage:
        options = Options(tune=TuneConfig(1, batch=1, **config))
        return plan_stages(folder, TARGET, options, is_exported=False)[1]

    all_weights, lora = tuning_stage(), tuning_stage(lora_rank=2)
    adapters = tuning_stage(lora_rank=2, adapter=True)
    recomputed = tuning_stage(lora_rank=2, adapter=True, recompute=True)
    assert all_weights.trained > lora.trained > adapters.trained > 0
    assert recomputed.kept < 0.5 * adapters.kept
    # Full tuning: a gradient and two moments of float32 weights; on the CPU the teacher's map of
    # the files.
    assert all_weights.weights == 2 * lora.weights
    assert all_weights.trained == pytest.approx(3 * lora.weights, rel=0.02)


def test_on_a_card_the_teacher_of_full_tuning_is_one_layer_at_a_time(folder):
    def tuning_stage(**config) -> Stage:
        options = Options(tune=TuneConfig(1, batch=1, **config))
        return plan_stages(folder, TARGET, options, is_exported=False, device="cuda")[1]

    taught, from_text = tuning_stage(), tuning_stage(distill=False)
    model = load_checkpoint(folder).model
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    others = taught.weights - len(model.model.layers) * layer
    assert taught.weights == from_text.weights
    assert taught.at_work >= from_text.at_work + others + layer


def test_several_devices_have_a_stage_for_torchrun_and_stream_the_proof(folder):
    options = Options(tune=TuneConfig(1, batch=2, lora_rank=2))
    one = plan_stages(folder, TARGET, options, is_exported=True)
    two = plan_stages(folder, TARGET, options, is_exported=True, device="cuda", num_devices=2)
    assert [stage.name for stage in two] == ["measuring", "tuning", "tuning, torchrun", "proving"]
    _, tuning, in_processes, proving = two
    model = load_checkpoint(folder).model
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    outside = tuning.weights - len(model.model.layers) * layer
    assert in_processes.weights == tuning.weights - outside
    # A process has its row, two gathered layers, and whole what LoRA trains.
    (_, one_row) = plan_stages(
        folder, TARGET, Options(tune=TuneConfig(1, batch=1, lora_rank=2)), is_exported=False
    )
    whole = outside + 2 * layer + one_row.trained
    assert in_processes.trained == 0
    assert in_processes.at_work == one_row.kept + one_row.at_work + whole
    # A card has the model in memory, what is outside of the layers again, and one layer.
    assert one[-1].weights == 2 * proving.weights
    assert proving.at_work == one[-1].at_work + outside + layer


def test_under_torchrun_kept_values_wait_in_main_memory_and_gradients_are_divided(folder):
    def in_processes(**config) -> Stage:
        options = Options(tune=TuneConfig(1, batch=2, **config))
        given = {"is_exported": False, "device": "cuda", "num_devices": 2}
        return plan_stages(folder, TARGET, options, **given)[2]

    def one_row(**config) -> Stage:
        options = Options(tune=TuneConfig(1, batch=1, **config))
        return plan_stages(folder, TARGET, options, is_exported=False, device="cuda")[1]

    lora = {"lora_rank": 2, "adapter": True, "recompute": True}
    model = load_checkpoint(folder).model
    layers = model.model.layers
    layer = sum(p.nbytes for p in layers[0].parameters())
    everything = sum(p.nbytes for p in model.parameters())
    outside = everything - len(layers) * layer
    alone = one_row(**lora)
    on_card = alone.kept // len(layers) + alone.at_work + outside + 2 * layer + alone.trained
    assert in_processes(**lora).at_work == pytest.approx(on_card, rel=1e-3)  # and buffers
    full, alone = (
        in_processes(distill=False, recompute=True),
        one_row(distill=False, recompute=True),
    )
    in_layers = len(layers) * layer / everything
    assert full.trained == pytest.approx(in_layers * alone.trained, rel=0.02)
    # Gradients of the layers are given away as they come.
    assert full.at_work < alone.at_work + alone.kept + outside + 2 * layer + alone.trained


SHAPES = {
    "8B": (1, {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}, 32),
    "70B": (8, {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}, 64),
}


def folder_without_values(folder, shape, num_heads):
    """Write the config of a Llama 3 and the header of its weights, with nothing behind it."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        max_position_embeddings=8192,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        dtype="bfloat16",
        **shape,
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    header, offset = {}, 0
    for name, weight in model.state_dict().items():
        end = offset + 2 * weight.numel()
        offsets = {"shape": list(weight.shape), "data_offsets": [offset, end]}
        header[name] = {"dtype": "BF16", **offsets}
        offset = end
    header_bytes = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as sparse:
        sparse.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        sparse.truncate(8 + len(header_bytes) + offset)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_document_has_the_numbers_of_the_plan(name, tmp_path):
    num_cards, shape, num_heads = SHAPES[name]
    folder = folder_without_values(tmp_path, shape, num_heads)
    tuning = TuneConfig(200, lora_rank=16, adapter=True, recompute=True)
    stages = plan_stages(
        folder,
        32_768,
        Options(tune=tuning),
        is_exported=True,
        device="cuda",
        num_devices=num_cards,
    )
    document = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    table = document[document.index(f"| {name} on ") :].splitlines()[: len(stages)]
    for stage, line in zip(stages, table, strict=True):
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert label.removeprefix(f"{name} on ").endswith(stage.name)
        parts = (stage.weights, stage.trained, stage.kept, stage.at_work, 1 << 30)
        needed = stage.on_a_device(num_cards, 1 << 30)
        assert [float(cell) for cell in cells] == [round(b / GB, 1) for b in (*parts, needed)]
