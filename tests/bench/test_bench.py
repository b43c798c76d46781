"""`posenc bench` measures, checks before it measures, and writes what it found."""

import csv
import gc
import io
import json
import re
import time

import pytest
import torch

import posenc
from posenc.bench import calls, cases, device_check, measure
from posenc.bench.cases import CASES, GROUPS, GROUPS_WITH_TRANSFORMERS, Case, select_cases
from tests.test_readme import load_script

TINY = ("--lengths", "16", "--heads", "2", "--kv-heads", "2", "--head-dim", "8", "--repeats", "1")


@pytest.fixture
def dry(monkeypatch):
    """Nothing is measured; the cases that would be."""
    found = []
    monkeypatch.setattr(measure, "measure_case", lambda case, *rest: found.append(case) or [])
    return found


@pytest.mark.parametrize(
    "groups", ["rotation", pytest.param(",".join(GROUPS), marks=pytest.mark.slow)]
)
def test_every_case_runs_at_tiny_sizes_and_makes_a_page(groups, tmp_path, call):
    pytest.importorskip("transformers")
    path = tmp_path / "results.json"
    options = ("--only", groups, "--threads", 1, "--json", "--out", path)
    code, said, _ = call("bench", *TINY, *options)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert code == 0 and json.loads(said) == {**found, "schema": 1, "tables": {}}
    assert {"date", "device", "torch", "transformers"} <= set(found["machine"])
    for case in select_cases(tuple(groups.split(",")), (16,), 2, 2, 8):
        if case.dtype == "bfloat16" and case.group == "training":
            continue  # not on every CPU
        rows = {
            row["run"]: row
            for row in found["rows"]
            if (row["group"], row["case"]) == (case.group, case.title)
        }
        assert {*case.runs, *case.baselines[:1]} <= set(rows), case
        for row in rows.values():
            if case.group == "memory":
                assert row["mib"] >= 0
            else:
                middle, low, high = row["ratios"][case.baselines[0]]
                assert 0 < low <= middle <= high and row["milliseconds"] > 0
    if groups == "rotation":
        return
    script = load_script("update_performance")
    page = script.page(found, {})
    assert all(f"## {question}\n" in page for question in script.TABLES.values())
    assert all(GROUPS[group] in page for group in script.OTHERS)
    assert {row["group"] for row in csv_rows(script, found, {})} == set(GROUPS)


@pytest.mark.prose
def test_page_is_written_from_the_results_and_stays_short():
    script = load_script("update_performance")
    page = script.PAGE.read_text(encoding="utf-8")
    found = json.loads(script.RESULTS.read_text(encoding="utf-8"))
    gpu = script.gpu_rows(script.GPU)
    assert page == script.page(found, gpu), "run docs/scripts/update_performance.py"
    assert script.CSV.read_text(encoding="utf-8") == script.table_csv(found, gpu)
    assert page.count("\n") <= 120
    assert {row["group"] for row in found["rows"]} == set(GROUPS)


def csv_rows(script, found, gpu):
    return list(csv.DictReader(io.StringIO(script.table_csv(found, gpu))))


def cells_of(page, question):
    """Return the cells of a table by its row and column."""
    lines = page.split(f"## {question}\n")[1].split("\n## ")[0].splitlines()
    head, _, *rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    return {
        (row[0], title): cell for row in rows for title, cell in zip(head, row[1:], strict=True)
    }


