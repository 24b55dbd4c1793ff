"""Compiled programs are native code: where they are kept, who may have written them, and what happens if they can't be.

Most cases take a stand-in for the compiler, which is slow; those with the compiler itself share what it has made once.
"""

import errno
import functools
import getpass
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_compiled import OPTIONS, assert_is_the_models, assert_same
from test_generation import SOURCES, lively_model, padded
from test_incremental import varied

from hf_vanilla_transformer.engine import program_cache
from hf_vanilla_transformer.engine.decoding import compiled
from hf_vanilla_transformer.engine.decoding.compiled import program_of
from hf_vanilla_transformer.engine.decoding.weights import Weights

IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
AS_ROOT = pytest.mark.skipif(not IS_ROOT, reason="only root can give a file to another user")
SOMEBODY = 12_345  # the number of another user

# Idle, two programs take a minute and a half.
MINUTES_FOR_THE_COMPILER = pytest.mark.timeout(1800)

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have other owners here")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where programs are kept; not there yet."""
    monkeypatch.setenv("HF_VANILLA_TRANSFORMER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "programs"


@pytest.fixture
def said(caplog):
    """Returns the warnings since the last call."""
    logging.Logger.warning_once.cache_clear()

    def take():
        messages = [record.getMessage() for record in caplog.records if record.name.startswith("hf_vanilla")]
        caplog.clear()
        return messages

    return take


class Compiler:
    """In place of the compiler and the loader: a program is a file that tells its number.

    Attributes:
        runs: For each run, where the compiler keeps its files.
        error: What it raises, if anything.
        loaded: The files that were loaded.
    """

    def __init__(self):
        self.runs, self.loaded, self.error = [], [], None

    def compile(self, weights, kind, folder):
        self.runs.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        library = folder / "program.so"
        library.write_text(f"{kind} {len(self.runs)} {'x' * 100_000}")
        if self.error is not None:
            raise self.error
        return library

    def load(self, path):
        self.loaded.append(path)
        return path.read_text().rstrip(" x")


@pytest.fixture
def compiler(monkeypatch):
    stand_in = Compiler()
    monkeypatch.setattr(compiled, "_check_compiler", lambda: None)
    monkeypatch.setattr(compiled, "_compile", stand_in.compile)
    monkeypatch.setattr(compiled, "_load", stand_in.load)
    return stand_in


@functools.cache
def lively():
    return lively_model()


def program(rows=1):
    """What a new process would run for a batch."""
    return program_of(Weights(lively(), "compiled"), rows)


@pytest.fixture
def kept(folder, compiler, said):
    """The file of a program that was compiled before."""
    assert program() == "few 1"
    said()
    compiler.loaded.clear()
    (path,) = folder.iterdir()
    return path


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


# ---- the folder ----


def test_the_folder_is_the_users_own(compiler, tmp_path, monkeypatch):
    """In the platform's cache directory, private from its creation, whatever the umask."""
    monkeypatch.delenv("HF_VANILLA_TRANSFORMER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "caches"))
    monkeypatch.setattr(sys, "platform", "linux")
    umask = os.umask(0o002)
    try:
        assert program() == "few 1"
    finally:
        os.umask(umask)
    caches = tmp_path / "new" / "caches"
    (path,) = (caches / "hf_vanilla_transformer" / "programs").iterdir()
    assert mode(path) == 0o600
    folders = [tmp_path / "new", caches, caches / "hf_vanilla_transformer", path.parent]
    assert [mode(one) for one in folders] == [0o700] * 4
    assert program() == "few 1"
    assert len(compiler.runs) == 1


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "home/.cache/hf_vanilla_transformer/programs"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "home/.cache/hf_vanilla_transformer/programs"),
        ("darwin", {}, "home/Library/Caches/hf_vanilla_transformer/programs"),
        ("win32", {}, "home/AppData/Local/hf_vanilla_transformer/programs"),
        ("win32", {"LOCALAPPDATA": "{}/local"}, "local/hf_vanilla_transformer/programs"),
        ("linux", {"HF_VANILLA_TRANSFORMER_CACHE": "{}/mine", "XDG_CACHE_HOME": "{}/xdg"}, "mine/programs"),
        ("linux", {"HF_VANILLA_TRANSFORMER_CACHE": "~/mine"}, "home/mine/programs"),
    ],
)
def test_where_it_is(platform, variables, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable in ("HF_VANILLA_TRANSFORMER_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value.format(tmp_path))
    monkeypatch.setattr(sys, "platform", platform)
    assert program_cache.programs_folder() == (tmp_path / expected).resolve()


def assert_not_loaded(place, compiler, said, *, reason, fix):
    """Nothing is loaded or written, and one warning for both programs names the place, the reason and the fix."""
    before = sorted(place.rglob("*"))
    assert program(1) is None
    assert program(100) is None
    (message,) = said()
    assert str(place) in message
    assert reason in message
    assert fix in message
    assert "\n" not in message
    assert compiler.loaded == compiler.runs == []
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_may_write(bits, kept, compiler, said):
    compiler.runs.clear()
    kept.parent.chmod(bits)
    reason = f"other users may write to {kept.parent}, so"
    assert_not_loaded(kept.parent, compiler, said, reason=reason, fix=f"run `chmod go-w {kept.parent}`")
    kept.parent.chmod(0o755)
    assert program() == "few 1"
    assert said() == compiler.runs == []


def test_a_folder_above_that_others_may_write(kept, compiler, said):
    """They could put another one in its place; in a sticky folder, as /tmp is, they can't."""
    above = kept.parent.parent
    above.chmod(0o1777)
    assert program() == "few 1"
    compiler.runs.clear()
    compiler.loaded.clear()
    above.chmod(0o777)
    assert_not_loaded(above, compiler, said, reason="may write", fix=f"run `chmod go-w {above}`")


@pytest.mark.parametrize("levels", [0, 1])
@AS_ROOT
def test_a_folder_of_another_user(levels, kept, compiler, said):
    compiler.runs.clear()
    place = [kept.parent, kept.parent.parent][levels]
    os.chown(place, SOMEBODY, -1)
    reason, fix = f"belongs to another user (number {SOMEBODY})", "environment variable HF_VANILLA_TRANSFORMER_CACHE"
    assert_not_loaded(place, compiler, said, reason=reason, fix=fix)


def test_a_folder_of_another_user_for_those_who_are_not_root(kept, compiler, said, monkeypatch):
    """Not even root's folder will do: nothing there was compiled by this user."""
    compiler.runs.clear()
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    reason = f"belongs to another user (number {kept.stat().st_uid})"
    assert_not_loaded(kept.parent, compiler, said, reason=reason, fix="HF_VANILLA_TRANSFORMER_CACHE")


def test_a_folder_behind_a_link(kept, compiler, said, tmp_path, monkeypatch):
    """What the link leads to is looked at, and the folders above that."""
    link = tmp_path / "link"
    link.symlink_to(kept.parent.parent)
    monkeypatch.setenv("HF_VANILLA_TRANSFORMER_CACHE", str(link))
    assert program() == "few 1"
    assert said() == []
    compiler.runs.clear()
    compiler.loaded.clear()
    kept.parent.parent.chmod(0o777)
    assert_not_loaded(kept.parent.parent, compiler, said, reason="may write", fix="chmod go-w")


def test_nothing_is_loaded_from_where_programs_used_to_be(folder, compiler, said, tmp_path, monkeypatch):
    program()
    (path,) = folder.iterdir()
    old = tmp_path / "inductor" / "vanilla_transformer"
    old.mkdir(parents=True)
    for name in (path.name, f"{path.name[:-68]}.pt2"):
        (old / name).write_text("planted")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(old.parent))
    path.unlink()
    assert program() == "few 2"
    assert all(one.parent == folder for one in compiler.loaded)


# ---- a program ----


def write_to(change):
    def apply(path):
        content = bytearray(path.read_bytes())
        change(content)
        path.write_bytes(content)

    return apply


def zeros(content):
    content[10_000:75_536] = bytes(65_536)


def one_bit(content):
    content[50_000] ^= 1


def link_it(path):
    elsewhere = path.parent.parent / path.name
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def without_digest(path):
    path.rename(path.with_name(f"{path.name[:-68]}.so"))


def of_another_digest(path):
    path.rename(path.with_name(f"{path.stem[:-4]}0000.so"))


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "64 KB of zeros": (write_to(zeros), "is damaged: its content doesn't match the SHA-256 in its name"),
    "one bit": (write_to(one_bit), "is damaged"),
    "cut short": (write_to(lambda content: content.__delitem__(slice(5_000, None))), "is damaged"),
    "longer": (write_to(lambda content: content.extend(b"\0")), "is damaged"),
    "empty": (write_to(bytearray.clear), "is damaged"),
    "no digest": (without_digest, "is damaged"),
    "another digest": (of_another_digest, "is damaged"),
    "writable for the group": (lambda path: path.chmod(0o660), "may be written by other users"),
    "writable for all": (lambda path: path.chmod(0o606), "may be written by other users"),
    "a link": (link_it, "is not a file"),
    "a pipe": (a_pipe, "is not a file"),
}
if IS_ROOT:
    DAMAGES["another user's"] = (lambda path: os.chown(path, SOMEBODY, -1), "belongs to another user (number 12345)")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_program_that_must_not_be_loaded(damage, kept, compiler, said):
    """It is removed and compiled anew, with a warning; what is loaded then is only the new one."""
    apply, reason = DAMAGES[damage]
    apply(kept)
    (path,) = kept.parent.iterdir()
    assert program() == "few 2"
    refused, compiling = said()
    assert refused.startswith(f"{path} {reason}")
    assert refused.endswith("; the decoder is compiled anew.")
    assert compiling.startswith("Compiling the decoder")
    (new,) = kept.parent.iterdir()
    assert compiler.loaded == [new]
    assert (mode(new), new.read_text()[:5]) == (0o600, "few 2")
    assert program() == "few 2"
    assert said() == []


