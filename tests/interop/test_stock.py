"""Models as classes of transformers' own: the same logits and outputs, where this package doesn't exist."""

import base64
import json
import os
import subprocess
import sys

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from unlike import PRE, UNSHARED, small_model

from hf_vanilla_transformer import (
    DictionaryTokenizer,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizerFast,
)
from hf_vanilla_transformer.checkpoints.loading import load_checkpoint
from hf_vanilla_transformer.data.symbols import train_tokenizer
from hf_vanilla_transformer.interop import spm_file, stock
from hf_vanilla_transformer.interop.convert import convert
from hf_vanilla_transformer.interop.interface import ConversionError
from tests.interop.opus_mt import TEXTS as SENTENCES
from tests.interop.opus_mt import spm_model

TEXTS = ["half past nine", "halb zehn", "the fourth of May", "der vierte Mai", "two euros", "zwei Euro </s> <pad>"]
# Fields of a configuration -> the class.
KINDS = [
    ({}, "MarianMTModel"),
    ({"position_encoding": "marian", "attention_bias": True, "output_bias": True}, "MarianMTModel"),
    ({**UNSHARED, "tie_word_embeddings": False}, "MarianMTModel"),
    ({**UNSHARED, "decoder_vocab_size": 290}, "MarianMTModel"),
    ({"position_encoding": "fairseq"}, "FSMTForConditionalGeneration"),
    (PRE, "PegasusForConditionalGeneration"),
    ({**PRE, "position_encoding": "learned", "output_bias": True}, "BlenderbotForConditionalGeneration"),
    ({**PRE, "position_encoding": "tensor2tensor", "tie_word_embeddings": False}, "BlenderbotForConditionalGeneration"),
    ({**PRE, "position_encoding": "fairseq", "attention_bias": True}, "M2M100ForConditionalGeneration"),
]


def is_for_5(fields, name):
    """Whether transformers 4.57's own class fails."""
    return "FSMT" in name or "decoder_vocab_size" in fields


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizerFast.train_from_iterator(TEXTS, vocab_size=300, show_progress=False)


def model_of(tokenizer, **fields) -> VanillaTransformerForConditionalGeneration:
    torch.manual_seed(1)
    model = small_model(**{"vocab_size": len(tokenizer), **fields})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.mark.parametrize(("fields", "name"), KINDS)
