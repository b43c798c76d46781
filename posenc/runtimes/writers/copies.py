"""Copy a checkpoint's files to the folder that --fix writes, and list how two configs differ."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posenc.files.atomic import write_atomically
from posenc.files.opening import copy_file
from posenc.files.sealed_json import strict_json
from posenc.runtimes.files.json_object import LARGEST_INDEX, read_json
from posenc.runtimes.files.model_folder import TOKENIZER_FILES, path_inside

INDEX = "model.safetensors.index.json"
COPIED_FILES = frozenset((*TOKENIZER_FILES, "config.json", "adapter_config.json", INDEX))
"""Files copied next to the weights, which are safetensors: data, never code or pickles."""


def copy_files(source: Path, target: Path, leave: frozenset[str] = frozenset()) -> list[str]:
    """Copy a folder's weights, tokenizer and settings but those named; return the names of the
    files that stay behind, such as code and pickles.

    Raises: ValueError where a file is a link out of the folder, or the weights' index names a file
    that is elsewhere or missing.
    """
    check_index(source)
    behind = []
    for path in sorted(source.iterdir()):
        if path.suffix != ".safetensors" and path.name not in COPIED_FILES:
            behind += [path.name] if path.name != target.name else []
        elif path.name not in leave:
            # What was checked is copied: a link that comes in its place meanwhile is refused.
            checked = path_inside(source, path.name, "its listing").resolve()
            copy_file(checked, target / path.name, follow_links=False)
    return behind


def check_index(folder: Path) -> None:
    """Raise ValueError if the weights' index names a file that is not in this folder."""
    path = folder / INDEX
    if not path.exists():
        return
    path_inside(folder, INDEX, "its listing")
    names = read_json(path, LARGEST_INDEX).get("weight_map")
    if not isinstance(names, dict):
        raise ValueError(f"{path}: weight_map must be an object.")
    for name in sorted({str(v) for v in names.values()}):
        path_inside(folder, name, INDEX)


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a config.json as transformers does, lone surrogates, which UTF-8 lacks, as escapes.

    Raises: ValueError for NaN or an infinity, which JSON lacks.
    """
    text = strict_json(config, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, re.sub("[\ud800-\udfff]", lambda m: f"\\u{ord(m[0]):x}", text))


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