def test_a_folder_in_the_place_of_a_program(kept, compiler, said):
    kept.unlink()
    kept.mkdir()
    assert program() == "few 2"
    assert "is not a file" in said()[0]


# ---- the compiler's own files ----


def test_the_compiler_works_in_a_private_folder(folder, compiler, monkeypatch):
    """Beside the programs, and no longer than it takes; then the environment is what it was."""
    modes = []
    compile_before = compiler.compile

    def look(weights, kind, place):
        modes.append((mode(place), place.parent))
        return compile_before(weights, kind, place)

    monkeypatch.setattr(compiled, "_compile", look)
    for number, value in enumerate([None, "/somewhere/else"]):
        if value is None:
            monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        else:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", value)
        program([1, 100][number])
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == value
    assert modes == [(0o700, folder)] * 2
    assert len(set(compiler.runs)) == 2
    assert len(list(folder.iterdir())) == 2
    assert not any(place.exists() for place in compiler.runs)


def test_threads_at_once(folder, compiler, monkeypatch):
    """They share a program that is compiled once; another model's is compiled afterwards, as the environment is one."""
    compile_before, at_work = compiler.compile, []

    def slowly(*arguments):
        at_work.append(len(at_work))
        time.sleep(0.1)
        assert len(at_work) == 1
        at_work.pop()
        return compile_before(*arguments)

    monkeypatch.setattr(compiled, "_compile", slowly)
    one, other = Weights(lively(), "compiled"), Weights(varied(), "compiled")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda weights: program_of(weights, 1), (one, other, one, other)))
    assert sorted(found) == ["few 1", "few 1", "few 2", "few 2"]
    assert len(list(folder.iterdir())) == 2


