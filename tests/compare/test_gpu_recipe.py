"""The recipe for a device: planned and counted whole without memory, run in small on a CPU."""

import dataclasses
from pathlib import Path

import pytest
import torch

from posenc.compare.options import Options
from posenc.compare.plan.cost import check_cost
from posenc.compare.results import Study
from tests.experiment import experiment

pytestmark = pytest.mark.slow  # a script of this repository, not of posenc

recipe = experiment("gpu_recipe")
WHOLE = Options(**recipe.RECIPE)


def test_the_whole_recipe_is_planned_without_memory():
    trials = recipe.planned(WHOLE)
    assert [trial.encoding for trial in trials] == list(recipe.ENCODINGS)
    for trial in trials:
        assert (trial.device, trial.precision) == ("cuda", "bfloat16")
        assert (trial.train_length, max(trial.test_lengths)) == (1024, 16384)
        parameters = list(recipe.unallocated(trial).parameters())
        assert all(p.is_meta for p in parameters)
        assert 30e6 < sum(p.numel() for p in parameters) < 100e6
    # One of these would not fit into the memory of any machine.
    beyond = dataclasses.replace(trials[0], width=1 << 20)
    assert sum(p.numel() for p in recipe.unallocated(beyond).parameters()) > 1e14


def test_what_it_takes_is_counted(run):
    _, said, _ = run(recipe, "--count", "rope", "--seeds", 2, "--teraflops", 100)
    # Embeddings and head; of each layer four projections, a gated feed-forward, two norms; a norm.
    own = 2 * 257 * 512 + 12 * (4 * 512**2 + 3 * 512 * 1376 + 2 * 512) + 512
    tokens = 24_000 * 32 * 1024
    assert said.startswith("Counted, not measured:\n")
    assert f"  rope: {own:,} parameters, 0 of them" in said
    # On two texts: two seeds and three learning rates of one encoding.
    assert "10 trials on 2 texts, 6 of them for the learning rates, of 24,000 steps" in said
    assert f"in bfloat16: {tokens:,} bytes each, {10 * tokens:,}" in said
    kept = 12 * 1024 * 32 * (34 * 512 + 5 * 8 * 1024)
    assert f"about {(16 * own + kept) / 2**30:.0f}." in said  # logits are the rest
    # Six operations for each weight and byte, and twelve for each pair of each layer and channel.
    operations = 10 * tokens * (6 * own + 12 * 12 * 512 * 1024)
    hours = operations / 40e12 / 3600
    (line,) = [line for line in said.splitlines() if "hours" in line]
    assert float(line.split("; ")[1].split()[0]) == pytest.approx(hours, rel=0.02)
    assert line.endswith(f"{4 * hours:.1f} hours at 40% to 10% of 100 teraFLOP/s") or (
        float(line.split(" to ")[1].split()[0]) == pytest.approx(4 * hours, rel=0.02)
    )


def test_the_command_would_start_it_where_there_is_a_device():
    trials = recipe.planned(WHOLE)
    check_cost(trials[:1], list(recipe.ENCODINGS), 3, 1, WHOLE.yes)
    with pytest.raises(ValueError, match="24 trials of 24,000 steps would take about"):
        check_cost(trials[:1], list(recipe.ENCODINGS), 3, 1, False)


@pytest.mark.parametrize(
    "words, reason",
    [
        ([], "--text: give it 2 times, with different texts."),
        (["--text", __file__], "--text: give it 2 times"),
        (["--text", __file__, "--text", __file__], "--text: give it 2 times"),
        (["--tiny", "--text", __file__, "--text", "no/such/file"], "no/such/file"),
        (["--count", "--seeds", "0"], "--seeds must be a whole number of at least 1, got 0."),
        pytest.param(
            ["--text", __file__, "--text", recipe.__file__], "torch sees no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)  # fmt: skip
def test_what_cannot_run_here_is_said_in_a_line(words, reason, run):
    code, _, err = run(recipe, *words)
    assert code == 2 and reason in err.splitlines()[-1]


def test_the_same_recipe_runs_in_small_on_a_cpu(tmp_path, run, text):
    sizes = {"train_length", "test_lengths", "steps", "batch", "width", "layers", "heads"}
    other = {key for key, value in recipe.RECIPE.items() if recipe.TINY[key] != value}
    assert other == sizes | {"seeds", "device", "checkpoint_steps"}
    out, other = tmp_path / "out", tmp_path / "other.txt"
    other.write_bytes(text.read_bytes()[::-1])
    words = ("alibi", "rope", "--tiny", "--text", text, "--text", other, "--out", out)
    assert run(recipe, *words)[0] == 0
    hashes = set()
    for name in ("1-text.txt", "2-other.txt"):
        study = Study.from_json(Path(out, name, "study.json").read_text(encoding="utf-8"))
        hashes.add(study.corpus.hash)
        assert [row.encoding for row in study.summary] == ["alibi", "rope"]
        for row in study.summary:
            assert [score.length for score in row.by_length] == [32, 64, 128, 256, 512]
            assert all(0 < score.mean < 20 for score in row.by_length)
        assert {trial.precision for trial in study.trials} == {"bfloat16"}
        assert {each.encoding: len(each.tried) for each in study.rates} == {"alibi": 3, "rope": 3}
    assert len(hashes) == 2
