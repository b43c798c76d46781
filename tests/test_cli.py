"""The command line: what it prints where, and one clear line with the right code for bad input."""

import csv
import errno
import json
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import pytest
import typer
from rich.text import Text

import posenc
from posenc.command_line import main as cli
from posenc.command_line.options import PANELS, option
from posenc.compare import run_study as compare
from posenc.compare.engines import run_trials
from posenc.compare.results import Study, TrialResult
from posenc.encodings import registry
from posenc.files.atomic import write_atomically
from posenc.files.folders import locked
from posenc.files.sealed_json import seal
from tests.hf_models import save
from tests.texts import prose

TINY = (
    "--train-length 16 --test-lengths 32 --seeds 1 --steps 6 --batch 2 --width 32 --layers 2 "
    "--heads 2 --workers 1"
).split()
NAME = "<b>书 & book</b>.txt"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / NAME.replace("/", "∕")
    lines = (f"<script>alert({i})</script> 道可道，非常道。\n" for i in range(200))
    path.write_bytes("".join(lines).encode())
    return path


def complains(answer, code=2):
    """The one line on stderr; asserts that there is nothing else."""
    got, out, err = answer
    assert got == code, err
    assert out == ""
    assert err.startswith("posenc: ") and err.count("\n") == 1
    return err


def without_notes(answer):
    """The answer of a command that had begun: its notes on the study stand before the error."""
    got, out, err = answer
    lines = err.splitlines(keepends=True)
    return got, out, "".join(line for line in lines if not line.startswith("Note: "))


def test_help_names_every_command_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom posenc.command_line import main as cli\ntry:\n cli.main(['--help'])\n"
        "except SystemExit as stop:\n assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert all(name in run.stdout for name in cli.COMMANDS)


