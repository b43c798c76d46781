"""Positions in weight files: tables in low precision, and the layout of rows."""

from collections.abc import Iterator

from posenc.doctor.misreadings import ALL_RUNTIMES, Case
from posenc.doctor.rule import Hit, rule
from posenc.runtimes.files.model_folder import paths_inside, read_safetensors_header

MAX_FILES = 256
"""Weight files whose headers are read; chosen, not derived."""
TABLE_NAMES = ("inv_freq", "cos_cached", "sin_cached", "freqs_cis")


@rule("PD035", "W")
def report_tables_in_low_precision(case: Case) -> Iterator[Hit]:
    """Report frequencies or tables stored in 16 bits."""
    if case.metadata is not None:
        return
    for path in paths_inside(case.source.folder, "*.safetensors")[:MAX_FILES]:
        tables_in_words = [
            f"{name} ({info['dtype']})"
            for name, info in read_safetensors_header(path)[0].items()
            if any(table_name in name for table_name in TABLE_NAMES)
            and info.get("dtype") in ("BF16", "F16")
        ]
        if tables_in_words:
            more_in_words = (
                f" and {len(tables_in_words) - 1} more" if len(tables_in_words) > 1 else ""
            )
            yield Hit(
                f"{path.name} stores {tables_in_words[0]}{more_in_words}",
                concerned=(),
                affected=ALL_RUNTIMES,
            )


@rule("PD036", "E")
def report_wrong_layout(case: Case) -> Iterator[Hit]:
    """Report nothing: only the loss on a text tells interleaved rows of q and k from half-split
    ones. `--layout` measures it (posenc.doctor.cures.measure_layout) and reports this rule."""
    yield from ()  # the rule is in the table, so that --explain and --ignore know its code
