"""`--each`, and what calls it: the pre-commit hook and the GitHub Action, on good and bad files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from posenc.runtimes.families import FAMILIES_WITHOUT_ROTATION, all_families
from tests.doctor.threads import BASE

yaml = pytest.importorskip("yaml", reason="comes with pre-commit")

ROOT = Path(__file__).parents[2]
GOOD = {**BASE, "rope_theta": 10000.0}
BAD = {
    **BASE,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}


@pytest.fixture
def repository(tmp_path):
    """A git repository with a good and a bad config, and files that are no model's."""
    for name, value in {
        "good": GOOD,
        "bad": BAD,
        "app": {"name": "x", "port": 80},
        "bert": {"model_type": "bert", "hidden_size": 64},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(value))
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/posenc"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m posenc "$@"\n')
    command.chmod(0o755)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    return tmp_path


NOTICE = "notice: 1 of 2 files were not judged"


def unknown(repository):
    """Add a config of a family that posenc does not know."""
    (repository / "new").mkdir()
    (repository / "new/config.json").write_text(json.dumps({**GOOD, "model_type": "lama"}))
    subprocess.run(["git", "add", "-A"], cwd=repository, check=True)


def shell(command, folder, **variables):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        **variables,
    }
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def each(call, repository, monkeypatch):
    """each("good/config.json", ...) -> (exit code, stdout, stderr), called in the repository."""
    monkeypatch.chdir(repository)
    return lambda *arguments: call("doctor", "--each", *arguments)


def test_every_file_is_judged_by_itself(each):
    code, out, _ = each("good/config.json", "bad/config.json", "app/config.json")
    assert code == 1
    assert out.count("judged at") == 2
    assert "E PD001" in out and "Nothing to complain about" in out
    assert "app/config.json: skipped" in out


def test_good_files_and_those_of_no_rotary_model_exit_0(each):
    code, out, _ = each("good/config.json", "app/config.json", "bert/config.json")
    assert code == 0
    assert out.count("skipped") == 2


def test_what_no_runtime_concerned_misreads_exits_0(each):
    assert each("bad/config.json", "--for=vllm")[0] == 0
    assert each("bad/config.json", "--for=vllm,mlx-lm")[0] == 1


def test_a_damaged_file_exits_2_and_the_others_are_judged(each, repository):
    (repository / "bad/config.json").write_text("{")
    code, out, _ = each("bad/config.json", "good/config.json")
    assert code == 2
    assert "bad/config.json: not valid JSON" in out and "Nothing to complain about" in out


@pytest.mark.parametrize("more", ["--json", "--fix --out x", "--overrides vllm", "--with {}"])
def test_each_takes_no_other_option(each, more):
    code, out, err = each("good/config.json", *more.split())
    assert (code, out) == (2, "")
    assert err == (
        "posenc: --each takes --length, --for, --ask, --ignore and --strict, and no other option.\n"
    )
    assert each()[0] == 2


def test_a_model_without_rotation_has_nothing_to_judge(call, repository):
    code, out, err = call("doctor", repository / "bert")
    assert (code, err) == (0, "")
    assert "bert has no rotary positions; there is nothing to judge." in out
    code, out, _ = call("doctor", repository / "bert", "--json")
    assert code == 0 and json.loads(out)["judged"] is False


def test_a_model_without_rotation_cannot_be_fixed(call, repository, tmp_path):
    code, out, err = call("doctor", repository / "bert", "--fix", "--out", tmp_path / "new")
    assert (code, out) == (2, "") and "bert has no rotary positions" in err


def test_no_rotary_family_is_named_as_without_rotation():
    assert not FAMILIES_WITHOUT_ROTATION & all_families().keys()


def test_the_pre_commit_hook(repository):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert (hook["id"], hook["language"]) == ("posenc-doctor", "python")
    for path in ("config.json", "a/b/config.json", "a/params.json"):
        assert re.search(hook["files"], path), path
    for path in ("generation_config.json", "tokenizer_config.json", "config.json.bak"):
        assert not re.search(hook["files"], path), path
    files = "app/config.json bert/config.json good/config.json"
    assert shell(f"{hook['entry']} --for=mlx-lm {files}", repository)[0] == 0
    assert shell(f"{hook['entry']} --for=mlx-lm {files} bad/config.json", repository)[0] == 1


def test_the_hook_passes_an_unknown_family_with_a_notice_unless_it_is_strict(
    call, repository, monkeypatch
):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    unknown(repository)
    monkeypatch.chdir(repository)
    posenc, *entry = hook["entry"].split()
    assert posenc == "posenc"
    for more, expected in (([], 0), (["--strict"], 3)):
        code, out, _ = call(*entry, *more, "new/config.json", "good/config.json")
        assert code == expected and NOTICE in out


@pytest.fixture(scope="module")
def action():
    return yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))


@pytest.mark.slow
def test_the_action_judges_the_tracked_files(repository, action):
    *_, judge = action["runs"]["steps"]
    assert {step.get("shell") for step in action["runs"]["steps"]} == {None, "bash"}
    paths = action["inputs"]["paths"]["default"]
    code, out, _ = shell(judge["run"], repository, PATHS=paths, FOR="", STRICT="false")
    assert code == 1
    assert out.count("judged at") == 2 and out.count("skipped") == 2
    given = {"PATHS": "good/*", "FOR": "", "STRICT": "false"}
    assert shell(judge["run"], repository, **{**given, "PATHS": paths, "FOR": "vllm"})[0] == 0
    assert shell(judge["run"], repository, **given)[0] == 0
    code, _, err = shell(judge["run"], repository, **{**given, "PATHS": "nowhere/*"})
    assert code == 2 and "no tracked file" in err


