"""Which system a model comes from, and systems whose models don't come in."""

import numpy as np

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