def test_the_page_has_one_number_a_cell_and_says_what_was_not_run():
    script = load_script("update_performance")

    def cpu(run, milliseconds, ratio, threads):
        return {
            "group": "backward",
            "case": "1k",
            "run": run,
            "milliseconds": milliseconds,
            "ratios": {"SDPA": [ratio, ratio - 0.1, ratio + 0.2]},
            "threads": threads,
        }

    found = {"machine": dict.fromkeys(("device", "cores", "date", "torch", "python"), "?")}
    found["rows"] = [cpu("SDPA", 9.0, 1.0, 2), cpu("t5", 9.0, 1.0, 2), cpu("t5", 18.0, 2.0, 1)]
    facts = {"device": "A card", "date": "2026-01-01", "torch": "2.11"}
    times = {"forward": 1.0, "sdpa_forward": 2.0, "both": 6.0, "sdpa_both": 4.0}
    gpu = {
        "kernels/t5/8192": facts | {"result": times},
        "kernels/alibi,table/8192": facts | {"result": times | {"both": 10.0}},
        "kernels/alibi/2048": facts | {"result": {"forward failed": "no memory"}},
        "correct/t5": facts
        | {"result": {"checks": [{"ok": True}, {"ok": False}, {"left_out": "?"}]}},
        "rotation/65536": facts | {"result": {"copy": 2000.0, "half-split": 1900.0}},
    }
    page = script.page(found, gpu)
    training = cells_of(page, script.TABLES["training"])
    assert training["t5", "GPU, 8k"] == "1.50" and training["SDPA", "GPU, 8k"] == "4 ms"
    assert training["t5", "CPU, 1k"] == "1.00", "the row with all threads"
    assert training["t5", "GPU, 2k"] == training["SDPA", "GPU, 32k"] == "not run"
    assert ("alibi", "GPU, 2k") not in training, "it failed, and there is no other number"
    assert cells_of(page, script.TABLES["prefill"])["t5", "GPU, 8k"] == "0.50"
    assert "1 of 2 checks of 1 encodings" in page and "95 % of a copy" in page
    assert "alibi by table 2.50" in page and "A card, 2026-01-01, torch 2.11" in page
    rows = csv_rows(script, found, gpu)
    intervals = [(row["threads"], row["low"], row["high"]) for row in rows if row["run"] == "t5"]
    assert intervals[:2] == [("2", "0.9", "1.2"), ("1", "1.9", "2.2")]
    assert [row["ratio"] for row in rows if row["device"] == "A card"] == [
        "1.5",
        "0.5",
        "2.5",
        "0.5",
    ]


def test_a_queue_that_never_ran_has_no_rows(tmp_path):
    script = load_script("update_performance")
    assert script.gpu_rows(tmp_path / "none.jsonl") == {}
    assert "GPU: not run." in script.page(
        {"machine": dict.fromkeys(("device", "cores", "date", "torch", "python"), "?"), "rows": []},
        {},
    )


@pytest.mark.prose
def test_page_has_every_option(call):
    page = load_script("update_performance").PAGE.read_text(encoding="utf-8")
    options = set(re.findall(r"--[a-z][a-z-]+", call("bench", "--help")[1])) - {"--help"}
    assert len(options) >= 12
    assert options <= set(re.findall(r"--[a-z][a-z-]+", page))


def test_titles_tell_the_cases_of_a_group_apart():
    assert len({(case.group, case.title) for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "1000000000000"), "at least"),
        (("--heads", "1000000000"), "of memory, and there are"),
        (("--only", "backward", "--lengths", "8", "--heads", "9999"), "of memory, and there are"),
        (("--only", "decode", "--lengths", "8", "--heads", "999"), "of memory, and there are"),
        (("--threads", "1000000"), "--threads must be at most"),
        (("--threads", "0"), "--threads needs whole numbers like 1,2"),
        (("--repeats", "1000000000"), "days"),
        (("--all", "--out", "."), "is a folder; name a file in it"),
        (("--out", "/dev/null/rows.json"), "/dev/null"),
        (("--only", "attention,rope"), "--only must be attention, backward"),
        (("--lengths", "1k"), "'1k'"),
        (("--head-dim", "63"), "--head-dim needs an even number, got 63"),
        (("--heads", "4", "--kv-heads", "3"), "a multiple of --kv-heads, got 4 and 3"),
    ],
)
def test_bench_refuses_what_cannot_be_before_it_measures(arguments, message, call, dry):
    code, _, said = call("bench", *arguments)
    assert code == 2 and message in said and said.count("\n") == 1
    assert dry == []


@pytest.mark.parametrize("more", [("--only", "rotation"), ("--device", "cpu", "--lengths", "9")])
def test_a_file_that_holds_no_results_is_never_replaced(call, dry, tmp_path, more):
    theirs = tmp_path / "config.json"
    theirs.write_text('{"model_type": "llama"}')
    code, _, said = call("bench", *more, "--out", theirs)
    assert code == 2 and "config.json exists already and holds no results of this command" in said
    assert theirs.read_text() == '{"model_type": "llama"}' and dry == []


