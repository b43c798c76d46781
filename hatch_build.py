"""Put the repository's address into what is published: project URLs, and the README's links.

Only if POSENC_REPOSITORY names it, as in `POSENC_REPOSITORY=https://github.com/me/posenc python -m
build`: a package index shows the README outside of the repository, and no owner is written into
the sources, so that a fork never points to somebody else.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)(\[[^\[\]]*\]|\[!\[[^\[\]]*\]\([^)]*\)\])\((?!\w+:|#)([^)\s]+)\)")
"""A relative link or picture in Markdown: "!" or nothing, its text, its target."""


class Links(MetadataHookInterface):
    """Set `readme` and `urls`, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict) -> None:
        address = os.environ.get("POSENC_REPOSITORY", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if address:
            text = absolute(text, address, f"v{metadata['version']}")
            metadata["urls"] = urls(address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def urls(address: str) -> dict[str, str]:
    """Return the project's URLs by the labels that PyPI knows."""
    return {
        "Repository": address,
        "Documentation": f"{address}/blob/main/docs/README.md",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def absolute(text: str, address: str, tag: str) -> str:
    """Return a README whose relative links lead to the repository at a tag."""

    def there(match: re.Match[str]) -> str:
        picture, said, target = match.groups()
        # A picture is a file, not the page that shows it.
        return f"{picture}{said}({address}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return LINK.sub(there, text)
