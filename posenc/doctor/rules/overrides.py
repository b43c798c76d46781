"""Command-line overrides of a config that a server does not read, or that lose the base."""

from collections.abc import Iterator, Mapping
from typing import Any

from posenc.doctor.misreadings import Case
from posenc.doctor.rule import Hit, rule
from posenc.report.report import join_names
from posenc.runtimes.config_model import (
    KEYS_OF_LANGUAGE_MODEL,
    language_model_key_after_loading,
)
from posenc.runtimes.families import SERVERS
from posenc.runtimes.writers.overrides import MERGING_PLACES

OVERRIDES_KEY = "hf_overrides"
"""The key for command-line overrides next to a config's own keys."""


@rule("PD032", "E")
def report_ineffective_override(case: Case) -> Iterator[Hit]:
    """Report an override that a server does not read, or that loses the base."""
    overrides = case.source.raw.get(OVERRIDES_KEY)
    if not isinstance(overrides, dict):
        return
    key_of_language_model = language_model_key_after_loading(case.source.config)
    if key_of_language_model:
        yield from _report_overrides_at_top_level(case, overrides, key_of_language_model)
    model_overrides = (
        overrides.get(key_of_language_model, {}) if key_of_language_model else overrides
    )
    if not isinstance(model_overrides, dict):
        return
    yield from _report_lost_bases(
        case, model_overrides, "inside" if key_of_language_model else "top"
    )
    if "rope_theta" in model_overrides:
        yield Hit(
            f"the override rope_theta {model_overrides['rope_theta']!r} has no effect: "
            "rope_parameters holds the base",
            concerned=case.named_and_known(SERVERS),
            affected=SERVERS,
        )


def _report_overrides_at_top_level(
    case: Case, overrides: Mapping[str, Any], key_of_language_model: str
) -> Iterator[Hit]:
    """Report overrides at the top level of a family that reads them under a key."""
    unread_names = [name for name in overrides if name in KEYS_OF_LANGUAGE_MODEL]
    if not unread_names:
        return
    is_only_one = len(unread_names) == 1
    yield Hit(
        f"the override of {join_names(unread_names)} "
        f"{'stands' if is_only_one else 'stand'} at the top level, where no server looks for "
        f"{'it' if is_only_one else 'them'}: "
        f"{case.source.config['model_type']} reads its {key_of_language_model}",
        concerned=case.named_and_known(SERVERS),
        affected=SERVERS,
        cure=f'Write {{"{key_of_language_model}": {{"{unread_names[0]}": ...}}}}; '
        "`posenc doctor --overrides vllm` prints the whole.",
    )


def _report_lost_bases(
    case: Case, overrides: Mapping[str, Any], place_in_config: str
) -> Iterator[Hit]:
    """Report a rope dict without a base where a server puts it in the place of the file's.
    place_in_config: as in MERGING_PLACES."""
    for name in ("rope_parameters", "rope_scaling"):
        rope_dict = overrides.get(name)
        if not isinstance(rope_dict, dict) or _has_every_base(rope_dict):
            continue
        for server in SERVERS:
            if (server, place_in_config) not in MERGING_PLACES:
                message = (
                    f"the override of {name} has no rope_theta, and {server} replaces the dict"
                )
                yield Hit(message, concerned=case.named_and_known((server,)), affected=(server,))


def _has_every_base(rope_dict: Mapping[str, Any]) -> bool:
    """Return True if a flat rope dict has a base, or each of the dicts in it has one."""
    nested_dicts = [value for value in rope_dict.values() if isinstance(value, dict)]
    return all(flat_dict.get("rope_theta") is not None for flat_dict in nested_dicts or [rope_dict])
