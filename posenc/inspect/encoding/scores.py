"""Measure scores as a function of distance: decay, resolution, symmetry."""

import copy
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from posenc.attend.problem import Problem
from posenc.encodings import ModelShape, PositionEncoding, Tokens
from posenc.testing.harness import diagonal_positions, pair_scores, random_embeddings, split_heads

FARTHEST_DISTANCE = 2**16
"""The largest distance at which resolution is tested, in tokens.

The numbers of distances, tokens and pairs in this file are chosen, not derived."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Decay:
    """Scores in logits between the last position of the training length and keys before it.

    mean, low, high: mean and 5 % quantiles over unrelated queries and keys, and all heads. Every
    pair counts with both signs of query and key, so that their product cancels in the mean.
    mean_error: its standard error. same: the mean if query and key are the same vector. None where
    no key is visible.
    """

    distances: list[int]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]
    same: list[float | None]
    mean_error: list[float | None]


NUM_PAIRS = 64
"""Random pairs of query and key whose scores are averaged, each with four choices of signs."""
_MAX_TEXT_TOKENS = 2**14
"""Tokens of all random texts together, for methods that read the tokens between: they get fewer
texts instead of NUM_PAIRS, but at least two."""
_LAST_NEAR_DISTANCE = 160
"""Up to this distance in tokens, resolution is tested at every one, then at powers of two."""
_NUM_RESOLUTION_PAIRS = 8
"""Random pairs of query and key by which resolution and direction are measured."""
_NUM_DIRECTION_POSITIONS = 32
"""Positions at which scores of past and future are compared."""


def decay_bytes(encoding: PositionEncoding, shape: ModelShape) -> int:
    """Return a lower bound of the bytes that `decay` allocates; 0 for methods that read the tokens
    between.

    For each random pair it keeps the scores of a query at each distance with a key at each
    distance, three times: before the mask, after it, and as log-sum-exp over the one key that
    each query sees.
    """
    if not encoding.claims.permutation_invariant:
        return 0
    num_distances = len(_distances(_last_position(encoding, shape)))
    # Three tensors of 8 bytes a number, for four choices of signs.
    return 3 * 8 * 4 * NUM_PAIRS * shape.num_heads * num_distances**2


def _distances(last: int) -> list[int]:
    """Return the distances at which scores are measured, up to `last`: 0, 1 and powers of the
    square root of 2, rounded."""
    return sorted({0, min(1, last), *(min(last, round(2 ** (i / 2))) for i in range(2, 64))})


def decay(encoding: PositionEncoding, shape: ModelShape, num_pairs: int = NUM_PAIRS) -> Decay:
    """Return scores by distance within the training length, measured in float64.

    num_pairs: number of random pairs of query and key. For methods that read the tokens between, it
    is the number of random texts, and of long texts there are fewer.

    Raises: ValueError for scores of NaN or +inf, from which a softmax makes NaN.
    """
    exact_encoding = copy.deepcopy(encoding).double()
    last_position = _last_position(encoding, shape)
    distances = _distances(last_position)
    if encoding.claims.permutation_invariant:
        num_samples = num_pairs
        random_scores, same_scores = _scores_of_pairs(
            exact_encoding, shape, last_position, num_pairs
        )
    else:
        num_samples = max(2, min(num_pairs, _MAX_TEXT_TOKENS // (last_position + 1)))
        random_scores, same_scores = _scores_in_texts(
            exact_encoding, shape, last_position, num_samples
        )
    flat_scores = random_scores.flatten(0, 1)
    if (is_wrong := flat_scores.isnan() | (flat_scores == torch.inf)).any():
        first_distance = distances[int(is_wrong.any(0).nonzero()[0])]
        class_name = type(encoding).__name__
        raise ValueError(
            f"{class_name}: the score of a key {first_distance:,} tokens away is NaN or infinite, "
            "so that no measurement would mean anything."
        )
    quantiles = torch.tensor([0.05, 0.95], dtype=flat_scores.dtype)
    is_visible = flat_scores.isfinite().all(0)  # NaN for a column with an infinite score
    low, high = flat_scores.masked_fill(~is_visible, torch.nan).quantile(quantiles, dim=0)
    same_mean = same_scores.flatten(0, 1).mean(0)
    statistics = (
        flat_scores.mean(0),
        low,
        high,
        same_mean,
        _standard_error(random_scores, num_samples),
    )
    return Decay(distances, *map(_rounded_or_none, statistics))


def _last_position(encoding: PositionEncoding, shape: ModelShape) -> int:
    """Return the last position of the training length, or the last one that the encoding accepts if
    that is smaller."""
    limit = encoding.claims.max_positions
    length = shape.train_length if limit is None else min(limit, shape.train_length)
    return length - 1


def _scores_of_pairs(
    encoding: PositionEncoding, shape: ModelShape, last_position: int, num_pairs: int
) -> tuple[Tensor, Tensor]:
    """Return the scores of independent vectors, for each choice of their signs, and those of equal
    vectors: (4 * pairs, num_heads, distances) and (pairs, num_heads, distances)."""
    x, y = random_embeddings(2 * num_pairs, shape=shape)[0].split(num_pairs)
    queries = torch.cat([x, x, -x, -x])
    keys = torch.cat([y, -y, y, -y])
    key_positions = last_position - torch.tensor(_distances(last_position))
    query_positions = torch.full_like(key_positions, last_position)
    random_scores = pair_scores(encoding, shape, queries, keys, query_positions, key_positions)
    return random_scores, pair_scores(encoding, shape, x, x, query_positions, key_positions)


def _scores_in_texts(
    encoding: PositionEncoding, shape: ModelShape, last_position: int, num_texts: int
) -> tuple[Tensor, Tensor]:
    """Return scores of a method that reads the tokens between: of the last token of `num_texts`
    random texts, for two signs of its query, (2 * num_texts, num_heads, distances);
    and of the last token of texts of equal tokens, (num_texts, num_heads, distances)."""
    x = random_embeddings(last_position + 1, shape=shape, batch=num_texts)
    # Of another seed, or the key at distance 0 is the query itself.
    queries = random_embeddings(1, shape=shape, batch=num_texts, seed=5)
    key_positions = last_position - torch.tensor(_distances(last_position))
    scores_by_sign = [
        _scores_of_last_token(encoding, shape, x, sign * queries)[..., key_positions]
        for sign in (1, -1)
    ]
    same_scores = _scores_of_last_token(encoding, shape, x[:, -1:].expand_as(x))[..., key_positions]
    return torch.cat(scores_by_sign), same_scores


def _standard_error(scores: Tensor, num_pairs: int) -> Tensor:
    """Return the standard error of the mean score at each distance, (distances,).

    scores: (signs * count, num_heads, distances), all of `num_pairs` random pairs of query and key
    for one choice of their signs, then for the next. Only different pairs are independent, so the
    scores of a pair are averaged over signs and heads first.
    """
    mean_by_pair = scores.unflatten(0, (-1, num_pairs)).mean((0, 2))
    return mean_by_pair.std(0) / num_pairs**0.5


def _scores_of_last_token(
    encoding: PositionEncoding, shape: ModelShape, x: Tensor, query: Tensor | None = None
) -> Tensor:
    """Return the scores of the last token with all tokens, (batch, num_heads, len), for methods
    that read the tokens between.

    x: tokens, (batch, len, embed_dim). query: (batch, 1, embed_dim), the token whose query is used
    at the last position; None for the last of `x`.
    """
    positions = diagonal_positions(encoding, torch.arange(x.shape[1]))
    embedded = encoding.embed(x, positions)
    q = split_heads(embedded, shape)
    state = encoding.state(embedded, positions)
    query_vectors = (
        None if query is None else split_heads(encoding.embed(query, positions[-1:]), shape)
    )
    encoding = encoding.for_layer(0)
    last_position = len(positions) - 1
    keys = Tokens(q, positions, state, encoding.claims.num_axes)
    query_side = (
        keys[last_position:]
        if query_vectors is None
        else keys[last_position:].with_vectors(query_vectors)
    )
    new_q, new_k = encoding.transform(query_side, keys)
    term = encoding.term(query_side, keys)
    scale = encoding.scale(q.shape[-1])
    problem = Problem(
        q=new_q,
        k=new_k,
        v=q,  # never read: only scores are computed
        queries=query_side,
        keys=keys,
        term=term,
        encoding=encoding,
        mask=None,
        scale=scale,
        dropout_p=0.0,
        needs_lse=False,
        needs_grad=False,
    )
    return problem.with_prepared_term(1).scores(0, 1)[:, :, 0]


@dataclass(frozen=True)
class Resolution:
    """Hold up to which distance neighbouring keys are distinguished, in tokens.

    every: the distance up to which each tested distance is distinguished from the next one.
    any: the farthest tested distance that is distinguished from the next one.
    Both are 0 if not even distance 1 is distinguished from 2.
    """

    every: int
    any: int


def resolution(encoding: PositionEncoding, shape: ModelShape) -> dict[str, Resolution] | None:
    """Return, by dtype of the module and its inputs (DTYPES), the distances at which a query
    distinguishes a key from its neighbour: those up to which it always does, and the greatest.

    Distances D and D + 1 are distinct if the score of one query and one key changes between them,
    and the change in the dtype is within half of that in float64, for half of the random pairs, in
    the best head. Every distance up to 160 is tested, then powers of two up to
    FARTHEST_DISTANCE or the encoding's last position. None for methods that read the tokens
    between.
    """
    if not encoding.claims.permutation_invariant:
        return None
    distances = _tested_distances(encoding)
    if not distances:
        return dict.fromkeys(DTYPES, Resolution(0, 0))
    tested_positions = torch.tensor(distances)
    key_positions = torch.zeros_like(tested_positions)
    x, y = random_embeddings(2 * _NUM_RESOLUTION_PAIRS, shape=shape)[0].split(_NUM_RESOLUTION_PAIRS)

    def score_change(dtype: torch.dtype) -> Tensor:
        """Return how scores change to the next distance, (pairs, num_heads, distances)."""
        cast_encoding = copy.deepcopy(encoding).to(dtype)
        a, b = x.bfloat16().to(dtype), y.bfloat16().to(dtype)  # the same numbers in every dtype
        scores_here, scores_at_next = (
            pair_scores(cast_encoding, shape, a, b, query_positions, key_positions)
            for query_positions in (tested_positions, tested_positions + 1)
        )
        return (scores_at_next - scores_here).double()

    encoding = copy.deepcopy(encoding)  # with the same parameters in every dtype
    encoding.load_state_dict(copy.deepcopy(encoding).to(torch.bfloat16).state_dict())
    exact_change = score_change(torch.float64)
    resolutions = {}
    for name, dtype in DTYPES.items():
        is_right = (score_change(dtype) - exact_change).abs() < exact_change.abs() / 2
        # A change of 1e-12 logits is rounding of float64 itself.
        is_distinct = (
            (is_right & (exact_change.abs() > 1e-12)).double().mean(0).amax(0) >= 0.5
        ).tolist()
        before_first_lost = itertools.takewhile(bool, is_distinct)
        resolutions[name] = Resolution(
            every=max(itertools.compress(distances, before_first_lost), default=0),
            any=max(itertools.compress(distances, is_distinct), default=0),
        )
    return resolutions


def _tested_distances(encoding: PositionEncoding) -> list[int]:
    """Return the distances, increasing, that are compared with the next one: all up to
    _LAST_NEAR_DISTANCE, then powers of two, up to FARTHEST_DISTANCE or the last position."""
    limit = FARTHEST_DISTANCE
    if encoding.claims.max_positions is not None:
        # The next distance must be possible, too.
        limit = min(limit, encoding.claims.max_positions - 2)
    if limit <= 0:
        return []
    first_exponent = _LAST_NEAR_DISTANCE.bit_length()  # of the first power of two beyond
    powers = (2**i for i in range(first_exponent, limit.bit_length()))
    distances = [*range(1, _LAST_NEAR_DISTANCE + 1), *powers]
    return [distance for distance in distances if distance <= limit]


def direction(encoding: PositionEncoding, shape: ModelShape) -> str:
    """Return "symmetric" if exchanging the positions of query and key changes no score, "blind" if
    no position changes a score, else "directed"."""
    exact_encoding = copy.deepcopy(encoding).double()
    if not encoding.claims.permutation_invariant:
        return "directed"  # the tokens between are read only for the past
    num_positions = min(
        _NUM_DIRECTION_POSITIONS, encoding.claims.max_positions or _NUM_DIRECTION_POSITIONS
    )
    moving_positions = torch.arange(num_positions)
    fixed_positions = torch.zeros_like(moving_positions)
    x, y = random_embeddings(2 * _NUM_RESOLUTION_PAIRS, shape=shape)[0].split(_NUM_RESOLUTION_PAIRS)
    past_scores = pair_scores(exact_encoding, shape, x, y, moving_positions, fixed_positions)
    future_scores = pair_scores(exact_encoding, shape, x, y, fixed_positions, moving_positions)
    if _are_equal_scores(
        past_scores, past_scores[..., :1].expand_as(past_scores)
    ) and _are_equal_scores(past_scores, future_scores):
        return "blind"
    return "symmetric" if _are_equal_scores(past_scores, future_scores) else "directed"


def _are_equal_scores(a: Tensor, b: Tensor) -> bool:
    """Return True if float64 scores differ by rounding at most, and the same keys are hidden."""
    return bool(torch.equal(a.isfinite(), b.isfinite())) and bool(
        ((a - b).nan_to_num().abs() <= 1e-9 * (1 + b.nan_to_num().abs())).all()
    )


def _rounded_or_none(values: Tensor) -> list[float | None]:
    """Return numbers rounded to six digits, None for those that are not finite."""
    return [float(f"{v:.6g}") if abs(v) < float("inf") else None for v in values.tolist()]
