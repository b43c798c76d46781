"""A text longer than the file is meant for: what happens, and which scaling to serve with."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from posenc.doctor.misreadings import ALL_RUNTIMES, Case
from posenc.doctor.rule import COMMAND_INDENT, Hit, rule
from posenc.runtimes.config_model import ORIGINAL_LENGTH_KEY, language_model_key_after_loading
from posenc.runtimes.families import SERVERS
from posenc.runtimes.meaning import Meaning, UnknownFamilyError, meaning_of
from posenc.runtimes.writers.overrides import intended_config, override_options


class ModelCard(NamedTuple):
    """The scaling that the published card of a family names for longer texts.

    families: the model_types. trained_length: tokens, before stretching. factor: by which yarn
    stretches. name: of the models, as their card writes it.
    """

    families: tuple[str, ...]
    trained_length: int
    factor: float
    name: str


CARDS = (
    ModelCard(("qwen2", "qwen2_moe"), 32768, 4.0, "Qwen2.5"),
    ModelCard(("qwen3", "qwen3_moe"), 32768, 4.0, "Qwen3"),
    ModelCard(("qwen3_vl_text", "qwen3_vl_moe_text"), 262144, 3.0, "Qwen3-VL"),
    ModelCard(("smollm3",), 65536, 2.0, "SmolLM3"),
    ModelCard(("qwen3_5_text", "qwen3_5_moe_text"), 262144, 4.0, "Qwen3.5"),
)
"""As the models' cards on the Hugging Face Hub say: yarn, which the files leave out."""
LARGEST_STATED_RATIO = 1.5
"""A card speaks of a file whose stated length is at most so many times the card's trained length:
Qwen3's files say 40960 for 32768 tokens. Chosen, not derived."""


@rule("PD064", "E")
def report_text_beyond_meant_length(case: Case) -> Iterator[Hit]:
    """Report a length to judge at that is longer than the file is meant for."""
    meaning = case.meaning
    if case.metadata is not None or meaning is None or case.length is None:
        return
    if any(p["rope_type"] == "dynamic" for p in meaning.parameters.values()):
        return  # its frequencies follow the length
    max_length = meaning.model.max_positions
    reachable_length = max(
        max_length, *(_length_after_stretching(p) for p in meaning.parameters.values())
    )
    if case.length <= reachable_length:
        return
    yield Hit(
        f"{case.length} tokens are asked for, and the file is meant for {reachable_length}: beyond "
        "them the text repeats itself or falls apart, whatever a server admits",
        concerned=case.judged_runtimes,
        affected=ALL_RUNTIMES,
        cure=_cure(case, meaning, case.length),
    )


def _length_after_stretching(p: Mapping[str, Any]) -> int:
    """Return the length to which a yarn stretches, in tokens; 0 for other types."""
    factor, original_length = p.get("factor"), p.get(ORIGINAL_LENGTH_KEY)
    is_yarn = p["rope_type"] == "yarn"
    if not is_yarn or not isinstance(factor, int | float) or not isinstance(original_length, int):
        return 0
    return int(factor * original_length)


def _cure(case: Case, meaning: Meaning, length: int) -> str:
    """Return what to do, in words.

    A model whose layers have rope dicts of their own, a scaling already, or latent attention (MLA)
    gets general advice: serve no more than it is meant for, or measure a scaling. Any other gets
    the scaling of its card, else yarn as a first try, with the lines for each server.

    length: tokens that are to be served.
    """
    advice_to_measure = (
        f"`posenc extend MODEL --to {length}` measures what a scaling costs on short texts."
    )
    note_on_limit = (
        "The variables with which vLLM and SGLang admit a longer text lift the limit only: no "
        "angle changes."
    )
    p = meaning.parameters.get("all")
    if p is None or p["rope_type"] != "default" or meaning.model.is_mla:
        return (
            "Serve at most what the file is meant for, or stretch it. "
            f"{advice_to_measure} {note_on_limit}"
        )
    card = _card_of(meaning, length)
    if card is not None:
        trained_length, factor = card.trained_length, card.factor
        introduction = f"Serve with the scaling of {card.name}'s card:"
    else:
        trained_length = meaning.trained_length
        factor = float(2 ** math.ceil(math.log2(length / trained_length)))
        introduction = "posenc knows no card for this model. A first try, which nobody has tuned:"
    scaling = {"rope_type": "yarn", "factor": factor, ORIGINAL_LENGTH_KEY: trained_length}
    dict_name = "rope_scaling" if case.rope_parameters is None else "rope_parameters"
    rope_dict = case.rope_parameters or case.rope_scaling or {}
    written_dict = {**{key: value for key, value in rope_dict.items() if key != "type"}, **scaling}
    lines = [f'{introduction} write "{dict_name}": {json.dumps(written_dict)}. As options:']
    stretched_length = int(trained_length * factor)
    option_lines = _options_of_runtimes(case, scaling, stretched_length)
    lines += [f"{COMMAND_INDENT}{option_line}" for option_line in option_lines]
    return "\n".join([*lines, f"{advice_to_measure} {note_on_limit}"])


def _card_of(meaning: Meaning, length: int) -> ModelCard | None:
    """Return the card of a model's family that reaches a length; None without one."""
    for card in CARDS:
        max_length_of_card = LARGEST_STATED_RATIO * card.trained_length
        is_same_size = card.trained_length <= meaning.model.max_positions <= max_length_of_card
        if meaning.model.model_type in card.families and is_same_size:
            return card if length <= card.trained_length * card.factor else None
    return None


def _options_of_runtimes(
    case: Case, scaling: Mapping[str, Any], stretched_length: int
) -> Iterator[str]:
    """Yield the options with which each server computes a scaling, as its emulator confirms, and
    those of llama.cpp. stretched_length: tokens that it stretches to."""
    config = _with_scaling(case, scaling, stretched_length)
    try:
        meaning = meaning_of(config)
    except ValueError:
        return
    for server in SERVERS:
        if server not in case.named_runtimes:
            continue
        try:
            yield f"{server}: {override_options(case.source.config, meaning, server)}"
        except (UnknownFamilyError, ValueError):
            continue
    if "llama.cpp" in case.named_runtimes and case.computed["llama.cpp"].is_known:
        yield (
            f"llama.cpp: --rope-scaling yarn --rope-scale {scaling['factor']:g} "
            f"--yarn-orig-ctx {scaling[ORIGINAL_LENGTH_KEY]} -c {stretched_length}"
        )


def _with_scaling(case: Case, scaling: Mapping[str, Any], stretched_length: int) -> dict[str, Any]:
    """Return the config with a scaling beside the base that it has."""
    changed_keys = {"rope_scaling": dict(scaling), "max_position_embeddings": stretched_length}
    inner_key = language_model_key_after_loading(case.source.config)
    return intended_config(
        case.source.config, {inner_key: changed_keys} if inner_key else changed_keys
    )
