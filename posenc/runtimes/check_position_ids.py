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

MROPE = {"qwen2_vl_text": False, "qwen3_vl_text": True, "qwen3_vl_moe_text": True}
"""Families with (t, h, w) positions -> True if each frame of a video is a grid of its own. Read in
transformers 5.23: get_rope_index in qwen2_vl/modeling_qwen2_vl.py and
qwen3_vl/modeling_qwen3_vl.py."""
AUTHORS = "the paper, transformers 4.57 and vLLM 0.33"
LATER = "transformers 5.12 to 5.24"
TEXT, IMAGE, VIDEO = 0, 1, 2
MULTIMODAL = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw")
LARGEST = 1 << 24
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
    if model.model_type in MROPE:
        return _compare_mrope_ids(batch, model)
    multimodal_keys = [key for key in MULTIMODAL if batch.get(key) is not None]
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
        seen = [j for j, visible in enumerate(mask) if visible]
        got = [row[j] for j in seen]
        documents_seen = (
            None if documents_of_row[0] is None else [documents_of_row[j] for j in seen]
        )
        differences += _line_about_row(
            i, seen, got, _text_positions(got, documents_seen), "the family's code"
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
    grids_left = {kind: iter(each) for kind, each in grids.items()}
    grids_left_later = {kind: iter(each) for kind, each in grids.items()}
    differences: list[str] = []
    notes: list[str] = []
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        seen = [j for j, visible in enumerate(mask) if visible]
        got = [tuple(axis[j] for axis in row) for j in seen]
        tokens = [(documents[i][j], kinds[i][j]) for j in seen]
        wanted = _mrope_positions_of_documents(
            tokens, grids_left, patches_per_side, sides_only=False
        )
        later = _mrope_positions_of_documents(
            tokens, grids_left_later, patches_per_side, sides_only=True
        )
        who = "the family's code" if wanted == later else AUTHORS
        differences += _line_about_row(i, seen, got, wanted, who)
        if wanted != later:
            notes.append(f"row {i}: {_note_on_runtimes(seen, got, wanted, later)}")
    for kind, rest in grids_left.items():
        count = len(list(rest))
        if count:
            raise ValueError(f"{count} grids of the kind {kind} have no tokens.")
    return PositionIdReport(differences, notes)


def _note_on_runtimes(seen: list[int], got: list[Any], wanted: list[Any], later: list[Any]) -> str:
    """Return a sentence about a row that runtimes number in two ways. seen: the indices of its
    visible tokens. got: the file's numbers. wanted: those of the paper (AUTHORS); later: those of
    the releases in LATER."""
    if got == later:
        return (
            f"these are the numbers of {LATER}, whose own decoding goes on at the "
            f"largest number plus 1, as {AUTHORS} do after a video, too"
        )
    first = [a == b for a, b in zip(wanted, later, strict=True)].index(False)
    return (
        f"runtimes differ after a video: token {seen[first]} has {wanted[first]} in "
        f"{AUTHORS}, and {later[first]} in {LATER}"
    )


def _grids_by_kind(batch: Mapping[str, Any], model: Model) -> dict[int, list[Grid]]:
    """Return the (t, h, w) of the batch's images and videos, in patches before they are merged."""
    videos = _read_grids(batch, "video_grid_thw")
    if MROPE[model.model_type]:  # each frame of a video is a grid of its own
        videos = [(1, h, w) for t, h, w in videos for _ in range(t)]
    return {IMAGE: _read_grids(batch, "image_grid_thw"), VIDEO: videos}


def _patches_per_side(model: Model) -> int:
    """Return how many patches in a row, and how many in a column, become one token."""
    vision = model.config.get("vision_config")
    patches_per_side = vision.get("spatial_merge_size", 2) if isinstance(vision, Mapping) else 2
    if type(patches_per_side) is not int or patches_per_side < 1:
        raise ValueError(
            f"config.json: spatial_merge_size must be an integer above 0, got {patches_per_side!r}."
        )
    return patches_per_side


def _text_positions(got: list[int], documents: list[Any] | None) -> list[int]:
    """Return the positions that text must have: they count on from 0, and start again with each
    document.

    got: the file's positions. documents: the number of each token's document; None if not given: a
    document then begins wherever the file has a 0.
    """
    wanted: list[int] = []
    position = 0
    for j, own in enumerate(got):
        if documents is None:
            begins = own == 0
        else:
            begins = j > 0 and documents[j] != documents[j - 1]
        if begins:
            position = 0
        wanted.append(position)
        position += 1
    return wanted


def _mrope_positions_of_documents(
    tokens: list[tuple[Any, int]],
    grids: Mapping[int, Iterator[Grid]],
    patches_per_side: int,
    *,
    sides_only: bool,
) -> list[Any]:
    """Return the (t, h, w) of a row's tokens; each document starts again at 0.

    tokens: (document, kind) of each. The other arguments are those of `_mrope_positions`.
    """
    wanted = []
    for _, own in groupby(tokens, lambda token: token[0]):
        wanted += _mrope_positions(
            [kind for _, kind in own], grids, patches_per_side, sides_only=sides_only
        )
    return wanted


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
    height and width, whatever the number of frames, as LATER do.
    """
    wanted: list[Any] = []
    position = 0
    for kind, group in groupby(kinds):
        count = len(list(group))
        if kind == TEXT:
            wanted += [(position + j,) * 3 for j in range(count)]
            position += count
            continue
        while count > 0:
            t, h, w = _next_grid_in_tokens(grids, kind, count, patches_per_side)
            for a, b, c in product(range(t), range(h), range(w)):
                wanted.append((position + a, position + b, position + c))
            position += max(h, w) if sides_only else max(t, h, w)
            count -= t * h * w
    return wanted


def _next_grid_in_tokens(
    grids: Mapping[int, Iterator[Grid]], kind: int, count: int, patches_per_side: int
) -> Grid:
    """Return the (t, h, w) in tokens of the next image or video of a kind.

    count: the tokens of the kind that are left in a row. patches_per_side: patches a token.
    Raises: ValueError where there is no grid, or one of more tokens.
    """
    grid = next(grids[kind], None) if kind in grids else None
    if grid is None:
        raise ValueError(f"{count} tokens of the kind {kind} have no grid.")
    t = grid[0]
    h = grid[1] // patches_per_side
    w = grid[2] // patches_per_side
    if not 0 < t * h * w <= count:
        raise ValueError(
            f"a grid of {t} * {h} * {w} tokens, with {count} of the kind {kind} in a row."
        )
    return t, h, w


def _line_about_row(
    row: int, seen: list[int], got: list[Any], wanted: list[Any], who: str
) -> list[str]:
    """Return a line about the first wrong position of a row, in a list; empty if none is wrong.

    seen: the indices of the row's visible tokens. who: whose positions are wanted.
    """
    wrong_places = [k for k, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b]
    if not wrong_places:
        return []
    first = wrong_places[0]
    return [
        f"row {row}: token {seen[first]} has the position {got[first]}, {wanted[first]} is made by "
        f"{who}; {len(wrong_places)} of {len(got)} tokens differ"
    ]


def _require_nested_lists(batch: Mapping[str, Any], name: str, depth: int) -> list[Any]:
    """Return the batch's value of a name: nested lists of whole numbers of this depth.

    Raises: ValueError for anything else, or for three axes of different shapes.
    """
    value: Any = batch.get(name)
    items = [value]  # all lists at one depth, one after the other
    message = f"{name} must be lists of whole numbers, {depth} deep, got {str(value)[:40]}."
    for _ in range(depth):
        if not all(isinstance(part, list) and part for part in items):
            raise ValueError(message)
        items = [item for part in items for item in part]
    if len(items) > LARGEST or not all(type(item) is int for item in items):
        raise ValueError(message)
    if depth == 3:
        shapes = {tuple(map(len, axis)) for axis in value}
        if len(value) != 3 or len(shapes) > 1:
            raise ValueError(f"{name} must have three equal parts, t, h and w.")
    return value


def _rows_beside_positions(
    batch: Mapping[str, Any], name: str, lengths: list[int], value_if_missing: Any
) -> list[Any]:
    """Return the rows of a list that has a number for each position; of `value_if_missing` where
    the batch has no such list.

    lengths: the number of positions of each row.
    Raises: ValueError for rows of other lengths.
    """
    if batch.get(name) is None:
        return [[value_if_missing] * count for count in lengths]
    value = _require_nested_lists(batch, name, 2)
    if [len(row) for row in value] != lengths:
        raise ValueError(f"{name} has rows of other lengths than position_ids.")
    return value


def _read_grids(batch: Mapping[str, Any], name: str) -> list[Grid]:
    """Return the (t, h, w) of each grid in the batch's list of this name; empty without a list.

    Raises: ValueError for anything but three numbers above 0.
    """
    value = [] if batch.get(name) is None else _require_nested_lists(batch, name, 2)
    if not all(len(grid) == 3 and min(grid) > 0 for grid in value):
        raise ValueError(f"{name} must have (t, h, w) of each, above 0.")
    return [tuple(grid) for grid in value]
