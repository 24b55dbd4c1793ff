"""The comparison with the original's logits, and the shipped mappings."""

import re

import pytest
import torch
from safetensors.torch import save_file

from hf_vanilla_transformer import export
from hf_vanilla_transformer.checkpoints.loading import load_checkpoint
from hf_vanilla_transformer.interop.convert import convert
from hf_vanilla_transformer.interop.interface import ConversionError


def test_the_shipped_mappings_are_listed(vanilla_transformer):
    listed = vanilla_transformer("convert", "--list-mappings").out
    assert "module_fc: Modules with w_q, w_k, w_v and fc in each attention" in listed


def test_logits_that_differ_from_the_originals(tiny_checkpoint, tmp_path):
    tokenizer, model = load_checkpoint(tiny_checkpoint)
    example = {"input_ids": torch.tensor([[5, 6, 7, 3], [8, 9, 3, 0]]), "attention_mask": torch.ones(2, 4).long()}
    example |= {"decoder_input_ids": torch.tensor([[2, 5, 6], [2, 7, 0]])}
    example["attention_mask"][1, 3] = 0
    with torch.no_grad():
        example["logits"] = model(**example).logits + 7  # log-probabilities are such logits, too
    save_file(example, tmp_path / "original.safetensors")
    torch.save(example, tmp_path / "original.pt")
    export(model, stock := tmp_path / "stock", to="stock", tokenizer=tokenizer)
    (note,) = convert(stock, tmp_path / "good", check=tmp_path / "original.pt")
    assert re.search(r"logits differ from those in \S+original.pt by at most \de-0[678] of", note)
    config = (stock / "config.json").read_text()
    (stock / "config.json").write_text(config.replace('attention_heads": 4', 'attention_heads": 2'))
    with pytest.raises(ConversionError, match=r"the model isn't the original: .+ \(1e-03 is allowed\)"):
        convert(stock, tmp_path / "ours", check=tmp_path / "original.safetensors")
    save_file({name: example[name] for name in ("input_ids", "logits")}, tmp_path / "less.safetensors")
    with pytest.raises(ConversionError, match=r"less.safetensors lacks ids or logits, or has others than this model's"):
        convert(stock, tmp_path / "ours", check=tmp_path / "less.safetensors")
    assert not (tmp_path / "ours").exists()
