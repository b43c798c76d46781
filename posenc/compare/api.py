"""`posenc compare` as a function."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from posenc.arguments import explain_misfits
from posenc.compare.options import Options, check_options
from posenc.compare.results import Study


@explain_misfits
def run(
    encodings: Sequence[str] | None = None,
    *,
    text: str | Path | Sequence[str | Path] | None = None,
    task: str | Sequence[str] | None = None,
    test_lengths: Sequence[int] | None = None,
    out: str | Path | None = None,
    figures: str | Path | None = None,
    **options: Any,
) -> Study:
    """Train each encoding short, test it long, write the page to `out`, and return the study.

    Trials run in separate processes, so call it under `if __name__ == "__main__":` in a script. The
    same call resumes an interrupted one.

    Args:
        encodings: names of `posenc.names()` or texts for `posenc.create`, optionally with a label
            before an equals sign; None for those of posenc.compare.defaults.
        text: files, folders or globs to train and test on, read as bytes; None for the source of
            Python's standard library.
        task: "text" or tasks of docs/compare.md, one or several; None for text.
        test_lengths: lengths of test windows, in bytes; None for 1, 2, 4 and 8 times the training
            length, which is always included.
        out: folder for report.html, results.csv, study.json and the trials; None for a folder below
            runs/ named by the options.
        figures: folder for every figure as SVG, PDF, PNG and CSV.
        options: any other field of `posenc.compare.Options`, such as budget, seeds, steps, lr, tune
            or dry_run, with its default there.

    Raises: ValueError for wrong input, before anything is written; TypeError for an unknown option;
    RunFailed if a trial failed, after all others.

    >>> import tempfile
    >>> from pathlib import Path
    >>> small = {"train_length": 16, "batch": 2, "width": 16, "layers": 1, "heads": 1, "seeds": 1}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text, out = Path(folder, "text.txt"), Path(folder, "study")
    ...     _ = text.write_text(" ".join(f"{n} times {n} is {n * n}." for n in range(200)))
    ...     study = posenc.compare.run(
    ...         ["rope"], text=text, test_lengths=[32], steps=1, out=out, **small
    ...     )
    ...     written = sorted(path.name for path in out.glob("[!.]*.*"))
    >>> written
    ['events.jsonl', 'report.html', 'results.csv', 'study.json']
    >>> [(score.length, score.spread) for score in study.summary[0].by_length]
    [(16, 0.0), (32, 0.0)]
    >>> study.recommendation[:17]  # one step
    'Too early to tell'
    """
    from posenc.compare import run_sizes

    texts = [text] if isinstance(text, str | Path) else text
    tasks = [task] if isinstance(task, str) else task
    lengths = _list_of_texts("test_lengths", test_lengths, Integral, "whole numbers")
    chosen_options = Options(
        _list_of_texts("encodings", encodings, str, "names"),
        _list_of_texts("text", texts, str | Path, "paths"),
        task=_list_of_texts("task", tasks, str, "names"),
        test_lengths=None if lengths is None else ",".join(lengths),
        out=Path(out) if isinstance(out, str) else out,
        figures=Path(figures) if isinstance(figures, str) else figures,
        **options,
    )
    check_options(chosen_options)
    return run_sizes.run(chosen_options, show=False)


def _list_of_texts(name: str, value: Any, item_type: Any, items_in_words: str) -> list[str] | None:
    """Return the items of the argument `name` as texts; None for None.

    item_type, items_in_words: type of an item, and its plural in the message.
    Raises: ValueError if the value is no list of this type, or an empty one.
    """
    if value is None:
        return None
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    items = list(value) if is_list else []
    are_fit = [isinstance(item, item_type) and not isinstance(item, bool) for item in items]
    if not items or not all(are_fit):
        raise ValueError(f"{name} must be a list of {items_in_words}, got {value!r}.")
    return [str(item) for item in items]
