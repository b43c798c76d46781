"""posenc with nothing but typer and rich: what works, and the line that names what is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doctor.threads import BASE

ROOT = Path(__file__).parents[1]
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
{rest}
"""
LIBRARIES = "torch numpy scipy matplotlib safetensors jaxtyping transformers gguf keras jax".split()
PLAIN = {**BASE, "rope_theta": 1e4}


def run(code, *arguments, names=LIBRARIES):
    """Python code in a process that has none of these packages."""
    text = BLOCKED.format(names=set(names), rest=code)
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def posenc(*arguments):
    return run("from posenc.cli import main; main(sys.argv[1:])", *arguments)


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
    assert json.loads(done.stdout) == json.loads((ROOT / "posenc/list.json").read_text("utf-8"))
    assert posenc("list", "rope").returncode == 2


def test_the_table_is_what_the_command_prints():
    from posenc.list import encodings

    rows, _ = encodings()
    own = [row for row in rows if not row["origin"]]
    assert own == json.loads((ROOT / "posenc/list.json").read_text("utf-8"))


@pytest.mark.parametrize("command", ["compare", "inspect rope", "bench", "list rope"])
def test_a_command_that_needs_more_says_so_in_one_line(command):
    done = posenc(*command.split())
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert 'is not installed: pip install "posenc[torch]"' in done.stderr


def test_a_gguf_file_names_its_extra(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    done = posenc("doctor", path)
    assert done.returncode == 2 and "pip install posenc[doctor]" in done.stderr


def test_a_class_names_its_extra():
    done = run("import posenc; posenc.RoPE")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: posenc.RoPE: ") and 'pip install "posenc[torch]"' in last


def test_what_another_package_lacks_is_not_blamed_on_an_extra():
    """A package that no extra brings keeps its own message."""
    done = run(
        "from posenc.lazy import hint\ntry: import rich\n"
        "except ModuleNotFoundError as e: print(repr(hint(e)))",
        names=["rich"],
    )
    assert done.stdout == "''\n"


def test_the_base_needs_typer_and_rich_only():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {d.partition(">")[0] for d in project["dependencies"]} == {"typer", "rich"}
    torch = {d.partition(">")[0] for d in project["optional-dependencies"]["torch"]}
    assert torch == {"torch", "jaxtyping", "numpy", "scipy", "matplotlib", "safetensors"}
