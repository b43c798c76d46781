"""Text that a tokenizer encodes, files of tokens, and what is refused of both."""

import dataclasses
import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import posenc
from posenc.compare.options import Options
from posenc.compare.plan.ngram_losses import table_losses
from posenc.compare.plan.plan import make_plan, with_text
from posenc.compare.trial.result_files import SPLITS, folder_of_text
from posenc.compare.trial.text_tokenizer import read_tokenizer
from posenc.compare.trial.windows import read_split, read_token_bytes
from tests.texts import prose
from tests.tokenizers_of_tests import byte_level, byte_order, identity, trained

pytestmark = pytest.mark.usefixtures("undrawn")

TINY = {"train_length": 8, "batch": 2, "width": 16, "layers": 1, "heads": 1, "test_lengths": "16"}
STORY = "Wale schlafen übers Meer. 鲸鱼在海里睡觉。\n" + prose(9000).decode()


def planned(tmp_path, **options):
    """The plan of a study on tokens, with its text, and the text's folder."""
    plan = with_text(make_plan(Options(["rope"], **TINY, **options)), tmp_path)
    assert plan.splits is not None
    plan.splits.write(tmp_path / "run")
    return plan, tmp_path / "run"


def splits_of(tmp_path, **options):
    """The tokens of each split, and the trial."""
    plan, folder = planned(tmp_path, **options)
    trial = plan.task_trials[0]
    parts = {s: read_split(folder, s, trial.corpus, trial.vocabulary) for s in SPLITS}
    return parts, trial, plan.splits


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(STORY, encoding="utf-8", newline="")
    return path


