"""The task of a trial, or its text: what they fix of the model's sizes, the tests and the hash."""

from posenc.compare.results import TrialResult
from posenc.compare.trial.config import MASKED, TrialConfig
from posenc.compare.trial.objectives import OBJECTIVES, Objective, objective_of
from posenc.compare.trial.windows import VOCABULARY_SIZE
from posenc.tasks.registry import TASKS, TEXT
from posenc.tasks.task import Case, Task


def task_of(config: TrialConfig) -> Task | None:
    """Return the task that makes a trial's sequences, or None for text."""
    return None if config.task == TEXT else TASKS[config.task]


def objective_of_model(config: TrialConfig) -> Objective:
    """Return the objective whose model a trial trains: that of the trial, or for a task whose
    tokens all see one another the one without a causal mask."""
    task = task_of(config)
    if task is not None and task.looks_both_ways:
        return OBJECTIVES[MASKED]
    return objective_of(config)


def vocabulary_size(config: TrialConfig) -> int:
    """Return the number of different tokens that a trial's model reads and predicts. Of text in
    bytes these are 256 and the symbol after each file."""
    task = task_of(config)
    if task is not None:
        return task.vocab_size
    num_symbols = config.vocabulary or VOCABULARY_SIZE
    return num_symbols + objective_of(config).num_extra_symbols


def max_row_tokens(config: TrialConfig) -> int:
    """Return the maximum number of tokens in a row of a training batch."""
    task = task_of(config)
    return config.train_length if task is None else task.max_tokens(Case(config.train_length))


def lengths_of_tests(trial: TrialConfig) -> list[int]:
    """Return the tokens of a sequence in each test of a trial, the training length first."""
    task = task_of(trial)
    if task is None:
        return list(trial.test_lengths)
    return [task.max_tokens(case) for case in task.cases(trial.test_lengths)]


def shape_length(config: TrialConfig) -> int:
    """Return the training length that the trial's encoding is built for, in positions."""
    task = task_of(config)
    if task is None:
        return objective_of(config).longest_stack_input(config.train_length)
    return task.encoding_train_length(config.train_length)


def check_scores(result: TrialResult) -> None:
    """Raise ValueError for a result whose scores are of other tests than its config and task
    have."""
    trial = result.config
    lengths = (trial.train_length, *trial.test_lengths[1:])
    task = task_of(trial)
    wanted = "; ".join(map(str, task.cases(lengths) if task else map(Case, lengths)))
    scores = (*result.by_length, *result.by_case)
    scored = "; ".join(str(Case(score.length, getattr(score, "variant", ""))) for score in scores)
    if lengths != trial.test_lengths or (wanted != scored and result.reason is None):
        raise ValueError(f"expected scores at {wanted}, its training length first, got {scored}")