SLEEPING = """
import sys, time
from hf_vanilla_transformer.engine import program_cache
with program_cache.workspace(program_cache.programs_folder()) as place:
    (place / "part.o").write_text("half an object")
    print(place, flush=True)
    time.sleep(3600)
"""


@pytest.mark.slow
def test_what_a_killed_compilation_left_over_is_removed(folder, compiler):
    """And what one that is still at work needs is not, however long it takes."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPING], stdout=subprocess.PIPE, text=True)
    try:
        place = Path(process.stdout.readline().strip())
        os.utime(place, times=(time.time() - 3600,) * 2)
        assert program(1) == "few 1"
        assert (place / "part.o").exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert (place / "part.o").exists()
    assert program(100) == "many 2"
    assert len(list(folder.iterdir())) == 2
    assert not place.exists()


def test_left_over_folders(folder, compiler, monkeypatch):
    """One that has no lock yet may be new; where there are no locks, a day must have passed."""
    folder.mkdir(parents=True, mode=0o700)
    ages = {"new": 0, "of_a_minute": 60, "of_two_days": 2 * 24 * 60 * 60}
    for locks, gone in ((True, {"of_a_minute", "of_two_days"}), (False, {"of_two_days"})):
        if not locks:
            monkeypatch.setattr(program_cache, "fcntl", None)
        for name, age in ages.items():
            place = folder / f".compiling-{name}"
            place.mkdir(exist_ok=True)
            (place / "part.o").write_text("half an object")
            os.utime(place, times=(time.time() - age,) * 2)
        assert program(1 if locks else 100) is not None
        assert {name for name in ages if not (folder / f".compiling-{name}").exists()} == gone
    assert len(list(folder.glob("*.so"))) == 2


# ---- where there can't be a program ----


def no_folder(monkeypatch, compiler, folder):
    folder.parent.write_text("a file")
    return "there is no folder for compiled programs"


def no_home(monkeypatch, compiler, folder):
    def home():
        raise RuntimeError("Could not determine home directory.")

    for variable in ("HF_VANILLA_TRANSFORMER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", home)
    return "there is no folder for compiled programs (Could not determine home directory.)"


def a_space(monkeypatch, compiler, folder):
    monkeypatch.setenv("HF_VANILLA_TRANSFORMER_CACHE", f"{folder.parent} of mine")
    return f"PyTorch's compiler can't use {folder.parent} of mine/programs, which has a space or a quote"


def no_execution(monkeypatch, compiler, folder):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID))
    return f"{folder} is mounted noexec"


def read_only(monkeypatch, compiler, folder):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", f"{folder}/.compiling-{time.time()}")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    return f"{folder} can't be written (Read-only file system)"


def full(monkeypatch, compiler, folder):
    compiler.error = OSError(errno.ENOSPC, "No space left on device")
    return f"{folder} can't be written (No space left on device); give permission or make room there"


def full_for_the_compiler(monkeypatch, compiler, folder):
    text = "/a.cpp: In function f:\n/a.cpp: Fatal error: can't write 9 bytes: 'No space left on device'"
    compiler.error = ChildProcessError(f"CppCompileError: C++ compile error\n\nOutput:\n{text}")
    return "(/a.cpp: Fatal error: can't write 9 bytes: 'No space left on device')"


def fails(monkeypatch, compiler, folder):
    compiler.error = RuntimeError("CppCompileError: C++ compile error\nx.cpp:1:10: fatal error: Python.h: No such file")
    return f"compiling in {folder} failed (x.cpp:1:10: fatal error: Python.h: No such file); repair the C++ compiler"


def not_moved(monkeypatch, compiler, folder):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "replace", refuse)
    return f"{folder} can't be written (Operation not permitted)"


def not_executable(monkeypatch, compiler, folder):
    def refuse(path):
        raise RuntimeError("failed to map segment from shared object")

    monkeypatch.setattr(compiled, "_load", refuse)
    return "failed to map segment from shared object"


CONDITIONS = [
    no_folder,
    no_home,
    a_space,
    no_execution,
    read_only,
    full,
    full_for_the_compiler,
    fails,
    not_moved,
    not_executable,
]
if not hasattr(os, "ST_NOEXEC"):  # macOS
    CONDITIONS.remove(no_execution)


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda one: one.__name__)
def test_decoding_goes_on_without(condition, folder, compiler, said, monkeypatch):
    """The output is the same, one warning says why and what to do, and no folder is left over."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    reason = condition(monkeypatch, compiler, folder)
    model = lively_model()
    for options in OPTIONS:
        assert_same(model, padded(SOURCES[:1]), {"max_extra_length": 6, **options})
        assert_same(model, padded(SOURCES * 3), {"max_extra_length": 6, **options})
    (message,) = [one for one in said() if not one.startswith("Compiling the decoder")]
    assert message.startswith('`compute_type="compiled"` decodes without compiling, which is slower: ')
    assert reason in message
    assert "HF_VANILLA_TRANSFORMER_CACHE" in message
    assert "\n" not in message
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
    assert not list(folder.glob(".*"))
    assert len(compiler.runs) <= 2, "each program is tried once"


