"""A small GGUF file, or a pipe, cannot make the doctor wait or allocate."""

import json
import math
import os
import struct
import time

import pytest

from posenc.doctor.options import Options
from posenc.doctor.running import run
from tests.doctor.threads import BASE

pytest.importorskip("gguf")

U32, F32, STRING, ARRAY = 4, 6, 8, 9
SOUND = {
    "context_length": (U32, 4096), "embedding_length": (U32, 64), "block_count": (U32, 2),
    "attention.head_count": (U32, 4), "rope.freq_base": (F32, 10000.0),
}  # fmt: skip


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def header(values, tensors=0, pairs=None, tail=b""):
    """The bytes of a GGUF file with these keys of a Llama, and whatever follows them."""
    body = text("general.architecture") + struct.pack("<I", STRING) + text("llama")
    for key, (kind, value) in values.items():
        raw = (
            value if isinstance(value, bytes) else struct.pack("<f" if kind == F32 else "<I", value)
        )
        body += text(f"llama.{key}") + struct.pack("<I", kind) + raw
    count = len(values) + 1 if pairs is None else pairs
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + body + tail


HOSTILE = {
    "layers": (header({**SOUND, "block_count": (U32, 0xFFFFFFFF)}), "block_count must be between"),
    "array": (
        header({**SOUND, "x": (ARRAY, struct.pack("<IQ", U32, 1 << 60))}), "values announced",
    ),
    "strings": (
        header({**SOUND, "x": (ARRAY, struct.pack("<IQ", STRING, 1 << 40))}), "values announced",
    ),
    "text": (
        header({**SOUND, "x": (STRING, struct.pack("<Q", 300_000_000))}), "bytes of text announced",
    ),
    "tensors": (header(SOUND, tensors=1 << 50), "tensors announced"),
    "keys": (header(SOUND, pairs=1 << 50), "keys announced"),
    "nested": (
        header({**SOUND, "x": (ARRAY, struct.pack("<IQ", ARRAY, 1) * 9)}), "unknown type 9",
    ),
    "nan": (header({**SOUND, "rope.freq_base": (F32, math.nan)}), "freq_base must be a number"),
    "negative": (header({**SOUND, "rope.freq_base": (F32, -1.0)}), "freq_base must be a number"),
    "zero": (header({**SOUND, "rope.scaling.factor": (F32, 0.0)}), "factor must be a number"),
    "a word": (
        header({**SOUND, "context_length": (STRING, text("4096"))}), "context_length must be a num",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_sentence_and_at_once(tmp_path, name):
    data, words = HOSTILE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    began = time.perf_counter()
    with pytest.raises(ValueError, match=words) as refused:
        run(Options((path,)))
    assert time.perf_counter() - began < 5 and "\n" not in str(refused.value)


def test_a_sound_header_passes(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(header(SOUND))
    assert run(Options((path,)))[1] == 0


def test_weights_that_are_a_pipe_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "rope_theta": 10000.0}))
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not an ordinary file"):
        run(Options((tmp_path,)))
