"""What a study leaves open whose losses another program measured: what its table does not have."""

from posenc.compare.given_table import GivenTable
from posenc.compare.judging.standing import MARGIN
from posenc.report.report import join_names

_MEANING_OF_COLUMN = {
    "size": "the size of the models",
    "steps": "steps",
    "seconds": "seconds of training",
    "position": "losses by position",
}
"""What is not known if a column is not there."""
_NEVER_IN_A_TABLE = (
    "how each encoding was tuned",
    "whether documents were kept apart",
    "losses of single windows",
)


def sentence_on_missing_columns(table: GivenTable) -> str:
    """Return what a table of losses does not have.

    >>> table = GivenTable("a.csv", "bits per byte", ("size", "steps", "seconds"))
    >>> sentence_on_missing_columns(table)[:42]
    'Not in the table: losses by position, how '
    """
    missing = [words for column, words in _MEANING_OF_COLUMN.items() if column not in table.columns]
    return f"Not in the table: {join_names([*missing, *_NEVER_IN_A_TABLE])}."


def sentence_on_units(loss_unit: str) -> str:
    """Return by which margin and spread losses that are not per byte are judged; "" for those that
    are. loss_unit: "bits per byte", or another in words."""
    if loss_unit == "bits per byte":
        return ""
    return (
        f"Losses are per token; that {MARGIN} bits do not matter, and how far seeds are expected "
        "to spread, was chosen for bits per byte."
    )
