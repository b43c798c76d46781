"""Compare: train short, test long, on the user's own text.

>>> import tempfile
>>> from pathlib import Path
>>> from posenc.compare.options import Options  # those of the command, by the same names
>>> from posenc.compare.results import Study
>>> from posenc.compare.study import run_study
>>> small = {"train_length": 16, "test_lengths": "32", "batch": 2, "width": 16, "layers": 1}
>>> with tempfile.TemporaryDirectory() as folder:
...     text, out = Path(folder, "text.txt"), Path(folder, "study")
...     _ = text.write_text("the cat sat on the mat. " * 200)
...     run_study(Options(["rope"], [str(text)], steps=1, seeds=1, heads=1, out=out, **small))
...     study = Study.from_json((out / "study.json").read_text())  # doctest: +ELLIPSIS
Bits per byte by window length (lower is better)...
>>> (result,) = study.results
>>> [score.length for score in result.by_length]
[16, 32]
"""
