"""Say what llama.cpp's loader makes of GGUF files; see probing.py.

It uses xllamacpp, a package that brings libllama. A case has a "file", the path of a GGUF file, in
the place of "config". The loader runs in a process of its own, as it ends the process where it
meets a file that it did not expect, and it reads no weights: before it loads a model, it fits its
settings to the memory, by loading the model without allocating any. What it prints then is read,
and it is stopped.

An answer is {"refuses": "words of llama.cpp"}, {"unmeasured": "why"} or {"loaded": {...}}, what it
loaded by its own names, such as `n_ctx_train`, `n_rot`, `rope type`, `rope scaling`,
`freq_base_train`, `freq_scale_train` and `n_ctx_orig_yarn`: numbers, and words. The number of the
release is the last part of xllamacpp's version: 2026.10.11549 brings b11549.
"""

import os
import re
import subprocess
import sys

from probing import MOST_LETTERS, answer_question

LOAD_FLAG = "--load"
"""Argument of this program with which it loads a file: --load FILE LENGTH."""
FULL_VERBOSITY = 5
"""Verbosity at which the loader prints the settings."""
LINE_PATTERN = re.compile(r"^[\d.]+ ([A-Z]) (.*)$")
"""What is printed: the time, the level, such as E of an error, and the text."""
SETTING_PATTERN = re.compile(
    r"^print_info: (\S*(?:rope|freq|n_rot|n_ctx|n_swa|attn_scale).*?)\s+= (.*)$"
)
"""A setting that decides positions, and its value."""
DONE_PATTERN = re.compile(r"projected to use|memory breakdown|fitting params to free memory took")
"""What is printed after a model has been loaded without memory."""
ERROR_PATTERN = re.compile(r"error loading model: (.*)")
ABORT_PATTERN = re.compile(r"GGML_ASSERT\(.*\) failed|terminate called .*|what\(\): .*")
"""The words with which it ends the process."""
UNKNOWN_ARCHITECTURE = "unknown model architecture"


def start():
    """Import xllamacpp and return the release of llama.cpp in it."""
    import xllamacpp

    return "b" + xllamacpp.__version__.rpartition(".")[2]


def answer_case(case):
    """Return the answer to one case."""
    printed_settings, refusal = load_in_a_process(case["file"], case["lengths"][0])
    if refusal:
        return {"refuses": refusal[:MOST_LETTERS], "no_model": UNKNOWN_ARCHITECTURE in refusal}
    if not printed_settings:
        return {"unmeasured": "its loader ended and said nothing of rotation"}
    loaded = {}
    for name, value in printed_settings:
        loaded.setdefault(name, number_or_words(value))
    return {"loaded": loaded}


def load_in_a_process(file, length):
    """Return the settings that the loader prints, (name, value), and its refusal, "" if it loads
    the file."""
    command = [sys.executable, sys.argv[0], LOAD_FLAG, file, str(length)]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    assert process.stdout is not None
    printed_settings = []
    try:
        for line in process.stdout:
            text = line.decode("utf-8", "replace").strip()
            log_line = LINE_PATTERN.match(text)
            refusal_match = ERROR_PATTERN.search(text) if log_line else ABORT_PATTERN.search(text)
            if refusal_match:
                return printed_settings, " ".join(
                    refusal_match[refusal_match.lastindex or 0].split()
                )
            if log_line and DONE_PATTERN.search(log_line[2]):
                return printed_settings, ""
            setting = SETTING_PATTERN.match(log_line[2]) if log_line else None
            if setting:
                printed_settings.append(setting.groups())
    finally:
        process.kill()
        process.wait()
    return [], ""


def number_or_words(value):
    """Return the number that a setting's value is; a value that is none as it stands."""
    try:
        return float(value)
    except ValueError:
        return value[:MOST_LETTERS]


def load(file, length):
    """Load a file for texts of `length` tokens, as llama-server does."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = file
    settings.n_ctx = length
    settings.n_gpu_layers = 0
    settings.warmup = False
    settings.verbosity = FULL_VERBOSITY
    xllamacpp.Server(settings)


if __name__ == "__main__":
    if sys.argv[1:2] == [LOAD_FLAG]:
        load(sys.argv[2], int(sys.argv[3]))
    else:
        answer_question("llama.cpp", start, answer_case)
