"""posenc list: every encoding, for readers, for programs, and without torch."""

import json
import subprocess
import sys

from posenc.encodings import registry
from posenc.list import STORED_ROWS_FILE, build_rows


def test_list_json_is_alone_on_stdout_and_has_every_encoding(call):
    code, out, err = call("list", "--json")
    answer = json.loads(out)
    rows = answer["encodings"]
    assert (code, err, answer["schema"]) == (0, "", 1)
    assert [row["name"] for row in rows] == list(registry.names())
    needed = {"name", "places", "shift_invariant", "causal_only", "cache_safe", "source", "checked"}
    assert all(needed <= set(row) for row in rows)
    assert all(row["checked"] in ("golden", "reference", "unchecked") for row in rows)


def test_list_fits_80_columns_in_few_lines(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = call("list")[1].splitlines()
    *table, _, _, next_command = lines
    assert len(table) < 1.5 * len(registry.names()) and max(map(len, lines)) <= 80
    assert "posenc compare" in next_command


def test_list_shows_every_name_without_torch(call):
    _, out, _ = call("list")
    assert all(name in out for name in registry.names())
    code = "import sys; from posenc.command_line.main import main; sys.modules['torch'] = None; "
    code += "main(['list'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "transformer_xl" in done.stdout, done.stderr


def test_what_the_list_keeps_is_what_the_encodings_say():
    kept = json.loads(STORED_ROWS_FILE.read_text(encoding="utf-8"))
    names = {row["name"] for row in kept}
    said = [row for row in build_rows()[0] if row["name"] in names]
    assert kept == said, "run `make readme`"
