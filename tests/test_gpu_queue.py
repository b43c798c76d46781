"""The queue of experiments for a GPU, in small on the CPU."""

import json
import subprocess
import sys

import pytest
import torch

from tests.experiment import FOLDER, experiment

SCRIPT = FOLDER / "gpu_queue.py"


def run(out, *options):
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def run_here(monkeypatch):
    """run_here(out, "--minutes", ...): the same in this process, for queues that start no row."""

    def called(out, *options):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--dry-run", "--out", str(out), *options])
        experiment("gpu_queue").main()

    return called


def lines(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_a_dry_run_ends_every_row_and_a_second_one_has_none_left(tmp_path):
    out = tmp_path / "gpu.jsonl"
    assert run(out).returncode == 0
    found = lines(out)
    names = [row.name for row in experiment("gpu_queue").rows(dry=True)]
    ended = {line["row"]: line for line in found if "started" not in line}
    assert sorted(ended) == sorted(names)
    assert all("result" in line and line["torch"] for line in ended.values()), ended
    assert all(check.get("ok", True) for check in ended["correct/alibi"]["result"]["checks"])
    assert ended["same/t5"]["result"]["same"] is True
    assert ended["kernels/t5/64"]["result"]["both"] > 0
    assert ended["decode/alibi/64"]["result"]["error"] < 1e-5
    assert ended["rotation/64"]["result"]["half-split"] > 0
    trial = next(line for name, line in ended.items() if name.startswith("trial/"))
    assert all(each["failed"] is None and each["by_length"] for each in trial["result"]["trials"])
    assert "of" in run(out).stdout and lines(out) == found, "nothing was left"


def test_a_row_that_was_killed_starts_again_but_not_for_ever(run_here, tmp_path):
    out, queue = tmp_path / "gpu.jsonl", experiment("gpu_queue")
    name = "decode/alibi/64"
    out.write_text(json.dumps({"row": name, "started": "00:00:00"}) + '\n{"row": "same/t5", "st')
    assert queue.state_of(out) == (set(), {name: 1}), "the last line is of a lost machine"
    out.write_text((json.dumps({"row": name, "started": "00:00:00"}) + "\n") * queue.STARTS)
    run_here(out, "--only", name)
    assert "did not end" in lines(out)[-1]["failed"]
    assert queue.state_of(out)[0] == {name}


def test_no_row_starts_that_is_not_expected_to_end_in_time(run_here, tmp_path):
    out = tmp_path / "gpu.jsonl"
    run_here(out, "--minutes", "0.1")
    assert lines(out) == []


def test_a_trial_has_a_name_a_question_and_a_time(tmp_path, monkeypatch):
    queue = experiment("gpu_queue")
    assert len(queue.trials()) >= 2
    monkeypatch.setattr(queue, "QUEUE", tmp_path / "queue.toml")
    good = '[[trial]]\nname = "a"\nwhy = "?"\nseconds = 1\nencodings = ["rope"]\noptions = {}\n'
    queue.QUEUE.write_text(good + good)
    with pytest.raises(ValueError, match="two trials have one name"):
        queue.trials()
    queue.QUEUE.write_text(good.replace("why", "reason"))
    with pytest.raises(ValueError, match="other keys than it needs"):
        queue.trials()


@pytest.mark.parametrize("card", [None, "Tesla T4"])
def test_without_a_card_for_bfloat16_it_ends_in_one_line(card, tmp_path, monkeypatch, capsys):
    out = tmp_path / "gpu.jsonl"
    queue = experiment("gpu_queue")
    monkeypatch.setattr(sys, "argv", ["gpu_queue.py", "--out", str(out)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    monkeypatch.setattr(queue, "run_queue", lambda *_: out.touch())
    with pytest.raises(SystemExit) as ended:
        queue.main()
    said = capsys.readouterr().err.splitlines()[-1]
    start = (
        "torch sees no CUDA device here" if card is None else "Tesla T4 does not multiply bfloat16"
    )
    assert ended.value.code == 2 and start in said and not out.exists()
