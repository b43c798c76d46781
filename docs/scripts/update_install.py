"""Write how posenc is installed into all documents: from a clone, or from the index.

When the first version is on the index, set PUBLISHED = True and run this once.
"""

import re
from pathlib import Path

PUBLISHED = False
"""True when `pip install posenc` finds this project on the index."""
ROOT = Path(__file__).parents[2]
ELSEWHERE = ("releasing.md",)
"""Pages that speak of both."""
NAME = "posenc" if PUBLISHED else "."
EXTRAS = re.compile(r'"(?:posenc|\.)(\[[\w,-]+\])"')
"""What pip is given to install extras, in quotes."""
BASE = re.compile(r"(pip install (?:-\S+ )*)(?:posenc|\.)(?=[`\s])")


def written(text: str) -> str:
    """Return a document with its commands as PUBLISHED says."""
    return BASE.sub(rf"\g<1>{NAME}", EXTRAS.sub(rf'"{NAME}\g<1>"', text))


def documents() -> list[Path]:
    """Return the pages that users read."""
    pages = [*ROOT.glob("README*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in pages if path.name not in ELSEWHERE]


def main() -> None:
    for path in documents():
        text = path.read_text(encoding="utf-8")
        if written(text) != text:
            path.write_text(written(text), encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
