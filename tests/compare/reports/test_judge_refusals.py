"""What posenc judge does not judge: one sentence each, and nothing is written."""

import math

import pytest

import posenc
from posenc.command_line import main as command_line

GOOD = """encoding,seed,length,loss
rope,0,128,3.21
rope,1,128,3.22
t5,0,128,3.01
t5,1,128,3.03
"""
REFUSED = {
    "an empty file": ("", "is empty"),
    "a header alone": ("encoding,seed,length,loss\n", "has no row below"),
    "no CSV": ("What is this?\n", "its first line has no comma"),
    "an open quote": (GOOD + '"t5,2,128,3.0\n', "line 6, is no CSV"),
    "tabs": (GOOD.replace(",", "\t"), "separated by tabs: expected commas"),
    "semicolons": (GOOD.replace(",", ";"), "separated by semicolons: expected commas"),
    "thousands": (GOOD.replace("128", "1,024"), "line 2, has 5 cells, and the header 4"),
    "thousands in quotes": (GOOD.replace("128", '"1,024"', 1), "line 2: length must be a whole"),
    "a decimal comma": (GOOD.replace("3.21", '"3,21"'), "loss must be a number with a decimal poi"),
    "a duplicate": (
        GOOD + "t5,1,128,3.04\n",
        "line 6: t5, seed 1, length 128 is there twice, first in line 5",
    ),
    "a missing loss": (GOOD.replace("3.22", ""), "line 3: it has no loss: write nan for a trial"),
    "a missing seed": (GOOD.replace("t5,1", "t5,"), "line 5: it has no seed"),
    "no encoding": (GOOD.replace("t5,1", ",1"), "line 5: it has no encoding"),
    "half a seed": (GOOD.replace("t5,1", "t5,0.5"), "seed must be a whole number of at least 0"),
    "one seed": ("encoding,seed,length,loss\nrope,0,8,3\nt5,0,8,2\n", "has one seed, of which no"),
    "one encoding": (
        "encoding,seed,length,loss\nrope,0,8,3\nrope,1,8,2\n",
        "has one encoding, rope",
    ),
    "uneven seeds": (GOOD + "t5,2,128,3.02\n", "rope lacks seed 2, which another encoding has"),
    "uneven lengths": (GOOD + "t5,0,512,3.0\n", "only one of them has length 512 as trained"),
    "no loss as trained": (
        GOOD.replace("\n", ",\n")
        .replace("loss,", "loss,reading")
        .replace("3.01,", "3.01,window")
        .replace("3.03,", "3.03,window"),
        "t5, seed 0, has no loss as trained at the training length 128",
    ),
    "an unknown column": (
        GOOD.replace("loss", "val_loss"),
        "has a column 'val_loss', which is none of",
    ),
    "several unknown columns": (
        GOOD.replace("encoding,seed", "pe,run"),
        "has columns 'pe' and 'run', which are none of encoding, seed, length, loss, bits, "
        "bits_per_token, bits_per_byte, reading, size, steps, seconds, task, position, nor a "
        "length: remove them, or say which they are, such as --columns encoding=pe",
    ),
    "the results.csv of a run": (
        "measure,at,bits_per_byte,encoding,seed,recipe\nby_length,128,1.9,rope,0,7\n",
        "is the results.csv of a run of posenc compare, with a row for each number: judge that run "
        "by posenc report FOLDER",
    ),
    "no seeds": (GOOD.replace("seed", "size"), "has no column 'seed'"),
    "two columns of one name": (GOOD.replace("length", "seed"), "has two columns 'seed': keep one"),
    "no loss": ("encoding,seed,length\nrope,0,8\n", "must have losses in one of the columns"),
    "mixed units": (
        "encoding,seed,length,loss,bits\nrope,0,8,3,4\n",
        "it has bits and loss, which do not mix",
    ),
    "mixed units by length": (
        "encoding,seed,loss_8,bits_16\nrope,0,3,4\n",
        "it has bits and loss, which do not mix",
    ),
    "long and wide": ("encoding,seed,length,512\nrope,0,8,3\n", "and has both"),
    "no length": ("encoding,seed,loss\nrope,0,3\n", "and has neither"),
    "a perplexity": (GOOD.replace("3.21", "812.5"), "of a perplexity give its logarithm"),
    "a negative loss": (GOOD.replace("3.21", "-3.21"), "loss must be from 0 to 69 nats per token"),
    "a reading": (
        "encoding,seed,length,loss,reading\nrope,0,8,3,windowed\n",
        "reading must be trained or window or tuned, got 'windowed'",
    ),
    "a position outside": (
        "encoding,seed,length,loss,position\nrope,0,8,3,8\n",
        "position 8 is not in a window of length 8",
    ),
    "a size": (
        "encoding,seed,length,loss,size\nrope,0,8,3,big\n",
        "size must be a number of param",
    ),
    "models of other sizes": (
        "encoding,seed,length,loss,size\nrope,0,8,3,1M\nrope,1,8,3.1,1M\nt5,0,8,3,2M\nt5,1,8,3.2,2M\n",
        "have models of 1,000,000 to 2,000,000 parameters",
    ),
    "other steps": (
        "encoding,seed,length,loss,steps\nrope,0,8,3,10\nrope,1,8,3.1,10\nt5,0,8,3,20\nt5,1,8,3.2,20\n",
        "rope, seed 0, ends after 10 steps and t5, seed 0, after 20",
    ),
    "two times of a trial": (
        "encoding,seed,length,loss,seconds\nrope,0,8,3,1\nrope,0,16,3,2\nrope,1,8,3.1,1\n"
        "rope,1,16,3.1,1\nt5,0,8,3,1\nt5,1,8,3,1\n",
        "rope, seed 0, length 8, has more than one value of seconds: 1.0 and 2.0",
    ),
    "far losses of one encoding only": (
        GOOD.replace("loss\n", "loss,position\n")
        .replace("1\n", "1,\n")
        .replace("2\n", "2,\n")
        .replace("3\n", "3,\n")
        + "rope,0,512,3.3,384\nrope,1,512,3.3,384\nt5,0,512,3.3,0\nt5,1,512,3.3,0\n",
        "at length 512, rope has losses by position from 384 on, and t5 has none from there",
    ),
    "a long task": ("encoding,seed,8,task\nrope,0,3," + 101 * "x", "at most 100 letters"),
    "two rows of one name": (
        "encoding,seed,8,reading\nrope,0,3.0,\nrope,1,3.1,\nrope,0,2.9,window\n"
        "rope,1,2.8,window\nrope in a window,0,2.7,\nrope in a window,1,2.6,\n",
        "two rows would be named 'rope in a window'",
    ),
    "two tasks": (
        "encoding,seed,length,loss,task\nrope,0,8,3,code\nrope,0,8,3,novel\n",
        "has losses of code and novel, which are judged one by one: give --task code",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_that_cannot_be_judged_is_refused(case, tmp_path, monkeypatch, capsys):
    text, expected = REFUSED[case]
    path = tmp_path / "losses.csv"
    path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        command_line.main(["judge", "losses.csv"])
    shown = capsys.readouterr()
    assert stop.value.code == 2 and shown.out == ""
    assert shown.err.count("\n") == 1 and shown.err.startswith("posenc: ")
    assert expected in shown.err
    assert [each.name for each in tmp_path.iterdir()] == ["losses.csv"]


def test_a_file_of_bytes_is_refused(tmp_path):
    path = tmp_path / "losses.csv"
    path.write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(ValueError, match="is no CSV file: it is not text in UTF-8"):
        posenc.compare.judge(path)


def test_the_mark_of_a_spreadsheet_and_its_line_ends_are_read(tmp_path):
    plain, marked = tmp_path / "plain.csv", tmp_path / "marked.csv"
    plain.write_text(GOOD, encoding="utf-8")
    marked.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode() + b"\r\n")
    judged = posenc.compare.judge(marked)
    assert judged.recommendation == posenc.compare.judge(plain).recommendation


@pytest.mark.parametrize("table", [None, 3, {"encoding": ["rope"]}, [3], "no such file.csv"])
def test_what_is_no_table_is_refused(table):
    with pytest.raises((TypeError, FileNotFoundError)):
        posenc.compare.judge(table)


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf", "NaN"])
def test_a_loss_that_is_not_finite_is_a_failed_trial(loss, tmp_path):
    path = tmp_path / "losses.csv"
    path.write_text(GOOD.replace("3.03", loss) + "alibi,0,128,3.1\nalibi,1,128,3.118\n")
    judged = posenc.compare.judge(path)
    assert judged.recommendation.startswith("Failed trials: t5 1 of 2; not judged. alibi leads")
    assert judged.failed[0].reason == f"the loss at 128 is {float(loss)}"


def test_columns_have_other_names(tmp_path):
    path = tmp_path / "losses.csv"
    path.write_text(GOOD.replace("encoding", "pe").replace("loss", "val_loss"))
    judged = posenc.compare.judge(path, columns={"encoding": "pe", "loss": "val_loss"})
    (near,) = judged.summary[0].by_length
    assert near.mean == pytest.approx((3.21 + 3.22) / 2 / math.log(2))
    with pytest.raises(ValueError, match="has no column 'valid'; it has 'pe', 'seed', 'length'"):
        posenc.compare.judge(path, columns={"loss": "valid"})
    with pytest.raises(ValueError, match="'losses' is none of encoding, seed, length, loss"):
        posenc.compare.judge(path, columns={"losses": "val_loss"})


def test_the_training_length_is_said_or_the_shortest(tmp_path):
    path = tmp_path / "losses.csv"
    path.write_text(
        "encoding,seed,128,512\nrope,0,3.2,3.3\nrope,1,3.21,3.31\nt5,0,3.0,3.1\nt5,1,3.01,3.12\n"
    )
    judged = posenc.compare.judge(path)
    assert judged.trials[0].test_lengths == (128, 512)
    assert "The shortest length, 128, is taken as that of training" in judged.table.notes[1]
    judged = posenc.compare.judge(path, trained_length=512)
    assert judged.trials[0].test_lengths == (512,)
    assert judged.table.notes[1] == "Losses at 128, below the training length, are left out."
    with pytest.raises(
        ValueError, match="must be one of the table's lengths, 128 and 512, got 256"
    ):
        posenc.compare.judge(path, trained_length=256)