def test_what_takes_long_is_said_and_left_out_unless_it_was_asked_for(call, dry):
    code, _, said = call("bench")
    assert code == 0
    assert "bench: left out attention 16k: about" in said
    assert "; --all or --only runs those left out\n" in said
    assert max(map(len, said.splitlines())) <= 80
    assert "16k" not in [case.title for case in dry if case.group == "attention"]
    assert {"attention", "layer", "rotation"} <= {case.group for case in dry}
    dry.clear()
    code, _, said = call("bench", "--only", "attention")
    assert code == 0 and "bench: attention 16k: about" in said and "left out" not in said
    assert "16k" in [case.title for case in dry]


def test_what_takes_seconds_is_not_said_to_take_none(call, dry):
    said = call("bench", "--quick", "--only", "rotation", "--lengths", "8")[2]
    assert said.endswith("bench: 5 cases, a few seconds\n")
    pytest.importorskip("transformers")
    said = call("bench", "--only", "decode", "--lengths", "8", "--head-dim", "8")[2]
    assert said.endswith("bench: 1 case, a few seconds\n")


def test_quick_takes_small_cases_only(call, dry):
    assert call("bench", "--quick")[0] == 0
    assert {"attention", "rotation"} <= {case.group for case in dry}
    assert all(case.q_len <= 2048 for case in dry if case.group != "rotation")


