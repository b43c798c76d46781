"""Measure which layout the rows of q and k have, by the loss under both readings, and write the
other one.

Neither a config nor a row norm shows the layout. A model that is read in the wrong one predicts
like an untrained one. Loads torch and transformers.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from posenc.command_line.options import require_choice
from posenc.files.atomic import write_atomically
from posenc.files.folders import new_folder
from posenc.files.opening import read_file_text
from posenc.files.sealed_json import strict_json
from posenc.runtimes.config_model import Model, model_of
from posenc.runtimes.files.json_object import read_json
from posenc.runtimes.files.source import load
from posenc.runtimes.meaning import require_known_family
from posenc.runtimes.writers.copies import copy_files
from posenc.runtimes.writers.weight_rows import permute_folder

FEWEST_TOKENS = 50
"""Fewest tokens for a decision; chosen, not derived."""
MOST_TOKENS = 512
"""The most tokens that are read; chosen, not derived."""
DECIDING_STANDARD_ERRORS = 4.0
"""Standard errors by which the losses must differ; chosen, not derived."""
LAYOUT_NAMES = {True: "interleaved", False: "half-split"}


@dataclass(frozen=True)
class LayoutVerdict:
    """Which layout the rows of q and k have, by two losses of the model.

    expected: the layout of the family's code. found: the layout of the rows, None if unknown.
    losses: nats per token with the rows as they are, and permuted. why: why it is unknown.
    """

    expected: str
    found: str | None
    losses: tuple[float, float]
    num_tokens: int
    why: str

    @property
    def mismatch(self) -> bool:
        """Return True if the rows are known to be in another layout than the code expects."""
        return self.found is not None and self.found != self.expected


class ConvertedCopy(NamedTuple):
    """A copy whose rows of q and k are in another layout.

    num_tensors: how many were permuted. interleaved: the layout of their rows now. key: of
    config.json, which says so; empty if the family has none. expected_interleaved: the layout that
    the family's code expects where no key says another one.
    """

    num_tensors: int
    interleaved: bool
    key: str
    expected_interleaved: bool


def measure_layout(folder: Path, text_file: Path) -> LayoutVerdict:
    """Return which layout the rows have: the one in which the model predicts the text better.

    Raises: ValueError where the folder, its tokenizer or its rows cannot be read.
    """
    model = _describe_model(folder, "--layout")
    tokens = _first_tokens(folder, text_file)
    expected_layout = LAYOUT_NAMES[model.interleaved]
    if len(tokens) < FEWEST_TOKENS:
        why = f"the text has {len(tokens)} tokens, {FEWEST_TOKENS} are needed"
        return LayoutVerdict(expected_layout, None, (float("nan"), float("nan")), len(tokens), why)
    with tempfile.TemporaryDirectory() as scratch:
        copied_folder = Path(scratch)
        copy_files(folder, copied_folder)
        # To the family's layout: right if the weights are in the other one.
        permute_folder(copied_folder, model, to_interleaved=model.interleaved)
        losses_as_is = _loss_of_each_token(folder, tokens)
        losses_permuted = _loss_of_each_token(copied_folder, tokens)
    difference = losses_as_is - losses_permuted
    mean_difference = float(difference.mean())
    standard_error = float(difference.std() / len(difference) ** 0.5)
    losses = (float(losses_as_is.mean()), float(losses_permuted.mean()))
    if not abs(mean_difference) > DECIDING_STANDARD_ERRORS * standard_error:
        why = (
            f"{losses[0]:.2f} and {losses[1]:.2f} nats per token do not decide: the model is "
            "untrained, or the text too short"
        )
        return LayoutVerdict(expected_layout, None, losses, len(tokens), why)
    found_layout = expected_layout if mean_difference < 0 else LAYOUT_NAMES[not model.interleaved]
    return LayoutVerdict(expected_layout, found_layout, losses, len(tokens), "")


def is_interleaved(layout: str) -> bool:
    """Return True if the layout of this name is interleaved. Raises: ValueError: unknown name."""
    return require_choice("--convert-layout", layout, LAYOUT_NAMES.values()) == LAYOUT_NAMES[True]


def write_converted_copy(folder: Path, out: Path, layout: str) -> ConvertedCopy:
    """Write a copy whose rows of q and k are in the `layout`; they are taken to be in the
    other one.

    Raises: ValueError where `out` exists, the rows are not to be found, or `layout` is none.
    """
    to_interleaved = is_interleaved(layout)
    model = _describe_model(folder, "--convert-layout")
    with new_folder(out) as temporary_folder:
        copy_files(folder, temporary_folder)
        changed_tensors = permute_folder(temporary_folder, model, to_interleaved=to_interleaved)
        key = _write_layout_key(temporary_folder / "config.json", model, to_interleaved)
    return ConvertedCopy(len(changed_tensors), to_interleaved, key, model.interleaved)


def _write_layout_key(path: Path, model: Model, to_interleaved: bool) -> str:
    """Write the layout into a config whose family has a key for it, and return the key; "" without
    one. It stands where it stood, or in text_config if there is one."""
    key = model.facts.get("layout_key", "")
    if not key:
        return ""
    config = read_json(path)
    text_config = config.get("text_config")
    part = text_config if key not in config and isinstance(text_config, dict) else config
    part[key] = to_interleaved
    write_atomically(path, strict_json(config, indent=2) + "\n")
    return key


def _describe_model(folder: Path, option: str) -> Model:
    """Return the sizes and the family of the model in a folder; its weights are not read.

    option: the option that needs a folder, for the message.
    Raises: ValueError for a path that is no folder; UnknownFamilyError.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: {option} needs a model's folder.")
    model = model_of(load(folder).config)
    require_known_family(model)
    return model


def _first_tokens(folder: Path, text_file: Path) -> list[int]:
    """Return the first tokens of a text file, at most MOST_TOKENS, by the folder's tokenizer."""
    from posenc.hf.checkpoint.tokenization import load_tokenizer

    content = read_file_text(text_file, None)
    return list(load_tokenizer(folder)(content)["input_ids"])[:MOST_TOKENS]


def _loss_of_each_token(folder: Path, tokens: list[int]) -> Any:
    """Return the loss of each token in nats, given those before it."""
    import torch

    from posenc.hf.checkpoint.loading import load_checkpoint

    ids = torch.tensor([tokens])
    model = load_checkpoint(folder).model
    with torch.inference_mode():
        logits = model(ids).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
