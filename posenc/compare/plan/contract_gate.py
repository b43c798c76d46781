"""Encodings of the user are held to the part of the contract without which a comparison of losses
means nothing."""

from __future__ import annotations

from collections.abc import Sequence

from posenc.compare.plan.encodings import Compared
from posenc.encodings.registry import create, entry, parse
from posenc.testing import CHECKS, VOIDING, maker, verdicts
from posenc.testing.harness import SHAPE

_CHECKS = {name: CHECKS[name] for name in VOIDING}


def find_void(compared: Sequence[Compared], allowed: bool) -> dict[str, str]:
    """Why a comparison with an encoding would mean nothing, by its text. posenc's own are held to
    the contract by its tests.

    Raises: ValueError for the first one, unless `allowed`.
    """
    found = {}
    for each in compared:
        why = _why_void(each) if each.code else None
        if why is None:
            continue
        if not allowed:
            raise ValueError(
                f"{each.label}: {why}. Losses of it would mean nothing; --unchecked compares it "
                "all the same, and the report says so."
            )
        found[each.text] = why
    return found


def _why_void(compared: Compared) -> str | None:
    for part in dict.fromkeys(parse(compared.text).parts):
        if not part.attribute and not entry(part.where).origin:
            continue  # posenc's own
        try:
            create(str(part), SHAPE)
        except Exception as error:  # of somebody's constructor
            text = " ".join(str(error).split())[:300].rstrip(".")
            return (
                f"it could not be checked, because it cannot be built for {SHAPE.num_heads} heads "
                f"of {SHAPE.head_dim} with {SHAPE.num_kv_heads} for keys: {text}"
            )
        for verdict in verdicts(maker(str(part)), _CHECKS):
            if verdict.failure is not None:
                return f"{VOIDING[verdict.check]} ({verdict.failure.rstrip('.')})"
    return None
