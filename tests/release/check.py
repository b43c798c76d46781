"""Build what would be published, check its contents, install it and run the README's lines there.

make release-check   # or python -m tests.release.check [TAG], with build and twine installed
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import posenc
from tests.doctor.threads import BASE

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
ADDRESS = os.environ.get("POSENC_REPOSITORY") or "https://github.com/owner/posenc"
"""Where the sources are published. The default is made up, only to see where it gets to."""
PAGE = "posenc/explore/explore.html"
WANTED = (
    "posenc/__init__.py",
    "posenc/__init__.pyi",
    "posenc/py.typed",
    "posenc/list.json",
    PAGE,
    "posenc/runtimes/families.json",
    "posenc/runtimes/known/vllm.json",
    "posenc/runtimes/conformance.json",
    "posenc/doctor/pages/PD001.md",
    "posenc/report/page.css",
)
STRANGE = re.compile(r"(^|/)(tests?|__pycache__|\.[^/]+|runs|node_modules)/|\.(pyc|egg-info|whl)$")
LARGEST = 3_000_000
TEXT_FIELDS = "Summary License-Expression Requires-Python Keywords Author".split()
PLAIN = {**BASE, "rope_theta": 10000.0}
TINY = "--train-length 16 --test-lengths 16 --seeds 1 --steps 2 --batch 2 --width 32 --layers 1"
TINY += " --heads 2 --workers 1 --text text.txt"
"""Options that let a `posenc compare` of the README end in seconds."""


def wrong_contents(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Say what an archive lacks, and what does not belong into it."""
    names = set(names)
    lacking = [f"lacks {name}" for name in wanted if name not in names]
    return lacking + [f"contains {name}" for name in sorted(names) if STRANGE.search(name)]


def wrong_metadata(metadata: Message, address: str, version: str) -> list[str]:
    """Say what a package index would show wrongly."""
    found = [f"no {field}" for field in TEXT_FIELDS if not metadata.get(field)]
    if metadata.get("Version") != version:
        found.append(f"version {metadata.get('Version')}, posenc says {version}")
    urls = metadata.get_all("Project-URL") or []
    labels = {url.partition(",")[0] for url in urls}
    found += [
        f"no {each} URL"
        for each in ("Repository", "Issues", "Changelog", "Documentation")
        if each not in labels
    ]
    text = str(metadata.get_payload())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path = re.sub(rf"^{re.escape(address)}/(blob|raw)/v{re.escape(version)}/", "", target)
        if not re.match(r"\w+:|#", target):
            found.append(f"README: {target} is relative")
        elif path != target and not (ROOT / path.partition("#")[0]).exists():
            found.append(f"README: {target} is no file of the repository")
    if "](http" not in text:
        found.append("README: no link")
    return found


def wrong_licences(page: str, listed: str) -> list[str]:
    """Say which JavaScript packages of the page are not listed with their licence."""
    (shown,) = re.findall(r"<!-- (Bundled packages and their licences:\n.*?) -->", page, re.DOTALL)
    if shown != listed:
        return ["explore.licenses.txt is not the page's own list: run `make explorer`"]
    lock = json.loads((ROOT / "explorer/package-lock.json").read_text(encoding="utf-8"))
    packages = {
        name.rpartition("node_modules/")[2]: each
        for name, each in lock["packages"].items()
        if name and not each.get("dev")
    }
    return [
        f"{name} {each['version']} is not in explore.licenses.txt"
        for name, each in sorted(packages.items())
        if f"{name} {each['version']} ({each['license']})\n" not in listed
    ]


