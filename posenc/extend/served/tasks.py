"""Ask a server the tasks at every length and depth, and score its answers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc.command_line.errors import RunFailed
from posenc.extend.measure.tasks import (
    PASSKEY,
    PUZZLE_RECIPES,
    Prompt,
    TaskGrid,
    TooShort,
    parse_task_names,
)
from posenc.extend.options import Options, Progress
from posenc.extend.served.completions import CompletionsServer, find_server
from posenc.hf.checkpoint.tokenization import encode_until, load_tokenizer
from posenc.statistics.text_intervals import Estimate, fraction_interval

DEFAULT_TASK = "needle"
NUM_LENGTHS = 4
"""Lengths at which a task is asked: the one of --to, and then the half of each."""
NUM_FILLER_LENGTHS = 8
"""Text that is read for prompts, in units of the longest prompt."""
MAX_TRIES_TO_FIT = 4
"""How often a prompt is made shorter, until its text has no more tokens than it may."""


class ServedPrompt(NamedTuple):
    """Hold the text of a prompt, and the answer.

    least, most: tokens of the text without and with those that a tokenizer puts around it.
    answer_len: tokens of the answer.
    """

    text: str
    answer: str
    least: int
    most: int
    answer_len: int


@dataclass(frozen=True)
class ServedScore:
    """Hold the score of a server's answers to one task at one length.

    exact_share: fraction of prompts, of all depths, that are answered exactly, with a 95 % Wilson
        interval.
    by_depth: that fraction at each depth, from 0 at the start of the text to 1 at its end.
    fewest_read, most_read: tokens of the prompts, as the server counted them.
    """

    exact_share: Estimate
    by_depth: dict[float, float]
    fewest_read: int
    most_read: int


@dataclass(frozen=True)
class ServedTasks:
    """Hold the scores of a server by (task, length), and why a task has none at a length."""

    server: CompletionsServer
    scores: dict[tuple[str, int], ServedScore]
    left_out: dict[tuple[str, int], str]


def parse_served_task_names(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the tasks of --task for a server: the needle for None. Raises: ValueError for a name
    that is no task, and for the passkey, which is scored by the model's own logits."""
    task_names = (DEFAULT_TASK,) if names is None else parse_task_names(names)
    if PASSKEY in task_names or not task_names:
        raise ValueError(
            f"--task: a server is asked in words: {', '.join(PUZZLE_RECIPES)}, got "
            f"{', '.join(names or ())}."
        )
    return task_names


def ask_tasks(
    folder: Path,
    length: int,
    address: str,
    documents: Sequence[str],
    options: Options,
    progress: Progress,
) -> ServedTasks:
    """Ask the server at `address` the tasks of --task, up to prompts of `length` tokens.

    folder: the checkpoint that it serves, whose tokenizer counts. documents: text around the facts.

    Raises: ValueError for wrong input. RunFailed if the server does not answer, or has not read a
    whole prompt.
    """
    task_names = parse_served_task_names(options.task)
    tokenizer = load_tokenizer(folder)
    server = find_server(address, folder)
    if server.max_length is not None and server.max_length < length:
        raise ValueError(
            f"{address} serves {server.max_length:,} tokens, and --to is {length:,}; start it with "
            "a larger limit, or give a smaller --to."
        )

    lengths = sorted({length >> halvings for halvings in range(NUM_LENGTHS)} - {0})

    def encode(text: str) -> list[int]:
        """Return the tokens of a text, without those that the server puts around it."""
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    grid = TaskGrid(task_names, tuple(lengths), encode, options.task_trials)
    ids_of_documents = encode_until(encode, documents, NUM_FILLER_LENGTHS * length)
    filler = torch.tensor(list(chain.from_iterable(ids_of_documents)))
    scores: dict[tuple[str, int], ServedScore] = {}
    left_out: dict[tuple[str, int], str] = {}
    cells = [(name, prompt_length) for name in task_names for prompt_length in lengths]
    for num_done, (name, prompt_length) in enumerate(cells):
        try:
            prompts = _prompts_that_fit(grid, name, prompt_length, filler, tokenizer)
        except TooShort as reason:
            left_out[name, prompt_length] = str(reason)
            continue
        answers = []
        for prompt in prompts:
            answers.append(_answer(server, prompt))
            share_of_cell = len(answers) / len(prompts)
            progress(f"{name}, {prompt_length:,} tokens", (num_done + share_of_cell) / len(cells))
        scores[name, prompt_length] = _score(answers, grid.depths)
    if not scores:
        raise ValueError(f"--to {length:,}: {next(iter(left_out.values()))}.")
    return ServedTasks(server, scores, left_out)


