"""Place 1 against the authors' embeddings and Hugging Face's BERT."""

import pytest
import torch
from torch import Tensor

from posenc.encodings.embeddings import grow
from posenc.encodings.embeddings.added_embedding import AddedEmbedding
from posenc.encodings.embeddings.bert import BertEmbedding
from posenc.encodings.embeddings.learned import Learned
from posenc.encodings.embeddings.learned_2d import Learned2D
from posenc.encodings.embeddings.sincos_2d import SinCos2D
from posenc.encodings.embeddings.sinusoidal import Sinusoidal
from posenc.positions import grid, positions_from_mask
from tests.golden_values import Case, cases


def table(encoding: Sinusoidal | SinCos2D, positions: Tensor, like: Tensor) -> Tensor:
    return encoding.vectors(positions, like.dtype)


@pytest.mark.golden("sinusoidal")
@pytest.mark.parametrize("case", cases("sinusoidal_interleaved"))
def test_interleaved_is_the_papers(case: Case):
    encoding = Sinusoidal(case.params["dim"], base=case.params["base"])
    got = table(encoding, case.inputs["positions"], case.expected["embedding"])
    case.assert_close("embedding", got)


@pytest.mark.golden("sinusoidal_concatenated")
@pytest.mark.parametrize("case", cases("sinusoidal_concat"))
def test_concatenated_is_transformer_xls(case: Case):
    encoding = Sinusoidal(case.params["dim"], base=case.params["base"], order="concatenated")
    got = table(encoding, case.inputs["positions"], case.expected["embedding"])
    case.assert_close("embedding", got)


@pytest.mark.parametrize("case", cases("sinusoidal_t2t"))
def test_fairseq_order_is_tensor2tensors(case: Case):
    p = case.params
    encoding = Sinusoidal(
        p["dim"], order="fairseq", base=p["max_timescale"], min_timescale=p["min_timescale"]
    )
    got = table(encoding, case.inputs["positions"], case.expected["embedding"])
    case.assert_close("embedding", got)


@pytest.mark.golden("sinusoidal_fairseq")
@pytest.mark.parametrize("case", cases("sinusoidal_fairseq"))
def test_fairseq_order_is_fairseqs(case: Case):
    pad = case.params["padding_idx"]
    encoding = Sinusoidal(case.params["dim"], order="fairseq", padding_idx=pad)
    got = table(encoding, case.inputs["positions"], case.expected["table"])
    case.assert_close("table", got)
    positions = positions_from_mask(case.inputs["tokens"] != pad, start=pad + 1)
    case.assert_close("token_positions", positions)
    case.assert_close("embedded", table(encoding, positions, case.expected["embedded"]))


@pytest.mark.parametrize("dim", [9, 10])
def test_an_odd_last_channel_stays_zero(dim: int):
    x = torch.zeros(1, 5, dim)
    out = Sinusoidal(dim, order="fairseq")(x, torch.arange(5))
    assert (out[..., 8:].count_nonzero() == 0) == (dim == 9)


@pytest.mark.golden("sincos_2d")
@pytest.mark.parametrize("case", cases("sincos_2d_mae"))
def test_two_dimensional_sines_are_maes(case: Case):
    rows, columns = case.inputs["rows_y"], case.inputs["rows_x"]
    positions = torch.stack([rows, columns], dim=-1)
    size = case.params.get("grid_size")
    if size is not None:
        assert torch.equal(positions, grid(size, size))
    if case.params.get("cls_token"):
        positions = torch.cat([torch.full((1, 2), torch.nan, dtype=torch.float64), positions])
    encoding = SinCos2D(case.params["dim"])
    case.assert_close("embedding", table(encoding, positions, case.expected["embedding"]))


@pytest.mark.golden("learned")
@pytest.mark.parametrize("case", cases("learned_interp_linear"))
def test_linear_growth_is_torchs(case: Case):
    got = grow.interpolate(
        case.inputs["table"], case.params["new_len"], align_corners=case.params["align_corners"]
    )
    case.assert_close("table", got)
    encoding = Learned.from_table(got)
    x = torch.zeros(1, case.params["new_len"], case.params["dim"], dtype=got.dtype)
    embedded = encoding(x, torch.arange(case.params["new_len"]))[0]
    case.assert_close("table", embedded)


