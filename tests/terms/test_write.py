"""What an additive term writes over anything is what it adds to nothing."""

import pytest
import torch

import posenc
from posenc.terms import products

NAMES = ("fire", "shaw", "transformer_xl", "deberta", "inkling")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("apart", [1, 3])
@torch.no_grad()
def test_it_writes_what_it_adds(name, compiled, apart, monkeypatch):
    if not compiled:
        monkeypatch.setattr(products, "applies", lambda *_: False)
    torch.manual_seed(0)
    encoding = posenc.create(name, posenc.ModelShape(64, 4, train_length=16))
    for parameter in encoding.parameters():
        parameter.normal_()
    positions = apart * torch.arange(90)  # apart by 3 they are no run
    x, vectors = torch.randn(2, 90, 64), torch.randn(2, 4, 90, 16)
    tokens = posenc.Tokens(vectors, positions, encoding.state(x, positions))
    term = encoding.term(tokens, tokens).ready(40, causal=True)
    assert term.additive
    for rows, keys in ((slice(0, 40), slice(0, 40)), (slice(40, 80), slice(7, 80))):
        shape = (2, 4, rows.stop - rows.start, keys.stop - keys.start)
        added = term.add(torch.zeros(shape), rows, keys, None)
        written = term.write(torch.full(shape, torch.nan), rows, keys)
        seen = positions[rows, None] >= positions[keys]
        assert torch.equal(written[..., seen], added[..., seen])
        assert written[..., seen].isfinite().all() and written[..., seen].std() > 0
