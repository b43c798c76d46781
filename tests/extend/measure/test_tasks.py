"""Tasks in words: positions of facts in the text, and scores of right and wrong models."""

import json
import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from posenc import extend as hf
from posenc.extend.measure.evaluation import mean_loss_rise, short_windows
from posenc.extend.measure.losses import LossReader
from posenc.extend.measure.tasks import (
    COUNTRY_OF_CITY,
    PUZZLE_RECIPES,
    TASKS,
    TaskGrid,
    TaskScore,
    parse_task_names,
)
from posenc.extend.options import Options
from posenc.extend.recommendation import Outcome
from posenc.extend.report import _perplexity_rise, task_table
from posenc.hf.checkpoint.tokenization import Windows
from posenc.report.report import cell_text
from posenc.statistics.text_intervals import Estimate, fraction_interval
from tests.hf_models import LENGTH, save

TARGET = 8 * LENGTH
FILLER = torch.tensor(list(b"The river went on, and nobody asked why it did. " * 40))
DOCUMENTS = [f"{i} the fox and the dog " * 40 for i in range(8)]


def as_bytes(text: str) -> list[int]:
    return [256, *text.encode()]  # 256 starts a text


def grid(*names: str, **options) -> TaskGrid:
    return TaskGrid(names, (TARGET,), as_bytes, **options)


def text_of(ids: torch.Tensor) -> str:
    assert ids[0] == 256
    return bytes(ids[1:].tolist()).decode()


@pytest.mark.parametrize("name", PUZZLE_RECIPES)
def test_a_prompt_has_the_length_and_ends_with_its_answer(name):
    prompts = grid(name, num_trials=3).make_prompts(name, TARGET, FILLER)
    assert len(prompts) == 15
    assert len({text_of(ids) for ids, _ in prompts}) == 15
    for ids, count in prompts:
        assert ids.shape == (TARGET,)
        assert answer_of(name, text_of(ids)) == text_of(ids)[-count:].strip()


def answer_of(name: str, text: str) -> str:
    """What somebody answers who reads the text, not the code that wrote it."""
    if name in ("needle", "needles"):
        asked = re.findall(r"number of (\w+) is", text)[-1]
        (told,) = re.findall(rf"number of {asked} is (\d+)\.", text)
        assert len(re.findall(r"is \d+\.", text)) == (1 if name == "needle" else 4)
        return told
    if name == "needle-by-meaning":
        (country,) = re.findall(r"a city of (\w+) lives", text)
        lives = dict(re.findall(r"In (\w+) lives (\w+)\.", text))
        assert len(lives) == 4 and text.count(country) == 1 and country not in lives
        return next(who for city, who in lives.items() if COUNTRY_OF_CITY[city] == country)
    assert name == "variables"
    holds: dict[str, str] = {}
    for variable, said in re.findall(r"Let (\w+) = (\w+)\.", text):
        holds[variable] = holds.get(said, said)
    (asked,) = re.findall(r"stand for (\d+),", text)
    found = [variable for variable, value in holds.items() if value == asked]
    assert 0 < len(found) < len(holds)
    return " ".join(found)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_stands_at_its_depth(depth):
    ((ids, _),) = grid("needle", num_trials=1, depths=(depth,)).make_prompts(
        "needle", TARGET, FILLER
    )
    text = text_of(ids)
    before = text.index(" The secret")
    body = len(re.sub(r" The secret .*?\d+\. ", "", text)) - len(text[text.rindex("The secret") :])
    assert before == pytest.approx(depth * body, abs=1)


def test_every_variant_reads_the_same_prompts():
    once, again = (grid("needles").make_prompts("needles", TARGET, FILLER) for _ in range(2))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(once, again, strict=True))


class Oracle:
    """A model that knows every answer but those of some rows: it predicts the next token."""

    device = torch.device("cpu")

    def __init__(self, wrong: set[int]) -> None:
        self.wrong, self.row = wrong, 0

    def forward(self, tokens, use_cache, logits_to_keep):
        raise NotImplementedError

    def __call__(self, tokens, use_cache, logits_to_keep):
        logits = torch.zeros(*tokens.shape, 257)
        for i, row in enumerate(tokens):
            right = row[1:].clone()
            if self.row + i in self.wrong:
                right[-1] = (right[-1] + 1) % 256
            logits[i, :-1].scatter_(1, right[:, None], 30.0)
        self.row += len(tokens)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def test_exact_match_needs_every_token_and_depths_are_kept_apart():
    wrong = {0, 1, 2}  # the first depth has two prompts
    scores, left_out = grid("needle").scores(LossReader(Oracle(wrong)), FILLER, lambda *_: None)
    assert left_out == {}
    score = scores["needle", TARGET]
    assert [cell.exact for cell in score.by_depth.values()] == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert score.exact_share.mean == 0.7
    assert (score.exact_share.low, score.exact_share.high) == fraction_interval(7, 10)
    losses = [cell.loss for cell in score.by_depth.values()]
    assert losses[0] > losses[1] > losses[2] == pytest.approx(0, abs=1e-6)
    assert score.loss.low <= score.loss.mean <= score.loss.high


