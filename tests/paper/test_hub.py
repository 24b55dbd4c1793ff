"""Importing the package is all that Auto classes need; a saved checkpoint works where it isn't even installed."""

import importlib
import inspect
import json
import re
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
PARTS = ("configuration", "modeling", "generation", "integration", "plan", "tokenization")
CODE = {f"{part}_vanilla_transformer.py" for part in PARTS}
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
    everything = {}
    exec("from hf_vanilla_transformer import *", everything)
    assert dir(hf_vanilla_transformer) == sorted(everything.keys() - {"__builtins__"})


# ---- The code that comes along ----
def assert_carries_its_code(folder):
    assert {file.name for file in folder.glob("*.py")} == CODE
    for name in CODE:
        assert (folder / name).read_text() == (PACKAGE / name).read_text()
    assert json.loads((folder / "config.json").read_text())["auto_map"] == MODEL_MAP
    auto_map = json.loads((folder / "tokenizer_config.json").read_text())["auto_map"]["AutoTokenizer"]
    tokenizer_class = "tokenization_vanilla_transformer.VanillaTransformerTokenizerFast"
    assert tokenizer_class in (auto_map if isinstance(auto_map, list) else [auto_map])


def probe(folder, **kwargs):
    """What a checkpoint says about a few sentences, values and tensors; this runs in other processes too."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

    config = AutoConfig.from_pretrained(folder, **kwargs).to_dict()
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
    config.pop("_name_or_path", None)  # it differs with the folder
    translate = pipeline("vanilla-translation", model=str(folder), device="cpu", max_new_tokens=5, **kwargs)
    several = translate(sources, batch_size=2, num_beams=3, num_return_sequences=2)
    translated = [translate(sources[0]), translate([*sources, " "]), *translate(text for text in sources), *several]
    values = {
        "config": config,
        "generation config": model.generation_config.to_dict(),
        "pieces": tokenizer.convert_ids_to_tokens(batch["input_ids"][2]),
        "decoded": tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True),
        "translated": [one["translation_text"] for each in translated for one in each],
    }
    outputs = {"logits": output.logits, "loss": output.loss, "hidden": hidden, "longer": longer, "greedy": greedy}
    return values, {**batch, **outputs, "beam search": paper.sequences, "scores": paper.sequences_scores}


def assert_same(mine, others):
    assert others[0] == mine[0]
    torch.testing.assert_close(others[1], mine[1], rtol=0, atol=0)


WITHOUT_THE_PACKAGE = """
import sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

checkpoint, again, results = sys.argv[1:]
errors = []
for auto in (AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer):
    for trust in (None, False):
        try:
            auto.from_pretrained(checkpoint, trust_remote_code=trust)
        except ValueError as error:
            errors.append(str(error))

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


@pytest.fixture(scope="module")
def mine(tiny_checkpoint):
    """What this process makes of it."""
    return probe(tiny_checkpoint)


def test_checkpoint_carries_its_code_and_its_licence(tiny_checkpoint):
    assert_carries_its_code(tiny_checkpoint)
    assert (tiny_checkpoint / "LICENSE-CODE").read_bytes() == (PACKAGE / "LICENSE").read_bytes()


def test_checkpoint_without_the_package(mine, elsewhere):
    """Token ids, logits and translations are bit by bit those of this process, and when it is saved again, too."""
    results, again = elsewhere
    assert all(module.startswith("transformers_modules.") for module in results["modules"])
    assert mine[0]["decoded"][2] == "Überraschung: 🙂"
    assert mine[0]["generation config"]["num_beams"] == 4
    assert_carries_its_code(again)
    for others in (results["first"], results["second"], probe(again)):
        assert_same(mine, others)


def test_without_the_package_trust_is_asked_for(elsewhere):
    results, _ = elsewhere
    needed = r"(?s)contains custom code which must be executed.*trust_remote_code=True"
    assert len([message for message in results["errors"] if re.search(needed, message)]) == 8


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
    saved = probe(tmp_path / "saved")
    assert saved[0]["config"]["use_cache"] is False  # the Trainer's own doing; what generate() reads stays
    saved[0]["config"]["use_cache"] = True
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
    torch.testing.assert_close(model.model.state_dict(), base.state_dict(), rtol=0, atol=0)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
    assert model.generation_config.num_beams == 4  # the paper's decoding, as there is none in the checkpoint
