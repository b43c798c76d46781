"""Compare encodings: train short, test long, on the user's own text.

>>> import tempfile
>>> from pathlib import Path
>>> small = {"train_length": 16, "batch": 2, "width": 16, "layers": 1, "heads": 1, "seeds": 1}
>>> with tempfile.TemporaryDirectory() as folder:
...     text, out = Path(folder, "text.txt"), Path(folder, "study")
...     _ = text.write_text("the cat sat on the mat. " * 200)
...     study = posenc.compare.run(
...         ["rope"], text=text, test_lengths=[32], steps=1, out=out, **small
...     )
...     written = sorted(path.name for path in out.glob("[!.]*.*"))
>>> written
['events.jsonl', 'report.html', 'results.csv', 'study.json']
>>> (result,) = study.results
>>> [score.length for score in result.by_length]
[16, 32]
"""

from posenc.lazy import attach

# No submodule may have the name of a function here, because importing it would replace it.
__getattr__, __dir__, __all__ = attach(__name__, __file__)
