"""torch's layers and posenc's with the same weights agree, masks included, and an encoding changes
the result."""

import itertools
import pickle

import pytest
import torch
from torch import nn

import posenc
from posenc.nn import MultiheadAttention, TransformerEncoderLayer

BATCH, LENGTH, WIDTH, HEADS = 2, 9, 32, 4
PADDING = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
PADDING[0, 6:] = True
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PER_HEAD = torch.rand(BATCH * HEADS, LENGTH, LENGTH) < 0.3
PER_HEAD[:, torch.arange(LENGTH), torch.arange(LENGTH)] = False
PER_HEAD[:, :, 0] = False


def pair(**options):
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(WIDTH, HEADS, **options).eval()
    mine = MultiheadAttention(WIDTH, HEADS, **options).eval()
    mine.load_state_dict(stock.state_dict())
    if stock.in_proj_bias is not None:
        for layer in (stock, mine):
            torch.manual_seed(1)
            layer.in_proj_bias.data = torch.randn(3 * WIDTH)
    return stock, mine


def as_float(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    ("attn_mask", "padding", "floats"),
    list(itertools.product([None, CAUSAL, PER_HEAD], [None, PADDING], [False, True])),
)
def test_without_an_encoding_the_answers_are_torchs(attn_mask, padding, floats, batch_first):
    stock, mine = pair(batch_first=batch_first)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    x = x if batch_first else x.transpose(0, 1)
    options = {"attn_mask": attn_mask, "key_padding_mask": padding}
    options = {k: as_float(m) if floats and m is not None else m for k, m in options.items()}
    for average in (True, False):
        want, weights = stock(x, x, x, average_attn_weights=average, **options)
        got, found = mine(x, x, x, average_attn_weights=average, **options)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-6)
    out, none = mine(x, x, x, need_weights=False, **options)
    assert none is None
    torch.testing.assert_close(out, want, rtol=0, atol=1e-6)


def test_other_sources_sizes_and_no_batch_are_torchs_too():
    for options in ({"kdim": 12, "vdim": 20}, {"bias": False}, {}):
        stock, mine = pair(**options)
        widths = WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH)
        x, k, v = (torch.randn(n, 2, w) for n, w in zip((5, 7, 7), widths, strict=True))
        want, weights = stock(x, k, v)
        got, found = mine(x, k, v)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-6)
    one = torch.randn(LENGTH, WIDTH)
    options = {"key_padding_mask": PADDING[0], "attn_mask": CAUSAL}
    for want, got in zip(
        stock(one, one, one, **options), mine(one, one, one, **options), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_gradients_are_torchs():
    stock, mine = pair(batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    for layer in (stock, mine):
        layer(x, x, x, attn_mask=CAUSAL)[0].square().sum().backward()
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(
            mine.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-5
        )


def test_dropout_drops_in_training_only():
    _, mine = pair(dropout=0.5, batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    still = mine(x, x, x)[0]
    assert torch.equal(mine(x, x, x)[0], still)
    mine.train()
    draws = torch.stack([mine(x, x, x)[0] for _ in range(400)])
    assert not torch.equal(draws[0], draws[1])
    torch.testing.assert_close(draws.mean(0), still, rtol=0, atol=0.25)


@pytest.mark.parametrize("name", ["rope", "alibi", "fox", "fire", "cope", "t5"])
def test_positions_are_felt_and_padding_on_either_side_is_not(name):
    shape = posenc.ModelShape(WIDTH, HEADS)
    torch.manual_seed(0)
    encoding = posenc.create(name, shape)
    for parameter in encoding.parameters():
        parameter.data = torch.randn_like(parameter)
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, encoding=encoding)
    x = torch.randn(1, LENGTH, WIDTH)
    options = {"need_weights": False, "is_causal": True}
    got = layer(x, x, x, **options)[0]
    order = torch.tensor([3, 0, 4, 1, 5, 2, 6, 8, 7])
    plain = layer(x[:, order], x[:, order], x[:, order], need_weights=False, attn_mask=None)[0]
    blind = layer(x, x, x, need_weights=False)[0]
    assert (plain - blind[:, order]).abs().max() > 1e-3
    padded = torch.cat([torch.randn(1, 3, WIDTH), x], 1)
    hidden = (torch.arange(LENGTH + 3) < 3)[None]
    left = layer(padded, padded, padded, key_padding_mask=hidden, **options)[0][:, 3:]
    torch.testing.assert_close(left, got, rtol=0, atol=1e-5)
    weights = layer(x, x, x, is_causal=True)[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, LENGTH))
    assert (weights.triu(1) == 0).all()


@pytest.mark.parametrize("name", ["alibi", "rope", "kerple"])
@pytest.mark.parametrize("memory_len", [5, 6, 7])
def test_a_hidden_key_before_the_others_changes_no_cross_attention(name, memory_len):
    """Also where the memory is as long as the queries, with and without it."""
    torch.manual_seed(0)
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, encoding=name)
    for parameter in layer.encoding.parameters():
        parameter.data = torch.randn_like(parameter)
    x, memory = torch.randn(1, 6, WIDTH), torch.randn(1, memory_len, WIDTH)
    hidden = (torch.arange(memory_len) < 3)[None]
    expected = layer(x, memory[:, 3:], memory[:, 3:])[0]
    torch.testing.assert_close(layer(x, memory, memory, key_padding_mask=hidden)[0], expected)
    longer = torch.cat([memory[:, :1], memory], 1)
    more = torch.cat([hidden[:, :1], hidden], 1)
    torch.testing.assert_close(layer(x, longer, longer, key_padding_mask=more)[0], expected)
    p = torch.arange(6) + 2
    moved = layer(x, memory[:, 3:], memory[:, 3:], positions=p)[0]
    at = layer(x, memory, memory, key_padding_mask=hidden, positions=p)[0]
    torch.testing.assert_close(at, moved)


