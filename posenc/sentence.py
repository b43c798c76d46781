"""Join names and clauses into sentences."""

from collections.abc import Sequence


def listed(names: Sequence[str]) -> str:
    """Join names by commas, the last by "and".

    >>> listed(["rope", "alibi", "t5"])
    'rope, alibi and t5'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def sentence(parts: Sequence[str]) -> str:
    """Join clauses into one sentence.

    >>> sentence(["nothing moves", "all hold"])
    'Nothing moves; all hold.'
    """
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."
