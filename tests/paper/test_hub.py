"""Importing the package is all that Auto classes need; a saved checkpoint works where it isn't even installed."""

import copy
import importlib
import inspect
import json
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
    VanillaTransformerForConditionalGeneration,
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
SMALL = {"vocab_size": 20, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}


# ---- Auto classes ----
def assert_registered(checkpoint):
    config = AutoConfig.for_model("vanilla_transformer", **SMALL, **HEADS)
    assert type(config) is VanillaTransformerConfig
    assert config.d_model == 8
    assert type(AutoConfig.from_pretrained(checkpoint)) is VanillaTransformerConfig
    for auto, model_class in (
        (AutoModel, VanillaTransformerModel),
        (AutoModelForSeq2SeqLM, VanillaTransformerForConditionalGeneration),
    ):
        assert type(auto.from_config(config)) is model_class
        assert type(auto.from_pretrained(checkpoint)) is model_class
    assert type(AutoTokenizer.from_pretrained(checkpoint)) is VanillaTransformerTokenizerFast


def test_auto_classes_take_options(tiny_checkpoint):
    model = AutoModelForSeq2SeqLM.from_pretrained(
        tiny_checkpoint, dtype=torch.bfloat16, attn_implementation="eager", dropout=0.3
    )
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert model.config.dropout == 0.3
    config, unused = AutoConfig.from_pretrained(tiny_checkpoint, d_model=64, nonsense=1, return_unused_kwargs=True)
    assert (config.d_model, unused) == (64, {"nonsense": 1})


def test_registering_again_is_harmless(tiny_checkpoint, said):
    assert_registered(tiny_checkpoint)
    hf_vanilla_transformer.register()
    assert_registered(tiny_checkpoint)
    assert importlib.reload(hf_vanilla_transformer) is hf_vanilla_transformer
    assert_registered(tiny_checkpoint)
    assert said == []


def test_public_names():
    for name in hf_vanilla_transformer.__all__:
        assert getattr(hf_vanilla_transformer, name) is not None
    assert dir(hf_vanilla_transformer) == sorted(hf_vanilla_transformer.__all__)
    everything = {}
    exec("from hf_vanilla_transformer import *", everything)
    assert everything.keys() >= set(hf_vanilla_transformer.__all__)


# ---- The code that comes along ----
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
    mine, others = copy.deepcopy((mine, others))
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
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

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
pipelines = []
for folder in (checkpoint, again):
    translate = pipeline("vanilla-translation", model=folder, trust_remote_code=True, device="cpu", max_new_tokens=5)
    texts = ["half past nine", "nine"]
    several = translate(texts, batch_size=2, num_beams=3, num_return_sequences=2)
    pipelines.append([translate(texts[0]), translate(texts), list(translate(text for text in texts)), several])
assert sys.modules["hf_vanilla_transformer"] is None
found = {"errors": errors, "first": first, "modules": modules, "second": second, "pipelines": pipelines}
torch.save(found, results)
"""


@pytest.fixture(scope="module")
def elsewhere(tiny_checkpoint, tmp_path_factory, without_the_package):
    """What a process without the package makes of the checkpoint, and the folder that it saved it to again."""
    folder = tmp_path_factory.mktemp("elsewhere")
    script = inspect.getsource(probe) + WITHOUT_THE_PACKAGE
    # Its input is empty: so that it ends at a question such as "run the custom code? [y/N]".
    without_the_package(script, folder, tiny_checkpoint, folder / "again", folder / "results.pt")
    return torch.load(folder / "results.pt", weights_only=False), folder / "again"


@pytest.fixture(scope="module")
def mine(tiny_checkpoint):
    """What this process makes of it."""
    return probe(tiny_checkpoint)


SPDX = "# SPDX-License-Identifier: Apache-2.0\n"


def test_checkpoint_carries_its_code_and_its_licence(tiny_checkpoint):
    assert_carries_its_code(tiny_checkpoint)
    assert (tiny_checkpoint / "LICENSE-CODE").read_bytes() == (PACKAGE / "LICENSE").read_bytes()
    assert all(file.read_text().startswith(SPDX) for file in tiny_checkpoint.glob("*.py"))


def test_checkpoint_without_the_package(mine, elsewhere):
    """Token ids, logits and translations are bit by bit those of this process, and when it is saved again, too."""
    results, again = elsewhere
    assert all(module.startswith("transformers_modules.") for module in results["modules"])
    assert mine["decoded"][2] == "Überraschung: 🙂"
    assert mine["generation config"]["num_beams"] == 4
    assert mine["beam search"].shape[0] == 3
    assert_carries_its_code(again)
    for others in (results["first"], results["second"], probe(again)):
        assert_same(mine, others)


def test_without_the_package_trust_is_asked_for(elsewhere):
    results, _ = elsewhere
    for (auto, trust), message in results["errors"].items():
        assert "contains custom code which must be executed" in message, (auto, trust, message)
        assert "trust_remote_code=True" in message, (auto, trust, message)
    assert len(results["errors"]) == 8


def test_trusting_the_code_where_the_package_is_imported(tiny_checkpoint, mine):
    assert_same(mine, probe(tiny_checkpoint, trust_remote_code=True))
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint, trust_remote_code=True)
    assert type(model).__name__ == "VanillaTransformerForConditionalGeneration"
    assert_registered(tiny_checkpoint)  # and afterwards the package's own classes are still what is found without it


def test_model_saved_by_the_trainer(tiny_checkpoint, mine, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    arguments = Seq2SeqTrainingArguments(output_dir=str(tmp_path / "run"), report_to="none", use_cpu=True)
    trainer = Seq2SeqTrainer(model=model, args=arguments, processing_class=tokenizer)
    trainer.save_model(str(tmp_path / "saved"))
    assert_carries_its_code(tmp_path / "saved")
    mine, saved = copy.deepcopy(mine), probe(tmp_path / "saved")
    assert saved["config"].pop("use_cache") is False  # the Trainer's own doing; what generate() reads stays
    assert mine["config"].pop("use_cache") is saved["generation config"]["use_cache"] is True
    assert_same(mine, saved)


@pytest.mark.parametrize("tied", [True, False])
def test_model_with_head_from_a_checkpoint_without_one(tied, tmp_path, said):
    config = VanillaTransformerConfig(**SMALL, **HEADS, tie_word_embeddings=tied)
    base = VanillaTransformerModel(config)
    base.save_pretrained(tmp_path)
    model, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert {*info["missing_keys"]} == (set() if tied else {"lm_head.weight"})
    assert ("lm_head.weight" in " ".join(said)) is not tied
    for name, value in base.state_dict().items():
        assert torch.equal(model.model.state_dict()[name], value), name
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
    assert model.generation_config.num_beams == 4  # the paper's decoding, as there is none in the checkpoint
