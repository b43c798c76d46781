"""posenc with nothing but typer and rich: what works, and the line that names what is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def posenc(*arguments, **options):
    return run("from posenc.cli import main; main(sys.argv[1:])", *arguments, **options)


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


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("transformers", "hf", "inspect model"),
        ("transformers", "hf", "extend model --to 64"),
        ("transformers", "hf", "bench --only decode"),
        ("gguf", "doctor", "doctor m.gguf"),
        ("lm_eval", "lm-eval", "extend model --to 64 --out new --lm-eval piqa"),
        ("ray", "ray", "compare rope --task copy --out new --engine ray"),
        ("submitit", "slurm", "compare rope --task copy --out new --engine slurm"),
        ("s3fs", "storage", "compare rope --task copy --out new --engine ray --storage s3://a/b"),
        ("tensorboard", "tensorboard", "compare rope --task copy --out new --tensorboard"),
    ],
)
def test_a_missing_extra_is_one_line_before_anything_is_written(package, extra, command, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(64))
    save("llama", tmp_path / "model")
    before = sorted(tmp_path.iterdir())
    done = posenc(*command.split(), names=[package], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f'{package} is not installed: pip install "posenc[{extra}]"\n')
    assert done.stderr.count("\n") == 1 and sorted(tmp_path.iterdir()) == before


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
