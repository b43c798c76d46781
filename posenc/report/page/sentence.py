"""Names and parts put into one sentence."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str]) -> str:
    """The names with commas, and the last with "and".

    >>> listed(["rope", "alibi", "t5"])
    'rope, alibi and t5'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def sentence(parts: Sequence[str]) -> str:
    """The parts in one sentence.

    >>> sentence(["nothing moves", "all hold"])
    'Nothing moves; all hold.'
    """
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."
