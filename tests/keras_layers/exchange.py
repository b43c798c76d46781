"""`python -m tests.keras_layers.exchange save|load FOLDER`: one model, two backends."""

import sys
from pathlib import Path

import keras
import numpy as np

from tests.keras_layers.common import array, model_of_everything, some_tokens

action, folder = sys.argv[1], Path(sys.argv[2])
if action == "save":
    model = model_of_everything()
    model.save(folder / "model.keras")
    np.save(folder / "answer.npy", array(model(some_tokens())))
else:
    model = keras.models.load_model(folder / "model.keras")
    want = np.load(folder / "answer.npy")
    np.testing.assert_allclose(array(model(some_tokens())), want, rtol=1e-5, atol=1e-6)
