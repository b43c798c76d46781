"""A GGUF file, or a pipe, cannot make the doctor wait, or allocate many times its size."""

import json
import math
import os
import struct
import time
import tracemalloc

import pytest

from posenc.doctor.command import Options
from posenc.runtimes.files import gguf_header
from posenc.runtimes.files.gguf_metadata import read_metadata
from tests.doctor.judging import run
from tests.doctor.threads import BASE

U32, F32, STRING, ARRAY = 4, 6, 8, 9
SOUND = {
    "context_length": (U32, 4096),
    "embedding_length": (U32, 64),
    "block_count": (U32, 2),
    "attention.head_count": (U32, 4),
    "rope.freq_base": (F32, 10000.0),
}


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name, *shape, kind=0, offset=0):
    """A tensor's line of the header."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


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
        header({**SOUND, "x": (ARRAY, struct.pack("<IQ", U32, 1 << 60))}),
        "values announced",
    ),
    "strings": (
        header({**SOUND, "x": (ARRAY, struct.pack("<IQ", STRING, 1 << 40))}),
        "values announced",
    ),
    "text": (
        header({**SOUND, "x": (STRING, struct.pack("<Q", 300_000_000))}),
        "bytes of text announced",
    ),
    "long text": (
        header({**SOUND, "x": (STRING, struct.pack("<Q", 1 << 40))}),
        "bytes of text announced",
    ),
    "text beyond the end": (
        header({**SOUND, "x": (ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 62))}),
        "it is cut",
    ),
    "many strings": (
        header({**SOUND, "x": (ARRAY, struct.pack("<IQ", STRING, 1 << 18) + bytes(8 << 18))}),
        None,
    ),
    "arrays in arrays": (
        header({**SOUND, "x": (ARRAY, struct.pack("<IQ", ARRAY, 1 << 60))}),
        "unknown type 9",
    ),
    "version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1, expected 2 or 3"),
    "version 4": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4, expected 2 or 3"),
    "words": (b"This is not a model at all, but a text.", "does not begin with GGUF"),
    "empty": (b"", "it is cut"),
    "cut": (header(SOUND)[:-3], "it is cut"),
    "twice": (
        header({}, pairs=3, tail=2 * (text("llama.x") + struct.pack("<IB", 0, 1))),
        "given twice",
    ),
    "alignment": (
        header({}, pairs=2, tail=text("general.alignment") + struct.pack("<II", U32, 7)),
        "general.alignment is 7",
    ),
    "dimensions": (
        header(SOUND, 1, tail=text("a") + struct.pack("<I", 5) + bytes(60)),
        "dimensions announced",
    ),
    "outside": (header(SOUND, 1, tail=tensor("a", 1 << 40)), "outside of the file"),
    "offset": (
        header(SOUND, 1, tail=tensor("a", 1, offset=5) + bytes(64)),
        "begins at no multiple of 32",
    ),
    "two tensors": (header(SOUND, 2, tail=2 * tensor("a", 1) + bytes(64)), "given twice"),
    "many factors": (
        header(SOUND, 1, tail=tensor("rope_freqs.weight", 1 << 17) + bytes(1 << 20)),
        "more than",
    ),
    "factors of a type": (
        header(SOUND, 1, tail=tensor("rope_freqs.weight", 8, kind=24) + bytes(64)),
        "must be floats",
    ),
    "tensors": (header(SOUND, tensors=1 << 50), "tensors announced"),
    "keys": (header(SOUND, pairs=1 << 50), "keys announced"),
    "nested": (
        header({**SOUND, "x": (ARRAY, struct.pack("<IQ", ARRAY, 1) * 9)}),
        "unknown type 9",
    ),
    "nan": (header({**SOUND, "rope.freq_base": (F32, math.nan)}), "freq_base must be a number"),
    "negative": (header({**SOUND, "rope.freq_base": (F32, -1.0)}), "freq_base must be a number"),
    "zero": (header({**SOUND, "rope.scaling.factor": (F32, 0.0)}), "factor must be a number"),
    "a word": (
        header({**SOUND, "context_length": (STRING, text("4096"))}),
        "context_length must be a num",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_sentence_and_at_once(tmp_path, name):
    data, words = HOSTILE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    began = time.perf_counter()
    if words is None:  # many, and sound
        assert run(Options((path,)))[1] == 0
        return
    with pytest.raises(ValueError, match=words) as refused:
        run(Options((path,)))
    assert time.perf_counter() - began < 5 and "\n" not in str(refused.value)


def test_a_sound_header_passes(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(header(SOUND))
    assert run(Options((path,)))[1] == 0


def vocabulary(tokens, length):
    """Keys of a tokenizer with this many tokens: texts, scores, types and merges."""
    one = struct.pack("<Q", length) + b"t" * length
    texts = struct.pack("<IQ", STRING, tokens) + one * tokens
    return {
        "tokens": (ARRAY, texts),
        "scores": (ARRAY, struct.pack("<IQ", F32, tokens) + bytes(4 * tokens)),
        "types": (ARRAY, struct.pack("<IQ", U32, tokens) + bytes(4 * tokens)),
        "merges": (ARRAY, texts),
    }


LARGE = {
    "a vocabulary": (lambda n: header({**SOUND, **vocabulary(n, 9)}), 1_000_000),
    "empty texts": (
        lambda n: header({**SOUND, "x": (ARRAY, vocabulary(n, 0)["tokens"][1])}),
        6_000_000,
    ),
    "keys": (
        lambda n: header(
            SOUND,
            pairs=n + 6,
            tail=b"".join(text(f"{i:x}") + struct.pack("<IB", 0, 1) for i in range(n)),
        ),
        60_000,
    ),
    "tensors": (
        lambda n: header(
            SOUND, n, tail=b"".join(tensor(f"{i:x}", 0) for i in range(n)) + bytes(64)
        ),
        60_000,
    ),
}
"""The header of a file with so many of something, and how many for 50 MB or as many as may be."""


def peak(path):
    """Bytes that reading allocates at most."""
    tracemalloc.start()
    try:
        read_metadata(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", LARGE)
def test_memory_is_bounded_by_the_size_of_the_file(tmp_path, name):
    make, _ = LARGE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(make(20_000))
    assert peak(path) < 20 * path.stat().st_size


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", LARGE)
def test_fifty_megabytes_take_three_seconds_at_most(tmp_path, name):
    make, count = LARGE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(make(count))
    began = time.process_time()
    read_metadata(path)
    assert time.process_time() - began < 3


def test_a_reader_that_keeps_every_text_is_seen(tmp_path, monkeypatch):
    """The bound of the memory fails where each token is built."""

    def keep(self, count):
        self.kept = [{"text": self.next_text()} for _ in range(count)]

    monkeypatch.setattr(gguf_header._Reader, "skip_texts", keep)
    with pytest.raises(AssertionError):
        test_memory_is_bounded_by_the_size_of_the_file(tmp_path, "empty texts")


def test_sizes_of_tensors_are_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    theirs = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {
        kind: sizes for kind, sizes in gguf_header.BLOCK_SIZES.items() if kind in theirs
    } == theirs


@pytest.mark.parametrize("endian", ["LITTLE", "BIG"])
def test_a_copy_keeps_every_other_byte_of_either_order(tmp_path, endian):
    gguf, np = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    path, out = tmp_path / "a.gguf", tmp_path / "b.gguf"
    writer = gguf.GGUFWriter(str(path), "llama", endianess=getattr(gguf.GGUFEndian, endian))
    for add, value in (
        ("context_length", 4096),
        ("embedding_length", 64),
        ("head_count", 4),
        ("block_count", 2),
        ("rope_freq_base", 1e4),
    ):
        getattr(writer, f"add_{add}")(value)
    writer.add_token_list(["a", "b\u00e9", ""])
    writer.add_token_scores([0.5, 1.5, -2.0])
    writer.add_bool("llama.flag", True)
    writer.add_tensor("a", np.arange(5, dtype=np.float32))
    writer.add_tensor("rope_freqs.weight", np.full(8, 2.0, np.float32))
    writer.add_tensor("b", np.arange(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    like = tmp_path / "config.json"
    like.write_text(
        json.dumps(
            {
                **BASE,
                "rope_theta": 1e4,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 1024,
                },
            }
        )
    )
    assert run(Options((path,), fix=True, out=out, like=like))[1] == 0
    before, after = (gguf.GGUFReader(str(p)) for p in (path, out))
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "llama.flag"):
        assert before.fields[name].contents() == after.fields[name].contents()
    data = {t.name: t.data for t in after.tensors}
    assert sorted(data) == ["a", "b", "rope_freqs.weight"]
    assert data["a"].tolist() == [0, 1, 2, 3, 4] and data["b"].tolist() == [0, 1, 2]
    offsets = [int(t.field.parts[-1][0]) for t in after.tensors]  # in order, without a gap
    assert offsets == [0, 32, 64]
    assert run(Options((out, like)))[1] == 0


def test_weights_that_are_a_pipe_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "rope_theta": 10000.0}))
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not an ordinary file"):
        run(Options((tmp_path,)))