def test_a_command_imports_no_other():
    code = (
        "import sys\nfrom posenc.command_line import main as cli\n"
        "try:\n cli.main(['list', '--json'])\n"
        "except SystemExit as stop:\n assert not stop.code\n"
        "commands = {path.partition(':')[0] for path in cli.COMMANDS.values()}\n"
        "assert commands & set(sys.modules) == {'posenc.list'}\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def leaves(group=None, before=()) -> dict[tuple[str, ...], object]:
    """The commands, those of a group by two words."""
    found = {}
    for name, command in (group or cli.app()).commands.items():
        if hasattr(command, "commands"):
            found |= leaves(command, (*before, name))
        else:
            found[(*before, name)] = command
    return found


@pytest.mark.parametrize("command", sorted(leaves()), ids=" ".join)
def test_help_has_every_option_whole_and_in_a_panel_at_80_columns(call, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = call(*command, "-h")
    assert (code, err) == (0, "") and "Usage: " in out and "…" not in out
    assert {len(line) for line in out.splitlines()} <= {0, 80}
    assert "<list" not in out and "<path>" not in out and "default: (none)" not in out
    paragraphs = out.partition("╭")[0].split("\n" + 80 * " " + "\n")
    broken = [line.rstrip() for each in paragraphs for line in each.splitlines()[:-1]]
    assert all(len(line) > 60 for line in broken if line)
    options = [p for p in leaves()[command].params if p.param_type_name == "option"]
    assert options and all(p.rich_help_panel in PANELS for p in options)
    arguments = [p for p in leaves()[command].params if p.param_type_name == "argument"]
    assert all(p.help.split()[0] in out for p in arguments)
    assert all(name in out for p in options for name in p.opts)


def test_arguments_are_named_in_capitals_and_in_the_singular():
    commands = leaves().items()
    params = [(" ".join(name), param) for name, command in commands for param in command.params]
    found = {name: p.metavar for name, p in params if p.param_type_name == "argument"}
    assert found == {
        "list": "NAME",
        "compare": "ENCODING",
        "report": "RUN",
        "judge": "TABLE",
        "inspect encoding": "NAME",
        "inspect model": "FOLDER",
        "inspect module": "PATH",
        "inspect contract": "NAME",
        "extend": "MODEL",
        "doctor": "PATH",
        "explore": "MODEL",
    }


def test_help_keeps_brackets():
    """Rich would take them for a style, and leave them out."""

    def planted(name: Annotated[str, option("Needs posenc[hf].")] = "") -> None:
        pass

    app = typer.Typer(add_completion=False)
    app.command()(planted)
    (parameter,) = typer.main.get_command(app).params
    cli._sort_options([parameter], planted)
    assert Text.from_markup(parameter.help).plain == "Needs posenc[hf]."


def test_tables_are_as_wide_as_columns_says(call, monkeypatch):
    for width in (80, 130):
        monkeypatch.setenv("COLUMNS", str(width))
        assert 0.7 * width < max(map(len, call("list")[1].splitlines())) <= width


def test_compare_writes_report_table_and_results_and_then_skips(call, text, tmp_path):
    out = tmp_path / "out"
    command = ["compare", "learned", "--text", text, "--out", out, *TINY]
    code, shown, told = call(*command)
    assert code == 0, told
    assert "cannot" in shown and "Too early to tell: learned (" in shown
    assert "[1] learned: it has 16 positions" in shown
    study = Study.from_json((out / "study.json").read_text(encoding="utf-8"))
    (result,) = study.finished
    assert result.spec["max_positions"] == "16"
    assert study.corpus.name == text.name
    rows = list(csv.DictReader((out / "results.csv").read_text(encoding="utf-8").splitlines()))
    scores = {int(r["at"]): r for r in rows if r["measure"] == "by_length"}
    assert float(scores[16]["bits_per_byte"]) == result.by_length[0].bits_per_byte
    assert scores[32]["bits_per_byte"] == "" and "16 positions" in scores[32]["note"]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "<b>书" not in page and "书 &amp; book" in page
    before = (out / result.config.folder / "result.json").stat().st_mtime_ns
    code, again, told = call(*command)
    assert (code, again) == (0, shown)
    assert "step" not in told.split("results in")[1]
    assert (out / result.config.folder / "result.json").stat().st_mtime_ns == before


def test_json_of_compare_is_alone_on_stdout(call, text, tmp_path, monkeypatch):
    monkeypatch.setattr(run_trials, "run_trials", lambda *arguments: None)
    out = tmp_path / "out"
    code, shown, _ = call("compare", "rope", "--text", text, "--out", out, *TINY, "--json")
    assert code == 0 and json.loads(shown)["trials"]["planned"] == 1


def test_default_folder_is_below_runs_and_the_same_each_time(call, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_trials, "run_trials", lambda *arguments: None)
    for seeds in ("1", "1", "2"):
        assert call("compare", "rope", "--text", text, *TINY, "--seeds", seeds)[0] == 0
    assert len(list((tmp_path / "runs").glob("*/report.html"))) == 2


def test_report_of_a_half_finished_study_says_what_is_missing(call, text, tmp_path, monkeypatch):
    monkeypatch.setattr(run_trials, "run_trials", lambda *arguments: None)
    out = tmp_path / "out"
    assert call("compare", "rope", "t5", "--text", text, "--out", out, *TINY)[0] == 0
    (out / "report.html").unlink()
    code, shown, _ = call("report", out)
    assert code == 0
    assert "0 of 2 trials have run. Missing: rope seed 0, t5 seed 0. " in shown
    assert "t5 seed 0" in (out / "report.html").read_text(encoding="utf-8")


def test_failed_trial_gives_code_1_and_its_reason(call, text, tmp_path, monkeypatch):
    def fail(folder, trials, engine, watchers):
        for trial in trials:
            (folder / trial.folder).mkdir()
            result = TrialResult(trial, reason="out of [memory]")
            write_atomically(folder / trial.folder / "result.json", result.to_json())
            watchers[0].finished(trial, result)

    monkeypatch.setattr(run_trials, "run_trials", fail)
    code, shown, told = call("compare", "rope", "--text", text, "--out", tmp_path / "out", *TINY)
    assert code == 1
    assert "rope seed 0: failed: out of [memory]" in told
    assert "│ rope seed 0 │ out of [memory] │" in shown
    assert "1 of 1 trials failed" in told.splitlines()[-1]
    assert (tmp_path / "out" / "report.html").exists()


def test_ctrl_c_keeps_the_report_and_says_how_to_go_on(call, text, tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_trials, "run_trials", interrupt)
    code, _, told = call("compare", "rope", "--text", text, "--out", tmp_path / "out", *TINY)
    assert code == 130
    assert told.splitlines()[-1] == "posenc: stopped; the same command goes on from here."
    assert (tmp_path / "out" / "report.html").exists()


def test_full_disk_is_code_1(call, text, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(compare, "write_atomically", full)
    command = ("compare", "rope", "--text", text, "--out", tmp_path / "out", *TINY)
    answer = without_notes(call(*command))
    assert complains(answer, 1).startswith("posenc: the disk is full: ")
    assert "study.json: No space left on device." in complains(answer, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ropee"], "Unknown encoding 'ropee'. Did you mean 'rope'?\n"),
        (["zzz"], "Unknown encoding 'zzz'. Known: nope, "),
        (["--text", "/nowhere.txt"], "No such file: /nowhere.txt"),
        (["--text", "{empty}"], "The text is empty: it has 0 bytes"),
        (["--text", "{short}"], "longer than the whole text, 50 bytes in 1 file"),
        (["--train-length", "64", "--test-lengths", "32,128"], "32 is below --train-length 64"),
        (["--test-lengths", "128;256"], "whole numbers separated by commas, got '128;256'"),
        (["--heads", "3"], "posenc: --heads 3 does not divide --width 64."),
        (["--heads", "4", "--kv-heads", "3"], "--kv-heads 3 does not divide --heads 4."),
        (["rope", "--width", "12", "--heads", "4"], "head_dim must be even, got 3"),
        (["--out", "{short}"], "is not a folder"),
        (["--out", "{folder}"], "was not written by posenc compare"),
        (["--out", "{short}/below", "--text", "{enough}"], "not a folder"),
        (["--budget", "fast"], "must be quick, standard or thorough, got 'fast'"),
        (["--engine", "sluurm"], "got 'sluurm'. Did you mean 'slurm'?"),
        (["--objective", "mask"], "got 'mask'. Did you mean 'masked'?"),
        (["--projections", "seperate"], "Did you mean 'separate'?"),
        (["--lr", "nan"], "--lr must be a positive number"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda"),
        (["--precision", "float16"], "--precision must be auto, float32 or bfloat16"),
        (["rope", "{short}"], "is a file or folder where an encoding is expected"),
        (["rope", "--text="], "--text is empty; it must name something"),
        (["rope", "--out", ""], "--out is empty; it must name something"),
        (["rope", ""], "an argument is empty"),
        (["--seeds", "100000000"], "400,000,000 trials"),
        (["--width", "1000000000"], "of memory, and there are"),
        (["learned", "--train-length", "1000000000"], "of memory, and there are"),
        (["--text", "/dev/zero"], "/dev/zero is a pipe or a device"),
        (["--steps", "0"], "Invalid value for '--steps'"),
        (["--stepz", "1"], "--steps"),
        (["--stepz", "1"], "; see posenc compare --help."),
    ],
)
def test_bad_input_to_compare_is_one_line_and_code_2(call, tmp_path, arguments, message):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"x" * 50)
    (tmp_path / "enough").write_bytes(prose(100_000))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("not ours", encoding="utf-8")
    names = {p.name: p for p in tmp_path.iterdir()}
    answer = call("compare", *(a.format(**names) for a in arguments))
    assert message in complains(answer)
    assert (tmp_path / "folder" / "thesis.tex").read_text(encoding="utf-8") == "not ours"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "holds no study.json"), ("{", "cannot be read"), ("{}", "cannot be read")],
)
def test_report_of_what_is_no_study_is_one_line_and_code_2(call, tmp_path, content, message):
    if content is not None:
        (tmp_path / "study.json").write_text(content, encoding="utf-8")
    assert message in complains(call("report", tmp_path))