@pytest.mark.parametrize("batch_first", [False, True])
def test_self_attention_is_one_tensor_as_query_and_key(batch_first):
    """Padded on the left, with values of its own: queries are counted without padding."""
    torch.manual_seed(0)
    encoding = posenc.XPos(WIDTH // HEADS, interleaved=False)
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, encoding=encoding)
    x, v = torch.randn(2, 1, 5, WIDTH)
    hidden = torch.tensor([[True, True, False, False, False]])

    def run(x, v, **options):
        x, v = (x, v) if batch_first else (x.transpose(0, 1), v.transpose(0, 1))
        out = layer(x, x, v, **options)[0]
        return out if batch_first else out.transpose(0, 1)

    padded = run(x, v, key_padding_mask=hidden)[:, 2:]
    torch.testing.assert_close(padded, run(x[:, 2:], v[:, 2:]))


def test_packed_rows_are_refused_under_is_causal():
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, encoding="rope")
    x, p = torch.randn(1, 6, WIDTH), torch.tensor([0, 1, 2, 0, 1, 2])
    with pytest.raises(ValueError, match="keys return to earlier positions"):
        layer(x, x, x, is_causal=True, positions=p)
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    hidden = (ids[:, None] != ids) | torch.ones(6, 6, dtype=torch.bool).triu(1)
    out = layer(x, x, x, attn_mask=hidden, positions=p)[0]
    alone = layer(x[:, 3:], x[:, 3:], x[:, 3:], is_causal=True)[0]
    torch.testing.assert_close(out[:, 3:], alone)
    right = (torch.arange(6) > 3)[None]  # padding on the right has the first position again
    layer(x, x, x, is_causal=True, key_padding_mask=right)


