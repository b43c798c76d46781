"""Read the weights of a trial in a window."""

import numpy as np

from posenc.compare.scores import Reading
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.objectives import objective_of
from posenc.compare.trial.objectives.objective import NearLosses, Scores
from posenc.models import Decoder
from posenc.models.in_window import InWindow


def read_in_window(
    model: Decoder,
    symbols: np.ndarray,
    config: TrialConfig,
    as_trained: Scores,
    near_losses: NearLosses,
) -> Reading:
    """Return the scores of a causal model on text whose attention is limited to the last
    `test_window` tokens.

    What a window of at least the training length cannot change is taken from the scores
    `as_trained` and `near_losses`: tokens up to the window's width see all before them.
    Raises: FloatingPointError for a loss that is not finite.
    """
    beyond = [score.cannot for score in as_trained.by_length[1:]]
    if all(reason is not None for reason in beyond):
        return Reading("window", cannot=beyond[-1])  # else its row would repeat that as trained
    objective = objective_of(config)
    windowed = InWindow(model, config.test_window)
    if config.test_window < config.train_length:
        scores = objective.test(windowed, symbols, config)
        return Reading("window", scores.by_length, scores.far)
    same = [score for score in as_trained.by_length if score.length <= config.test_window]
    same_far = [score for score in as_trained.far if score.length <= config.test_window]
    longer = config.test_lengths[len(same) :]
    scores = objective.test(windowed, symbols, config, longer, near_losses)
    return Reading("window", (*same, *scores.by_length), (*same_far, *scores.far))