@pytest.mark.golden("learned_2d")
@pytest.mark.parametrize("case", cases("learned_interp_2d_bicubic"))
def test_bicubic_growth_is_maes(case: Case):
    p = case.params
    old, new = (p["old_size"],) * 2, (p["new_size"],) * 2
    rows = case.inputs["table"][0]
    got = grow.interpolate_2d(rows, old, new, extra_rows=p["n_extra"])
    case.assert_close("table", got[None])
    encoding = Learned2D(*old, p["dim"]).double()
    with torch.no_grad():
        encoding.weight.copy_(rows[p["n_extra"] :])
    x = torch.zeros(1, p["new_size"] ** 2, p["dim"], dtype=torch.float64)
    embedded = encoding.resize(*new)(x, grid(*new))
    got = torch.cat([rows[None, : p["n_extra"]], embedded], dim=1)
    case.assert_close("table", got)


@pytest.mark.parametrize("case", cases("learned_hierarchical"))
def test_hierarchical_growth_is_bert4keras(case: Case):
    rows, positions = case.inputs["table"], case.inputs["positions"]
    got = grow.hierarchical(rows, int(positions.max()) + 1, alpha=case.params["alpha"])
    case.assert_close("embedding", got[positions])
    assert torch.allclose(got[: len(rows)], rows, rtol=1e-14, atol=0)


@pytest.mark.parametrize("size", [(2, 3), (5, 4)])
def test_grids_need_not_be_square(size: tuple[int, int]):
    rows = torch.arange(12.0)[:, None] // 4 * 10  # three rows of four columns: 0, 10, 20 by row
    got = grow.interpolate_2d(rows, (3, 4), size).view(size)
    assert torch.allclose(got, got[:, :1].expand(size), atol=1e-5), "constant along a row"
    assert (got[1:] > got[:-1]).all()


def test_growth_keeps_offset_rows():
    """RoBERTa's 514 rows are 512 positions and two rows that stand for none."""
    rows = torch.randn(2 + 4, 3)
    for grown in (
        grow.interpolate(rows, 9, align_corners=True, offset_rows=2),
        grow.tile(rows, 9, offset_rows=2),
        grow.hierarchical(rows, 9, offset_rows=2),
    ):
        assert grown.shape == (11, 3) and torch.equal(grown[:2], rows[:2])
    assert torch.equal(grow.tile(rows, 9, offset_rows=2)[2:], rows[2:].repeat(3, 1)[:9])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: grow.hierarchical(t, 17), "at most 16"),
        (lambda t: grow.hierarchical(t, 9, alpha=0.5), "got 0.5"),
        (lambda t: grow.interpolate(t, 0, align_corners=True), "num_positions=0"),
        (lambda t: grow.tile(t, 5, offset_rows=4), "offset_rows=4"),
        (lambda t: grow.interpolate_2d(t, (2, 3), (4, 4)), r"got \(4, "),
        (lambda t: Sinusoidal(7), "got 7"),
        (lambda t: Sinusoidal(8, order="sorted"), "sorted"),
        (lambda t: SinCos2D(6), "got 6"),
        (lambda t: Learned(4, 4, init="zeros"), "zeros"),
        (lambda t: Learned(4, 3)(t[None], torch.arange(1, 5)), "position 4.*4 rows"),
        (lambda t: Learned2D(2, 3, 3)(t[None], grid(1, 4)), "column 3.*3 rows"),
        (lambda t: Learned2D(2, 0, 3), "2 x 0"),
    ],
)
def test_wrong_arguments_are_named(call, message: str):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(4, 3))


