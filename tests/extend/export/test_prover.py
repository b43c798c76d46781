"""The process that proves an export: started apart from posenc, asked by one line of JSON, heard or
reported. What it computes is tested in this process, which has loaded transformers."""

from types import SimpleNamespace

import pytest
import torch

from posenc.command_line.errors import RunFailed
from posenc.extend.export import prover
from posenc.extend.export.prover import Proof, Prover

ANSWERS = """\
import json, os, sys
asked = json.loads(sys.stdin.read())
assert int(sys.argv[1]) == os.getppid()
assert os.path.dirname(__file__) not in sys.path
assert asked[2:] == ["masked", "float32", "cpu", "past_key_values"]
print("a line of a library")
print(json.dumps({
    "inv_freq_error": 0.5, "logits_error": os.path.getsize(asked[1]), "decode_error": 0.25,
    "padding_error": None, "num_generated": 8,
}))
"""
FAILS = "import sys\nsys.stdin.read()\nraise KeyError('rope_type')\n"


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """compared(script) -> the proof of a process that runs this script in place of posenc's"""
    monkeypatch.setattr(prover, "__file__", str(tmp_path / "prover.py"))
    monkeypatch.setattr(prover, "cache_argument_name", lambda model: "past_key_values")
    model = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))

    def run(script: str) -> Proof:
        (tmp_path / "stock_reader.py").write_text(script, encoding="utf-8")
        with Prover() as running:
            return running.compare(tmp_path, {"logits": torch.tensor([-3.0])}, model, "masked")

    return run


def test_the_process_gets_one_line_and_the_expected_numbers(compared):
    proof = compared(ANSWERS)
    assert (proof.inv_freq_error, proof.decode_error, proof.padding_error) == (0.5, 0.25, None)
    assert proof.logits_error > 4  # bytes of the file with what is expected
    assert (proof.num_generated, proof.rounding, proof.largest_logit) == (8, 0.0, 3.0)


def test_a_process_that_fails_ends_the_run_with_its_last_line(compared):
    with pytest.raises(RunFailed, match=r"load in stock transformers: KeyError: 'rope_type'"):
        compared(FAILS)
