"""Files and folders that appear when they are complete, at unusual places."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hf_vanilla_transformer.checkpoints.files import check_new_folder, new_folder, replacing

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs /dev/fd")
def test_a_pipe_is_written_itself():
    reading, writing = os.pipe()
    with replacing(f"/dev/fd/{writing}") as path:
        path.write_text("some text")
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "some text"


def test_a_link_to_an_empty_folder_stays_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    check_new_folder(tmp_path / "link")
    with new_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("some text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "a").read_text() == "some text"


def test_a_mounted_folder_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with pytest.raises(FileExistsError, match="a file system is mounted; give a new folder in it"):
        check_new_folder(tmp_path)


WRITER = """
import sys, time
from pathlib import Path
from hf_vanilla_transformer.checkpoints.files import new_folder, replacing
with replacing("file") as file, new_folder(Path("folder")) as folder:
    file.write_text("half")
    (folder / "a").write_text("half")
    print(flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_was_writing_goes_with_the_next_one(tmp_path, monkeypatch):
    def leftovers():
        with replacing("file") as file, new_folder(Path("folder"), replace=True):
            file.touch()
        return sorted(path.name.split(f".{platform.node()}")[0] for path in Path().glob(".*"))

    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writer = subprocess.Popen([sys.executable, "-c", WRITER], env=environment, stdout=subprocess.PIPE)
    try:
        writer.stdout.readline()
        names = [path.name for path in Path().glob(".*")]
        Path(names[0].replace("file", "file.b").replace("folder", "folder.b")).touch()  # another output's
        assert len(leftovers()) == 3  # and what is still being written
    finally:
        writer.kill()
        writer.wait()
    (other,) = leftovers()
    assert other.endswith(".b")
    # A model that was being replaced is removed when the new one is there.
    old = Path(next(name for name in names if "folder" in name), "old")
    Path("folder").rename(old.parent)
    old.mkdir()
    assert [len(leftovers()), len(leftovers())] == [2, 1]
