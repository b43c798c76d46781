"""Tables of encodings and of the leaderboard are current, and links in documents lead somewhere."""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from posenc.compare.scores import FarScore
from posenc.encodings import registry
from tests.compare.reports.test_published_trials import of_text
from tests.compare.test_tasks import result, study_of

pytestmark = pytest.mark.prose
ROOT = Path(__file__).parents[1]
LLAMA2XS = ROOT.parent / "shared/checkpoints/llama2xs"
READMES = ("README.md", "README.zh-CN.md")
BOARDS = ("leaderboard.md", "leaderboard.zh-CN.md")
DOCUMENTS = sorted(
    p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
)


def load_update_readme():
    return load_script("update_readme")


def load_script(name: str, folder: str = "docs/scripts"):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{folder}/{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / folder))  # as where it is run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / folder))
    return module


@pytest.fixture(scope="module")
def table() -> str:
    script = load_update_readme()
    return script.table_in_markdown(script.current_rows())


def test_tables_of_encodings_are_current(table):
    pages = load_update_readme().pages(ROOT)
    assert [path.name for path in pages] == [*READMES, "encodings.md"]
    for path, current in pages.items():
        assert path.read_text(encoding="utf-8") == current, "run `make readme`"
    lines = table.splitlines()
    assert len(lines) == 2 + len(registry.names())
    assert {line.replace(r"\|", "").count("|") for line in lines} == {8}
    names = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    for readme in READMES:
        assert names <= set(re.findall(r"`(\w+)`", (ROOT / readme).read_text("utf-8")))


def count_words(text: str) -> int:
    """Count words; two Chinese characters count as one."""
    chinese = re.findall(r"[\u4e00-\u9fff]", text)
    return len(re.sub(r"[\u3000-\u9fff\uff00-\uffef]", " ", text).split()) + len(chinese) // 2


@pytest.mark.parametrize("document", READMES)
def test_readme_is_a_landing_page(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    lines = text.splitlines()
    assert count_words(text) <= 1_000 and len(lines) <= 145
    assert lines.index("```python") < 30
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) > 5
    for row in rows:
        assert all(count_words(cell) <= 20 for cell in row.split("|")), row
    comments = re.findall(r"<!--.*?-->", text)
    assert comments == ["<!-- encodings: written by make readme -->", "<!-- end of encodings -->"]


@pytest.mark.parametrize("document", BOARDS)
def test_the_answer_and_the_figure_are_those_of_the_published_trials(document, tmp_path):
    script = load_script("update_leaderboard")
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    boards = script.leaderboard_plan.published_studies()
    assert text == script.with_tables(text, boards, document), "run `make readme`"
    script.draw(boards, tmp_path)
    studies = {name: study.sequence_tasks for name, study in boards.items() if study.sequence_tasks}
    assert len(studies["tasks"]) == 6
    for name, tasks in studies.items():
        assert_same_picture(tmp_path / f"leaderboard-{name}.svg")
        drawn = (tmp_path / f"leaderboard-{name}.svg").read_text(encoding="utf-8")
        num_trials = len(boards[name].of_task(tasks[0]).finished)
        assert all(f">{t}<" in drawn for t in tasks)
        assert drawn.count("<use ") >= num_trials * len(tasks)
        assert f"](figures/leaderboard-{name}.svg)" in text


def test_the_answer_keeps_apart_what_is_tied_what_is_worse_and_what_is_not_decided():
    script = load_script("board_tables")
    beyond = {
        "t5": (0.98, 0.97, 0.99, 0.98, 0.98),
        "alibi": (0.97, 0.98, 0.985, 0.97, 0.99),
        "rope": (0.12, 0.1, 0.11, 0.12, 0.1),
    }

    def trials(seeds, *tasks):
        return [
            result(name, seed, (1.0, each[seed]), task)
            for task in tasks
            for name, each in beyond.items()
            for seed in range(seeds)
        ]

    def table(*results):
        return script.table({"trials": study_of(*results)}, "leaderboard.md").splitlines()

    (line,) = table(*trials(5, "copy"))[2:]
    assert line == "| copying 32 symbols | `t5` 0.98, `alibi` 0.98 | `rope` 0.11 | – |"
    lost = [result("rope", seed, (0.2, 0.1), "copy") for seed in (3, 4)]
    kept = [r for r in trials(5, "copy") if r.config.encoding != "rope" or r.config.seed < 3]
    assert "| `rope` 0.11 (3 of 5) |" in table(*kept, *lost)[2]
    few = table(*trials(3, "copy"))[2]
    assert few.startswith("| copying 32 symbols | not decided by so few seeds: `t5` 0.98, `alibi`")
    *_, together = table(*trials(5, "copy", "reverse", "recall"))
    assert together.startswith("| all together, mean rank | `t5` 1.") and "`rope` 3.00" in together
    bits = {"t5": 2.0, "rope": 2.5}
    read = [of_text(n, s, (b, b + 1 + s * b / 100)) for n, b in bits.items() for s in range(3)]
    (near,) = table(*read)[2:]
    with_far = []
    for each in read:
        last = each.by_length[-1]
        score = FarScore(last.length, last.bits_per_byte, last.bits_per_byte)
        with_far.append(replace(each, far=(score,)))
    near, far = table(*with_far)[2:]
    assert "not decided by so few seeds: `t5` 2.00, `rope` 2.50 | – |" in near  # no spread
    assert re.fullmatch(
        r"\| text, the last \d+ of 24 bytes \| `t5` 3.02 \| `rope` 3.52 \| – \|", far
    )
    # One seed of one encoding is missing, then all but one: no interval, and so no answer.
    found = trials(5, "copy")
    alone = [r for r in found if r.config.seed == 0 or r.config.encoding != "rope"]
    assert not any("copying" in line for line in table(*alone))
    of_texts = {name: study_of(*with_far) for name in ("code", "novel")}
    lines = script.table(of_texts, "leaderboard.md").splitlines()[2:]
    assert [line.split(" |")[0] for line in lines] == [
        f"| {text}, {place} bytes"
        for text in ("code", "a novel")
        for place in ("16", "the last 16 of 24")
    ]


