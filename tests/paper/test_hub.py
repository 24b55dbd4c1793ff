"""A saved checkpoint brings its code along: it works where this package isn't installed."""

import inspect
import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import hf_vanilla_transformer
from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerModel,
    VanillaTransformerTokenizerFast,
)

PACKAGE = Path(hf_vanilla_transformer.__file__).parent
MODEL_PARTS = ("configuration", "modeling", "generation", "integration", "plan")
MODEL_CODE = {f"{part}_vanilla_transformer.py" for part in MODEL_PARTS}
TOKENIZER_CODE = {"tokenization_vanilla_transformer.py"}
MODEL_MAP = {
    "AutoConfig": "configuration_vanilla_transformer.VanillaTransformerConfig",
    "AutoModel": "modeling_vanilla_transformer.VanillaTransformerModel",
    "AutoModelForSeq2SeqLM": "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration",
}


def assert_carries_its_code(folder, tokenizer=True):
    expected = MODEL_CODE | (TOKENIZER_CODE if tokenizer else set())
    assert {file.name for file in folder.glob("*.py")} == expected
    for name in expected:
        assert (folder / name).read_text() == (PACKAGE / name).read_text()
    assert json.loads((folder / "config.json").read_text())["auto_map"] == MODEL_MAP
    if tokenizer:
        auto_map = json.loads((folder / "tokenizer_config.json").read_text())["auto_map"]["AutoTokenizer"]
        tokenizer_class = "tokenization_vanilla_transformer.VanillaTransformerTokenizerFast"
        assert tokenizer_class in (auto_map if isinstance(auto_map, list) else [auto_map])


def probe(folder, **kwargs):
    """Everything that a checkpoint says about a few sentences; this runs in other processes too."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

    config = AutoConfig.from_pretrained(folder, **kwargs)
    base, model = (auto.from_pretrained(folder, **kwargs) for auto in (AutoModel, AutoModelForSeq2SeqLM))
    tokenizer = AutoTokenizer.from_pretrained(folder, **kwargs)
    sources, targets = ["twenty-one", "half past nine", "Überraschung: 🙂"], ["einundzwanzig", "halb zehn", ""]
    batch = tokenizer(sources, text_target=targets, padding=True, return_tensors="pt")
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        output = model(**batch)
        hidden = base(**source, decoder_input_ids=batch["labels"]).last_hidden_state
    paper = model.generate(**source, output_scores=True, return_dict_in_generate=True)
    longer = model.generate(**source, max_extra_length=3, gnmt_length_penalty=2.0)
    greedy = model.generate(**source, num_beams=1, max_new_tokens=7)
    return {
        "config": config.to_dict(),
        "generation config": model.generation_config.to_dict(),
        "tokens": dict(batch),
        "pieces": tokenizer.convert_ids_to_tokens(batch["input_ids"][2]),
        "decoded": tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True),
        "logits": output.logits,
        "loss": output.loss,
        "hidden": hidden,
        "beam search": paper.sequences,
        "scores": paper.sequences_scores,
        "longer": longer,
        "greedy": greedy,
    }


def assert_same(mine, others):
    assert mine.keys() == others.keys()
    for name in ("config", "generation config"):  # whose file names differ with the folder
        for values in (mine[name], others[name]):
            values.pop("_name_or_path", None)
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            # The engine encodes with fused products, which add in another order; logits and tokens are the same.
            close = {"rtol": 1e-5, "atol": 1e-6} if name == "scores" else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(others[name], value, **close, msg=name)
        elif name == "tokens":
            assert {key: ids.tolist() for key, ids in value.items()} == {
                key: ids.tolist() for key, ids in others[name].items()
            }
        else:
            assert others[name] == value, name


WITHOUT_THE_PACKAGE = """
import sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

checkpoint, again, results = sys.argv[1:]
errors = {}
for auto in (AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer):
    for trust in (None, False):
        try:
            auto.from_pretrained(checkpoint, trust_remote_code=trust)
            errors[auto.__name__, trust] = "no error"
        except ValueError as error:
            errors[auto.__name__, trust] = str(error)

