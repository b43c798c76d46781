"""The compiled kernel's cache: only what this user's compiler made is ever loaded."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from posenc.numbers import native

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    native.load.cache_clear()
    yield tmp_path / "posenc"
    native.load.cache_clear()


SOURCE = Path(__file__).with_name("seven.c")


def seven():
    return native.load(SOURCE, ("seven",))


def gives_seven() -> bool:
    """True if the library is there, and right."""
    native.load.cache_clear()
    library = seven()
    return library is not None and library.seven() == 7


def built(cache: Path) -> Path:
    assert gives_seven()
    (library,) = cache.glob("seven-*")
    return library


def foreign(folder: Path) -> tuple[bytes, Path]:
    """A library that leaves a file behind when it is loaded, and that file."""
    mark = folder / "ran"
    code = (
        f"#include <stdio.h>\nvoid seven() {{}}\n"
        f'__attribute__((constructor)) void run() {{ fclose(fopen("{mark}", "w")); }}\n'
    )
    (folder / "foreign.c").write_text(code)
    made = folder / "foreign.so"
    assert COMPILER
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", made, folder / "foreign.c"], check=True)
    return made.read_bytes(), mark


def plant(library: Path, content: bytes) -> Path:
    """In the library's place, under the name that such content would have."""
    stem = "-".join(library.name.split("-")[:2])
    planted = library.with_name(native._name(stem, content))
    library.unlink(missing_ok=True)
    planted.write_bytes(content)
    planted.chmod(0o700)
    return planted


def test_the_planted_library_of_these_tests_would_run(cache, tmp_path):
    content, mark = foreign(tmp_path)
    plant(built(cache), content)
    native.load.cache_clear()
    assert seven() is not None
    assert mark.exists()


@pytest.mark.parametrize("what", ["folder", "folder above", "owner of the folder"])
def test_nothing_is_loaded_from_a_folder_that_others_can_change(what, cache, tmp_path):
    content, mark = foreign(tmp_path)
    plant(built(cache), content)
    if what == "owner of the folder":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(cache, 4242, -1)
    else:
        (cache if what == "folder" else tmp_path).chmod(0o777)
    with pytest.warns(RuntimeWarning, match="kernel is not used: .*(belongs to|can write in)"):
        assert not gives_seven()
    assert not mark.exists()


@pytest.mark.parametrize("what", ["mode", "owner", "link", "content"])
def test_a_library_that_is_not_this_users_is_built_again(what, cache, tmp_path):
    content, mark = foreign(tmp_path)
    library = built(cache)
    planted = plant(library, content)
    if what == "mode":
        planted.chmod(0o777)
    elif what == "owner":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(planted, 4242, -1)
    elif what == "link":
        planted.unlink()
        planted.symlink_to(tmp_path / "foreign.so")
    else:  # under the name of another content
        planted.rename(library)
    assert gives_seven()
    assert not mark.exists()
    assert [p.name for p in cache.glob("seven-*")] == [library.name]


@pytest.mark.parametrize("damage", ["empty", "truncated", "a flipped bit"])
def test_a_damaged_library_is_built_again(damage, cache):
    library = built(cache)
    whole = library.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    library.unlink()  # this process has the old one in memory
    library.write_bytes({"empty": b"", "truncated": whole[:middle]}.get(damage, flipped))
    library.chmod(0o700)
    assert gives_seven()
    assert library.read_bytes() == whole


def test_a_library_without_the_functions_is_built_again(cache, tmp_path):
    assert COMPILER
    (tmp_path / "other.c").write_text("int other;\n")
    subprocess.run([COMPILER, "-shared", "-o", tmp_path / "other.so", tmp_path / "other.c"])
    library = built(cache)
    planted = plant(library, (tmp_path / "other.so").read_bytes())
    assert gives_seven()
    assert not planted.exists()


