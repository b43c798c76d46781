"""List the differences of two configs."""

import json
from collections.abc import Mapping
from typing import Any

LONGEST = 160
"""Letters of a value that are printed; chosen, not derived."""


def config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return one line per key that is new (+), gone (-) or changed (old -> new), with its path in
    text_config."""
    lines = []
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key), after.get(key)
        if key == "text_config" and isinstance(was, dict) and isinstance(now, dict):
            lines += [f"{line[:2]}{key}.{line[2:]}" for line in config_changes(was, now)]
            continue
        old, new = _shortened_json(was), _shortened_json(now)
        if key not in after:
            lines.append(f"- {key}: {old}")
        elif key not in before:
            lines.append(f"+ {key}: {new}")
        elif before[key] != after[key]:
            lines.append(f"  {key}: {old} -> {new}")
    return lines


def _shortened_json(value: Any) -> str:
    """Return a value as JSON, cut with "..." where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