MISSPELT = {
    "list ropee": "rope",
    "inspect encoding ropee": "rope",
    "inspect encoding rope:thetta=3": "rope_theta",
    "compare ropee": "rope",
    "compare rope --task coppy": "copy",
    "compare rope --budget quik": "quick",
    "compare rope --engine slrum": "slurm",
    "compare rope --objective causl": "causal",
    "compare rope --device cdua": "cuda",
    "compare rope --precision bflot16": "bfloat16",
    "compare rope --projections seperate": "separate",
    "compare rope --schedule cosin": "cosine",
    "compare rope --token-type unit16": "uint16",
    "bench --only attenton": "attention",
    "bench --device cdua": "cuda",
    "extend {model} --to 192 --method yran": "yarn",
    "extend {model} --to 192 --task passky": "passkey",
    "extend {model} --to 192 --device cdua": "cuda",
    "extend {model} --to 192 --precision flot16": "float16",
    "doctor {model} --for vlm": "vllm",
    "doctor {model} --overrides vlm": "vllm",
    "doctor {model} --ignore p004": "PD004",
    "doctor {model} --convert-layout interleavd --out new": "interleaved",
    "doctor --explain p004": "PD004",
}
"""Every option with a list of values, and every name of an encoding or task: what was meant."""


@pytest.mark.parametrize("command", MISSPELT)
def test_a_misspelt_choice_is_one_line_with_what_was_meant(command, call, tmp_path):
    model = save("llama", tmp_path / "model") if "{model}" in command else ""
    said = complains(call(*command.format(model=model).split()))
    assert f"Did you mean {MISSPELT[command]!r}?" in said