def test_logits_and_outputs_are_the_models_and_convert_brings_it_back(fields, name, tokenizer, tmp_path):
    model = model_of(tokenizer, **fields)
    notes = stock.write_stock(model, tokenizer, tmp_path)
    assert notes[0].startswith(f"it is a {name}")
    assert is_for_5(fields, name) is any("it needs transformers 5" in note for note in notes)
    own = AutoTokenizer.from_pretrained(tmp_path)
    assert own(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert type(again).__name__ == name
    again.save_pretrained(tmp_path / "again")  # what others do with it
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again").eval()
    convert(tmp_path, tmp_path / "back")
    back = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back").eval()
    assert type(back) is VanillaTransformerForConditionalGeneration
    assert AutoTokenizer.from_pretrained(tmp_path / "back")(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    batch = {**own(TEXTS, padding=True, return_tensors="pt")}
    decoder = torch.randint(3, 250, (len(TEXTS), 9))
    ours, *others = (one(**batch, decoder_input_ids=decoder, use_cache=False).logits for one in (model, again, back))
    for theirs in others:
        torch.testing.assert_close(theirs, ours, atol=1e-4 * float(ours.abs().max()), rtol=0)
    model.generation_config.gnmt_length_penalty = None
    for beams in (1, 4):
        options = {"num_beams": beams, "length_penalty": 0.0, "early_stopping": True, "max_new_tokens": 12}
        assert torch.equal(again.generate(**batch, **options), model.generate(**batch, **options))


@pytest.mark.parametrize(("fields", "dtype"), [({}, torch.float16), *((one, torch.bfloat16) for one, _ in KINDS[4:7])])
def test_half_precision(fields, dtype, tokenizer, tmp_path):
    model = model_of(tokenizer, **fields).to(dtype)
    notes = stock.write_stock(model, tokenizer, tmp_path)
    assert f"its weights are {dtype}, as the model's; logits are compared in float32" in notes
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert again.dtype == dtype
    weight = model.get_input_embeddings().weight
    sines_first = torch.cat([weight[:, ::2], weight[:, 1::2]], dim=1)
    assert any(torch.equal(again.get_input_embeddings().weight, one) for one in (weight, sines_first))


def test_settings_that_stay_and_that_are_left_out(tokenizer, tmp_path):
    model = model_of(tokenizer)
    settings = {"forced_eos_token_id": 2, "gnmt_length_penalty": None, "max_extra_length": None, "max_new_tokens": 6}
    for name, value in {**settings, "coverage_penalty": 0.2, "output_alignments": False}.items():
        setattr(model.generation_config, name, value)
    assert "coverage_penalty 0.2 is left out, as transformers has none" in stock.write_stock(model, tokenizer, tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved["forced_eos_token_id"] == 2
    assert not {"coverage_penalty", "output_alignments"} & saved.keys()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    losses = [one(**batch, labels=batch["input_ids"]).loss.item() for one in (again, model)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    found = again.generate(**batch, num_beams=1, early_stopping=False)
    assert torch.equal(found, model.generate(**batch, num_beams=1, early_stopping=False, coverage_penalty=None))
    assert {2} == {int(row[row != 0][-1]) for row in found}


def test_the_command(vanilla_transformer, tiny_checkpoint, tmp_path, plain):
    """What it writes opens in a process that can't import the package; its settings are transformers'."""
    folder = tmp_path / "it"
    result = vanilla_transformer("export", "--model", tiny_checkpoint, "--to", "stock", "--output", folder)
    assert "it is a MarianMTModel: AutoModelForSeq2SeqLM and AutoTokenizer open it" in result.out
    found = plain(OUTPUTS, folder, tmp_path / "out")
    assert found["class"] == "MarianMTModel"
    tokenizer, model = load_checkpoint(tiny_checkpoint)
    assert_same(found, model, tokenizer, tmp_path / "out")
    settings, of_tokenizer = (
        json.loads((folder / name).read_text()) for name in ("generation_config.json", "tokenizer_config.json")
    )
    assert (settings["max_length"], settings["length_penalty"]) == (512, 0.48)
    assert not {"gnmt_length_penalty", "max_extra_length"} & settings.keys()
    assert of_tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


# ---- Plain transformers, in processes that can't import this package ----
OPENED = """
import json, sys
import torch, transformers
from safetensors.torch import save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
folder, output, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
found = {"version": transformers.__version__, "class": type(model).__name__}
"""
OUTPUTS = """
batch = tokenizer(texts, padding=True, return_tensors="pt")
with torch.no_grad():
    logits = model.eval()(**batch, decoder_input_ids=batch["input_ids"].clamp(min=3), use_cache=False).logits
save_file({"logits": logits}, output + "/logits.safetensors")
found["ids"] = batch["input_ids"].tolist()
for beams in (1, 4):
    options = {"num_beams": beams, "length_penalty": 0.0, "early_stopping": True, "do_sample": False}
    found[str(beams)] = model.generate(**batch, **options, max_new_tokens=12).tolist()
print(json.dumps(found))
"""
TRAINING = """
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments
rows = [dict(tokenizer(text, text_target=text)) for text in texts]
options = {"max_steps": 20, "learning_rate": 6e-3, "label_smoothing_factor": 0.1, "logging_steps": 5}
options |= {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
arguments = Seq2SeqTrainingArguments(output, **options)
collator = DataCollatorForSeq2Seq(tokenizer, model=model)
trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows, data_collator=collator, processing_class=tokenizer)
for stack in (model.model.encoder, model.model.decoder):
    stack.embed_positions.weight.requires_grad = False  # transformers 5.24 would train them, and not save them
trainer.train()
trainer.save_model(output)
found["losses"] = [one["loss"] for one in trainer.state.log_history if "loss" in one]
found["dropout"] = model.config.dropout
"""


@pytest.fixture
def plain(without_the_package):
    """What a program without the package finds, by its last line."""

    def run(program, folder, output):
        output.mkdir(exist_ok=True)
        printed = without_the_package(OPENED + program, output, folder, output, json.dumps(TEXTS))
        return json.loads(printed.splitlines()[-1])

    return run


def assert_same(found, model, tokenizer, output):
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert found["ids"] == batch["input_ids"].tolist()
    with torch.no_grad():
        expected = model.eval()(**batch, decoder_input_ids=batch["input_ids"].clamp(min=3), use_cache=False).logits
    logits = load_file(output / "logits.safetensors")["logits"]
    torch.testing.assert_close(logits, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    model.generation_config.gnmt_length_penalty = None
    for beams in (1, 4):
        options = {"num_beams": beams, "length_penalty": 0.0, "early_stopping": True, "do_sample": False}
        assert found[str(beams)] == model.generate(**batch, **options, max_new_tokens=12).tolist()


@pytest.fixture(scope="module")
def transformers_4(tmp_path_factory):
    """A folder with the last transformers 4, for PYTHONPATH."""
    place = tmp_path_factory.mktemp("transformers_4")
    packages = ["transformers==4.57.6", "tokenizers==0.22.2", "huggingface_hub==0.36.2"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip can't install transformers 4, so it wasn't tried: {done.stderr[-300:]}")
    return place


@pytest.mark.peers
@pytest.mark.parametrize(("fields", "name"), [one for one in KINDS if not is_for_5(*one)])
def test_transformers_4_opens_it(fields, name, tokenizer, transformers_4, tmp_path):
    model = model_of(tokenizer, **fields)
    stock.write_stock(model, tokenizer, tmp_path)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", OPENED + OUTPUTS, tmp_path, tmp_path / "out", json.dumps(TEXTS)]
    environment = os.environ | {"PYTHONPATH": str(transformers_4)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["version"], found["class"]) == ("4.57.6", name)
    assert_same(found, model, tokenizer, tmp_path / "out")


@pytest.mark.slow
def test_a_trainer_without_the_package_trains_on_and_convert_brings_it_back(tokenizer, tmp_path, plain):
    model = model_of(tokenizer)
    stock.write_stock(model, tokenizer, tmp_path)
    found = plain(TRAINING + OUTPUTS, tmp_path, tmp_path / "out")
    assert found["losses"][-1] < found["losses"][0] - 0.5
    assert found["dropout"] == model.config.dropout
    convert(tmp_path / "out", tmp_path / "back")
    again = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "back")
    assert_same(found, again, AutoTokenizer.from_pretrained(tmp_path / "back"), tmp_path / "out")


def test_symbols_stay(tmp_path):
    pairs = [{"source": "a b", "target": "x t͡ɕ"}]
    tokenizer = train_tokenizer(pairs, ["words"])
    stock.write_stock(model_of(tokenizer), tokenizer, tmp_path)
    own = AutoTokenizer.from_pretrained(tmp_path)
    assert own("a  t͡ɕ Q </s>")["input_ids"] == tokenizer("a  t͡ɕ Q </s>")["input_ids"]
    assert own.unk_token == "<unk>"


def test_a_dictionary_with_one_sentencepiece_model_becomes_a_file():
    """Its ids stay, with an end where the tokenizer writes one; another model is refused by name."""
    text = "The  boy\t(12) fährt 漢字 x "
    tokenizer = of_sentencepiece("unigram")
    made = spm_file.plain(tokenizer)
    assert made(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert made(text)["input_ids"][-1] == tokenizer.eos_token_id
    ids = [1, *tokenizer("The boy")["input_ids"]]
    assert made.decode(ids, skip_special_tokens=True) == "The boy"
    with pytest.raises(ConversionError, match="its SentencePiece model is of another kind than unigram"):
        spm_file.plain(of_sentencepiece("bpe"))
    with pytest.raises(ConversionError, match=r"its dictionary lacks pieces, as no tokenizer\.json can: "):
        spm_file.plain(of_sentencepiece("unigram", fewer=1))


def of_sentencepiece(kind, fewer=0):
    model = spm_model(SENTENCES["source"], 100, model_type=kind)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(number) for number in range(3, len(processor) - fewer)]
    side = {"tokens": ["<pad>", "<s>", "</s>", "<unk>", *pieces], "spm": base64.b64encode(model).decode()}
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return DictionaryTokenizer(segmentation={"source": side, "target": side}, **special)


def test_a_wrong_table_would_be_noticed(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(stock, "_sines_first", lambda name, value: value)
    with pytest.raises(ConversionError, match=r"the logits of the exported model differ by .* of the largest"):
        stock.write_stock(model_of(tokenizer), tokenizer, tmp_path)
