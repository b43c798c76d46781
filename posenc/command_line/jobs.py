"""Say what posenc is for: its jobs, each with a command to copy, as `posenc` alone prints them."""

from typing import NamedTuple


class Job(NamedTuple):
    """Describe a job of a user.

    verb: one word. example: a command that does it. result: what the command gives, one sentence.
    """

    verb: str
    example: str
    result: str


JOBS = (
    Job(
        "choose",
        "posenc compare rope alibi t5 --text book.txt",
        "Train each encoding on short text, test it on long text, and name one to take.",
    ),
    Job(
        "extend",
        "posenc extend MODEL --to 8192 --out LONGER",
        "Give a RoPE checkpoint a longer context; measure each method first.",
    ),
    Job(
        "serve",
        "posenc doctor MODEL",
        "Say what six runtimes compute from a config or GGUF file, and where one misreads it.",
    ),
    Job(
        "check",
        "posenc inspect contract my_encoding.py:Mine",
        "Test an encoding of your own: decoding, packing, gradients, compilation.",
    ),
    Job(
        "learn",
        "posenc explore --out page.html",
        "Write a page with sliders that shows why RoPE breaks at length.",
    ),
)


def jobs_in_words() -> str:
    """Return the lines that `posenc` alone prints."""
    lines = ["posenc: position encodings for Transformers. Five jobs, with an example each:", ""]
    for job in JOBS:
        lines.append(f"  {job.verb:<8}{job.example}")
        lines.append(f"  {'':<8}{job.result}")
    lines.append("")
    lines.append("In Python: import posenc; posenc.RoPE, posenc.attention, posenc.hf.attach, ...")
    lines.append("`posenc list` names the encodings, `posenc --help` all commands.")
    return "\n".join(lines)