def test_a_program_in_a_read_only_folder_is_loaded(kept, compiler, said, monkeypatch):
    read_only(monkeypatch, compiler, kept.parent)
    kept.parent.chmod(0o500)
    assert program() == "few 1"
    assert said() == []


# ---- the compiler itself ----


GENERATE = """
import json, sys, torch
from transformers import AutoModelForSeq2SeqLM
import hf_vanilla_transformer
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])
for rows in (1, 12):
    sources = torch.tensor([[5, 6, 7]] * rows)
    print(model.generate(sources, max_new_tokens=5, compute_type="compiled").tolist()[-1])
print("compiler" if "torch._inductor.codecache" in sys.modules else "no compiler")
"""


@dataclass(frozen=True)
class Real:
    """What the compiler has made of a model.

    Attributes:
        model: The checkpoint's folder.
        cache: Where programs are kept.
        temporary: The temporary directory of the process that compiled.
        log: Its standard error.
        expected: What each process prints, without the last line.
    """

    model: Path
    cache: Path
    temporary: Path
    log: str
    expected: list[str]

    @property
    def programs(self):
        return sorted((self.cache / "programs").iterdir())

    def command(self, cache, script=GENERATE):
        variables = {"HF_VANILLA_TRANSFORMER_CACHE": str(cache), "TMPDIR": str(self.temporary)}
        environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", script, str(self.model)], env=environment | variables, **streams)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("there is no C++ compiler")
    place = tmp_path_factory.mktemp("compiled")
    model = varied()
    model.save_pretrained(place / "model")
    (place / "temporary").mkdir()
    expected = [str(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5).tolist()[0])] * 2
    paths = (place / "model", place / "cache", place / "temporary")
    process = Real(*paths, log="", expected=expected).command(place / "cache")
    out, log = process.communicate()
    assert process.returncode == 0, log
    assert out.splitlines() == [*expected, "compiler"]
    return Real(*paths, log=log, expected=expected)


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_VANILLA_TRANSFORMER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def assert_temporary_folder_is_empty(real):
    """Not even precompiled headers are there. Importing transformers makes PyTorch create one folder, without files."""
    assert {path.name for path in real.temporary.rglob("*")} <= {f"torchinductor_{getpass.getuser()}"}