first = probe(checkpoint, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)
modules = [type(part).__module__ for part in (model, model.config, tokenizer)]
model.save_pretrained(again)
tokenizer.save_pretrained(again)
second = probe(again, trust_remote_code=True)
assert sys.modules["hf_vanilla_transformer"] is None
torch.save({"errors": errors, "first": first, "modules": modules, "second": second}, results)
"""


@pytest.fixture(scope="module")
def elsewhere(tiny_checkpoint, tmp_path_factory, without_the_package):
    """What a process without the package makes of the checkpoint, and the folder that it saved it to again."""
    folder = tmp_path_factory.mktemp("elsewhere")
    script = inspect.getsource(probe) + WITHOUT_THE_PACKAGE
    # Its input is empty: so that it ends at a question such as "run the custom code? [y/N]".
    without_the_package(script, folder, tiny_checkpoint, folder / "again", folder / "results.pt")
    return torch.load(folder / "results.pt", weights_only=False), folder / "again"


def test_checkpoint_carries_its_code(tiny_checkpoint):
    assert_carries_its_code(tiny_checkpoint)


SPDX = "# SPDX-License-Identifier: Apache-2.0\n"


def test_checkpoint_carries_the_licence_of_its_code(tiny_checkpoint):
    assert (tiny_checkpoint / "LICENSE-CODE").read_bytes() == (PACKAGE / "LICENSE").read_bytes()
    assert all(file.read_text().startswith(SPDX) for file in tiny_checkpoint.glob("*.py"))


def test_checkpoint_without_the_package(tiny_checkpoint, elsewhere):
    """Token ids, logits and translations are bit by bit those of this process."""
    results, _ = elsewhere
    assert all(module.startswith("transformers_modules.") for module in results["modules"])
    mine = probe(tiny_checkpoint)
    assert mine["decoded"][2] == "Überraschung: 🙂"
    assert mine["generation config"]["num_beams"] == 4
    assert mine["beam search"].shape[0] == 3
    assert_same(mine, results["first"])


def test_checkpoint_saved_without_the_package(tiny_checkpoint, elsewhere):
    results, again = elsewhere
    assert_carries_its_code(again)
    assert_same(probe(tiny_checkpoint), results["second"])
    assert_same(probe(again), results["second"])


def test_without_the_package_trust_is_asked_for(elsewhere):
    results, _ = elsewhere
    for (auto, trust), message in results["errors"].items():
        assert "contains custom code which must be executed" in message, (auto, trust, message)
        assert "trust_remote_code=True" in message, (auto, trust, message)
    assert len(results["errors"]) == 8


def test_trusting_the_code_where_the_package_is_imported(tiny_checkpoint):
    assert_same(probe(tiny_checkpoint), probe(tiny_checkpoint, trust_remote_code=True))
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint, trust_remote_code=True)
    assert type(model).__name__ == "VanillaTransformerForConditionalGeneration"
    # and afterwards the package's own classes are still what is found without it
    assert type(AutoConfig.from_pretrained(tiny_checkpoint)) is VanillaTransformerConfig
    assert type(AutoModel.from_pretrained(tiny_checkpoint)) is VanillaTransformerModel
    assert type(AutoTokenizer.from_pretrained(tiny_checkpoint)) is VanillaTransformerTokenizerFast


def test_model_saved_by_the_trainer(tiny_checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    arguments = Seq2SeqTrainingArguments(output_dir=str(tmp_path / "run"), report_to="none", use_cpu=True)
    trainer = Seq2SeqTrainer(model=model, args=arguments, processing_class=tokenizer)
    trainer.save_model(str(tmp_path / "saved"))
    assert_carries_its_code(tmp_path / "saved")
    mine, saved = probe(tiny_checkpoint), probe(tmp_path / "saved")
    assert saved["config"].pop("use_cache") is False  # the Trainer's own doing; what generate() reads stays
    assert mine["config"].pop("use_cache") is saved["generation config"]["use_cache"] is True
    assert_same(mine, saved)


@pytest.fixture
def reports(caplog):
    """What transformers warns of."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield lambda: " ".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    logger.removeHandler(caplog.handler)


SMALL = {"vocab_size": 20, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}


@pytest.mark.parametrize("tied", [True, False])
def test_model_with_head_from_a_checkpoint_without_one(tied, tmp_path, reports):
    config = VanillaTransformerConfig(**SMALL, **HEADS, tie_word_embeddings=tied)
    base = VanillaTransformerModel(config)
    base.save_pretrained(tmp_path)
    model, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert {*info["missing_keys"]} == (set() if tied else {"lm_head.weight"})
    assert ("lm_head.weight" in reports()) is not tied
    for name, value in base.state_dict().items():
        assert torch.equal(model.model.state_dict()[name], value), name
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
    assert model.generation_config.num_beams == 4  # the paper's decoding, as there is none in the checkpoint
