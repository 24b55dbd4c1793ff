"""A model of letters and sounds, from a table to the card, exports and scores."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration, cli
from hf_vanilla_transformer.data.symbols import train_tokenizer
from hf_vanilla_transformer.data.vectors import use_vectors
from hf_vanilla_transformer.training.arguments import ModelArguments
from hf_vanilla_transformer.training.evaluation import TranslationMetrics
from hf_vanilla_transformer.training.options import RecipeError

# Inflection: a verb, its form and its features; "read" has two pasts.
FORMS = {"V;PST": "{0} + t", "V;PRS;3;SG": "{0} + s", "V;NFIN": "{0}"}
VERBS = ["walk", "talk", "mark", "ask", "help", "jump", "bank", "risk", "pack", "stop"]
ROWS = [(verb, form.format(" ".join(verb)), tags) for verb in VERBS for tags, form in FORMS.items()]
TWICE = ("walk", "w ɔː", "V;PST")  # a second form, with a symbol that training hasn't


def table(file: Path, rows: list[tuple[str, str, str]]) -> str:
    file.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a trained model, its validation table, and what the command printed."""
    folder = tmp_path_factory.mktemp("inflection")
    validation = table(folder / "dev.tsv", [*ROWS[:6], TWICE])
    command = [
        *("train", "--config", "g2p", "--train-source", table(folder / "train.tsv", ROWS)),
        *("--validation-data", validation, "--source-column", "1", "--target-column", "2", "--feature-columns", "3"),
        *("--output-dir", str(folder / "run"), "--num-train-epochs", "60", "--per-device-train-batch-tokens", "100"),
        *("--d-model", "32", "--encoder-layers", "1", "--decoder-layers", "1", "--dropout", "0", "--max-length", "40"),
        *("--encoder-ffn-dim", "64", "--decoder-ffn-dim", "64", "--learning-rate", "0.01", "--warmup-steps", "20"),
        *("--eval-strategy", "epoch", "--eval-delay", "58", "--metric-for-best-model", "exact_match"),
        *("--save-strategy", "best", "--average-last", "1"),
    ]
    assert cli.main(command) == 0
    return folder / "run" / "averaged-1", validation


@pytest.fixture
def model(run):
    return run[0]


def test_a_table_becomes_a_model(model):
    texts = [f"{verb}\t{tags}" for verb, _, tags in ROWS]
    assert Translator(model)(texts, progress_bar=False) == [form for _, form, _ in ROWS]
    scores = json.loads((model / "scores.json").read_text())[0]
    assert scores["sentences"] == 6  # the seventh row is a second form of the first
    found = {score["name"]: score["value"] for score in scores["scores"]}
    assert found == {"WER": 0.0, "SER": 0.0, "exact match": 100.0}
    log = json.loads((model.parent / "trainer_state.json").read_text())
    assert log["best_global_step"] == log["global_step"]  # of equal values, the last one is the best


def test_its_card_speaks_of_no_translation(model):
    card = (model / "README.md").read_text(encoding="utf-8")
    assert not any(text in card.lower() for text in ("pipeline_tag", "translat"))
    assert all(text in card for text in ("- text2text-generation", "type: exact_match", "30 pairs", "validation WER"))


def test_it_decodes_alike_everywhere(model, tmp_path, capsys):
    texts = ["walk\tV;PST", "jump\tV;PRS;3;SG", "risk\tV;NFIN"]
    expected = Translator(model)(texts, progress_bar=False)
    assert cli.main(["export", "--model", str(model), "--to", "ctranslate2", "--output", str(tmp_path / "ct2")]) == 0
    assert Translator(tmp_path / "ct2")(texts, progress_bar=False) == expected
    tokenizer = AutoTokenizer.from_pretrained(model)
    own = AutoModelForSeq2SeqLM.from_pretrained(model)
    ids = own.generate(**tokenizer(texts, padding=True, return_tensors="pt"))
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == expected
    labels = tokenizer(text_target=expected, padding=True, return_tensors="pt")["input_ids"]
    length = labels.shape[1]
    assert torch.equal(
        ids[:, 1 : length + 1].masked_fill(labels == 0, 0), labels
    )  # behind the end, transformers has it again


def test_evaluate_has_its_measures(run, tmp_path, capsys):
    model, validation = run
    columns = ["--source-column", "1", "--target-column", "2", "--feature-columns", "3"]
    command = ["evaluate", "--model", str(model), "--source", validation, *columns]
    file = tmp_path / "scores.json"
    assert cli.main([*command, "--n-best", "3", "--metrics", "wer", "cer", "--json", str(file)]) == 0
    assert capsys.readouterr().out.startswith("6 sentences\n")
    result = json.loads(file.read_text())["results"][0]
    assert "bleu" not in result
    assert result["wer"]["value"] == result["cer"]["value"] == 0
    assert result["top_1"]["value"] == result["top_3"]["value"] == 100
    assert cli.main(["evaluate", "--model", str(model), "--source", str(model / "validation.translations.txt")]) == 2
    assert "give --reference FILE, or a table" in capsys.readouterr().err
    assert cli.main([*command, "--reference", str(model / "validation.translations.txt")]) == 2
    assert "give text files, or one table" in capsys.readouterr().err
    twice = Path(tmp_path, "twice.tsv")
    twice.write_text("walk\tw a l k\tV;NFIN\n" * 12, encoding="utf-8")
    repeated = ["evaluate", "--model", str(model), str(model), "--source", str(twice), *columns, "--significance"]
    assert cli.main(repeated) == 2
    assert "1 sentences are too few to be resampled" in capsys.readouterr().err