@pytest.mark.slow
@MINUTES_FOR_THE_COMPILER
def test_what_a_compilation_leaves(real):
    """A program for few rows and one for many, and nothing else anywhere."""
    assert real.log.count("Compiling the decoder for") == 2
    assert [path.name.split("-")[0] for path in real.programs] == ["few", "many"]
    assert [mode(path) for path in (real.cache, real.cache / "programs", *real.programs)] == [0o700] * 2 + [0o600] * 2
    assert_temporary_folder_is_empty(real)


@pytest.mark.slow
@MINUTES_FOR_THE_COMPILER
def test_processes_at_once_load_what_was_compiled(real):
    """Without importing the compiler, and without a copy in the temporary folder."""
    processes = [real.command(real.cache) for _ in range(2)]
    for process in processes:
        out, log = process.communicate()
        assert out.splitlines() == [*real.expected, "no compiler"]
        assert "Compiling" not in log
        assert "without" not in log
    assert_temporary_folder_is_empty(real)


COPYING = """
import os, shutil, sys, time
from pathlib import Path
from hf_vanilla_transformer.engine.decoding import compiled

def copy(weights, kind, folder):
    (program,) = Path(os.environ["READY"]).glob(f"{kind}-*")
    time.sleep(3)
    return Path(shutil.copy(program, folder / "program.so"))

compiled._check_compiler, compiled._compile = lambda: None, copy
"""


