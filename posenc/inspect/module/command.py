"""`posenc inspect package.module:Class`: measure and print."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from posenc.inspect.module.sheet import measure_module
from posenc.report.page.console import print_table, stdout
from posenc.report.page.progress import tell


def run(path: str, arguments: Sequence[str], call: str | None, as_json: bool) -> None:
    """Print the finding in a sentence, how the module is called, and a verdict for each check."""
    tell(f"measuring {path}")
    sheet = measure_module(path, arguments, call)
    tell("")
    if as_json:
        found = {
            "module": path,
            "called_as": sheet.called_as,
            "shows": sheet.shows,
            "length": sheet.length,
            "answer": sheet.answer,
            "checks": [dataclasses.asdict(verdict) for verdict in sheet.checks],
        }
        print(json.dumps(found, indent=1, allow_nan=False))
        return
    words = {True: "yes", False: "no", None: "–"}
    rows = [(verdict.check, words[verdict.holds], verdict.measured) for verdict in sheet.checks]
    console = stdout(140)
    console.print(sheet.answer, markup=False, highlight=False)
    title = f"{path}, called as {sheet.called_as}, {sheet.length:,} tokens"
    console.print(title, markup=False, highlight=False, style="dim")
    print_table(console, ("check", "holds", "measured"), rows)
