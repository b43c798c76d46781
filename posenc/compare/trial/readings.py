"""Read the weights of a trial in other ways than as trained: with attention limited to a window,
and after a tuning at the longest test length."""

import copy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from posenc.compare.defaults import TUNE_BATCH
from posenc.compare.scores import Reading
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.evaluate import autocast
from posenc.compare.trial.objectives import NearLosses, Scores, objective_of
from posenc.compare.trial.train import encoding_shape
from posenc.compare.trial.windows import documents_of_tokens
from posenc.encodings import ModelShape, RoPE
from posenc.hf.checkpoint.tokenization import Windows
from posenc.hf.teacher import Teacher
from posenc.hf.tune_config import TuneConfig
from posenc.hf.tuning import tune
from posenc.models import Decoder
from posenc.models.decoder import WindowedDecoder, mask_of_documents


def read_in_window(
    model: Decoder,
    symbols: np.ndarray,
    config: TrialConfig,
    as_trained: Scores,
    near_losses: NearLosses,
    token_bytes: Tensor | None = None,
) -> Reading:
    """Return the scores of a causal model on text whose attention is limited to the last
    `test_window` tokens: at the training length and at the longest, which are judged.

    What a window of at least the training length cannot change is taken from the scores
    `as_trained` and `near_losses`: tokens up to the window's width see all before them.
    token_bytes: the bytes of each token, see `Objective.test`.
    Raises: FloatingPointError for a loss that is not finite.
    """
    score_at_training, *_, score_at_longest = as_trained.by_length
    if score_at_longest.cannot is not None:
        # Its row would repeat that as trained.
        return Reading("window", cannot=score_at_longest.cannot)
    objective = objective_of(config)
    windowed_model = WindowedDecoder(model, config.test_window)
    longest_length = score_at_longest.length
    if config.test_window < config.train_length:
        lengths = (config.train_length, longest_length)
        scores = objective.test(windowed_model, symbols, config, lengths, token_bytes=token_bytes)
        return Reading("window", scores.by_length, scores.far)
    scores = objective.test(
        windowed_model, symbols, config, (longest_length,), near_losses, token_bytes
    )
    return Reading("window", (score_at_training, *scores.by_length), scores.far)


TUNING_FOLDER = "tuning"
"""Folder of the state of a tuning, inside the trial's folder, deleted when it is done."""


class TunedReading(NamedTuple):
    """The reading "tuned", and the seconds that its training took."""

    reading: Reading
    seconds: float


def can_be_tuned(model: nn.Module) -> bool:
    """Return True if the model is a decoder that rotates queries and keys by RoPE in all layers:
    the kinds of encodings that are trained short and tuned long."""
    return isinstance(model, Decoder) and isinstance(model.encoding, RoPE)


def tune_and_read(
    model: Decoder,
    train_symbols: np.ndarray,
    test_symbols: np.ndarray,
    config: TrialConfig,
    folder: Path,
    token_bytes: Tensor | None = None,
) -> TunedReading:
    """Tune the trained model at the longest test length and return its scores at the training
    length and there. The model itself stays as it is. The code is posenc extend's, with its
    defaults but for the batch, TUNE_BATCH: up to the training length the copy learns the
    predictions of the unchanged model, its teacher, and beyond it the next bytes.

    RoPE without a scaling gets YaRN's for the longest length, as extend's recommendation for a
    tuned checkpoint; other scalings stay.

    train_symbols, test_symbols: of the text, to tune and to test on.
    folder: that of the trial, which keeps the state of an interrupted tuning.
    token_bytes: the bytes of each token, see `Objective.test`.

    Raises: FloatingPointError or RunFailed for a loss that is not finite.
    """
    longest_length = max(config.test_lengths)
    tune_config = TuneConfig(steps=config.tune_steps, batch=TUNE_BATCH, seed=config.seed)
    teacher = Teacher(_LikeTransformers(copy.deepcopy(model).eval(), config))
    tuned_model = copy.deepcopy(model)
    assert isinstance(tuned_model.encoding, RoPE)  # see can_be_tuned
    shape = encoding_shape(config)
    tuned_model.encoding = _with_yarn(
        tuned_model.encoding, longest_length / config.train_length, shape
    )
    student = _LikeTransformers(tuned_model, config)
    windows = _windows_to_tune_on(train_symbols, longest_length, tune_config)
    state_folder = folder / TUNING_FOLDER
    num_steps_taken = -1  # the first call comes before the first step

    def count_step(_message: str, _fraction: float) -> None:
        nonlocal num_steps_taken
        num_steps_taken += 1

    began = time.perf_counter()
    tune(
        student,
        windows,
        config.train_length,
        tune_config,
        state_folder,
        count_step,
        teacher=teacher,
    )
    # A restarted tuning has taken some of its steps before.
    seconds = (time.perf_counter() - began) / max(1, num_steps_taken) * config.tune_steps
    tested_lengths = (config.train_length, longest_length)
    scores = objective_of(config).test(
        tuned_model, test_symbols, config, tested_lengths, token_bytes=token_bytes
    )
    return TunedReading(Reading("tuned", scores.by_length, scores.far), seconds)


class _LikeTransformers(nn.Module):
    """A decoder that is called, and answers, as models of transformers do, for extend's tuning. It
    computes in the precision of the trial."""

    supports_gradient_checkpointing = False

    def __init__(self, model: Decoder, trial: TrialConfig) -> None:
        super().__init__()
        self.model = model
        self.trial = trial
        self.config = SimpleNamespace(to_dict=lambda: {"encoding": repr(model.encoding)})

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.model.tokens.weight.device

    def forward(self, tokens: Tensor, use_cache: bool = False) -> Any:
        """Return an object whose `logits` are (batch, len, vocabulary); it keeps no cache."""
        assert not use_cache
        documents = documents_of_tokens(tokens, self.trial)
        mask = None if documents is None else mask_of_documents(self.model, documents)
        with autocast(self.trial):
            logits = self.model(tokens, length=tokens.shape[1], mask=mask)
        return SimpleNamespace(logits=logits)


def _with_yarn(encoding: RoPE, factor: float, shape: ModelShape) -> RoPE:
    """Return RoPE with YaRN's scaling by `factor`. An encoding of a subclass, or with a scaling, is
    returned as it is."""
    if type(encoding) is not RoPE or encoding.scaling is not None:
        return encoding
    return RoPE.from_shape(
        shape,
        scaling="yarn",
        factor=factor,
        rope_theta=encoding.rope_theta,
        interleaved=encoding.interleaved,
        rotary_dim=encoding.rotary_dim,
    )


def _windows_to_tune_on(train_symbols: np.ndarray, length: int, tune_config: TuneConfig) -> Windows:
    """Return windows of the training text, evenly spread, as many as the tuning draws at most."""
    last_start = len(train_symbols) - length
    num_windows = max(1, min(tune_config.steps * tune_config.batch, last_start + 1))
    starts = np.linspace(0, last_start, num_windows).astype(int)
    rows = [train_symbols[start : start + length] for start in starts]
    tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
    return Windows(tokens, torch.zeros_like(tokens))