def test_without_transformers_its_groups_are_left_out_or_refused(call, dry, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, said = call("bench", "--all")
    assert code == 0 and "training 32 x 128 needs transformers" in said
    assert not {case.group for case in dry} & set(GROUPS_WITH_TRANSFORMERS)
    code, _, said = call("bench", "--only", "decode")
    assert code == 2 and 'transformers is not installed: pip install "posenc[hf]"' in said


def test_given_sizes_replace_those_of_each_case(call, dry):
    sizes = ("--lengths", "32,64", "--heads", 16)
    assert call("bench", "--only", "rotation,attention", *sizes)[0] == 0
    assert {case.heads for case in dry} == {16}
    assert {(case.q_len, case.num_keys) for case in dry if case.group == "attention"} == {
        (32, 32),
        (64, 64),
        (1, 32),
        (1, 64),
    }


def test_a_wrong_result_is_not_timed(monkeypatch):
    right = calls.attention
    monkeypatch.setattr(
        calls,
        "attention",
        lambda *args, impl, **options: right(*args, impl=impl, **options) + (impl == "auto"),
    )
    with pytest.raises(AssertionError, match="not close"):
        measure.measure_case(Case("attention", ("t5",), ("SDPA",), 16), (1,), (1, 0.0, 1))


def test_several_threads_are_timed_by_the_wall():
    """The calling thread's own clock stands still while others work for it."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        own = measure.time_interleaved_rounds({"sleep": lambda: time.sleep(0.02)}, 1)
        torch.set_num_threads(2)
        wall = measure.time_interleaved_rounds({"sleep": lambda: time.sleep(0.02)}, 1)
    finally:
        torch.set_num_threads(before)
    assert own["sleep"][0] < 0.01 < 0.02 <= wall["sleep"][0]


def test_rounds_end_with_the_time_but_not_before_the_least():
    made = []
    seconds = measure.time_interleaved_rounds(
        {"a": lambda: made.append(1)}, 9, max_seconds=0.0, min_rounds=3
    )
    assert len(seconds["a"]) == 3
    assert len(made) == 7, "once first, then twice a round"
    assert len(measure.time_interleaved_rounds({"a": int}, 4)["a"]) == 4


def test_every_round_begins_with_another_call():
    order = []
    measure.time_interleaved_rounds(
        {name: lambda name=name: order.append(name) for name in "ab"}, 2
    )
    assert "".join(order) == "ab" + "aabb" + "bbaa"


def test_garbage_is_collected_between_rounds_only_and_as_before_afterwards(monkeypatch):
    seen = []
    monkeypatch.setattr(gc, "unfreeze", lambda: seen.append("unfrozen"))
    measure.time_interleaved_rounds({"a": lambda: seen.append(gc.isenabled())}, 2)
    assert seen[1:] == [False] * 4 + ["unfrozen"]
    assert gc.isenabled()


def test_threads_are_the_callers_again():
    before = torch.get_num_threads()
    case = Case("rotation", ("half-split",), ("clone",), 16)
    rows = measure.measure_case(case, (1, 2), (1, 0.0, 1))
    assert {row["threads"] for row in rows} == {1, 2}
    assert torch.get_num_threads() == before


def test_the_interval_contains_the_median_of_ratios_within_rounds():
    floor = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]  # a machine that grows slower and slower
    assert measure.median_ratio([2 * x for x in floor], floor) == [2.0, 2.0, 2.0]
    noisy = [x * r for x, r in zip(floor, (9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0), strict=True)]
    assert measure.median_ratio(noisy, floor) == [4.0, 1.0, 9.0]


def test_a_ratio_is_of_rounds_and_not_of_medians():
    floor = [1.0] * 10 + [10.0] * 11  # a machine that changed its speed; medians are 10 and 1
    assert measure.median_ratio([*floor[:-2], 0.5, 0.5], floor) == [1.0, 1.0, 1.0]


def test_clock_that_shows_no_time_gives_no_ratio():
    assert measure.median_ratio([1.0], [0.0]) is None


def test_a_rotation_gets_other_positions_in_each_call_unless_it_says_the_same(monkeypatch):
    seen = []
    forward = posenc.RoPE.forward

    def watched(self, q, k, positions):
        seen.append(int(positions[0]))
        return forward(self, q, k, positions)

    monkeypatch.setattr(posenc.RoPE, "forward", watched)
    case = Case("rotation", ("half-split", "half-split, same positions"), ("clone",), 16)
    made = calls.rotation_calls(case)
    seen.clear()
    for name in ("half-split", "half-split, same positions"):
        for _ in range(3):
            made[name]()
    assert seen == [0, 1, 2, 0, 0, 0]


def test_live_bytes_are_those_alive_together():
    def case():
        for size in (1_000_000, 2_000_000):
            torch.empty(size, dtype=torch.uint8)
        kept = torch.empty(500_000, dtype=torch.uint8)
        return kept, torch.empty(1_700_000, dtype=torch.uint8)

    assert measure.peak_bytes(case) == pytest.approx(2_200_000, abs=1000)


def test_memory_is_what_is_beyond_inputs_output_and_gradients(monkeypatch):
    size = 4 * 8 * 64 * 64  # of the output, and of each gradient
    assert (
        measure.attention_memory(Case("memory", (), ("SDPA",), 64))["SDPA"] < size / 2
    )  # with two threads
    case = Case("memory", ("nope",), ("SDPA",), 64, backward=True)
    small, more = measure.attention_memory(case)["SDPA"], 3 * 2**20
    assert small < 2 * size
    plain = calls._sdpa_function(case)
    monkeypatch.setattr(
        calls,
        "_sdpa_function",
        lambda case: lambda *qkv: plain(*qkv) + 0 * torch.zeros(more // 4)[0],
    )
    large = measure.attention_memory(case)["SDPA"]
    assert large - small == pytest.approx(more, rel=0.2)


DEVICE = ("--device", "cpu", "--lengths", "1,9", "--heads", "2")


@pytest.fixture
def two(monkeypatch):
    """Check two encodings only."""
    monkeypatch.setattr(device_check, "names", lambda: ("t5", "learned_2d"))


def test_a_device_is_checked_and_measured_by_one_command(call, tmp_path, two):
    path = tmp_path / "card.json"
    code, _, said = call("bench", *DEVICE, "--all", "--out", path)
    assert code == 0, said
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {"device", "torch", "matmul"} <= set(found["machine"])
    checked = [row for row in found["rows"] if "check" in row]
    assert {(row["dtype"], row["length"]) for row in checked} == {
        (dtype, n) for dtype in ("float32", "bfloat16") for n in (1, 9)
    }
    assert all("cannot run" in row["left_out"] for row in checked if row["impl"] == "flex")
    assert all(row["error"] <= 0.05 for row in checked if row["impl"] != "flex")
    timed = [row for row in found["rows"] if "run" in row]
    assert {row["group"] for row in timed} == {"backward", "memory", "rotation"}
    assert all(row["gb_per_second"] > 0 for row in timed if row["group"] == "rotation")
    assert all(row["compiled"] is False for row in timed if row["group"] != "memory")


def test_a_device_is_told_what_is_wrong_and_what_was_left_out(call, tmp_path, monkeypatch):
    sizes = {"length": 9, "dtype": "bfloat16", "impl": "blocks"}
    rows = [
        {"check": "right", **sizes, "error": 0.01, "ok": True},
        {"check": "inexact", **sizes, "error": 0.25, "ok": False},
        {"check": "late", "length": 9, "left_out": "out of time"},
        {"check": "late", "length": 1, "left_out": "out of time"},
        {"case": "1k", "group": "memory", "q_len": 1024, "error": "no memory", "ok": False},
        {"case": "1k", "group": "memory", "run": "alibi", "threads": 1, "mib": 2.0},
    ]
    monkeypatch.setattr("posenc.bench.command._device_rows", lambda *given: iter(rows))
    path = tmp_path / "card.json"
    code, said, told = call("bench", *DEVICE, "--out", path)
    assert code == 1 and said.startswith("3 checks, 2 wrong; 1 case measured on ")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines()]
    assert ["inexact", "9", "bfloat16", "blocks", "0.25"] in cells
    assert ["memory 1k", "1,024", "–", "–", "no memory"] in cells
    assert ["late", "2", "out of time"] in cells and ["alibi", "2.0 MiB"] in cells
    assert "right" not in said and told == f"Results: {path}\n"
    assert json.loads(path.read_text(encoding="utf-8"))["rows"] == rows


def test_a_device_that_computes_wrongly_ends_with_1(call, tmp_path, two, monkeypatch):
    right, path = device_check._output_and_gradients, tmp_path / "card.json"
    for wrong in (0.5, float("nan")):
        monkeypatch.setattr(
            device_check,
            "_output_and_gradients",
            lambda layer, x, *rest, wrong=wrong: [
                t if t is None or x.dtype == torch.float64 else t + wrong
                for t in right(layer, x, *rest)
            ],
        )
        code, said, _ = call("bench", *DEVICE, "--out", path)
        assert code == 1 and " wrong" in said and " 0 wrong" not in said, said


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("t5", lambda table: table[1].add_(0.25)),
        ("t5", lambda table: table.copy_(table.roll(1, 0))),
        ("cope", lambda table: table.copy_(table.roll(1, 0))),
    ],
)
def test_a_wrong_table_is_seen_in_16_bits(name, spoil, monkeypatch):
    right = device_check._output_and_gradients
    monkeypatch.setattr(device_check, "names", lambda: (name,))
    assert all(
        row["ok"]
        for row in device_check.rows_of_checks("cpu", (40,), ("bfloat16",), 99)
        if "ok" in row
    )

    def wrong(layer, x, *rest):
        if x.dtype == torch.bfloat16:
            (table,) = layer.encoding.parameters()
            with torch.no_grad():
                spoil(table)
        return right(layer, x, *rest)

    monkeypatch.setattr(device_check, "_output_and_gradients", wrong)
    rows = [
        row for row in device_check.rows_of_checks("cpu", (40,), ("bfloat16",), 99) if "ok" in row
    ]
    assert rows and not any(row["ok"] for row in rows)


def test_rounding_alone_is_no_error_of_cope(monkeypatch):
    """At 300 tokens bfloat16 is 0.255 from float64, and 0.007 from float64 with q, k, v rounded."""
    monkeypatch.setattr(device_check, "names", lambda: ("cope",))
    rows = [
        row for row in device_check.rows_of_checks("cpu", (300,), ("bfloat16",), 99) if "ok" in row
    ]
    assert rows and all(row["ok"] and row["error"] < 0.02 for row in rows)


def test_a_gradient_that_float16_cannot_hold_is_left_out_with_its_size():
    (row,) = device_check.rows_of_checks("cpu", (1100,), ("float16",), 99, ["mixed_rope"])
    assert "results reach 41,106" in row["left_out"] and "65,504" in row["left_out"]
    assert "error" not in row and "ok" not in row


def test_the_gradient_of_a_bias_that_cancels_in_the_softmax_may_be_rounding_in_16_bits():
    zero, one = torch.zeros(1), torch.ones(1)
    want, noise = [one, one, 5 * one, zero], [one, one, 5 * one, torch.full((1,), 0.02)]
    assert device_check._largest_error(noise, want, by_largest_of_all=True) == pytest.approx(0.004)
    wrong = [one, one, 6 * one, zero]
    assert device_check._largest_error(wrong, want, by_largest_of_all=True) == pytest.approx(0.2)


def test_checks_without_time_are_left_out_and_named(two):
    rows = list(device_check.rows_of_checks("cpu", (4,), ("float32",), -1.0))
    assert [(row["check"], row["left_out"]) for row in rows] == [
        ("t5", "out of time"),
        ("learned_2d", "out of time"),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "tpu"), "--device must be cpu or cuda, got 'tpu'"),
        (("--device", "cuda"), "torch sees no CUDA device here"),
        (("--device", "cpu", "--quick"), "--device does not take --quick"),
        (("--device", "cpu", "--out", "."), "is a folder; name a file in it"),
    ],
)
def test_a_device_that_cannot_be_is_refused(options, message, call, two, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, said = call("bench", *options)
    assert code == 2 and message in said and said.count("\n") == 1


def test_a_call_that_is_compiled_again_is_seen():
    double = torch.compile(lambda x, by: x * by, backend="eager", dynamic=False)
    x = torch.ones(3)
    assert measure.triggers_compilation(lambda: double(x, 2)), "the first time"
    assert not measure.triggers_compilation(lambda: double(x, 2))
    assert measure.triggers_compilation(lambda: double(torch.ones(4), 2))


@pytest.mark.parametrize("half", [True, False])
def test_a_card_without_bfloat16_is_checked_and_timed_in_float32(half, call, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: half)
    monkeypatch.setattr(
        device_check, "rows_of_checks", lambda _, sizes, dtypes, seconds: seen.extend(dtypes) or []
    )
    monkeypatch.setattr(cases, "device_cases", lambda *sizes: seen.append(sizes[-1]) or [])
    assert call("bench", "--device", "cuda", "--out", tmp_path / "card.json")[0] == 0
    assert seen == (["float32", "bfloat16", "bfloat16"] if half else ["float32", "float32"])


def test_tables_fit_the_columns_with_numbers_whole(call, monkeypatch):
    def measured(case, counts, rounds):
        if case.group == "memory":
            return [{"run": "transformer_xl", "threads": 1, "mib": 1234.56}]
        rows = []
        for threads in counts:
            for name in (*case.runs, *case.baselines):
                ratios = {base: [99.994, 98.765, 123.456] for base in case.baselines}
                row = {"run": name, "milliseconds": 98765.4321, "ratios": ratios}
                rows.append(row | {"threads": threads})
        return rows

    monkeypatch.setattr(measure, "measure_case", measured)
    monkeypatch.setattr("posenc.machine.hardware.num_cores", lambda: 2)
    monkeypatch.setattr("posenc.machine.hardware.cpu_multiplies_bfloat16", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    code, said, _ = call("bench", "--all", "--threads", "1,2")
    lines = said.splitlines()
    assert code == 0 and max(map(len, lines)) <= 80
    assert "attention 1 query, 4k keys, 2 threads" in lines and "1234.6 MiB" in said
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert ["interleaved", "98765.432 ms", "99.99 (98.77–123.46)"] in cells
    assert ["plain layer", "98765.432 ms", "–"] in cells, "no ratio to itself"
    named = {row[0] for row in cells if row}
    assert {name for case in CASES for name in case.runs} <= named
    (summary,) = [line for line in lines if line.startswith(f"{len(CASES)} cases measured on ")]
    assert lines.index(summary) > len(lines) - 5 and "posenc compare" in lines[-1]
