"""Interpreters that are none, hang, die, lie or need too much: one line each."""

import os
import stat
import sys
import time
from pathlib import Path

import pytest

from posenc.runtimes.ask import AskError, ask, interpreters, runtimes_of

QUESTION = [({"model_type": "llama"}, [16])]


def program(tmp_path: Path, text: str) -> Path:
    """An executable file that is named as an interpreter."""
    path = tmp_path / "python"
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def said(python: Path | str, **options) -> str:
    with pytest.raises(AskError) as error:
        ask(QUESTION, python, **options)
    message = str(error.value)
    assert "\n" not in message and message.startswith(f"--ask {python}: ")
    return message.removeprefix(f"--ask {python}: ")


def test_no_such_file():
    assert said("/nonexistent/python") == "expected a Python interpreter, found no program."


def test_a_folder(tmp_path):
    assert said(tmp_path) == "expected a Python interpreter, found no program."


def test_a_file_that_the_system_cannot_run(tmp_path):
    path = program(tmp_path, "\x7fELF nothing")
    assert said(path).startswith("expected a Python interpreter: ")


def test_another_program():
    assert said("/bin/echo").startswith("expected the answer of transformers, got '/")
    assert said("/bin/true").startswith("expected the answer of transformers, got nothing;")


def test_it_lacks_the_runtime(tmp_path):
    path = program(tmp_path, f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    assert said(path).startswith("it has no such runtime: ModuleNotFoundError")


def test_it_hangs_and_nothing_is_left(tmp_path):
    path = program(
        tmp_path, f"#!/bin/sh\nsleep 600 & echo $! > pid\necho $PWD > {tmp_path}/where\nsleep 600\n"
    )
    start = time.monotonic()
    assert said(path, seconds=1) == "no answer within 1 seconds."
    assert time.monotonic() - start < 60
    assert not Path((tmp_path / "where").read_text("utf-8").strip()).exists()


def test_it_dies(tmp_path):
    path = program(tmp_path, "#!/bin/sh\nkill -SEGV $$\n")
    assert said(path) == "ended by signal 11: it said nothing."


@pytest.mark.parametrize(
    "answer",
    [
        "hello",
        "{}",
        "[]",
        "null",
        "[" * 100000,
        '{"runtime": "vllm", "version": "1", "cases": [{"refuses": "no"}]}',
        '{"runtime": "transformers", "version": "1", "cases": []}',
        '{"runtime": "transformers", "version": "1", "cases": [3]}',
        '{"runtime": "transformers", "version": "1", "cases": [{"class": "A"}]}',
        '{"runtime": "transformers", "version": "1", "cases": [{"class": "A", "rotations": '
        '[{"module": "r", "kind": "", "inv_freq": [NaN], "multiplier": 1, "called": true}], '
        '"changes": false, "softmax_scales": [], "without_rotation": null, "interleaved": null, '
        '"admits": null}]}',
    ],
)
def test_it_prints_other_things(tmp_path, answer):
    (tmp_path / "answer").write_text(answer, encoding="utf-8")
    path = program(tmp_path, f"#!/bin/sh\ncat > /dev/null\ncat {tmp_path}/answer\n")
    assert said(path).startswith("expected the answer of transformers, got '")


def test_more_memory_than_it_is_given(fresh_process):
    said = r"more memory than a probe is given|ended|failed to map"
    with pytest.raises(AskError, match=said):
        ask(QUESTION, memory=64 * 2**20)


def test_code_of_a_folder_is_never_run(tmp_path, monkeypatch):
    assert_code_of_a_stranger_is_not_run(tmp_path, monkeypatch)


@pytest.mark.slow
def test_an_interpreter_of_its_own_runs_no_code_of_a_folder(tmp_path, monkeypatch, fresh_process):
    (tmp_path / "transformers.py").write_text("raise SystemExit(7)")
    assert_code_of_a_stranger_is_not_run(tmp_path, monkeypatch)


def assert_code_of_a_stranger_is_not_run(tmp_path, monkeypatch):
    (tmp_path / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    own = {"AutoConfig": "modeling_own.Config", "AutoModel": "modeling_own.Model"}
    stranger, llama = ask([({"model_type": "of_a_stranger", "auto_map": own}, [16]), *QUESTION])
    assert "custom code" in stranger.refusal or "trust_remote_code" in stranger.refusal
    assert not (tmp_path / "ran").exists()
    assert llama.model == "LlamaForCausalLM"


def test_a_module_beside_the_user_is_not_imported(tmp_path, monkeypatch):
    """The probe is run in an empty folder, so a torch.py of a stranger's folder stays there."""
    (tmp_path / "transformers.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    path = program(tmp_path, f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    assert said(path).startswith("it has no such runtime: ModuleNotFoundError")


def test_another_interpreter_takes_no_packages_from_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = program(tmp_path, '#!/bin/sh\necho "[$PYTHONPATH]"\n')
    assert "got '[]'" in said(path)


def test_an_unknown_runtime():
    with pytest.raises(ValueError, match="no probe asks 'keras'; expected one of transformers"):
        ask(QUESTION, runtime="keras")


@pytest.mark.parametrize(
    ("about", "runtime", "words"),
    [
        (Path("a.gguf"), "transformers", "transformers is asked about a config.json's object"),
        ({"model_type": "llama"}, "llama.cpp", "llama.cpp is asked about the Path of a GGUF file"),
    ],
)
def test_a_runtime_is_asked_only_about_what_it_reads(about, runtime, words):
    with pytest.raises(ValueError, match=words):
        ask([(about, [16])], runtime=runtime)


def named(tmp_path: Path, *packages: str) -> Path:
    """An interpreter that can import packages of these names, all of which are empty, and of which
    each is of version 1.2."""
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit(7)")
        about = tmp_path / f"{package}-1.2.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Name: {package.replace('_', '-')}\nVersion: 1.2\n")
    return program(tmp_path, f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S -P "$@"\n')


def test_the_runtimes_of_an_interpreter_are_found_without_an_import(tmp_path):
    python = named(tmp_path, "transformers", "torch", "mlx_lm", "mlx")
    assert runtimes_of(python) == {"transformers": "1.2", "mlx-lm": "1.2"}


def test_a_runtime_without_what_its_probe_imports_is_none(tmp_path):
    assert runtimes_of(named(tmp_path, "transformers", "mlx_lm", "mlx")) == {"mlx-lm": "1.2"}


def test_an_interpreter_without_runtimes_has_none(tmp_path):
    assert runtimes_of(named(tmp_path)) == {}


@pytest.mark.parametrize("answer", ["hello", "[1]", "3", "[" * 100000])
def test_what_is_no_interpreter_has_no_runtimes(tmp_path, answer):
    (tmp_path / "answer").write_text(answer, encoding="utf-8")
    path = program(tmp_path, f"#!/bin/sh\ncat > /dev/null\ncat {tmp_path}/answer\n")
    with pytest.raises(AskError, match="expected the answer of a Python interpreter, got '"):
        runtimes_of(path)


def test_there_is_a_probe_for_each_named_runtime():
    folder = Path(interpreters.__file__).with_name("probes")
    assert all((folder / probe.file).is_file() for probe in interpreters.PROBES.values())
    assert os.access(folder, os.R_OK)


def test_one_without_a_group_of_its_own_is_not_waited_for(tmp_path, monkeypatch):
    def has_no_group(_process_group, _signal):
        raise ProcessLookupError

    monkeypatch.setattr(interpreters.os, "killpg", has_no_group)
    path = program(tmp_path, "#!/bin/sh\nexec sleep 20\n")
    start = time.monotonic()
    assert said(path, seconds=1) == "no answer within 1 seconds."
    assert time.monotonic() - start < 15
