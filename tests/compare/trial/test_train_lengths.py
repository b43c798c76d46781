"""Training windows of several lengths: which a step draws, and that a training is that of a plain
loop over such steps."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch

from posenc.compare.results import TrialResult
from posenc.compare.trial import train, windows
from posenc.compare.trial.config import read_trial, write_trial
from tests.compare.trial.test_bits_of_tokens import DOCUMENTS, END, losses_of_documents
from tests.compare.trial.test_far import losses_in_numpy, trained_a_little
from tests.compare.trial.test_trial import TEXT, TINY, Stop, run, stop_at
from tests.compilers import needs_inductor

LENGTHS = (4, 8, 16)
MIXED = dataclasses.replace(TINY, train_lengths=LENGTHS)
EVERYTHING = 10**6


def length_of(config, step):
    return windows.training_windows(TEXT, config, step).shape[1] - 1


def test_each_length_is_drawn_as_often_with_as_many_tokens_a_step():
    num_steps = 3000
    counts = dict.fromkeys(LENGTHS, 0)
    for step in range(num_steps):
        num_windows, num_symbols = windows.training_windows(TEXT, MIXED, step).shape
        assert num_windows * (num_symbols - 1) == MIXED.batch * MIXED.train_length
        counts[num_symbols - 1] += 1
    share = 1 / len(LENGTHS)
    deviation = math.sqrt(num_steps * share * (1 - share))
    assert all(abs(count - num_steps * share) < 4 * deviation for count in counts.values())


def test_a_draw_depends_on_the_seed_and_the_step_alone():
    def draws(**changes):
        config = dataclasses.replace(MIXED, **changes)
        return [length_of(config, step) for step in range(60)]

    first = draws()
    for changes in ({"encoding": "t5"}, {"lr": 0.1}, {"steps": 99}, {"micro_batch": 1}):
        assert draws(**changes) == first, changes
    assert draws(seed=1) != first
    # No length follows another more often than by chance: steps do not share their numbers.
    repeats = sum(a == b for a, b in itertools.pairwise(first))
    assert 8 < repeats < 33


def test_the_lengths_are_drawn_apart_from_where_windows_begin():
    """Windows of the longest length are those that a trial of this one length has in the step."""
    steps = [step for step in range(30) if length_of(MIXED, step) == MIXED.train_length]
    assert len(steps) > 3
    for step in steps:
        mixed, single = (windows.training_windows(TEXT, each, step) for each in (MIXED, TINY))
        assert torch.equal(mixed, single)


def test_the_training_reads_the_lengths_that_are_drawn(tmp_path, monkeypatch):
    seen = []
    build_model = train.build_model

    def watched(config):
        model = build_model(config)
        model.register_forward_pre_hook(
            lambda model, inputs: seen.append(tuple(inputs[0].shape)) if model.training else None
        )
        return model

    monkeypatch.setattr(train, "build_model", watched)
    config = dataclasses.replace(MIXED, steps=40)
    run(config, tmp_path / "run")
    assert [length for _, length in seen] == [length_of(config, step) for step in range(40)]
    assert {num_windows * length for num_windows, length in seen} == {4 * 16}
    assert {length for _, length in seen} == {*LENGTHS}


def plain_windows(config, step):
    """The windows of a step, drawn in plain words: its length, then where each begins."""
    draw = np.random.Generator(np.random.Philox(key=[config.seed, step]).jumped(2))
    length = config.train_lengths[draw.integers(0, len(config.train_lengths))]
    num_windows = config.batch * config.train_lengths[-1] // length
    begin = np.random.Generator(np.random.Philox(key=[config.seed, step]))
    starts = begin.integers(0, len(TEXT) - length, num_windows)
    return [[int(TEXT[start + i]) for i in range(length + 1)] for start in starts]


def test_a_few_steps_are_those_of_a_plain_loop():
    """Losses against a decoder in numpy that reads window by window, weights against AdamW over the
    mean of all tokens' losses."""
    config = dataclasses.replace(MIXED, kv_heads=MIXED.heads, seed=1)
    model = train.build_model(config)
    optimizer = train.optimizer_for(model, config)
    plain_model = train.build_model(config)
    is_matrix = {name: p.ndim > 1 for name, p in plain_model.named_parameters()}
    groups = [
        {
            "params": [p for name, p in plain_model.named_parameters() if is_matrix[name] == kind],
            "weight_decay": 0.1 if kind else 0.0,
        }
        for kind in (True, False)
    ]
    plain_optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    lengths = []
    for step in range(6):
        rows = plain_windows(config, step)
        lengths.append(len(rows[0]) - 1)
        bits = np.mean([losses_in_numpy(model, row, EVERYTHING) for row in rows])
        expected = bits * math.log(2)
        loss = train.take_step(model, optimizer, config, TEXT, step).item()
        assert loss == pytest.approx(expected, rel=1e-5)

        tokens = torch.tensor(rows)
        logits = plain_model(tokens[:, :-1])
        plain_loss = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
        plain_optimizer.zero_grad()
        plain_loss.backward()
        torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 1.0)
        for group in plain_optimizer.param_groups:
            group["lr"] = train.learning_rate(config, step)
        plain_optimizer.step()
    assert {*lengths} == {*LENGTHS}
    weights = plain_model.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("length", LENGTHS)
