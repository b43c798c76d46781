"""`posenc bench` measures, checks before it measures, and writes what it found."""

import csv
import json
import time

import pytest
import torch

import posenc
from posenc import cli
from posenc.bench import bias, measure, rope


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *arguments])
    return int(stopped.value.code or 0)


def rows(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_bench_writes_quantiles_and_where_they_were_measured(tmp_path):
    assert run("--lengths", "64", "--repeats", "2", "--out", str(tmp_path / "b.csv")) == 0
    found = rows(tmp_path / "b.csv")
    assert {"clone", "posenc half-split", "posenc interleaved", "alibi", "t5"} <= {
        row["case"] for row in found
    }
    for row in found:
        assert 0 < float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
        assert row["torch"] and row["date"] and row["device"]


def test_bench_decode_shows_bytes_and_speed_of_the_cache(tmp_path):
    path = tmp_path / "d.csv"
    assert run("--decode", "--lengths", "64", "--repeats", "1", "--out", str(path)) == 0
    cached = {
        (row["encoding"], row["kind"]): row for row in rows(path) if row["case"] == "with cache"
    }
    # float32 keys and values of 64 tokens, one key/value head of 64 in multi-query attention
    assert int(cached["rope", "multi-query"]["cache_bytes"]) == 2 * 64 * 64 * 4
    assert int(cached["rope", "multi-head"]["cache_bytes"]) == 8 * 2 * 64 * 64 * 4
    assert cached["rerope", "multi-head"]["keys"] == "raw"
    assert float(cached["rope", "multi-head"]["tokens_per_second"]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "1000000000000"), "1,000,000,000,000 tokens"),
        (("--decode", "--lengths", "1000000000"), "1,000,000,000 tokens"),
        (("--heads", "1000000000"), "of memory, and there are"),
        (("--threads", "1000000"), "--threads must be at most"),
        (("--repeats", "1000000000000"), "days"),
        (("--out", "."), "is a folder; name a file in it"),
        (("--out", "/dev/null/rows.csv"), "/dev/null"),
    ],
)
def test_bench_refuses_what_cannot_be_before_it_measures(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(measure, "interleaved", lambda *given: pytest.fail("measured"))
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_peer_that_cannot_take_a_size_is_left_out_with_a_line(tmp_path, capsys):
    pytest.importorskip("rotary_embedding_torch")
    path = tmp_path / "b.csv"
    sizes = ("--lengths", "1", "--heads", "1", "--kv-heads", "1", "--head-dim", "2")
    assert run(*sizes, "--repeats", "1", "--out", str(path)) == 0
    assert "rotary-embedding-torch (cos, sin per call): cannot take head_dim 2" in (
        capsys.readouterr().err
    )
    assert {"clone", "alibi"} <= {row["case"] for row in rows(path)}


def test_clock_that_shows_no_time_gives_no_ratio():
    (row,) = measure.timing_rows("q", {}, {"floor": [0.0]}, "floor", {})
    assert row["ratio"] == ""


@pytest.mark.parametrize(("option", "value"), [("--lengths", "1k"), ("--head-dim", "63")])
def test_bench_refuses_sizes_that_cannot_be(option, value, capsys):
    assert run(option, value) == 2
    assert option in (message := capsys.readouterr().err) and repr(value) in message


def test_bench_measures_the_heads_that_it_is_given(tmp_path):
    path = tmp_path / "b.csv"
    sizes = ("--lengths", "32", "--heads", "6", "--kv-heads", "2", "--head-dim", "16")
    assert run(*sizes, "--repeats", "1", "--backward", "--out", str(path)) == 0
    rotated = [row for row in rows(path) if row["question"] == "rope"]
    assert {(row["heads"], row["kv_heads"], row["head_dim"]) for row in rotated} == {
        ("6", "2", "16")
    }


def test_json_is_one_list_of_the_same_rows(tmp_path, capsys):
    path = tmp_path / "b.csv"
    sizes = ("--lengths", "32", "--heads", "2", "--kv-heads", "2", "--head-dim", "16")
    assert run(*sizes, "--repeats", "1", "--json", "--out", str(path)) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in found] == [row["case"] for row in rows(path)]


def test_several_threads_are_timed_by_the_wall():
    """The calling thread's own clock stands still while others work for it."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        own = measure.interleaved({"sleep": lambda: time.sleep(0.02)}, 1)
        torch.set_num_threads(2)
        wall = measure.interleaved({"sleep": lambda: time.sleep(0.02)}, 1)
    finally:
        torch.set_num_threads(before)
    assert own["sleep"][0] < 0.01 < 0.02 <= wall["sleep"][0]


def test_the_interval_holds_the_median_of_ratios_within_rounds():
    floor = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]  # a machine that grows slower and slower
    values = [2 * x for x in floor]
    assert measure.ratio_interval(values, floor) == (2.0, 2.0)
    noisy = [x * r for x, r in zip(floor, (9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0), strict=True)]
    assert measure.ratio_interval(noisy, floor) == (1.0, 9.0)
    ratios = [float(r) for r in range(1, 22)]  # ranks 6 and 16 of 21: tables of the sign test
    assert measure.ratio_interval(ratios, [1.0] * 21) == (6.0, 16.0)


def test_a_ratio_is_of_rounds_as_its_interval_is():
    floor = [1.0] * 10 + [10.0] * 11  # a machine that changed its speed; medians are 10 and 1
    seconds = {"floor": floor, "same but for two rounds": [*floor[:-2], 0.5, 0.5]}
    _, row = measure.timing_rows("q", {}, seconds, "floor", {})
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == ("1.000", "1.000", "1.000")


def test_tables_are_made_in_each_timed_call(monkeypatch):
    made = []
    tables = posenc.RoPE._tables
    monkeypatch.setattr(
        posenc.RoPE, "_tables", lambda self, *args: made.append(self) or tables(self, *args)
    )
    monkeypatch.setattr(rope.rope_peers, "rotation_peers", lambda *args: {})
    rope.measure_rotation((64,), (16,), 3, False, dtypes=(torch.float32,))
    calls = [made.count(encoding) for encoding in dict.fromkeys(made)]
    assert calls == [5, 5], "a warm-up, the memory, three rounds"


def test_quantiles_are_measured_values():
    assert measure.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert measure.quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.5) == 3.0
    assert measure.quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.8) == 4.0


def test_peers_with_a_bias_agree_with_ours_before_they_are_timed():
    pytest.importorskip("x_transformers")
    found = bias.measure_bias(("alibi", "t5"), (220,), 1, backward=False, peers=True)
    assert {"x-transformers alibi, flash", "x-transformers t5"} <= {row["case"] for row in found}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what lies on the GPU")
def test_live_bytes_are_those_alive_together():
    def case():
        for size in (1_000_000, 2_000_000):
            torch.empty(size, dtype=torch.uint8)
        kept = torch.empty(500_000, dtype=torch.uint8)
        return kept, torch.empty(1_700_000, dtype=torch.uint8)

    assert measure.live_bytes(case) == pytest.approx(2_200_000, abs=1000)


def test_memory_is_fitted_by_an_exponent_of_length():
    assert bias._exponent((1024, 2048, 4096), (3, 6, 12)) == pytest.approx(1)
    assert bias._exponent((1024, 2048, 4096), (1, 4, 16)) == pytest.approx(2)
    rows = bias.measure_memory(("shaw",), (256, 512))
    assert [row["n"] for row in rows] == [256, 512]
    assert all(float(row["beyond_output_mib"]) >= 0 for row in rows)
