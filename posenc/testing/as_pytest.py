"""The contract as tests for pytest."""

from collections.abc import Callable, Collection
from typing import Any

from posenc.encodings import PositionEncoding
from posenc.testing.checks import every_check, maker


def test_contract(
    *encodings: type[PositionEncoding] | str, harmless: Collection[str] = (), **options: Any
) -> Callable[..., None]:
    """Return the whole contract as a test function for pytest, with a case per encoding and check.

    In a test file of your own:

        from my_package import MyEncoding
        from posenc import testing

        test_my_encoding = testing.test_contract(MyEncoding, slope=2.0)

    Args:
        encodings: classes, or texts for `posenc.create`.
        harmless: names of numeric options that are allowed not to change the result.
        options: constructor arguments in addition to those from the model's shape.

    Raises: TypeError for anything but classes and texts; ValueError for a text that names no
    encoding.
    """
    import pytest  # not above: posenc.testing runs without it

    if not encodings:
        raise TypeError("test_contract: give at least one encoding.")
    subjects = {}
    for encoding in encodings:
        if isinstance(encoding, str):
            subjects[encoding] = maker(encoding, **options)
        elif isinstance(encoding, type) and issubclass(encoding, PositionEncoding):
            subjects[encoding.__name__] = maker(encoding, **options)
        else:
            raise TypeError(
                f"test_contract: expected subclasses of posenc.PositionEncoding, got {encoding!r}."
            )
    checks = every_check(harmless)

    @pytest.mark.parametrize("check", checks)
    @pytest.mark.parametrize("encoding", subjects)
    def contract(encoding: str, check: str) -> None:
        """Run one check with one encoding."""
        checks[check](subjects[encoding])

    return contract


test_contract.__test__ = False  # type: ignore[attr-defined]  # it makes tests and is none
