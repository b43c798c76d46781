"""A trial is a pure function of its config, interrupted or not."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    get_constant_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from posenc.compare.results import TrialResult
from posenc.compare.trial import checkpoint, evaluate, train, windows
from posenc.compare.trial.config import (
    CAUSAL,
    ENCODING_LR,
    Architecture,
    TrialConfig,
    read_trial,
    write_trial,
)
from posenc.compare.trial.objectives import OBJECTIVES
from posenc.compare.trial.train import learning_rate
from posenc.models import Decoder, DecoderConfig

TINY = TrialConfig(
    encoding="rope",
    seed=0,
    corpus="none",
    train_length=16,
    test_lengths=(16, 24, 40),
    steps=12,
    batch=4,
    width=32,
    layers=2,
    heads=2,
    kv_heads=1,
    lr=1e-3,
    device="cpu",
    precision="float32",
    torch=torch.__version__,
)
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 40, np.uint8)


class Stop(Exception):
    pass


def quiet(kind, **values):
    pass


def stop_at(step):
    def event(kind, **values):
        if kind == "step" and values["step"] == step:
            raise Stop

    return event


def run(config, folder, event=quiet, every=5):
    folder.mkdir(exist_ok=True)
    return train.train_model(config, TEXT, TEXT, folder, event, every)


@pytest.mark.parametrize(
    ("seconds_a_step", "seconds_to_write", "saved_after"),
    [
        (0.1, 0.0, [12]),  # short: the last step alone
        (25.0, 0.0, [3, 6, 9, 12]),  # more than a minute each time
        (600.0, 0.0, list(range(1, 13))),  # no step of ten minutes is lost
        (25.0, 4.5, [3, 9, 12]),  # writing 4.5 s of 150 is 3 %
    ],
)
def test_checkpoints_are_written_by_time(
    tmp_path, monkeypatch, seconds_a_step, seconds_to_write, saved_after
):
    now = 0.0
    saved = []
    write_checkpoint = checkpoint.write_checkpoint
    take_step = train.take_step

    def pass_time(seconds):
        nonlocal now
        now += seconds

    def slow_step(*arguments):
        pass_time(seconds_a_step)
        return take_step(*arguments)

    def slow_write(folder, cursor, model, optimizer):
        pass_time(seconds_to_write)
        saved.append(cursor.step)
        write_checkpoint(folder, cursor, model, optimizer)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(train, "take_step", slow_step)
    monkeypatch.setattr(checkpoint, "write_checkpoint", slow_write)
    run(dataclasses.replace(TINY, steps=12), tmp_path / "by_time", every=0)
    assert saved == saved_after


def other(value):
    if isinstance(value, Architecture):
        return Architecture(qk_norm=True)
    if isinstance(value, tuple):
        return (*value, 99)
    if value is None:
        return 1
    return value + "x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(TrialConfig)])
def test_hash_changes_with_every_field(field):
    changed = dataclasses.replace(TINY, **{field: other(getattr(TINY, field))})
    assert changed.hash != TINY.hash


def test_config_goes_to_its_folder_and_back(tmp_path):
    home = tmp_path / TINY.folder
    home.mkdir()
    write_trial(home, TINY)
    assert read_trial(home) == TINY
    home.rename(tmp_path / "other")
    with pytest.raises(ValueError, match=f"is the config of {TINY.folder}"):
        read_trial(tmp_path / "other")


def test_result_goes_to_json_and_back():
    result = TrialResult(TINY, reason="<b>由</b>")
    assert TrialResult.from_json(result.to_json()) == result


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"config": 1}', "null"])
def test_broken_result_raises_value_error(text):
    with pytest.raises(ValueError):
        TrialResult.from_json(text)


def test_same_config_gives_same_bits(tmp_path):
    first, a = run(TINY, tmp_path / "a")
    torch.manual_seed(99)  # what ran before must not matter
    second, b = run(TINY, tmp_path / "b")
    assert a.training == b.training
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


@pytest.mark.quick(2)
@pytest.mark.parametrize("step", [3, 5, 11])
def test_interrupted_training_gives_the_same_bits(tmp_path, step):
    config = dataclasses.replace(TINY, encoding="t5")
    whole, a = run(config, tmp_path / "whole")
    with pytest.raises(Stop):
        run(config, tmp_path / "halves", stop_at(step))
    torch.manual_seed(99)
    resumed, b = run(config, tmp_path / "halves", every=4)
    assert a.training == b.training
    assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))


def test_interrupted_training_with_parameters_that_stay_as_they_are(tmp_path):
    config = dataclasses.replace(TINY, encoding="fope")
    whole, a = run(config, tmp_path / "whole")
    with pytest.raises(Stop):
        run(config, tmp_path / "halves", stop_at(7))
    said = []
    resumed, b = run(config, tmp_path / "halves", lambda kind, **values: said.append(kind))
    assert "note" not in said and said.count("step") == 7, "it went on from step 5"
    assert a.training == b.training
    assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))


@pytest.mark.quick(2)
@pytest.mark.parametrize("damage", ["cut", "flip", "json", "digit", "missing", "other", "trial"])
def test_corrupt_checkpoint_starts_again_and_says_so(tmp_path, damage):
    whole, _ = run(TINY, tmp_path / "whole")
    home = tmp_path / "damaged"
    with pytest.raises(Stop):
        run(TINY, home, stop_at(7))
    state = home / "checkpoint.json"
    tensors = home / json.loads(state.read_text(encoding="utf-8"))["tensors"]
    if damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-100])
    elif damage == "flip":
        content = bytearray(tensors.read_bytes())
        content[-9] ^= 1
        tensors.write_bytes(content)
    elif damage == "json":
        state.write_text(state.read_text(encoding="utf-8")[:40], encoding="utf-8")
    elif damage == "digit":
        text = state.read_text(encoding="utf-8")
        assert '"loss_count": 0' in text
        state.write_text(text.replace('"loss_count": 0', '"loss_count": 1'), encoding="utf-8")
    elif damage == "trial":
        shutil.rmtree(home)
        with pytest.raises(Stop):
            run(dataclasses.replace(TINY, seed=1), home, stop_at(7))
    elif damage == "missing":
        tensors.unlink()
    else:
        bigger = dataclasses.replace(TINY, width=64)
        model = train.build_model(bigger)
        optimizer = train.optimizer_for(model, bigger)
        evaluate.token_losses(
            model, windows.training_windows(TEXT, bigger, 0), bigger
        ).mean().backward()
        optimizer.step()
        checkpoint.write_checkpoint(home, checkpoint.Cursor(TINY.hash, 5), model, optimizer)
    said = []
    again, _ = run(TINY, home, lambda kind, **v: said.append(v["text"]) if kind == "note" else None)
    assert len(said) == 1 and "corrupt" in said[0]
    assert all(map(torch.equal, whole.state_dict().values(), again.state_dict().values()))


def test_no_pickle_is_written(tmp_path):
    with pytest.raises(Stop):
        run(TINY, tmp_path, stop_at(7))
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}


def test_batches_and_model_weights_are_the_same_for_all_encodings():
    models = [
        train.build_model(dataclasses.replace(TINY, encoding=e)) for e in ("nope", "learned", "t5")
    ]
    weights = [
        {k: v for k, v in m.state_dict().items() if not k.startswith("encoding.")} for m in models
    ]
    for other_weights in weights[1:]:
        assert weights[0].keys() == other_weights.keys()
        assert all(torch.equal(weights[0][k], other_weights[k]) for k in weights[0])
    batches = [
        windows.training_windows(TEXT, dataclasses.replace(TINY, encoding=e), 3)
        for e in ("nope", "t5")
    ]
    assert torch.equal(*batches)


def test_seeds_and_steps_give_other_batches():
    first = windows.training_windows(TEXT, TINY, 0)
    assert not torch.equal(first, windows.training_windows(TEXT, TINY, 1))
    assert not torch.equal(
        first, windows.training_windows(TEXT, dataclasses.replace(TINY, seed=1), 0)
    )


def test_tables_of_all_encodings_have_the_same_faster_rate_and_no_decay():
    for name in ("learned", "t5"):
        config = dataclasses.replace(TINY, encoding=name)
        model = train.build_model(config)
        own = {id(p) for p in model.encoding.parameters()}
        assert own
        for group in train.optimizer_for(model, config).param_groups:
            for p in group["params"]:
                assert (group["factor"] == ENCODING_LR) == (id(p) in own)
                assert id(p) not in own or group["weight_decay"] == 0


def test_the_rate_rises_in_a_twentieth_of_the_steps_and_falls_to_a_tenth():
    config = dataclasses.replace(TINY, steps=100, lr=2.0)
    rates = [learning_rate(config, step) for step in range(100)]
    np.testing.assert_allclose(rates[:5], [0.4, 0.8, 1.2, 1.6, 2.0])  # the first is not 0
    assert rates[5] == 2.0 and rates[5:] == sorted(rates[5:], reverse=True)
    middle = 5 + 95 // 2
    cosine = np.cos(np.pi * np.arange(95) / 95)
    np.testing.assert_allclose(rates[5:], 0.2 + (2.0 - 0.2) * (1 + cosine) / 2)
    assert 1.0 < rates[middle] < 1.2 and 0.2 < rates[-1] < 0.21


def test_the_usual_warm_up_is_a_twentieth_of_the_steps_rounded_down():
    """As in trials from before --warmup, whose results are reused."""
    for steps in (*range(1, 3000), 20 * 10**6 - 1, 20 * 10**6):
        assert dataclasses.replace(TINY, steps=steps).warmup_steps == max(1, steps // 20)


@pytest.mark.parametrize("warmup", [0.0, 1.0, 7.0, 0.3])
@pytest.mark.parametrize("schedule", ["linear", "constant", "wsd"])
def test_schedules_are_those_of_transformers(schedule, warmup):
    """Where the warm-up rises, ours is a step further: the first rate is not 0."""
    config = dataclasses.replace(TINY, steps=50, lr=2.0, schedule=schedule, warmup=warmup)
    warmup_steps = {0.0: 1, 1.0: 1, 7.0: 7, 0.3: 15}[warmup]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = {
        "linear": lambda: get_linear_schedule_with_warmup(optimizer, warmup_steps, 50),
        "constant": lambda: get_constant_schedule_with_warmup(optimizer, warmup_steps),
        "wsd": lambda: get_wsd_schedule(
            optimizer, warmup_steps, 10, num_training_steps=50, decay_type="linear"
        ),
    }[schedule]()
    their_factor = theirs.lr_lambdas[0]
    expected = [2.0 * their_factor(step + (step < warmup_steps)) for step in range(50)]
    np.testing.assert_allclose([learning_rate(config, step) for step in range(50)], expected)


def test_a_step_gives_each_group_its_own_rate():
    config = dataclasses.replace(TINY, encoding="t5")
    model = train.build_model(config)
    optimizer = train.optimizer_for(model, config)
    train.take_step(model, optimizer, config, TEXT, step=3)
    rate = learning_rate(config, 3)
    groups = {group["factor"]: group["lr"] for group in optimizer.param_groups}
    assert groups == {1.0: rate, ENCODING_LR: rate * ENCODING_LR}
    assert ENCODING_LR != 1


def test_windows_begin_at_every_place_of_a_text():
    """The last one ends with the text's last symbol."""
    text = np.arange(TINY.train_length + 3)
    batches = [windows.training_windows(text, TINY, step) for step in range(20)]
    assert {int(start) for batch in batches for start in batch[:, 0]} == {0, 1, 2}
    assert max(int(batch.max()) for batch in batches) == text[-1]


