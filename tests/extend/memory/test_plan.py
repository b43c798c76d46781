"""The plan of memory is made without the weights, and is what a real step takes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posenc.extend.measure.losses import LossReader, last_logits, next_token_losses
from posenc.extend.memory.devices import GB, bytes_on_devices, device_sizes
from posenc.extend.memory.stages import IN_PROCESSES, Stage, plan_stages
from posenc.extend.options import Options
from posenc.extend.variants import variant_builders
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.checkpoint.simulated_memory import GROUPED_PRODUCT, SimulatedMemory
from posenc.hf.tune_config import TuneConfig
from tests.hf_models import LENGTH, save, transformers
from tests.memory import MostBytes

ROOT = Path(__file__).parents[3]
TARGET = 8 * LENGTH
TUNING = ("--method", "ntk", "--tune", 9, "--batch", 1, "--lora", 2, "--adapter")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save("llama", tmp_path_factory.mktemp("plan") / "llama")


def stages_of(folder, options, *, method: str | None = "ntk", is_exported=False, **devices):
    """The stages at TARGET tokens."""
    return plan_stages(folder, TARGET, options, method=method, is_exported=is_exported, **devices)


def names_of(stages):
    return [stage.name for stage in stages]


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
        (("--plan", "--method", "tile"), "--method must be none, linear"),
        (("--plan", "--method", "drope"), "a llama config has no no_rope_layers"),
        (("--plan", "--method", "none", "--out", "new"), "none stretches nothing"),
        (("--plan", "--method", "dynamic", "--out", "new"), "Give --allow-cache-unsafe"),
        (("--plan", "--method", "window", "--out", "new"), "a llama config has no sliding_window"),
        (("--plan", "--text", "absent.txt"), "absent.txt: no such file"),
        (("--plan", "--bytes", "--ids"), "--bytes and --ids: a text is one or the other"),
        (("--plan", "--ids", "--task", "needle"), "--task needle: --ids leaves no words to write"),
        (
            ("--plan", "--report", "page.html", "--figures", "figures"),
            "--report, --figures: --plan prints a table and writes no file",
        ),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_line(words, said, folder, call):
    code, out, err = call("extend", folder, "--to", TARGET, *words)
    assert (code, out) == (2, "") and said in err
    assert len(err.strip().splitlines()) == 1


def test_a_plan_takes_the_training_length_that_is_given(folder):
    options = Options(trained_length=LENGTH // 2)
    assert plan_stages(folder, LENGTH, options, method="ntk", is_exported=False)
    with pytest.raises(ValueError, match="not beyond the training length"):
        plan_stages(folder, LENGTH, Options(), method="ntk", is_exported=False)


@pytest.mark.parametrize(
    "family, method, expected_names",
    [
        ("llama", "window", ["measuring"]),
        ("llama", "search", ["measuring"]),
        ("llama", "dynamic", ["measuring", "measuring dynamic"]),
        ("llama", None, ["measuring", "measuring dynamic, longrope-switch"]),
        ("qwen2", "window", ["measuring", "measuring sliding-window"]),
        ("gpt2", "window", ["measuring"]),
        ("gpt2", "tile", ["measuring", "measuring tile"]),
        ("gpt2", None, ["measuring", "measuring interpolate, tile, hierarchical"]),
    ],
)
def test_methods_that_are_read_in_another_way_have_a_stage(
    family, method, expected_names, tmp_path
):
    folder = save(family, tmp_path / family)
    assert names_of(stages_of(folder, Options(), method=method)) == expected_names


def test_a_plan_of_all_methods_says_what_it_leaves_out(folder, call):
    code, out, err = call("extend", folder, "--to", TARGET, "--plan")
    assert code == 0, err
    assert "their memory is not planned" in " ".join(out.split())
    code, out, err = call("extend", folder, "--to", TARGET, "--plan", "--method", "yarn")
    assert code == 0 and "their memory is not planned" not in " ".join(out.split())


def test_a_map_of_positions_is_not_planned(tmp_path):
    folder = save("qwen2", tmp_path / "qwen2")
    with pytest.raises(ValueError, match="the memory of dual-chunk, which runs"):
        stages_of(folder, Options(), method="dual-chunk")


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_a_model_without_next_tokens_is_not_planned(family, tmp_path):
    folder = save(family, tmp_path / family)
    config = json.loads((folder / "config.json").read_text())
    if family == "qwen3":
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    with pytest.raises(ValueError, match="models without a head, is not planned"):
        stages_of(folder, Options(), method=None)


def test_a_model_that_cannot_be_extended_is_not_planned(tmp_path):
    folder = save("falcon", tmp_path / "falcon", alibi=True)
    with pytest.raises(ValueError, match="ALiBi"):
        stages_of(folder, Options(), method=None)


def test_more_tokens_are_planned_for_those_who_read_more(tmp_path):
    """Without a longer table GPT-2 reads as many tokens as it has rows; and a window that rolls
    needs no cache of the whole text."""
    without_tasks = Options(task=["none"])
    gpt2 = save("gpt2", tmp_path / "gpt2")
    unchanged, longer = stages_of(gpt2, without_tasks, method="tile")
    assert longer.weights == unchanged.weights + 4 * 32 * (TARGET - LENGTH)
    assert longer.at_work > unchanged.at_work
    sizes = {"vocab_size": 100_000, "max_position_embeddings": 1024}  # pieces of 167 tokens
    qwen2 = save("qwen2", tmp_path / "qwen2", **sizes)
    (all_of_4096, rolling), (all_of_8192, rolling_further) = (
        plan_stages(qwen2, length, without_tasks, method="window", is_exported=False)
        for length in (4096, 8192)
    )
    assert rolling.at_work < all_of_4096.at_work < all_of_8192.at_work
    assert rolling_further.at_work == rolling.at_work


def test_prompts_that_are_not_asked_take_nothing(folder):
    options = Options(windows=1)
    (asked,) = stages_of(folder, options)  # of ten prompts eight at once, of windows one
    (not_asked,) = stages_of(folder, replace(options, task=["none"]))
    assert asked.at_work > 4 * not_asked.at_work
    (fewer,) = stages_of(folder, replace(options, task_trials=1))
    assert asked.at_work > fewer.at_work > not_asked.at_work


def test_a_search_reads_its_own_windows(folder):
    one_window = Options(windows=1, task=["none"])
    (searched,) = stages_of(folder, one_window, method="search")
    (stretched,) = stages_of(folder, one_window)
    assert searched.at_work > 4 * stretched.at_work
    all_methods = stages_of(folder, replace(one_window, search_evaluations=0), method=None)
    assert all_methods[0] == stretched


@pytest.mark.slow
def test_drope_tunes_on_short_rows_beside_the_original_model(tmp_path):
    folder = save("smollm3", tmp_path / "smollm3")

    def tuning_stages(method, **config) -> list[Stage]:
        options = Options(tune=TuneConfig(1, batch=1, **config))
        devices = {"device": "cuda", "num_devices": 2}
        # Longer than the tokens that short rows have together.
        return plan_stages(folder, 16_384, options, method=method, is_exported=False, **devices)[1:]

    stretched, in_processes = tuning_stages("ntk", lora_rank=2)
    assert in_processes.name == IN_PROCESSES
    (recalibrated,) = tuning_stages("drope", lora_rank=2)
    assert recalibrated.kept < 0.6 * stretched.kept
    (from_text,) = tuning_stages("drope", lora_rank=2, distill=False)
    assert from_text.at_work < recalibrated.at_work


def test_a_longer_table_is_tuned_beside_the_original_model(tmp_path):
    folder = save("gpt2", tmp_path / "gpt2")
    options = Options(tune=TuneConfig(1, batch=1, lora_rank=2))
    unchanged, longer, tuning, proving = stages_of(folder, options, method=None, is_exported=True)
    assert tuning.weights == pytest.approx(longer.weights + unchanged.weights, rel=0.01)
    assert proving.weights == 2 * longer.weights


def test_the_proof_reads_as_many_tokens_as_the_given_training_length_says(folder):
    shorter = Options(trained_length=LENGTH // 4)
    *_, proving = stages_of(folder, Options(), is_exported=True)
    *_, proving_shorter = stages_of(folder, shorter, is_exported=True)
    assert proving_shorter.at_work < proving.at_work


@pytest.mark.slow
@pytest.mark.parametrize("family, method", [("llama", "dynamic"), ("gpt2", "tile")])
def test_the_planned_tensors_are_those_that_a_method_takes(family, method, tmp_path):
    # Eight windows are read in four pieces, if they are read in pieces.
    folder = save(family, tmp_path / family, vocab_size=20_000)
    planned = stages_of(folder, Options(), method=method)[-1]
    checkpoint = load_checkpoint(folder)
    builders = variant_builders(checkpoint, TARGET, method, None, Options(), print)
    variant = builders[method]()
    tokens = torch.zeros(8, TARGET, dtype=torch.int64)
    weights = sum(p.untyped_storage().nbytes() for p in checkpoint.model.parameters())
    with variant.applied() as model:
        reader = LossReader(model, in_one_piece=not variant.cache_safe)
        reader.losses(tokens)  # what is made once
        with MostBytes() as real:
            reader.losses(tokens)
            last_logits(model, tokens, 7)
    assert planned.at_work == pytest.approx(real.peak - weights, rel=0.15)


@pytest.mark.skipif(GROUPED_PRODUCT is None, reason="transformers finds experts by values then")
def test_experts_are_planned_in_float32_too(tmp_path):
    folder = save("gpt_oss", tmp_path / "gpt_oss")
    options = Options(tune=TuneConfig(1, batch=1))
    in_float32 = stages_of(folder, options)
    in_bfloat16 = stages_of(folder, replace(options, precision="bfloat16"))
    for stage, half_stage in zip(in_float32, in_bfloat16, strict=True):
        assert stage.weights == pytest.approx(2 * half_stage.weights, rel=0.01)
        # About twice as much: logits are widened in both.
        assert half_stage.at_work < stage.at_work < 2.2 * half_stage.at_work


def test_operators_that_need_values_are_refused():
    """Experts that each find their tokens, as without a grouped product of all of them."""
    scores = torch.zeros(4, 8, device="meta")
    with (
        SimulatedMemory(),
        pytest.raises(ValueError, match=r"calls aten\.nonzero\S*, which torch does not run"),
    ):
        (scores > 0).nonzero()


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
    (planned,) = stages_of(folder, Options())
    # Views of weights count as alive in the real pass.
    assert real.peak - weights < planned.at_work * 1.15
    assert planned.at_work * 0.85 < real.peak
    assert planned.weights == pytest.approx(weights, rel=0.01)


def test_recomputing_and_adapters_take_less(folder):
    def tuning_stage(**config) -> Stage:
        options = Options(tune=TuneConfig(1, batch=1, **config))
        return stages_of(folder, options)[1]

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
        return stages_of(folder, options, device="cuda")[1]

    taught, from_text = tuning_stage(), tuning_stage(distill=False)
    model = load_checkpoint(folder).model
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    others = taught.weights - len(model.model.layers) * layer
    assert taught.weights == from_text.weights
    assert taught.at_work >= from_text.at_work + others + layer


def test_several_devices_have_a_stage_for_torchrun_and_stream_the_proof(folder):
    options = Options(tune=TuneConfig(1, batch=2, lora_rank=2))
    one = stages_of(folder, options, is_exported=True)
    two = stages_of(folder, options, is_exported=True, device="cuda", num_devices=2)
    assert [stage.name for stage in two] == ["measuring", "tuning", "tuning, torchrun", "proving"]
    _, tuning, in_processes, proving = two
    model = load_checkpoint(folder).model
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    outside = tuning.weights - len(model.model.layers) * layer
    assert in_processes.weights == tuning.weights - outside
    # A process has its row, two gathered layers, and whole what LoRA trains.
    (_, one_row) = stages_of(folder, Options(tune=TuneConfig(1, batch=1, lora_rank=2)))
    whole = outside + 2 * layer + one_row.trained
    assert in_processes.trained == 0
    assert in_processes.at_work == one_row.kept + one_row.at_work + whole
    # A card has the model in memory, what is outside of the layers again, and one layer.
    assert one[-1].weights == 2 * proving.weights
    assert proving.at_work == one[-1].at_work + outside + layer


def test_under_torchrun_kept_values_wait_in_main_memory_and_gradients_are_divided(folder):
    def in_processes(**config) -> Stage:
        options = Options(tune=TuneConfig(1, batch=2, **config))
        return stages_of(folder, options, device="cuda", num_devices=2)[2]

    def one_row(**config) -> Stage:
        options = Options(tune=TuneConfig(1, batch=1, **config))
        return stages_of(folder, options, device="cuda")[1]

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
        method="yarn",
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
