"""Every check draws the same numbers, on every backend."""

import keras
import pytest


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(0)
