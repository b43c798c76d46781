"""Put a checkpoint into words: the same lines in the terminal and on the page."""

from collections.abc import Callable, Sequence

from posenc.inspect.checkpoint.positions import Bias, Disentangled, Kind, Rotation, Table
from posenc.inspect.checkpoint.sheet import Sheet
from posenc.inspect.checkpoint.structure import Structure
from posenc.inspect.checkpoint.swap import Change, Swap
from posenc.inspect.encoding.words import ranges

Lines = dict[str, str]


def structure_lines(sheet: Sheet) -> Lines:
    """Return by name, in words, the sizes of the model and its parameters by part."""
    built = sheet.structure
    stacks = f"{built.layers}"
    if built.decoder_layers is not None:
        stacks = f"{built.layers} of the encoder, {built.decoder_layers} of the decoder"
    lines = {
        "model": built.model_type,
        "layers": stacks,
        "heads": f"{built.heads} of {built.head_dim}, on {built.kv_heads} key/value heads",
        "width, vocabulary": f"{built.width:,}, {built.vocabulary:,}",
        "longest text": f"{sheet.longest:,} tokens"
        if sheet.longest
        else "its config names no limit",
        "attention looks": "back only" if sheet.reading.causal else "both ways",
        "parameters": f"{built.parameters:,}",
    }
    return lines | parts(built)


def parts(built: Structure) -> Lines:
    """Return by name the parameters of each part that has any, with their fraction of the total;
    positions always."""
    shown = {}
    for part, count in built.parts.items():
        if count or part == "positions":
            tied = ", which are the head too" if part == "embeddings" and built.tied else ""
            shown[f"  {part}"] = f"{count:,} ({count / built.parameters:.1%}){tied}"
    return shown


def positions_lines(kinds: Sequence[Kind]) -> Lines:
    """Return by name, in words, where the model's positions are, and their settings."""
    if not kinds:
        return {"positions": "nothing that posenc knows; an exchange of words shows what they do"}
    lines: Lines = {}
    for kind in kinds:
        match kind:
            case Rotation():
                lines |= _rotation_lines(kind)
            case Table():
                low, mean, high = kind.norms
                reserved = (
                    f", and {kind.reserved} that stand for no position" if kind.reserved else ""
                )
                lines[f"table {kind.where}"] = (
                    f"{kind.rows:,} rows{reserved}; length of a row {low:.3g} to {high:.3g}, mean "
                    f"{mean:.3g}; cosine of a row with the next {kind.neighbours:.3f}"
                )
            case Bias():
                lines[f"bias, {kind.where}"] = kind.settings
            case Disentangled():
                lines[f"relative table, {kind.where}"] = kind.settings
    return lines


def _rotation_lines(kind: Rotation) -> Lines:
    """Return the lines of a rotation: its settings, and pairs that leave their trained range."""
    pairs = len(kind.wavelengths)
    name = f"rotation, {kind.layers}"
    theta = "none" if kind.rope_theta is None else f"{kind.rope_theta:,g}"
    part = "" if kind.rotary_dim == kind.head_dim else f" of {kind.head_dim}"
    unfinished = f": {ranges(kind.unfinished)}" if kind.unfinished else ""
    new = f": {ranges(kind.new_angles)}" if kind.new_angles else ""
    return {
        name: f"{kind.rotary_dim}{part} channels in {pairs} pairs, theta {theta}, "
        f"scaling {kind.scaling}, trained on {kind.trained:,} tokens, allowed {kind.longest:,}",
        f"{name}: no full turn in {kind.trained:,} tokens": (
            f"{len(kind.unfinished)} of {pairs} pairs{unfinished}"
        ),
        f"{name}: new angles at {kind.beyond:,} tokens": (
            f"{len(kind.new_angles)} of {pairs} pairs{new}"
        ),
    }


def distances_lines(sheet: Sheet) -> tuple[list[str], list[list[str]]]:
    """Return the header and a row for each layer: the mean of its heads' mean distances from a
    query to the keys that it attends to, in tokens, and the heads with the smallest and the largest
    one, "2.3 (head 0)"."""
    header = ["layer", "mean", "nearest head", "farthest head"]
    rows_of_layers = []
    for stack, values in sheet.reading.distances().items():
        for layer, heads in enumerate(values):
            near, far = int(heads.argmin()), int(heads.argmax())
            nearest, farthest = (f"{heads[head]:.1f} (head {head})" for head in (near, far))
            rows_of_layers.append(
                [f"{stack} {layer}".strip(), f"{heads.mean():.1f}", nearest, farthest]
            )
    return header, rows_of_layers


def exchange_lines(swap: Swap) -> tuple[list[str], list[list[str]]]:
    """Return the header, and a row for each thing that the exchange changes: its name, and the
    change with the model's positions and without."""
    settings = {"with positions": swap.with_positions, "without": swap.without}
    changes = {name: change for name, change in settings.items() if change is not None}

    def line(label: str, number: Callable[[Change], float]) -> list[str]:
        return [label, *(f"{number(change):.2g}" for change in changes.values())]

    lines = [
        line("last token, layer 1", lambda c: c.last_by_layer[1]),
        line("last token, last", lambda c: c.last_by_layer[-1]),
        line("any token, layer 1", lambda c: c.all_by_layer[1]),
        line("any token, last", lambda c: c.all_by_layer[-1]),
        line("logits", lambda c: c.logits),
        line("prediction, nats", lambda c: c.divergence),
    ]
    return ["changed", *changes], lines
