"""The page as a file: what it refuses, that no text gets out of its place, that all of it is there in two languages."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch
from small_models import TEXTS, model_with
from tokenizers.normalizers import Lowercase
from transformers import MarianConfig, MarianMTModel

from hf_vanilla_transformer import VanillaTransformerTokenizerFast
from hf_vanilla_transformer.data.symbols import train_tokenizer
from hf_vanilla_transformer.explain import contents
from hf_vanilla_transformer.explain.attention import attention_page
from hf_vanilla_transformer.explain.contents import PageError, contents_of
from hf_vanilla_transformer.explain.page import FOLDER, MODULES, model_page
from hf_vanilla_transformer.translation.attention import Attention

HOSTILE = [
    "</script><img src=x onerror=document.title='broken'>", "<!--<script>", "]]>", "&amp;", "\u2028", '"', "'", "\\",
    "${1}", "{{data}}", "{{title}}",
]  # fmt: skip
ODD = ["שלום", "半分", "", " ", "\u200b", "\u202e", "🙂", "\x00"]


class Page(HTMLParser):
    """The tags of a page, and the text of its scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.inside, self.is_inside = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.is_inside = tag in ("script", "style", "title")
        if self.is_inside:
            self.inside.append("")

    def handle_endtag(self, tag):
        self.is_inside = False

    def handle_data(self, data):
        if self.is_inside:
            self.inside[-1] += data

    @property
    def data(self):
        return json.loads(self.inside[2])


def attention_with(source, target, layers=2, heads=3):
    s, t = len(source), len(target)
    shapes = {"encoder": (s, s), "decoder": (t, t), "cross": (t, s)}
    weights = {name: torch.randn(layers, heads, *shape).mul(3).softmax(-1) for name, shape in shapes.items()}
    return Attention(source, ["<s>", *target[:-1]], target, **weights)


# ---- What it is made of ----
def test_no_text_gets_out_of_its_place(tokenizer):
    model = model_with(tokenizer)
    tame = Page(model_page(model, tokenizer, "title", ["a"]))
    page = Page(model_page(model, tokenizer, "</title><script>1</script>{{data}}", HOSTILE))
    assert page.tags == tame.tags
    assert page.inside[0] == "</title><script>1</script>{{data}}"
    assert (page.inside[1], page.inside[3]) == (tame.inside[1], tame.inside[3])
    assert page.data["examples"] == HOSTILE


def test_the_policy_allows_this_script_and_these_styles_alone(tokenizer):
    text = model_page(model_with(tokenizer), tokenizer, "title")
    page = Page(text)
    (policy,) = [one["content"] for tag, one in page.tags if one.get("http-equiv") == "Content-Security-Policy"]
    digests = [base64.b64encode(hashlib.sha256(page.inside[n].encode()).digest()).decode() for n in (3, 1)]
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{digests[0]}'; style-src 'sha256-{digests[1]}'; base-uri 'none'"
    )
    without_data = text.replace(page.inside[2], "")
    assert not re.search(
        r"https?:(?!//www\.w3\.org/2000/svg)|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttp|innerHTML|eval\(",
        without_data,
    )
    assert not re.search(r'\sstyle="|\son\w+="', without_data.partition("<script>")[0])


def test_the_modules_are_one_script():
    node = shutil.which("node")
    if node is None:
        pytest.skip("NODE IS NOT INSTALLED: the script's syntax isn't checked")
    assert {path.stem for path in FOLDER.glob("*.mjs")} == set(MODULES)
    script = Page(attention_page(attention_with(["a"], ["b"]), "title")).inside[3]
    subprocess.run([node, "--check", "-"], input=script, text=True, check=True)
    for number, name in enumerate(MODULES):
        text = (FOLDER / f"{name}.mjs").read_text(encoding="utf-8")
        assert set(re.findall(r'^import .* from "\./(\w+)\.mjs";$', text, re.MULTILINE)) <= set(MODULES[:number])
        assert max(map(len, text.splitlines())) <= 120, name


def test_texts_are_there_in_both_languages():
    texts = json.loads((FOLDER / "texts.json").read_text(encoding="utf-8"))
    scripts = "".join((FOLDER / f"{name}.mjs").read_text(encoding="utf-8") for name in MODULES)
    named = set(re.findall(r'\bt\(\s*"(\w+)"', scripts))
    assert len(named) > 40
    assert named <= set(texts)
    for key, one in texts.items():
        assert set(one) == {"en", "zh"}, key
        assert sorted(re.findall(r"\{\w+\}", one["en"])) == sorted(re.findall(r"\{\w+\}", one["zh"])), key