@pytest.mark.slow
@MINUTES_FOR_THE_COMPILER
def test_processes_at_once_compile_the_same(real, fresh_cache, monkeypatch):
    """With copies of finished programs in place of compiling: none takes another's half, and none's file is removed."""
    monkeypatch.setenv("READY", str(real.cache / "programs"))
    processes = [real.command(fresh_cache, COPYING + GENERATE) for _ in range(3)]
    for process in processes:
        out, log = process.communicate()
        assert out.splitlines()[:2] == real.expected, log
        assert "damaged" not in log
        assert "without" not in log
    assert [path.name for path in sorted((fresh_cache / "programs").iterdir())] == [one.name for one in real.programs]


@pytest.mark.slow
@MINUTES_FOR_THE_COMPILER
def test_compiled_programs_are_the_models(real, monkeypatch):
    """Both kinds, for sizes other than those they were made with, a single row and a single position among them."""
    monkeypatch.setenv("HF_VANILLA_TRANSFORMER_CACHE", str(real.cache))
    monkeypatch.setattr(compiled, "_make", None)  # the other process's are loaded
    model = varied()
    assert_is_the_models(model, SOURCES[:1], beams=1, steps=37)
    assert_is_the_models(model, SOURCES[:2], beams=3, steps=9)
    assert_is_the_models(model, SOURCES * 2, beams=5, steps=37)
    for options in OPTIONS:
        assert_same(model, padded(SOURCES[:1]), {"max_extra_length": 6, **options})
        assert_same(model, padded(SOURCES * 3), {"max_extra_length": 6, **options})
    assert program_of(Weights(model, "compiled"), 1) is not None


@pytest.mark.parametrize("damage", ["64 KB of zeros", "cut short", "empty"])
@pytest.mark.slow
@MINUTES_FOR_THE_COMPILER
def test_a_damaged_library_gives_the_right_translation(damage, real, fresh_cache, said, monkeypatch):
    shutil.copytree(real.cache, fresh_cache)
    (few,) = (fresh_cache / "programs").glob("few-*")
    DAMAGES[damage][0](few)
    good = next(path for path in real.programs if path.name == few.name)
    monkeypatch.setattr(compiled, "_check_compiler", lambda: None)
    copied = []

    def copy(weights, kind, folder):
        copied.append(kind)
        return Path(shutil.copy(good, folder / "program.so"))

    monkeypatch.setattr(compiled, "_compile", copy)
    found = (
        type(varied())
        .from_pretrained(real.model)
        .generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, compute_type="compiled")
    )
    assert str(found.tolist()[0]) == real.expected[0]
    assert "is damaged" in said()[0]
    assert copied == ["few"]
    assert few.read_bytes() == good.read_bytes()
