"""Position encodings for Transformers: use, compare, extend, inspect."""

from posenc import lazy

__version__ = "0.1.0"

_MODULE_OF_NAME = lazy.modules_by_stub_name(__file__)
_MODULES = {name: f"posenc.{name}" for name, where in _MODULE_OF_NAME.items() if where == "posenc"}
"""Modules imported on first use, so that `posenc.masks.causal` works after `import posenc`."""
_PUBLIC = {name: where for name, where in _MODULE_OF_NAME.items() if name not in _MODULES}

__all__ = sorted(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    try:
        if name in _PUBLIC:
            return getattr(lazy.load_module(_PUBLIC[name]), name)
        if name in _MODULES:
            return lazy.load_module(_MODULES[name])
    except ModuleNotFoundError as error:
        hint_to_install = lazy.install_hint(error)
        # For a module an AttributeError: help, hasattr and inspect.getmembers go on without it, or
        # without what it needs, such as the backend of an installed keras.
        if name in _MODULES and not (error.name or "").startswith("posenc"):
            raise AttributeError(f"posenc.{name}: {hint_to_install or error}") from error
        if not hint_to_install:
            raise
        raise ImportError(f"posenc.{name}: {hint_to_install}") from error
    hint = "" if name.startswith("_") else _hint(name)
    raise AttributeError(f"module 'posenc' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return lazy.names_for_dir(__name__, (*__all__, *_MODULES))


def _hint(name: str) -> str:
    """Return ". Did you mean posenc.X?" with what the name means in other libraries, or with the
    most similar public name, or ""."""
    import difflib

    from posenc.encodings.registry.other_names import class_and_name_of

    public_by_lowercase = {known.lower(): known for known in (*_MODULES, *__all__)}
    if name.lower() not in public_by_lowercase and (names_here := class_and_name_of(name)):
        return f". Did you mean posenc.{names_here[0]}?"
    near_names = [known for known in public_by_lowercase if known.startswith(name.lower())]
    near_names = near_names or difflib.get_close_matches(name.lower(), public_by_lowercase, n=1)
    return f". Did you mean posenc.{public_by_lowercase[near_names[0]]}?" if near_names else ""