def test_every_option_with_choices_is_misspelt_here():
    checked, home = set(), Path(posenc.__file__).parent
    for command in cli.COMMANDS.keys() - {"report"}:  # that folder is shared by all commands
        for path in (home / command).rglob("*.py"):
            code = path.read_text("utf-8")
            names = re.findall(r'require_choice\(\s*"(--[a-z-]+)"', code)
            by_hand = r'Error\(\s*f?"[^"]*--[a-z-]+ must be [a-z]+(?:, [a-z]+)* or '
            assert not re.findall(by_hand, code), path
            checked |= {(command, name) for name in names}
    assert {("extend", "--method"), ("compare", "--engine"), ("bench", "--device")} < checked
    misspelt = [command.split() for command in MISSPELT]
    assert checked <= {(words[0], word) for words in misspelt for word in words[1:]}


def test_a_file_that_is_not_there_is_named_without_numbers_of_errors(call):
    said = complains(call("compare", "rope", "--config", "nowhere.json"))
    assert said == "posenc: nowhere.json: no such file or folder.\n"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("inspect model m --swap a", "inspect model"),
        ("extend model", "extend"),
        ("report", "report"),
    ],
)
def test_hints_name_the_subcommand(call, line, command):
    assert complains(call(*line.split())).endswith(f"; see posenc {command} --help.\n")


def test_unknown_command_is_one_line_and_code_2(call):
    assert "No such command 'compar'. Did you mean 'compare'?" in complains(call("compar"))


def test_posenc_alone_shows_each_job_with_an_example(call):
    code, out, err = call()
    assert (code, err) == (0, "")
    assert len(cli.JOBS) == 5
    assert all(f"  {job.verb} " in out and f" {job.example}\n" in out for job in cli.JOBS)
    assert out.rstrip().endswith("`posenc --help` all commands.")


@pytest.mark.parametrize("job", cli.JOBS, ids=lambda job: job.verb)
def test_the_example_of_a_job_is_a_command_with_options_that_exist(job):
    program, *words = job.example.split()
    assert program == "posenc"
    command = cli.app(words)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    assert not hasattr(command, "commands")
    assert {word for word in words if word.startswith("--")} <= known


def test_version(call):
    assert call("--version") == (0, f"posenc {posenc.__version__}\n", "")


