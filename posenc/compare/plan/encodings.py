"""Read and name the encodings of a comparison, and hash their code."""

from collections.abc import Sequence
from dataclasses import dataclass

from posenc.encodings import (
    hash_of_posenc_code,
    hash_of_user_code,
    names,
    parse,
    with_importable_classes,
    with_relative_paths,
)


@dataclass(frozen=True)
class Compared:
    """One row of a comparison.

    text: argument for `posenc.create` in any process started in the same folder.
    label: name shown to the user.
    code: hash of files outside posenc; "" if there are none.
    source: hash of posenc's own files.
    """

    text: str
    label: str
    code: str
    source: str = ""


def read_encodings(texts: Sequence[str]) -> tuple[Compared, ...]:
    """Read each encoding once, in the order given. Files are imported; nothing is built.

    Raises: ValueError for a text that names no encoding, and for two equal ones.
    """
    encodings = tuple(dict.fromkeys(map(read_encoding, texts)))
    for i, one in enumerate(encodings):
        for other in encodings[:i]:
            if one.label == other.label:
                raise ValueError(
                    f"{one.label!r} names two encodings, {other.text} and {one.text}: give one of "
                    f"them another label, as in {one.label}-2={one.text}."
                )
            if one.text == other.text:
                raise ValueError(
                    f"{other.label!r} and {one.label!r} are the same encoding, {one.text}: leave "
                    "one out."
                )
    return encodings


def read_encoding(text: str) -> Compared:
    """Read one text."""
    spec = parse(text)
    code = hash_of_user_code(text)
    text_anywhere = str(with_importable_classes(spec))
    tidied = str(with_relative_paths(spec))
    if spec.label in names() and spec.label != tidied:
        raise ValueError(
            f"{spec.label!r} is the name of an encoding, and {tidied} is another one: use another "
            f"label, as in my-{spec.label}={tidied}."
        )
    return Compared(text_anywhere, spec.label or tidied, code, hash_of_posenc_code(text))
