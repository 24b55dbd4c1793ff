"""What tests of several commands share: models and a run that are made once, and a folder with text files."""

from pathlib import Path

import pytest
import torch
from small_corpus import load, write_texts
from trainer_runs import stock_trainer

from hf_vanilla_transformer import VanillaTransformerTokenizerFast


@pytest.fixture(scope="session")
def checkpoints(tiny_checkpoint, tmp_path_factory):
    """Three: two of one tokenizer, the third of another."""
    stranger = VanillaTransformerTokenizerFast.train_from_iterator(["nine"], 283, show_progress=False)
    folders = [tiny_checkpoint]
    generator = torch.Generator().manual_seed(0)
    for name, tokenizer in (("other", None), ("stranger", stranger)):
        model, own = load(tiny_checkpoint)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        folders.append(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[-1])
        (tokenizer or own).save_pretrained(folders[-1])
    return [str(folder) for folder in folders]


@pytest.fixture(scope="session")
def trained(tiny_checkpoint, tmp_path_factory):
    """A run with the checkpoints 1 to 6, and its tokenizer's folder."""
    run = tmp_path_factory.mktemp("trained") / "run"
    stock_trainer(tiny_checkpoint, run, max_steps=6).train()
    (run / "tokenizer").mkdir()
    return run


@pytest.fixture
def here(monkeypatch, tmp_path):
    """The working directory: a folder with parallel texts."""
    monkeypatch.chdir(tmp_path)
    write_texts(Path())
    return tmp_path
