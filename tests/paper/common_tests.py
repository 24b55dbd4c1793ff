"""Hugging Face's common tests of models and tokenizers, applied to this package; test_common.py runs this file.

It needs the `tests` package of transformers' source, so pytest doesn't collect it by itself.
"""

import tempfile
import unittest
from typing import ClassVar

import torch
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin
from tests.test_tensor_parallel_mixin import TensorParallelTesterMixin
from tests.test_tokenization_common import TokenizerTesterMixin
from tests.test_tokenizers_backend_mixin import TokenizersBackendTesterMixin

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerTokenizerFast,
)
from tests import test_modeling_common

# The common tests ask these tables whether a class has a loss. AutoModel.register doesn't fill them.
for table, model_class in (
    (test_modeling_common.MODEL_MAPPING_NAMES, VanillaTransformerModel),
    (
        test_modeling_common.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        VanillaTransformerForConditionalGeneration,
    ),
):
    table[VanillaTransformerConfig.model_type] = model_class.__name__

# With the words of the common tests' own sentences: one of them wants the first letter within the first token.
LINES = [
    "Wonderful no inspiration example with subtoken",
    "This is the first sentence, and Hello! it has a few more words.",
    "I was born in 92000, and this is falsé.",
    "He is very happy, UNwantéd,running with 1 more example of a test.",
    "Zwei Hunde spielen im Schnee, während ein Mann auf einer Bank schläft.",
    "The quick brown fox jumps over the lazy dog: 0123456789 times.",
]


class ModelTester:
    """A configuration and a batch: what the common tests ask for."""

    causal_lm_class = None
    is_training = True
    batch_size, seq_length = 13, 7
    vocab_size, hidden_size, intermediate_size = 99, 16, 8
    num_hidden_layers, num_attention_heads = 2, 4

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent

    def get_config(self) -> VanillaTransformerConfig:
        return VanillaTransformerConfig(
            vocab_size=self.vocab_size,
            d_model=self.hidden_size,
            encoder_layers=self.num_hidden_layers,
            decoder_layers=self.num_hidden_layers,
            encoder_attention_heads=self.num_attention_heads,
            decoder_attention_heads=self.num_attention_heads,
            encoder_ffn_dim=self.intermediate_size,
            decoder_ffn_dim=self.intermediate_size,
            attention_dropout=0.1,
            max_position_embeddings=100,
            bos_token_id=0,
            pad_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
        )

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        source, target = torch.randint(4, self.vocab_size, (2, self.batch_size, self.seq_length))
        source[:, -1] = config.eos_token_id
        target[:, 0] = config.decoder_start_token_id
        inputs = {"input_ids": source, "decoder_input_ids": target}
        masks = {name.replace("input_ids", "attention_mask"): torch.ones_like(ids) for name, ids in inputs.items()}
        return config, inputs | masks


class ModelTest(ModelTesterMixin, GenerationTesterMixin, TensorParallelTesterMixin, unittest.TestCase):
    all_model_classes = (VanillaTransformerModel, VanillaTransformerForConditionalGeneration)
    is_encoder_decoder = True
    test_can_init_all_missing_weights_before_2023 = True  # otherwise a year in the source decides

    def setUp(self) -> None:
        self.model_tester = ModelTester(self)

    def test_config(self) -> None:
        ConfigTester(self, config_class=VanillaTransformerConfig, d_model=32).run_common_tests()


class TrainedTokenizer:
    """A trained tokenizer in a folder, in place of a checkpoint on the Hub."""

    tokenizer_class = rust_tokenizer_class = VanillaTransformerTokenizerFast
    from_pretrained_kwargs: ClassVar = {}

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.mkdtemp()
        tokenizer = VanillaTransformerTokenizerFast.train_from_iterator(LINES * 4, vocab_size=400)
        tokenizer.save_pretrained(folder)
        VanillaTransformerConfig(vocab_size=len(tokenizer)).save_pretrained(folder)
        cls.from_pretrained_id = [folder]
        super().setUpClass()


class TokenizerTest(TrainedTokenizer, TokenizerTesterMixin, unittest.TestCase):
    pass


class TokenizersBackendTest(TrainedTokenizer, TokenizersBackendTesterMixin, unittest.TestCase):
    pass
