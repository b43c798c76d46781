"""Answers that name layers become rotations of kinds of layers."""

from posenc.runtimes.ask import Asked, Rotation, as_computed
from posenc.runtimes.computed import ComputedPositions
from posenc.runtimes.model import model_of

GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 7}
FAST, SLOW = (1.0, 0.5), (1.0, 0.25)
NOTHING = ComputedPositions()


def of_layers(*rows: tuple[tuple[float, ...], tuple[int, ...]]) -> Asked:
    rotations = tuple(Rotation("rope", "", row, 1.0, True, layers) for row, layers in rows)
    return Asked("mlx-lm", "1", rotations=rotations)


def layers(asked: Asked, config: dict) -> dict[str, tuple[float, ...]]:
    answer = as_computed(asked, NOTHING, model_of(config))
    return {kind: layer.inv_freq for kind, layer in answer.layers.items()}


def test_kinds_are_those_of_the_family():
    asked = of_layers((FAST, (0, 1, 2, 3, 4, 6)), (SLOW, (5,)))
    assert layers(asked, GEMMA) == {"sliding_attention": FAST, "full_attention": SLOW}


def test_layers_of_a_kind_that_rotate_differently_are_told_apart():
    asked = of_layers((FAST, (0, 1, 2)), (SLOW, (3, 4, 5, 6)))
    assert layers(asked, GEMMA) == {
        "sliding_attention": FAST,
        "sliding_attention (layer 3 and others)": SLOW,
        "full_attention": SLOW,
    }


def test_without_kinds_all_layers_are_of_one():
    asked = of_layers((FAST, (0,)), (SLOW, (1,)))
    llama = {"model_type": "llama", "num_hidden_layers": 2}
    assert layers(asked, llama) == {"all": FAST, "all (layer 1 and others)": SLOW}


def test_a_single_rotation_is_of_all_layers():
    assert layers(of_layers((FAST, (0, 1))), GEMMA) == {"all": FAST}


def test_only_a_server_has_a_longest_sequence():
    for runtime, longest in (("vllm", 4096), ("transformers", None)):
        asked = Asked(runtime, "5", rotations=of_layers((FAST, (0,))).rotations, admits=4096)
        assert as_computed(asked, NOTHING).max_length == longest
