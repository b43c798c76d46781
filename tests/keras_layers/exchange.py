"""`python -m tests.keras_layers.exchange save|load FOLDER`: the same models, two backends."""

import sys
from pathlib import Path

import keras
import numpy as np

from tests.keras_layers.common import (
    answer,
    array,
    model_of_everything,
    model_of_shared,
    normal,
    some_tokens,
)

MODELS = {
    "everything": (model_of_everything, some_tokens()),
    "shared": (lambda: model_of_shared("t5"), normal(2, 5, 32)),
}

action, folder = sys.argv[1], Path(sys.argv[2])
for name, (make, x) in MODELS.items():
    if action == "save":
        model = make()
        model.save(folder / f"{name}.keras")
        weights = [array(w) for w in model.weights]
        np.savez(folder / f"{name}.npz", *weights, answer=answer(model, x))
    else:
        model = keras.models.load_model(folder / f"{name}.keras")
        saved = np.load(folder / f"{name}.npz")
        for i, weight in enumerate(model.weights):
            np.testing.assert_array_equal(array(weight), saved[f"arr_{i}"])
        assert len(saved.files) == len(model.weights) + 1
        # the same weights through up to six layers of float32, summed in another order
        bound = 1e-5 * abs(saved["answer"]).max()
        np.testing.assert_allclose(answer(model, x), saved["answer"], rtol=0, atol=bound)
