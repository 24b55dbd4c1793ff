"""Which system a model comes from, and systems whose models don't come in."""

import numpy as np
import pytest

from hf_vanilla_transformer import cli


def test_what_isnt_supported(tmp_path, capsys):
    (tmp_path / "theirs").mkdir()
    np.savez(tmp_path / "theirs" / "model.npz", encoder_Wemb=np.zeros((4, 4), np.float32))
    for source in (tmp_path / "theirs", tmp_path / "theirs" / "model.npz"):
        assert cli.main(["convert", str(source), "--output", str(tmp_path / "ours")]) == 2
        error = capsys.readouterr().err
        assert f"{source} isn't the model of a known system; give --from with one of marian, fairseq" in error
        assert "Marian's own .npz files and Eole aren't supported" in error
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["opus", "--from", "marian", "--mapping", "hkproj"], "a mapping describes a state dict, and marian models"),
        (["opus", "--revision", "x"], "a revision is of a name on the Hub, and opus is none; leave it out"),
        (["nothing.pt", "--mapping", "hkproj"], "there is no file or folder nothing.pt"),
    ],
)
def test_options_that_would_do_nothing(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "opus").mkdir()
    (tmp_path / "opus" / "config.json").write_text('{"model_type": "marian"}')
    assert cli.main(["convert", *options, "--output", "ours"]) == 2
    assert message in capsys.readouterr().err
