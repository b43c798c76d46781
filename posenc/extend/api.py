"""`posenc extend` as a function."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from posenc.arguments import explain_misfits
from posenc.extend.extension import Outcome, extend
from posenc.extend.options import DEFAULTS, Options, Progress
from posenc.extend.refusals import prepare_outputs
from posenc.extend.report import OUT_OF_DOMAIN_CAUTION, report_of
from posenc.extend.run_command import read_documents


@explain_misfits
def run(
    folder: str | Path,
    to: int,
    documents: Sequence[str] | None = None,
    *,
    method: str | None = None,
    out: str | Path | None = None,
    report: str | Path | None = None,
    figures: str | Path | None = None,
    options: Options = DEFAULTS,
    as_bytes: bool = False,
    as_ids: bool = False,
    progress: Progress = lambda what, share: None,
) -> Outcome:
    """Stretch a checkpoint, measure it before and after, and write the requested files.

    Args:
        folder: a Hugging Face folder with safetensors.
        to: the new length in tokens, above the training length.
        documents: texts to measure on, like those of the training; None for the source of
            Python's standard library, which says little about other models.
        method, out, options, as_bytes, as_ids, progress: see `posenc.extend.extend`.
        report: a file for the page; None for extend.html in `out`, or nowhere.
        figures: a folder for every figure as SVG, PDF, PNG and CSV.

    Returns: every measured variant, the recommendation with its reason, and the proof of what was
    written.

    Raises: ValueError, before measuring, for anything that cannot be extended or written. RunFailed
    if `method` cannot be measured, or the export cannot be proved: then its `outcome` has what was
    measured.

    >>> import tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> shape = LlamaConfig(vocab_size=256, max_position_embeddings=64, **small)
    >>> texts = ["Documents of your own, longer than the new length. " * 9] * 4
    >>> few = posenc.extend.Options(windows=2, search_evaluations=0)
    >>> with tempfile.TemporaryDirectory() as folder:  # a checkpoint that has learned nothing
    ...     LlamaForCausalLM(shape).save_pretrained(folder)
    ...     outcome = posenc.extend.run(
    ...         folder, 128, texts, method="yarn", as_bytes=True, options=few
    ...     )
    >>> list(outcome.measured)  # as it is, stretched, and with a window of the training length
    ['none', 'yarn', 'window']
    """
    paths = [None if path is None else Path(path) for path in (out, report, figures)]
    prepare_outputs(*paths)
    texts = read_documents([]) if documents is None else documents
    outcome = extend(
        folder,
        to,
        texts,
        method=method,
        out=out,
        options=options,
        as_bytes=as_bytes,
        as_ids=as_ids,
        out_of_domain=documents is None,
        progress=progress,
    )
    page_path, figures = prepare_outputs(*paths, is_exported=outcome.proof is not None)
    if page_path is None and figures is None:
        return outcome
    from posenc.report.figure_files import write_page
    from posenc.report.html_page import page_of

    call = f"posenc.extend.run({str(folder)!r}, {to})"
    answer = report_of(outcome, call, OUT_OF_DOMAIN_CAUTION if documents is None else None)
    for line in write_page(page_of(answer), page_path, figures):
        warnings.warn(line, stacklevel=2)
    return outcome
