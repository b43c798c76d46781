"""One encoding of each place, compiled by Inductor as users compile it."""

import functools

import pytest
import torch

from posenc import create, names
from posenc.testing.harness import (
    build_layer,
    possible_length,
    random_embeddings,
    successive_positions,
)
from tests.compilers import needs_inductor, needs_whole_graphs

PLACES = {1: "sinusoidal", 2: "rope", 3: "t5", 4: "shaw"}


def test_the_four_act_at_the_four_places():
    assert all(name in names() for name in PLACES.values())
    for place, name in PLACES.items():
        assert place in build_layer(functools.partial(create, name)).encoding.claims.places


@needs_whole_graphs
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")  # torch's own
@needs_inductor
@pytest.mark.parametrize(
    "name",
    [
        # Each is compiled for 14 seconds: here those of the places that most models use.
        *(PLACES[place] for place in (2, 3)),
        *(pytest.param(PLACES[place], marks=pytest.mark.nightly) for place in (1, 4)),
    ],
)
def test_inductor_gives_the_same_values(name: str):
    """Forward alone, to keep the compile time of the suite in bounds."""
    model = build_layer(functools.partial(create, name), dtype=torch.float32)
    encoding = model.encoding
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (possible_length(encoding, 12), possible_length(encoding, 19)):
            x, positions = (
                random_embeddings(length, dtype=torch.float32),
                successive_positions(encoding, length),
            )
            got, want = compiled(x, positions), model(x, positions)
            torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