def test_python_m_posenc_is_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "posenc", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"posenc {posenc.__version__}\n")


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("posenc ", list(cli.COMMANDS)),
        ("posenc compare rope_", ["rope_interleaved"]),
        ("posenc inspect ", ["encoding", "model", "module", "contract"]),
        ("posenc inspect encoding rope_", ["rope_interleaved"]),
    ],
)
def test_shell_completes_commands_and_names(words, expected):
    count = str(len(words.split(" ")) - 1)
    asked = {"_POSENC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}
    done = subprocess.run(
        [sys.executable, "-m", "posenc"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, expected)


def test_ctrl_c_promises_nothing_where_there_is_nothing_to_go_on_with(call, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "names", interrupt)
    said = "posenc: stopped; the same command starts from the beginning.\n"
    assert call("list") == (130, "", said)


@pytest.mark.parametrize(
    "module", ["posenc.command_line.main", "typer", "rich.markup", "posenc.list"]
)
def test_ctrl_c_while_modules_are_imported_is_one_line(module):
    code = (
        "import sys\nclass Interrupts:\n def find_spec(self, name, *more):\n"
        f"  if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\nfrom posenc.__main__ import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code, "list"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (130, "", 1), done.stderr
    assert done.stderr.startswith("posenc: stopped")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_behind_stdout_is_code_1():
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "posenc", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "the disk is full" in done.stderr


def test_full_disk_while_the_text_is_copied_is_code_1_and_leaves_no_half_copy(call, text, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        command = ("compare", "rope", "--text", text, "--out", tmp_path / "out", *TINY)
        answer = without_notes(call(*command))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the disk is full: " in complains(answer, 1)
    assert "train.u16: File too large." in complains(answer, 1)
    assert not list((tmp_path / "out").glob("corpus-*"))


@pytest.fixture
def planned(call, text, tmp_path, monkeypatch):
    """A study without results, and the command that made it."""
    monkeypatch.setattr(run_trials, "run_trials", lambda *arguments: None)
    command = ["compare", "rope", "--text", text, "--out", tmp_path / "out", *TINY]
    assert call(*command)[0] == 0
    return tmp_path / "out", command


def trial_folder(out):
    study = Study.from_json((out / "study.json").read_text(encoding="utf-8"))
    home = out / study.trials[0].folder
    home.mkdir()
    return home, study.trials[0]


def test_report_while_compare_runs_is_refused(call, planned):
    out, _ = planned
    (out / "report.html").unlink()
    with locked(out, "posenc compare"):
        assert "is running in" in complains(call("report", out))
    assert not (out / "report.html").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text.replace("out of", "out if"), "it is not what was written"),
        (lambda text: text.replace('"parameters": 0', '"parameters": NaN'), "it holds NaN"),
    ],
)
def test_report_names_a_damaged_result(call, planned, change, reason):
    out, _ = planned
    home, trial = trial_folder(out)
    result = change(TrialResult(trial, reason="out of memory").to_json())
    (home / "result.json").write_text(result, encoding="utf-8")
    code, shown, told = call("report", out)
    assert code == 0
    assert f"{home / 'result.json'} is damaged ({reason}" in told
    assert "the same posenc compare repeats it" in told
    assert "0 of 1 trials have run" in shown


def test_study_of_another_version_is_refused_and_kept(call, planned):
    out, command = planned
    path = out / "study.json"
    content = seal({"format": "posenc study 99", "new": 1})
    path.write_text(content, encoding="utf-8")
    for arguments in (["report", out], command):
        message = complains(call(*arguments))
        assert "another version of posenc" in message and "'posenc study 99'" in message
    assert path.read_text(encoding="utf-8") == content


def test_damaged_study_is_refused_by_report_and_written_again_by_compare(call, planned):
    out, command = planned
    path = out / "study.json"
    good = path.read_text(encoding="utf-8")
    path.write_text(good.replace('"steps": 6', '"steps": 7'), encoding="utf-8")
    assert "its hash differs" in complains(call("report", out))
    code, _, told = call(*command)
    assert code == 0 and f"{path} is damaged (" in told and "writing it again" in told
    assert Study.from_json(path.read_text(encoding="utf-8")).trials[0].steps == 6


def test_what_killed_runs_left_is_taken_for_ours_and_removed(call, planned):
    out, command = planned
    for name in ("study.json", "report.html", "results.csv", "events.jsonl", ".lock"):
        (out / name).unlink()  # killed inside the very first write
    below = out / "rope-seed0-0123456789ab" / "huggingface"
    half_text = out / ".corpus-0123.0123456789abcdef.unproved"
    left = [out / ".study.json.0123456789abcdef.partial", half_text / "train.u16"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    assert call(*command)[0] == 0
    below.mkdir(parents=True)
    left.append(below / ".model.safetensors.0123456789abcdef.partial")
    left[-1].write_bytes(b"half")
    assert call(*command)[0] == 0
    assert not any(path.exists() for path in left)
    assert not half_text.exists()


@pytest.mark.slow
def test_text_with_a_chinese_name_is_read_in_an_ascii_locale(planned):
    out, _ = planned
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "posenc", "report", str(out)],
        env={**os.environ, **ascii_only},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "书 &amp; book" in (out / "report.html").read_text(encoding="utf-8")


def test_an_old_python_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "hexversion", 0x030A0DF0)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("posenc", run_name="__main__")
    assert ended.value.code == 2
    assert re.fullmatch(
        r"posenc: needs Python 3.11 or newer, this is \S+\n", capsys.readouterr().err
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_the_version_needs_no_docstrings(flag):
    done = subprocess.run(
        [sys.executable, flag, "-m", "posenc", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"posenc {posenc.__version__}\n"), done.stderr


@pytest.mark.parametrize("columns", ["0", "00", "-5", "wide", ""])
def test_a_terminal_of_no_column_prints_all_the_same(call, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = call("list", "alibi")
    assert code == 0 and "alibi" in out


def test_an_interrupt_that_a_library_turns_into_an_error_blames_no_file(call, monkeypatch):
    def load() -> None:
        """Load."""
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise ValueError("config.json: cannot import name 'x'") from None

    monkeypatch.setattr("posenc.list.list_encodings", load)
    said = "posenc: stopped; the same command starts from the beginning.\n"
    assert call("list") == (130, "", said)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def fail() -> None:
        """Fail."""
        raise ValueError("config.json: cannot import name 'x'")

    monkeypatch.setattr("posenc.list.list_encodings", fail)
    assert call("list") == (2, "", "posenc: config.json: cannot import name 'x'\n")
