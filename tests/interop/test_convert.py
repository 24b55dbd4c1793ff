"""Which system a model comes from, and systems whose models don't come in."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, cli
from hf_vanilla_transformer.interop import fairseq
from hf_vanilla_transformer.interop.conversion import ConversionError, Converted
from hf_vanilla_transformer.interop.convert import convert, recognise
from hf_vanilla_transformer.interop.segmentation import tokenizer_of


def write_marian(folder):
    np.savez(folder / "model.npz", encoder_Wemb=np.zeros((4, 4), np.float32))
    (folder / "vocab.yml").write_text("a: 0\n")
    return "model.npz"


def write_tensor2tensor(folder):
    (folder / "model.ckpt-1000.index").write_bytes(b"0")
    (folder / "model.ckpt-1000.data-00000-of-00001").write_bytes(b"0")
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1000"')
    return "model.ckpt-1000.index"


def write_eole(folder):
    (folder / "config.json").write_text('{"model": {"architecture": "transformer"}}')
    save_file({"encoder.weight": torch.zeros(2)}, folder / "model.00.safetensors")
    return "model.00.safetensors"


WITHOUT_SAMPLE = {"Marian": write_marian, "tensor2tensor": write_tensor2tensor, "Eole": write_eole}


@pytest.mark.parametrize("system", WITHOUT_SAMPLE)
def test_systems_without_a_sample_are_refused_with_the_reason(system, tmp_path, capsys):
    folder = tmp_path / "theirs"
    folder.mkdir()
    file = WITHOUT_SAMPLE[system](folder)
    for source, given in ((folder, []), (folder / file, []), (folder, ["--from", "marian"])):
        assert cli.main(["convert", str(source), *given, "--output", str(tmp_path / "ours")]) == 2
        error = capsys.readouterr().err
        assert f"{source} looks like a model of {system}" in error
        assert "this system isn't supported" in error
        assert not (tmp_path / "ours").exists()


def test_an_npz_beside_a_model_of_transformers_is_no_obstacle(tmp_path):
    write_marian(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bart"}')
    with pytest.raises(ConversionError, match=r"of the type .bart.: it is not of Marian"):
        convert(tmp_path, tmp_path / "ours")


@pytest.mark.parametrize("name", ["pad", "bos", "eos"])
def test_special_tokens_that_differ_are_refused(name, tmp_path, monkeypatch):
    (tmp_path / "codes").write_text("#version: 0.2\na b</w>\n")
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), "a"]
    tokenizer = tokenizer_of(tmp_path, (words, words), special)
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=5, **{**ids, f"{name}_token_id": 4})
    model = VanillaTransformerForConditionalGeneration(config)
    monkeypatch.setattr(fairseq, "load", lambda source, options: Converted(model, tokenizer))
    message = f"the tokenizer's {name}_token_id is {ids[f'{name}_token_id']} and the model's 4"
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path, tmp_path / "ours", system="fairseq")
    assert not (tmp_path / "ours").exists()


def test_a_file_of_no_known_system(tmp_path):
    (tmp_path / "model.txt").write_text("weights")
    with pytest.raises(
        ConversionError, match=r"is no model of a known system; give --from with one of marian, fairseq"
    ):
        recognise(tmp_path / "model.txt")
