"""Compare a batch's position ids with those that the family's own code makes.

Text counts on from 0, starts again with each packed document, and is not looked at under padding.
Qwen2-VL and Qwen3-VL give every token three numbers (t, h, w), which are equal in text.

What follows an image or a video starts at the largest number before it plus 1: so say the paper
(arXiv:2409.12191, section 2.1), transformers 4.57.3 (run) and vLLM 0.33.0 (qwen2_vl.py:1370, read).
transformers 5.12.1, 5.23.0 (run) and 5.24.0 (read, qwen2_vl/modeling_qwen2_vl.py:989) go on after
the larger of height and width, which is less after a video of more frames than rows; their own
decoding goes on at the largest number plus 1, so that a generated token does not follow its prompt.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby, product
from typing import Any, NamedTuple

from posenc.runtimes.config_model import Model
from posenc.runtimes.meaning import UnknownFamilyError

FRAMES_ARE_GRIDS = {"qwen2_vl_text": False, "qwen3_vl_text": True, "qwen3_vl_moe_text": True}
"""Families with (t, h, w) positions -> True if each frame of a video is a grid of its own. Read in
transformers 5.23: get_rope_index in qwen2_vl/modeling_qwen2_vl.py and
qwen3_vl/modeling_qwen3_vl.py."""
PAPER_AND_EARLIER = "the paper, transformers 4.57 and vLLM 0.33"
LATER_RELEASES = "transformers 5.12 to 5.24"
TEXT, IMAGE, VIDEO = 0, 1, 2
MULTIMODAL_KEYS = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw")
MOST_NUMBERS = 1 << 24
"""Numbers of one list of a batch, at most; chosen, not derived."""
Grid = tuple[int, int, int]


class PositionIdReport(NamedTuple):
    """How the position ids of a batch differ from those that the family's code makes.

    differences: a line for each row with other position ids. notes: a line for each row for which
    the runtimes' own code makes different ones.
    """

    differences: list[str]
    notes: list[str]


def compare_position_ids(batch: Mapping[str, Any], model: Model) -> PositionIdReport:
    """Compare a batch's position ids with those that the family's code makes.

    Args:
        batch: `position_ids` as lists, (batch, tokens) or (3, batch, tokens) with M-RoPE; with it
            `attention_mask` and `documents` (one number per token) and, with M-RoPE,
            `mm_token_type_ids` (0 text, 1 image, 2 video), `image_grid_thw`, `video_grid_thw`.

    Raises: UnknownFamilyError for images of a family that posenc has not read; ValueError where the
        batch has not these lists, or they do not fit each other.
    """
    if model.model_type in FRAMES_ARE_GRIDS:
        return _compare_mrope_ids(batch, model)
    multimodal_keys = [key for key in MULTIMODAL_KEYS if batch.get(key) is not None]
    if multimodal_keys:
        raise UnknownFamilyError(
            f"posenc does not know the (t, h, w) positions of {model.model_type}, which "
            f"{multimodal_keys[0]} asks for"
        )
    rows = _require_nested_lists(batch, "position_ids", 2)
    lengths = [len(row) for row in rows]
    masks = _rows_beside_positions(batch, "attention_mask", lengths, 1)
    documents = _rows_beside_positions(batch, "documents", lengths, None)
    differences: list[str] = []
    for i, (row, mask, documents_of_row) in enumerate(zip(rows, masks, documents, strict=True)):
        visible_indices = [j for j, visible in enumerate(mask) if visible]
        file_positions = [row[j] for j in visible_indices]
        visible_documents = (
            None if documents_of_row[0] is None else [documents_of_row[j] for j in visible_indices]
        )
        differences += _line_about_row(
            i,
            visible_indices,
            file_positions,
            _text_positions(file_positions, visible_documents),
            "the family's code",
        )
    return PositionIdReport(differences, [])


def _compare_mrope_ids(batch: Mapping[str, Any], model: Model) -> PositionIdReport:
    """Compare the (t, h, w) of each token with those that the paper and the runtimes make."""
    axes = _require_nested_lists(batch, "position_ids", 3)
    rows = list(zip(*axes, strict=True))  # of each row of the batch its (t, h, w)
    lengths = [len(times) for times, _, _ in rows]
    masks = _rows_beside_positions(batch, "attention_mask", lengths, 1)
    kinds = _rows_beside_positions(batch, "mm_token_type_ids", lengths, TEXT)
    documents = _rows_beside_positions(batch, "documents", lengths, None)
    grids = _grids_by_kind(batch, model)
    patches_per_side = _patches_per_side(model)
    # The grids of all rows are in one list: each row goes on where the row before it stopped.
    grids_left = {kind: iter(grids_of_kind) for kind, grids_of_kind in grids.items()}
    grids_left_for_later = {kind: iter(grids_of_kind) for kind, grids_of_kind in grids.items()}
    differences: list[str] = []
    notes: list[str] = []
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        visible_indices = [j for j, visible in enumerate(mask) if visible]
        file_positions = [tuple(axis[j] for axis in row) for j in visible_indices]
        documents_and_kinds = [(documents[i][j], kinds[i][j]) for j in visible_indices]
        paper_positions = _mrope_positions_of_documents(
            documents_and_kinds, grids_left, patches_per_side, sides_only=False
        )
        later_positions = _mrope_positions_of_documents(
            documents_and_kinds, grids_left_for_later, patches_per_side, sides_only=True
        )
        maker = "the family's code" if paper_positions == later_positions else PAPER_AND_EARLIER
        differences += _line_about_row(i, visible_indices, file_positions, paper_positions, maker)
        if paper_positions != later_positions:
            note = _note_on_runtimes(
                visible_indices, file_positions, paper_positions, later_positions
            )
            notes.append(f"row {i}: {note}")
    for kind, unused_grids in grids_left.items():
        num_unused = len(list(unused_grids))
        if num_unused:
            raise ValueError(f"{num_unused} grids of the kind {kind} have no tokens.")
    return PositionIdReport(differences, notes)


def _note_on_runtimes(
    visible_indices: list[int],
    file_positions: list[Any],
    paper_positions: list[Any],
    later_positions: list[Any],
) -> str:
    """Return a sentence about a row that runtimes number in two ways. visible_indices: the indices
    of its visible tokens. file_positions: the file's numbers. paper_positions: those of the paper
    (PAPER_AND_EARLIER). later_positions: those of LATER_RELEASES."""
    if file_positions == later_positions:
        return (
            f"these are the numbers of {LATER_RELEASES}, whose own decoding goes on at the "
            f"largest number plus 1, as {PAPER_AND_EARLIER} do after a video, too"
        )
    first_different = [a == b for a, b in zip(paper_positions, later_positions, strict=True)].index(
        False
    )
    return (
        f"runtimes differ after a video: token {visible_indices[first_different]} has "
        f"{paper_positions[first_different]} in "
        f"{PAPER_AND_EARLIER}, and {later_positions[first_different]} in {LATER_RELEASES}"
    )


def _grids_by_kind(batch: Mapping[str, Any], model: Model) -> dict[int, list[Grid]]:
    """Return the (t, h, w) of the batch's images and videos, in patches before they are merged."""
    video_grids = _read_grids(batch, "video_grid_thw")
    if FRAMES_ARE_GRIDS[model.model_type]:  # each frame of a video is a grid of its own
        video_grids = [(1, h, w) for t, h, w in video_grids for _ in range(t)]
    return {IMAGE: _read_grids(batch, "image_grid_thw"), VIDEO: video_grids}


