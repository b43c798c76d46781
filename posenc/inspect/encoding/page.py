"""Build inspect.html: the spec sheets, and figures of what the encodings do."""

import math
from collections.abc import Iterator, Sequence

import torch

from posenc.encodings import ALiBi, DistanceBias, PositionEncoding, T5Bias, create
from posenc.inspect.encoding import captions, figures, precision
from posenc.inspect.encoding.answer import answer
from posenc.inspect.encoding.measurements import SpecSheet
from posenc.inspect.encoding.words import tables
from posenc.report.page.page import Code, Headline, Page, Plot
from posenc.report.page.table import Heading, Table
from posenc.testing.layer import diagonal_positions, encoding_of_first_layer

SHOWN = 128
"""Positions drawn in a heat map; chosen, as are the numbers of curves and arrows below."""
MOST_ALONE = 3
"""Up to this many encodings get their own sections; more share tables and curves, so that a page
stays below a megabyte."""
MOST_HEAT_MAPS = 8
"""Up to this many encodings keep a heat map each."""
HEAT_MAPS = ("-added", "-turns", "-matrix")
"""Ends of the names of the figures that stay if only heat maps are drawn."""
_DRAWN_DIMENSIONS = 48
"""Dimensions of a position's row that are drawn as a curve."""
_MATRIX_SIZE = 64
"""Queries and keys of a bias matrix."""
_BUCKET_DISTANCES = 200
"""Distances whose buckets are drawn, beyond the 128 after which T5's share one."""
_ROTATION_STEPS = 6
"""Arrows of a pair of channels; the captions count them, too."""


def make_page(sheets: Sequence[SpecSheet], compare: bool, command: str) -> Page:
    """Build the page, answers first. With `compare`, each encoding is a row and curves are shared;
    otherwise each has a section."""
    names = ", ".join(sheet.name for sheet in sheets)
    shape = sheets[0].shape
    are_few = len(sheets) <= MOST_ALONE
    compare = compare or not are_few
    page = Page(
        f"What position does: {names}" if are_few else "What position does",
        f"{names}: {shape.num_heads} heads of {shape.head_dim}, trained on "
        f"{shape.train_length:,} tokens. Everything here is measured.",
    )
    page.section("", *_answer_blocks(sheets))
    groups = [sheets] if compare else [[sheet] for sheet in sheets]
    for group in groups:
        name = "" if len(group) == len(sheets) else group[0].name
        title = f"{name}: " if name else ""
        page.section(f"{title}Curves", *_shared_plots(group, name))
        if len(sheets) <= MOST_HEAT_MAPS:
            _add_sections_of_own_plots(page, group, heat_maps_only=not are_few)
        page.section(f"{title}All that was measured", *_measured_tables(group, compare))
    page.section("How to repeat it", Code(command))
    return page


def _add_sections_of_own_plots(
    page: Page, sheets: Sequence[SpecSheet], *, heat_maps_only: bool
) -> None:
    """Add a section to the page for each encoding that has figures which it shares with no other.

    heat_maps_only: leave out the others, see HEAT_MAPS.
    """
    for sheet in sheets:
        plots = list(_plots_of_encoding(sheet))
        if heat_maps_only:
            plots = [plot for plot in plots if plot.name.endswith(HEAT_MAPS)]
        if plots:
            page.section(f"Inside {sheet.name}", *plots)


def _answer_blocks(sheets: Sequence[SpecSheet]) -> Iterator[Headline | Table | str]:
    """Yield the answer about a single encoding, or a table of those about many."""
    if len(sheets) == 1:
        yield Headline(str(answer(sheets[0])))
        return
    header = [
        "encoding",
        Heading("near and far", "what distance does to the weight that tokens get"),
        Heading("cost", "what a model learns for it"),
        Heading("limits", "where it ends"),
    ]
    yield Table(header, [answer(sheet).cells() for sheet in sheets])
    if len(sheets) > MOST_ALONE:
        yield f"For all pictures of what an encoding does inside, name {MOST_ALONE} or fewer."


def _measured_tables(sheets: Sequence[SpecSheet], compare: bool) -> Iterator[Table]:
    """Yield a table for each subject: encodings as rows, or a single one with explanations."""
    for subject, meanings, rows in tables(sheets):
        if compare:
            header = ["encoding", *(Heading(name, words) for name, words in meanings.items())]
            yield Table(header, rows, subject)
        else:
            lines = zip(meanings, rows[0][1:], meanings.values(), strict=True)
            yield Table(["", "measured", "what it says"], [*map(list, lines)], subject)