def test_what_would_be_ignored_is_refused():
    _, mine = pair(batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(ValueError, match="numbers other than 0 and -inf"):
        mine(x, x, x, attn_mask=torch.randn(LENGTH, LENGTH))
    with pytest.raises(ValueError, match="numbers other than 0 and -inf"):
        mine(x, x, x, key_padding_mask=torch.full((BATCH, LENGTH), torch.nan))
    with pytest.raises(ValueError, match=r"must be \(9, 9\) or \(8, 9, 9\), got \(3, 9\)"):
        mine(x, x, x, attn_mask=CAUSAL[:3])
    with pytest.raises(ValueError, match=r"key_padding_mask must be \(2, 9\)"):
        mine(x, x, x, key_padding_mask=PADDING[:, :3])
    with pytest.raises(ValueError, match="append a key that has no position"):
        MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)
    with pytest.raises(ValueError, match="append a key that has no position"):
        MultiheadAttention(WIDTH, HEADS, add_zero_attn=True)
    with pytest.raises(ValueError, match="acts at the embeddings"):
        MultiheadAttention(WIDTH, HEADS, encoding=posenc.Sinusoidal(WIDTH))
    shaw = MultiheadAttention(
        WIDTH, HEADS, encoding=posenc.create("shaw", posenc.ModelShape(32, 4))
    )
    torch.testing.assert_close(shaw(x, x, x)[1].sum(-1), torch.ones(9, 2))
    nested = torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)
    with pytest.raises(ValueError, match="nested tensors are not supported"):
        mine(nested, nested, nested)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layers_give_torchs_answers(activation, batch_first, norm_first):
    options = {
        "dim_feedforward": 40,
        "norm_first": norm_first,
        "batch_first": batch_first,
        "activation": activation,
        "dropout": 0.0,
    }
    torch.manual_seed(0)
    stock = nn.TransformerEncoderLayer(WIDTH, HEADS, **options)
    mine = TransformerEncoderLayer(WIDTH, HEADS, **options)
    mine.load_state_dict(stock.state_dict())
    x = torch.randn(BATCH, LENGTH, WIDTH)
    x = x if batch_first else x.transpose(0, 1)
    masks = {"src_mask": CAUSAL, "src_key_padding_mask": PADDING}
    for training in (True, False):
        for layer in (stock, mine):
            layer.train(training)
        torch.testing.assert_close(mine(x, **masks), stock(x, **masks), rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
def test_torchs_encoder_never_takes_the_kernel_that_knows_no_positions():
    torch.manual_seed(0)
    alibi = posenc.ALiBi(num_heads=HEADS)
    layer = TransformerEncoderLayer(WIDTH, HEADS, 40, 0.0, batch_first=True, encoding=alibi)
    encoder = nn.TransformerEncoder(layer, 2)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    slow = encoder.train()(x, src_key_padding_mask=PADDING)
    with torch.no_grad():
        fast = encoder.eval()(x, src_key_padding_mask=PADDING)
    torch.testing.assert_close(fast[~PADDING], slow[~PADDING], rtol=0, atol=1e-5)
    for each in encoder.layers:
        each.self_attn.encoding = posenc.PositionEncoding()
    with torch.no_grad():
        blind = encoder(x, src_key_padding_mask=PADDING)
    assert (blind[~PADDING] - fast[~PADDING]).abs().max() > 1e-2


@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("copied", [False, True])
def test_torchs_own_layer_keeps_the_encoding_without_gradients(no_gradients, copied):
    """In evaluation torch's encoder layer may compute from the weights and call no attention."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadAttention(
        WIDTH, HEADS, batch_first=True, encoding=posenc.ALiBi(HEADS)
    )
    x = torch.randn(BATCH, LENGTH, WIDTH)
    trained = layer.train()(x)
    layer = pickle.loads(pickle.dumps(layer)) if copied else layer
    with no_gradients():
        torch.testing.assert_close(layer.eval()(x), trained, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mask", [None, CAUSAL])
def test_a_stack_of_torchs_own_layers_keeps_the_encoding(mask):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadAttention(
        WIDTH, HEADS, batch_first=True, encoding=posenc.ALiBi(HEADS)
    )
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    trained = stack.train()(x, mask, src_key_padding_mask=PADDING)
    with torch.no_grad():
        kept = stack.eval()(x, mask, src_key_padding_mask=PADDING)
    torch.testing.assert_close(kept, trained, rtol=0, atol=1e-5)
