"""Adapters of other libraries, as docs/inspect.md shows them."""