def test_nan_loss_fails_with_the_step(tmp_path):
    with pytest.raises(train.TrialFailed, match="nan at step"):
        run(dataclasses.replace(TINY, lr=1e30), tmp_path)


def test_nan_on_the_validation_text_fails_with_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "_validate", lambda *arguments: float("nan"))
    with pytest.raises(train.TrialFailed, match="the validation loss became nan at step 1"):
        run(TINY, tmp_path)


class Counting(Decoder):
    """Gives the symbol after x a probability that depends on its position alone."""

    def forward(self, tokens, positions=None, *, caches=None, mask=None, length=None):
        logits = torch.zeros(*tokens.shape, 257)
        # ln(256 * (2^-(p+1)... kept simple: position p has probability 1/2 for p < 16, else 1/4
        p = torch.where(torch.arange(tokens.shape[1]) < 16, 0.5, 0.25)
        logits[..., ord("a")] = torch.log(p / (1 - p) * 256)
        return logits


def test_evaluation_gives_the_bits_of_a_known_model():
    model = Counting(DecoderConfig(257, 32, 1, 2))
    symbols = np.full(4000, ord("a"), np.uint8)
    by_length, by_position, far, _ = OBJECTIVES[CAUSAL].test(model, symbols, TINY)
    expected = {16: 1.0, 24: (16 * 1 + 8 * 2) / 24, 40: (16 * 1 + 24 * 2) / 40}
    assert {s.length: s.bits_per_byte for s in by_length} == pytest.approx(expected, rel=1e-6)
    assert [round(s.bits_per_byte, 5) for s in by_position] == [1.0] * 16 + [2.0] * 24
    # Of the last 16 of 24, eight are below place 16; near context never reaches beyond it.
    assert {s.length: s.far for s in far} == pytest.approx({24: 1.5, 40: 2.0}, rel=1e-6)
    assert {s.length: s.far_near for s in far} == pytest.approx({24: 1.0, 40: 1.0}, rel=1e-6)


