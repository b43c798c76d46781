"""A text longer than the file is meant for: what happens, and which scaling to serve with."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from posenc.doctor.case import ALL, Case
from posenc.doctor.rule import COMMAND, Hit, rule
from posenc.runtimes.config_model import ORIGINAL_LENGTH, language_model_key_after_loading
from posenc.runtimes.meaning import Meaning, UnknownFamilyError, meaning_of
from posenc.runtimes.writers.overrides import SERVERS, intended, override_options


class Card(NamedTuple):
    """The scaling that the published card of a family names for longer texts.

    families: their model_types. trained: the length before stretching, in tokens. factor: of yarn.
    """

    families: tuple[str, ...]
    trained: int
    factor: float
    name: str


CARDS = (
    Card(("qwen2", "qwen2_moe"), 32768, 4.0, "Qwen2.5"),
    Card(("qwen3", "qwen3_moe"), 32768, 4.0, "Qwen3"),
    Card(("qwen3_vl_text", "qwen3_vl_moe_text"), 262144, 3.0, "Qwen3-VL"),
    Card(("smollm3",), 65536, 2.0, "SmolLM3"),
    Card(("qwen3_5_text", "qwen3_5_moe_text"), 262144, 4.0, "Qwen3.5"),
)
"""As the models' cards on the Hugging Face Hub say: yarn, which the files leave out."""
NEAR = 1.5
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
    longest = meaning.model.max_positions
    stretched = max(longest, *(_reach(p) for p in meaning.parameters.values()))
    if case.length <= stretched:
        return
    yield Hit(
        f"{case.length} tokens are asked for, and the file is meant for {stretched}: beyond them "
        "the text repeats itself or falls apart, whatever a server admits",
        case.judged_runtimes,
        ALL,
        cure=_cure(case, meaning, case.length),
    )


def _reach(p: Mapping[str, Any]) -> int:
    """Return the length to which a yarn stretches, in tokens; 0 for other types."""
    factor, original = p.get("factor"), p.get(ORIGINAL_LENGTH)
    is_yarn = p["rope_type"] == "yarn"
    if not is_yarn or not isinstance(factor, int | float) or not isinstance(original, int):
        return 0
    return int(factor * original)


def _cure(case: Case, meaning: Meaning, length: int) -> str:
    """Return what to do: the scaling of the model's card, with the lines for each server, else
    yarn as a first try. length: tokens that are to be served."""
    measure = f"`posenc extend MODEL --to {length}` measures what a scaling costs on short texts."
    lifts_limit = (
        "The variables with which vLLM and SGLang admit a longer text lift the limit only: no "
        "angle changes."
    )
    p = meaning.parameters.get("all")
    if p is None or p["rope_type"] != "default" or meaning.model.is_mla:
        return f"Serve at most what the file is meant for, or stretch it. {measure} {lifts_limit}"
    card = _card_of(meaning, length)
    if card is not None:
        trained, factor = card.trained, card.factor
        whose = f"Serve with the scaling of {card.name}'s card:"
    else:
        trained = meaning.trained_length
        factor = float(2 ** math.ceil(math.log2(length / trained)))
        whose = "posenc knows no card for this model. A first try, which nobody has tuned:"
    scaling = {"rope_type": "yarn", "factor": factor, ORIGINAL_LENGTH: trained}
    name = "rope_scaling" if case.rope_parameters is None else "rope_parameters"
    own = case.rope_parameters or case.rope_scaling or {}
    written = {**{key: value for key, value in own.items() if key != "type"}, **scaling}
    lines = [f'{whose} write "{name}": {json.dumps(written)}. As options:']
    lines += [f"{COMMAND}{line}" for line in _options(case, scaling, int(trained * factor))]
    return "\n".join([*lines, f"{measure} {lifts_limit}"])


def _card_of(meaning: Meaning, length: int) -> Card | None:
    """Return the card of a model's family that reaches a length; None without one."""
    for card in CARDS:
        is_same_size = card.trained <= meaning.model.max_positions <= NEAR * card.trained
        if meaning.model.model_type in card.families and is_same_size:
            return card if length <= card.trained * card.factor else None
    return None


def _options(case: Case, scaling: Mapping[str, Any], reach: int) -> Iterator[str]:
    """Yield the options with which each server computes a scaling, as its emulator confirms, and
    those of llama.cpp. reach: tokens that it stretches to."""
    config = _with_scaling(case, scaling, reach)
    try:
        meaning = meaning_of(config)
    except ValueError:
        return
    for server in SERVERS:
        if server not in case.named:
            continue
        try:
            yield f"{server}: {override_options(case.source.config, meaning, server)}"
        except (UnknownFamilyError, ValueError):
            continue
    if "llama.cpp" in case.named and case.computed["llama.cpp"].is_known:
        yield (
            f"llama.cpp: --rope-scaling yarn --rope-scale {scaling['factor']:g} "
            f"--yarn-orig-ctx {scaling[ORIGINAL_LENGTH]} -c {reach}"
        )


def _with_scaling(case: Case, scaling: Mapping[str, Any], reach: int) -> dict[str, Any]:
    """Return the config with a scaling beside the base that it has."""
    own = {"rope_scaling": dict(scaling), "max_position_embeddings": reach}
    key = language_model_key_after_loading(case.source.config)
    return intended(case.source.config, {key: own} if key else own)
