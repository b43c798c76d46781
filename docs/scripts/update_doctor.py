"""Write the generated part of docs/doctor.md (runtimes, rules, golden cases) and its two figures:
what the command prints of a broken and of a mended config, and the rotation of each kind of layer
of two models, as the rotary modules of the installed transformers compute it. Run by
`make readme`."""

from __future__ import annotations

import io
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/doctor.md"
START = "<!-- from here on written by make readme -->\n"
PAGES = "../posenc/doctor/pages"
"""Where the rules' pages are, from docs/."""
SCREEN = ROOT / "docs/figures/doctor.svg"
KINDS = ROOT / "docs/figures/doctor-kinds.svg"
EXAMPLE = "docs/examples/yarn"
"""A Llama with YaRN, as transformers 5 saves it."""
COMMANDS = (EXAMPLE, f"{EXAMPLE} --fix --out mended", "mended")
WIDTH = 108
COLOURS = (
    (r"\bother\b|\(other\)|^E PD\d+|\d+ errors?\b", "bold red"),
    (r"as meant|Nothing to complain about|proved by their emulators", "bold green"),
)
MODELS_WITH_KINDS = {"DeepSeek-V4": "deepseek-v4", "MiniMax-M2": "minimax-m2"}
"""Name -> whose conformance vector has its rotary settings, at six layers."""


def reference() -> str:
    """The runtimes that are emulated, and all rules from their table."""
    from posenc.doctor.rule import SEVERITIES
    from posenc.doctor.rules import RULES
    from posenc.runtimes.known import RELEASES_IN_WORDS

    lines = ["## Runtimes", "", "| runtime | versions |", "|---|---|"]
    lines += [f"| {name} | {versions} |" for name, versions in RELEASES_IN_WORDS.items()]
    lines += ["", "## Rules", ""]
    lines += [
        "An error means that a runtime named by `--for` (default: all six that know the model) "
        "computes something else than is meant. The same finding is a warning where no named "
        "runtime is concerned.",
        "",
    ]
    lines += ["| rule | what it finds | severity |", "|---|---|---|"]
    lines += [
        f"| [{code}]({PAGES}/{code}.md) | {rule.title} | {SEVERITIES[rule.severity]} |"
        for code, rule in RULES.items()
    ]
    return "\n".join(lines)


def families() -> str:
    """How many families were held to the runtimes' own modules, and what is known of each."""
    sys.path.insert(0, str(ROOT))
    try:
        from tests.doctor.oracles import swept
    finally:
        sys.path.remove(str(ROOT))
    from posenc.runtimes.families import RUNTIME_FILES, all_families

    lines = [
        "*run*: what posenc says equals what the runtime's own modules compute, from the class's "
        "defaults and from each variation. *read*: its source was read and not run. An empty cell: "
        "not known to posenc, and not judged.",
        "",
    ]
    seen: dict[tuple[str, str], str] = {}
    for runtime, said in swept.kept().items():
        parts = [f"{n} {verdict}" for verdict, n in swept.counts(runtime).most_common()]
        towers = list(said["towers"].values())
        if towers:
            right = towers.count("")
            parts.append(f"of {len(towers)} classes with several modalities {right} right")
        lines.append(
            f"- {runtime} {said['version']}, {len(said['rows'])} classes: {', '.join(parts)}."
        )
        seen |= {(runtime, name): verdict for name, verdict, _ in said["rows"].values()}
    words = {"right": "run", "differs": "**differs**"}
    lines += [
        "",
        f"| family | {' | '.join(RUNTIME_FILES)} |",
        f"|---|{'---|' * len(RUNTIME_FILES)}",
    ]
    for name, facts in all_families().items():
        if "text" not in facts:
            read = {r: facts.get(cell, "") for r, cell in RUNTIME_FILES.items()}
            usual = {r: "no model" if v is None else "read" if v else "" for r, v in read.items()}
            row = [words.get(seen.get((r, name), ""), usual[r]) for r in RUNTIME_FILES]
            lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def golden_cases() -> str:
    """Each recorded config beside each runtime: does its emulator give what the runtime gave?"""
    sys.path.insert(0, str(ROOT))
    try:
        from posenc.runtimes.known import RUNTIMES
        from tests.runtimes.golden_cases import cells
        from tests.runtimes.test_golden import assert_reproduced
    finally:
        sys.path.remove(str(ROOT))
    rows: dict[str, dict[str, str]] = {}
    for cell in cells():
        try:
            assert_reproduced(cell, RUNTIMES[cell.runtime])
            said = "same" if cell.error is None else "both refuse"
        except AssertionError:
            said = "**differs**"
        rows.setdefault(cell.case, {})[cell.runtime] = said
    answers = [said for row in rows.values() for said in row.values()]
    right = sum(said != "**differs**" for said in answers)
    lines = [
        f"{right} of {len(answers)} recorded answers to {len(rows)} configs are reproduced: "
        "frequencies, multiplier and softmax scale within 1e-6, the rule of switching, refusals. "
        "An empty cell was not recorded.",
        "",
        f"| config | {' | '.join(RUNTIMES)} |",
        f"|---|{'---|' * len(RUNTIMES)}",
    ]
    for case, row in rows.items():
        cells_ = " | ".join(row.get(name, "") for name in RUNTIMES)
        lines.append(f"| {case} | {cells_} |")
    return "\n".join(lines)