def _prompts_that_fit(
    grid: TaskGrid, name: str, length: int, filler: Tensor, tokenizer: Any
) -> list[ServedPrompt]:
    """Return prompts whose text and answer have at most `length` tokens. A text may have a few more
    tokens than those that it was made of, because the server's tokenizer reads it anew."""
    made_length = length
    for _ in range(MAX_TRIES_TO_FIT):
        prompts = [
            _in_words(prompt, tokenizer) for prompt in grid.make_prompts(name, made_length, filler)
        ]
        excess = max(prompt.most + prompt.answer_len for prompt in prompts) - length
        if excess <= 0:
            return prompts
        made_length -= excess
    raise TooShort(f"{length} tokens are too few for it with this tokenizer")


def _in_words(prompt: Prompt, tokenizer: Any) -> ServedPrompt:
    """Return a prompt as a text and the tokens that it has."""
    ids = prompt.ids.tolist()
    text, answer = (
        tokenizer.decode(part, clean_up_tokenization_spaces=False)
        for part in (ids[: -prompt.answer_len], ids[-prompt.answer_len :])
    )
    least = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    most = len(tokenizer(text)["input_ids"])
    return ServedPrompt(text, answer.strip(), least, most, prompt.answer_len)


def _answer(server: CompletionsServer, prompt: ServedPrompt) -> tuple[bool, int]:
    """Return whether the server answers a prompt exactly, and how many of its tokens it read.

    Raises: RunFailed if these are not all, or more.
    """
    completion = server.complete(prompt.text, prompt.answer_len)
    if not prompt.least <= completion.num_read <= prompt.most:
        sent = f"{prompt.most:,}" if prompt.least == prompt.most else f"{prompt.least:,} or more"
        cause = (
            "it cuts prompts, so that no score would say anything: start it with a larger limit"
            if completion.num_read < prompt.least
            else "it adds to prompts, or has another tokenizer: start it with this folder"
        )
        raise RunFailed(
            f"{server.url.geturl()}: the server read {completion.num_read:,} tokens of a prompt of "
            f"{sent}; {cause}."
        )
    num_words = len(_words(prompt.answer))
    is_right = _words(completion.text)[:num_words] == _words(prompt.answer)
    return is_right, completion.num_read


def _words(text: str) -> list[str]:
    """Return the words and numbers of a text, without signs between them."""
    return re.findall(r"\w+", text)


def _score(answers: Sequence[tuple[bool, int]], depths: Sequence[float]) -> ServedScore:
    """Return the score of answers (right, tokens read), equally many for each depth, in order."""
    are_right = [is_right for is_right, _ in answers]
    nums_read = [num_read for _, num_read in answers]
    interval = fraction_interval(sum(are_right), len(are_right))
    exact_share = Estimate(sum(are_right) / len(are_right), *interval, len(are_right))
    answers_per_depth = len(answers) // len(depths)
    by_depth = {}
    for i, depth in enumerate(depths):
        are_right_here = are_right[i * answers_per_depth : (i + 1) * answers_per_depth]
        by_depth[depth] = sum(are_right_here) / answers_per_depth
    return ServedScore(exact_share, by_depth, min(nums_read), max(nums_read))
