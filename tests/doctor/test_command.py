"""The command: JSON, exit codes, and one clear line for bad input."""

import functools
import itertools
import json
import resource
import subprocess
import sys

import pytest

from posenc.runtimes.known import RUNTIMES
from tests.doctor.cures.test_adapters import write_adapter
from tests.doctor.threads import BASE
from tests.hf_models import save
from tests.runtimes.golden_cases import config

SIMPLE = {**BASE, "rope_theta": 10000.0}


@pytest.fixture
def call(call):
    """call("x.json", ...) -> (exit code, stdout, stderr)"""
    return functools.partial(call, "doctor")


@pytest.fixture
def file(tmp_path):
    """file(config, "name") -> its path"""

    def write(value, name="config.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value, indent=1))
        return path

    return write


def test_the_legend_explains_the_words_of_the_table(call, file):
    code, out, _ = call(file(SIMPLE), "--ask", "none")
    assert code == 0
    for word in ("known", "any length"):  # in a cell, and explained below the table
        assert f"│ {word}" in out and f"{word}: " in out
    assert "asked" not in out  # explained where it stands in the table
    assert "  rotates 16 channels of each head, slowest pair" in out


def test_a_runtime_that_refuses_a_file_is_not_said_to_admit_any_length(file, call):
    odd_head = {**SIMPLE, "head_dim": 63}
    _, out, _ = call(file(odd_head), "--ask", "none", "--for", "mlx-lm")
    assert "refuses" in out and "any length" not in out
    _, out, _ = call(file(SIMPLE), "--ask", "none", "--for", "mlx-lm")
    assert "│ any length" in out


def complains(answer, *words):
    """Exit 2, nothing on stdout, one line on stderr with these words."""
    code, out, err = answer
    assert code == 2, (out, err)
    assert out == ""
    assert err.startswith("posenc: ") and err.count("\n") == 1
    for word in words:
        assert word in err
    return err


def test_a_rules_code_in_the_place_of_a_path_names_the_option(call):
    code, _, err = call("pd001")
    assert code == 2 and err == "posenc: pd001 is a rule: posenc doctor --explain PD001.\n"


def test_a_sound_config_exits_0(call, file):
    code, out, err = call(file(SIMPLE))
    assert (code, err) == (0, "")
    assert "Nothing to complain about" in out
    for name in RUNTIMES:
        assert name in out


def test_an_error_exits_1_and_names_rule_values_and_cure(call, file):
    code, out, _ = call(file(config("11_")))
    assert code == 1
    assert "E PD001" in out and "500000" in out and "cure:" in out
    assert call(file(config("11_")), "--for", "vllm, sglang")[0] == 0


def test_json_has_the_record_the_rules_and_six_runtimes(call, file):
    code, out, _ = call(file(config("30_")), "--json")
    answer = json.loads(out)
    assert code == 1
    assert set(answer) == {"record", "rules", "ignored", "runtimes", "schema", "tables"}
    assert [row["runtime"] for row in answer["tables"]["runtimes"]] == list(RUNTIMES)
    assert set(answer["runtimes"]) == set(RUNTIMES)
    for runtime in answer["runtimes"].values():
        keys = {"version", "asked", "error", "layers", "softmax_scale", "switch", "max_length"}
        keys |= {"answer", "read"}
        assert set(runtime) == keys
    vllm = answer["runtimes"]["vllm"]
    assert vllm["layers"]["all"]["multiplier"] == pytest.approx(1.0954451)
    assert len(vllm["layers"]["all"]["inv_freq"]) == 8
    assert (vllm["switch"], vllm["max_length"], vllm["error"]) == ("start", 4096, None)
    assert answer["runtimes"]["transformers-5"]["layers"]["all"]["multiplier"] == 1.3
    for rule in answer["rules"]:
        assert set(rule) == {"code", "severity", "message", "runtimes", "cure"}
    assert answer["record"]["trained_length"] == 1024
    assert answer["record"]["kinds"][0]["rotary_dim"] == 16


def test_json_says_zero_for_a_standing_pair(call, file):
    answer = json.loads(call(file(config("34_")), "--json")[1])
    assert answer["runtimes"]["transformers-5"]["layers"]["all"]["inv_freq"][-2:] == [0.0, 0.0]


def test_json_of_a_config_whose_meaning_is_unclear_has_no_record(call, file):
    code, out, _ = call(file(config("62_")), "--json")
    answer = json.loads(out)
    assert code == 1 and answer["record"] is None
    assert "PD022" in {rule["code"] for rule in answer["rules"]}
    assert answer["runtimes"]["llama.cpp"]["error"] is None


def test_length_decides_between_short_and_long(call, file):
    path = file(config("56_"))
    short = json.loads(call(path, "--json", "--length", 1024)[1])
    long = json.loads(call(path, "--json", "--length", 1025)[1])

    def second(answer, name):
        return answer["runtimes"][name]["layers"]["all"]["inv_freq"][1]

    for name in ("transformers-5", "vllm", "llama.cpp"):
        assert second(short, name) == pytest.approx(0.3011693, rel=1e-6)
        assert second(long, name) == pytest.approx(0.2874798, rel=1e-6)
    assert second(long, "sglang") == pytest.approx(0.3011693, rel=1e-6)  # one token later
    assert second(short, "mlx-lm") == pytest.approx(0.2874798, rel=1e-6)  # always long
    assert (short["record"]["length"], long["record"]["length"]) == (1024, 1025)


def test_length_beyond_a_servers_limit_is_a_refusal(call, file):
    answer = json.loads(call(file(config("44_")), "--json", "--length", 4096)[1])
    assert "greater than the derived" in answer["runtimes"]["vllm"]["error"]
    assert answer["runtimes"]["vllm"]["max_length"] == 1024
    assert answer["runtimes"]["mlx-lm"]["error"] is None


def test_explain(call):
    code, out, _ = call("--explain", "pd017")
    assert code == 0
    assert out.startswith("# PD017: ")
    assert all(f"\n  ## {part}\n" in out for part in ("Why", "Example", "Cure", "Threads"))


def test_json_of_an_explanation(call):
    code, out, _ = call("--explain", "pd017", "--json")
    answer = json.loads(out)
    assert code == 0 and set(answer) == {"code", "title", "text", "schema", "tables"}
    assert answer["code"] == "PD017"
    assert answer["text"].startswith(f"# PD017: {answer['title']}\n")


def test_json_of_overrides_and_of_positions(call, file):
    path, batch = file(config("11_")), file({"position_ids": [[0, 2]]}, "batch.json")
    plain = call(path, "--overrides", "vllm")[1]
    answer = json.loads(call(path, "--overrides", "vllm", "--json")[1])
    assert answer == {"server": "vllm", "options": plain.rstrip("\n"), "schema": 1, "tables": {}}
    code, out, _ = call(path, "--positions", batch, "--json")
    answer = json.loads(out)
    assert code == 1 and answer["same"] is False and len(answer["differences"]) == 1
    batch = file({"position_ids": [[0, 1]]}, "batch.json")
    code, out, _ = call(path, "--positions", batch, "--json")
    answer = {"same": True, "differences": [], "notes": [], "schema": 1, "tables": {}}
    assert (code, json.loads(out)) == (0, answer)


def test_json_of_what_was_written(call, file, tmp_path):
    path, model = file(config("11_")), save("llama", tmp_path / "model")
    adapter = write_adapter(model, tmp_path / "adapter", ("q_proj", "k_proj"))
    commands = {
        "fixed": (path, "--fix"),
        "permuted": (model, "--convert-layout", "interleaved"),
        "adapted": (adapter, "--convert-layout", "interleaved", "--like", model),
    }
    for name, command in commands.items():
        out = tmp_path / name
        answer = json.loads(call(*command, "--out", out, "--json")[1])
        assert set(answer) == {"written", "said", "schema", "tables"} and out.exists()
        assert answer["written"] == str(out) and name in answer["said"]


ACTS = ("--positions", "--overrides", "--with", "--fix", "--layout", "--convert-layout")


@pytest.mark.parametrize("first, second", [*itertools.combinations(ACTS, 2)])
def test_two_things_to_do_are_refused_before_anything_is_written(
    call, file, tmp_path, first, second
):
    path, out = file(config("11_")), tmp_path / "out"
    values = {"--positions": (path,), "--overrides": ("vllm",), "--convert-layout": ("half-split",)}
    values["--with"] = ("{}",)
    given = [word for name in (first, second) for word in (name, *values.get(name, ()))]
    if {"--fix", "--convert-layout"} & {first, second}:
        given += ["--out", out]
    if "--layout" in given:
        given += ["--text", path]
    complains(call(path, *given), f"give {first} or {second}, not both")
    assert not out.exists()


def test_two_files_that_mean_the_same_and_two_that_do_not(call, file):
    old = file({**SIMPLE, "rope_theta": 500000.0}, "a/config.json")
    new = {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    same = file(new, "b/config.json")
    other = file(SIMPLE, "c/config.json")
    code, out, _ = call(old.parent, same.parent)
    assert code == 0 and "the same positions" in out
    code, out, _ = call(old, other)
    assert code == 1 and "pair 7" in out
    answer = json.loads(call(old, other, "--json")[1])
    assert answer["same"] is False and len(answer["records"]) == 2


def test_a_rule_is_silenced_on_the_command_line_and_the_answer_says_so(call, file):
    path = file(config("12_"))
    assert call(path)[0] == 1
    code, out, _ = call(path, "--ignore", "pd017, PD013")
    assert code == 0 and "E PD017" not in out
    assert "ignored, as --ignore asks: PD017 (1 error)" in out
    assert "Nothing else to complain about" in out
    answer = json.loads(call(path, "--ignore", "PD017", "--json")[1])
    assert (answer["rules"], [each["code"] for each in answer["ignored"]]) == ([], ["PD017"])
    code, out, _ = call(path, "--each", "--ignore", "PD017")
    assert code == 0 and "ignored, as --ignore asks: PD017 (1 error)" in out
    code, out, _ = call(path, "--ignore", "PD001")  # which does not fire here
    assert code == 1 and "ignored" not in out


def test_what_a_silenced_rule_finds_still_stops_a_fix(call, file, tmp_path):
    path = file({**SIMPLE, "rope_theta": None})
    complains(call(path, "--fix", "--out", tmp_path / "x"), "PD004")
    complains(call(path, "--fix", "--out", tmp_path / "x", "--ignore", "PD004"), "no other action")


def test_an_unknown_code_to_ignore_is_named_before_anything_is_judged(call, file):
    complains(call(file(config("12_")), "--ignore", "PD999"), "PD999")
    complains(call("--each", file(config("12_")), "--ignore", "PD999"), "PD999")
    complains(call(file(SIMPLE), file(SIMPLE, "b.json"), "--ignore", "PD001"), "no other action")


def test_a_file_in_a_strangers_folder_silences_nothing(call, file):
    path = file(config("12_"))
    (path.parent / ".posenc").write_text("# posenc: ignore=PD017\n")
    for more in ((), ("--each",)):
        code, out, _ = call(path, *more)
        assert code == 1 and "E PD017" in out


@pytest.mark.parametrize("runtime, flag", [("vllm", "--hf-overrides"), ("sglang", "--json-model")])
def test_overrides_print_a_line_that_works(call, file, runtime, flag):
    code, out, _ = call(file(config("44_")), "--overrides", runtime)
    assert code == 0 and out.startswith(flag)
    given = json.loads(out.split("'")[1])
    assert given["max_position_embeddings"] == 4096
    assert given["rope_parameters"]["rope_theta"] == 1000000.0
    code, out, _ = call(file(config("44_")), "--for", runtime, "--with", json.dumps(given))
    assert code == 0, out


def test_overrides_say_cannot(call, file):
    complains(call(file(config("49_")), "--overrides", "sglang"), "no options make sglang")
    complains(call(file(SIMPLE), "--overrides", "mlx-lm"), "takes no overrides")
    complains(call(file(SIMPLE), "--overrides", "x"), "--overrides must be vllm or sglang")
    guessed = {**SIMPLE, "rope_scaling": {"factor": 2.0}}
    complains(call(file(guessed), "--overrides", "vllm"), "no rope_type, which decides what")
    two = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    differ = {**SIMPLE, "rope_scaling": two, "original_max_position_embeddings": 32}
    complains(call(file(differ), "--overrides", "sglang"), "no options can say it. Make them equal")
    both = ("--overrides", "vllm", "--for", "mlx-lm")
    complains(call(file(SIMPLE), *both), "--overrides names its server itself")


def test_an_override_without_a_base_is_an_error(call, file):
    given = {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    }
    path = file({**SIMPLE, "rope_theta": 500000.0})
    code, out, _ = call(path, "--with", json.dumps(given))
    assert code == 1 and "PD032" in out and "refuses" in out
    code, out, _ = call(path, "--with", json.dumps(given), "--for", "sglang")
    assert "as meant" in out


BAD = {
    "no.json": ("{", "not valid JSON"),
    "list.json": ("[1]", "expected a JSON object, got a list"),
    "nan.json": (
        '{"hidden_size": 64, "rope_theta": NaN}',
        "rope_theta must be a finite number, got nan",
    ),
    "twice.json": ('{"hidden_size": 64, "hidden_size": 32}', "given twice"),
    "deep.json": ('{"a":' * 100000 + "1" + "}" * 100000, "not valid JSON (it is nested too deeply"),
    "empty.json": ("{}", "expected a model's config"),
    "other.json": ('{"name": "x", "scripts": {}}', "expected a model's config"),
    "text.json": (json.dumps({**BASE, "rope_scaling": "yarn"}), "rope_scaling must be an object"),
    "heads.json": (json.dumps({**BASE, "head_dim": None, "num_attention_heads": 65}), "of 0"),
    "half.json": (json.dumps({**BASE, "head_dim": 16.5}), "must be an integer"),
    "huge.json": (json.dumps({**BASE, "max_position_embeddings": 10**30}), "between 1 and"),
    "layers.json": (json.dumps({**BASE, "num_hidden_layers": 10**6}), "between 1 and 2000"),
    "below.json": (json.dumps({**BASE, "rope_theta": -1e4}), "rope_theta must be a positive"),
    "nothing.json": (
        json.dumps(
            {**BASE, "rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 0}}
        ),
        "rope_scaling.factor must be a positive number, got 0",
    ),
    "theta.json": (json.dumps({**BASE, "rope_theta": [1.0]}), "rope_theta must be a finite"),
    "overflow.json": ('{"hidden_size": 64, "rope_theta": 1e999}', "a finite number"),
    "type.json": (json.dumps({**BASE, "rope_scaling": {"rope_type": 3}}), "must be a string"),
    "interval.json": (json.dumps({**BASE, "no_rope_layer_interval": 0}), "between 1 and"),
    "negative.json": (json.dumps({**BASE, "num_hidden_layers": -1}), "between 1"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_files_are_refused(call, file, name):
    text, words = BAD[name]
    complains(call(file(text, name)), words)


def test_bytes_that_are_no_text_and_a_file_that_is_too_large(call, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    complains(call(path), "not UTF-8")
    path.write_bytes(b'{"hidden_size": 64, "x": "' + b"a" * (9 << 20) + b'"}')
    complains(call(path), "at most")


def test_bad_options_are_refused(call, file, tmp_path):
    path = file(SIMPLE)
    complains(call(tmp_path / "missing.json"), "no such file")
    complains(call(tmp_path / "empty-folder"), "no such file")
    (tmp_path / "folder").mkdir()
    complains(call(tmp_path / "folder"), "config.json")
    complains(call(), "expected one path")
    complains(call(path, path, path), "expected one path")
    complains(call(path, "--for", "tensorrt"), "tensorrt", "vllm")
    complains(call(path, "--for", ","), "--for must be transformers-4")
    complains(call("--explain", "PD999"), "PD999")
    complains(call("--explain", "PD001", path), "no path")
    complains(call("--explain", "PD001", "--for", "vllm"), "nothing else")
    complains(call(path, "--fix"), "--out")
    complains(call(path, "--out", tmp_path / "x"), "--fix")
    complains(call(path, "--with", "{"), "--with: expected JSON")
    complains(call(path, "--with", "[]"), "JSON object")
    complains(call(path, "--length", 0), "length")
    complains(call(path, "--like", path), "--fix")
    assert not (tmp_path / "x").exists()


def test_a_config_is_judged_in_under_a_second_without_torch(file):
    path = file(config("30_"))
    code = (
        "import sys\nfrom posenc.command_line import main as cli\ntry:\n"
        f" cli.main(['doctor', {str(path)!r}, '--json', '--ask', 'none'])\n"
        "except SystemExit as stop:\n assert stop.code == 1\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'numpy', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    spent = [1.0]
    while min(spent) >= 1.0 and len(spent) < 4:  # up to three tries, on a busy machine
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert run.returncode == 0, run.stderr
    assert min(spent) < 1.0  # seconds of processor time: other work on the machine adds none


def test_overrides_that_are_no_dict_are_refused_and_null_takes_the_dict_away(call, file):
    path = file({**BASE, "rope_theta": 10000.0})
    complains(call(path, "--with", '{"rope_parameters": 5}'), "rope_parameters must be an object")
    assert call(path, "--with", '{"rope_scaling": null}')[0] in (0, 1)


def test_a_makers_file_with_text_for_a_number_names_the_key(call, tmp_path):
    path = tmp_path / "params.json"
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "qk_rope_head_dim": 16, "max_seq_len": 99999}
    path.write_text(json.dumps({**sizes, "rope_factor": "x"}))
    complains(call(path), "rope_factor must be a positive number, got 'x'")
