"""A byte order mark at the beginning of the file."""

from collections.abc import Iterator

from posenc.doctor.misreadings import ALL_RUNTIMES, Case
from posenc.doctor.rule import Hit, rule
from posenc.files.opening import open_ordinary


@rule("PD054", "E")
def report_byte_order_mark(case: Case) -> Iterator[Hit]:
    """Report a byte order mark, at which every runtime's JSON reader stops."""
    path = case.source.path
    if case.metadata is None and path.is_file():
        with open_ordinary(path) as file:
            if file.read(3) == b"\xef\xbb\xbf":
                yield Hit(
                    "the file begins with a byte order mark",
                    concerned=case.judged_runtimes,
                    affected=ALL_RUNTIMES,
                )