@pytest.mark.parametrize(
    "right, counted", [({"none": 0.95}, True), ({"ntk": 0.9}, True), ({}, False)]
)
def test_a_far_score_counts_only_where_some_method_answers_the_short_text(right, counted):
    def score(exact):
        return TaskScore(Estimate(exact, 0, 1, 9), Estimate(2.5, 2, 3, 9), {})

    found = {
        name: SimpleNamespace(
            task_scores={
                ("needle", 64): score(right.get(name, math.nan)),
                ("needle", 256): score(0.4),
            }
        )
        for name in ("none", "ntk")
    }
    outcome: Any = Outcome(None, 256, {}, "", "")  # type: ignore[arg-type]
    outcome.evaluations, outcome.short_text_rises = (lambda: found), dict
    assert (
        outcome.score_is_meaningful("needle", 64)
        and outcome.score_is_meaningful("needle", 256) == counted
    )
    table = task_table(outcome)
    assert table is not None
    names = [getattr(each, "text", each) for each in table.header]
    shown = [dict(zip(names, map(cell_text, row), strict=True)) for row in table.rows]
    exact = "40% (0%–100%)" if counted else "not learned"
    assert [row["needle, 256"] for row in shown] == [exact] * 2
    assert [row["needle, 256: loss"] for row in shown] == ["2.50"] * 2


def test_wilsons_interval_covers_what_it_should():
    rng = np.random.default_rng(0)
    for share in (0.1, 0.5, 0.9):
        seen = rng.binomial(20, share, 2000)
        covered = [
            low <= share <= high for low, high in (fraction_interval(int(k), 20) for k in seen)
        ]
        assert 0.92 < np.mean(covered) < 0.99


def test_a_task_that_does_not_fit_says_so():
    small = TaskGrid(("variables",), (48,), as_bytes)
    scores, left_out = small.scores(LossReader(Oracle(set())), FILLER, lambda *_: None)
    assert scores == {}
    assert "48 tokens are too few" in left_out["variables", 48]


@pytest.mark.parametrize("said", [[""], ["needel"], ["needle", "none"], ["passkey", "haystack"]])
def test_an_unknown_task_is_refused_with_the_known_ones(said):
    with pytest.raises(ValueError, match=r"--task must be passkey, needle, needles, variables"):
        parse_task_names(said)


def test_names_of_tasks_are_read():
    assert parse_task_names(["none"]) == ()
    assert parse_task_names(None) == ("passkey",)
    assert parse_task_names(["needle", "variables", "needle"]) == ("needle", "variables")
    assert set(parse_task_names(TASKS)) == set(TASKS)
    assert parse_task_names(["needle_by_meaning", "needle-by-meaning"]) == ("needle-by-meaning",)


def test_short_texts_are_the_same_before_and_after():
    tokens = torch.arange(4 * 200).view(4, 200)
    windows = Windows(tokens, tokens // 100)
    pieces = short_windows(windows, 64)
    assert pieces.tokens.shape == (12, 64)
    assert torch.equal(pieces.tokens[1], tokens[0, 64:128])
    before = np.ones((12, 64))
    before[:, 0] = np.nan
    after = before + 0.25
    rise = mean_loss_rise(before, after, pieces.document_of_token.numpy())
    assert (rise.mean, rise.low, rise.high) == (0.25, 0.25, 0.25)
    assert rise.tokens == 12 * 63


def test_no_change_has_no_sign_of_a_gain():
    assert str(_perplexity_rise(Estimate(-1e-6, math.nan, math.nan, 9))) == "+0.0 %"
    assert str(_perplexity_rise(Estimate(0.1, -0.0001, 0.2, 9))) == "+10.5 % (+0.0 to +22.1)"


def test_what_short_texts_cost_is_measured_and_the_baseline_is_not_in_it(tmp_path):
    folder = save("llama", tmp_path / "llama", spread=0.5)
    options = Options(windows=2, search_evaluations=0, task=["none"], anyway=True)
    outcome = hf.extend(folder, 3 * LENGTH, DOCUMENTS, method="linear", options=options)
    assert set(outcome.short_text_rises()) == {"linear"}
    assert outcome.short_text_rises()["linear"].mean != 0
    assert outcome.measured["none"][1].passkey_shares == {}


def test_programs_get_everything_as_json(tmp_path, call):
    folder, text = save("llama", tmp_path / "llama"), tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join(DOCUMENTS))
    asked = [
        "--windows",
        2,
        "--task",
        "needle",
        "--task",
        "variables",
        "--json",
        "--task-trials",
        1,
    ]
    code, out, err = call(
        "extend", folder, "--to", TARGET, "--method", "ntk", "--text", text, *asked
    )
    assert code == 0, err
    found = json.loads(out)
    assert found["trained_length"] == LENGTH
    assert set(found["measured"]) == {"none", "ntk", "window"}
    ntk = found["measured"]["ntk"]
    assert [(t["task"], t["length"]) for t in ntk["tasks"]][-1] == ("variables", TARGET)
    assert len(ntk["tasks"][0]["by_depth"]) == 5
    assert ntk["short_text_rise"]["tokens"] > 0
    assert ntk["passkey"] == []
    assert "Tasks answered exactly" not in err


def test_tasks_in_words_need_a_tokenizer(tmp_path):
    folder = save("llama", tmp_path / "llama")
    with pytest.raises(ValueError, match="--task needle: --ids leaves no words"):
        hf.extend(
            folder, TARGET, ["1 2 3"], as_ids=True, options=Options(task=["needle", "passkey"])
        )
