"""Join names and clauses into sentences."""

from collections.abc import Sequence


def join_names(names: Sequence[str]) -> str:
    """Join names by commas, the last by "and".

    >>> join_names(["rope", "alibi", "t5"])
    'rope, alibi and t5'
    """
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def join_clauses(parts: Sequence[str]) -> str:
    """Join clauses into one sentence.

    >>> join_clauses(["nothing moves", "all hold"])
    'Nothing moves; all hold.'
    """
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."
