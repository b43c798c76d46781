"""Options of `posenc explore`, and the page that it writes; torch is never loaded."""

import json
import shlex
import sys
import webbrowser
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.command_line.options import option
from posenc.files.atomic import prepare_page, write_atomically
from posenc.report.escaping import show_hidden_characters

_DATA_ELEMENT = '<script type="application/json" id="given">null</script>'
"""The element of explore.html that holds a model's data; null without a model."""


def explore(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A model's folder, config.json or params.json to show in the page.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        option("Where to write the page.", shown="runs/explore.html, and open it", panel="Output"),
    ] = None,
) -> None:
    """Write a page on which you move position encodings: wavelengths, scores, masks, your config.

    It needs no network, and opens in a browser unless --out names a file.
    """
    page_path = out or Path("runs/explore.html")
    html = page_with_data(None if model is None else page_data_of(model))
    prepare_page(page_path, _DATA_ELEMENT[: _DATA_ELEMENT.index("null")])
    write_atomically(page_path, html)
    sys.stderr.write(f"{show_hidden_characters(str(page_path))}\n")
    if out is None and sys.stdout.isatty():
        webbrowser.open_new_tab(page_path.resolve().as_uri())


def page_data_of(path: Path) -> dict[str, Any]:
    """Return the data of a model that the page shows: its config as text, the doctor's findings,
    and what each runtime computes.

    Raises: ValueError for a file that is no config; OSError if it cannot be read.
    """
    from posenc.doctor.misreadings import Case
    from posenc.doctor.rules import findings
    from posenc.runtimes.files.source import load
    from posenc.runtimes.meaning import UnknownFamilyError

    source = load(path)
    if source.metadata is not None:
        raise ValueError(f"{path}: a GGUF file has no config.json; posenc doctor reads it.")
    case, case_findings, why_unjudged = Case(source), [], ""
    try:
        case.require_known()
        case_findings = findings(case)
        why_unjudged = "" if case_findings else case.why_unclear
    except UnknownFamilyError as unknown:
        why_unjudged = str(unknown)
    return {
        "text": json.dumps(source.config, indent=2, ensure_ascii=False),
        "path": shlex.quote(str(path)),
        "findings": [finding.as_json() for finding in case_findings],
        "unjudged": why_unjudged,
        "runtimes": {name: computed.as_json() for name, computed in case.computed.items()},
    }


def page_with_data(model_data: dict[str, Any] | None) -> str:
    """Return the HTML of the page with a model's data in it, as `page_data_of` returns them; None
    for a page without a model.

    The data are JSON in a script element that no browser executes.
    """
    html = resources.files("posenc.explore").joinpath("explore.html").read_text(encoding="utf-8")
    assert html.count(_DATA_ELEMENT) == 1
    # So that no </script> of a config ends the element.
    data_as_json = json.dumps(model_data).replace("<", "\\u003c")
    return html.replace(_DATA_ELEMENT, _DATA_ELEMENT.replace("null", data_as_json))