def wrong_tag(tag: str, version: str, changes: str, citation: str) -> list[str]:
    """Say why these sources are not the release of a tag."""
    found = [] if tag == f"v{version}" else [f"the tag is {tag}, posenc says {version}"]
    dates = re.findall(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$", changes, re.M)
    if not dates:
        found.append(f"CHANGELOG.md has no line `## [{version}] - DATE`")
    elif f"\ndate-released: {dates[0]}\n" not in citation:
        found.append(f"CITATION.cff has no line `date-released: {dates[0]}`")
    return found


class Environment:
    """A new virtual environment outside of the repository, and a folder to run commands in."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.folder, self.bin = folder / "here", folder / "venv/bin"
        self.folder.mkdir(parents=True)
        venv.create(folder / "venv", with_pip=True)
        self.install(wheel, extra)

    def install(self, wheel: Path, extra: str) -> None:
        pinned = ["-c", str(ROOT / "constraints.txt"), f"{wheel}{extra}"]
        run([self.bin / "python", "-m", "pip", "install", "-q", *pinned])

    def __call__(self, *command: str, code: int = 0) -> str:
        """Run a command in the environment; return what it printed, errors included."""
        return run([self.bin / command[0], *command[1:]], code, self.folder)


def run(command: list, code: int = 0, cwd: Path = ROOT, **variables: str) -> str:
    print("$", *command, flush=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != code:
        sys.exit(f"{done.stdout}\nexit code {done.returncode}, expected {code}")
    return done.stdout


def build() -> tuple[Path, Path]:
    """Build the source archive, and from it the wheel, as conda does: without the address."""
    for old in DIST.glob("posenc-*"):
        old.unlink()
    run([sys.executable, "-m", "build", "--sdist", "--outdir", DIST], POSENC_REPOSITORY=ADDRESS)
    (source,) = DIST.glob("posenc-*.tar.gz")
    wheel_of = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", DIST]
    run([*wheel_of, source], POSENC_REPOSITORY="")
    (wheel,) = DIST.glob("posenc-*.whl")
    return source, wheel


def check_archives(source: Path, wheel: Path) -> list[str]:
    """Return what is wrong with the two archives."""
    with tarfile.open(source) as archive:
        inside = [name.partition("/")[2] for name in archive.getnames()]
    others = ("results/leaderboard/board.json", "LICENSE", "README.md", "hatch_build.py")
    found = wrong_contents(inside, [*WANTED, *others])
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
        page, listed = (
            archive.read(name).decode()
            for name in (PAGE, f"{info}/licenses/posenc/explore/explore.licenses.txt")
        )
    others = ("posenc/compare/reports/board.json", f"{info}/licenses/LICENSE")
    found += wrong_contents(names, [*WANTED, *others])
    found += wrong_metadata(metadata, ADDRESS, posenc.__version__) + wrong_licences(page, listed)
    for path in (source, wheel):
        if path.stat().st_size > LARGEST:
            found.append(f"{path.name} has {path.stat().st_size} bytes, at most {LARGEST}")
    return found


def check_base(here: Environment) -> None:
    """Run what needs no torch, and see the others name their extra in one line."""
    (here.folder / "config.json").write_text(json.dumps(PLAIN), encoding="utf-8")
    assert here("posenc", "--version") == f"posenc {posenc.__version__}\n"
    assert "torch" not in here("posenc", "--versions")
    assert "Nothing to complain about" in here("posenc", "doctor", "config.json")
    assert "alibi" in here("posenc", "list")
    here("posenc", "explore", "config.json", "--out", "page.html")
    here("python", "-c", "import posenc, sys; assert not {'torch', 'numpy'} & {*sys.modules}")
    for command, extra in (("compare", "hf"), ("bench", "torch"), ("inspect encoding rope", "hf")):
        said = here("posenc", *command.split(), code=2)
        assert said.endswith(f'pip install "posenc[{extra}]"\n') and said.count("\n") == 1, said


def check_readme(here: Environment, wheel: Path) -> None:
    """Run the README's Python with [torch], and its commands with [hf]."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", readme, re.M | re.S)
    code = [text for kind, file, text in blocks if kind == "python" and not file]
    (here.folder / "readme.py").write_text("".join(code), encoding="utf-8")
    assert "torch.Size([2, 100, 256])" in here("python", "readme.py")
    assert "jaxtyping" in here("posenc", "--versions")
    here.install(wheel, "[hf]")
    for _, file, text in blocks:
        if file:
            (here.folder / file).write_text(text, encoding="utf-8")
    (here.folder / "text.txt").write_text(readme * 4, encoding="utf-8")
    shell = "".join(text for kind, _, text in blocks if kind == "sh")
    lines = re.findall(r"^posenc ([^#\n]+)", shell, re.M)
    assert len(lines) >= 2, lines
    shutil.copytree(ROOT / "docs/examples", here.folder / "docs/examples")
    for line in lines:
        tiny = TINY.split() if line.startswith("compare") else ()
        finds_something = line.startswith("doctor")  # the example is a broken config
        here("posenc", *line.split(), *tiny, code=int(finds_something))


def main(arguments: list[str]) -> None:
    found = []
    if arguments:
        changes, citation = (
            (ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff")
        )
        found = wrong_tag(arguments[0], posenc.__version__, changes, citation)
    source, wheel = build()
    found += check_archives(source, wheel)
    if found:
        sys.exit("\n".join(found))
    print(run([sys.executable, "-m", "twine", "check", "--strict", source, wheel]))
    with tempfile.TemporaryDirectory() as scratch:
        check_base(Environment(Path(scratch) / "base", wheel, ""))
        check_readme(Environment(Path(scratch) / "torch", wheel, "[torch]"), wheel)
    print(f"{hashlib.sha256(source.read_bytes()).hexdigest()}  {source.name}")
    print(f"dist/{source.name} and dist/{wheel.name} can be published.")


if __name__ == "__main__":
    main(sys.argv[1:])
