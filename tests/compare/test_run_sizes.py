"""Several sizes: their models, their steps, and each lead over size."""

import json
from dataclasses import replace

import numpy as np
import pytest

from posenc.compare import run_sizes
from posenc.compare.options import Options
from posenc.compare.plan.plan import make_plan
from posenc.compare.plan.sizes import count_parameters, ladder_sizes
from posenc.compare.run_sizes import (
    SizeLosses,
    lead_sentence,
    leads_over_size,
    losses_of_size,
    report_of_ladder,
    slope_per_doubling,
)
from posenc.compare.trial.train import build_model
from tests.compare.page.test_text_tables import STUDY
from tests.texts import prose


def test_sizes_are_models_of_one_rule_and_near_what_was_asked():
    for size in ladder_sizes("0.2M,0.9M,3.5M,20M,1G"):
        asked = float(size.name[:-1]) * {"M": 1e6, "G": 1e9}[size.name[-1]]
        assert abs(size.parameters / asked - 1) <= 0.25
        assert size.width == 32 * size.heads and size.layers >= 4
        assert abs(size.layers - size.width / 32) <= 1 or size.layers <= 5


@pytest.mark.parametrize("name", ["0.06M", "0.2M", "0.9M", "3.5M"])
def test_parameters_are_those_of_the_model(name):
    size, _ = ladder_sizes(f"{name},30M")
    trial = make_plan(Options(["nope", "rope"])).task_trials[0]
    sizes = {"width": size.width, "layers": size.layers, "heads": size.heads}
    model = build_model(replace(trial, encoding="nope", **sizes, kv_heads=size.heads))
    assert sum(p.numel() for p in model.parameters()) == size.parameters


def test_a_ladder_of_tokens_counts_their_tables():
    size, _ = ladder_sizes("0.7M,30M", 4097)
    trial = make_plan(Options(["nope", "rope"])).task_trials[0]
    sizes = {"width": size.width, "layers": size.layers, "heads": size.heads}
    sizes |= {"vocabulary": 4097, "document_end": 4096}
    model = build_model(replace(trial, encoding="nope", **sizes, kv_heads=size.heads))
    assert sum(p.numel() for p in model.parameters()) == size.parameters
    with pytest.raises(ValueError, match=r"no model of the ladder has 0\.2M"):
        ladder_sizes("0.2M,30M", 4097)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.9M", "needs at least two models that differ"),
        ("0.9M,0.9M", "needs at least two models that differ"),
        ("0.88M,0.9M", "needs at least two models that differ"),
        ("small,large", "must be sizes such as 0.2M,0.9M,3.5M, got 'small'"),
        ("0.9,3.5", "must be sizes such as"),
        ("0M,1M", "must be sizes such as"),
        ("1k,1M", "no model of the ladder has 1k parameters; the nearest has "),
        ("", "must be sizes such as"),
    ],
)
def test_sizes_that_are_none_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        ladder_sizes(text)


