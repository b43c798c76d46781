"""Check users' encodings against the part of the contract that a comparison of losses requires."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from posenc.compare.plan.encodings import Compared
from posenc.encodings import create, entry, parse
from posenc.testing import CHECKS, VOIDING, maker, verdicts
from posenc.testing.harness import SHAPE

_CHECKS = {name: CHECKS[name] for name in VOIDING}


def find_void(compared: Sequence[Compared], allowed: bool) -> dict[str, str]:
    """Return the user's encodings that break the contract: a dict from spec text to the reason.

    posenc's own encodings are skipped, since the test suite checks them.

    Raises: ValueError at the first such encoding, unless `allowed`.
    """
    found = {}
    for each in compared:
        with contextlib.redirect_stdout(sys.stderr):  # its prints are no output of the command
            why = _why_void(each) if each.code else None
        if why is None:
            continue
        if not allowed:
            raise ValueError(
                f"{each.label}: {why}. Its losses would be meaningless. --unchecked compares it "
                "anyway, with a note in the report."
            )
        found[each.text] = why
    return found


def _why_void(compared: Compared) -> str | None:
    for part in dict.fromkeys(parse(compared.text).parts):
        if not part.attribute and not entry(part.where).origin:
            continue  # posenc's own
        try:
            create(str(part), SHAPE)
        except Exception as error:  # a user's constructor may raise anything
            text = " ".join(str(error).split())[:300].rstrip(".")
            return (
                f"it could not be checked, because it cannot be built for {SHAPE.num_heads} query "
                f"heads and {SHAPE.num_kv_heads} key/value heads of {SHAPE.head_dim}: {text}"
            )
        for verdict in verdicts(maker(str(part)), _CHECKS):
            why = (verdict.failure or "").rstrip(".")
            if verdict.raised:
                return f"{why} (in the check {verdict.check})"
            if why:
                return f"{VOIDING[verdict.check]} ({why})"
    return None
