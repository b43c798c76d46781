"""Compute what tables of single bytes or tokens, and of pairs, lose on a text, without a model."""

import numpy as np


def entropy(counts: np.ndarray) -> float:
    """Return the entropy, in bits, of symbols that occur as often as these counts say."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def conditional_entropy(pair_counts: np.ndarray) -> float | None:
    """Return the entropy in bits of the second symbol of a pair given the first, from counts of
    pairs (first, second); None without a pair. It is the loss of a table of pairs of bytes on its
    own text.

    >>> conditional_entropy(np.array([[0, 8], [4, 4]]))
    0.5
    """
    total = int(pair_counts.sum())
    if not total:
        return None
    return entropy(pair_counts.ravel()) - entropy(pair_counts.sum(1))


MAX_COUNTED, MAX_SCORED = 1 << 24, 1 << 20
"""Tokens of the training text that a table counts, and of the test text that it predicts, at most:
the first ones. Chosen: a table of more would hardly be better."""


def table_losses(train_ids: np.ndarray, test_ids: np.ndarray, vocabulary: int) -> tuple[float, ...]:
    """Return the losses, in bits per token, of a table of single tokens and of one of pairs, both
    counted on training text and asked for the test text after its first token.

        p(b)     = (n(b) + 1) / (n + vocabulary)
        p(b | a) = (n(a b) + kinds(a) p(b)) / (n(a) + kinds(a))

    n counts training tokens and pairs, kinds(a) the different tokens that follow a. A table of
    bytes has seen every pair that matters, and is taken on its own text; of tokens most pairs are
    rare, so that such a loss would be far too low.

    Source: Witten and Bell 1991, method C, doi:10.1109/18.87000.

    >>> ids = np.array([0, 1, 0, 1, 0, 1])
    >>> [round(bits, 3) for bits in table_losses(ids, ids, 2)]
    [1.0, 0.221]
    """
    train_ids = np.asarray(train_ids[:MAX_COUNTED]).astype(np.int64)
    test_ids = np.asarray(test_ids[:MAX_SCORED]).astype(np.int64)
    counts = np.bincount(train_ids, minlength=vocabulary)
    single_chances = (counts + 1) / (len(train_ids) + vocabulary)

    pairs, pair_counts = np.unique(train_ids[:-1] * vocabulary + train_ids[1:], return_counts=True)
    kinds = np.bincount(pairs // vocabulary, minlength=vocabulary)
    counts_before = np.bincount(train_ids[:-1], minlength=vocabulary)

    before, following = test_ids[:-1], test_ids[1:]
    wanted = before * vocabulary + following
    places = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    counts_of_wanted = np.where(pairs[places] == wanted, pair_counts[places], 0)
    chances = single_chances[following]
    seen_before = counts_before[before] + kinds[before]
    with np.errstate(invalid="ignore"):  # 0 / 0 after a token that nothing followed
        pair_chances = (counts_of_wanted + kinds[before] * chances) / seen_before
    pair_chances = np.where(seen_before == 0, chances, pair_chances)
    return float(-np.log2(chances).mean()), float(-np.log2(pair_chances).mean())
