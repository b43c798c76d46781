"""While the tests run, every function with shapes in its signature is held to them.

A call that succeeds must have had the arguments, and must give the result, that the signature says.
A call that raises is left alone, so that tests see the library's own messages; so is a call that
torch.compile or torch.export traces.
"""

import functools
import importlib.machinery
import inspect
import re
import sys
import typing
from collections.abc import Callable, Hashable
from types import FunctionType, ModuleType
from typing import Any

import jaxtyping
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation

_SHAPE = re.compile(r"\b(Float|Int|Integer|Bool|Num|Real|Inexact|Shaped)\[")


def shaped_hints(function: Any) -> dict[str, Any]:
    """The annotations that name shapes, written out or by a name that stands for them."""
    known = {**vars(jaxtyping), "Tensor": torch.Tensor, **inspect.unwrap(function).__globals__}
    found = {}
    for name, hint in inspect.get_annotations(function).items():
        if isinstance(hint, str):
            try:
                hint = eval(hint, known)
            except (NameError, TypeError):  # imported for type checkers only
                if _SHAPE.search(hint):
                    raise
        if _is_shaped(hint):
            found[name] = hint
    return found


def _is_shaped(hint: Any) -> bool:
    own = inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
    return own or any(map(_is_shaped, typing.get_args(hint)))


def has_shapes(function: Any) -> bool:
    """Whether a signature names shapes."""
    return bool(shaped_hints(function))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose successful calls raise jaxtyping.TypeCheckError where they are not what
    the signature says."""
    results: list[Any] = []
    verify = jaxtyping.jaxtyped(beartype(_answering(function, results)), typechecker=None)
    hints = shaped_hints(function)
    places = [i for i, name in enumerate(inspect.signature(function).parameters) if name in hints]
    computed = "{" in str([*hints.values()])  # sizes, from arguments, so at each call
    right: set[Hashable] = set()

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not torch.compiler.is_compiling():
            given = [args[i] for i in places if i < len(args)]
            like = (*given, *(kwargs.get(name, ...) for name in hints), result)
            if not computed and (like := _described(like)) in right:
                return result
            results.append(result)
            try:
                verify(*args, **kwargs)
            except BeartypeCallHintViolation as error:
                raise jaxtyping.TypeCheckError(str(error)) from None
            finally:
                results.pop()
            if not computed:
                right.add(like)
        return result

    called.checked = True  # type: ignore[attr-defined]
    return called


def _described(value: Any) -> Hashable:
    """All of an argument that a check without sizes from arguments depends on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return tuple(map(_described, value)) if isinstance(value, tuple | list) else type(value)


def _answering(function: Callable[..., Any], results: list[Any]) -> Callable[..., Any]:
    """A function with the parameters of another and its hints that name shapes, which gives the
    last result. jaxtyping could make one, too, but would check each argument three times."""
    function = inspect.unwrap(function)
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else None)
        for p in signature.parameters.values()
    ]
    bare = signature.replace(parameters=parameters, return_annotation=signature.empty)
    names: dict[str, Any] = {"_results": results, "__name__": function.__module__}
    exec(f"def answer{bare}: return _results[-1]", names)
    answer = names["answer"]
    answer.__defaults__, answer.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    answer.__qualname__, answer.__annotations__ = function.__qualname__, shaped_hints(function)
    return answer


def is_checked(function: Any) -> bool:
    return getattr(function, "checked", False)


def inner(value: Any) -> Any:
    """The function of a class or static method or of a property; anything else as it is."""
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def check_module(module: ModuleType) -> None:
    """Replace what the module defines by its checked form: functions, methods and properties."""
    for owner in [module, *vars(module).values()]:
        if owner is module or (inspect.isclass(owner) and owner.__module__ == module.__name__):
            for name, value in list(vars(owner).items()):
                function = inner(value)
                mine = isinstance(function, FunctionType) and function.__module__ == module.__name__
                if mine and has_shapes(function):
                    wrapped = checked(function)
                    setattr(owner, name, wrapped if function is value else type(value)(wrapped))


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        check_module(module)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "posenc":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Check posenc from now on; before any of it is imported."""
    early = [name for name in sys.modules if name.partition(".")[0] == "posenc"]
    if early:
        raise RuntimeError(f"shapes.install: {', '.join(early)} imported before; they stay unseen.")
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
