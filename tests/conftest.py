"""Every test draws the same numbers, whatever ran before it in the same process, and checks the
shapes in posenc's signatures."""

import pytest
import torch

from tests import shapes

shapes.install()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
