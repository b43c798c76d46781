"""`posenc inspect claims`: measure and print."""

from __future__ import annotations

import json

from posenc.inspect.claims.sheet import check
from posenc.report.page.console import print_table, stdout
from posenc.report.page.progress import tell
from posenc.report.page.visible import visible


def run(as_json: bool) -> None:
    """Print every claim with source, measurement and verdict."""
    groups = check(lambda claim: tell(f"measuring: {claim}"))
    tell("")
    found = [c for claims in groups.values() for c in claims]
    if as_json:
        print(visible(json.dumps([c._asdict() for c in found], indent=1, ensure_ascii=False)))
    else:
        rows = [(c.claim, c.verdict, c.measured, c.source) for c in found]
        header = ("claim", "verdict", "measured", "source")
        print_table(stdout(160), header, rows, show_lines=True)
