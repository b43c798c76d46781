"""`posenc list`: every encoding with its place, parameters, claims and source."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

KERAS_LAYERS = {
    "Sinusoidal": "SinusoidalPositionEncoding",
    "Learned": "LearnedPositionEmbedding",
    "RoPE": "RotaryEmbedding",
    "ALiBi": "ALiBi",
    "T5Bias": "T5RelativeBias",
    "Kerple": "KerpleBias",
    "Shaw": "ShawAttention",
}
"""The layer of posenc.keras for each class."""


def list_encodings(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a list of objects in JSON.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table in Markdown.")
    ] = False,
) -> None:
    """List every encoding: place, parameters, claims, source, and how it is checked.

    Parameters are counted for a model of width 512 with 8 heads and training length 2048.
    """
    if as_json and markdown:
        raise ValueError("posenc list: choose one of --json and --markdown.")
    rows = encodings()
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
    elif markdown:
        print(_markdown(rows))
    else:
        from posenc.report.console import print_table, stdout

        print_table(stdout(160), _HEADINGS, map(_cells, rows), overflow="fold")


def encodings() -> list[dict[str, Any]]:
    """What each registered encoding claims, with the defaults of the registry."""
    from posenc.encoding.shape import ModelShape
    from posenc.registry import create, entry, names

    shape = ModelShape(embed_dim=512, num_heads=8, train_length=2048)
    rows = []
    for name in names():
        encoding = create(name, shape)
        rows.append(
            {
                "name": name,
                "places": list(encoding.claims.places),
                "parameters": encoding.num_parameters,
                "shift_invariant": encoding.claims.shift_invariant,
                "permutation_invariant": encoding.claims.permutation_invariant,
                "causal_only": encoding.claims.causal_only,
                "cache_safe": encoding.claims.cache_safe,
                "max_positions": encoding.claims.max_positions,
                "num_axes": encoding.claims.num_axes,
                "scope": encoding.claims.scope,
                "checked": entry(name).checked,
                "keras": KERAS_LAYERS.get(type(encoding).__name__),
                "source": encoding.claims.source,
            }
        )
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    claims = {
        "shift invariant": row["shift_invariant"],
        "causal only": row["causal_only"],
        "not cache safe": not row["cache_safe"],
        "order of keys matters": not row["permutation_invariant"],
        f"{row['num_axes']} axes": row["num_axes"] > 1,
        f"below {row['max_positions']}": row["max_positions"] is not None,
    }
    each = " per layer" if row["parameters"] and row["scope"] == "layer" else ""
    return [
        row["name"],
        ", ".join(map(str, row["places"])) or "none",
        f"{row['parameters']:,}{each}",
        ", ".join(claim for claim, holds in claims.items() if holds),
        row["checked"],
        row["keras"] or "",
        row["source"],
    ]


_HEADINGS = ["encoding", "place", "parameters", "claims", "checked", "keras", "source"]


def _markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        _HEADINGS,
        ["---"] * len(_HEADINGS),
        *([f"`{c[0]}`", *c[1:]] for c in map(_cells, rows)),
    ]
    return "\n".join(
        "| " + " | ".join(c.replace("|", r"\|") for c in line) + " |" for line in lines
    )