def test_a_class_token_has_no_place():
    positions = torch.tensor([[torch.nan, torch.nan], [0, 0], [1, 2]])
    x = torch.randn(1, 3, 8)
    for encoding in (SinCos2D(8), Learned2D(2, 3, 8)):
        out = encoding(x, positions)
        assert torch.equal(out[:, 0], x[:, 0]) and not torch.equal(out[:, 1], x[:, 1])


def test_learned_tables_start_as_asked():
    torch.manual_seed(0)
    gpt, bert = Learned(500, 64).weight, Learned(500, 64, init="truncated_normal").weight
    assert abs(gpt.std() - 0.02) < 1e-3 and gpt.abs().max() > 0.06
    assert 0.016 < bert.std() < 0.0185, "a normal cut at two deviations has 0.88 of its deviation"
    assert bert.abs().max() <= 0.04
    sines = Learned(9, 64, init="sinusoidal")
    x = torch.randn(2, 9, 64)
    assert torch.equal(sines(x, torch.arange(9)), Sinusoidal(64)(x, torch.arange(9)))
    assert sines.weight.requires_grad


@pytest.mark.quick(1)
@pytest.mark.parametrize("padding_idx", [0, 3])
def test_bert_embedding_is_hugging_faces(padding_idx: int):
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertEmbeddings

    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        max_position_embeddings=12,
        pad_token_id=padding_idx,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    theirs = BertEmbeddings(config).eval()
    ours = BertEmbedding(30, 16, Learned(12, 16), padding_idx=padding_idx).eval()
    with torch.no_grad():
        theirs.LayerNorm.weight.uniform_(0.5, 1.5)
        theirs.LayerNorm.bias.uniform_(-1, 1)
        ours.words.weight.copy_(theirs.word_embeddings.weight)
        ours.segments.weight.copy_(theirs.token_type_embeddings.weight)
        ours.encoding.weight.copy_(theirs.position_embeddings.weight)
        ours.norm.load_state_dict(theirs.LayerNorm.state_dict())
    tokens = torch.randint(30, (2, 9))
    segments = torch.randint(2, (2, 9))
    positions = torch.randint(12, (2, 9))
    got = ours(tokens, positions, segments)
    want = theirs(input_ids=tokens, token_type_ids=segments, position_ids=positions)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    without = theirs(input_ids=tokens, position_ids=torch.arange(9)[None])
    torch.testing.assert_close(ours(tokens, torch.arange(9)), without, rtol=0, atol=2e-6)
    got.square().sum().backward()
    assert (ours.words.weight.grad[padding_idx] == 0).all()


def test_bert_embedding_takes_any_encoding_of_place_one():
    torch.manual_seed(0)
    tokens = torch.randint(30, (1, 5))
    bert = BertEmbedding(30, 16, Sinusoidal(16), num_segments=0, dropout=0.0)
    assert (bert.words.weight[0] == 0).all()
    near, far = bert(tokens, torch.arange(5)), bert(tokens, torch.arange(5) + 9)
    assert not torch.allclose(near, far)
    with pytest.raises(ValueError, match="num_segments=0"):
        bert(tokens, torch.arange(5), tokens)


def test_an_embedding_without_a_table_says_what_is_missing():
    class Bare(AddedEmbedding):
        """Forgets its table."""

    with pytest.raises(NotImplementedError, match=r"Bare must define vectors\(positions"):
        Bare(4)(torch.zeros(1, 2, 4), torch.arange(2))


def test_a_new_embedding_needs_a_table_and_nothing_else():
    class Ramp(AddedEmbedding):
        """Adds its position to every channel."""

        def vectors(self, positions, dtype=torch.float32):
            return positions[..., None].to(dtype).expand(*positions.shape, self.embed_dim)

    half = Ramp(3)(torch.full((1, 2, 3), 0.5, dtype=torch.bfloat16), torch.tensor([[1, 300]]))
    assert half.dtype == torch.bfloat16
    assert half[0, :, 0].tolist() == [1.5, 300.0]  # 300.5 rounded once
    with pytest.raises(ValueError, match="Ramp: x must be"):
        Ramp(3)(torch.zeros(1, 2, 4), torch.arange(2))
