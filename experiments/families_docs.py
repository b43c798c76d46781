"""Write docs/families.md from what families.py and encoders.py found: families_docs.py ALL.csv
RESULTS.csv ENCODERS.csv PAGE.md; for the second table alone: families_docs.py ENCODERS.csv PAGE.md

ALL.csv has a row for every method and export; RESULTS.csv keeps one for each family, and the
release in which it was tried. Families that ALL.csv lacks keep their rows."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from tables import write_table

from posenc.files.atomic import write_atomically

WORKS, CRASHED = "works", "crashed"
BASELINES = ("none", "window")
COLUMNS = (
    "family",
    "inspect",
    "extend",
    "methods",
    "exports",
    "left out",
    "not exported",
    "transformers",
)
HEAD = """# Every family of transformers, tried

For each family of causal and masked language models in transformers, and those of text and images
that people extend (releases {versions}), we built a tiny random model and ran
`posenc inspect model --swap`, `posenc extend` with every method, every export. Of {count} families
{worked} are extended, and {refused} are refused with a reason before anything is measured.
{crashes}. Not tried, as our script builds no tiny model: {unbuilt} more, {names}.

`python experiments/families.py ALL.csv` and `python experiments/families_docs.py ALL.csv
results/extend/families.csv results/extend/encoders.csv docs/families.md` write this page; it takes
a quarter of an hour.

Without a head, as models that make vectors of texts ([extend](extend.md#models-without-a-head)),
bert, eurobert, gte, jina_embeddings_v3, modernbert, mpnet, nomic_bert, qwen3 and xlm-roberta were
each extended by one method, exported and proved, by hand.

| family | inspect | extend: methods measured | exported and proved | left out, and why |
| --- | --- | --- | --- | --- |
"""


ENCODERS_TITLE = "## Encoders of images, sound and video"
ENCODERS_HEAD = """

A tiny model of each with random weights ({versions}). Of transformers: `posenc.hf.attach(model,
alibi, example=...)`, with `model_positions="keep"`, where it was first seen that attaching NoPE
changes no answer, and in place of the model's own positions. Of timm: `posenc.nn.attach_to_vit`
with ALiBi and with DINOv3's rotation, which takes the place of a rotation of the model's own.
`python experiments/encoders.py results/extend/encoders.csv` tries them in half a minute, and
`python experiments/families_docs.py results/extend/encoders.csv docs/families.md` writes the table.

| library | model | beside its own positions | instead of them | DINOv3's rotation |
| --- | --- | --- | --- | --- |
"""


def encoders_section(rows: list[dict[str, str]]) -> str:
    """Return the second part of the page: a table with a row for each encoder."""
    found: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for row in rows:
        model = row["library"], row["model"]
        found.setdefault(model, {})[row["positions"], row["encoding"]] = row["outcome"]
    attempts = (("keep", "alibi"), ("replace", "alibi"), ("keep", "dinov3"))
    lines = []
    for (library, model), outcomes in found.items():
        cells = [library.partition(" ")[0], f"`{model}`"]
        cells += [outcomes.get(attempt, "–") for attempt in attempts]
        lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(dict.fromkeys(library for library, _ in found))
    head = ENCODERS_HEAD.format(versions=versions)
    return ENCODERS_TITLE + head + "\n".join(lines) + "\n"


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def condense(rows: list[dict[str, str]]) -> dict[str, str]:
    """Return one row for a family, with the names of COLUMNS, from the rows of its stages, methods
    and exports."""
    stages = {row["stage"]: row for row in rows if row["stage"] in ("build", "inspect", "extend")}
    methods = [row for row in rows if row["stage"] == "method" and row["method"] not in BASELINES]
    exports = [row for row in rows if row["stage"] == "export"]
    found = {"family": rows[0]["family"]}
    for stage in ("inspect", "extend"):
        row = stages.get(stage, stages["build"])
        found[stage] = row["outcome"] if row["outcome"] == WORKS else _why(row)
    for name, listed in (("methods", methods), ("exports", exports)):
        found[name] = " ".join(row["method"] for row in listed if row["outcome"] == WORKS)
    found["left out"] = _grouped(methods)
    found["not exported"] = _grouped(exports)
    return found


def _why(row: dict[str, str]) -> str:
    """Return the outcome of a row and its reason, without the name of the folder."""
    folder = f"{row['family']}: "
    why = row["why"].split(folder, 1)[-1] if folder in row["why"] else row["why"]
    return f"{row['outcome']}: {why.rstrip('.')}"


def _grouped(rows: list[dict[str, str]]) -> str:
    """Return the names of the methods that did not work, grouped by their reason, as text."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row["outcome"] != WORKS:
            groups.setdefault(_why(row), []).append(row["method"])
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in groups.items())


def page(families: list[dict[str, str]]) -> str:
    """Return the page in Markdown: a summary, then a table with a row for each family."""
    releases = sorted({family["transformers"] for family in families})
    built = [f for f in families if not f["inspect"].startswith("not built")]
    worked = [f for f in built if f["extend"] == WORKS]
    crashed = [f["family"] for f in built if any(CRASHED in value for value in f.values())]
    crashes = f"In {len(crashed)} something crashes: {', '.join(crashed)}"
    unbuilt = [f["family"] for f in families if f not in built]
    head = HEAD.format(
        count=len(built),
        versions=" and ".join(releases),
        worked=len(worked),
        refused=len(built) - len(worked),
        crashes=crashes if crashed else "None crashes",
        unbuilt=len(unbuilt),
        names=", ".join(unbuilt),
    )
    lines = []
    for f in built:
        many = len(f["methods"].split())
        exported = len(f["exports"].split())
        reasons = "; ".join(part for part in (f["left out"], f["not exported"]) if part)
        extended = str(many) if f["extend"] == WORKS else f["extend"]
        cells = [f"`{f['family']}`", f["inspect"], extended, str(exported) if exported else "–"]
        lines.append(f"| {' | '.join([*cells, reasons or '–'])} |")
    return head + "\n".join(lines) + "\n"


def write_all(everything: Path, results: Path, encoders: Path, target: Path) -> None:
    """Condense the rows of the file `everything` into `results`, and write the page to `target`."""
    import transformers

    families = {row["family"]: row for row in read_rows(results)} if results.exists() else {}
    by_family: dict[str, list[dict[str, str]]] = {}
    for row in read_rows(everything):
        by_family.setdefault(row["family"], []).append(row)
    for family, rows in by_family.items():
        families[family] = condense(rows) | {"transformers": transformers.__version__}
    sorted_rows = [families[family] for family in sorted(families)]
    write_table(results, COLUMNS, ([row[name] for name in COLUMNS] for row in sorted_rows))
    families_section = page(sorted_rows)
    section = encoders_section(read_rows(encoders))
    write_atomically(target, f"{families_section}\n{section}")


def write_encoders(encoders: Path, target: Path) -> None:
    """Write the second part of the page `target`, and leave the first as it is."""
    families_section = target.read_text(encoding="utf-8").partition(ENCODERS_TITLE)[0].rstrip()
    section = encoders_section(read_rows(encoders))
    write_atomically(target, f"{families_section}\n\n{section}")


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]]
    if len(paths) == 2:
        write_encoders(*paths)
    else:
        write_all(*paths)