def _shared_plots(sheets: Sequence[SpecSheet], prefix: str) -> Iterator[Plot]:
    """Yield the figures in which all encodings share the axes: scores by distance, wavelengths.

    prefix: what the figures' names begin with.
    """
    named = f"{prefix}-" * bool(prefix)
    decays = {sheet.name: sheet.decay for sheet in sheets}
    ends = "; ".join(
        f"{name} from {_score_or_hidden(d.same[0])} at 0 to {_score_or_hidden(d.same[-1])} at "
        f"{d.distances[-1]:,}"
        for name, d in decays.items()
    )
    yield Plot(
        figures.score_by_distance(decays, same=True),
        "Score in logits that a query gives a key equal to it, by distance, before any training; "
        "one more logit is 2.7 times the weight. Mean over random vectors and heads.",
        f"Mean score of equal vectors by distance: {ends}.",
        captions.in_scores(decays, same=True),
        f"{named}score-of-equals",
    )
    yield Plot(
        figures.score_by_distance(decays, same=False),
        "Score of a key unrelated to the query: the line is the mean, the band has nine of ten.",
        "Mean and band of the scores of independent random vectors by distance.",
        captions.in_scores(decays, same=False),
        f"{named}score-of-strangers",
    )
    waves = {sheet.name: sheet.wavelengths for sheet in sheets if sheet.wavelengths}
    if waves:
        if "rope" not in waves and any(2 in s.places for s in sheets):
            plain = precision.angles_of(create("rope", sheets[0].shape))
            assert plain is not None  # RoPE rotates
            unscaled = [2 * math.pi / float(f) for f in plain.inv_freq]
            waves = {"rope, unscaled": unscaled, **waves}
        # One line for all: they differ where some are measured on a grid.
        trained = max(sheet.axis_length for sheet in sheets if sheet.wavelengths)
        yield Plot(
            figures.wavelengths(waves, trained),
            "Tokens per turn of each pair of channels. One above the dotted line turns less than "
            f"once in {trained:,} positions; unless stretched, it meets new angles beyond them.",
            "Wavelength of each frequency pair on a logarithmic axis, with the training length.",
            captions.in_wavelengths(waves, trained),
            f"{named}wavelengths",
        )


def _score_or_hidden(value: float | None) -> str:
    """Return a score in three digits, "hidden" for None."""
    return "hidden" if value is None else f"{value:.3g}"


@torch.no_grad()
def _plots_of_encoding(sheet: SpecSheet) -> Iterator[Plot]:
    """Yield the figures of one encoding: precision, and what it does at each of its places."""
    torch.manual_seed(0)  # the random start of parameters that was measured
    encoding = encoding_of_first_layer(create(sheet.name, sheet.shape))
    if sheet.precision is not None:
        measured = sheet.precision
        reach = {"as used": measured.as_used} | {f"plain {n}": p for n, p in measured.plain.items()}
        yield Plot(
            figures.precision_map(measured.apart, measured.starts, reach),
            "Where adjacent positions collide: the fraction of neighbours with different angles, "
            "as this encoding computes them and as position times frequency in a dtype. The mark "
            f"in each row is the last position with every angle within {precision.BOUND:g} rad of "
            "exact arithmetic: long before positions collide, their angles are wrong.",
            "; ".join(
                f"{name}: right to {p:,}, neighbours differ up to "
                f"{_last_start_without_collision(measured, name)}"
                for name, p in reach.items()
            ),
            captions.in_precision(reach, max(reach.values())),
            f"{sheet.name}-precision",
        )
    if 1 in sheet.places:
        yield from _embedding_plots(encoding, sheet)
    if 2 in sheet.places and sheet.wavelengths:
        yield from _rotation_plots(encoding, sheet)
    if isinstance(encoding, DistanceBias):
        yield from _bias_plots(encoding, sheet)


def _last_start_without_collision(measured: precision.Precision, name: str) -> str:
    """Return the last power of two just after which all neighbouring positions have different
    angles, as text; "none" without one.

    name: the way in which angles are computed.
    """
    apart = [
        start
        for start, share in zip(measured.starts, measured.apart[name], strict=True)
        if share == 1
    ]
    return f"{apart[-1]:,}" if apart else "none"


