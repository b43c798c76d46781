"""Answers that name layers become rotations of kinds of layers."""

import pytest

from posenc.runtimes.ask import Rotation, RuntimeAnswer, as_computed, as_loaded
from posenc.runtimes.computed_positions import ComputedPositions
from posenc.runtimes.config_model import model_of
from posenc.runtimes.files.gguf_metadata import Metadata
from posenc.runtimes.known.llama_cpp import compute_from_metadata

GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 7}
FAST, SLOW = (1.0, 0.5), (1.0, 0.25)
NOTHING = ComputedPositions()


def of_layers(*rows: tuple[tuple[float, ...], tuple[int, ...]]) -> RuntimeAnswer:
    rotations = tuple(Rotation("rope", "", row, 1.0, True, layers) for row, layers in rows)
    return RuntimeAnswer("mlx-lm", "1", rotations=rotations)


def layers(asked: RuntimeAnswer, config: dict) -> dict[str, tuple[float, ...]]:
    answer = as_computed(asked, NOTHING, model_of(config))
    return {kind: layer.inv_freq for kind, layer in answer.rotations.items()}


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
        asked = RuntimeAnswer(
            runtime, "5", rotations=of_layers((FAST, (0,))).rotations, longest_admitted=4096
        )
        assert as_computed(asked, NOTHING).max_length == longest


STRETCHED = Metadata("llama", 4096, 16, 16, freq_base=5e5, scaling_factor=3.0)
PRINTED = {
    "n_ctx_train": 4096.0,
    "n_rot": 16.0,
    "freq_base_train": 5e5,
    "freq_scale_train": 0.333333,
    "rope scaling": "linear",
    "n_ctx_orig_yarn": 4096.0,
}


def loaded(**changes: float | str) -> ComputedPositions:
    printed = {**PRINTED, **{name.replace("__", " "): value for name, value in changes.items()}}
    return as_loaded(RuntimeAnswer("llama.cpp", "b1", loaded=printed), STRETCHED, None)


def test_what_is_printed_in_few_digits_changes_no_number():
    computed = loaded()
    assert computed.asked and computed.version == "b1"
    assert computed.rotations == compute_from_metadata(STRETCHED, None).rotations


@pytest.mark.parametrize(
    "changes",
    [
        {"freq_base_train": 1e4},
        {"freq_scale_train": 1.0},
        {"rope__scaling": "none"},
    ],
)
def test_what_the_loader_takes_otherwise_is_computed_with(changes):
    computed = loaded(**changes)
    assert computed.asked and computed.error is None
    assert computed.rotations != compute_from_metadata(STRETCHED, None).rotations


def test_what_the_loader_refuses_or_does_not_say():
    refused = as_loaded(RuntimeAnswer("llama.cpp", "b1", refusal="no."), STRETCHED, None)
    assert (refused.error, refused.known) == ("no.", "yes")
    lacks = as_loaded(
        RuntimeAnswer("llama.cpp", "b1", refusal="no.", no_model=True), STRETCHED, None
    )
    assert lacks.known == "no model"
    silent = as_loaded(RuntimeAnswer("llama.cpp", "b1", why_unmeasured="it ended"), STRETCHED, None)
    assert silent.known == "unknown"


def test_a_file_that_only_the_loader_accepts_is_not_judged_by_it():
    """posenc would refuse a part of a head in a Llama, and so cannot compute what follows."""
    assert loaded(n_rot=8.0).known == "unknown"