def _patches_per_side(model: Model) -> int:
    """Return how many patches in a row, and how many in a column, become one token."""
    vision_config = model.config.get("vision_config")
    patches_per_side = (
        vision_config.get("spatial_merge_size", 2) if isinstance(vision_config, Mapping) else 2
    )
    if type(patches_per_side) is not int or patches_per_side < 1:
        raise ValueError(
            f"config.json: spatial_merge_size must be an integer above 0, got {patches_per_side!r}."
        )
    return patches_per_side


def _text_positions(file_positions: list[int], documents: list[Any] | None) -> list[int]:
    """Return the positions that text must have: they count on from 0, and start again with each
    document.

    file_positions: the file's positions. documents: the number of each token's document; None if
    not given: a document then begins wherever the file has a 0.
    """
    expected_positions: list[int] = []
    next_position = 0
    for j, file_position in enumerate(file_positions):
        if documents is None:
            is_start = file_position == 0
        else:
            is_start = j > 0 and documents[j] != documents[j - 1]
        if is_start:
            next_position = 0
        expected_positions.append(next_position)
        next_position += 1
    return expected_positions


def _mrope_positions_of_documents(
    documents_and_kinds: list[tuple[Any, int]],
    grids: Mapping[int, Iterator[Grid]],
    patches_per_side: int,
    *,
    sides_only: bool,
) -> list[Any]:
    """Return the (t, h, w) of a row's tokens; each document starts again at 0.

    documents_and_kinds: (document, kind) of each. The other arguments are those of
    `_mrope_positions`.
    """
    expected_positions = []
    for _, tokens_of_document in groupby(documents_and_kinds, lambda token: token[0]):
        expected_positions += _mrope_positions(
            [kind for _, kind in tokens_of_document], grids, patches_per_side, sides_only=sides_only
        )
    return expected_positions


