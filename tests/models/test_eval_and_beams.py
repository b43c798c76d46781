"""Generation draws no dropout, and beams take rows and positions along."""

import torch

import posenc


def decoder(**options) -> posenc.Decoder:
    config = posenc.DecoderConfig(11, 16, 2, 2, **options)
    return posenc.Decoder(config, posenc.RoPE(8, interleaved=False))


def test_generate_writes_in_eval_mode_and_puts_the_mode_back():
    model = decoder(dropout=0.5).train()
    tokens = torch.tensor([[1, 2, 3]])
    first = posenc.generate(model, tokens, 8)
    assert model.training and all(m.training for m in model.modules())
    assert torch.equal(first, posenc.generate(model, tokens, 8))
    assert torch.equal(first, posenc.generate(model.eval(), tokens, 8))


def test_beams_of_a_single_row_with_padding():
    model = decoder().eval()
    tokens = torch.tensor([[0, 1, 2, 3]])
    valid = torch.tensor([[False, True, True, True]])
    alone = posenc.generate(model, tokens[:, 1:], 4, num_beams=3)
    padded = posenc.generate(model, tokens, 4, num_beams=3, valid=valid)
    assert torch.equal(padded[:, 1:], alone)


def test_beams_share_a_source_with_positions_of_its_own():
    encoding = posenc.T5Bias(2, bidirectional=True)
    model = posenc.EncoderDecoder(
        posenc.DecoderConfig(11, 16, 1, 2), encoding, posenc.ALiBi(2), posenc.ALiBi(2)
    ).eval()
    source = torch.tensor([[1, 2, 3], [4, 5, 6]])
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    together = posenc.generate(
        model.conditioned_on(source, positions), torch.ones(2, 1, dtype=torch.int64), 4, num_beams=2
    )
    for row in range(2):
        alone = posenc.generate(
            model.conditioned_on(source[row : row + 1], positions[row : row + 1]),
            torch.ones(1, 1, dtype=torch.int64),
            4,
            num_beams=2,
        )
        assert torch.equal(together[row : row + 1], alone)
