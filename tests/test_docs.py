"""What the documents promise: their code runs, their tables are current, their links lead
somewhere."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import posenc
from posenc.command_line.main import COMMANDS
from posenc.encodings.registry import parse
from posenc.testing import CHECKS, maker, verdicts
from posenc.testing.contract import every_check
from tests.texts import prose

ROOT = Path(__file__).parents[1]
READMES = ("README.md", "README.zh-CN.md")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
GRAMMAR = (ROOT / "docs" / "grammar.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.prose
FENCED = re.DOTALL | re.MULTILINE
DOCUMENTS = sorted(
    p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
)


def blocks(document: str, info: str) -> list[str]:
    """The fenced blocks of a document whose info string is `info`."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{re.escape(info)}\n(.*?)^```$", text, flags=FENCED)


@pytest.mark.parametrize("kind", ["", ".zh-CN"])
def test_the_pages_of_the_start_run(kind):
    document = f"docs/start/five-minutes{kind}.md"
    code = "".join(blocks(document, "python"))
    assert code.count("\n") >= 20
    exec(compile(code, document, "exec"), {})


@pytest.mark.parametrize("document", READMES)
def test_readme_code_runs(document, capsys):
    code = "".join(blocks(document, "python"))
    assert code.count("\n") >= 10
    exec(compile(code, document, "exec"), {})
    assert "torch.Size([2, 100, 256])" in capsys.readouterr().out


def test_both_pages_of_articles_show_the_same_code():
    both = [(ROOT / f"docs/articles{kind}.md").read_text("utf-8") for kind in ("", ".zh-CN")]
    rows, pictures = (
        [re.findall(pattern, text, FENCED) for text in both]
        for pattern in (r"^\| [^|\n]+ \| (`.+?`) \|$", r"^```python\n(.*?)^```$")
    )
    assert len(rows[0]) == 16 and rows[0] == rows[1]
    assert len(pictures[0]) == 3 and pictures[0] == pictures[1]


def bare(code: str) -> str:
    """The code without its comments."""
    return re.sub(r"\s*#.*", "", code)


def test_both_readmes_show_the_same_code():
    def without_comments(document: str) -> list[str]:
        return [bare(block) for block in blocks(document, "python")]

    assert without_comments("README.md") == without_comments("README.zh-CN.md")
    assert blocks("docs/README.md", "python") == blocks("README.md", "python")  # the site's front


@pytest.mark.parametrize("document", READMES)
def test_the_readmes_own_encoding_is_compared_in_one_command(document, tmp_path):
    text = (ROOT / document).read_text(encoding="utf-8")
    assert "\nposenc compare rope ./my_encoding.py:LogALiBi " in text
    (source,) = blocks(document, "python file=my_encoding.py")
    (other,) = blocks(next(d for d in READMES if d != document), "python file=my_encoding.py")
    assert bare(source) == bare(other) and source.count("\n") <= 20
    if document == "README.zh-CN.md":  # the same code: run once
        return
    (tmp_path / "my_encoding.py").write_text(source, encoding="utf-8")
    (tmp_path / "text.txt").write_bytes(prose(10_500))
    tiny = "--train-length 16 --test-lengths 16 --seeds 1 --steps 2 --batch 2 --width 32 --layers 1"
    more = ["--heads", "2", "--workers", "1", "--text", "text.txt"]
    command = ["-m", "posenc", "compare", "rope", "./my_encoding.py:LogALiBi", *tiny.split(), *more]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "my_encoding.py:LogALiBi" in done.stdout


def test_the_readmes_own_encoding_passes_the_contract(tmp_path):
    (source,) = blocks("README.md", "python file=my_encoding.py")
    (tmp_path / "my_encoding.py").write_text(source, encoding="utf-8")
    name = f"'{tmp_path}/my_encoding.py':LogALiBi"
    found = list(verdicts(maker(name), every_check()))
    assert len(found) == len(every_check())
    assert [verdict for verdict in found if verdict.failure is not None] == []


@pytest.mark.parametrize("row", [*re.findall(r"^\| `([^`]+)` \|", GRAMMAR, re.MULTILINE)])
def test_each_text_of_the_grammars_page_is_read(row):
    assert parse(row).parts


LEFT_OUT = ".git", ".venv*", ".*_cache", "__pycache__", "runs"
TUTORIALS = {
    "CONTRIBUTING.md": ("square_root", "quadratic"),
    "docs/your-own-encoding.md": ("carope", "fading_match"),
}
"""The encodings that a document adds."""


def follow(text: str, copy: Path) -> None:
    """Do in a copy of the repository what a document says: write its files, lines and ends."""
    for path, source in re.findall(r"^```python file=(\S+)\n(.*?)^```$", text, FENCED):
        (copy / path).write_text(source, encoding="utf-8")
    for path, line in re.findall(r"^```python line=(\S+)\n(.*?)^```$", text, FENCED):
        before = (copy / path).read_text(encoding="utf-8")
        if path.endswith("scalings/registry.py"):  # a list of imports
            (copy / path).write_text(before + line, encoding="utf-8")
            continue
        head = "_ENTRIES: dict[str, Entry] = {\n"
        assert before.count(head) == 1
        (copy / path).write_text(before.replace(head, f"{head}    {line}"), encoding="utf-8")
    for path, addition in re.findall(r"^```bibtex end=(\S+)\n(.*?)^```$", text, FENCED):
        before = (copy / path).read_text(encoding="utf-8")
        (copy / path).write_text(before + addition, encoding="utf-8")