def _mrope_positions(
    kinds: list[int],
    grids: Mapping[int, Iterator[Grid]],
    patches_per_side: int,
    *,
    sides_only: bool,
) -> list[Any]:
    """Return the (t, h, w) of each token: text has three equal numbers, an image or a video its
    grid.

    kinds: TEXT, IMAGE or VIDEO of each token. grids: by kind, those not yet used, in patches.
    patches_per_side: patches a token.
    What follows goes on at the largest number before it plus 1; sides_only: after the larger of
    height and width, whatever the number of frames, as LATER_RELEASES do.
    """
    expected_positions: list[Any] = []
    next_position = 0
    for kind, group in groupby(kinds):
        tokens_left = len(list(group))
        if kind == TEXT:
            expected_positions += [(next_position + j,) * 3 for j in range(tokens_left)]
            next_position += tokens_left
            continue
        while tokens_left > 0:
            t, h, w = _next_grid_in_tokens(grids, kind, tokens_left, patches_per_side)
            for a, b, c in product(range(t), range(h), range(w)):
                expected_positions.append((next_position + a, next_position + b, next_position + c))
            next_position += max(h, w) if sides_only else max(t, h, w)
            tokens_left -= t * h * w
    return expected_positions


def _next_grid_in_tokens(
    grids: Mapping[int, Iterator[Grid]], kind: int, tokens_left: int, patches_per_side: int
) -> Grid:
    """Return the (t, h, w) in tokens of the next image or video of a kind.

    tokens_left: the tokens of the kind that are left in a row. patches_per_side: patches a token.
    Raises: ValueError where there is no grid, or one of more tokens.
    """
    grid = next(grids[kind], None) if kind in grids else None
    if grid is None:
        raise ValueError(f"{tokens_left} tokens of the kind {kind} have no grid.")
    t = grid[0]
    h = grid[1] // patches_per_side
    w = grid[2] // patches_per_side
    if not 0 < t * h * w <= tokens_left:
        raise ValueError(
            f"a grid of {t} * {h} * {w} tokens, with {tokens_left} of the kind {kind} in a row."
        )
    return t, h, w


def _line_about_row(
    row_index: int,
    visible_indices: list[int],
    file_positions: list[Any],
    expected_positions: list[Any],
    maker: str,
) -> list[str]:
    """Return a line about the first wrong position of a row, in a list; empty if none is wrong.

    visible_indices: the indices of the row's visible tokens. maker: whose positions are wanted.
    """
    wrong_indices = [
        k for k, (a, b) in enumerate(zip(file_positions, expected_positions, strict=True)) if a != b
    ]
    if not wrong_indices:
        return []
    first_wrong = wrong_indices[0]
    return [
        f"row {row_index}: token {visible_indices[first_wrong]} has the position "
        f"{file_positions[first_wrong]}, {expected_positions[first_wrong]} is made by {maker}; "
        f"{len(wrong_indices)} of {len(file_positions)} tokens differ"
    ]


def _require_nested_lists(batch: Mapping[str, Any], name: str, depth: int) -> list[Any]:
    """Return the batch's value of a name: nested lists of whole numbers of this depth.

    Raises: ValueError for anything else, or for three axes of different shapes.
    """
    lists: Any = batch.get(name)
    items = [lists]  # all lists at one depth, one after the other
    message = f"{name} must be lists of whole numbers, {depth} deep, got {str(lists)[:40]}."
    for _ in range(depth):
        if not all(isinstance(part, list) and part for part in items):
            raise ValueError(message)
        items = [item for part in items for item in part]
    if len(items) > MOST_NUMBERS or not all(type(item) is int for item in items):
        raise ValueError(message)
    if depth == 3:
        shapes = {tuple(map(len, axis)) for axis in lists}
        if len(lists) != 3 or len(shapes) > 1:
            raise ValueError(f"{name} must have three equal parts, t, h and w.")
    return lists


def _rows_beside_positions(
    batch: Mapping[str, Any], name: str, lengths: list[int], value_if_missing: Any
) -> list[Any]:
    """Return the rows of a list that has a number for each position; of `value_if_missing` where
    the batch has no such list.

    lengths: the number of positions of each row.
    Raises: ValueError for rows of other lengths.
    """
    if batch.get(name) is None:
        return [[value_if_missing] * length for length in lengths]
    rows = _require_nested_lists(batch, name, 2)
    if [len(row) for row in rows] != lengths:
        raise ValueError(f"{name} has rows of other lengths than position_ids.")
    return rows


def _read_grids(batch: Mapping[str, Any], name: str) -> list[Grid]:
    """Return the (t, h, w) of each grid in the batch's list of this name; empty without a list.

    Raises: ValueError for anything but three numbers above 0.
    """
    grids = [] if batch.get(name) is None else _require_nested_lists(batch, name, 2)
    if not all(len(grid) == 3 and min(grid) > 0 for grid in grids):
        raise ValueError(f"{name} must have (t, h, w) of each, above 0.")
    return [tuple(grid) for grid in grids]
