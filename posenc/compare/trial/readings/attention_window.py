"""Read the weights of a trial in a window."""

import numpy as np

from posenc.compare.scores import Reading
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.objectives import objective_of
from posenc.compare.trial.objectives.objective import NearLosses, Scores
from posenc.models import Decoder
from posenc.models.decoder import WindowedDecoder


def read_in_window(
    model: Decoder,
    symbols: np.ndarray,
    config: TrialConfig,
    as_trained: Scores,
    near_losses: NearLosses,
) -> Reading:
    """Return the scores of a causal model on text whose attention is limited to the last
    `test_window` tokens: at the training length and at the longest, which are judged.

    What a window of at least the training length cannot change is taken from the scores
    `as_trained` and `near_losses`: tokens up to the window's width see all before them.
    Raises: FloatingPointError for a loss that is not finite.
    """
    at_training, *_, at_longest = as_trained.by_length
    if at_longest.cannot is not None:
        return Reading("window", cannot=at_longest.cannot)  # its row would repeat that as trained
    objective = objective_of(config)
    windowed = WindowedDecoder(model, config.test_window)
    longest = at_longest.length
    if config.test_window < config.train_length:
        scores = objective.test(windowed, symbols, config, (config.train_length, longest))
        return Reading("window", scores.by_length, scores.far)
    scores = objective.test(windowed, symbols, config, (longest,), near_losses)
    return Reading("window", (at_training, *scores.by_length), scores.far)