@pytest.mark.slow
def test_the_action_passes_an_unknown_family_with_a_notice_unless_it_is_strict(repository, action):
    *_, judge = action["runs"]["steps"]
    assert judge["env"]["STRICT"] == "${{ inputs.strict }}"
    unknown(repository)
    given = {"PATHS": "new/*\ngood/*\n", "FOR": ""}
    usual = action["inputs"]["strict"]["default"]
    for strict, expected in ((usual, 0), ("true", 3)):
        code, out, _ = shell(judge["run"], repository, **given, STRICT=strict)
        assert code == expected and NOTICE in out
    code, out, err = shell(judge["run"], repository, **given, STRICT="yes")
    assert (code, out) == (2, "") and "strict is true or false, got yes." in err
    code, out, err = shell(judge["run"], repository, **given, STRICT="a\n::error::b")
    assert code == 2 and not commands(out + err)


def commands(text):
    """The lines in which GitHub's runner finds a command: ActionCommand.cs trims a line and looks
    for :: at its beginning, and for ##[ anywhere."""
    return [line for line in text.splitlines() if line.lstrip()[:2] == "::" or "##[" in line]


ODD = [
    "::error file=a,line=1::boo",
    "  ::add-mask::e",
    "a ##[error]boo",
    "::set-output name=x::%0A",
]


def odd_names(repository):
    """Track configs in folders whose names are commands, and that have commands in them."""
    for i, name in enumerate(ODD):
        path = repository / name / "config.json"
        path.parent.mkdir()
        kinds = [GOOD, {"a": 1}, {**GOOD, "model_type": "a\n::error::b"}, {"model_type": "bert"}]
        path.write_text(json.dumps({**kinds[i], "x\n::warning::y rope": "##[error]"}))
    subprocess.run(["git", "add", "."], cwd=repository, check=True)


def test_a_name_is_no_command_of_a_runner(repository, each):
    odd_names(repository)
    before = commands("\n".join(ODD))
    _, out, err = each(*(f"{name}/config.json" for name in ODD))
    assert len(before) == 4 and commands(out + err) == []
    assert "%3A%3Aadd-mask::e/config.json" in out and "##%5Berror]boo" in out


@pytest.mark.slow
def test_the_action_prints_no_name_as_a_command(repository, action):
    *_, judge = action["runs"]["steps"]
    odd_names(repository)
    paths = action["inputs"]["paths"]["default"]
    _, out, err = shell(judge["run"], repository, PATHS=paths, FOR="", STRICT="false")
    assert "boo/config.json" in out and commands(out + err) == []


def test_the_action_puts_no_input_into_a_shell_line(action):
    """An input in ${{ }} within a script would be run as code."""
    for step in action["runs"]["steps"]:
        assert "${{" not in step.get("run", "")


@pytest.fixture(scope="module")
def examples():
    """The hook's configuration and the workflow that the page shows."""
    text = (ROOT / "docs/doctor.md").read_text("utf-8")
    return re.findall(r"```yaml\n(.*?)```", text, re.S)


@pytest.mark.prose
def test_the_page_shows_the_hook_and_the_action_as_they_are(action, examples):
    hooks, workflow = (yaml.safe_load(block) for block in examples)
    (shown,) = hooks["repos"][0]["hooks"]
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert shown["entry"].startswith(hook["entry"])
    assert {k: shown[k] for k in ("id", "files")} == {k: hook[k] for k in ("id", "files")}
    *_, step = workflow["jobs"]["positions"]["steps"]
    assert set(step["with"]) <= set(action["inputs"])


@pytest.mark.slow
def test_pre_commit_runs_the_hook_that_the_page_shows(examples, repository):
    pytest.importorskip("pre_commit")
    (repository / ".pre-commit-config.yaml").write_text(
        examples[0].replace("vllm,llama.cpp", "mlx-lm")
    )
    run = f"{sys.executable} -m pre_commit run --files"
    code, out, _ = shell(f"{run} good/config.json app/config.json", repository)
    assert (code, "Passed" in out) == (0, True), out
    code, out, _ = shell(f"{run} good/config.json bad/config.json", repository)
    assert (code, "PD001" in out) == (1, True), out


@pytest.mark.prose
def test_no_page_names_an_owner_that_nobody_chose():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "action.yml"]:
        assert "OWNER" not in path.read_text("utf-8"), path


@pytest.mark.prose
def test_the_skills_commands_run(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("PATH", "OLD"):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text(json.dumps(GOOD), encoding="utf-8")
    skill = (ROOT / "docs/skill/SKILL.md").read_text("utf-8")
    commands = re.findall(r"`posenc (doctor [^`]+)`", skill)
    said = {command: call(*command.split()) for command in commands}
    assert len(said) == 5 and {(code, err) for code, _, err in said.values()} == {(0, "")}, said
    assert Path("NEW/config.json").is_file()
