"""Only `posenc/files` creates, replaces, appends, copies and deletes, and reads what others
wrote: it follows no link and waits for no pipe."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.prose
ROOT = Path(__file__).parents[1]
ROOM = "posenc/files/"
WRITES = {"write_text", "write_bytes", "mkdir", "makedirs", "touch", "rmtree", "copyfile", "copy2"}
WRITES |= {"copytree", "move", "save_file", "save_pretrained", "tofile", "savez", "to_csv"}
WRITES |= {"savefig", "export_chrome_trace", "symlink_to", "hardlink_to", "rename", "mkstemp"}
WRITES |= {"mkdtemp", "NamedTemporaryFile"}
READS = {"read_text", "read_bytes", "open", "safe_open", "load_file", "memmap"}
ALLOWED = {
    # a buffer in memory
    "posenc/report/drawing.py": {"savefig"},
    "posenc/report/figure_files.py": {"savefig"},
    # transformers' writer, in a new folder of ours; the user's own call
    "posenc/extend/export/folder.py": {"save_pretrained"},
    # and weights that weight_files has chosen: safetensors opens them itself, without a pickle
    "posenc/hf/attachment/save.py": {"save_pretrained", "safe_open"},
    # a file whose hash the record names; the logits that our parent process has written
    "posenc/hf/attachment/load.py": {"load_file"},
    "posenc/extend/export/stock_reader.py": {"load_file"},
    # the text of a run, and ordinary files of tokens, too large to be read at once
    "posenc/compare/trial/windows.py": {"memmap"},
    "posenc/compare/plan/tokens.py": {"memmap"},
    # in a tempfile.TemporaryDirectory, or the folder of texts that only this user can write
    "posenc/bench/measure.py": {"export_chrome_trace", "read_text"},
    "posenc/compare/engines/remote.py": {"symlink_to"},
    # so too, and the probe of this installation, which writes into the empty folder it runs in
    "posenc/runtimes/ask/interpreters.py": {"read_text", "mkdir", "write_text", "open"},
    "posenc/runtimes/ask/probes/probing.py": {"open", "write_text"},
    "posenc/runtimes/ask/probes/sglang_probe.py": {"mkdir", "write_text"},
    "posenc/runtimes/ask/probes/transformers_probe.py": {"write_text"},
    "posenc/runtimes/ask/probes/vllm_probe.py": {"write_text"},
    "posenc/compare/engines/storage.py": {"rename"},
    # files of this installation and of the system, and code that the user names
    "posenc/machine/hardware.py": {"read_text"},
    "posenc/machine/fingerprint.py": {"read_text", "read_bytes"},
    "posenc/lazy.py": {"read_text"},
    "posenc/list.py": {"read_text"},
    "posenc/doctor/rule.py": {"read_text"},
    "posenc/extend/api.py": {"read_text"},
    "posenc/runtimes/conformance.py": {"read_text"},
    "posenc/encodings/registry/code_hashes.py": {"read_bytes"},
    "posenc/encodings/registry/user_code.py": {"read_bytes"},
    # /dev/null after a broken pipe
    "posenc/command_line/main.py": {"open"},
}


def calls(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each call that opens, creates, replaces, copies or deletes a file or a
    folder, but for files that the package brings."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        on = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        if "resources.files" in on:
            continue
        if name in WRITES | READS:
            yield node.lineno, name
        elif name == "save" and len(node.args) > 1 and "path" in ast.unparse(node.args[1]):
            yield node.lineno, name
        # str.replace takes two arguments, dataclasses.replace is no method
        elif name == "replace" and on and len(node.args) == 1 and not node.keywords:
            yield node.lineno, name


def strangers(files: dict[str, str]) -> list[str]:
    return [
        f"{path}:{line} calls {name}"
        for path, source in sorted(files.items())
        if not path.startswith(ROOM)
        for line, name in calls(source)
        if name not in ALLOWED.get(path, ())
    ]


def sources() -> dict[str, str]:
    found = sorted((ROOT / "posenc").rglob("*.py"))
    return {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in found}


def test_files_are_opened_in_one_room():
    assert strangers(sources()) == []


def test_what_is_allowed_is_needed():
    files = sources()
    for path, names in ALLOWED.items():
        assert names == names & {name for _, name in calls(files[path])}, path


@pytest.mark.parametrize(
    "planted",
    [
        "open('a', 'w')",
        "open('a')",
        "path.open('rb')",
        "Path('a').write_text('')",
        "path.write_bytes(b'')",
        "path.mkdir(parents=True)",
        "os.makedirs(a)",
        "path.touch()",
        "shutil.rmtree(a, ignore_errors=True)",
        "shutil.copyfile(a, b)",
        "save_file(tensors, path)",
        "torch.save(model, path)",
        "figure.savefig(path)",
        "model.save_pretrained(folder)",
        "partial.replace(path)",
        "os.open(path, os.O_RDONLY)",
        "path.read_text()",
        "a.rename(b)",
        "safe_open(path, framework='pt')",
        "load_file(path)",
        "np.memmap(path)",
    ],
)
def test_a_writer_elsewhere_is_seen(planted):
    assert len(strangers({"posenc/bench/new.py": planted})) == 1
    assert strangers({f"{ROOM}new.py": planted}) == []


def test_what_touches_no_file_passes():
    harmless = "text.replace('a', 'b')\nreplace(study, a=1)\nsave(tensors)\n"
    harmless += "resources.files('a').read_text()"
    assert strangers({"posenc/bench/new.py": harmless}) == []


def test_no_process_searches_the_current_folder_for_modules():
    started = [line for text in sources().values() for line in text.split("[sys.executable, ")[1:]]
    # Of a program that starts itself again, Python searches the folder in which it lies.
    searches_no_folder = ('"-P", ', "sys.argv[0], ")
    assert len(started) > 3 and all(line.startswith(searches_no_folder) for line in started)
