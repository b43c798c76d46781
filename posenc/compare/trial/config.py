"""The frozen config of a trial, and the folder named by its hash."""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posenc.command_line.options import require_choice
from posenc.files.atomic import write_atomically
from posenc.files.opening import read_file_text
from posenc.files.sealed_json import check_count, check_rising, check_text_length
from posenc.tasks.registry import TEXT, find_task

RECIPE = 7
"""Increase it if the same config would give other numbers, so that old results are not reused. 5:
training runs in plain PyTorch, whose sums differ from those of compiled C in the last bits. 6: `t5`
has the usual scale, which before was T5's own. 7: each test length has windows of its own, and far
targets are scored; needle_by_meaning has eight keys, and either chain of variables is first."""

ENCODING_LR = 20.0
"""Learning rate of an encoding's tables and scalars, in multiples of the model's, by default. Its
linear layers use the model's rate. Neither has weight decay.

AdamW moves every parameter by about the learning rate per step, however large its gradient. A
weight in a matrix acts together with its whole row, but a bias in the scores acts by itself and
must move by several logits. At the model's rate it would stay close to its initial value in a short
training, and the comparison would measure that instead of the method. Of 1, 5, 20 and 80 times, 20
has the lowest mean loss of six encodings at the training length: 2.22, 2.06, 2.02 and 2.04 bits
(results/ablations/encoding_lr.csv).
"""
WARMUP = 0.05
"""Part of the steps over which the learning rate rises, by default."""
COSINE = "cosine"
"""The default of --schedule."""
CONSTANT = "constant"
"""The schedule under which a finished trial can be trained further."""
SCHEDULES = (COSINE, "linear", CONSTANT, "wsd")
"""What the learning rate does after the warm-up, see `train.learning_rate`."""
_NEWER_FIELDS = (
    *("compile", "encoding_lr", "num_windows", "test_window", "tune_steps"),
    *("tokenizer", "vocabulary", "document_end", "micro_batch", "recompute"),
    *("architecture", "warmup", "schedule", "train_lengths"),
)
"""Fields that older trials lack; their defaults are what these trials did."""
CAUSAL = "causal"
"""The objective of a decoder: predict the next byte, or token."""
MASKED = "masked"
SEQ2SEQ = "seq2seq"
OBJECTIVE_NAMES = (CAUSAL, MASKED, SEQ2SEQ)
"""The names of all objectives, see `posenc.compare.trial.objectives`."""
MIN_TRAIN_LENGTH = 2
"""The shortest training window: a window of one symbol has no context."""
SEPARATE = "separate"
"""The default of --projections: queries, keys and values each have their own matrix."""
MAX_ENTRIES = 1000
"""The maximum of letters of a name, of test lengths of a trial and of points of its curve: a page
with more would not be readable. Chosen, not derived."""
MAX_NAME_LETTERS = 60
"""Maximum of letters of an encoding in the name of a folder."""


