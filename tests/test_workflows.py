"""Workflows, the Action, the hook and the issue templates: valid, pinned, with few rights."""

import copy
import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="comes with pre-commit")

pytestmark = pytest.mark.prose

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEMPLATES = [p for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if p.stem != "config"]
RIGHTS = {"publish": {"id-token": "write"}, "deploy": {"id-token": "write", "pages": "write"}}
"""What a job may do beyond reading the repository."""
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def steps_of(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def wrong(workflow):
    """What is wrong with a workflow's rights, its actions, and its commands."""
    found = [] if workflow["permissions"] == {"contents": "read"} else ["rights of all jobs"]
    for name, job in workflow["jobs"].items():
        if job.get("permissions", {}) != RIGHTS.get(name, {}):
            found.append(f"rights of {name}")
        if job.get("permissions") and any("run" in step for step in job["steps"]):
            found.append(f"{name} has rights and runs commands")
        if "timeout-minutes" not in job:
            found.append(f"{name} may run for ever")
    for step in steps_of(workflow):
        if "uses" in step and not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]):
            found.append(f"{step['uses']} is not pinned")
        if step.get("uses", "").startswith("actions/checkout@"):
            if step.get("with", {}).get("persist-credentials") is not False:
                found.append("checkout leaves a token")
        if "${{" in step.get("run", ""):
            found.append("an expression within a script")
        for target in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
            if target not in TARGETS:
                found.append(f"make {target}")
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_few_rights_and_pinned_actions(path):
    assert wrong(yaml.safe_load(path.read_text("utf-8"))) == []


def test_there_are_workflows_for_all_that_is_checked():
    assert [path.stem for path in WORKFLOWS] == ["checks", "pages", "release"]
    checks = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text("utf-8"))["jobs"]
    assert len(checks["tests"]["strategy"]["matrix"]["python"]) == 2
    targets = {*checks["checks"]["strategy"]["matrix"]["target"]}
    assert targets == {"lint", "docs", "kernels", "test-floors", "release-check"} <= TARGETS


def change(workflow, name):
    build, step = workflow["jobs"]["build"], workflow["jobs"]["build"]["steps"][0]
    if name == "rights of all jobs":
        workflow["permissions"] = {"contents": "write"}
    elif name == "rights of build":
        build["permissions"] = {"packages": "write"}
        build["steps"] = [each for each in build["steps"] if "run" not in each]
    elif name == "publish has rights and runs commands":
        workflow["jobs"]["publish"]["steps"].append({"run": "true"})
    elif name == "build may run for ever":
        del build["timeout-minutes"]
    elif name == "actions/checkout@v4 is not pinned":
        step["uses"] = "actions/checkout@v4"
    elif name == "checkout leaves a token":
        del step["with"]
    elif name == "an expression within a script":
        build["steps"].append({"run": "echo ${{ github.head_ref }}"})
    else:
        build["steps"].append({"run": name})


@pytest.mark.parametrize(
    "name",
    [
        "rights of all jobs",
        "rights of build",
        "publish has rights and runs commands",
        "build may run for ever",
        "actions/checkout@v4 is not pinned",
        "checkout leaves a token",
        "an expression within a script",
        "make nothing",
    ],
)
def test_a_careless_workflow_is_seen(name):
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
    careless = copy.deepcopy(workflow)
    change(careless, name)
    assert (wrong(workflow), wrong(careless)) == ([], [name])


def test_each_pin_names_its_version_and_no_action_has_two():
    lines = [
        line.partition("uses: ")[2]
        for path in (*WORKFLOWS, ROOT / "action.yml")
        for line in path.read_text("utf-8").splitlines()
        if "uses: " in line
    ]
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line) for line in lines)
    assert len(set(lines)) == len({line.partition("@")[0] for line in lines}) >= 8


def test_only_a_tag_publishes_what_was_checked():
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    assert release["jobs"]["publish"]["needs"] == "build"
    (command,) = [step["run"] for step in release["jobs"]["build"]["steps"] if "run" in step]
    assert command.startswith("make release-check ") and command.endswith('TAG="$GITHUB_REF_NAME"')


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_an_issue_template_asks_for_versions(path):
    form = yaml.safe_load(path.read_text("utf-8"))
    assert form["name"] and form["description"]
    asked = {field["id"]: field for field in form["body"]}
    assert asked["versions"]["validations"]["required"]
    assert "`posenc --versions`" in asked["versions"]["attributes"]["label"]


def test_the_hook_and_the_action_install_no_torch():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert hook["language"] == "python" and "additional_dependencies" not in hook
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    (install,) = [step["run"] for step in action["runs"]["steps"] if "pip" in step.get("run", "")]
    assert install.endswith('"${POSENC}[doctor]"')