def test_table_names_every_encoding(table):
    for name in registry.names():
        assert name in table


def test_a_scaling_is_credited_with_its_own_paper(table):
    (yarn,) = [line for line in table.splitlines() if line.startswith("| `yarn` |")]
    assert "2309.00071" in yarn


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    folder = (ROOT / document).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://", "#")):
            assert (folder / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("document", READMES)
def test_the_readmes_anchors_are_headings(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    anchors = re.findall(r"\]\(([\w/.-]+\.md)#([^)\s]+)\)", text)
    assert len(anchors) >= 7
    for name, anchor in anchors:
        page = (ROOT / name).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
        slugs = [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings]
        assert anchor in slugs, f"{name}#{anchor}"


@pytest.mark.parametrize("name", ["compare", "extend", "inspect", "doctor", "explore"])
def test_a_translation_names_the_same_options_methods_and_files(name):
    english, chinese = (
        (ROOT / f"docs/{name}{kind}.md").read_text(encoding="utf-8") for kind in ("", ".zh-CN")
    )

    def named(text: str) -> set[str]:
        spans = set(re.findall(r"(?<!\w)--[a-z][\w-]+", text))
        return spans | set(re.findall(r"`([\w./-]+)`", text))

    strange = named(chinese) - named(english)
    assert not strange, f"only in Chinese: {strange}"
    assert f"({name}.zh-CN.md)" in english and f"({name}.md)" in chinese
    shared = {span for span in named(english) if span.startswith("--")}
    assert len(shared & named(chinese)) >= len(shared) // 2


def words_and_numbers(svg: Path) -> tuple[list[str], np.ndarray]:
    text = re.sub(r' id="[^"]*"|#[\w-]*|data:[^"]*', "", svg.read_text(encoding="utf-8"))
    number = r"-?\d+(?:\.\d+)?"
    return re.findall(r">([^<>\n]+)<", text), np.array(re.findall(number, text), dtype=float)


def assert_same_picture(made: Path) -> None:
    words, numbers = words_and_numbers(made)
    shown_words, shown_numbers = words_and_numbers(ROOT / "docs/figures" / made.name)
    assert words == shown_words, made.name
    np.testing.assert_allclose(numbers, shown_numbers, atol=0.05, err_msg=made.name)


def test_figures_of_inspect_and_compare_are_made_by_their_command(tmp_path):
    load_script("update_figures").main([], tmp_path)
    made = list(tmp_path.glob("*.svg"))
    text = "".join((ROOT / document).read_text(encoding="utf-8") for document in DOCUMENTS)
    shown = set(re.findall(r"figures/((?:compare|inspect-[\w-]+|learn-[\w-]+)\.svg)", text))
    assert {p.name for p in made} == shown
    for path in made:
        assert_same_picture(path)


def test_figures_of_findings_are_made_by_their_command(tmp_path):
    load_script("update_numbers")
    load_script("update_findings").main(tmp_path)
    text = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    shown = re.findall(r"^!\[.+\]\(figures/(finding-[\w-]+\.svg)\)$", text, re.MULTILINE)
    assert {path.name for path in tmp_path.glob("*.svg")} == set(shown)
    for name in shown:
        assert_same_picture(tmp_path / name)


@pytest.mark.skipif(not LLAMA2XS.exists(), reason="the shared checkpoint is not here")
def test_the_figure_of_a_checkpoint_is_made_by_its_command(tmp_path):
    pytest.importorskip("transformers")
    asked = ["english-layers", str(LLAMA2XS), "Tom saw Lily run.", "Tom", "Lily"]
    load_script("update_figures").main(asked, tmp_path)
    words, _ = words_and_numbers(tmp_path / "english-layers.svg")
    assert words[1:] == words_and_numbers(ROOT / "docs/figures/english-layers.svg")[0][1:]