@dataclass(frozen=True)
class Architecture:
    """What the layers of a trial's model are: fields of posenc.DecoderConfig. The defaults are
    posenc's own decoder; others are those of --config.

    >>> str(Architecture(qk_norm=True, ffn_dim=96))
    'ffn_dim 96, qk_norm True'
    """

    head_dim: int | None = None
    ffn_dim: int | None = None
    norm: str = "rms"
    norm_eps: float = 1e-6
    activation: str = "swiglu"
    ffn_bias: bool = False
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool | None = None
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] | None = None

    def __str__(self) -> str:
        """Return the fields that posenc's own decoder has not, as text."""
        differing_fields = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                differing_fields.append(f"{field.name} {value}")
        return ", ".join(differing_fields) or "posenc's own"

    def check(self) -> None:
        """Raise ValueError for layers that no plan makes; called after reading a file."""
        for name in ("head_dim", "ffn_dim"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        for name in ("norm", "activation"):
            check_text_length(name, getattr(self, name), MAX_ENTRIES)
        windows = self.layer_windows or ()
        if len(windows) > MAX_ENTRIES:
            raise ValueError(f"layer_windows: expected at most {MAX_ENTRIES:,}.")
        for window in windows:
            if window is not None:
                check_count("a window", window, 1)


@dataclass(frozen=True)
class TrialConfig:
    """Everything that determines the numbers of a trial.

    Args:
        encoding: argument for `posenc.create`: a name, or a text in the grammar of encodings.
        seed: draws the initial weights and the batches; shared by all encodings.
        corpus: hash of the text, or of sequences that the task makes.
        train_length: training window, in bytes or tokens; of several the longest; for a task, the
            longest sequence in training, in the task's unit.
        test_lengths: lengths of the evaluation in the same unit, ascending, train_length first.
        steps: optimizer steps.
        batch: windows per step; of shorter windows there are more, see `at_length`.
        width, layers, heads, kv_heads: sizes of the decoder.
        lr: peak learning rate of the model's weights.
        device: "cpu" or "cuda".
        precision: "float32", or "bfloat16" for autocast.
        torch: version of torch, whose kernels determine the last bits.
        recipe: version of the training and evaluation code; 0 for a trial of another program.
        code: hash of the files that define the encoding; "" for posenc's own.
        task: "text", or a name in posenc.tasks.registry.
        objective: for text, a name in posenc.compare.trial.objectives; for tasks "causal".
        projections: shared projections of queries, keys and values, see posenc.Attention.
        source: hash of posenc's own files behind the encoding, so that a changed formula is trained
            again; "" for results from before it was kept.
        compile: train the model compiled by torch.compile.
        encoding_lr: learning rate of an encoding's tables and scalars, in multiples of `lr`.
        num_windows: windows of each test length, where the text has as many; 0 up to recipe 6,
            which read 64 KiB.
        test_window: width of attention, in tokens, in the reading "window"; 0 for none.
        tune_steps: steps of the tuning before the reading "tuned"; 0 for none.
        tokenizer: hash of the tokenizer, which gives the bytes of each token; "" for none.
        vocabulary: number of tokens of the text, `document_end` included; 0 for a text of bytes.
        document_end: the token after each document, which attention does not cross; None for a
            text of bytes.
        micro_batch: windows of a step that are in memory at a time; their gradients add up. 0 for
            all of them.
        recompute: compute each layer again in the backward pass, in less memory.
        architecture: the layers of the model.
        warmup: steps over which the learning rate rises; below 1, a part of `steps`.
        schedule: what the learning rate does then, one of SCHEDULES, see
            `train.learning_rate`.
        train_lengths: lengths of training windows, of which each step draws one, ascending, with
            train_length last; () if all have train_length.
    """

    encoding: str
    seed: int
    corpus: str
    train_length: int
    test_lengths: tuple[int, ...]
    steps: int
    batch: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    lr: float
    device: str
    precision: str
    torch: str
    recipe: int = RECIPE
    code: str = ""
    task: str = TEXT
    objective: str = CAUSAL
    projections: str = SEPARATE
    source: str = ""
    compile: bool = False
    encoding_lr: float = ENCODING_LR
    num_windows: int = 0
    test_window: int = 0
    tune_steps: int = 0
    tokenizer: str = ""
    vocabulary: int = 0
    document_end: int | None = None
    micro_batch: int = 0
    recompute: bool = False
    architecture: Architecture = Architecture()
    warmup: float = WARMUP
    schedule: str = COSINE
    train_lengths: tuple[int, ...] = ()

    def check(self) -> None:
        """Raise ValueError for a trial that no plan makes; called after reading a file."""
        for name in ("steps", "batch", "width", "layers", "heads", "kv_heads", "recipe"):
            check_count(name, getattr(self, name), 1)
        check_count("seed", self.seed)
        check_count("train_length", self.train_length, 1)
        check_rising("test_lengths", self.test_lengths, MAX_ENTRIES)
        if self.test_lengths[:1] != (self.train_length,):
            raise ValueError("test_lengths must begin with train_length.")
        check_count("test_lengths", self.test_lengths[-1], 1)
        self._check_train_lengths()
        for name in ("num_windows", "test_window", "tune_steps", "vocabulary", "micro_batch"):
            check_count(name, getattr(self, name))
        if (self.document_end is None) != (not self.vocabulary):
            raise ValueError("a vocabulary of tokens and the end of a document belong together.")
        if self.document_end is not None and not 0 <= self.document_end < self.vocabulary:
            raise ValueError(f"document_end {self.document_end} is none of its tokens.")
        for name in ("lr", "encoding_lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name):g}.")
        if not 0 <= self.warmup <= self.steps:  # NaN fails, too
            raise ValueError(f"warmup must be from 0 to the steps, got {self.warmup}.")
        require_choice("A trial's schedule", self.schedule, SCHEDULES)
        check_encoding_name(self.encoding)
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), str):
                check_text_length(field.name, value, MAX_ENTRIES)
        if self.task != TEXT:
            find_task(self.task, accept_retired=True)
        require_choice("A trial's objective", self.objective, OBJECTIVE_NAMES)

    def _check_train_lengths(self) -> None:
        """Raise ValueError for lengths of training windows that no plan makes."""
        if not self.train_lengths:
            return
        check_rising("train_lengths", self.train_lengths, MAX_ENTRIES)
        check_count("train_lengths", self.train_lengths[0], MIN_TRAIN_LENGTH)
        if len(self.train_lengths) < 2 or self.train_lengths[-1] != self.train_length:
            raise ValueError("train_lengths must be two or more, train_length last.")
        if undivided_length(self.train_lengths, self.batch * self.train_length) is not None:
            raise ValueError("each of train_lengths must divide the tokens of a step.")
        if not self.is_on_text:
            raise ValueError("train_lengths are of a text, and this is a task.")

    @property
    def hash(self) -> str:
        """Return twelve hexadecimal digits that change with any field. Those of `_NEWER_FIELDS`
        count only where they are set, so that older trials keep theirs."""
        defaults = {f.name: f.default for f in dataclasses.fields(self) if f.name in _NEWER_FIELDS}
        values = dataclasses.asdict(self)
        counted_values = {
            name: value
            for name, value in values.items()
            if name not in defaults or getattr(self, name) != defaults[name]
        }
        fields_in_json = json.dumps(counted_values, sort_keys=True)
        return hashlib.sha256(fields_in_json.encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """Return encoding, task and seed in letters that a folder's name may have, such as
        `rope-copy-seed0`."""
        name = re.sub(r"[^\w.]+", "-", self.encoding).strip("-.")[:MAX_NAME_LETTERS]
        suffix = "" if self.task == TEXT else f"-{self.task}"
        suffix += "" if self.objective == CAUSAL else f"-{self.objective}"
        return name + re.sub(r"[^\w.]+", "-", f"{suffix}-seed{self.seed}")

    @property
    def warmup_steps(self) -> int:
        """Return the number of steps over which the learning rate rises, at least 1."""
        is_share = self.warmup < 1
        steps = math.floor(self.warmup * self.steps) if is_share else int(self.warmup)
        return max(1, steps)

    @property
    def lengths_of_steps(self) -> tuple[int, ...]:
        """Return the lengths of training windows that steps have, ascending."""
        return self.train_lengths or (self.train_length,)

    def at_length(self, length: int) -> "TrialConfig":
        """Return the trial as if each step had windows of `length`, one of `lengths_of_steps`: as
        many tokens in a step, and at most as many in memory at a time.

            32 × 128 tokens, 4 × 128 at a time  ->  at 32:  128 × 32 tokens, 16 × 32 at a time
        """
        if length == self.train_length and not self.train_lengths:
            return self
        return replace(
            self,
            train_length=length,
            train_lengths=(),
            batch=self.batch * self.train_length // length,
            micro_batch=self.micro_batch * self.train_length // length,
        )

    @property
    def saves_memory(self) -> bool:
        """Return True if an option makes a step take less memory and more time."""
        return self.recompute or self.micro_batch > 0

    @property
    def is_on_text(self) -> bool:
        """Return True if the trial learns a text, not a sequence task."""
        return self.task == TEXT

    @property
    def is_of_table(self) -> bool:
        """Return True for a trial of another program, of which a table has the losses: fields that
        the table lacks are 0 or ""."""
        return self.recipe == 0

    @property
    def length_unit(self) -> str:
        """Return what lengths of the text count: "bytes" or "tokens"."""
        return "tokens" if self.vocabulary or self.is_of_table else "bytes"

    @property
    def loss_unit(self) -> str:
        """Return what a loss on the text is for: "byte"; "token" for tokens whose bytes are not
        known."""
        return "token" if self.length_unit == "tokens" and not self.tokenizer else "byte"

    @property
    def folder(self) -> str:
        """Return the name of the trial's folder."""
        return f"{self.name}-{self.hash}"


def undivided_length(lengths: Sequence[int], num_tokens: int) -> int | None:
    """Return the first of these lengths of windows that does not divide the tokens of a step; None
    if all do."""
    return next((length for length in lengths if num_tokens % length), None)


def check_encoding_name(name: str) -> None:
    """Raise ValueError for a name of an encoding that no table or chart can show."""
    check_text_length("the name of an encoding", name, MAX_ENTRIES)
    if not name:
        raise ValueError("the name of an encoding is empty.")
    if len(name.splitlines()) > 1:
        raise ValueError("the name of an encoding has a line break.")


def describe_trial(trial: TrialConfig) -> str:
    """Return a trial in words, for messages: `rope on copy seed 0`, for one that chooses a learning
    rate also the rate."""
    trial_in_words = trial.encoding
    if trial.task != TEXT:
        trial_in_words = f"{trial_in_words} on {trial.task}"
    trial_in_words = f"{trial_in_words} seed {trial.seed}"
    if len(trial.test_lengths) > 1 or trial.is_of_table:
        return trial_in_words
    # Only a trial that chooses a learning rate has one test length.
    return f"{trial_in_words} at lr {trial.lr:g}"


def write_trial(folder: Path, config: TrialConfig) -> None:
    """Write config.json into the trial's folder, for its worker."""
    write_atomically(folder / "config.json", json.dumps(dataclasses.asdict(config), indent=1))


def read_trial(folder: Path) -> TrialConfig:
    """Read a trial from its folder. Raises ValueError if the folder has another trial's name."""
    fields = json.loads(read_file_text(folder / "config.json"))
    for name in ("test_lengths", "train_lengths"):
        fields[name] = tuple(fields.get(name, ()))
    layers = fields.get("architecture", {})
    if layers.get("layer_windows") is not None:
        layers["layer_windows"] = tuple(layers["layer_windows"])
    config = TrialConfig(**fields | {"architecture": Architecture(**layers)})
    if config.folder != folder.name:
        raise ValueError(f"{folder}/config.json is the config of {config.folder}")
    return config
