"""Test retrieval from far back, by tasks in the model's own tokenizer and by random passkeys."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.command_line.options import require_choice
from posenc.extend.measure.losses import MAX_TOKENS_PER_BATCH, LossReader, last_logits
from posenc.hf.checkpoint.tokenization import Windows
from posenc.statistics.text_intervals import Estimate, estimate_mean, fraction_interval
from posenc.tasks.needles import (
    draw_needle_puzzle,
    draw_needles_puzzle,
    draw_passkey_text,
    draw_variables_puzzle,
    insert_facts,
)

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
COUNTRY_OF_CITY = {
    "Paris": "France",
    "Berlin": "Germany",
    "Rome": "Italy",
    "Madrid": "Spain",
    "Tokyo": "Japan",
    "Moscow": "Russia",
    "Cairo": "Egypt",
    "Athens": "Greece",
    "Vienna": "Austria",
    "Lisbon": "Portugal",
    "Warsaw": "Poland",
    "Dublin": "Ireland",
}
"""Cities and their countries, which have no word in common."""
SECRET_SENTENCE = "The secret number of {} is"
PUZZLE_RECIPES = {
    "needle": (draw_needle_puzzle, SECRET_SENTENCE + " {}.", SECRET_SENTENCE),
    "needles": (draw_needles_puzzle, SECRET_SENTENCE + " {}.", SECRET_SENTENCE),
    "variables": (
        draw_variables_puzzle,
        "Let {} = {}.",
        "The names that stand for {}, in the order of the text, are",
    ),
    "needle-by-meaning": (draw_needles_puzzle, "In {} lives {}.", "In a city of {} lives"),
}
"""By task: the function that draws its puzzle, the sentence of a fact, and the sentence that asks
for the answer, which follows it."""
PASSKEY = "passkey"
TASKS = (PASSKEY, *PUZZLE_RECIPES)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
Encode = Callable[[str], list[int]]
"""Takes a text and returns its token ids, the start token first if the tokenizer has one."""


class DepthScore(NamedTuple):
    """Hold the score at one depth: the fraction of prompts that are answered exactly, and the mean
    loss of the answers in nats per token."""

    exact: float
    loss: float


class Prompt(NamedTuple):
    """Hold a text to read: its token ids, (length), and how many of them, at its end, are the
    answer."""

    ids: Tensor
    answer_len: int


@dataclass(frozen=True)
class TaskScore:
    """Hold the score of one task at one length.

    exact: fraction of prompts, of all depths, whose answer is the model's most likely one, token by
        token; with a 95 % Wilson interval.
    loss: mean loss of the answers of all depths, in nats per token; with a 95 % interval from
        resampled prompts.
    by_depth: the score at each depth, from 0 at the start of the text to 1 at its end.
    """

    exact_share: Estimate
    loss: Estimate
    by_depth: dict[float, DepthScore]


def parse_task_names(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the tasks of --task, each once: (PASSKEY,) for None, () for ["none"]. Raises:
    ValueError for a name that is no task."""
    if names is None:
        return (PASSKEY,)
    if list(names) == ["none"]:
        return ()
    names = [name.replace("_", "-") for name in names]  # posenc compare spells them with _
    return tuple(dict.fromkeys(require_choice("--task", name, TASKS) for name in names))


