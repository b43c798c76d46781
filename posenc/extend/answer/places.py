"""Where the page and the figures go: anywhere, or into the new folder once it is written."""

import os
from pathlib import Path

from posenc.report.files.atomic import check_outputs


def places(
    out: Path | None, page: Path | None, figures: Path | None, *, written: bool = False
) -> tuple[Path | None, Path | None]:
    """Make the folders of the page and the figures, check that both can be written, and return
    both; None for what is in the new folder `out` before that is written.

    Raises: ValueError, OSError.
    """
    if out is not None and written:
        page = page or out / "extend.html"
    elif out is not None:
        new = Path(os.path.realpath(out))

        def inside(path: Path | None) -> bool:
            return path is not None and new in (real := Path(os.path.realpath(path)), *real.parents)

        if (
            page is not None
            and inside(page)
            and (page.suffix != ".html" or not inside(page.parent))
        ):
            raise ValueError(f"{page}: a page in the new folder must be a file NAME.html.")
        page, figures = (None if inside(path) else path for path in (page, figures))
    check_outputs(figures, page)
    return page, figures
