"""The words for what a study counts. Sentences are written for a text of bytes; here they become
those of a text of tokens."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from posenc.compare.judging.standing import MARGIN
from posenc.compare.results import Study

_BYTES_PATTERN = re.compile(r"(?<!per )\b(b|B)yte(s?)\b")
"""Bytes and single bytes, but for those of a loss: "bits per byte"."""


class Units(NamedTuple):
    """The units of a text: of lengths, "bytes" or "tokens", and of what a loss is for, "byte" or
    "token"."""

    length: str = "bytes"
    loss: str = "byte"

    def write(self, sentence: str, names: Iterable[str] = ()) -> str:
        """Return a sentence about bytes as one about these units. Losses of tokens stay in bits per
        byte where the bytes of tokens are known.

        names: of encodings, which stay as they are.

        >>> Units("tokens", "byte").write("2.10 bits per byte on the last 64 bytes")
        '2.10 bits per byte on the last 64 tokens'
        >>> Units("tokens", "token").write("Use my bytes: 2.10 bits at 64 bytes.", ["my bytes"])
        'Use my bytes: 2.10 bits at 64 tokens.'
        """
        kept_names = [re.escape(name) for name in names if _BYTES_PATTERN.search(name)]
        if kept_names:
            between_and_names = re.split(rf"(?<!\w)({'|'.join(kept_names)})(?!\w)", sentence)
            # Every second piece is a name.
            between_and_names[::2] = [self.write(piece) for piece in between_and_names[::2]]
            return "".join(between_and_names)
        if self.length == "tokens":
            sentence = _BYTES_PATTERN.sub(
                lambda match: f"{'T' if match[1] == 'B' else 't'}oken{match[2]}", sentence
            )
        return sentence.replace("per byte", f"per {self.loss}")

    @property
    def bits(self) -> str:
        """Return the unit of losses: "bits per byte" or "bits per token"."""
        return f"bits per {self.loss}"


UNITS_OF_BYTES = Units()
"""The units of a text of bytes."""


def units_of(study: Study) -> Units:
    """Return the units of a study's text; those of bytes if it has none."""
    for trial in study.trials:
        if trial.is_on_text:
            return Units(trial.length_unit, trial.loss_unit)
    return Units()


def sentence_on_units(loss_unit: str) -> str:
    """Return by which margin and spread losses that are not per byte are judged; "" for those that
    are. loss_unit: "bits per byte", or another in words."""
    if loss_unit == "bits per byte":
        return ""
    return (
        f"Losses are per token; that {MARGIN} bits do not matter, and how far seeds are expected "
        "to spread, was chosen for bits per byte."
    )
