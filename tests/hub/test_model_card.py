"""Model cards: one complete card against its text, what is left out, and text that would break Markdown or YAML."""

import ast
import re
from email.message import Message
from pathlib import Path

import pytest
import yaml

from hf_vanilla_transformer import VanillaTransformerConfig
from hf_vanilla_transformer.hub import model_card
from hf_vanilla_transformer.hub.facts import Evaluation, RunFacts, Sample, TrainingFacts, is_repository, local_name
from hf_vanilla_transformer.hub.model_card import architecture_rows, fill_model_card
from hf_vanilla_transformer.metrics import Score

BLEU = Score("BLEU", 41.1234, "nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:2.6.0")
CHRF = Score("chrF2", 62.5, "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0")

FACTS = RunFacts(
    name="somebody/multi30k-en-de",
    config=VanillaTransformerConfig.from_preset("base", vocab_size=10_000).to_dict(),
    parameters=49_259_520,
    source_language="en",
    target_language="de",
    license="apache-2.0",
    datasets=["bentrevett/multi30k"],
    training_files=[Path("/home/somebody/data/train.en"), r"C:\data\train.de"],
    training_pairs=29_000,
    recipe=TrainingFacts(seconds=1234.5, software="torch 2.13.0, transformers 5.23.0"),
    evaluations=[
        Evaluation("Multi30k, 2016", [BLEU, CHRF], 1000, "beam 4, length penalty 0.6", split="test"),
        Evaluation("owner/numbers", [BLEU], 500),
    ],
    samples=[
        Sample("Two dogs play.", "Zwei Hunde spielen.", "Zwei Hunde spielen."),
        Sample("It costs 5 | 6 *euros*.", "Es kostet <5>.", "Es kostet 5 | 6 *Euro*."),
    ],
)


def metadata_of(card):
    return yaml.safe_load(str(card).split("---\n")[1])


def sections_of(card):
    return re.findall("^## (.*)", str(card), re.MULTILINE)


def test_the_metadata():
    task, bleu = {"type": "translation", "name": "Translation"}, {"type": "bleu", "value": 41.12, "name": "BLEU"}
    bleu["args"] = {"signature": BLEU.signature}
    chrf = {"type": "chrf", "value": 62.5, "name": "chrF2", "args": {"signature": CHRF.signature}}
    first = {"name": "Multi30k, 2016", "type": "multi30k-2016", "split": "test"}
    results = [
        {"task": task, "dataset": first, "metrics": [bleu, chrf]},
        {"task": task, "dataset": {"name": "owner/numbers", "type": "owner/numbers"}, "metrics": [bleu]},
    ]
    assert metadata_of(fill_model_card(FACTS)) == {
        "datasets": ["bentrevett/multi30k"],
        "language": ["en", "de"],
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "translation",
        "tags": ["vanilla_transformer", "attention-is-all-you-need"],
        "model-index": [{"name": "multi30k-en-de", "results": results}],
    }


def test_a_card_says_what_is_known():
    """All other sentences are in model_card.md, another card."""
    text = str(fill_model_card(FACTS))
    assert sections_of(text) == [
        *("How to use", "Architecture", "Training data", "Training", "Results", "Sample translations"),
        *("Limits", "Citation"),
    ]
    for part in (
        "- [bentrevett/multi30k](https://huggingface.co/datasets/bentrevett/multi30k)\n"
        "- files: `train.en`, `train.de`\n- 29,000 sentence pairs\n",
        "| time (h:mm:ss) | 0:20:34 |\n| software | torch 2.13.0",
        "| Multi30k, 2016 (test) | chrF2 | 62.50 | 2 |\n| owner/numbers | BLEU | 41.12 | 1 |\n",
        "\n\nOn Multi30k, 2016: 1,000 sentences, beam 4, length penalty 0.6.\n\nOn owner/numbers: 500 sentences.\n\n",
        f"The signatures are:\n\n1. `{BLEU.signature}`\n2. `{CHRF.signature}`\n",
        "| It costs 5 \\| 6 \\*euros\\*. | Es kostet \\<5\\>. | Es kostet 5 \\| 6 \\*Euro\\*. |\n",
    ):
        assert part in text
    assert text.count('from_pretrained("somebody/multi30k-en-de", trust_remote_code=True)') == 2


def test_a_learning_curve_and_the_origin():
    points = [
        {"step": 500, "target_tokens": 3500, "loss": 5.0, "perplexity": 2.7, "WER": 20.0},
        {"step": 1000, "target_tokens": 7000, "loss": 4.5, "perplexity": 2.5, "bleu": 1.5},
    ]
    text = str(fill_model_card(RunFacts("x", curve=points, base_model="a/b", converted=True)))
    assert (
        "| updates | target tokens | training loss | validation perplexity | validation WER | validation BLEU |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| 500 | 3,500 | 5.000 | 2.70 | 20.00 |  |\n| 1,000 | 7,000 | 4.500 | 2.50 |  | 1.50 |\n"
    ) in text
    origin = "converted by hf_vanilla_transformer, based on [a/b](https://huggingface.co/a/b).\n"
    assert f"(Vaswani et al. 2017), {origin}" in text


