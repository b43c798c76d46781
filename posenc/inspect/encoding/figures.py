"""Choose the figures of measured encodings, and say what they show."""

from collections.abc import Iterator, Sequence

import torch

from posenc.encodings import ALiBi, DistanceBias, PositionEncoding, T5Bias, create
from posenc.inspect import charts
from posenc.inspect.encoding import precision
from posenc.inspect.encoding.measurements import SpecSheet
from posenc.inspect.encoding.sentences import plain_wavelengths
from posenc.report.report import Plot
from posenc.testing.harness import diagonal_positions, encoding_of_first_layer

NUM_SHOWN_POSITIONS = 128
"""Positions drawn in a heat map; chosen, as are the numbers of curves and arrows below."""
HEAT_MAP_SUFFIXES = ("-added", "-turns", "-matrix")
"""Ends of the names of the figures that are kept where only heat maps are drawn."""
_NUM_DRAWN_DIMENSIONS = 48
"""Dimensions of a position's row that are drawn as a curve."""
_MATRIX_SIZE = 64
"""Queries and keys of a bias matrix."""
_NUM_BUCKET_DISTANCES = 200
"""Distances whose buckets are drawn, beyond the 128 after which T5's share one."""
_NUM_ROTATION_STEPS = 6
"""Arrows of a pair of channels, one for each position; the caption names the positions, too."""


def curve_plots(sheets: Sequence[SpecSheet], name_prefix: str) -> Iterator[Plot]:
    """Yield the figures in which all encodings share the axes: scores by distance, and wavelengths
    if any encoding has them.

    name_prefix: what the figures' names begin with; "" for nothing.
    """
    prefix = f"{name_prefix}-" * bool(name_prefix)
    curves_of_equals = {sheet.name: (sheet.decay.distances, sheet.decay.same) for sheet in sheets}
    curves_of_unrelated = {
        sheet.name: (
            sheet.decay.distances,
            sheet.decay.mean,
            sheet.decay.low,
            sheet.decay.high,
        )
        for sheet in sheets
    }
    yield Plot(
        charts.score_chart(curves_of_equals),
        "Score in logits that a query gives a key equal to it, by distance, before any training; "
        "one more logit is 2.7 times the weight. Mean over random vectors and heads.",
        name=f"{prefix}score-of-equals",
    )
    yield Plot(
        charts.score_chart(curves_of_unrelated),
        "Score of a key unrelated to the query: the line is the mean, the band has nine of ten.",
        name=f"{prefix}score-of-strangers",
    )
    wavelengths_by_name = {sheet.name: sheet.wavelengths for sheet in sheets if sheet.wavelengths}
    if wavelengths_by_name:
        if "rope" not in wavelengths_by_name and any(2 in sheet.places for sheet in sheets):
            wavelengths_by_name = {
                "rope, unscaled": [*plain_wavelengths(sheets[0].shape)],
                **wavelengths_by_name,
            }
        # One line for all: they differ where some are measured on a grid.
        longest_axis = max(sheet.axis_length for sheet in sheets if sheet.wavelengths)
        yield Plot(
            charts.wavelength_chart(wavelengths_by_name, longest_axis),
            "Tokens per turn of each pair of channels. One above the dotted line turns less than "
            f"once in {longest_axis:,} positions; unless stretched, it meets new angles beyond "
            "them.",
            name=f"{prefix}wavelengths",
        )


@torch.no_grad()
def plots_of_encoding(sheet: SpecSheet) -> Iterator[Plot]:
    """Yield the figures of one encoding: precision, and what it does at each of its places."""
    torch.manual_seed(0)  # the random start of parameters that was measured
    encoding = encoding_of_first_layer(create(sheet.name, sheet.shape))
    if sheet.precision is not None:
        measured_precision = sheet.precision
        last_exact_positions = {"as used": measured_precision.as_used} | {
            f"plain {n}": p for n, p in measured_precision.plain.items()
        }
        yield Plot(
            charts.precision_chart(
                measured_precision.apart, measured_precision.starts, last_exact_positions
            ),
            "Where adjacent positions collide: the fraction of neighbours with different angles, "
            "as this encoding computes them and as position times frequency in a dtype. The mark "
            "in each row is the last position with every angle within "
            f"{precision.LARGEST_ANGLE_ERROR:g} rad of exact arithmetic: long before positions "
            "collide, their angles are wrong.",
            name=f"{sheet.name}-precision",
        )
    if 1 in sheet.places:
        yield from _embedding_plots(encoding, sheet)
    if 2 in sheet.places and sheet.wavelengths:
        yield from _rotation_plots(encoding, sheet)
    if isinstance(encoding, DistanceBias):
        yield from _bias_plots(encoding, sheet)