# ---- What it refuses ----
def test_a_model_that_is_too_large_is_refused_with_what_to_do(tokenizer, monkeypatch):
    model = model_with(tokenizer)
    size = len(contents_of(model, tokenizer)["weights"])
    monkeypatch.setattr(contents, "MOST_BYTES", size - 1)
    with pytest.raises(PageError, match=r"parameters in float32 take 0 MB.*give --quantization int8 \(8 bits\), or a"):
        contents_of(model, tokenizer)
    assert len(contents_of(model, tokenizer, "int8")["weights"]) < size / 2
    monkeypatch.setattr(contents, "MOST_BYTES", size // 10)
    with pytest.raises(PageError, match=r"give a smaller model$"):
        contents_of(model, tokenizer)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"no_repeat_ngram_size": 3}, "the page's search has no no_repeat_ngram_size"),
        ({"min_new_tokens": 3}, "has no min_new_tokens"),
        ({"do_sample": True}, "has no do_sample=True"),
        ({"bad_words_ids": [[7], [8, 9]]}, "bars single tokens alone; remove (8, 9) from bad_words_ids"),
        ({"num_beams": 11}, "num_beams is 11; the page's tree has at most 10"),
        ({"eos_token_id": None}, "no decoder_start_token_id or no eos_token_id"),
    ],
)
def test_a_search_that_the_page_lacks_is_refused(tokenizer, settings, problem):
    model = model_with(tokenizer)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(PageError, match=re.escape(problem)):
        contents_of(model, tokenizer)


def test_models_that_the_page_does_not_compute_are_refused(tokenizer):
    small = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 320, "pad_token_id": 0}
    with pytest.raises(PageError, match="MarianMTModel is not"):
        contents_of(MarianMTModel(MarianConfig(**small, **heads)), tokenizer)
    with pytest.raises(PageError, match="no activation mish; it has relu"):
        contents_of(model_with(tokenizer, activation_function="mish"), tokenizer)
    hooked = model_with(tokenizer)
    hooked.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(PageError, match="has hooks"):
        contents_of(hooked, tokenizer)


def trained(vocab_size=300, **options):
    return VanillaTransformerTokenizerFast.train_from_iterator(TEXTS, vocab_size, **options)


def beginning():
    tokenizer = trained()
    tokenizer.add_bos_token = True
    tokenizer.update_post_processor()
    return tokenizer


def lowering():
    tokenizer = trained()
    tokenizer.backend_tokenizer.normalizer = Lowercase()
    return tokenizer


OTHER_TOKENIZERS = {
    "added tokens, and the tokenizer has <2de>": lambda: trained(extra_special_tokens=["<2de>"]),
    "special tokens in them as plain text": lambda: trained(split_special_tokens=False),
    "with </s> at their end alone": beginning,
    "by rules of its own": lowering,
    "and MarianTokenizer do; the model has a": lambda: train_tokenizer(
        [{"source": text, "target": text} for text in TEXTS], ["words"]
    ),
    "the tokenizer has 330 tokens, more than the model": lambda: trained(330, min_frequency=1),
}


@pytest.mark.parametrize("problem", OTHER_TOKENIZERS)
def test_tokenizers_that_read_otherwise_are_refused(tokenizer, problem):
    with pytest.raises(PageError, match=re.escape(problem)):
        contents_of(model_with(tokenizer), OTHER_TOKENIZERS[problem]())


# ---- Without a model ----
def test_weights_of_attention_are_in_the_page():
    attention = attention_with(["a", "b"], ["c", "d", "e"])
    found = Page(attention_page(attention, "t")).data["attention"]
    assert (found["source"], found["inputs"], found["targets"]) == (["a", "b"], ["<s>", "c", "d"], ["c", "d", "e"])
    for name, part in found["parts"].items():
        weights = getattr(attention, name)
        read = torch.frombuffer(bytearray(base64.b64decode(part["weights"])), dtype=torch.uint8) / 255
        assert torch.allclose(read.view(weights.shape), weights, atol=1 / 500)
        assert (part["layers"], part["heads"]) == (2, 3)


def test_tokens_of_attention_stay_in_their_place():
    tame = Page(attention_page(attention_with(["a"] * 19, ["b"] * 3), "title"))
    page = Page(attention_page(attention_with([*HOSTILE, *ODD], HOSTILE[:3]), "title"))
    assert page.tags == tame.tags
    source = page.data["attention"]["source"]
    assert source[: len(HOSTILE)] == [piece if piece.strip() else "␣" for piece in HOSTILE]
    assert source[len(HOSTILE) :] == ["שלום", "半分", "␣", "␣", "␣", "␣", "🙂", "␣"]