def test_unknown_symbols_are_named(model, tmp_path, capsys, caplog):
    translator, text = Translator(model), "wQlkQ\tV;PST"
    kept, ignored = (translator([text], progress_bar=False, unknown=how)[0] for how in ("keep", "ignore"))
    assert "the source has 2 unknown symbols: 'Q' (2)" in caplog.text
    assert ignored == translator(["wlk\tV;PST"], progress_bar=False)[0]
    assert translator(["QQ"], progress_bar=False, unknown="ignore") == [""]
    assert kept == translator([text], progress_bar=False)[0]
    assert caplog.text.count("unknown symbols") == 1
    with pytest.raises(ValueError, match=r"sentences\[1\] has 2 unknown symbols: 'Q' \(2\); correct it"):
        translator(["walk\tV;PST", text], progress_bar=False, unknown="error")
    with pytest.raises(ValueError, match="unknown is 'drop'; give one of error, keep, ignore"):
        translator([text], progress_bar=False, unknown="drop")
    for name, line in (("source", "walk\tV;PST"), ("target", "w ZZ")):
        (tmp_path / name).write_text(f"{line}\n")
    files = ["--source", str(tmp_path / "source"), "--target", str(tmp_path / "target")]
    assert cli.main(["score", "--model", str(model), *files]) == 0
    assert "the target has 1 unknown symbol: 'ZZ' (1)" in caplog.text


def test_it_opens_without_the_package(model, tmp_path, without_the_package):
    """By the code that it carries; without that, an error and no half of its tokenizer."""
    program = """
import sys
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = model.generate(**tokenizer("walk\\tV;PST", return_tensors="pt"))
print(tokenizer.decode(ids[0], skip_special_tokens=True), tokenizer(text_target="w a")["input_ids"])
try:
    AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
except ValueError as error:
    print("trust_remote_code" in str(error))
"""
    found = without_the_package(program, tmp_path, model)
    ids = AutoTokenizer.from_pretrained(model)(text_target="w a")["input_ids"]
    assert found.splitlines() == [f"w a l k + t {ids}", "True"]


def test_unknown_symbols_of_references_are_errors():
    tokenizer = train_tokenizer([{"source": "a", "target": "x y"}], ["characters", "words"])
    metrics = TranslationMetrics(tokenizer)  # x, y and the end; x, an unknown one and the end
    labels = torch.tensor(tokenizer(text_target=["x z", "x y"], padding=True)["input_ids"]).numpy()
    predictions = type("Predictions", (), {"predictions": labels, "label_ids": labels, "inputs": None})
    assert metrics(predictions) == {"exact_match": 50.0, "ser": 25.0}
    literal = TranslationMetrics(train_tokenizer([{"source": "a", "target": "<unk>b"}], ["characters", "characters"]))
    assert literal._references(np.array([[5, 3, 2]])) == [f"{literal.tokenizer.convert_ids_to_tokens(5)}\ufffd"]


def test_pairs_with_one_source_are_one_in_a_trainer():
    tokenizer = train_tokenizer([{"source": "ab", "target": "x y"}], ["characters", "words"])
    metrics = TranslationMetrics(tokenizer)
    sources, texts = ["a", "a", "Qa", "Wa"], ["x", "y", "x", "y"]  # the last two differ by unknown symbols
    rows = [tokenizer(source)["input_ids"] + [0] * place for place, source in enumerate(sources)]
    inputs = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), batch_first=True, padding_value=-100)
    labels = torch.tensor(tokenizer(text_target=texts)["input_ids"]).numpy()
    hypotheses = torch.tensor(tokenizer(text_target=["y", "x", "x", "x"])["input_ids"]).numpy()
    predictions = type("Predictions", (), {"predictions": hypotheses, "label_ids": labels, "inputs": inputs.numpy()})
    assert metrics(predictions)["exact_match"] == pytest.approx(200 / 3)


def test_prefixes_are_of_the_target():
    """An id that is unknown to the source is a byte to the target."""

    def translator(*kinds):
        tokenizer = train_tokenizer([{"source": "a b", "target": "x!"}], kinds)
        config = ModelArguments(preset="tiny", d_model=16).config_for(tokenizer)
        return Translator(VanillaTransformerForConditionalGeneration(config).eval(), tokenizer=tokenizer)

    assert translator("words", "bytes")("a", prefix="!x", max_new_tokens=4).startswith("!x")
    with pytest.raises(ValueError, match="the prefix 'Q' becomes <unk>"):
        translator("bytes", "words")("a", prefix="Q")


@pytest.mark.parametrize("kinds", [["bpe", "words"], ["words", "bpe"]], ids="-".join)
def test_vectors_are_of_words_as_their_side_spells_them(tmp_path, kinds):
    """Byte-level BPE spells "ü" with other letters."""
    pairs = [{"source": "für hund", "target": "über dog"}] * 5
    tokenizer = train_tokenizer(pairs, kinds)
    (tmp_path / "vectors").write_text("für 1 1\nhund 1 1\nüber 2 2\ndog 2 2\n", encoding="utf-8")
    sides = {False: (tokenizer.get_vocab(), "hund", 1), True: (tokenizer.target_encoder, "dog", 2)}
    for is_target, (vocabulary, word, value) in sides.items():
        weight = torch.zeros(len(vocabulary), 2)
        assert use_vectors(str(tmp_path / "vectors"), tokenizer, weight, 1.0, is_target=is_target) >= 2
        assert weight[vocabulary.get(word, vocabulary.get(f"Ġ{word}"))].tolist() == [value, value]


def test_two_vocabularies_have_two_matrices():
    tokenizer = train_tokenizer([{"source": "a", "target": "b"}], ["words", "words"])
    with pytest.raises(RecipeError, match="two vocabularies, which can't share a matrix; give tied decoder"):
        ModelArguments(preset="tiny", tied="all").config_for(tokenizer)
