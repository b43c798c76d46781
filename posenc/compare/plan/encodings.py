"""Read, name and build the encodings of a comparison, and hash their code."""

from collections.abc import Sequence
from dataclasses import dataclass

from posenc.command_line.errors import one_line
from posenc.encodings import (
    ModelShape,
    PositionEncoding,
    create,
    hash_of_posenc_code,
    hash_of_user_code,
    line_in_user_code,
    names,
    parse,
    with_importable_classes,
    with_relative_paths,
)


@dataclass(frozen=True)
class ComparedEncoding:
    """An encoding that is compared, as the user named it.

    text: argument for `posenc.create` in any process started in the same folder.
    label: name shown to the user.
    code: hash of files outside posenc; "" if there are none.
    source: hash of posenc's own files.
    """

    text: str
    label: str
    code: str
    source: str = ""


def read_encodings(texts: Sequence[str]) -> tuple[ComparedEncoding, ...]:
    """Return the encodings that the texts name, in the order given. Files are imported; nothing is
    built.

    Raises: ValueError for a text that names no encoding, for two encodings of one label, and for
    an encoding that is named twice, with one label or with two.
    """
    encodings = tuple(map(read_encoding, texts))
    for i, later in enumerate(encodings):
        for earlier in encodings[:i]:
            if later == earlier:
                raise ValueError(f"{later.label!r} is named twice: leave one out.")
            if later.label == earlier.label:
                raise ValueError(
                    f"{later.label!r} names two encodings, {earlier.text} and {later.text}: give "
                    f"one of them another label, as in {later.label}-2={later.text}."
                )
            if later.text == earlier.text:
                raise ValueError(
                    f"{earlier.label!r} and {later.label!r} are the same encoding, {later.text}: "
                    "leave one out."
                )
    return encodings


def read_encoding(text: str) -> ComparedEncoding:
    """Return the encoding that a text names, such as `rope`, `yarn:factor=8` or
    `mine=./my.py:Mine`.

    Raises: ValueError for a text that names no encoding, or whose label is the name of another.
    """
    spec = parse(text)
    code = hash_of_user_code(text)
    text_anywhere = str(with_importable_classes(spec))
    tidied = str(with_relative_paths(spec))
    if spec.label in names() and spec.label != tidied:
        raise ValueError(
            f"{spec.label!r} is the name of an encoding, and {tidied} is another one: use another "
            f"label, as in my-{spec.label}={tidied}."
        )
    return ComparedEncoding(text_anywhere, spec.label or tidied, code, hash_of_posenc_code(text))


def build_encoding(text: str, shape: ModelShape) -> PositionEncoding:
    """Build an encoding of a comparison, as `posenc.create`.

    Raises: ValueError for an error in the user's own code, with the class and the line.
    """
    try:
        return create(text, shape)
    except Exception as error:  # a user's constructor may raise anything
        if at := line_in_user_code(error):
            raise ValueError(f"{text} cannot be built, at {at}: {one_line(error)}") from error
        raise
