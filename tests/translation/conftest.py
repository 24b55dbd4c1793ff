"""A tokenizer and a saved random model."""

import pytest
from random_models import new_model
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    new_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
