"""Decide which files belong to a folder."""

from pathlib import Path

from posenc.files.opening import NOT_ORDINARY_MESSAGE

TOKENIZER_FILES = tuple(
    "tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json "
    "added_tokens.json vocab.json vocab.txt vocab.bpe merges.txt spiece.model "
    "sentencepiece.bpe.model spm.model tekken.json chat_template.jinja chat_template.json "
    "generation_config.json".split()
)
"""Files copied next to exported weights: data, never code."""


def path_inside(folder: Path, name: str, asked: str) -> Path:
    """Return the path of an ordinary file that is in the folder itself.

    Links of the Hub's cache from a snapshot to its blobs count as inside.

    asked: what names the file, for the message.
    Raises: ValueError where the file is elsewhere or not there.
    """
    path = folder / name
    if Path(name).name != name or "\\" in name:
        raise ValueError(f"{folder}: {asked} names {name!r}, which is not a file of the folder.")
    if not path.exists():
        raise ValueError(f"{folder}: {asked} names {name}, which is not there.")
    home, target = folder.resolve(), path.resolve()
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    if target.parent not in (home, blobs):
        raise ValueError(f"{path}: a link to {target}, outside of the folder, is not followed.")
    if not path.is_file():
        raise ValueError(f"{path}: {NOT_ORDINARY_MESSAGE}")
    return path


def paths_inside(folder: Path, pattern: str) -> list[Path]:
    """Return the files of the folder whose names match the pattern, in order.

    Raises: ValueError as `path_inside` does, also for a folder of a matching name.
    """
    return [path_inside(folder, path.name, "its listing") for path in sorted(folder.glob(pattern))]