def with_generated(page: str) -> str:
    """The page with its generated part as it is today."""
    before, _, _ = page.partition(START)
    assert before != page, f"{PAGE} lacks the line {START!r}"
    parts = (reference(), f"## Families\n\n{families()}", f"## Golden cases\n\n{golden_cases()}")
    return f"{before}{START}\n" + "\n\n".join(parts) + "\n"


def screen() -> Text:
    """The prompts with what the commands print, in colours."""
    shown = Text()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copytree(ROOT / EXAMPLE, folder / EXAMPLE)
        for arguments in COMMANDS:
            shown.append(f"$ posenc doctor {arguments}\n", "bold")
            shown.append(printed(arguments.split(), folder) + "\n")
    for pattern, style in COLOURS:
        shown.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    shown.rstrip()
    return shown


def printed(arguments: list[str], folder: Path) -> str:
    """What `posenc doctor` prints in a process of its own."""
    command = [sys.executable, "-m", "posenc", "doctor", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode > 1:
        raise SystemExit(done.stderr)
    return done.stdout


def picture() -> str:
    """The screen as SVG, in the reader's own fixed-width font."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(screen())
    svg = console.export_svg(title="posenc doctor", theme=MONOKAI, unique_id="doctor")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("<text ", '<text xml:space="preserve" ')


def computed_kinds(name: str) -> tuple[Any, dict[str, list[float]]]:
    """Return transformers' config of a vector, and the frequencies of each kind of layer."""
    from posenc.runtimes.conformance import vectors

    sys.path.insert(0, str(ROOT))
    try:
        from tests.doctor.oracles import real
    finally:
        sys.path.remove(str(ROOT))
    (raw,) = [vector["config"] for vector in vectors() if vector["name"] == name]
    (kind,) = [c for c in real.config_classes().values() if c.model_type == raw["model_type"]]
    config = kind.from_dict(dict(raw))
    found = {}
    for rotary in real.rotary_modules(config):
        found |= {k: inv_freq for k, (inv_freq, _) in real.rebuilt(rotary, config).items()}
    return config, found


def wavelengths_by_kind() -> dict[str, list[float]]:
    """Return the wavelength in tokens of each pair, by model, kind and what of it rotates."""
    drawn = {}
    for title, name in MODELS_WITH_KINDS.items():
        config, kinds = computed_kinds(name)
        for kind, inv_freq in sorted(kinds.items(), reverse=True):
            label = f"{title}{'' if kind == 'all' else f', {kind}'}"
            label += f": {2 * len(inv_freq)} of {config.head_dim} channels"
            drawn[label] = [2 * math.pi / f for f in inv_freq]
    return drawn


def write_kinds(path: Path) -> None:
    """Draw the lines."""
    from matplotlib.ticker import FuncFormatter

    from posenc.report.drawing import draw_legend_above, figure, line_styles, write_svg

    waves = wavelengths_by_kind()
    said = "; ".join(f"{label}, up to {max(each):,.0f} tokens" for label, each in waves.items())
    with figure("rotated pair of channels", "wavelength, tokens") as (drawn, axes):
        for label, style in line_styles(list(waves)).items():
            axes.plot(waves[label], label=label, **style.arguments_for_curve(len(waves[label])))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        draw_legend_above(drawn)
    write_svg(drawn, path, f"Wavelength of each rotated pair. {said}.")


if __name__ == "__main__":
    PAGE.write_text(with_generated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SCREEN.write_text(picture(), encoding="utf-8")
    write_kinds(KINDS)
