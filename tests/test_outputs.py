"""A place where nothing can be written is refused in one line, before the work."""

import os
import stat

import pytest

COMMANDS = [
    "inspect encoding rope --out",
    "inspect model {model} --bytes --out",
    "inspect encoding rope --figures",
    "bench --quick --out",
    "explore --out",
    "extend {model} --to 128 --bytes --report",
    "extend {model} --to 128 --bytes --out",
    "report run run --out",
]


@pytest.fixture
def never(monkeypatch):
    """No command comes to its work."""
    for name in (
        "posenc.inspect.api.measure",
        "posenc.inspect.checkpoint.measurements.load_checkpoint",
        "posenc.bench.measure.measure_case",
        "posenc.extend.extension.load_checkpoint",
        "posenc.compare.reports.report_runs.write_report_files",
    ):
        monkeypatch.setattr(name, lambda *given, name=name: pytest.fail(f"came to {name}"))


@pytest.fixture
def places(tmp_path, monkeypatch):
    from tests.compare.test_tasks import result, study_of

    run = study_of(*(result("rope", seed, (1.0, 0.6), "copy") for seed in (0, 1)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "study.json").write_text(run.to_json(), encoding="utf-8")
    (tmp_path / "file").write_bytes(b"kept")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize("place", ["pipe", "file/below", "/dev/null", "/dev/full/below"])
@pytest.mark.parametrize("line", COMMANDS)
def test_no_place_to_write_is_one_line_before_the_work(line, place, never, places, llama, call):
    code, out, said = call(*line.format(model=llama).split(), place)
    assert (code, out, said.count("\n")) == (2, "", 1)
    assert place.removesuffix("/below") in said
    assert stat.S_ISFIFO((places / "pipe").stat().st_mode)
    assert (places / "file").read_bytes() == b"kept"
    assert sorted(p.name for p in places.iterdir()) == ["file", "pipe", "run"]


@pytest.mark.parametrize(
    "option", ["--task 16", "--method yran", "--device tpu", "--precision int8"]
)
def test_a_wrong_choice_of_extend_is_said_before_the_model_is_loaded(option, never, llama, call):
    code, out, said = call("extend", llama, "--to", 128, *option.split())
    assert (code, out, said.count("\n")) == (2, "", 1) and option.split()[0] in said


@pytest.mark.parametrize("option", ["--heads", "--head-dim"])
def test_inspect_refuses_sizes_that_no_model_has(option, never, call):
    code, _, said = call("inspect", "encoding", "rope", option, 1_000_000_000)
    assert code == 2 and said.count("\n") == 1 and "8192" in said