def test_steps_are_as_many_tokens_for_each_parameter():
    sized = run_sizes._options_by_size(Options(sizes="0.2M,0.9M,3.5M", steps=400))
    parameters = [count_parameters(o.width, o.layers) for _, o in sized]
    ratios = [options.steps / count for (_, options), count in zip(sized, parameters, strict=True)]
    assert np.ptp(ratios) / np.mean(ratios) < 0.01
    assert dict(sized)["0.9M"].steps == 400
    assert {options.tune for _, options in sized} == {False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 64}, "--sizes chooses --width"),
        ({"layers": 2}, "--sizes chooses --layers"),
        ({"task": ["copy"]}, "are for text"),
        ({"suite": True}, "are for text"),
        ({"also": ["nowhere"]}, "--also: nowhere holds no study.json"),
    ],
    ids=str,
)
def test_what_does_not_fit_sizes_is_refused_before_anything_is_trained(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_sizes.run(Options(["rope", "t5"], sizes="0.2M,0.9M", out=tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


def test_a_lead_is_the_distance_to_the_best_other_row():
    sizes = [(1000, {"a": 2.0, "b": 2.3, "c": 2.1}), (4000, {"a": 1.9, "b": 1.7, "d": 1.0})]
    leads = leads_over_size(sizes)
    assert leads == {"a": pytest.approx([0.3, -0.2]), "b": pytest.approx([-0.3, 0.2])}
    assert slope_per_doubling([1000, 4000], leads["b"]) == pytest.approx(0.25)
    x, y = np.log2([1000, 2000, 9000]), [0.4, 0.1, 0.2]
    assert slope_per_doubling([1000, 2000, 9000], y) == pytest.approx(np.polyfit(x, y, 1)[0])
    assert slope_per_doubling([1000], [0.1]) is None and leads_over_size([(1, {"a": 1.0})]) == {}


def test_another_reading_of_the_same_weights_is_no_rival():
    losses = losses_of_size(STUDY)
    leads = leads_over_size([(1000, losses.near)], losses.encoding_of)
    assert leads["rope in a window"] == pytest.approx([2.1 - 1.9])
    assert leads["rope"] == pytest.approx([2.1 - 4.0])
    assert leads["alibi"] == pytest.approx([1.9 - 2.1])
    alone = {"rope": 4.0, "rope in a window": 1.9}
    assert leads_over_size([(1000, alone)], losses.encoding_of) == {}


def test_the_sentence_says_a_lead_at_each_size_and_where_it_was_behind():
    leads = {"t5": [0.05, 0.02], "rope": [-0.05, -0.02]}
    said = lead_sentence([200_000, 3_500_000], leads, "at the training length")
    assert said.startswith("t5 leads by 0.05 at 0.2 M, 0.02 at 3.5 M at the training length (-0.00")
    turned = lead_sentence([200_000, 3_500_000], {"t5": [0.05, -0.02], "rope": [-0.05, 0.02]}, "x")
    assert turned.startswith("rope is behind by 0.05 at 0.2 M, leads by 0.02 at 3.5 M x")


def test_losses_of_a_size_are_means_over_seeds_of_every_row():
    losses = losses_of_size(STUDY)
    assert losses.near == {"rope": 4.0, "rope in a window": 1.9, "alibi": 2.1}
    assert losses.far["rope in a window"] == pytest.approx(2.65)


def test_a_page_without_two_rows_in_all_sizes_says_so():
    sizes = [SizeLosses(1000, {"a": 2.0}, {}), SizeLosses(2000, {"b": 2.0}, {})]
    assert "no lead is known" in report_of_ladder(sizes).headline


@pytest.mark.slow
def test_two_sizes_are_trained_and_a_third_joins(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(prose(9000))
    small = {"text": [str(text)], "train_length": 8, "batch": 2, "seeds": 1, "test_lengths": "16"}
    options = Options(["rope", "alibi"], steps=3, workers=2, tune_steps=0, num_windows=8, **small)
    run_sizes.run(replace(options, width=32, layers=2, heads=1, out=tmp_path / "tiny"), show=False)
    also = [str(tmp_path / "tiny")]
    sized = replace(options, sizes="0.06M,0.2M", also=also, out=tmp_path / "out")
    run_sizes.run(replace(sized, dry_run=True), show=False)
    assert not (tmp_path / "out").exists()
    study = run_sizes.run(replace(sized, figures=tmp_path / "figures"), show=False)
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} >= {".svg", ".csv"}
    assert study.trials[0].width == 64
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Leads by size" in page and "rope in a window" in page
    trials = json.loads((tmp_path / "out" / "0.06M" / "study.json").read_text())["trials"]
    assert {trial["width"] for trial in trials} == {32}
    with pytest.raises(ValueError, match="of another recipe than this run, in batch: 2, here 4"):
        run_sizes.run(replace(options, batch=4, sizes="0.06M,0.2M", also=also, out=tmp_path / "no"))