def test_a_tokenizer_of_bytes_gives_the_numbers_of_bytes(tmp_path, story, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {**TINY, "test_lengths": [16, 32], "steps": 12, "seeds": 1, "text": story}
    of_bytes = posenc.compare.run(["rope"], out="bytes", **small)
    of_tokens = posenc.compare.run(
        ["rope"], out="tokens", tokenizer=identity(tmp_path / "bytes.json"), **small
    )
    for a, b in zip(of_bytes.results, of_tokens.results, strict=True):
        for name in ("training", "by_length", "by_position", "far", "readings", "parameters"):
            assert getattr(a, name) == getattr(b, name), name
        assert a.readings and len(a.far) == 2
    assert of_tokens.corpus.test_tokens == of_bytes.corpus.test_bytes
    assert of_tokens.corpus.test_bytes == of_bytes.corpus.test_bytes
    assert of_tokens.trials[0].vocabulary == 257


def test_tokens_are_those_of_the_tokenizer_each_file_by_itself(tmp_path):
    (tmp_path / "text").mkdir()
    texts = {f"{i}.txt": f"{i}. {STORY[i * 40 :]}" for i in range(4)}
    for name, text in texts.items():
        (tmp_path / "text" / name).write_text(text, encoding="utf-8", newline="")
    path = trained(tmp_path / "bpe.json", STORY, 400)
    parts, trial, splits = splits_of(tmp_path, text=[str(tmp_path / "text")], tokenizer=path)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    end = theirs.get_vocab_size()
    assert (trial.vocabulary, trial.document_end) == (end + 1, end)
    for split in SPLITS:
        expected = []
        for name, start, stop in splits.stretches[split]:
            ids = theirs.encode(texts[name]).ids
            assert (start, stop) == (0, len(ids))
            expected += [*ids, end]
        assert parts[split].tolist() == expected
    info = splits.info
    size = sum(len(texts[name].encode()) for name, _, _ in splits.stretches["train"])
    assert (info.train_bytes, info.train_tokens) == (size, len(parts["train"]) - 2)


def test_special_tokens_padding_and_truncation_of_a_tokenizer_are_not_used(tmp_path, story):
    tokenizer = tokenizers.Tokenizer.from_file(str(trained(tmp_path / "bpe.json", STORY, 300)))
    tokenizer.add_special_tokens(["<s>", "<pad>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <s>", special_tokens=[("<s>", 300)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(pad_id=301, pad_token="<pad>", length=20_000)
    tokenizer.save(str(tmp_path / "bpe.json"))
    parts, trial, splits = splits_of(tmp_path, text=[str(story)], tokenizer=tmp_path / "bpe.json")
    ids = np.concatenate([part[:-1] for part in parts.values()])
    assert ids.max() < 300 and trial.vocabulary == 303
    total = splits.info.train_bytes + splits.info.valid_bytes + splits.info.test_bytes
    assert total == len(STORY.encode())


def sentencepiece(path: Path, prefix: bool) -> Path:
    """Write a tokenizer as that of Llama 2: letters, bytes for what it does not know, a mark for
    spaces, and with `prefix` a space in front."""
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz."]
    vocabulary = {name: i for i, name in enumerate([*names, "th", "▁th"])}
    merges = [("t", "h"), ("▁", "th")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    )
    spaces = [normalizers.Replace(" ", "▁")]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("prefix", [False, True])
def test_bytes_of_tokens_are_counted_in_sentencepiece_too(tmp_path, story, prefix):
    path = sentencepiece(tmp_path / "sp.json", prefix)
    plan, folder = planned(tmp_path, text=[str(story)], tokenizer=path)
    trial, info = plan.task_trials[0], plan.splits.info
    counts = read_token_bytes(folder, trial)
    total = info.train_bytes + info.valid_bytes + info.test_bytes
    assert total == len(STORY.encode()) + prefix  # the space in front
    assert counts[1:257].tolist() == [1.0] * 256  # bytes
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    assert counts[tokenizer.token_to_id("▁th")] == 3 and counts[trial.document_end] == 1


def test_a_chinese_letter_is_three_bytes_in_one_token(tmp_path):
    text = "鲸鱼在海里睡觉。" * 50
    tokenizer = read_tokenizer(trained(tmp_path / "bpe.json", text, 300))
    ids = tokenizer.encode("鲸鱼")
    assert tokenizer.bytes_of_tokens[ids].sum() == 6 and len(ids) <= 2


def test_a_folder_of_a_model_is_its_tokenizer(tmp_path, story):
    (tmp_path / "model").mkdir()
    trained(tmp_path / "model" / "tokenizer.json", STORY, 300)
    by_folder, trial, _ = splits_of(tmp_path, text=[str(story)], tokenizer=tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    by_file, same, _ = splits_of(tmp_path, text=[str(story)], tokenizer=path)
    assert trial == same and all(np.array_equal(by_folder[s], by_file[s]) for s in SPLITS)


def ids_of(count=6000, most=50):
    return np.random.default_rng(0).integers(0, most, count)


def write_ids(folder, ids, names=("train.bin", "val.bin"), dtype="<u2"):
    folder.mkdir(exist_ok=True)
    for name, part in zip(names, (ids[:5000], ids[5000:]), strict=False):
        if name.endswith(".npy"):
            np.save(folder / name, part.astype(dtype))
        else:
            part.astype(dtype).tofile(folder / name)
    return folder


@pytest.mark.parametrize("form", ["uint16", "uint32", "npy", "int64"])
def test_files_of_tokens_hold_the_same_text_in_every_form(tmp_path, form):
    names, options = ("train.bin", "val.bin"), {}
    dtype = {"uint16": "<u2", "uint32": "<u4", "npy": "<u2", "int64": "<i8"}[form]
    if form == "uint32":
        options = {"token_type": "uint32"}
    elif form != "uint16":
        names = ("train.npy", "val.npy")
    ids = ids_of()
    folder = write_ids(tmp_path / "data", ids, names, dtype)
    (folder / "meta.pkl").write_bytes(b"not read")
    parts, trial, splits = splits_of(tmp_path, tokens=[str(folder)], **options)
    assert (trial.vocabulary, trial.document_end, trial.tokenizer) == (51, 50, "")
    assert parts["train"].tolist() == [*ids[:5000], 50]
    held_out = [*parts["valid"][:-1], *parts["test"][:-1]]
    assert held_out == ids[5000:].tolist() and len(parts["valid"]) == 501
    assert splits.info.split == "by the names of files"
    assert (splits.info.train_tokens, splits.info.train_bytes) == (5000, 0)


def test_large_tokens_have_files_of_32_bits(tmp_path):
    ids = ids_of(most=100_000)
    folder = write_ids(tmp_path / "data", ids, dtype="<u4")
    parts, trial, _ = splits_of(tmp_path, tokens=[str(folder)], token_type="uint32")
    assert trial.vocabulary > 1 << 16 and parts["train"].tolist()[:5000] == ids[:5000].tolist()
    assert (folder_of_text(tmp_path / "run", trial.corpus) / "train.u32").is_file()


def test_files_without_a_purpose_are_split_as_texts_are(tmp_path):
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "book.npy", ids_of().astype(np.uint16))
    parts, _, splits = splits_of(tmp_path, tokens=[str(tmp_path / "data" / "book.npy")])
    assert splits.info.split == "by contiguous stretches"
    assert [*parts["train"][:-1], *parts["valid"][:-1], *parts["test"][:-1]] == ids_of().tolist()
    write_ids(tmp_path / "named", ids_of(), ("train_1.bin", "val_1.bin"))
    (ids_of(700)).astype("<u2").tofile(tmp_path / "named" / "test_1.bin")
    parts, _, _ = splits_of(tmp_path, tokens=[str(tmp_path / "named" / "*.bin")])
    assert [len(parts[s]) for s in SPLITS] == [5001, 1001, 701]


def test_the_end_of_a_document_is_one_of_the_tokens(tmp_path):
    folder = write_ids(tmp_path / "data", ids_of())
    parts, trial, _ = splits_of(tmp_path, tokens=[str(folder)], document_end=7)
    assert (trial.vocabulary, trial.document_end) == (50, 7)
    assert all(part[-1] == 7 for part in parts.values())
    plan, _ = planned(tmp_path, tokens=[str(folder)], document_end=7)
    assert not plan.notes[1:]  # the first is on one encoding
    without = write_ids(tmp_path / "without", np.where(ids_of() == 7, 8, ids_of()))
    plan, _ = planned(tmp_path, tokens=[str(without)], document_end=7)
    assert plan.notes[-1] == "--document-end 7 occurs nowhere: each file counts as one document."


def test_files_of_tokens_with_a_tokenizer_know_their_bytes(tmp_path):
    path = trained(tmp_path / "bpe.json", STORY, 400)
    ids = np.array(read_tokenizer(path).encode(STORY * 3))
    folder = write_ids(tmp_path / "data", np.concatenate([ids[:5000], ids[-1500:]]))
    plan, _ = planned(tmp_path, tokens=[str(folder)], tokenizer=path)
    trial, info = plan.task_trials[0], plan.splits.info
    assert trial.loss_unit == "byte" and info.train_tokens == 5000
    text = tokenizers.Tokenizer.from_file(str(path)).decode(ids[:4900].tolist())
    assert info.train_bytes > len(text.encode()) > 0.9 * info.train_bytes


def test_tables_of_tokens_lose_what_loops_find():
    train_ids, test_ids = ids_of(3000, 12) ** 2 % 17, ids_of(500, 12) ** 2 % 17
    test_ids[:3] = [18, 19, 18]  # never seen
    counts, pairs = Counter(train_ids.tolist()), Counter(pairwise(train_ids.tolist()))
    before = Counter(train_ids[:-1].tolist())
    bits, pair_bits = [], []
    for a, b in pairwise(test_ids.tolist()):
        single = (counts[b] + 1) / (3000 + 20)
        kinds = sum(first == a for first, _ in pairs)
        total = before[a] + kinds
        bits.append(-math.log2(single))
        pair_bits.append(-math.log2((pairs[a, b] + kinds * single) / total if total else single))
    expected = (np.mean(bits), np.mean(pair_bits))
    assert table_losses(train_ids, test_ids, 20) == pytest.approx(expected)


def test_the_report_speaks_of_tokens(tmp_path, story, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {**TINY, "test_lengths": [16, 32], "steps": 3, "seeds": 2, "text": story}
    path = trained(tmp_path / "bpe.json", STORY, 300)
    study = posenc.compare.run(["rope", "alibi"], out="run", tokenizer=path, **small)
    said = f"{study.recommendation} {study.limits}"
    assert "Too early to tell" in said and "token frequencies" in said and "bits per byte" in said
    assert "bytes" not in said and "documents kept apart" not in study.limits
    facts = json.loads(Path("run/study.json").read_text(encoding="utf-8"))
    assert facts["corpus"]["tokenizer"] == "bpe.json"
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "16 tokens" in page and "on 8 tokens at a time" in page
    for words in ("8 bytes", "16 bytes", "32 bytes", "far bytes", "length, bytes"):
        assert words not in page, words


def test_a_study_of_token_files_is_in_bits_per_token(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_ids(tmp_path / "data", ids_of())
    small = {**TINY, "test_lengths": [16], "steps": 3, "seeds": 2}
    study = posenc.compare.run(["rope", "alibi"], out="run", tokens=[str(folder)], **small)
    assert "bits per token" in study.recommendation and "byte" not in study.recommendation
    assert study.limits.endswith("to spread, was chosen for bits per byte.")
    loss = study.results[0].by_length[0].bits_per_byte
    assert loss == pytest.approx(math.log2(51), abs=0.5)  # random tokens
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "bits per token" in page
    assert "per byte" not in page.replace("chosen for bits per byte", "")


def lossy(path: Path) -> Path:
    """Write a tokenizer that makes letters small."""
    tokenizer = byte_level(models.BPE({c: i for i, c in enumerate(byte_order())}, []))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(path))
    return path


def without_names(path: Path) -> Path:
    """Write a tokenizer that gives back what it reads, but whose tokens are not named by it."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"the": 0, "cat": 1, "<>": 2}, "<>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    "make, why",
    [
        (lossy, r"does not give back the text of .*story.txt: in line 1 'Wale schla' becomes"),
        (without_names, "does not give back the text of .*story.txt: in line 1"),
        (lambda path: path, "is not there"),
        (lambda path: path.write_text("{}") and path, "is no tokenizer.json that can be read"),
        (lambda path: path.mkdir() or path, "no tokenizer. Put tokenizer.json"),
        (lambda path: path.write_bytes(b"\0\1") and path, "is no tokenizer.json"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_in_one_line(tmp_path, story, make, why):
    path = make(tmp_path / "t.json")
    with pytest.raises(ValueError, match=why) as refused:
        planned(tmp_path, text=[str(story)], tokenizer=path)
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def test_the_first_line_that_a_tokenizer_changes_is_named(tmp_path):
    path = tmp_path / "a.txt"
    lines = [prose(3000 + i)[-30:].decode() for i in range(800)]
    lines[400] = "but not Here"
    lines[401] = "and on"
    path.write_text("\n".join(lines), encoding="utf-8", newline="")
    with pytest.raises(ValueError, match=r"in line 401 .*not Here.* becomes .*not here"):
        planned(tmp_path, text=[str(path)], tokenizer=lossy(tmp_path / "t.json"))


def test_a_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " + prose(5000))
    with pytest.raises(ValueError, match=r"a.txt is not UTF-8 at byte 3, and .* reads text"):
        planned(tmp_path, text=[str(tmp_path / "a.txt")], tokenizer=identity(tmp_path / "t.json"))


def test_a_vocabulary_of_one_is_refused(tmp_path, story):
    tokenizers.Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "one.json"))
    with pytest.raises(ValueError, match="has a vocabulary of 1"):
        planned(tmp_path, text=[str(story)], tokenizer=tmp_path / "one.json")
    folder = write_ids(tmp_path / "data", np.full(6000, 3))
    with pytest.raises(ValueError, match="no two different tokens"):
        planned(tmp_path, tokens=[str(folder)])


def write_bin(path, content):
    path.write_bytes(content)
    return path


BAD_FILES = {
    "cut in the middle": ("a.bin", lambda p: p.write_bytes(ids_of().astype("<u2").tobytes()[:-1])),
    "every second token": ("a.bin", lambda p: ids_of(most=900).astype("<u4").tofile(p)),
    "is text": ("a.bin", lambda p: p.write_bytes(prose(6000))),
    "is a gzip file": ("a.bin", lambda p: p.write_bytes(b"\x1f\x8b" + bytes(6000))),
    "must end in .bin or .npy": ("a.pt", lambda p: p.write_bytes(bytes(6000))),
    "cannot be read as a .npy": ("a.npy", lambda p: p.write_bytes(b"\x93NUMPY")),
    "must have one axis of whole": ("a.npy", lambda p: np.save(p, np.ones(6000))),
    "got uint16 of shape": ("a.npy", lambda p: np.save(p, np.ones((60, 100), np.uint16))),
    "has the token -1, beyond": ("a.npy", lambda p: np.save(p, ids_of() - 1)),
    "any vocabulary's 4,194,304": ("a.npy", lambda p: np.save(p, ids_of() + 5_000_000)),
    "longer than the whole text, 5 tokens": ("a.npy", lambda p: np.save(p, ids_of(5))),
    "the text is too short: it has 100 tokens": ("a.npy", lambda p: np.save(p, ids_of(100))),
    "no two different tokens": ("a.bin", lambda p: p.write_bytes(b"")),
}


@pytest.mark.quick(len(BAD_FILES))
@pytest.mark.parametrize("why", BAD_FILES)
def test_a_file_that_holds_no_tokens_is_refused_in_one_line(tmp_path, why):
    name, write = BAD_FILES[why]
    write(tmp_path / name)
    with pytest.raises(ValueError, match=f"(?i){why}") as refused:
        planned(tmp_path, tokens=[str(tmp_path / name)])
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def test_a_file_cut_short_by_a_copy_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", ids_of())
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"cannot be read as a \.npy file"):
        planned(tmp_path, tokens=[str(tmp_path / "a.npy")])


def test_tokens_beyond_the_tokenizer_are_refused(tmp_path):
    path = trained(tmp_path / "bpe.json", STORY, 300)
    folder = write_ids(tmp_path / "data", ids_of(most=301))
    with pytest.raises(ValueError, match=r"has the token 300, beyond the tokenizer's 300"):
        planned(tmp_path, tokens=[str(folder)], tokenizer=path)


@pytest.mark.parametrize(
    "options, why",
    [
        ({"text": ["a"], "tokens": ["b"]}, "--text and --tokens: a study reads one or the other"),
        ({"document_end": 3}, "--document-end is a token, and a text of bytes has none"),
        ({"tokens": ["."], "token_type": "int8"}, "--token-type must be uint16 or uint32"),
        ({"tokens": ["nowhere.bin"]}, "No such file: nowhere.bin. --tokens takes files"),
        ({"tokens": ["x"], "task": ["copy"]}, "--tokens: none of the tasks reads a text"),
        ({"tokenizer": Path("x"), "task": ["copy"]}, "--tokenizer: none of the tasks"),
        ({"token_type": "uint32"}, "--token-type uint32 is that of files of --tokens"),
        ({"micro_batch": 33}, "--micro-batch 33 is more than the 32 windows of a step"),
        ({"micro_batch": 2, "task": ["copy"]}, "--micro-batch: none of the tasks reads a text"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=why):
        make_plan(Options(["rope"], **options))


def test_names_that_say_half_of_what_files_are_for_are_refused(tmp_path):
    folder = write_ids(tmp_path / "data", ids_of(), ("train.bin", "other.bin"))
    with pytest.raises(ValueError, match=r"other.bin begins with neither train, val nor test"):
        planned(tmp_path, tokens=[str(folder)])
    folder = write_ids(tmp_path / "train only", ids_of(), ("train.bin",))
    with pytest.raises(ValueError, match="train and val belong together"):
        planned(tmp_path, tokens=[str(folder)])
    folder = write_ids(tmp_path / "end", ids_of())
    with pytest.raises(ValueError, match=r"--document-end 50: the tokens are 0 to 49"):
        planned(tmp_path, tokens=[str(folder)], document_end=50)


def test_another_tokenizer_is_another_trial(tmp_path, story):
    first, second = (trained(tmp_path / f"{n}.json", STORY, n) for n in (300, 301))
    _, trial, _ = splits_of(tmp_path, text=[str(story)], tokenizer=first)
    _, other, _ = splits_of(tmp_path, text=[str(story)], tokenizer=second)
    assert trial.hash != other.hash and trial.tokenizer != other.tokenizer
    renamed = tmp_path / "renamed.json"
    renamed.write_bytes(first.read_bytes())
    _, same, _ = splits_of(tmp_path, text=[str(story)], tokenizer=renamed)
    assert dataclasses.replace(same) == trial