def test_documents_are_kept_apart_in_windows_of_each_length(length):
    config = dataclasses.replace(
        DOCUMENTS, train_length=16, test_lengths=(16,), train_lengths=LENGTHS, batch=8
    )
    model = trained_a_little(config)
    for step in range(99):
        rows = plain_windows(config, step)
        some_end_within = any(END in row[:-2] for row in rows)
        if len(rows[0]) - 1 == length and some_end_within:
            break
    apart = np.mean([losses_of_documents(model, row) for row in rows])
    joined = np.mean([losses_in_numpy(model, row, EVERYTHING) for row in rows])
    loss = train.loss_of_step(model, config, TEXT, step).item() / math.log(2)
    assert loss == pytest.approx(apart, rel=1e-5)
    assert abs(apart - joined) > 1e-3, "else the test could not tell them apart"


@pytest.mark.parametrize("objective", ["causal", "masked", "seq2seq"])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_pieces_of_a_step_add_up_to_the_whole_and_hold_as_many_tokens(objective, micro_batch):
    config = dataclasses.replace(MIXED, objective=objective, encoding="alibi", lr=1e-3)
    for length in LENGTHS:
        step = next(step for step in range(99) if length_of(config, step) == length)
        gradients, losses = [], []
        tokens_in_memory = []
        for size in (0, micro_batch):
            own = dataclasses.replace(config, micro_batch=size)
            model = train.build_model(own)
            model.register_forward_pre_hook(
                lambda model, inputs, seen=tokens_in_memory: seen.append(inputs[0].numel())
            )
            optimizer = torch.optim.SGD([{"params": model.parameters(), "factor": 1.0}], lr=0.0)
            losses.append(train.take_step(model, optimizer, own, TEXT, step).item())
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)
        whole, *pieces = tokens_in_memory
        assert sum(pieces) == whole and max(pieces) * 4 == whole * micro_batch


def tensors_and_cursor(folder):
    """The bytes of the last checkpoint, and its cursor without what a clock says."""
    (tensors,) = folder.glob("checkpoint-*.safetensors")
    cursor = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    for name in ("sha256", "train_seconds"):
        del cursor[name]
    return tensors.read_bytes(), cursor


@pytest.mark.quick(2)
@pytest.mark.parametrize("changes", [{}, {"micro_batch": 3}, {"objective": "masked"}], ids=str)
@pytest.mark.parametrize("step", [5, 7])
def test_an_interrupted_training_ends_in_the_same_bytes(tmp_path, step, changes):
    config = dataclasses.replace(MIXED, encoding="t5", **changes)
    run(config, tmp_path / "whole")
    with pytest.raises(Stop):
        run(config, tmp_path / "halves", stop_at(step), every=2)
    torch.manual_seed(99)
    run(config, tmp_path / "halves", every=4)
    assert tensors_and_cursor(tmp_path / "halves") == tensors_and_cursor(tmp_path / "whole")
    lengths = [length_of(config, step) for step in range(config.steps)]
    assert len({*lengths[:step]}) > 1 and len({*lengths[step:]}) > 1


def test_a_trial_without_lengths_is_what_it_was(tmp_path):
    """Its hash, and so its folder, is that of a trial from before there were several lengths, and
    such a trial's file is read."""
    trial = dataclasses.replace(TINY, torch="2.13.0")
    assert trial.hash == "d526c2396a5f"
    home = tmp_path / trial.folder
    home.mkdir()
    write_trial(home, trial)
    file = home / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    del fields["train_lengths"]
    file.write_text(json.dumps(fields), encoding="utf-8")
    assert read_trial(home) == trial
    assert windows.config_of_step(trial, 3) is trial


def test_lengths_go_to_files_and_back(tmp_path):
    home = tmp_path / MIXED.folder
    home.mkdir()
    write_trial(home, MIXED)
    assert read_trial(home) == MIXED
    result = TrialResult(MIXED, "failed")
    assert TrialResult.from_json(result.to_json()) == result
    assert MIXED.hash != TINY.hash


@pytest.mark.parametrize(
    "changes",
    [
        {"train_lengths": (16,)},
        {"train_lengths": (4, 8)},
        {"train_lengths": (4, 32)},
        {"train_lengths": (8, 8, 16)},
        {"train_lengths": (8, 4, 16)},
        {"train_lengths": (0, 16)},
        {"train_lengths": (-4, 16)},
        {"train_lengths": (1, 16)},
        {"train_lengths": (5, 16)},  # 64 tokens are no windows of 5
        {"train_lengths": LENGTHS, "task": "copy"},
    ],
    ids=str,
)
def test_a_file_with_lengths_that_no_plan_makes_is_refused(changes):
    MIXED.check()
    bad = dataclasses.replace(TINY, **changes)
    with pytest.raises(ValueError, match="train_lengths"):
        bad.check()
    with pytest.raises(ValueError, match="train_lengths"):
        TrialResult.from_json(TrialResult(bad, "failed").to_json())


@needs_inductor
@pytest.mark.nightly  # compiled for a minute
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own
def test_each_length_is_compiled_once_and_gives_the_same_losses():
    config = dataclasses.replace(MIXED, train_lengths=(8, 16), compile=True, layers=1)
    losses = []
    torch._dynamo.utils.counters.clear()
    for is_compiled in (True, False):
        own = dataclasses.replace(config, compile=is_compiled)
        model = train.build_model(own)
        optimizer = train.optimizer_for(model, own)
        stepped_model = train.compile_if_asked(model, own)
        losses.append(
            [train.take_step(stepped_model, optimizer, own, TEXT, n).item() for n in range(12)]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert {length_of(config, step) for step in range(12)} == {8, 16}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
