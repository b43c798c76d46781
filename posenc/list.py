"""List every encoding with its place, parameters, claims and source: `posenc list`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posenc.command_line.options import option
from posenc.report.escaping import show_hidden_characters
from posenc.report.report import SCHEMA

if TYPE_CHECKING:
    from posenc.encodings.registry import Entry

KERAS_LAYERS = {
    "Sinusoidal": "SinusoidalPositionEncoding",
    "Learned": "LearnedPositionEmbedding",
    "RoPE": "RotaryEmbedding",
    "ALiBi": "ALiBi",
    "T5Bias": "T5RelativeBias",
    "Kerple": "KerpleBias",
    "Shaw": "ShawAttention",
}
"""Class name of the layer in posenc.keras that computes the same as an encoding, by the encoding's
class name."""
STORED_ROWS_FILE = Path(__file__).with_suffix(".json")
"""File with the listed facts of posenc's own encodings, so that the command loads no torch."""


def complete_name(incomplete: str) -> list[str]:
    """Return the names of registered encodings that begin with `incomplete`, for the shell's
    completion."""
    from posenc.encodings import names

    return [name for name in names() if name.startswith(incomplete)]


def list_encodings(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names, module:Class or file.py:Class, with options; see docs/grammar.md.",
            show_default="every name",
            autocompletion=complete_name,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        option("Print an object in JSON, with one for each encoding.", "--json", panel="Output"),
    ] = False,
) -> None:
    """List every encoding: place, parameters, claims, source, and how it is checked.

    Parameters are counted for a model of width 512 with 8 heads and training length 2048.
    """
    from posenc.encodings import lines_on_unusable_names

    stored_rows = [] if names else json.loads(STORED_ROWS_FILE.read_text(encoding="utf-8"))
    rows, error_lines = build_rows(names, stored_rows)
    for line in error_lines if names else (*lines_on_unusable_names(), *error_lines):
        sys.stderr.write(f"posenc: {show_hidden_characters(line)}\n")
    if as_json:
        content = {"schema": SCHEMA, "encodings": rows}
        print(show_hidden_characters(json.dumps(content, indent=1, ensure_ascii=False)))
    else:
        from rich.box import SIMPLE_HEAD

        from posenc.report.report import section_on_training
        from posenc.report.terminal import rich_table, show_section, stdout_console

        console = stdout_console(160)
        # What a narrow terminal has no room for is in --json.
        num_columns = (
            len(HEADINGS) if console.width >= WIDE_TERMINAL_COLUMNS else HEADINGS.index("keras")
        )
        table_style: Any = {"box": SIMPLE_HEAD, "show_edge": False, "padding": 0}
        table = rich_table(
            HEADINGS[:num_columns],
            (table_cells(row)[:num_columns] for row in rows),
            **table_style,
        )
        table.columns[0].no_wrap = True
        console.print(table)
        show_section(section_on_training(["rope", "alibi", "t5"]), console)


def build_rows(
    names: Sequence[str] | None = None, stored: Sequence[dict[str, Any]] = ()
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return two lists: a dict for each of the encodings in `names` (None: all that are
    registered), with its claims, parameters and source; and a sentence for each encoding of another
    package that cannot be built.

    stored: dicts of an earlier call; these encodings are not built again.
    Raises: ValueError if an encoding in `names` cannot be built.
    """
    from posenc.encodings import registry

    stored_row_by_name = {row["name"]: row for row in stored}
    rows: list[dict[str, Any]] = []
    error_lines: list[str] = []
    for name in names or registry.names():
        if name in stored_row_by_name:
            rows.append(stored_row_by_name[name])
            continue
        spec = registry.parse(name)
        is_name_alone = len(spec.parts) == 1 and not spec.parts[0].attribute
        entry = registry.Entry(name, "unchecked")
        if is_name_alone:
            entry = registry.entry(spec.parts[0].name_or_module)
        try:
            rows.append(_build_row(name, spec.label or str(spec), entry))
        except Exception as error:  # of another package: its constructor may raise anything
            if names or not entry.origin:
                raise
            error_lines.append(f"{error}" if name in str(error) else f"{name!r}: {error}")
    return rows, error_lines


def _build_row(name: str, label: str, entry: "Entry") -> dict[str, Any]:
    """Build the encoding that `name` names, and return the dict with which it is listed as
    `label`."""
    from posenc.encodings import registry
    from posenc.encodings.base.position_encoding import ModelShape

    encoding = registry.create(name, ModelShape(embed_dim=512, num_heads=8, train_length=2048))
    return {
        "name": label,
        "places": list(encoding.claims.places),
        "parameters": encoding.num_parameters,
        **{claim: getattr(encoding.claims, claim) for claim in _CLAIM_NAMES_TEXT.split()},
        "checked": entry.evidence,
        "origin": entry.origin,
        "keras": KERAS_LAYERS.get(type(encoding).__name__),
        "source": encoding.claims.source,
    }


def table_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of an encoding's row in the table, in the order of HEADINGS."""
    holds_by_claim = {
        "shift invariant": row["shift_invariant"],
        "causal only": row["causal_only"],
        "not cache safe": not row["cache_safe"],
        "scales": row["own_scale"],
        "order of keys matters": not row["permutation_invariant"],
        f"{row['num_axes']} axes": row["num_axes"] > 1,
        f"below {row['max_positions']}": row["max_positions"] is not None,
    }
    per_layer_clause = " per layer" if row["parameters"] and row["scope"] == "layer" else ""
    return [
        row["name"],
        ", ".join(map(str, row["places"])) or "none",
        f"{row['parameters']:,}{per_layer_clause}",
        ", ".join(claim for claim, holds in holds_by_claim.items() if holds),
        f"{row['checked']}, {row['origin']}" if row["origin"] else row["checked"],
        row["keras"] or "",
        row["source"],
    ]


_CLAIM_NAMES_TEXT = "shift_invariant permutation_invariant causal_only cache_safe own_scale "
_CLAIM_NAMES_TEXT += "max_positions num_axes scope"
WIDE_TERMINAL_COLUMNS = 120
"""Minimum width, in characters, of a terminal that shows all columns of the table."""
HEADINGS = ["encoding", "place", "parameters", "claims", "checked", "keras", "source"]
