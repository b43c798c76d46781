"""The `Plan` of a comparison, made once from the options and checked before allocation."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from posenc.compare.defaults import (
    BUDGETS,
    DEFAULT_BIDIRECTIONAL,
    DEFAULT_ENCODINGS,
    NUM_PAIR_SEEDS,
    SUITE_SIZES,
    SUITES,
    TEST_LENGTH_FACTORS,
    TEXT_SIZES,
    Budget,
)
from posenc.compare.options import Options, check_options
from posenc.compare.plan.cost import check_cost
from posenc.compare.plan.encodings import (
    ComparedEncoding,
    build_encoding,
    check_contracts,
    check_in_model,
    exits_as_errors,
    read_encodings,
)
from posenc.compare.plan.equal_tuning import (
    RecordedChoices,
    Search,
    recorded_choices,
    with_options,
)
from posenc.compare.plan.learning_rate_search import check_rates, check_warmup, rate_trials
from posenc.compare.plan.lengths import (
    check_shapes_to_compile,
    parse_test_lengths,
    parse_train_lengths,
    steps_of_tuning,
    width_of_test_window,
)
from posenc.compare.plan.sizes import decoder_sizes, layers_of_config
from posenc.compare.plan.splits import MinimumSizes, TextSplits, split_text
from posenc.compare.plan.tokens import text_of_options, token_settings
from posenc.compare.trial.config import CAUSAL, Architecture, TrialConfig
from posenc.compare.trial.objectives import OBJECTIVES, Objective
from posenc.encodings import ModelShape, PerLayer, create
from posenc.files.atomic import prepare_page_and_figures
from posenc.machine import hardware
from posenc.tasks.registry import TASKS, TEXT
from posenc.tasks.task import Task


@dataclass(frozen=True)
class Plan:
    """A comparison with all options resolved; every later step reads it.

    options: the options, including those of a suite.
    num_seeds: number of seeds.
    compared: the encodings.
    task_trials: one trial for each task, of the first encoding and seed 0.
    splits: the text; None if no task reads one, and before `with_text`.
    notes: sentences for the user to read before anything is trained.
    """

    options: Options
    num_seeds: int
    compared: tuple[ComparedEncoding, ...]
    task_trials: tuple[TrialConfig, ...]
    splits: TextSplits | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_trials(self) -> int:
        """Return the number of trials that are compared."""
        return self.num_seeds * len(self.compared) * len(self.task_trials)

    @property
    def trials(self) -> tuple[TrialConfig, ...]:
        """Return the trials that are compared, by task, then seed, then encoding."""
        return tuple(
            replace(
                trial,
                encoding=entry.text,
                code=entry.user_code_hash,
                source=entry.posenc_code_hash,
                seed=seed,
            )
            for trial in self.task_trials
            for seed in range(self.num_seeds)
            for entry in self.compared
        )

    @property
    def search(self) -> Search | None:
        """Return the search for rates and settings that runs first; None without --tune."""
        if not self.options.tune:
            return None
        return Search(self.compared, self.task_trials[0])

    @property
    def recorded(self) -> RecordedChoices | None:
        """Return the recorded choices for this plan: of the default recipe, on the default text,
        unless options choose otherwise. None if an encoding of the plan has none, which would not
        be tuned as the others are."""
        options = self.options
        has_other_text = options.text or options.tokens or options.tokenizer
        has_other_text_or_layers = has_other_text or options.config
        has_other_choice = options.tune is not None or options.search_lr or has_other_text_or_layers
        if has_other_choice or [trial.task for trial in self.task_trials] != [TEXT]:
            return None
        return recorded_choices(self.task_trials[0], self.compared)

    @property
    def rate_trials(self) -> tuple[TrialConfig, ...]:
        """Return the trials that run first, to choose learning rates and settings; none without
        --search-lr or --tune, which may add more."""
        if self.search is not None:
            return self.search.trials
        return rate_trials(self.trials) if self.options.search_lr else ()


@exits_as_errors()
def make_plan(options: Options) -> Plan:
    """Return the plan of the options, without reading the text.

    Raises: ValueError if the options do not fit together, or an encoding does not fit a task.
    """
    check_options(options)
    options = with_suite_defaults(options)
    if options.as_json and options.dry_run:
        raise ValueError("--json prints an answer, and --dry-run has none. Leave one of both out.")
    for folder in options.reuse or ():
        if not Path(folder).is_dir():
            raise ValueError(f"--reuse must be a folder of posenc compare, and {folder} is none.")
    texts = options.encodings or _default_encodings(options)
    layers = layers_of_config(options)
    compared = _read_encodings(texts)
    if layers is not None and layers.rope_theta is not None:
        base = (("rope_theta", layers.rope_theta),)
        compared = _read_encodings([with_options(text, base) for text in texts])
    num_seeds = _num_seeds(options, compared)
    notes = _notes(len(compared), num_seeds) + (() if layers is None else (layers.note,))
    task_trials = plan_one_trial_per_task(options, compared)
    prepare_page_and_figures(options.figures, tables_folder=options.tables)
    return Plan(options, num_seeds, compared, task_trials, notes=notes)


def _notes(num_encodings: int, num_seeds: int) -> tuple[str, ...]:
    """Return what to say before a comparison that cannot decide anything."""
    notes = []
    if num_encodings == 1:
        notes.append("With one encoding nothing is compared. Name a second one, such as alibi.")
    if num_seeds == 1:
        notes.append("One seed decides nothing: no difference has an interval. Give --seeds 2.")
    return tuple(notes)


def _default_encodings(options: Options) -> tuple[str, ...]:
    """Return the encodings of a comparison that names none. A pattern of layers that is longer than
    the model is left out: cut off, it would be another of the encodings."""
    if options.objective != CAUSAL:
        return DEFAULT_BIDIRECTIONAL
    num_layers = decoder_sizes(options)["layers"]
    shape = ModelShape(embed_dim=128, num_heads=4, train_length=16)  # patterns depend on no size
    names = []
    for name in DEFAULT_ENCODINGS:
        encoding = create(name, shape)
        if not isinstance(encoding, PerLayer) or encoding.period <= num_layers:
            names.append(name)
    return tuple(names)


def _num_seeds(options: Options, compared: Sequence[ComparedEncoding]) -> int:
    """Return the number of seeds: that of --seeds, otherwise of the budget, for two encodings in
    the standard budget NUM_PAIR_SEEDS."""
    is_standard = options.budget == "standard" and not options.suite
    budget_seeds = chosen_budget(options).seeds
    if len(compared) == 2 and options.seeds is None and is_standard:
        return NUM_PAIR_SEEDS
    return budget_seeds


@exits_as_errors()
def check_plan(plan: Plan, workers: int, local_workers: int) -> dict[str, str]:
    """Refuse a plan that costs too much or has encodings that fail the contract.

    workers, local_workers: trials at a time, and those of them on this machine.
    Returns: for --unchecked, why the losses of an encoding are meaningless, by its text.
    Raises: ValueError.
    """
    # A trial of the search counts like a seed: at most it has as many steps.
    num_pairs = len(plan.compared) * len(plan.task_trials)
    trials_of_a_pair = plan.num_seeds + len(plan.rate_trials) // num_pairs
    texts = [entry.text for entry in plan.compared]
    check_cost(plan.task_trials, texts, trials_of_a_pair, workers, plan.options.yes, local_workers)
    for trial in plan.task_trials:
        check_in_model(trial, plan.compared)
    return check_contracts(plan.compared, plan.options.unchecked, plan.task_trials)


def with_text(plan: Plan, folder: Path) -> Plan:
    """Return the plan with its text split into training, validation and test, if a task reads one.

    folder: a folder on the disk that must have room for a copy of the text; nothing is written.
    Raises: ValueError for a text that cannot be read, is too short, has nothing to learn or is
    larger than the disk.
    """
    trial = next((trial for trial in plan.task_trials if trial.task == TEXT), None)
    if trial is None:
        return plan
    source, tokens, notes = text_of_options(plan.options)
    need = MinimumSizes(trial.train_length, max(trial.test_lengths), trial.batch, trial.length_unit)
    splits = split_text(source, need, folder, tokens)
    text_hash = splits.info.hash
    trials = [replace(t, corpus=text_hash) if t.task == TEXT else t for t in plan.task_trials]
    return replace(plan, splits=splits, task_trials=tuple(trials), notes=(*plan.notes, *notes))


def chosen_budget(options: Options) -> Budget:
    """Return the budget that --budget names, with --seeds and --steps if given."""
    budgets = SUITES if options.suite else BUDGETS
    budget = budgets[options.budget]
    return budget._replace(
        seeds=budget.seeds if options.seeds is None else options.seeds,
        steps=budget.steps if options.steps is None else options.steps,
    )


def with_suite_defaults(options: Options) -> Options:
    """Return the options with those that `--suite` implies, except where the user gave others.

    Raises: ValueError for --task.
    """
    if not options.suite:
        return options
    budget = chosen_budget(options)
    if options.task:
        raise ValueError(
            f"--task: --suite has its own tasks ({', '.join(budget.tasks)}). Leave out one of both."
        )
    sizes = {} if options.config is not None else SUITE_SIZES
    return replace(
        options,
        task=list(budget.tasks),
        search_lr=options.search_lr or budget.search_lr,
        **{name: size for name, size in sizes.items() if getattr(options, name) is None},
    )


def plan_one_trial_per_task(
    options: Options, compared: Sequence[ComparedEncoding]
) -> tuple[TrialConfig, ...]:
    """Return one trial per task, of the first encoding and seed 0, without the hash of its text.

    Raises: ValueError if the options do not fit together, or an encoding does not fit a task.
    """
    check_options(options)
    task_names = options.task_names
    sequence_tasks = [name for name in task_names if name != TEXT]
    _check_options_of_tasks(options, task_names)
    objective = OBJECTIVES[options.objective]
    if not all(objective.causal_stacks):
        _check_no_task(objective, sequence_tasks)
        _check_both_ways(f"--objective {objective.name}", compared)
    for name in sequence_tasks:
        if TASKS[name].looks_both_ways:
            _check_both_ways(f"--task {name}", compared)
        if TASKS[name].num_axes > 1:
            _check_axes(TASKS[name], compared)
    shared_fields = _shared_fields(options, compared[0].text)
    trials = tuple(_plan_trial(name, options, shared_fields) for name in task_names)
    check_warmup(trials)
    return trials


def _check_options_of_tasks(options: Options, task_names: Sequence[str]) -> None:
    """Raise ValueError for options that do not go with the named tasks."""
    length_option = ""
    if options.train_length is not None:
        length_option = "--train-length"
    elif options.train_lengths is not None:
        length_option = "--train-lengths"
    elif options.test_lengths is not None:
        length_option = "--test-lengths"
    if length_option and len(task_names) > 1:
        raise ValueError(
            f"{length_option}: tasks have different units, and there are {len(task_names)} tasks "
            f"({', '.join(task_names)}). Leave it out, or compare one task at a time."
        )
    if options.tune and task_names != [TEXT]:
        raise ValueError(
            "--tune is for text: a setting of an encoding is chosen once. Use --search-lr for "
            "tasks."
        )
    if options.tune and options.search_lr:
        raise ValueError("--tune chooses learning rates, too. Leave out --search-lr.")
    if options.compile and task_names != [TEXT]:
        raise ValueError(
            "--compile is for text: batches of tasks differ in length, and each length would be "
            "compiled. Leave it out, or compare on text only."
        )
    if options.train_lengths is not None and task_names != [TEXT]:
        raise ValueError(
            f"--train-lengths is for text: the task {task_names[0]} chooses the lengths of its "
            "sequences, up to --train-length. Leave it out."
        )
    for name in ("text", "tokenizer", "tokens", "document_end", "micro_batch"):
        if TEXT not in task_names and getattr(options, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')}: none of the tasks reads a text. Add --task text, or "
                "leave it out."
            )


def _shared_fields(options: Options, encoding: str) -> dict[str, Any]:
    """Return the fields of TrialConfig that the trials of all tasks share, by name. A size that the
    tasks set themselves is None unless an option gives it.

    Raises: ValueError for options that do not fit together or this machine.
    """
    check_rates(options)
    sizes = decoder_sizes(options)
    if options.projections in ("q=k", "none") and sizes["kv_heads"] != sizes["heads"]:
        raise ValueError(
            f"--projections {options.projections} needs as many key/value heads as query heads, "
            f"got {sizes['kv_heads']} and {sizes['heads']}."
        )
    layers = layers_of_config(options)
    device, precision = _device_and_precision(options)
    common_names = {f.name for f in fields(TrialConfig)} & {f.name for f in fields(Options)}
    # Those of a text alone, see `_plan_trial`.
    common_names -= {"tokenizer", "document_end", "micro_batch", "train_lengths"}
    return {name: getattr(options, name) for name in common_names} | {
        # A float, so that 3 and 3.0 give a trial the same hash.
        **{name: float(getattr(options, name)) for name in ("lr", "encoding_lr", "warmup")},
        "encoding": encoding,
        "seed": 0,
        "corpus": "",
        **sizes,
        "architecture": Architecture() if layers is None else layers.architecture,
        "device": device,
        "precision": precision,
        "torch": torch.__version__,
    }


def _device_and_precision(options: Options) -> tuple[str, str]:
    """Return the device ("cpu" or "cuda") and the precision ("float32" or "bfloat16") of trials.

    Raises: ValueError for what this machine cannot do; other machines cannot be asked.
    """
    device = options.device
    precision = options.precision
    has_gpu = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    runs_elsewhere = options.engine != "local" and not has_gpu
    if not runs_elsewhere:
        _check_machine(device, precision, options.compile)
    elif device == "cuda" and precision == "auto":
        raise ValueError(
            "--precision auto checks this machine, which has no CUDA device. Give float32 or "
            "bfloat16 for the machines that run the trials."
        )
    if precision == "auto":
        precision = hardware.default_precision(device)
    return device, precision


def _check_machine(device: str, precision: str, compiled: bool) -> None:
    """Raise ValueError if this machine lacks the device, bfloat16 or a compiler."""
    if device == "cuda":
        hardware.check_device(device)
    if precision == "bfloat16":
        hardware.check_bfloat16(device)
    missing_compiler = hardware.missing_compiler(device) if compiled else None
    if missing_compiler:
        raise ValueError(f"--compile needs {missing_compiler}. Install it, or leave out --compile.")


def _plan_trial(task_name: str, options: Options, shared_fields: dict[str, Any]) -> TrialConfig:
    """Return the trial of the task of a name, with the task's own sizes where no option gives them.

    shared_fields: fields of the trial, see `_shared_fields`.
    """
    task = None if task_name == TEXT else TASKS[task_name]
    sizes: dict[str, Any] = TEXT_SIZES | {"steps": chosen_budget(options).steps}
    if task is not None:
        sizes = {key: getattr(task, key) for key in sizes}
    sizes |= {key: shared_fields[key] for key in sizes if shared_fields[key] is not None}
    if task is None:
        train_lengths = parse_train_lengths(options, sizes["batch"])
        if train_lengths:
            sizes["train_length"] = max(train_lengths)
        train_length = sizes["train_length"]
        test_lengths = parse_test_lengths(options.test_lengths, train_length, TEST_LENGTH_FACTORS)
        test_window = width_of_test_window(options, train_length, test_lengths)
        tune_steps = steps_of_tuning(options, test_lengths, sizes["steps"])
        task_fields = {"task": TEXT, "test_lengths": test_lengths, "test_window": test_window}
        task_fields |= {"tune_steps": tune_steps, "train_lengths": train_lengths}
        task_fields |= {"micro_batch": _micro_batch(options, sizes["batch"])}
        settings = token_settings(options)
        task_fields |= {} if settings is None else settings.trial_fields
        trial = TrialConfig(**shared_fields | sizes | task_fields)
        check_shapes_to_compile(trial)
        return trial
    train_length = sizes["train_length"]
    test_lengths = tuple(length for length in task.test_lengths if length >= train_length)
    if options.test_lengths is not None or train_length != task.train_length:
        test_lengths = parse_test_lengths(options.test_lengths, train_length, [1, 2, 4])
    task.check_lengths(train_length, test_lengths)
    corpus = task.hash_sequences(train_length, test_lengths)
    task_fields = {"task": task_name, "test_lengths": test_lengths, "corpus": corpus}
    return TrialConfig(**shared_fields | sizes | task_fields | _NO_READINGS)


def _micro_batch(options: Options, batch: int) -> int:
    """Return the windows of a step that are in memory at a time; 0 for all. Raises ValueError for
    more than the `batch` has."""
    if options.micro_batch is None or options.micro_batch == batch:
        return 0
    if options.micro_batch > batch:
        raise ValueError(
            f"--micro-batch {options.micro_batch} is more than the {batch} windows of a step. Give "
            "fewer, or a larger --batch."
        )
    return options.micro_batch


_NO_READINGS: dict[str, Any] = {"test_window": 0, "tune_steps": 0, "num_windows": 0}
"""Fields of a trial on a task, which is read as trained only."""


def _check_no_task(objective: Objective, sequence_tasks: Sequence[str]) -> None:
    """Raise ValueError for any task other than text, which has a model of its own."""
    if sequence_tasks:
        raise ValueError(
            f"--objective {objective.name}: the task {sequence_tasks[0]} needs the model of "
            "--objective causal. Use --task text."
        )


def _check_both_ways(option: str, compared: Sequence[ComparedEncoding]) -> None:
    """Raise ValueError for encodings that work in causal attention only, where a stack has none;
    option: the one that asks for it."""
    # Any sizes do: whether an encoding is causal only does not depend on them.
    shape = ModelShape(embed_dim=128, num_heads=4, train_length=16, causal=False)
    for entry in compared:
        if build_encoding(entry.text, shape).claims.causal_only:
            raise ValueError(
                f"{option}: {entry.label} works in causal attention only; if a "
                "symbol also sees later ones, it is undefined or blind to order. Leave it out."
            )


def _check_axes(task: Task, compared: Sequence[ComparedEncoding]) -> None:
    """Raise ValueError for an encoding that cannot tell the rows and columns of the task apart."""
    shape = ModelShape(embed_dim=128, num_heads=4, train_length=16)  # axes do not depend on sizes
    for entry in compared:
        claims = build_encoding(entry.text, shape).claims
        if claims.places and claims.num_axes < task.num_axes:
            raise ValueError(
                f"--task {task.name}: {entry.label} encodes one-dimensional positions, but this "
                "task needs rows and columns. Compare encodings such as axial_rope, sincos_2d and "
                "nope."
            )
        if claims.coordinates == "normalized":
            raise ValueError(
                f"--task {task.name}: {entry.label} takes coordinates from -1 to 1, but this task "
                "counts rows and columns. Leave out frequencies_in_turns=true."
            )


def _read_encodings(texts: Sequence[str]) -> tuple[ComparedEncoding, ...]:
    """Return the encodings that the texts name. Raises ValueError, with a hint where the path of a
    text is given as an encoding."""
    try:
        return read_encodings(texts)
    except ValueError as error:
        for text in texts:
            if text in str(error) and Path(text).exists() and not text.endswith(".py"):
                raise ValueError(
                    f"{text!r} is a file or folder where an encoding is expected. Every text has "
                    f"its own --text: --text FIRST --text {shlex.quote(text)}."
                ) from None
        raise