def test_a_relative_cache_folder_is_ignored(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert gives_seven()
    assert not (tmp_path / "relative").exists()
    assert list((tmp_path / "home" / ".cache" / "posenc").glob("seven-*.so"))


SHARED = """
#include <stdint.h>
#include <unistd.h>

typedef struct {
  int64_t *seen, *begins, *ended;
  const float *nothing;
  int64_t some[3];
  double half;
  int64_t fails;
} Arguments;

int mark(const Arguments *of, int64_t first, int64_t last) {
  of->begins[first] += 1;
  for (int64_t i = first; i < last; i++)
    of->seen[i] += of->some[0] + 10 * of->some[2] + (int64_t)(2 * of->half) + !of->nothing;
  if (of->fails && first == 0) return 1;
  if (of->fails) usleep(200000);
  *of->ended += of->fails;
  return 0;
}
"""


@pytest.fixture
def mark(cache, tmp_path):
    source = tmp_path / "shared.c"
    source.write_text(SHARED, encoding="utf-8")
    library = native.load(source, ("mark",))
    assert library is not None
    before, forget = torch.get_num_threads(), native._openmp.cache_clear
    forget()
    yield library.mark
    torch.set_num_threads(before)
    forget()


@pytest.mark.parametrize("way", ["OpenMP", "executor"])
@pytest.mark.parametrize(("threads", "most"), [(1, None), (2, None), (3, None), (4, 1), (2, 3)])
def test_every_piece_of_work_is_done_once_by_the_threads_that_there_are(
    mark, way, threads, most, monkeypatch
):
    if way == "executor":
        monkeypatch.setattr(native, "_openmp", lambda: None)
    elif native._openmp() is None:
        pytest.skip("torch shows no OpenMP here")
    torch.set_num_threads(threads)
    seen, begins, ended = torch.zeros(3, 10, dtype=torch.int64)
    native.run(mark, 10, seen, begins, ended, None, (3, 4, 5), 0.5, 0, threads=most)
    assert (seen == 3 + 50 + 1 + 1).all()
    assert begins.sum() == (most or threads)


def test_as_many_threads_as_pieces_at_most(mark):
    torch.set_num_threads(3)
    seen, begins, ended = torch.zeros(3, 10, dtype=torch.int64)
    native.run(mark, 2, seen, begins, ended, None, (1, 0, 0), 0.0, 0)
    assert seen.tolist() == [2, 2] + 8 * [0] and begins.sum() == 2
    native.run(mark, 0, seen, begins, ended, None, (1, 0, 0), 0.0, 0)
    assert seen.sum() == 4


def test_a_size_that_a_trace_turned_into_a_tensor_is_no_place(mark):
    seen, begins, ended = torch.zeros(3, 10, dtype=torch.int64)
    with pytest.raises(TypeError, match="a trace looks"):
        native.run(mark, 2, seen, begins, ended, None, (torch.tensor(1), 0, 0), 0.0, 0)
    assert not seen.any()


ADD = """
#include <stdint.h>
typedef struct { const float *from; int64_t step; float *to; } Arguments;
int add(const Arguments *of, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; i++) of->to[i] += of->from[i * of->step];
  return 0;
}
"""


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda: torch.complex(torch.zeros(3), torch.arange(3.0)).conj().imag, [0, -1, -2]),
        (lambda: torch._efficientzerotensor(3), [0, 0, 0]),
        (lambda: torch.arange(6.0)[::2], [0, 2, 4]),
    ],
    ids=["negated", "efficient zeros", "plain"],
)
def test_c_reads_the_numbers_that_torch_would(cache, tmp_path, make, want):
    """A negated view lies in memory with the other sign, efficient zeros lie nowhere."""
    (tmp_path / "add.c").write_text(ADD, encoding="utf-8")
    library, given, to = native.load(tmp_path / "add.c", ("add",)), make(), torch.full((3,), 7.0)
    assert library is not None
    native.run(library.add, 3, given, given.stride(0), to)
    assert to.tolist() == [7 + number for number in want]


@pytest.mark.parametrize("way", ["OpenMP", "executor"])
def test_no_part_goes_on_after_another_failed(mark, way, monkeypatch):
    """What a part writes into is freed once the error is seen."""
    if way == "executor":
        monkeypatch.setattr(native, "_openmp", lambda: None)
    torch.set_num_threads(2)
    seen, begins, ended = torch.zeros(3, 10, dtype=torch.int64)
    with pytest.raises(MemoryError, match="mark"):
        native.run(mark, 2, seen, begins, ended, None, (1, 0, 0), 0.0, 1)
    assert ended[0] == 1


def test_a_changed_header_is_another_library(tmp_path, monkeypatch):
    source = tmp_path / "some.c"
    source.write_text("int one(void) { return 1; }", encoding="utf-8")
    monkeypatch.setattr(native, "HEADERS", tmp_path)
    found = []
    for content in ("", "#define A 1", "#define A 2"):
        if content:
            (tmp_path / "shared.h").write_text(content, encoding="utf-8")
        found.append(native._fingerprint(source, "cc"))
    assert len(set(found)) == 3


def complaints(source: Path, *flags: str) -> str:
    """What the compiler has to say about a C file."""
    assert COMPILER
    wanted = "-Wall", "-Wextra", "-fsyntax-only", f"-I{native.HEADERS}"
    command = [COMPILER, *native.FLAGS, *wanted, *flags, str(source)]
    return subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.parametrize("flags", [(), ("-U__AVX512BF16__",)], ids=["here", "no bfloat16"])
def test_every_c_file_compiles_without_a_warning(flags):
    """Elsewhere one that does not is taken for a machine without a compiler, and tests skip."""
    sources = sorted(Path(native.__file__).parents[1].rglob("*.c"))
    assert len(sources) >= 8
    assert [complaints(source, *flags) for source in sources] == [""] * len(sources)


def test_a_c_file_with_a_fault_does_not_pass(tmp_path):
    for fault in ("int one(void) { return two; }", "int one(int a) { return 1; }"):
        (tmp_path / "some.c").write_text(fault, encoding="utf-8")
        assert complaints(tmp_path / "some.c")
