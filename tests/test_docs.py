"""What the documents promise: their code runs, their tables are current, their links lead
somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest

from posenc import create, registry
from posenc.cli import COMMANDS
from tests.checks import CHECKS

ROOT = Path(__file__).parents[1]
READMES = ("README.md", "README.zh-CN.md")
DOCUMENTS = sorted(
    p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
)


def blocks(document: str, info: str) -> list[str]:
    """The fenced blocks of a document whose info string is `info`."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{re.escape(info)}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", READMES)
def test_readme_code_runs(document, capsys):
    code = "".join(blocks(document, "python"))
    assert code.count("\n") >= 10
    exec(compile(code, document, "exec"), {})
    assert "torch.Size([2, 100, 256])" in capsys.readouterr().out


def test_both_readmes_show_the_same_code():
    def without_comments(document: str) -> list[str]:
        return [re.sub(r"\s*#.*", "", block) for block in blocks(document, "python")]

    assert without_comments("README.md") == without_comments("README.zh-CN.md")


@pytest.fixture
def worked_example(monkeypatch):
    """CONTRIBUTING's encoding, as if its file and its registry line were in place."""
    name = "posenc.scores.square_root"
    module = types.ModuleType(name)
    (source,) = blocks("CONTRIBUTING.md", "python file=posenc/scores/square_root.py")
    exec(compile(source, "square_root.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    (line,) = blocks("CONTRIBUTING.md", "python line=posenc/registry.py")
    for key, entry in eval("{" + line + "}", {"Entry": registry.Entry}).items():
        monkeypatch.setitem(registry._ENTRIES, key, entry)
    return source


def test_worked_example_is_short(worked_example):
    assert worked_example.count("\n") <= 40


@pytest.mark.parametrize("check", CHECKS)
def test_worked_example_passes_the_contract(worked_example, check):
    CHECKS[check](partial(create, "square_root"))


def test_worked_example_passes_its_own_test(worked_example):
    (source,) = blocks("CONTRIBUTING.md", "python file=tests/test_square_root.py")
    scope: dict = {}
    exec(compile(source, "test_square_root.py", "exec"), scope)
    scope["test_square_root_bias_equals_the_formula"]()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_named_in_documents_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([\w-]+)|`make ([\w-]+)", text, flags=re.MULTILINE):
        assert f"\n{''.join(target)}:" in makefile, target


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
    import posenc

    for name, pattern in (
        ("pyproject.toml", r'^version = "(.+)"$'),
        ("CITATION.cff", r"^version: (.+)$"),
        ("CHANGELOG.md", r"^## (\d\S*)"),
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
