"""Answers of a report, on data that show a property and on data that show its opposite."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from posenc import ModelShape, PositionEncoding, create
from posenc.inspect.checkpoint import sentences as of_checkpoint
from posenc.inspect.checkpoint.measurements import Structure
from posenc.inspect.checkpoint.positions import Bias, MeasuredTable, Rotation
from posenc.inspect.checkpoint.sentences import extended_length, heads_by_target, judge_swap
from posenc.inspect.checkpoint.swap import Swap, SwapEffect
from posenc.inspect.encoding import report, scores, sentences
from posenc.inspect.encoding.measurements import SpecSheet
from posenc.inspect.encoding.scores import Decay, Resolution
from posenc.report.report import Cell
from posenc.testing.harness import encoding_of_first_layer

SHAPE = ModelShape(embed_dim=64, num_heads=4, head_dim=16, train_length=128)
HOLDS = dict.fromkeys(("shift", "padding", "packing", "batch", "cache"), 0.0)


def decay(same: list[float | None], mean: Sequence[float] | None = None) -> Decay:
    distances = [0, 1, 4, 16, 127][: len(same)]
    means = [0.0] * len(same) if mean is None else list(mean)
    low, high = [m - 1 for m in means], [m + 1 for m in means]
    return Decay(distances, [*means], [*low], [*high], same, [0.0] * len(means))


def sheet(**changes) -> SpecSheet:
    plain = {
        "name": "nope",
        "shape": SHAPE,
        "places": [3],
        "parameters": 0,
        "per_layer": False,
        "max_positions": None,
        "norm_ratio": None,
        "direction": "directed",
        "precision": None,
        "resolution": {"float32": Resolution(10**5, 10**5)},
        "num_pairs": 0,
        "axis_length": SHAPE.train_length,
        "scaling": None,
        "unfinished_pairs": [],
        "wavelengths": [],
        "decay": decay([1.0] * 5),
        "differences": HOLDS,
        "compiles": "yes",
        "exports": "yes",
        "cost": (0.9, 1.0, 1.1),
    }
    return SpecSheet(**{**plain, **changes})


def near_and_far(measured_decay: Decay, by_content: bool = False) -> str:
    judged = sentences.judge_distances(measured_decay, by_content=by_content)
    return sentences.near_and_far_in_words(judged)


def limits(found: SpecSheet, encoding: PositionEncoding) -> str:
    return sentences.limits_in_words(sentences.judge_limits(found, encoding), found)


def cost(found: SpecSheet) -> str:
    return sentences.cost_in_words(sentences.judge(found))


@pytest.mark.parametrize(
    ("same", "mean", "said"),
    [
        ([8, 8, 7, 5, 1.0], None, "favours near tokens that match the query: they get 1,097 times"),
        ([8, 8, 7, 5, 1.0], [0, 0, -1, -3, -7.0], "favours near tokens, whatever their content"),
        ([1, 1, 2, 4, 8.0], None, "favours far tokens that match the query"),
        ([1, 1, 2, 4, 8.0], None, "1,097 times as much weight at distance 127 as at 1"),
        ([8, 8, 8, 8, 8.1], None, "treats near and far alike"),
        ([8, 8, 1, 1, 8.1], None, "favours neither near nor far"),
        ([8, 8, 7, None, None], None, "sees nothing beyond 4 tokens"),
        ([8, 8, 7, 5, -90.0], None, "over 10,000 times"),
        ([8.0], None, "sees a single token"),
    ],
)
def test_near_and_far(same, mean, said):
    assert said in near_and_far(decay(same, mean))


def test_what_counts_by_content_says_so():
    said = near_and_far(decay([8.0] * 5), by_content=True)
    assert "by the tokens between" in said and "same weight" in said
    said = near_and_far(decay([8, 8, 6, 4, 1.0]), by_content=True)
    assert "favours near tokens" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "nothing that was measured here ends with the 128 tokens"),
        ({"max_positions": 128}, "no position beyond 127"),
        ({"differences": HOLDS | {"packing": 0.1}}, "change with other documents in the window"),
        ({"differences": HOLDS | {"padding": float("nan")}}, "change with padding"),
        ({"direction": "blind"}, "does not encode order"),
        ({"direction": "symmetric"}, "cannot distinguish before from after"),
        ({"resolution": {"float32": Resolution(15, 112)}}, "beyond 15 tokens some neighbouring"),
        ({"places": [1]}, "positions from 128 on are new to a model"),
    ],
)
def test_limits(changes, said):
    found = sheet(**changes)
    assert said in limits(found, encoding_of_first_layer(create("nope", SHAPE)))
    answer = sentences.answer_in_words(sentences.judge(found))
    assert ("nothing" in said) == ("nothing" in answer.lower())


def measured(name: str, **options) -> tuple[SpecSheet, PositionEncoding]:
    from posenc.inspect.encoding.precision import exact_frequencies_of

    encoding = encoding_of_first_layer(create(name, SHAPE, **options))
    angles = exact_frequencies_of(encoding)
    assert angles is not None
    waves = [2 * np.pi / float(f) if float(f) else None for f in angles.inv_freq]
    return sheet(name=name, places=[2], num_pairs=len(waves), wavelengths=waves), encoding


def test_new_angles_begin_where_the_stretch_ends():
    slow = sum(2 * np.pi * 10000 ** (i / 8) > 128 for i in range(8))
    assert sentences.new_angles(*measured("rope")) == (128, slow)
    assert sentences.new_angles(*measured("linear", factor=4.0)) == (512, slow)
    assert sentences.new_angles(*measured("rope", rope_theta=3.0)) is None
    assert sentences.new_angles(*measured("self_extend")) is None  # maps back what lies beyond


def test_costs():
    assert cost(sheet()) == "no parameters and no measurable time"
    layered = sheet(parameters=4104, per_layer=True, cost=(1.2, 1.3, 1.4))
    assert cost(layered) == (
        "4,104 parameters in every layer, and a layer takes 1.30 times as long (1.20 to 1.40)"
    )
    assert "0.80 times as long" in cost(sheet(cost=(0.7, 0.8, 0.9)))
    unknown = sheet(cost=(float("nan"),) * 3)
    assert "no measurable time" in cost(unknown)
    judged = sentences.judge(layered)
    (row,) = report.answer_table([judged]).rows
    assert "before training" in str(row[1])
    assert "Before any training" in sentences.answer_in_words(judged)


def rotation(trained=256, longest=256, factor=1.0) -> Rotation:
    waves: list[float | None] = [6.3, 63.0, 630.0, 6300.0]
    scaled = [None if w is None else w * (factor if w > trained else 1) for w in waves]
    return Rotation("all layers", 1e4, 8, 8, "yarn", trained, longest, scaled, waves)


def structure(model_type="llama") -> Structure:
    return Structure(model_type, 2, None, 4, 4, 8, 32, 64, False, {})


def test_how_far_a_checkpoint_was_trained():
    said = of_checkpoint.answer_in_words([rotation()], 256)
    assert said == (
        "Trained on 256 tokens: beyond them 2 of its 4 rotary pairs leave their trained range; "
        "it may break there."
    )
    stretched = of_checkpoint.answer_in_words([rotation(longest=1024, factor=4.0)], 1024)
    assert "stretched to 1,024 by yarn: up to there all 4 rotary pairs stay" in stretched
    half = of_checkpoint.answer_in_words([rotation(longest=1024, factor=2.0)], 1024)
    assert "up to there 2 of its 4 rotary pairs" in half
    done = of_checkpoint.answer_in_words([rotation(trained=10**4, longest=10**4)], 10**4)
    assert "all 4 rotary pairs completed a turn" in done
    table = MeasuredTable("wpe", 512, 0, 0.9, (1.0, 1.0, 1.0), 4, [])
    assert "at token 513 it has no row" in of_checkpoint.answer_in_words([table], 512)
    bias = Bias("scores", "slopes", [0], [[0.0]])
    assert "no length breaks it" in of_checkpoint.answer_in_words([bias], None)
    assert "posenc finds nothing" in of_checkpoint.answer_in_words([], 512)


def test_the_length_that_extend_can_reach():
    assert extended_length([rotation()], structure(), 256) == 512
    assert extended_length([rotation()], structure("gptj"), 256) is None
    bias = Bias("scores", "slopes", [0], [[0.0]])
    assert extended_length([bias], structure("bloom"), None) is None


def change(last, every) -> SwapEffect:
    return SwapEffect([0.1], last, every, 1.0, 0.1)


@pytest.mark.parametrize(
    ("causal", "removed", "said"),
    [
        (True, change([0, 0, 0.2], [0, 0.5, 0.9]), "without positions it differs from layer 2 on"),
        (True, change([0, 0, 0.0], [0, 0, 0.0]), "without positions it stays the same in all"),
        (False, change([0, 0, 0.0], [0, 0, 1e-7]), "without positions it stays the same in all"),
        (False, change([0, 0, 0.0], [0, 0.3, 0.4]), "without positions it differs from layer 1"),
        (True, None, "nothing of its positions is known to be removable"),
        (True, change([0, float("nan"), 0.2], [0]), "without positions it differs from layer 1"),
    ],
)
def test_who_saw_whom(causal, removed, said):
    kept = change([0, 0.1, 0.25], [0, 0.1, 0.25])
    swap = Swap(("dog", "cat"), [1, 0], causal, True, ["rope"] if removed else [], kept, removed)
    found = of_checkpoint.swap_in_words(swap, judge_swap(swap))
    assert found.startswith("With dog and cat exchanged") and said in found
    assert "differs from layer 1 on, by 0.25 of its norm in the last layer" in found


def test_heads_are_counted_by_what_they_look_at():
    eye = torch.eye(4)
    first = torch.zeros(1, 4, 4)
    first[..., 0] = 1
    previous = torch.eye(4).roll(-1, 1)[None]
    flat = torch.full((3, 4, 4), 0.25)
    assert heads_by_target(torch.stack([eye] * 2)) == (0, 2, 0)
    assert heads_by_target(torch.cat([first, flat])) == (1, 0, 0)
    assert heads_by_target(torch.cat([previous, flat])) == (0, 0, 1)
    assert heads_by_target(flat) == (0, 0, 0)


def test_a_hybrid_is_said_to_be_its_first_layer():
    for name, said in (("irope", True), ("nope", False)):
        judged = sentences.judge(sheet(name=name))
        sentence = f"This is its first layer: {judged.layers_per_pattern} layers are a pattern."
        (row,) = report.answer_table([judged]).rows
        assert isinstance(row[0], Cell) and row[0].text == name
        assert (row[0].note == sentence) is said
        assert sentences.answer_in_words(judged).endswith(sentence) is said


def test_an_answer_is_of_what_was_measured():
    """The same words come from the measured scores of a real encoding and of its opposite."""
    alibi = create("alibi", SHAPE)
    measured_decay = scores.decay(alibi, SHAPE)
    assert "favours near tokens, whatever" in near_and_far(measured_decay)
    opposite = dataclasses.replace(
        measured_decay, same=measured_decay.same[::-1], mean=measured_decay.mean[::-1]
    )
    assert "favours far tokens, whatever" in near_and_far(opposite)


def test_new_angles_on_a_larger_grid():
    encoding = encoding_of_first_layer(create("axial_rope", SHAPE))
    found = sheet(
        name="axial_rope", places=[2], num_pairs=8, unfinished_pairs=[6, 7], axis_length=12
    )
    said = limits(found, encoding)
    assert said.startswith("on grids of more than 12 cells to a side, 2 of its 8 rotary pairs")
    done = sheet(name="axial_rope", places=[2], num_pairs=8, axis_length=12)
    assert "grids" not in limits(done, encoding)
