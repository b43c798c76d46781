"""Build the documentation's site into build/docs, offline; warnings and dead links are errors.

make docs

The pages are docs/**/*.md, ordered by docs/README.md, and what is generated: one page for each
rule of the doctor, a card for each encoding, the public names from their docstrings, llms.txt.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import posenc
from posenc.doctor.rule import SEVERITIES
from posenc.doctor.rules import RULES
from posenc.encodings.base.position_encoding import ModelShape
from posenc.encodings.registry import create, entry, names
from posenc.inspect import charts
from posenc.inspect.encoding.scores import decay
from posenc.list import build_rows
from posenc.report.drawing import write_svg

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BUILD = ROOT / "build"
ELSEWHERE = {
    "CONTRIBUTING.md": "contributing.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "results/LOG.md": "log.md",
}
"""Pages that lie outside of docs, and what they are called in the site."""
CHINESE_INDEX = "index.zh-CN.md"
"""The front page of the tree in Chinese; docs/conf.py shows each page the tree of its language."""
EXPLORER = ROOT / "posenc/explore/explore.html"
"""The page of `posenc explore`."""
EXPLORER_NAME = "explorer.html"
"""What the site calls it, at its root; explore.html is the page about the command."""
WAY_BACK = (
    '<p style="max-width: 1060px; margin: 12px auto 0; padding: 0 20px">'
    '<a href="index.html">posenc</a> · <a href="explore.html">about this page</a> · '
    '<a href="explore.zh-CN.html">关于本页</a></p>'
)
"""Links out of it, which only the site has."""
GENERATED = {"Tools": ["rules/index"], "API": ["api/index"]}
"""Generated pages by the section of docs/README.md that they belong to."""
SHAPE = ModelShape(512, 8, head_dim=64, train_length=2048, causal=True)
GRID = ModelShape(512, 8, head_dim=64, train_length=256, causal=True)
USED = {
    "learned": "BERT, GPT-2, OPT",
    "rope": "Llama, Qwen, Gemma, GPT-NeoX, GLM, ModernBERT",
    "rope_interleaved": "GLM-4, Command R7B",
    "linear": "Gemma 3",
    "yarn": "DeepSeek V3",
    "llama3": "Llama 3.1",
    "longrope": "Phi-3",
    "p_rope": "Gemma 4",
    "mrope": "Qwen2-VL",
    "decoupled_rope": "DeepSeek V2 and V3",
    "irope": "Llama 4",
    "llama4_temperature": "Llama 4",
    "alibi": "BLOOM, MPT",
    "t5": "T5",
    "deberta": "DeBERTa",
    "inkling": "Inkling",
}
LEARN = {
    "nope": "order",
    "sinusoidal": "sinusoidal",
    "learned": "learned",
    "rope": "rope",
    "alibi": "biases",
    "t5": "biases",
    "linear": "scaling",
    "ntk": "scaling",
    "yarn": "scaling",
}
"""The page that explains an encoding."""
API = {
    "attention": "attention attention_weights explain score_mod linear_attention Attention KVCache",
    "encodings": "PositionEncoding DistanceBias Claims ModelShape Compose PerLayer Within Pass "
    "Term Tokens create names register",
    "scalings": "Linear NTK NTKByParts YaRN Llama3 LongRoPE Proportional "
    "DynamicLinear DynamicNTK DynamicYaRN",
    "models": "Decoder DecoderConfig Encoder EncoderDecoder generate convert_layout "
    "mrope_positions",
    "masks": "Mask masks.causal masks.full masks.padding masks.document masks.sliding_window "
    "masks.chunked masks.prefix masks.attention_sinks masks.permutation",
    "positions": "positions.positions_from_mask positions.positions_from_documents positions.grid "
    "positions.normalized_grid",
    "hf": "hf.attach hf.detach hf.attached hf.shape_of hf.load",
    "nn": "nn.MultiheadAttention nn.TransformerEncoderLayer nn.VisionAttention nn.attach_to_vit",
    "commands": "compare.run extend.run extend.evaluate inspect.measure_encodings "
    "inspect.measure_model inspect.measure_module doctor.ask testing.test_contract",
}
"""Public names by page; those not here are classes of encodings."""


def where() -> dict[Path, str]:
    """Return the site's name of each page of the repository."""
    found = {p: p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")}
    found[DOCS / "README.md"] = "index.md"
    found[DOCS / "README.zh-CN.md"] = CHINESE_INDEX
    found |= {ROOT / name: page for name, page in ELSEWHERE.items()}
    found |= {p: f"rules/{p.name}" for p in (ROOT / "posenc/doctor/pages").glob("*.md")}
    return found


def linked(text: str, page: Path, site: dict[Path, str]) -> str:
    """Return text with each link to a page of the site as the site has it; a link to another file
    of the repository becomes the file's name."""
    here = Path(site[page]).parent

    def there(match: re.Match[str]) -> str:
        said, target = match[1], match[2]
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", target) or not path:
            return match[0]
        file = (page.parent / path).resolve()
        if file in site:
            name = os.path.relpath(site[file], here)
            return f"[{said}]({name}{'#' if anchor else ''}{anchor})"
        if file == EXPLORER:  # no page of Sphinx, and what follows the # is a view
            name = os.path.relpath(EXPLORER_NAME, here)
            return f'<a href="{name}{"#" if anchor else ""}{anchor}">{said}</a>'
        if file.is_relative_to(DOCS / "figures"):
            return f"[{said}]({os.path.relpath(file.relative_to(DOCS), here)})"
        name = file.relative_to(ROOT).as_posix()
        return f"`{name}`" if said.strip("`") in name else f"{said} (`{name}`)"

    return re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", there, text)


def joined(text: str) -> str:
    """Return text without the breaks between lines of Chinese, which browsers show as spaces."""
    sign = "[\u3000-\u303f\u3400-\u9fff\uff00-\uffef“”]"
    return re.sub(f"(?<={sign})\n *(?={sign})", "", text)


def toctree(pages: list[str], caption: str = "") -> str:
    """Return the directive that puts pages into the navigation."""
    head = f":caption: {caption}\n" if caption else ""
    return "\n```{toctree}\n:hidden:\n" + head + "\n" + "\n".join(pages) + "\n```\n"


def sections(index: str) -> dict[str, list[tuple[str, str, str]]]:
    """Return the links (text, page, rest of the line) of each section of the index."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        found[title] = re.findall(r"^- \[(.+?)\]\(([^)#]+)\.md\)(.*)$", body, re.MULTILINE)
    return found


def lay_out(source: Path) -> None:
    """Write every page of the site as Markdown."""
    site, pages = where(), {}
    for page, name in site.items():
        pages[name] = joined(linked(page.read_text(encoding="utf-8"), page, site))
    for title, links in sections(pages["index.md"]).items():
        listed = [f"{said} <{page}>" for said, page, _ in links] + GENERATED.get(title, [])
        pages["index.md"] += toctree(listed, title)
    pages["index.md"] += toctree([f"中文 <{CHINESE_INDEX}>"], "中文")
    for links in sections(pages[CHINESE_INDEX]).values():
        pages[CHINESE_INDEX] += toctree([f"{said} <{page}>" for said, page, _ in links])
    pages["encodings.md"] = re.sub(
        r"^\| `(\w+)` \|", r"| [`\1`](cards/\1.md) |", pages["encodings.md"], flags=re.MULTILINE
    ) + toctree([f"cards/{name}" for name in names()])
    rules = [
        f"| [{code}]({code}.md) | {rule.title} | {SEVERITIES[rule.severity]} |\n"
        for code, rule in RULES.items()
    ]
    head = "# Rules of the doctor\n\n| rule | what it finds | severity |\n|---|---|---|\n"
    pages["rules/index.md"] = head + "".join(rules) + toctree(list(RULES))
    pages |= {f"api/{name}.md": text for name, text in api().items()}
    pages |= {f"cards/{row['name']}.md": card(row) for row in build_rows()[0]}
    for name, text in pages.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")
    shutil.copytree(DOCS / "figures", source / "figures", dirs_exist_ok=True)
    draw(source / "cards")


def api() -> dict[str, str]:
    """Return the pages of the public names."""
    shown = {name for group in API.values() for name in group.split()}
    classes = [name for name in posenc.__all__ if name not in shown]
    groups = {**{page: group.split() for page, group in API.items()}, "classes": classes}
    pages = {}
    for page, members in groups.items():
        lines = [f"# {page}\n"]
        for name in members:
            thing = named(name)
            kind = "class" if isinstance(thing, type) else "function" if callable(thing) else "data"
            kind = "data" if kind == "function" and not hasattr(thing, "__name__") else kind
            lines.append(f"```{{eval-rst}}\n.. auto{kind}:: posenc.{name}\n```\n")
        pages[page] = "\n".join(lines)
    lines = ["# API\n"]
    for page, members in groups.items():
        lines.append(f"## [{page}]({page}.md)\n")
        lines += [f"- `{name}`{first_sentence(named(name))}" for name in members]
        lines.append("")
    pages["index"] = "\n".join(lines) + toctree(list(groups))
    return pages


def named(name: str) -> Any:
    """Return what a public name such as "masks.causal" means."""
    thing = posenc
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


def first_sentence(thing: Any) -> str:
    """Return a colon and the first sentence of a class's or a function's docstring; "" for other
    objects, which have only that of their class."""
    if not isinstance(thing, type) and not hasattr(thing, "__name__"):
        return ""
    paragraph = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0]
    return f": {sentence}" if sentence else ""


def card(row: dict) -> str:
    """Return the page of one encoding."""
    name, found = row["name"], entry(row["name"])
    owner, _, kind = found.class_path.partition(":")
    changes = ("embeddings", "queries and keys", "scores", "values")
    options = ",".join(f"{key}={value}" for key, value in found.defaults.items())
    checked = (
        "printed by the authors' own code"
        if found.evidence == "golden"
        else ("of the paper's formula, in float64 loops")
    )
    claims = [k.replace("_", " ") for k in ("shift_invariant", "causal_only") if row[k]]
    claims += [] if row["cache_safe"] else ["not cache safe"]
    claims += ["scales"] if row["own_scale"] else []
    parameters = f"{row['parameters']:,}{' per layer' if row['scope'] == 'layer' else ''}"
    facts = {
        "acts on": ", ".join(changes[place - 1] for place in row["places"]) or "nothing",
        "parameters": f"{parameters} (width 512, 8 heads, training length 2,048)",
        "attention takes": cost(name),
        "claims": ", ".join(claims) or "none",
        "checked by": f"numbers {checked}",
        "used by": USED.get(name),
        "source": row["source"],
        "explained in": f"[Learn](../learn/{LEARN[name]}.md)"
        if name in LEARN
        else "the text below",
        "in Python": f'`posenc.create("{name}", shape)`' + (f", is `{options}`" if options else ""),
    }
    table = "".join(f"| {key} | {value} |\n" for key, value in facts.items() if value)
    scaling = found.defaults.get("scaling")
    documented = f"{owner}.{kind}"
    if scaling:
        built = create(name, SHAPE).scaling
        documented = f"{type(built).__module__}.{type(built).__qualname__}"
    text = f"Score of a random vector by distance for {name}, before any training."
    return (
        f"# {name}\n\n| | |\n|---|---|\n{table}\n![{text}]({name}.svg)\n\n*{text} Measured.*\n\n"
        f"```{{eval-rst}}\n.. autoclass:: {documented}\n   :no-index:\n```\n"
    )


def cost(name: str) -> str | None:
    """Return how much longer attention over 1,024 tokens takes, None if `posenc bench` does not
    have it; for RoPE's scalings, which run the same code, that of RoPE."""
    run = "rope" if entry(name).class_path == entry("rope").class_path else name
    text = (ROOT / "benchmarks/results/performance.json").read_text(encoding="utf-8")
    for row in json.loads(text)["rows"]:
        if (row["group"], row["run"], row["case"], row.get("threads")) == (
            "attention",
            run,
            "1k",
            1,
        ):
            ratio, low, high = next(iter(row["ratios"].values()))
            measured = "" if run == name else ", measured with `rope`, whose code it runs"
            said = f"{ratio:.2f} ({low:.2f} to {high:.2f}) times plain attention"
            return f"{said} over 1,024 tokens{measured}"
    return None


def draw(folder: Path) -> None:
    """Write the picture of each card."""
    for name in names():
        shape = SHAPE if create(name, SHAPE).claims.num_axes == 1 else GRID
        measured = decay(create(name, shape), shape)
        chart = charts.score_chart({name: (measured.distances, measured.same)})
        write_svg(chart.figure, folder / f"{name}.svg", f"Score by distance of {name}.")


def explorer_with_way_back() -> str:
    """Return the page of `posenc explore` with links to the site."""
    page = EXPLORER.read_text(encoding="utf-8")
    assert page.count("<main") == 1
    return page.replace("<main", f"{WAY_BACK}\n<main")


def for_machines(source: Path, site: Path) -> None:
    """Write llms.txt, the index with a line for each page, and llms-full.txt, every page."""
    fronts = ("index.md", CHINESE_INDEX)
    index = "\n\n".join((source / name).read_text(encoding="utf-8") for name in fronts)
    lines = ["# posenc\n", "> " + re.split(r"\n\n", index)[1].replace("\n", " ") + "\n"]
    whole = []
    for title, links in sections(index).items():
        lines += [f"## {title}\n"]
        lines += [f"- [{said}]({page}.html){rest}" for said, page, rest in links]
        lines += [f"- [{page}]({page}.html)" for page in GENERATED.get(title, [])] + [""]
        whole += [(source / f"{page}.md").read_text(encoding="utf-8") for _, page, _ in links]
    rules = sorted((source / "rules").glob("PD*.md"))
    whole += [page.read_text(encoding="utf-8") for page in rules]
    plain = re.sub(r"\n```\{toctree\}.*?\n```\n", "", "\n\n".join(whole), flags=re.DOTALL)
    (site / "skill").mkdir(exist_ok=True)
    shutil.copy(DOCS / "skill/SKILL.md", site / "skill")
    lines += [
        "## For agents\n",
        "- [SKILL.md](skill/SKILL.md): check RoPE configs with posenc doctor\n",
    ]
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    (site / "llms-full.txt").write_text(plain, encoding="utf-8")


class Links(HTMLParser):
    """Collect the anchors of a page, what it links to and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: set[str] = set()
        self.loaded: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value for key, value in attrs if value}
        self.ids |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.targets.add(given["href"])
        elif tag in ("img", "script") and "src" in given:
            self.loaded.add(given["src"])
        elif tag == "link" and "href" in given:
            self.loaded.add(given["href"])


def dead(site: Path) -> list[str]:
    """Return the links within the site that lead nowhere, and what a page loads from elsewhere."""
    pages: dict[Path, Links] = {}
    for path in site.rglob("*.html"):
        pages[path] = Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    found = []
    for path, links in pages.items():
        for target in sorted(links.targets | links.loaded):
            if re.match(r"\w+:|//", target):
                if target in links.loaded and not target.startswith("data:"):
                    found.append(f"{path.relative_to(site)} loads {target}")
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name.partition("?")[0]).resolve() if name else path
            file = file / "index.html" if file.is_dir() else file
            known = pages[file].ids if file in pages else set()
            held = file.suffix == ".html" and file.name != EXPLORER_NAME
            if not file.exists() or (anchor and held and anchor not in known):
                found.append(f"{path.relative_to(site)}: {target}")
    return found


def main() -> int:
    source, site = BUILD / "docs-source", BUILD / "docs"
    for folder in (source, site):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    lay_out(source)
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-n", "-q"]
    command += ["-d", str(BUILD / "doctrees"), "-c", str(DOCS), str(source), str(site)]
    if code := subprocess.run(command).returncode:
        return code
    for_machines(source, site)
    (site / EXPLORER_NAME).write_text(explorer_with_way_back(), encoding="utf-8")
    broken = dead(site)
    print("\n".join(broken or [f"Wrote {(site / 'index.html').relative_to(ROOT)}"]))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
