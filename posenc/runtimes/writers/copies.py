"""Copy a checkpoint's files to the folder that --fix writes, and list how two configs differ."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posenc.files.atomic import write_atomically
from posenc.files.opening import copy_file
from posenc.files.sealed_json import strict_json
from posenc.runtimes.files.json_object import MOST_BYTES_OF_INDEX, read_json
from posenc.runtimes.files.model_folder import TOKENIZER_FILES, path_inside

INDEX_FILE = "model.safetensors.index.json"
COPIED_FILES = frozenset((*TOKENIZER_FILES, "config.json", "adapter_config.json", INDEX_FILE))
"""Files copied next to the weights, which are safetensors: data, never code or pickles."""


def copy_files(
    source: Path, target: Path, names_to_leave: frozenset[str] = frozenset()
) -> list[str]:
    """Copy a folder's weights, tokenizer and settings but those named; return the names of the
    files that stay behind, such as code and pickles.

    Raises: ValueError where a file is a link out of the folder, or the weights' index names a file
    that is elsewhere or missing.
    """
    check_index(source)
    names_left_behind = []
    for path in sorted(source.iterdir()):
        if path.suffix != ".safetensors" and path.name not in COPIED_FILES:
            names_left_behind += [path.name] if path.name != target.name else []
        elif path.name not in names_to_leave:
            # What was checked is copied: a link that comes in its place meanwhile is refused.
            checked_path = path_inside(source, path.name, "its listing").resolve()
            copy_file(checked_path, target / path.name, follow_links=False)
    return names_left_behind


def check_index(folder: Path) -> None:
    """Raise ValueError if the weights' index names a file that is not in this folder."""
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        return
    path_inside(folder, INDEX_FILE, "its listing")
    file_by_tensor = read_json(index_path, MOST_BYTES_OF_INDEX).get("weight_map")
    if not isinstance(file_by_tensor, dict):
        raise ValueError(f"{index_path}: weight_map must be an object.")
    for file_name in sorted({str(v) for v in file_by_tensor.values()}):
        path_inside(folder, file_name, INDEX_FILE)


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a config.json as transformers does, lone surrogates, which UTF-8 lacks, as escapes.

    Raises: ValueError for NaN or an infinity, which JSON lacks.
    """
    text = strict_json(config, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, re.sub("[\ud800-\udfff]", lambda m: f"\\u{ord(m[0]):x}", text))


MOST_LETTERS = 160
"""Letters of a value that are printed; chosen, not derived."""


def config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return one line per key that is new (+), gone (-) or changed (old -> new), with its path in
    text_config."""
    lines = []
    for key in sorted(before.keys() | after.keys()):
        value_before, value_after = before.get(key), after.get(key)
        if (
            key == "text_config"
            and isinstance(value_before, dict)
            and isinstance(value_after, dict)
        ):
            lines += [
                f"{line[:2]}{key}.{line[2:]}" for line in config_changes(value_before, value_after)
            ]
            continue
        words_before, words_after = _shortened_json(value_before), _shortened_json(value_after)
        if key not in after:
            lines.append(f"- {key}: {words_before}")
        elif key not in before:
            lines.append(f"+ {key}: {words_after}")
        elif before[key] != after[key]:
            lines.append(f"  {key}: {words_before} -> {words_after}")
    return lines


def _shortened_json(value: Any) -> str:
    """Return a value as JSON, cut with "..." where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 3]}..."
