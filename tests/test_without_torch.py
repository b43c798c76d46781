"""posenc with nothing but typer and rich: what works, and the line that names what is missing."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from posenc.lazy import EXTRA_BY_PACKAGE, OLDEST_TORCH
from tests.doctor.test_gguf_hostile import SOUND, header, tensor
from tests.doctor.threads import BASE
from tests.hf_models import save

ROOT = Path(__file__).parents[1]
BLOCKED = "import sys; sys.modules |= dict.fromkeys({names})\n{rest}"
LIBRARIES = "torch numpy scipy matplotlib safetensors jaxtyping transformers gguf keras jax".split()
PLAIN = {**BASE, "rope_theta": 1e4}


def run(code, *arguments, names=LIBRARIES, cwd=ROOT):
    """Python code in a process that has none of these packages."""
    text = BLOCKED.format(names=list(names), rest=code)
    command = [sys.executable, "-c", text, *map(str, arguments)]
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=path)


MAIN = "from posenc.command_line.main import main; main(sys.argv[1:])"


def posenc(*arguments, **options):
    return run(MAIN, *arguments, **options)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PLAIN))
    return path


def test_the_doctor_judges_explains_compares_and_fixes(config, tmp_path):
    done = posenc("doctor", config)
    assert (done.returncode, done.stderr) == (0, "") and "Nothing to complain" in done.stdout
    assert posenc("doctor", "--explain", "PD001").returncode == 0
    assert posenc("doctor", config, config).returncode == 0
    assert posenc("doctor", config, "--overrides", "vllm").stdout.startswith("--hf-overrides")
    broken = {**PLAIN, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    del broken["rope_theta"]
    config.write_text(json.dumps(broken))
    assert posenc("doctor", config).returncode == 1
    done = posenc("doctor", config, "--fix", "--out", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "new/config.json").read_text())["rope_theta"] == 5e5


def test_the_list_comes_from_a_table():
    done = posenc("list", "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    rows = json.loads((ROOT / "posenc/list.json").read_text("utf-8"))
    assert json.loads(done.stdout)["encodings"] == rows
    assert posenc("list", "rope").returncode == 2


def test_the_table_is_what_the_command_prints():
    from posenc.list import build_rows

    rows, _ = build_rows()
    own = [row for row in rows if not row["origin"]]
    assert own == json.loads((ROOT / "posenc/list.json").read_text("utf-8"))


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("compare", "hf"),
        ("report runs", "hf"),
        ("inspect encoding rope", "hf"),
        ("inspect model model", "hf"),
        ("extend model --to 64", "hf"),
        ("bench", "torch"),
        ("list rope", "torch"),
        ("doctor model --layout --text text", "hf"),
        ("doctor model --convert-layout interleaved --out new", "doctor"),
    ],
)
def test_a_command_that_needs_more_names_all_that_it_needs_in_one_line(command, extra, tmp_path):
    """One extra is enough, although many packages are missing."""
    (tmp_path / "text").write_text("words")
    save("llama", tmp_path / "model")
    before = sorted(tmp_path.iterdir())
    done = posenc(*command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f' is not installed: pip install "posenc[{extra}]"\n')
    assert done.stderr.count("\n") == 1 and sorted(tmp_path.iterdir()) == before


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("transformers", "hf", "inspect model model"),
        ("transformers", "hf", "extend model --to 64"),
        ("transformers", "hf", "bench --only decode"),
        ("scipy", "hf", "compare rope --task copy --out new"),
        ("matplotlib", "hf", "inspect encoding rope"),
        ("ray", "cluster", "compare rope --task copy --out new --engine ray"),
        ("submitit", "cluster", "compare rope --task copy --out new --engine slurm"),
        ("s3fs", "cluster", "compare rope --task copy --out new --engine ray --storage s3://a/b"),
        ("tensorboard", "cluster", "compare rope --task copy --out new --tensorboard"),
    ],
)
def test_a_missing_extra_is_one_line_before_anything_is_written(package, extra, command, tmp_path):
    save("llama", tmp_path / "model")
    before = sorted(tmp_path.iterdir())
    done = posenc(*command.split(), names=[package], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f'{package} is not installed: pip install "posenc[{extra}]"\n')
    assert done.stderr.count("\n") == 1 and sorted(tmp_path.iterdir()) == before


def test_a_gguf_file_needs_no_extra(tmp_path):
    weights = tensor("token_embd.weight", 1) + bytes(64)
    (tmp_path / "m.gguf").write_bytes(header(SOUND, 1, tail=weights))
    done = posenc("doctor", "m.gguf", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "Nothing to complain about" in done.stdout


def test_a_class_names_its_extra():
    done = run("import posenc; posenc.RoPE")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: posenc.RoPE: ") and 'pip install "posenc[torch]"' in last


OLD = """
import importlib.metadata as metadata
known = metadata.version
metadata.version = lambda name: {version!r} if name == "torch" else known(name)
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("version", ["2.5.1+cu124", "1.13.0", "2.6.0", "10.0.1"])
def test_an_old_torch_is_one_line(version, config):
    said = f"posenc needs torch 2.6 or newer, found {version}: "
    said += 'pip install --upgrade "posenc[torch]"'
    command = OLD.format(version=version) + MAIN
    done = run(command, "list", "rope", names=[])
    if version in ("2.6.0", "10.0.1"):
        assert (done.returncode, done.stderr) == (0, "")
        return
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"posenc: {said}\n")
    assert run(command, "doctor", config, "--ask", "none", names=[]).returncode == 0
    done = run(OLD.format(version=version) + "import posenc; posenc.RoPE", names=[])
    assert done.stderr.strip().splitlines()[-1] == f"ImportError: {said}"


