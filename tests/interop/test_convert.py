"""Which system a model comes from, and systems whose models don't come in."""

import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer import cli


def test_what_isnt_supported(tmp_path, capsys):
    (tmp_path / "theirs").mkdir()
    np.savez(tmp_path / "theirs" / "model.npz", encoder_Wemb=np.zeros((4, 4), np.float32))
    source = tmp_path / "theirs"
    assert cli.main(["convert", str(source), "--output", str(tmp_path / "ours")]) == 2
    error = capsys.readouterr().err
    assert f"{source} isn't the model of a known system; give --from with one of marian, marian-npz" in error
    assert "tensor2tensor isn't supported" in error
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


def test_logits_that_differ_from_the_originals(tiny_checkpoint, tmp_path, capsys):
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    example = {"input_ids": torch.tensor([[5, 6, 7, 3], [8, 9, 3, 0]]), "attention_mask": torch.ones(2, 4).long()}
    example |= {"decoder_input_ids": torch.tensor([[2, 5, 6], [2, 7, 0]])}
    example["attention_mask"][1, 3] = 0
    with torch.no_grad():
        example["logits"] = model(**example).logits + 7  # log-probabilities are such logits, too
    save_file(example, tmp_path / "original.safetensors")
    torch.save(example, tmp_path / "original.pt")
    export, ours = tmp_path / "stock", tmp_path / "ours"
    assert cli.main(["export", "--model", str(tiny_checkpoint), "--to", "stock", "--output", str(export)]) == 0
    command = ["convert", str(export), "--output", str(ours)]
    capsys.readouterr()
    assert cli.main([*command, "--check", str(tmp_path / "original.pt")]) == 0
    assert re.search(r"logits differ from those in \S+original.pt by at most \de-0[678] of", capsys.readouterr().out)
    shutil.rmtree(ours)
    config = (export / "config.json").read_text()
    (export / "config.json").write_text(config.replace('attention_heads": 4', 'attention_heads": 2'))
    assert cli.main([*command, "--check", str(tmp_path / "original.safetensors")]) == 2
    assert re.search(r"the model isn't the original: .+ \(1e-03 is allowed\)", capsys.readouterr().err)
    save_file({name: example[name] for name in ("input_ids", "logits")}, tmp_path / "less.safetensors")
    assert cli.main([*command, "--check", str(tmp_path / "less.safetensors")]) == 2
    assert "less.safetensors lacks ids or logits, or has others than this model's (" in capsys.readouterr().err
    assert not ours.exists()
