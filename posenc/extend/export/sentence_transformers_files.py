"""Copy the modules after the encoder, which make a folder one of sentence-transformers."""

from pathlib import Path
from typing import Any

from posenc.files.atomic import write_atomically
from posenc.files.opening import copy_file, make_subfolder, read_file_text
from posenc.files.sealed_json import parse_bounded_json, strict_json
from posenc.runtimes.files.json_object import read_json
from posenc.runtimes.files.paths_inside import path_inside

MODULES_FILE = "modules.json"
LENGTH_FILE = "sentence_bert_config.json"
TOP_FILES = (MODULES_FILE, LENGTH_FILE, "config_sentence_transformers.json")
MODULE_FILES = ("config.json", "model.safetensors")
"""Files copied of a module after the encoder (pooling, dense layer, norm): data, never pickles
or code."""


def sentence_transformers_files(source: Path) -> list[tuple[str, Path]]:
    """Return the files that make a folder one of sentence-transformers, as (name inside the folder,
    path). Empty for another folder.

    Raises: ValueError for a modules.json that leads out of the folder.
    """
    if not (source / MODULES_FILE).is_file():
        return []
    files = [
        (name, path_inside(source, name, "sentence-transformers"))
        for name in TOP_FILES
        if (source / name).exists()
    ]
    for folder in _module_folders(source):
        for file in MODULE_FILES:
            if (source / folder / file).exists():
                files.append((f"{folder}/{file}", path_inside(source / folder, file, MODULES_FILE)))
    return files


def copy_sentence_transformers_files(source: Path, target: Path, new_length: int) -> list[str]:
    """Copy the files of sentence-transformers next to the weights, and raise their limit of tokens
    to `new_length`. Returns: the names of the folders of modules.

    Raises: ValueError for a modules.json that leads out of the folder.
    """
    files = sentence_transformers_files(source)
    if not files:
        return []
    folders = _module_folders(source)
    for name in folders:
        make_subfolder(target / name)
    for name, path in files:
        copy_file(path, target / name)
    raise_limit(target / LENGTH_FILE, "max_seq_length", new_length)
    return folders


def raise_limit(path: Path, key: str, new_length: int) -> None:
    """Raise the number at `key` of a JSON file to `new_length` tokens, if the file exists and has a
    lower one there."""
    settings = read_json(path) if path.exists() else {}
    limit = settings.get(key)
    if isinstance(limit, int | float) and limit < new_length:
        write_atomically(path, settings_text({**settings, key: new_length}, path.name))


def settings_text(content: dict[str, Any], name: str) -> str:
    """Return the text of a JSON file of settings. Raise ValueError, naming the file, for NaN or an
    infinity, which strict readers refuse."""
    try:
        return strict_json(content, indent=2) + "\n"
    except ValueError as error:
        raise ValueError(f"{name}: {error}. Give a number there, or delete the key.") from error


def _module_folders(source: Path) -> list[str]:
    """Return the names of the folders that modules.json lists and that exist next to it. Raises:
    ValueError for a path that leads elsewhere."""
    path = path_inside(source, MODULES_FILE, "sentence-transformers")
    try:
        listed = parse_bounded_json(read_file_text(path))
        names = [module["path"] for module in listed]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: expected a list of modules with a path each.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or name == "..":
            raise ValueError(f"{path}: {name!r} is not a folder next to it.")
    return [name for name in names if name and (source / name).is_dir()]
