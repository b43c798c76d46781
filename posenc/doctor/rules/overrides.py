"""Command-line overrides of a config that a server does not read, or that lose the base."""

from collections.abc import Iterator, Mapping
from typing import Any

from posenc.doctor.misreadings import Case
from posenc.doctor.rule import Hit, rule
from posenc.report.report import join_names
from posenc.runtimes.config_model import (
    OUTSIDE,
    language_model_key_after_loading,
)
from posenc.runtimes.families import SERVERS
from posenc.runtimes.writers.overrides import MERGES

OVERRIDES = "hf_overrides"
"""The key for command-line overrides next to a config's own keys."""


@rule("PD032", "E")
def report_ineffective_override(case: Case) -> Iterator[Hit]:
    """Report an override that a server does not read, or that loses the base."""
    overrides = case.source.raw.get(OVERRIDES)
    if not isinstance(overrides, dict):
        return
    key = language_model_key_after_loading(case.source.config)
    if key:
        yield from _report_overrides_at_top_level(case, overrides, key)
    of_the_model = overrides.get(key, {}) if key else overrides
    if not isinstance(of_the_model, dict):
        return
    yield from _report_lost_bases(case, of_the_model, "inside" if key else "top")
    if "rope_theta" in of_the_model:
        yield Hit(
            f"the override rope_theta {of_the_model['rope_theta']!r} has no effect: "
            "rope_parameters holds the base",
            case.named_and_known(SERVERS),
            SERVERS,
        )


def _report_overrides_at_top_level(
    case: Case, overrides: Mapping[str, Any], key: str
) -> Iterator[Hit]:
    """Report overrides at the top level of a family that reads them under a key."""
    unread = [name for name in overrides if name in OUTSIDE]
    if not unread:
        return
    is_one = len(unread) == 1
    yield Hit(
        f"the override of {join_names(unread)} {'stands' if is_one else 'stand'} at the top level, "
        f"where no server looks for {'it' if is_one else 'them'}: "
        f"{case.source.config['model_type']} reads its {key}",
        case.named_and_known(SERVERS),
        SERVERS,
        cure=f'Write {{"{key}": {{"{unread[0]}": ...}}}}; `posenc doctor --overrides vllm` '
        "prints the whole.",
    )


def _report_lost_bases(case: Case, overrides: Mapping[str, Any], place: str) -> Iterator[Hit]:
    """Report a rope dict without a base where a server puts it in the place of the file's. place:
    as in MERGES."""
    for name in ("rope_parameters", "rope_scaling"):
        rope_dict = overrides.get(name)
        if not isinstance(rope_dict, dict) or _has_every_base(rope_dict):
            continue
        for server in SERVERS:
            if (server, place) not in MERGES:
                message = (
                    f"the override of {name} has no rope_theta, and {server} replaces the dict"
                )
                yield Hit(message, case.named_and_known((server,)), (server,))


def _has_every_base(rope_dict: Mapping[str, Any]) -> bool:
    """Return True if a flat rope dict has a base, or each of the dicts in it has one."""
    by_kind = [value for value in rope_dict.values() if isinstance(value, dict)]
    return all(p.get("rope_theta") is not None for p in by_kind or [rope_dict])
