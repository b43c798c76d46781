"""Inkling's relative logits against float64 loops and transformers' module."""

import pytest
import torch

from posenc.encodings.scores.inkling import RelativeLogits
from posenc.testing.harness import add_term_to_scores
from tests.attending import attend
from tests.references import relative_logits


def draw(log_scaling=None, extent: int = 6):
    torch.manual_seed(0)
    encoding = RelativeLogits(
        12, 3, extent=extent, num_profiles=4, log_scaling=log_scaling
    ).double()
    torch.nn.init.normal_(encoding.profiles)
    torch.nn.init.normal_(encoding.state_proj.weight)
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 3, 7, 8, 20, 21, 22])
    return encoding, x, positions, encoding.state(x, positions)


def modified(encoding, scores, positions, state):
    return add_term_to_scores(encoding, scores, scores, None, positions, positions, state, state)


@pytest.mark.reference("inkling")
@pytest.mark.parametrize("log_scaling", [None, (4.0, 0.1)])
@pytest.mark.parametrize("extent", [1, 6, 50])
def test_scores_equal_the_loops(log_scaling, extent: int):
    encoding, x, positions, state = draw(log_scaling, extent)
    scores = torch.randn(1, 3, 9, 9, dtype=torch.float64)
    weight = encoding.state_proj.weight.view(3, 4, 12)
    states = torch.einsum("td,hrd->htr", x[0], weight)
    want = relative_logits.logits(
        scores[0].tolist(),
        states.tolist(),
        encoding.profiles.tolist(),
        positions.tolist(),
        positions.tolist(),
        log_scaling,
    )
    got = modified(encoding, scores, positions, state)
    torch.testing.assert_close(got[0], torch.tensor(want, dtype=torch.float64))


def test_bias_equals_transformers():
    modeling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
    encoding, _, positions, state = draw()
    theirs = modeling.InklingRelativeLogits(4, 6).double()
    theirs.load_state_dict({"proj": encoding.profiles.detach()})
    want = theirs(state.transpose(1, 2), positions, positions)
    got = modified(encoding, torch.zeros(1, 3, 9, 9, dtype=torch.float64), positions, state)
    torch.testing.assert_close(got, want)


def test_log_scaling_sees_the_position():
    assert draw()[0].claims.shift_invariant and not draw((4.0, 0.1))[0].claims.shift_invariant


def test_errors_name_the_number():
    with pytest.raises(ValueError, match="extent must be at least 1, got 0"):
        RelativeLogits(8, 2, extent=0)
    q = torch.randn(1, 3, 9, 4)
    with pytest.raises(ValueError, match=r"encoding\.state"):
        attend(q, q, q, draw()[0].float(), torch.arange(9))
