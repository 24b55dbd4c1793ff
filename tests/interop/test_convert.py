"""Which system a model comes from, and systems whose models don't come in."""

import numpy as np
import pytest

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, cli
from hf_vanilla_transformer.interop import fairseq
from hf_vanilla_transformer.interop.conversion import ConversionError, Converted
from hf_vanilla_transformer.interop.convert import convert
from hf_vanilla_transformer.interop.segmentation import tokenizer_of


def test_what_isnt_supported(tmp_path, capsys):
    (tmp_path / "theirs").mkdir()
    np.savez(tmp_path / "theirs" / "model.npz", encoder_Wemb=np.zeros((4, 4), np.float32))
    for source in (tmp_path / "theirs", tmp_path / "theirs" / "model.npz"):
        assert cli.main(["convert", str(source), "--output", str(tmp_path / "ours")]) == 2
        error = capsys.readouterr().err
        assert f"{source} isn't the model of a known system; give --from with one of marian, fairseq" in error
        assert "Marian's own .npz files and Eole aren't supported" in error
    assert not (tmp_path / "ours").exists()


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