def test_learned_table_cannot_run_beyond_itself_and_says_why():
    config = dataclasses.replace(TINY, encoding="learned")
    by_length, by_position, far, _ = OBJECTIVES[CAUSAL].test(
        train.build_model(config), TEXT, config
    )
    assert [s.cannot for s in by_length] == [None, "it has 16 positions", "it has 16 positions"]
    assert [s.bits_per_byte is None for s in by_length] == [False, True, True]
    assert by_position[-1].stop == 16
    assert [s.cannot for s in far] == ["it has 16 positions", "it has 16 positions"]


def test_linear_layers_of_an_encoding_keep_the_model_rate_without_decay():
    config = dataclasses.replace(TINY, encoding="fox")
    model = train.build_model(config)
    own = {id(p) for p in model.encoding.parameters()}
    groups = train.optimizer_for(model, config).param_groups
    found = [g for g in groups for p in g["params"] if id(p) in own]
    assert len(found) == len(own) > 0
    assert all(g["factor"] == 1 and g["weight_decay"] == 0 for g in found)


class _DtypesOfProducts(TorchDispatchMode):
    """Collect the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        out = operator(*arguments, **(options or {}))
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.add(out.dtype)
        return out


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_precision_is_that_of_matrix_products_and_all_that_is_kept_is_float32(precision):
    config = dataclasses.replace(TINY, precision=precision)
    model = train.build_model(config)
    optimizer = train.optimizer_for(model, config)
    symbols = np.arange(300, dtype=np.uint16) % 250
    with _DtypesOfProducts() as products:
        loss = train.take_step(model, optimizer, config, symbols, 0)
    assert products.dtypes == {getattr(torch, precision)}
    kept = [loss, *model.parameters(), *(p.grad for p in model.parameters())]
    for state in optimizer.state.values():
        kept += [state["exp_avg"], state["exp_avg_sq"]]
    assert {tensor.dtype for tensor in kept} == {torch.float32}


def test_layers_that_are_computed_again_train_to_the_same_bits(tmp_path):
    plain, _ = run(TINY, tmp_path / "plain")
    recomputed, _ = run(dataclasses.replace(TINY, recompute=True), tmp_path / "recomputed")
    weights = recomputed.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items())


def test_a_trial_with_the_layers_of_a_config_learns(tmp_path):
    layers = Architecture(
        head_dim=24, ffn_dim=40, qk_norm=True, tie_embeddings=True, layer_windows=(None, 8)
    )
    model, cursor = run(dataclasses.replace(TINY, architecture=layers), tmp_path / "trial")
    assert model.config.layer_windows == (None, 8)
    assert cursor.training[-1].valid < cursor.training[0].valid
