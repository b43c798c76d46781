"""What is named by --ask and gives no answer: one line, and what posenc knows beside it."""

import json
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from posenc.runtimes.ask import interpreters
from tests.doctor.threads import BASE
from tests.runtimes.ask.probes.other_runtimes import plant

SIMPLE = {**BASE, "rope_theta": 10000.0}
STRANGER = {"AutoConfig": "modeling_own.Config", "AutoModel": "modeling_own.Model"}
LACKS = f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIMPLE), "utf-8")
    return path


def program(folder: Path, text: str) -> Path:
    """An executable file that is named as an interpreter."""
    path = folder / "python"
    path.write_text(text, "utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def about_ask(answer: tuple[int, str, str]) -> str:
    """The one line about --ask of an answer that is complete without it."""
    code, out, err = answer
    assert (code, err) == (0, "") and out.count("known, ") == 6
    (line,) = [line for line in out.splitlines() if "What posenc knows is shown." in line]
    return line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\x7fELF nothing", "expected a Python interpreter: "),
        ("#!/bin/sh\nsleep 600\n", "no answer within 1 seconds."),
        ("#!/bin/sh\ncat >/dev/null; echo hello\n", "expected the answer of "),
        ("#!/bin/sh\nkill -SEGV $$\n", "ended by signal 11: it said nothing."),
        ("#!/bin/sh\nprintf 'one\\ntwo\\n' >&2; exit 3\n", "ended with 3: two."),
        (LACKS, "it has no such runtime: "),
    ],
    ids=["is none", "hangs", "prints other things", "dies", "ends with words", "lacks it"],
)
@pytest.mark.parametrize("named", ["", "mlx-lm="], ids=["all that it has", "one runtime"])
def test_one_line_and_what_is_known(call, config, tmp_path, monkeypatch, named, text, said):
    monkeypatch.setattr(interpreters, "SECONDS_TO_START", 1.0)
    probe = interpreters.PROBES["mlx-lm"]
    monkeypatch.setitem(interpreters.PROBES, "mlx-lm", replace(probe, seconds=1.0))
    python = program(tmp_path, text)
    line = about_ask(call("doctor", config, "--ask", f"{named}{python}"))
    assert line.startswith(f"--ask {python}: {said}")


@pytest.mark.parametrize("place", ["nowhere", "."], ids=["no file", "a folder"])
def test_what_is_no_program(call, config, tmp_path, place):
    line = about_ask(call("doctor", config, "--ask", tmp_path / place))
    assert "expected a Python interpreter, found no program." in line


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("keras=python", "--ask keras=python: 'keras' is none of transformers, vllm"),
        ("vllm=", "--ask vllm=: the interpreter is missing"),
    ],
)
def test_what_names_no_runtime_or_no_interpreter(call, config, value, said):
    code, out, err = call("doctor", config, "--ask", value)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


MEASURES = "        return measure_model(model, config, case"


@pytest.mark.asks
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("raise MemoryError", "it needs more memory than a probe is given. What"),
        ("raise ValueError('no.')", "ValueError: no. What"),
    ],
    ids=["over its memory", "not measured"],
)
def test_a_probe_that_gives_no_answer(call, config, tmp_path, monkeypatch, mistake, said):
    plant(
        monkeypatch, tmp_path, "transformers_probe.py", (MEASURES, f"        {mistake}\n{MEASURES}")
    )
    assert said in about_ask(call("doctor", config))


@pytest.mark.asks
def test_a_probe_over_its_time(call, config, tmp_path, monkeypatch, fresh_process):
    probe = interpreters.PROBES["transformers"]
    monkeypatch.setitem(interpreters.PROBES, "transformers", replace(probe, seconds=1.0))
    assert "no answer within 1 seconds." in about_ask(call("doctor", config))


@pytest.mark.asks
def test_code_of_a_stranger_is_never_run(call, config, tmp_path):
    (tmp_path / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", "utf-8")
    own = {**SIMPLE, "model_type": "of_a_stranger", "auto_map": STRANGER}
    config.write_text(json.dumps(own), "utf-8")
    code, out, _ = call("doctor", config)
    assert code == 3 and "refuses: ValueError" in out and "custom code that auto_map names" in out
    assert not (tmp_path / "ran").exists()
