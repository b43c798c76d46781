"""What a study leaves open whose losses another program measured: what its table does not have."""

from collections.abc import Iterator

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


def sentences_on_table(table: GivenTable) -> Iterator[str]:
    """Yield what a table of losses does not have, and by which spread and margin it is judged.

    >>> table = GivenTable("a.csv", "bits per byte", ("size", "steps", "seconds"))
    >>> next(sentences_on_table(table))[:42]
    'Not in the table: losses by position, how '
    """
    missing = [words for column, words in _MEANING_OF_COLUMN.items() if column not in table.columns]
    yield f"Not in the table: {join_names([*missing, *_NEVER_IN_A_TABLE])}."
    if table.loss_unit != "bits per byte":
        yield (
            f"The difference of {MARGIN} bits that does not matter and the spread of seeds that is "
            "expected are those of bits per byte, and these losses are per token."
        )