def test_versions_are_those_of_what_is_installed():
    lines = posenc("--versions", names=[]).stdout.splitlines()
    assert lines[0].startswith("posenc ") and lines[-1] == "python " + sys.version.split()[0]
    assert f"torch {metadata.version('torch')}" in lines
    pretend = OLD.format(version="") + MAIN
    shown = run(pretend, "--versions", names=[]).stdout.splitlines()
    assert [line for line in lines if not line.startswith("torch ")] == shown


def test_what_another_package_lacks_is_not_blamed_on_an_extra():
    """A package that no extra brings keeps its own message."""
    done = run(
        "from posenc.lazy import install_hint\ntry: import rich\n"
        "except ModuleNotFoundError as e: print(repr(install_hint(e)))",
        names=["rich"],
    )
    assert done.stdout == "''\n"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def brought(extra: str) -> set[str]:
    """The packages that an extra brings, with those of the extras that it is built on."""
    found = set()
    for each in PROJECT["optional-dependencies"][extra]:
        inner = re.fullmatch(r"posenc\[(.*)\]", each)
        names = inner[1].split(",") if inner else []
        found |= set().union(*map(brought, names)) if inner else {re.split(r"[\[>=]", each)[0]}
    return found


def test_the_base_needs_typer_and_rich_only():
    assert {d.partition(">")[0] for d in PROJECT["dependencies"]} == {"typer", "rich"}
    assert brought("doctor") == {"numpy"}
    assert brought("torch") == {"torch", "jaxtyping", "numpy", "safetensors"}
    assert brought("hf") == brought("torch") | {"scipy", "matplotlib", "transformers"}
    assert brought("cluster") == brought("hf") | {"ray", "submitit", "s3fs", "tensorboard"}


def test_each_package_comes_with_the_extra_that_its_hint_names():
    for package, extra in EXTRA_BY_PACKAGE.items():
        assert package.replace("_", "-") in brought(extra)
    assert {package.replace("_", "-") for package in EXTRA_BY_PACKAGE} == brought("all")


def test_the_oldest_torch_is_that_of_the_extra():
    (torch,) = [d for d in PROJECT["optional-dependencies"]["torch"] if d.startswith("torch")]
    assert torch == f"torch>={'.'.join(map(str, OLDEST_TORCH))}"


PAGES = ("README.md", "README.zh-CN.md", "docs/start/install.md", "docs/start/install.zh-CN.md")


@pytest.mark.prose
@pytest.mark.parametrize("page", PAGES)
def test_the_pages_name_the_floors(page):
    text = (ROOT / page).read_text("utf-8").casefold()
    extras = PROJECT["optional-dependencies"]
    floors = {
        name: found.removeprefix(f"{name}>=")
        for extra, name in (("torch", "torch"), ("hf", "transformers"))
        for found in extras[extra]
        if found.startswith(f"{name}>=")
    }
    python = PROJECT["requires-python"].removeprefix(">=")
    names = [f"{name} {oldest}" for name, oldest in {"python": python, **floors}.items()]
    paragraphs = text.split("\n\n")
    assert [paragraph for paragraph in paragraphs if all(name in paragraph for name in names)]


@pytest.mark.prose
def test_documents_install_what_is_published():
    """From a clone, until docs/scripts/update_install.py is told that the index has it."""
    from docs.scripts import update_install

    wrong = [
        p.name
        for p in update_install.documents()
        if update_install.written(t := p.read_text("utf-8")) != t
    ]
    assert wrong == []


def test_one_variable_turns_the_commands(monkeypatch):
    from docs.scripts import update_install

    text = '`pip install .`, `pip install -U ".[torch]"`, ".[hf,keras]", pip install torch\n'
    turned = text.replace("`pip install .`", "`pip install posenc`").replace('".[', '"posenc[')
    monkeypatch.setattr(update_install, "NAME", "posenc")
    assert update_install.written(text) == turned
    monkeypatch.setattr(update_install, "NAME", ".")
    assert update_install.written(turned) == text
