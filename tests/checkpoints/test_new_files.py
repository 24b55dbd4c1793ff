"""Files and folders that appear when they are complete, at unusual places."""

import os
from pathlib import Path

import pytest

from hf_vanilla_transformer.checkpoints.files import check_new_folder, new_folder, replacing


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
