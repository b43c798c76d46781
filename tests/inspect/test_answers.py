"""Answers and captions of a page, on data that show a property and on data that show its
opposite."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from posenc import ModelShape, PositionEncoding, create
from posenc.inspect.checkpoint import answer as of_checkpoint
from posenc.inspect.checkpoint import captions as checkpoint_captions
from posenc.inspect.checkpoint import page
from posenc.inspect.checkpoint.positions import Bias, Rotation, Table
from posenc.inspect.checkpoint.structure import Structure
from posenc.inspect.checkpoint.swap import Change, Swap
from posenc.inspect.encoding import answer as of_encoding
from posenc.inspect.encoding import captions, scores
from posenc.inspect.encoding.measurements import SpecSheet
from posenc.inspect.encoding.scores import Decay, Resolution
from posenc.testing.layer import encoding_of_first_layer

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
    assert said in of_encoding.near_and_far(decay(same, mean), by_content=False)


def test_what_counts_by_content_says_so():
    said = of_encoding.near_and_far(decay([8.0] * 5), by_content=True)
    assert "by the tokens between" in said and "same weight" in said
    said = of_encoding.near_and_far(decay([8, 8, 6, 4, 1.0]), by_content=True)
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
    assert said in of_encoding.limits(found, encoding_of_first_layer(create("nope", SHAPE)))
    assert ("nothing" in said) == ("nothing" in str(of_encoding.answer(found)).lower())


def measured(name: str, **options) -> tuple[SpecSheet, PositionEncoding]:
    from posenc.inspect.encoding.precision import angles_of

    encoding = encoding_of_first_layer(create(name, SHAPE, **options))
    angles = angles_of(encoding)
    assert angles is not None
    waves = [2 * np.pi / float(f) if float(f) else None for f in angles.inv_freq]
    return sheet(name=name, places=[2], num_pairs=len(waves), wavelengths=waves), encoding


def test_new_angles_begin_where_the_stretch_ends():
    slow = sum(2 * np.pi * 10000 ** (i / 8) > 128 for i in range(8))
    assert of_encoding.new_angles(*measured("rope")) == (128, slow)
    assert of_encoding.new_angles(*measured("linear", factor=4.0)) == (512, slow)
    assert of_encoding.new_angles(*measured("rope", rope_theta=3.0)) is None
    assert of_encoding.new_angles(*measured("self_extend")) is None  # maps back what lies beyond


def test_costs():
    assert of_encoding.cost(sheet()) == "no parameters and no measurable time"
    layered = sheet(parameters=4104, per_layer=True, cost=(1.2, 1.3, 1.4))
    assert of_encoding.cost(layered) == (
        "4,104 parameters in every layer, and a layer takes 1.30 times as long (1.20 to 1.40)"
    )
    assert "0.80 times as long" in of_encoding.cost(sheet(cost=(0.7, 0.8, 0.9)))
    unknown = sheet(cost=(float("nan"),) * 3)
    assert "no measurable time" in of_encoding.cost(unknown)
    assert "before training" in of_encoding.answer(layered).cells()[1]
    assert "Before any training" in str(of_encoding.answer(layered))


def test_what_is_seen_in_scores():
    falls, level = decay([8, 8, 7, 5, 1.0]), decay([8.0] * 5)
    assert captions.in_scores({"a": falls}, same=True) == "a falls: 8 near, 1 far."
    assert captions.in_scores({"a": level}, same=True) == "a stays level: 8 near, 8 far."
    nothing = decay([-8.67e-19] + [0.0] * 4)
    assert captions.in_scores({"a": nothing}, same=True) == "a stays level: 0 near, 0 far."
    both = captions.in_scores({"a": falls, "b": level}, same=True)
    assert both == "a falls most, by 7 logits; b stays level."
    rises = decay([1, 1, 2, 4, 9.0])
    assert "c rises most, by 8 logits" in captions.in_scores({"a": falls, "c": rises}, same=True)
    assert "No encoding here" in captions.in_scores({"a": level, "b": level}, same=True)
    assert "on average" in captions.in_scores({"a": falls}, same=False)


def test_what_is_seen_in_the_other_figures():
    assert "2 of 3 pairs" in captions.in_wavelengths({"a": [6.0, 200.0, None]}, 128)
    assert captions.in_wavelengths({"a": [6.0]}, 128) == "Every pair completes a turn in training."
    stretched = captions.in_wavelengths({"a": [6.0, 200.0], "b": [6.0, 800.0]}, 128)
    assert "b has wavelengths 1 to 4 times those of a" in stretched
    assert "Right throughout: x; y only to 5." == captions.in_precision({"x": 9, "y": 5}, 9)
    assert "Every way is right" in captions.in_precision({"x": 9, "y": 9}, 9)
    table = np.stack([np.sin(np.arange(9.0)), np.ones(9)], axis=1)
    assert "1 of 2 dimensions change sign" in captions.in_added(table)
    assert "Dimension 0 moves most, dimension 1 least" in captions.in_lines(
        table, [0, 1], "dimension"
    )
    assert "about as much" in captions.in_lines(table[:, [0, 0]], [0, 1], "dimension")
    near = np.exp(-0.5 * np.abs(np.subtract.outer(np.arange(8), np.arange(8))))
    assert "Neighbours are alike" in captions.in_similarity(near)
    assert "positions 8 apart" in captions.in_similarity(near, step=2)
    assert "are as alike" in captions.in_similarity(np.eye(8))
    assert "are more alike" in captions.in_similarity(1 - near)
    assert "1 of 2 pairs complete a turn" in captions.in_turns([1.0, 0.001], 128)
    assert "2 of 2 pairs complete a turn within 128 positions." == captions.in_turns(
        [1.0, 2.0], 128
    )
    assert "after 4.0 tokens" in captions.in_steps(90.0)
    assert captions.in_steps(0.0) == "This pair does not turn."


def test_what_is_seen_in_biases():
    distances = [0, 1, 2]
    falling = np.array([[0, -1, -2.0], [0, -4, -8.0]])
    assert "Head 1 falls by 8 logits" in captions.in_bias(falling, distances)
    assert "Head 0 rises by 2 logits" in captions.in_bias(
        -falling[:, ::1], distances
    ) or "rises" in (captions.in_bias(-falling, distances))
    assert "nothing has been learned" in captions.in_bias(falling / 1000, distances)
    assert "No head tells" in captions.in_bias(np.ones((2, 3)), distances)
    assert "Every head falls" in captions.in_bias(falling[:1], distances)
    assert "far keys lose" in captions.in_matrix(np.array([[0, -9.0], [-9.0, 0]]))
    assert "far keys gain" in captions.in_matrix(np.array([[0, 9.0], [9.0, 0]]))
    assert "Much the same" in captions.in_matrix(np.zeros((2, 2)))
    assert "every 1.39 tokens" in captions.in_slopes([0.5, 0.25])
    assert "from 0 to 0.5" in captions.in_slopes([0.5, 0.0])
    assert "Distances 0 to 2 have a bucket each; the last bucket shown begins at 3." == (
        captions.in_buckets([0, 1, 2, 3, 3, 3])
    )
    assert captions.in_buckets([0, 0, 0]) == "All distances share one bucket."


def rotation(trained=256, longest=256, factor=1.0) -> Rotation:
    waves: list[float | None] = [6.3, 63.0, 630.0, 6300.0]
    scaled = [None if w is None else w * (factor if w > trained else 1) for w in waves]
    return Rotation("all layers", 1e4, 8, 8, "yarn", trained, longest, scaled, waves)


def structure(model_type="llama") -> Structure:
    return Structure(model_type, 2, None, 4, 4, 8, 32, 64, False, {})


def test_how_far_a_checkpoint_was_trained():
    said = of_checkpoint.answer([rotation()], 256)
    assert said == (
        "Trained on 256 tokens: beyond them 2 of its 4 rotary pairs leave their trained range; "
        "expect it to break there."
    )
    stretched = of_checkpoint.answer([rotation(longest=1024, factor=4.0)], 1024)
    assert "stretched to 1,024 by yarn: up to there all 4 rotary pairs stay" in stretched
    half = of_checkpoint.answer([rotation(longest=1024, factor=2.0)], 1024)
    assert "up to there 2 of its 4 rotary pairs" in half
    done = of_checkpoint.answer([rotation(trained=10**4, longest=10**4)], 10**4)
    assert "all 4 rotary pairs completed a turn" in done
    table = Table("wpe", 512, 0, 0.9, (1.0, 1.0, 1.0), 4, [])
    assert "at token 513 it has no row" in of_checkpoint.answer([table], 512)
    bias = Bias("scores", "slopes", [0], [[0.0]])
    assert "no length breaks it" in of_checkpoint.answer([bias], None)
    assert "posenc finds nothing" in of_checkpoint.answer([], 512)


def test_the_line_to_run():
    folder = Path("my model")
    line = of_checkpoint.extend_command(folder, [rotation()], structure(), 256)
    assert line == "posenc extend 'my model' --to 512"
    assert of_checkpoint.extend_command(folder, [rotation()], structure("gptj"), 256) is None
    bias = Bias("scores", "slopes", [0], [[0.0]])
    assert of_checkpoint.extend_command(folder, [bias], structure("bloom"), None) is None


def change(last, every) -> Change:
    return Change([0.1], last, every, 1.0, 0.1)


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
    found = of_checkpoint.who_saw_whom(swap)
    assert found.startswith("With dog and cat exchanged") and said in found
    assert "differs from layer 1 on, by 0.25 of its norm in the last layer" in found


def test_what_is_seen_in_a_checkpoint():
    eye = np.eye(4)
    assert "2 look mostly at the token itself" in checkpoint_captions.in_attention(
        np.stack([eye] * 2)
    )
    first = np.zeros((1, 4, 4))
    first[..., 0] = 1
    assert "1 looks mostly at the first token" in checkpoint_captions.in_attention(first)
    flat = np.full((3, 4, 4), 0.25)
    assert "None of the 3 heads" in checkpoint_captions.in_attention(flat)
    mixed = checkpoint_captions.in_attention(np.concatenate([first, flat]))
    assert mixed.endswith("; 3 elsewhere.")
    moved = checkpoint_captions.in_changed_words({"with positions": [0.1, 0.9]}, ["a", "b"])
    assert moved == "With positions, 'b' moves most (0.9) and 'a' least (0.1)."
    layers = {"with": [0, 0.1], "without": [0.0, 1e-9]}
    said = checkpoint_captions.in_changed_layers(layers, 1e-5)
    assert said == "With it moves from layer 1 on, up to 0.1; without nothing moves."
    changes = (0.0, 6e-8, 0.002, float("nan"))  # digits of rounding differ between processors
    assert [page._change_in_words(change) for change in changes] == [
        "0",
        "rounding",
        "0.002",
        "nan",
    ]
    values = np.array([[1.0, 2.0], [0.5, 3.0]])
    assert "Head 1 of layer 1 looks farthest" in captions.in_attention_distance(values)


def test_an_answer_is_of_what_was_measured():
    """The same words come from the measured scores of a real encoding and of its opposite."""
    alibi = create("alibi", SHAPE)
    measured_decay = scores.decay(alibi, SHAPE)
    assert "favours near tokens, whatever" in of_encoding.near_and_far(measured_decay, False)
    opposite = dataclasses.replace(
        measured_decay, same=measured_decay.same[::-1], mean=measured_decay.mean[::-1]
    )
    assert "favours far tokens, whatever" in of_encoding.near_and_far(opposite, False)


def test_new_angles_on_a_larger_grid():
    encoding = encoding_of_first_layer(create("axial_rope", SHAPE))
    found = sheet(
        name="axial_rope", places=[2], num_pairs=8, unfinished_pairs=[6, 7], axis_length=12
    )
    said = of_encoding.limits(found, encoding)
    assert said.startswith("on grids of more than 12 cells to a side, 2 of its 8 rotary pairs")
    done = sheet(name="axial_rope", places=[2], num_pairs=8, axis_length=12)
    assert "grids" not in of_encoding.limits(done, encoding)