@dataclass(frozen=True)
class TaskGrid:
    """Test tasks in words at several lengths and depths, in text of the user's own.

    names: of the tasks. lengths: of the prompts, in tokens. encode: text to token ids, a start
    token first where the tokenizer has one. num_trials: prompts per task, length and depth.
    depths: of the facts, from 0 at the start of the text to 1 at its end. Every variant of a model
    reads the same prompts.

    Source of the tasks: Hsieh et al. 2024, arXiv:2404.06654, section 3 (needles, variable
    tracking); Modarressi et al. 2025, arXiv:2502.05167 (needle by meaning); the sentences are ours.
    """

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    encode: Encode
    num_trials: int = 2
    depths: tuple[float, ...] = DEPTHS

    def scores(
        self, reader: LossReader, filler: Tensor, progress: Callable[[str, float], None]
    ) -> tuple[dict[tuple[str, int], TaskScore], dict[tuple[str, int], str]]:
        """Return the scores by (task, length), and why a task has no score at a length."""
        scores = {}
        left_out = {}
        tasks_and_lengths = [(name, length) for name in self.names for length in self.lengths]
        for num_done, (name, length) in enumerate(tasks_and_lengths):
            try:
                prompts = self.make_prompts(name, length, filler)
            except TooShort as reason:
                left_out[name, length] = str(reason)
            else:
                scores[name, length] = self._score_answers(reader, prompts)
            progress(name, (num_done + 1) / len(tasks_and_lengths))
        return scores, left_out

    def make_prompts(self, name: str, length: int, filler: Tensor) -> list[Prompt]:
        """Return `num_trials` prompts for each depth in turn. filler: tokens of text. Raises:
        TooShort where the task does not fit."""
        rng = np.random.default_rng([length, *name.encode()])
        prompts = []
        for depth in self.depths:
            for _ in range(self.num_trials):
                prompts.append(self._make_prompt(name, length, depth, filler, rng))
        return prompts

    def _make_prompt(
        self, name: str, length: int, depth: float, filler: Tensor, rng: np.random.Generator
    ) -> Prompt:
        """Return a prompt of `length` tokens: text with the facts of a puzzle at their depths, the
        question and the answer. Raises: TooShort."""
        start_ids = self.encode("")
        puzzle = write_puzzle(name, rng, depth)
        question_ids = self._ids_without_start(puzzle.question, start_ids)
        ending_ids = self._ids_without_start(f"{puzzle.question} {puzzle.answer}", start_ids)
        # The prompt ends with question and answer. A tokenizer may merge the end of the question
        # with the answer: then they are joined as ids.
        if ending_ids[: len(question_ids)] != question_ids or len(ending_ids) == len(question_ids):
            ending_ids = question_ids + self._ids_without_start(puzzle.answer, start_ids)
        fact_ids = [
            (fact_depth, self._ids_without_start(f" {fact} ", start_ids))
            for fact_depth, fact in puzzle.facts
        ]
        body_len = length - len(start_ids) - len(ending_ids) - sum(len(ids) for _, ids in fact_ids)
        if body_len < len(ending_ids):
            raise TooShort(f"{length} tokens are too few for it with this tokenizer")
        body_start = int(rng.integers(0, max(1, len(filler) - body_len)))
        body_ids = filler[body_start : body_start + body_len].tolist()
        prompt_ids = [*start_ids, *insert_facts(body_ids, fact_ids), *ending_ids]
        return Prompt(torch.tensor(prompt_ids), len(ending_ids) - len(question_ids))

    def _ids_without_start(self, text: str, start_ids: list[int]) -> list[int]:
        """Return the token ids of a text without `start_ids`, with which the tokenizer begins
        every text."""
        return self.encode(text)[len(start_ids) :]

    def _score_answers(self, reader: LossReader, prompts: Sequence[Prompt]) -> TaskScore:
        """Return the score of the model's answers. prompts: equally many for each depth, in
        order."""
        answers_are_right: list[bool] = []
        losses: list[np.ndarray] = []
        prompts_per_batch = max(1, MAX_TOKENS_PER_BATCH // len(prompts[0].ids))
        for i in range(0, len(prompts), prompts_per_batch):
            batch = prompts[i : i + prompts_per_batch]
            for prompt, logits in zip(batch, _logits_of_answers(reader, batch), strict=True):
                answer = prompt.ids[-prompt.answer_len :]
                answers_are_right.append(bool((logits.argmax(-1) == answer).all()))
                losses.append(F.cross_entropy(logits.float(), answer, reduction="none").numpy())
        is_right = np.array(answers_are_right)
        share = float(is_right.mean())
        exact_share = Estimate(
            share, *fraction_interval(int(is_right.sum()), len(is_right)), len(is_right)
        )
        is_right_by_depth = is_right.reshape(len(self.depths), -1)
        nats_by_depth = np.array([loss.mean() for loss in losses]).reshape(is_right_by_depth.shape)
        by_depth = {}
        for depth, are_right, nats in zip(
            self.depths, is_right_by_depth, nats_by_depth, strict=True
        ):
            by_depth[depth] = DepthScore(float(are_right.mean()), float(nats.mean()))
        return TaskScore(exact_share, _mean_loss(losses), by_depth)


def _mean_loss(losses: Sequence[np.ndarray]) -> Estimate:
    """Return the mean loss per token of answers, with an interval from resampled answers."""
    max_len = max(len(loss) for loss in losses)
    padded_losses = np.full((len(losses), max_len), math.nan)  # answers may have different lengths
    for row, loss in zip(padded_losses, losses, strict=True):
        row[: len(loss)] = loss
    prompt_of_loss = np.arange(len(losses))[:, None].repeat(max_len, 1)
    return estimate_mean(padded_losses, prompt_of_loss)


class TooShort(Exception):
    """Raised if a length leaves less text around the facts of a task than its question and answer
    have tokens."""


def _logits_of_answers(reader: LossReader, prompts: Sequence[Prompt]) -> list[Tensor]:
    """Return the logits that predict the answer of each prompt, (answer_len, vocab)."""
    tokens = torch.stack([prompt.ids for prompt in prompts])
    longest_answer = max(prompt.answer_len for prompt in prompts)
    logits = last_logits(reader.model, tokens, longest_answer + 1)
    return [row[-prompt.answer_len - 1 : -1] for prompt, row in zip(prompts, logits, strict=True)]


@dataclass(frozen=True)
class PasskeyGrid:
    """Test whether a model repeats a random key from some depth of a long text, in any language.

    Marker and key are at the depth. The text ends with the marker, and each token of the key is
    predicted given those before it. Chance is one in the vocabulary.

    lengths: of the texts, in tokens.
    depths: of the key, from 0 at the start of the text to 1 at its end.
    num_trials: texts at each length and depth.
    key_len, marker_len: tokens of a key, and of the marker before it.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.95)
    num_trials: int = 8
    key_len: int = 6
    marker_len: int = 4

    def accuracies(
        self, reader: LossReader, windows: Windows, progress: Callable[[str, float], None]
    ) -> dict[tuple[int, float], float]:
        """Return the fraction of key tokens that are right, by (length, depth).

        Lengths at which a text would have no room for more than the two keys and markers are left
        out. {} if the text of the windows has too few different tokens for a key and a marker.
        """
        filler = windows.tokens.flatten()
        distinct_tokens = torch.unique(filler).numpy()
        # Marker and key are in the text twice: at their depth, and at the end.
        marked_len = self.marker_len + self.key_len
        has_enough_tokens = len(distinct_tokens) >= marked_len
        lengths = [n for n in self.lengths if n > 2 * marked_len and has_enough_tokens]
        rng = np.random.default_rng(0)
        shares_by_cell = {}
        for i, length in enumerate(lengths):
            body_len = length - 2 * marked_len
            starts = rng.integers(
                0, len(filler) - body_len + 1, (len(self.depths), self.num_trials)
            )
            prompts = []
            for depth, starts_of_depth in zip(self.depths, starts, strict=True):
                for start in starts_of_depth:
                    body = filler[start : start + body_len].numpy()
                    prompts.append(draw_passkey_text(rng, body, distinct_tokens, depth, marked_len))
            shares = self._accuracy(reader, torch.tensor(prompts)).view(len(self.depths), -1)
            for depth, shares_of_depth in zip(self.depths, shares, strict=True):
                shares_by_cell[length, depth] = float(shares_of_depth.mean())
            progress("passkeys", (i + 1) / len(lengths))
        return shares_by_cell

    def _accuracy(self, reader: LossReader, tokens: Tensor) -> Tensor:
        """Return the fraction of the key's tokens that the model predicts right, (prompts).

        tokens: (prompts, length), each with the key at its end.
        """
        shares = []
        for part in tokens.split(max(1, MAX_TOKENS_PER_BATCH // tokens.shape[1])):
            logits = last_logits(reader.model, part, self.key_len + 1)[:, :-1]
            shares.append((logits.argmax(-1) == part[:, -self.key_len :]).float().mean(-1))
        return torch.cat(shares)


class PuzzleInWords(NamedTuple):
    """Hold a puzzle: its facts as (depth in the text, sentence), a question and its answer."""

    facts: tuple[tuple[float, str], ...]
    question: str
    answer: str


def write_puzzle(name: str, rng: np.random.Generator, depth: float) -> PuzzleInWords:
    """Return a puzzle of the task `name` in words. depth: where its fact is, from 0 at the start of
    the text to 1 at its end."""
    draw_puzzle, fact_form, question_form = PUZZLE_RECIPES[name]
    puzzle = draw_puzzle(rng, depth)
    keys = dict.fromkeys(key for _, (key, _) in puzzle.facts)
    values = dict.fromkeys(value for _, (_, value) in puzzle.facts)
    only_values = [value for value in values if value not in keys]
    word_of_symbol: dict[int, str]  # of each symbol
    if name == "needle-by-meaning":
        word_of_symbol = dict(zip(keys, rng.permutation(list(COUNTRY_OF_CITY)), strict=False))
        word_of_symbol |= zip(only_values, _random_names(rng, len(only_values)), strict=True)
        names_in_question = [COUNTRY_OF_CITY[word_of_symbol[symbol]] for symbol in puzzle.question]
    else:
        word_of_symbol = dict(zip(keys, _random_names(rng, len(keys)), strict=True))
        # Numbers of five digits, 10000 to 99999.
        drawn_numbers = rng.choice(90000, len(only_values), replace=False)
        word_of_symbol |= zip(
            only_values, (str(10000 + int(i)) for i in drawn_numbers), strict=True
        )
        names_in_question = [word_of_symbol[symbol] for symbol in puzzle.question]
    facts = tuple(
        (fact_depth, fact_form.format(word_of_symbol[key], word_of_symbol[value]))
        for fact_depth, (key, value) in puzzle.facts
    )
    answer = " ".join(word_of_symbol[symbol] for symbol in puzzle.answer)
    return PuzzleInWords(facts, question_form.format(*names_in_question), answer)


def _random_names(rng: np.random.Generator, count: int) -> list[str]:
    """Return `count` different three-syllable words of no language, such as "bafiko"."""
    names: dict[str, None] = {}  # a set in the order of drawing
    while len(names) < count:
        letters = [rng.choice(list(alphabet)) for alphabet in (CONSONANTS, VOWELS) * 3]
        names["".join(letters)] = None
    return list(names)
