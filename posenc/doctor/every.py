"""`--each`: judge any number of files, one by one; what hooks call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from posenc.dialects.files.json_object import read_json
from posenc.dialects.files.source import NoRotationError
from posenc.doctor import running

MODEL = ("model_type", "architectures", "n_heads")
"""A JSON object with one of these keys describes a model; other programs have a config.json too."""


def judge(options: running.Options) -> tuple[str, int]:
    """What to print of all files, and the gravest exit code."""
    pages, codes = [], [0]
    for path in options.paths:
        said, code = _one(path, options)
        pages.append(said)
        codes.append(code)
    return "\n\n".join(pages), max(codes)


def _one(path: Path, options: running.Options) -> tuple[str, int]:
    try:
        if path.suffix == ".json" and path.is_file() and not read_json(path).keys() & {*MODEL}:
            return f"{path}: passed over, it describes no model.", 0
        return running.run(replace(options, paths=(path,), each=False))
    except NoRotationError as nothing:
        return f"passed over: {nothing}", 0
    except (ValueError, OSError) as error:
        return f"{error}" if str(path) in str(error) else f"{path}: {error}", 2
