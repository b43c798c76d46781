"""Select the files of a model's folder to read, and refuse unsafe ones without reading them.

A folder is not trusted. Its code never runs, its pickles are never read, and nothing in it can make
posenc open a file outside.
"""

from pathlib import Path
from typing import Any

from posenc.files.opening import open_ordinary
from posenc.runtimes.files.json_object import MOST_BYTES_OF_INDEX, read_json
from posenc.runtimes.files.model_folder import TOKENIZER_FILES, path_inside

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
KEYS_OF_OTHER_FILES = ("transformers_weights", "configuration_files")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the folder's config.json. Raise ValueError if there is none."""
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(f"{folder}: no such folder.")
    if not folder.is_dir():
        raise ValueError(f"{folder}: not a folder.")
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: not a model folder, it has no config.json.")
    path = path_inside(folder, "config.json", "the folder")
    config = read_json(path)
    with open_ordinary(path) as file:
        if file.read(3) == BYTE_ORDER_MARK:
            raise ValueError(
                f"{path}: it begins with a byte order mark, at which transformers stops; save it "
                "as UTF-8 without one."
            )
    return config


def refuse_unsafe_folder(folder: Path, raw_config: dict[str, Any], known_types: Any) -> None:
    """Raise ValueError if loading the model would run code from its folder, or read anything but
    its config and checked weights: other files, code to fetch, distributed parts, an adapter.

    known_types: names of the model types that transformers has code for.
    """
    model_type = raw_config.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(
            f"{folder / 'config.json'}: model_type must be a name, got {model_type!r}."
        )
    if raw_config.get("auto_map") and model_type not in known_types:
        raise ValueError(
            f"{folder}: model type {model_type!r} needs code from the folder, which is never run."
        )
    for key, value in nested_items(raw_config):
        _refuse_outside_files(folder / "config.json", key, value)
    for shard in sorted(folder.glob("shard-*.safetensors")):  # preferred to model.safetensors
        raise ValueError(
            f"{folder}: {shard.name} is a part of a distributed checkpoint, which is not read. "
            "Save the model in one process, or remove the part."
        )
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder}: it has an adapter_config.json. Merge the adapter into the weights first."
        )


def _refuse_outside_files(path: Path, key: str, value: Any) -> None:
    """Raise ValueError for a key of a config that names other files, or code to fetch."""
    if key in KEYS_OF_OTHER_FILES:
        raise ValueError(
            f"{path}: {key} makes transformers read other files than "
            "config.json and the weights that are checked. Delete the key."
        )
    names_code = key.strip("_").endswith("_implementation")
    if names_code and isinstance(value, str) and "/" in value:  # owner/repository
        raise ValueError(
            f"{path}: {key} names the code {value!r}, which is never fetched. Delete the key."
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads. Raise ValueError if there are none, or
    if the index names a file outside of the folder."""
    if (folder / WEIGHTS_FILE).exists():
        return [path_inside(folder, WEIGHTS_FILE, "the weights")]
    if (folder / INDEX_FILE).exists():
        return _indexed_files(folder)
    pickle_names = sorted(p.name for pattern in PICKLE_PATTERNS for p in folder.glob(pattern))
    found_in_words = f"only {', '.join(pickle_names)}" if pickle_names else "none"
    raise ValueError(
        f"{folder}: weights must be safetensors, found {found_in_words}. "
        "Convert them with the code that made them; pickle files can run code and are never read."
    )


def _indexed_files(folder: Path) -> list[Path]:
    """Return the files among which an index divides the weights, each once."""
    file_of_weight = read_json(
        path_inside(folder, INDEX_FILE, "the index"), MOST_BYTES_OF_INDEX
    ).get("weight_map")
    if not isinstance(file_of_weight, dict) or not all(
        isinstance(name, str) for name in file_of_weight.values()
    ):
        raise ValueError(f"{folder / INDEX_FILE}: weight_map must give a file for every weight.")
    return [path_inside(folder, name, INDEX_FILE) for name in sorted(set(file_of_weight.values()))]


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the paths of the tokenizer's files in a folder. Raise ValueError for a link out of the
    folder, or a tokenizer that needs code."""
    files = [
        path_inside(folder, n, "its tokenizer") for n in TOKENIZER_FILES if (folder / n).exists()
    ]
    for name in ("tokenizer_config.json", "config.json"):
        path = folder / name
        auto_map = (
            read_json(path_inside(folder, name, "it")).get("auto_map") if path.exists() else None
        )
        if auto_map and (name != "config.json" or "AutoTokenizer" in auto_map):
            raise ValueError(
                f"{path}: auto_map asks for code from the folder for its tokenizer, which is never "
                "run. Delete auto_map to use tokenizer.json as it is, or give --bytes or --ids and "
                "remove the tokenizer."
            )
    return files


def pooling_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings with which sentence-transformers makes one vector of a text from those of
    its tokens; None for another folder. Raise ValueError for a link out of the folder."""
    for pooling_folder in sorted(folder.glob("*_Pooling")):
        if (pooling_folder / "config.json").exists():
            return read_json(path_inside(pooling_folder, "config.json", "sentence-transformers"))
    return None


def nested_items(content: Any) -> list[tuple[str, Any]]:
    """Return all keys and values of a JSON object and of the objects inside it."""
    if isinstance(content, list):
        return [pair for item in content for pair in nested_items(item)]
    if not isinstance(content, dict):
        return []
    return [*content.items(), *(pair for value in content.values() for pair in nested_items(value))]