def _embedding_plots(encoding: PositionEncoding, sheet: SpecSheet) -> Iterator[Plot]:
    """Yield figures of what is added to the embeddings: all of it, some rows and columns, and
    cosines."""
    limit = encoding.claims.max_positions
    count = SHOWN if limit is None else min(SHOWN, limit)
    x = torch.zeros(1, count, sheet.shape.embed_dim)
    table = encoding.embed(x, diagonal_positions(encoding, torch.arange(count)))[0].numpy()
    yield Plot(
        figures.heat_map(table, "dimension", "position, tokens", "value added"),
        "What is added to the embeddings.",
        f"Heat map of {table.shape[0]} positions by {table.shape[1]} dimensions.",
        captions.in_added(table),
        f"{sheet.name}-added",
    )
    width = table.shape[1]
    picked = sorted({0, width // 4, width // 2, width - 1})
    yield Plot(
        figures.single_lines(table, picked, "position, tokens", "dimension"),
        "Single dimensions over positions.",
        "One curve for each of four dimensions.",
        captions.in_lines(table, picked, "dimension"),
        f"{sheet.name}-dimensions",
    )
    rows_picked = sorted({0, 1, count // 2})
    yield Plot(
        figures.single_lines(table.T[:_DRAWN_DIMENSIONS], rows_picked, "dimension", "position"),
        "Single positions over the first dimensions.",
        "One curve for each of three positions.",
        captions.in_lines(table.T[:_DRAWN_DIMENSIONS], rows_picked, "position"),
        f"{sheet.name}-positions",
    )
    unit = torch.nn.functional.normalize(torch.from_numpy(table), dim=-1)
    cosines = (unit @ unit.T).numpy()
    yield Plot(
        figures.heat_map(cosines, "position, tokens", "position, tokens", "cosine"),
        "Similarity of positions: the cosine of what is added at each, 1 where they are the same.",
        "Cosine similarity between all pairs of positions.",
        captions.in_similarity(cosines),
        f"{sheet.name}-similarity",
    )


def _rotation_plots(encoding: PositionEncoding, sheet: SpecSheet) -> Iterator[Plot]:
    """Yield figures of the angles by position, and of the steps of the fastest pair."""
    angles = precision.angles_of(encoding)
    assert angles is not None  # as the encoding has wavelengths
    steps = torch.arange(SHOWN)
    positions = steps[:, None].expand(-1, 1 + max(angles.axes)) if angles.axes else steps
    cos, _ = angles.cos_sin(positions)
    yield Plot(
        figures.heat_map(cos.numpy(), "frequency pair", "position, tokens", "cosine of the angle"),
        "Angle of each pair of channels by position.",
        "Heat map of the cosine of the angle by position and frequency pair.",
        captions.in_turns([float(f) for f in angles.inv_freq], SHOWN),
        f"{sheet.name}-turns",
    )
    degrees_per_step = float(angles.inv_freq[0]) * 180 / torch.pi
    yield Plot(
        figures.rotation_steps(degrees_per_step, _ROTATION_STEPS),
        "The fastest pair of channels: where it points at tokens 0 to 5.",
        "Six arrows from the centre of a circle, each rotated from the last.",
        captions.in_steps(degrees_per_step),
        f"{sheet.name}-steps",
    )


def _bias_plots(encoding: DistanceBias, sheet: SpecSheet) -> Iterator[Plot]:
    """Yield figures of the bias by distance and by query and key, and of ALiBi's slopes or T5's
    buckets."""
    distances = sheet.decay.distances
    values = encoding.bias(torch.tensor(distances)).numpy()
    untrained = " Drawn as it starts, before any training." if sheet.parameters else ""
    yield Plot(
        figures.bias_by_distance(values, distances),
        f"The bias of each head by distance: what is added to the score.{untrained}",
        "One curve per head over the distance to the key.",
        captions.in_bias(values, distances),
        f"{sheet.name}-bias",
    )
    positions = torch.arange(_MATRIX_SIZE)
    matrix = encoding(positions, positions)[0].numpy()
    yield Plot(
        figures.heat_map(matrix, "key position", "query position", "bias, logits"),
        f"The bias matrix of head 0, before the mask.{untrained}",
        "Heat map of the bias by query and key position.",
        captions.in_matrix(matrix),
        f"{sheet.name}-matrix",
    )
    if isinstance(encoding, ALiBi):
        yield Plot(
            figures.slopes(encoding.slopes),
            "The slope of each head.",
            ", ".join(f"{s:.3g}" for s in encoding.slopes),
            captions.in_slopes(encoding.slopes),
            f"{sheet.name}-slopes",
        )
    if isinstance(encoding, T5Bias):
        bucket_distances = torch.arange(_BUCKET_DISTANCES)
        past = encoding.bucket(bucket_distances).tolist()
        future = encoding.bucket(-bucket_distances).tolist() if encoding.bidirectional else None
        yield Plot(
            figures.buckets(past, future),
            "The bucket of each distance: distances in one bucket share one learned number.",
            "A staircase that flattens with distance.",
            captions.in_buckets(past),
            f"{sheet.name}-buckets",
        )