def run_in(copy: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=copy,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(copy)},
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(False, marks=pytest.mark.slow),
        pytest.param(True, marks=pytest.mark.nightly),
    ],
)
def test_what_the_tutorials_add_passes_make_test(tmp_path, whole):
    """What `make test` runs for the encodings, or all of it; and the linter."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    added = [name for names in TUTORIALS.values() for name in names]
    for document in TUTORIALS:
        follow((ROOT / document).read_text(encoding="utf-8"), copy)
    run_in(copy, "docs.scripts.update_readme")  # make readme
    only = [] if whole else ["--encoding", ",".join(added)]
    (makefile,) = re.findall(r"^test: .*\n.* -m \"(.*)\"$", MAKEFILE, re.MULTILINE)
    said = run_in(copy, "pytest", "-q", "-m", makefile, "-p", "no:cacheprovider", *only)
    (passed,) = re.findall(r"(\d+) passed", said)
    assert int(passed) > len(added) * len(CHECKS)
    run_in(copy, "ruff", "check", "posenc", "tests")


def test_a_mistake_in_what_contributing_adds_is_seen(monkeypatch):
    name, scope = "posenc.encodings.scores.square_root", {}
    (source,) = blocks("CONTRIBUTING.md", f"python file={name.replace('.', '/')}.py")
    where = "tests/encodings/scores/test_square_root.py"
    (test,) = blocks("CONTRIBUTING.md", f"python file={where}")
    assert source.count("abs().sqrt()") == 1
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    exec(source.replace("abs().sqrt()", "abs()"), vars(sys.modules[name]))
    exec(test, scope)
    with pytest.raises(AssertionError):
        scope["test_square_root_bias_equals_the_formula"]()


@pytest.mark.parametrize("document", TUTORIALS)
def test_the_tutorials_examples_are_short(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    files = re.findall(r"^```python file=(posenc/\S+)\n(.*?)^```$", text, FENCED)
    assert len(files) == len(TUTORIALS[document])
    for path, source in files:
        assert source.count("\n") <= 70, path


@pytest.mark.parametrize("document", READMES)
def test_the_readmes_two_commands_are_one_block(document):
    commands = [
        [line.partition("#")[0].strip() for line in block.splitlines()]
        for block in blocks(document, "sh")
    ]
    assert ["make compare", "make test"] in commands


@pytest.mark.parametrize("document", READMES)
def test_the_readmes_first_command_shows_what_its_picture_shows(document, tmp_path):
    install, doctor = blocks(document, "sh")[0].splitlines()
    assert install.startswith("pip install . ")
    words = doctor.partition("#")[0].split()
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1 and "E PD001" in done.stdout, done.stderr
    picture = (ROOT / "docs/figures/doctor.svg").read_text(encoding="utf-8")
    assert " ".join(words) in re.sub(r"<[^>]*>|&#160;", " ", picture).replace("  ", " ")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_named_in_documents_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"^make ([\w-]+)|`make ([\w-]+)", text, flags=re.MULTILINE):
        assert f"\n{''.join(target)}:" in MAKEFILE, target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_named_in_documents_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"^(?:\.venv/bin/)?posenc ([a-z]+)|`posenc ([a-z]+)", text, re.MULTILINE)
    for first, second in named:
        assert (first or second) in COMMANDS, f"posenc {first or second}"


def test_pre_commit_uses_the_pinned_versions():
    config = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    (revision,) = re.findall(r"ruff-pre-commit\s+rev: v(\S+)", config)
    assert f"ruff=={revision}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" in project["project"]["dynamic"] and "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "posenc/__init__.py"
    for name, pattern in (
        ("CITATION.cff", r"^version: (.+)$"),
        ("CHANGELOG.md", r"^## \[(\d.*?)\]"),
    ):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.findall(pattern, text, re.MULTILINE)[0] == posenc.__version__, name


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name]


def test_nothing_names_a_machine():
    """No path of one machine, no address of one package index."""
    forbidden = re.compile("/(root|home|Users|work)/|--(extra-)?index-url")
    written = {".py", ".md", ".toml", ".txt", ".sh", ".json", ".yaml", ".csv"}
    for path in tracked_files():
        if path.is_file() and path.suffix in written:
            found = forbidden.search(path.read_text(encoding="utf-8", errors="replace"))
            assert not found, f"{path.relative_to(ROOT)}: {found and found.group()}"


def test_scripts_are_executable():
    for script in (ROOT / ".ci/run", *(ROOT / "experiments").glob("*.sh")):
        assert os.access(script, os.X_OK), script
