"""Options of `posenc compare`: name, type, range, default and help, each in one place."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from posenc.command_line.options import Figures, Json, Tables, option, require_choice
from posenc.compare.defaults import BUDGETS, DEFAULT_ENCODINGS, NUM_PAIR_SEEDS, SUITES, Budget
from posenc.lazy import require_package
from posenc.list import complete_name

ENGINE_OPTIONS = {
    "local": ("workers",),
    "ray": ("address", "storage", "max_parallel"),
    "slurm": ("partition", "sbatch", "max_parallel"),
}
"""The options that each engine has, of which others have none."""
TOKEN_TYPES = ("uint16", "uint32")
"""Types of the ids in a file of tokens without a header."""
_ACCEPTED_TYPES: dict[Any, tuple[Any, str]] = {
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    bool: (bool, "True or False"),
    str: (str, "text"),
    Path: (str | Path, "a path"),
    list[str]: (list | tuple, "a list of texts"),
}
"""For each type of an option: the accepted types of a value, and their name in messages."""


def _describe_budgets(budgets: dict[str, Budget]) -> str:
    """Return every budget with its name, for the help of an option: `quick: 1 seed, 250 steps`."""
    return "; ".join(f"{name}: {budget}" for name, budget in budgets.items())


@dataclass(frozen=True)
class Options:
    """Options of the user. The command line is made from these fields; a `TrialConfig` copies those
    of the same name."""

    encodings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names from `posenc list`, module:Class or file.py:Class; each with options as in "
            "yarn:factor=8, together as in rope+alibi, by layer as in 'rope/nope every 4', or with "
            "a label as in mine=./my.py:Mine. Your class gets those of embed_dim, num_heads, "
            "num_kv_heads, head_dim, train_length and causal that its constructor names. See "
            "docs/grammar.md.",
            show_default=" ".join(DEFAULT_ENCODINGS),
            autocompletion=complete_name,
        ),
    ] = None
    text: Annotated[
        list[str] | None,
        option(
            "File, folder or glob to train and test on, read as bytes, or with --tokenizer as "
            "tokens; may be repeated.  ",
            shown="the source of Python's standard library",
            panel="Data",
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        option(
            "A tokenizer.json, or a Hugging Face folder: the text becomes tokens, and lengths "
            "count these. A file is a document, which attention does not leave. Losses stay in "
            "bits per byte.",
            shown="none: the text is bytes",
            panel="Data",
        ),
    ] = None
    tokens: Annotated[
        list[str] | None,
        option(
            "File, folder or glob of token ids instead of --text: .bin, as nanoGPT writes, or "
            ".npy; may be repeated. Names that begin with train, val and test say what is for "
            "what. Losses are in bits per token, with --tokenizer in bits per byte.  ",
            shown=False,
            panel="Data",
        ),
    ] = None
    token_type: Annotated[
        str,
        option("Type of the ids in .bin files of --tokens: uint16 or uint32.", panel="Data"),
    ] = "uint16"
    document_end: Annotated[
        int | None,
        option(
            "The token that ends a document, with --tokens or --tokenizer: attention does not go "
            "beyond it.",
            shown="one that follows each file only",
            min=0,
            panel="Data",
        ),
    ] = None
    task: Annotated[
        list[str] | None,
        option(
            "What to learn; may be repeated: text, copy, copy_512, reverse, recall, "
            "flip_flop, offset, needle_by_meaning, variables, or, for encodings of "
            "rows and columns, grid, grid_direction, grid_count. A task has its own lengths, steps "
            "and batch. See docs/compare.md.  ",
            shown="text",
        ),
    ] = None
    suite: Annotated[
        bool,
        option(
            "Compare on text and all tasks, with a small decoder. --budget "
            f"{_describe_budgets(SUITES)}.",
            "--suite",
        ),
    ] = False
    objective: Annotated[
        str,
        option(
            "causal: predict the next byte or token, in a decoder. masked: predict 15 % of "
            "them, which are masked, in an encoder. seq2seq: predict the second half of a "
            "window, in a decoder that attends to an encoder of the first. The last two are for "
            "text, and for encodings that are defined without a causal mask."
        ),
    ] = "causal"
    train_length: Annotated[
        int | None,
        option(
            "Length of a training window, in bytes or tokens; for a task, the longest in training.",
            shown="128 for text",
            min=2,
            panel="Data",
        ),
    ] = None
    train_lengths: Annotated[
        str | None,
        option(
            "Lengths of training windows of text, separated by commas, such as 32,64,128: each "
            "step draws one by the seed, and has as many bytes or tokens as --batch of the "
            "longest, which is the training length.",
            shown="one, --train-length",
            panel="Data",
        ),
    ] = None
    test_lengths: Annotated[
        str | None,
        option(
            "Lengths of the test windows, in bytes or tokens, separated by commas; the training "
            "length is always included.",
            shown="1, 2, 4 and 8 times the training length for text",
            panel="Data",
        ),
    ] = None
    test_window: Annotated[
        int | None,
        option(
            "Also read the trained weights with attention limited to the last N bytes or tokens, "
            "a row of its own for each encoding, at the longest length; without training. 0: no "
            "such rows.",
            shown="the training length for text",
            min=0,
            panel="Data",
        ),
    ] = None
    tune_steps: Annotated[
        int | None,
        option(
            "Steps of tuning at the longest length for encodings that are RoPE, a row of its own "
            "for each, by the code of posenc extend with two windows a step. 0: no such rows.",
            shown="5 % of --steps, at least 100, for text",
            min=0,
            panel="Training",
        ),
    ] = None
    num_windows: Annotated[
        int,
        option(
            "Windows of each test length, spread over the test text, where it has as many.",
            min=2,
            panel="Data",
        ),
    ] = 128
    budget: Annotated[
        str, option(f"{_describe_budgets(BUDGETS)}. For budgets of --suite see --suite.")
    ] = "standard"
    seeds: Annotated[
        int | None,
        option(
            "Number of seeds, each a trial.",
            shown=f"those of the budget; {NUM_PAIR_SEEDS} for two encodings",
            min=1,
        ),
    ] = None
    steps: Annotated[
        int | None,
        option(
            "Optimizer steps of each trial.",
            shown="those of the budget for text",
            min=1,
            panel="Training",
        ),
    ] = None
    batch: Annotated[
        int | None,
        option("Training windows per step.", shown="32 for text", min=1, panel="Training"),
    ] = None
    micro_batch: Annotated[
        int | None,
        option(
            "Windows of a step that are in memory at a time, on text; their gradients add up.",
            shown="all of --batch",
            min=1,
            panel="Training",
        ),
    ] = None
    recompute: Annotated[
        bool,
        option(
            "Train in less memory by recomputing each layer in the backward pass (gradient "
            "checkpointing); the numbers stay the same.",
            "--recompute",
            panel="Training",
        ),
    ] = False
    width: Annotated[
        int | None, option("Width of the decoder, in channels.", shown="128", min=1, panel="Model")
    ] = None
    layers: Annotated[int | None, option("Number of layers.", shown="4", min=1, panel="Model")] = (
        None
    )
    heads: Annotated[
        int | None, option("Number of query heads.", shown="4", min=1, panel="Model")
    ] = None
    kv_heads: Annotated[
        int | None,
        option(
            "Number of key/value heads.",
            shown="as many as --heads, shared as in --config",
            min=1,
            panel="Model",
        ),
    ] = None
    sizes: Annotated[
        str | None,
        option(
            "Compare in models of several sizes, such as 0.2M,0.9M,3.5M: width and layers by one "
            "rule, steps by as many tokens for each parameter; the page has each lead over size.",
            shown=False,
            panel="Model",
        ),
    ] = None
    also: Annotated[
        list[str] | None,
        option(
            "Folder of a finished run of the same recipe in another size, whose losses join those "
            "of this run on the page of sizes; may be repeated.",
            shown=False,
            panel="Model",
        ),
    ] = None
    projections: Annotated[
        str,
        option(
            "Projections of attention: separate, k=v or q=k (shared), or none at all (none).",
            panel="Model",
        ),
    ] = "separate"
    config: Annotated[
        Path | None,
        option(
            "A Hugging Face config.json, or its folder: the decoder gets its sizes, unless other "
            "options set them, its norms, activation, biases, windows and tied embeddings, and "
            "RoPE its base; what is left out is named.",
            shown=False,
            panel="Model",
        ),
    ] = None
    small: Annotated[
        bool,
        option(
            "Shrink the model of --config to at most 4 layers, about 4 heads and 64 channels "
            "per head; keeps the number of query heads per key/value head.",
            "--small",
            panel="Model",
        ),
    ] = False
    lr: Annotated[float, option("Peak learning rate, per step of AdamW.", panel="Training")] = 2e-3
    encoding_lr: Annotated[
        float,
        option(
            "Learning rate of the encodings' own tables and scalars, in multiples of --lr.",
            panel="Training",
        ),
    ] = 20.0
    warmup: Annotated[
        float,
        option(
            "Steps over which the learning rate rises; below 1, a part of --steps.",
            min=0,
            panel="Training",
        ),
    ] = 0.05
    schedule: Annotated[
        str,
        option(
            "Learning rate after the warm-up: cosine (to a tenth), linear (to 0), constant, or wsd "
            "(constant, and linear to 0 over the last fifth). After constant a trial can be "
            "trained further: see docs/compare.md.",
            panel="Training",
        ),
    ] = "cosine"
    search_lr: Annotated[
        bool,
        option(
            "First train every encoding on every task for a fifth of the steps with 0.5, 1 and 2 "
            "times --lr, one seed each, and use the rate with the lowest validation loss. Only "
            "the training length is measured for this.",
            "--search-lr",
            panel="Training",
        ),
    ] = False
    tune: Annotated[
        bool | None,
        option(
            "First tune every encoding alike, on text: five trials for each, of a fifth of the "
            "steps, at least 250, at other learning rates and other settings of its own; then the "
            "best of both together, and more where an edge wins. "
            "--no-tune: one rate and the papers' settings for all.",
            "--tune/--no-tune",
            shown="choices recorded for the default recipe, if all encodings have one",
            panel="Training",
        ),
    ] = None
    device: Annotated[
        str, option("auto, cpu or cuda (every GPU, one trial on each).", panel="Where")
    ] = "auto"
    precision: Annotated[
        str,
        option(
            "auto, float32 or bfloat16 (autocast: matrix products in 16 bits; weights, gradients "
            "and AdamW's averages in float32). auto: bfloat16 if the hardware multiplies it.",
            panel="Where",
        ),
    ] = "auto"
    compile: Annotated[
        bool,
        option(
            "Train models compiled by torch.compile, on text only. See docs/scale.md.",
            "--compile",
            panel="Training",
        ),
    ] = False
    workers: Annotated[
        int | None,
        option(
            "Trials at a time on this machine, one process each. More than there are GPUs share "
            "them in turn.",
            shown="one per core; on cuda one per GPU",
            min=1,
            panel="Where",
        ),
    ] = None
    engine: Annotated[
        str,
        option(
            "Where trials run: local (processes of this machine), ray or slurm. See docs/scale.md.",
            panel="Where",
        ),
    ] = "local"
    address: Annotated[
        str | None,
        option(
            "Address of the Ray cluster: ray://HOST:PORT, HOST:PORT, or auto.",
            shown="a new one on this machine",
            panel="Where",
        ),
    ] = None
    storage: Annotated[
        str | None,
        option(
            "Storage shared by the machines of a Ray cluster, such as s3://bucket/run.",
            shown="the folder --out, which they must share",
            panel="Where",
        ),
    ] = None
    partition: Annotated[
        str | None, option("Slurm's partition.", shown="Slurm's own default", panel="Where")
    ] = None
    sbatch: Annotated[
        str | None,
        option(
            "What sbatch is told beside the partition: account, qos, mem, time and signal, as in "
            "mem=8G,time=12:00:00,signal=120. signal: seconds before the end of the time at "
            "which a job is told to stop.",
            shown="time=24:00:00",
            panel="Where",
        ),
    ] = None
    max_parallel: Annotated[
        int | None,
        option("Trials at a time on ray or slurm.", shown="as many as fit", min=1, panel="Where"),
    ] = None
    checkpoint_steps: Annotated[
        int | None,
        option(
            "Steps between two checkpoints.",
            shown="by time: after a minute, rarer where writing takes more than 3 % of it",
            min=1,
            panel="Training",
        ),
    ] = None
    out: Annotated[
        Path | None,
        option(
            "Folder for report.html, results.csv, study.json and the trials.  ",
            shown="a folder below runs/ named by the options",
            panel="Output",
        ),
    ] = None
    reuse: Annotated[
        list[str] | None,
        option(
            "Folder of a run, or of several, whose finished trials are reused if text, settings "
            "and code are the same; may be repeated.  ",
            shown="runs/, which is always searched",
            panel="Where",
        ),
    ] = None
    figures: Figures = None
    tables: Tables = None
    as_json: Json = False
    tensorboard: Annotated[
        bool,
        option(
            "Also write the losses for TensorBoard, into --out/tensorboard.",
            "--tensorboard",
            panel="Output",
        ),
    ] = False
    dry_run: Annotated[
        bool,
        option(
            "Measure a few steps, print the number of trials and tokens and the time, and stop.",
            "--dry-run",
            panel="Where",
        ),
    ] = False
    unchecked: Annotated[
        bool,
        option(
            "Also compare your own encoding if it sees later tokens, gives NaN, or depends on "
            "how it is called; the report has a note.",
            "--unchecked",
        ),
    ] = False
    yes: Annotated[
        bool, option("Start even if it is expected to take over a week.", "--yes", panel="Where")
    ] = False

    @property
    def task_names(self) -> list[str]:
        """Return the names of the tasks, each once; "text" if --task names none."""
        names = self.task or ["text"]
        return list(dict.fromkeys(name.replace("-", "_") for name in names))


def check_options(options: Options) -> None:
    """Check the type and minimum of every option, as typer does on the command line; that options
    of choice have one of their values, and the options of an engine are those of --engine; and
    that tensorboard is installed where it is asked for.

    Raises: ValueError.
    """
    if options.tensorboard:
        require_package("tensorboard", "--tensorboard")
    for name, annotation in get_type_hints(Options, include_extras=True).items():
        annotated_type, declared_option = get_args(annotation)
        value_type, *or_none = get_args(annotated_type) or (annotated_type,)
        value = getattr(options, name)
        if value is None and or_none:
            continue
        option_name = name if name == "encodings" else f"--{name.replace('_', '-')}"
        _check_option(option_name, value, value_type, declared_option.min)
    _check_choices(options)
    _check_engine_options(options)


def _check_choices(options: Options) -> None:
    """Raise ValueError for an option of choice that has none of its values."""
    # These load numpy and torch, without which the command line starts sooner.
    from posenc.compare.trial.config import OBJECTIVE_NAMES, SCHEDULES
    from posenc.compare.trial.train import PROJECTIONS
    from posenc.tasks.registry import TEXT, find_task

    require_choice("--budget", options.budget, SUITES if options.suite else BUDGETS)
    require_choice("--engine", options.engine, ENGINE_OPTIONS)
    require_choice("--objective", options.objective, OBJECTIVE_NAMES)
    require_choice("--schedule", options.schedule, SCHEDULES)
    require_choice("--device", options.device, ("auto", "cpu", "cuda"))
    require_choice("--precision", options.precision, ("auto", "float32", "bfloat16"))
    require_choice("--projections", options.projections, PROJECTIONS)
    require_choice("--token-type", options.token_type, TOKEN_TYPES)
    for name in options.task_names:
        if name != TEXT:
            find_task(name)


def _check_engine_options(options: Options) -> None:
    """Raise ValueError for an option that another engine has."""
    own_options = ENGINE_OPTIONS[options.engine]
    for name in dict.fromkeys(itertools.chain(*ENGINE_OPTIONS.values())):
        if getattr(options, name) is not None and name not in own_options:
            engines_in_words = " or ".join(
                engine for engine, names in ENGINE_OPTIONS.items() if name in names
            )
            own_in_words = ", ".join(f"--{own.replace('_', '-')}" for own in own_options)
            raise ValueError(
                f"--{name.replace('_', '-')} is an option of --engine {engines_in_words}; --engine "
                f"{options.engine} has {own_in_words}."
            )


def _check_option(option_name: str, value: Any, value_type: Any, minimum: Any) -> None:
    """Raise ValueError unless a value is of the type `value_type`, not empty, and at least
    `minimum`.

    option_name: its name in messages."""
    if "" in (value if isinstance(value, list) else [value]):
        raise ValueError(f"{option_name} is empty; it must name something.")
    if not _is_of_type(value, value_type) or (minimum is not None and value < minimum):
        limit = "" if minimum is None else f" of at least {minimum}"
        raise ValueError(
            f"{option_name} must be {_ACCEPTED_TYPES[value_type][1]}{limit}, got {value!r}."
        )


def _is_of_type(value: Any, value_type: Any) -> bool:
    """Return True if a value is of an option's type; True and False are no numbers here."""
    if isinstance(value, bool):  # Python counts it as an int
        return value_type is bool
    if not isinstance(value, _ACCEPTED_TYPES[value_type][0]):
        return False
    return value_type != list[str] or all(isinstance(item, str) for item in value)