def test_a_model_of_transformers_own_class_needs_no_code():
    config = {"model_type": "marian", "architectures": ["MarianMTModel"]}
    text = str(fill_model_card(RunFacts("somebody/fine-tuned", config=config)))
    assert "It is a MarianMTModel and needs no code of its own." in text
    assert not re.search("import hf_vanilla_transformer|trust_remote_code", text)


def test_the_package_is_linked_if_it_has_an_address(monkeypatch):
    assert "trained with hf_vanilla_transformer." in str(fill_model_card(FACTS))
    installed = Message()
    installed["Project-URL"] = "Source, https://example.org/us/it"
    monkeypatch.setattr(model_card, "metadata", lambda name: installed)
    assert "trained with [hf_vanilla_transformer](https://example.org/us/it)." in str(fill_model_card(FACTS))


def test_what_is_not_known_is_left_out():
    card = fill_model_card(RunFacts("x"))
    assert sections_of(card) == ["How to use", "Limits", "Citation"]
    assert metadata_of(card).keys() == {"library_name", "pipeline_tag", "tags"}
    text = str(card)
    assert not re.search("more information needed|None|nan|\\|", text, re.IGNORECASE)
    assert "\n\n\n" not in text
    assert text.endswith("```\n")


def test_another_architecture():
    fields = {"norm_position": "pre", "decoder_layers": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 1024}
    fields |= {"position_encoding": "learned", "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 20_000}
    rows = dict(architecture_rows(VanillaTransformerConfig(**fields).to_dict()))
    assert rows == rows | {
        "layers (N), encoder + decoder": "6 + 2",
        "attention heads (h)": "8 + 4",
        "feed-forward width (d_ff)": "1,024 + 2,048",
        "layer normalisation": "before each sub-layer",
        "positions": "learned",
        "vocabulary": "37,000 tokens (source), 20,000 (target)",
        "shared embeddings": "target and output",
    }
    untied = dict(architecture_rows(VanillaTransformerConfig(tie_word_embeddings=False).to_dict()))
    assert untied["shared embeddings"] == "source and target"


# ---- Text that means something to YAML, Markdown or Python ----
NASTY = [
    "no", "a: b", "{{ 7 * 7 }} {% raw %}", "a\nb\r\n\n# c", "`a` ``b``", "<script>alert(1)</script> &amp;",
    "[a](javascript:b) ![a](b)", "*a* _b_ **c** ~~d~~ $$e$$", "a\\|b", "'a' \"b\" ä🙂\u2028", "---\na: b\n---",
]  # fmt: skip


@pytest.mark.parametrize("text", NASTY)
def test_any_text_is_what_it_was_in_metadata_in_tables_and_in_code(text):
    """A Markdown parser gives every cell's text back, in a card that has the same parts as a harmless one."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])

    def card_of(text):
        return fill_model_card(
            RunFacts(
                f"x {text}",
                source_language=text,
                license=text,
                datasets=[text],
                recipe=TrainingFacts(hardware=text),
                training_files=[f"{text.replace('/', ' ')}.en"],
                evaluations=[Evaluation(text, [Score(text, 1.0, text)], 3, text, split=text)],
                samples=[Sample(text, text, text)],
            )
        )

    def cells_of(tokens):
        places = [place for place, token in enumerate(tokens) if token.type == "td_open"]
        return ["".join(child.content for child in tokens[place + 1].children) for place in places]

    card = card_of(text)
    data, tokens, shown = card.data.to_dict(), markdown.parse(card.text), " ".join(text.split())
    assert [one.type for one in tokens] == [one.type for one in markdown.parse(card_of("harmless").text)]
    assert cells_of(tokens) == ["hardware", *[shown] * 3, "1.00", "1", *[shown] * 3]
    assert (data["license"], data["datasets"], data["language"]) == (text, [text], [text])
    (result,) = data["model-index"][0]["results"]
    assert (result["dataset"]["name"], result["dataset"]["split"]) == (text, text)
    assert result["metrics"][0]["args"] == {"signature": text}
    (block,) = re.findall("^```python\n(.*?)\n^```$", card.text, re.DOTALL | re.MULTILINE)
    strings = [node.value for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Constant)]
    assert strings.count(local_name(f"x {text}")) == 2
    assert text in strings


def test_control_characters_are_shown_and_have_no_effect():
    text = "\x1b]0;owned\x07\x9b2J"
    card = fill_model_card(RunFacts("x", license=text, samples=[Sample(text, text)], limits=text))
    assert not {"\x1b", "\x07", "\x9b"} & {*str(card)}
    assert card.text.count(r"\u001b]0;owned\u0007\u009b2J") == 2  # in the code and in the limits; Markdown escapes "]"
    assert card.data.license == text


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        (Path("outputs/my-run/averaged-3"), "./outputs/my-run/averaged-3"),
        ("./my-run", "./my-run"),
        ("my-run", "./my-run"),
        ("/home/somebody/outputs/my-run", "./my-run"),
        (Path(), f"./{Path.cwd().name}"),
    ],
)
def test_a_folder_is_named_so_that_it_is_no_repository_of_somebody_else(folder, name):
    assert local_name(folder) == name
    text = str(fill_model_card(RunFacts(local_name(folder))))
    assert re.findall(r'from_pretrained\("([^"]*)"', text) == [name, name]
    assert "trust_remote_code" not in text
    for word in ("./my-run", "../my-run", "/my-run", "my-run", "a/b/c"):
        assert not is_repository(word)