def _embedding_plots(encoding: PositionEncoding, sheet: SpecSheet) -> Iterator[Plot]:
    """Yield figures of what is added to the embeddings: all of it, some rows and columns, and
    cosines."""
    limit = encoding.claims.max_positions
    num_positions = NUM_SHOWN_POSITIONS if limit is None else min(NUM_SHOWN_POSITIONS, limit)
    x = torch.zeros(1, num_positions, sheet.shape.embed_dim)
    table = encoding.embed(x, diagonal_positions(encoding, torch.arange(num_positions)))[0].numpy()
    yield Plot(
        charts.heat_map_chart(table, "dimension", "position, tokens", "value added"),
        "What is added to the embeddings.",
        name=f"{sheet.name}-added",
    )
    width = table.shape[1]
    channels_picked = sorted({0, width // 4, width // 2, width - 1})
    yield Plot(
        charts.lines_chart(table, channels_picked, "position, tokens", "dimension"),
        "Single dimensions over positions.",
        name=f"{sheet.name}-dimensions",
    )
    rows_picked = sorted({0, 1, num_positions // 2})
    yield Plot(
        charts.lines_chart(table.T[:_NUM_DRAWN_DIMENSIONS], rows_picked, "dimension", "position"),
        "Single positions over the first dimensions.",
        name=f"{sheet.name}-positions",
    )
    unit_rows = torch.nn.functional.normalize(torch.from_numpy(table), dim=-1)
    cosines = (unit_rows @ unit_rows.T).numpy()
    yield Plot(
        charts.heat_map_chart(cosines, "position, tokens", "position, tokens", "cosine"),
        "Similarity of positions: the cosine of what is added at each, 1 where they are the same.",
        name=f"{sheet.name}-similarity",
    )


def _rotation_plots(encoding: PositionEncoding, sheet: SpecSheet) -> Iterator[Plot]:
    """Yield two figures of a rotation: the cosine of each pair's angle at the first positions, and
    where the fastest pair points at each of the first tokens.

    encoding: one with wavelengths. sheet: its measurements, for the names of the figures.
    """
    frequencies = precision.exact_frequencies_of(encoding)
    assert frequencies is not None  # as the encoding has wavelengths
    position_numbers = torch.arange(NUM_SHOWN_POSITIONS)
    positions = (
        position_numbers[:, None].expand(-1, 1 + max(frequencies.axes))
        if frequencies.axes
        else position_numbers
    )
    cos, _ = frequencies.cos_sin(positions)
    yield Plot(
        charts.heat_map_chart(
            cos.numpy(), "frequency pair", "position, tokens", "cosine of the angle"
        ),
        "Angle of each pair of channels by position.",
        name=f"{sheet.name}-turns",
    )
    degrees_per_step = float(frequencies.inv_freq[0]) * 180 / torch.pi
    yield Plot(
        charts.rotation_chart(degrees_per_step, _NUM_ROTATION_STEPS),
        "The fastest pair of channels: where it points at tokens 0 to 5, "
        f"{degrees_per_step:.1f} degrees further at each.",
        name=f"{sheet.name}-steps",
    )


def _bias_plots(encoding: DistanceBias, sheet: SpecSheet) -> Iterator[Plot]:
    """Yield figures of the bias by distance and by query and key, and of ALiBi's slopes or T5's
    buckets."""
    distances = sheet.decay.distances
    biases = encoding.bias(torch.tensor(distances)).numpy()
    untrained_note = " Drawn as it starts, before any training." if sheet.parameters else ""
    yield Plot(
        charts.bias_chart(biases, distances),
        f"The bias of each head by distance: what is added to the score.{untrained_note}",
        name=f"{sheet.name}-bias",
    )
    positions = torch.arange(_MATRIX_SIZE)
    bias_matrix = encoding(positions, positions)[0].numpy()
    yield Plot(
        charts.heat_map_chart(bias_matrix, "key position", "query position", "bias, logits"),
        f"The bias matrix of head 0, before the mask.{untrained_note}",
        name=f"{sheet.name}-matrix",
    )
    if isinstance(encoding, ALiBi):
        yield Plot(
            charts.slope_chart(encoding.slopes),
            "The slope of each head: logits taken off for each token of distance. One of 0.69 "
            "halves a key's weight with every token, one of 0.069 with every ten.",
            name=f"{sheet.name}-slopes",
        )
    if isinstance(encoding, T5Bias):
        bucket_distances = torch.arange(_NUM_BUCKET_DISTANCES)
        past_buckets = encoding.bucket(bucket_distances).tolist()
        future_buckets = (
            encoding.bucket(-bucket_distances).tolist() if encoding.bidirectional else None
        )
        yield Plot(
            charts.bucket_chart(past_buckets, future_buckets),
            "The bucket of each distance: distances in one bucket share one learned number.",
            name=f"{sheet.name}-buckets",
        )
