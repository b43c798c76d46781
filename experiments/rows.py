"""Rows of the leaderboard: made of a study, and added to a file of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from published_trials import PublishedTrial, read_rows

from posenc.compare.results import Study
from posenc.files.atomic import write_atomically
from posenc.files.opening import make_folder


def rows_of(study: Study, commit: str) -> list[PublishedTrial]:
    """Return a row for every finished trial of a study."""
    return [
        PublishedTrial(
            result.config.hash,
            commit,
            study.versions,
            study.hardware,
            study.corpus if study.corpus and result.config.corpus == study.corpus.hash else None,
            result,
        )
        for result in study.finished
    ]


def add_rows(path: Path, new: Iterable[PublishedTrial]) -> int:
    """Write rows of trials that the file does not have yet, in the order of their names.

    Returns: how many were new.
    Raises: ValueError for a trial that the file has with other numbers: published rows stay.
    """
    known = {row.result.config: row for row in read_rows(path)} if path.is_file() else {}
    count = len(known)
    for row in new:
        old = known.setdefault(row.result.config, row)
        if replace(old.result, timing=None) != replace(row.result, timing=None):
            raise ValueError(
                f"{path}: {row.result.config.name}-{row.hash} has other numbers there (of commit "
                f"{old.commit}) than those of commit {row.commit}. A change of numbers needs a new "
                "recipe number."
            )
    ordered = sorted(known.values(), key=lambda row: (row.result.config.name, row.hash))
    make_folder(path.parent)
    lines = [json.dumps(json.loads(row.to_json()), ensure_ascii=False) for row in ordered]
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    return len(known) - count
