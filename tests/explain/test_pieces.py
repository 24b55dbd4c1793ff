"""The page reads and writes texts as MarianTokenizer and DictionaryTokenizer do, and computes their models."""

import base64
import random
import re
import unicodedata

import pytest
from small_models import assert_computed, model_with

from hf_vanilla_transformer.checkpoints.loading import load_checkpoint
from hf_vanilla_transformer.explain.contents import PageError, contents_of
from hf_vanilla_transformer.explain.tokenizer import ODD_TEXTS
from hf_vanilla_transformer.interop.convert import convert
from hf_vanilla_transformer.interop.marian import from_marian
from hf_vanilla_transformer.tokenization_dictionary import DictionaryTokenizer
from tests.interop.ctranslate2_origins import ORIGINS, argos, sharpened
from tests.interop.opus_mt import TEXTS, marian_tokenizer, opus_mt_folder, opus_mt_tokenizer_files, spm_model

ALL = [*TEXTS["source"], *TEXTS["target"]]
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LETTERS = [*"aeinrst ,.«é漢🙂\u0301ﬁ½\t\x85\u200b\u3000\x00▁_@<>/'"]
LETTERS += ["  ", "</s>", "<unk>", "<0xE2>", ">>deu<<", "th", "ein"]
CODES = "#version: 0.2\nt h\nth e</w>\ni n\nin g</w>\ne i\nei n</w>\na a\naa a\na n</w>\n"


def texts(number=300):
    draw = random.Random(0)
    return [*ALL, *ODD_TEXTS, *("".join(draw.choices(LETTERS, k=draw.randint(0, 30))) for _ in range(number))]


def dictionary(*segmentations, source_eos=False):
    """A tokenizer of the tokens in texts of both sides, but for some."""
    sides = dict(zip(("source", "target"), segmentations, strict=True))
    every = {}
    for side, own in sides.items():
        alone = {**own, "tokens": [*SPECIAL.values()]}
        bare = DictionaryTokenizer(segmentation={"source": alone, "target": alone}, **SPECIAL)
        found = sorted({token for text in texts(40) for token in bare.tokenize(text)} - {*SPECIAL.values()})
        tokens = [*SPECIAL.values(), *found[:: 1 if side == "source" else -1][5:], "a", "a"]  # two have one name
        every[side] = {**own, "tokens": tokens}
    return DictionaryTokenizer(segmentation=every, source_eos=source_eos, **SPECIAL)


def spm(pieces=160, **options):
    return {"spm": base64.b64encode(spm_model(ALL, pieces, **options)).decode()}


TOKENIZERS = {
    "unigram": lambda: dictionary(spm(), spm(normalization_rule_name="nmt_nfkc_cf")),
    "bytes": lambda: dictionary(*[spm(450, byte_fallback=True, normalization_rule_name="identity")] * 2),
    "bpe": lambda: dictionary(spm(model_type="bpe"), spm(450, model_type="bpe", byte_fallback=True)),
    "spaces": lambda: dictionary(
        spm(remove_extra_whitespaces=False), spm(model_type="bpe", add_dummy_prefix=False), source_eos=True
    ),
    "codes": lambda: dictionary({"codes": CODES}, {"codes": CODES.partition("\n")[2]}, source_eos=True),
    "words": lambda: dictionary({"level": "words"}, {"level": "word"}),
    "characters": lambda: dictionary({"level": "char"}, {"level": "char"}),
}


def model_for(tokenizer):
    sizes = {"vocab_size": len(tokenizer), "decoder_vocab_size": len(tokenizer.target_encoder)}
    return model_with(tokenizer, **sizes, share_encoder_decoder_embeddings=False, encoder_layers=1, decoder_layers=1)


def check(compute, model, tokenizer, every):
    results = compute(model, tokenizer, [{"text": text} for text in every])
    for text, result in zip(every, results, strict=True):
        targets = tokenizer(text_target=text)["input_ids"]
        found = result["ids"], result["targets"], result["decoded"]
        expected = tokenizer(text)["input_ids"], targets, tokenizer.decode(targets, skip_special_tokens=True)
        assert (text, *found) == (text, *expected)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_dictionaries(compute, kind):
    tokenizer = TOKENIZERS[kind]()
    check(compute, model_for(tokenizer), tokenizer, texts())


@pytest.mark.parametrize("separate", [False, True])
def test_marian(compute, tmp_path, separate):
    files = opus_mt_tokenizer_files(tmp_path, multi_target=not separate, separate_vocabs=separate)
    tokenizer = marian_tokenizer(files)
    sizes = {"vocab_size": len(tokenizer.encoder), "share_encoder_decoder_embeddings": not separate}
    sizes |= {"decoder_vocab_size": len(tokenizer.target_encoder)} if separate else {}
    check(compute, model_with(tokenizer, **sizes, encoder_layers=1, decoder_layers=1), tokenizer, texts())


def test_the_rules_for_all_characters(compute):
    """Each of Unicode's characters, as SentencePiece's rules change it."""
    tokenizer = dictionary(spm(), spm(model_type="bpe"))
    assigned = [chr(one) for one in range(0x32000) if unicodedata.category(chr(one)) not in ("Cn", "Cs", "Co")]
    every = ["a".join(assigned[first : first + 500]) for first in range(0, len(assigned), 500)]
    check(compute, model_for(tokenizer), tokenizer, every)


# ---- Whole models ----
def made(name, folder):
    """A model with its tokenizer: OPUS-MT's of transformers, or converted from CTranslate2's format."""
    if name == "transformers":
        model, tokenizer = from_marian(opus_mt_folder(folder, decoder_attention_heads=2))
        model.generation_config.max_length = 12
        return model, tokenizer
    origin = argos(folder) if name == "argos" else sharpened(ORIGINS[name](folder))
    convert(origin, folder / "converted")
    tokenizer, model = load_checkpoint(folder / "converted")
    model.generation_config.max_new_tokens = 12
    return model, tokenizer


@pytest.mark.parametrize("name", ["transformers", "argos", "opus_mt", "quickmt", "fairseq"])
def test_models_of_others(compute, tmp_path, name):
    model, tokenizer = made(name, tmp_path)
    start = model.generation_config.decoder_start_token_id
    assert_computed(compute, model, tokenizer, ALL[:4], [start, 9, 30, 77], atol=5e-4)


# ---- What is refused ----
@pytest.mark.parametrize(
    ("side", "problem"),
    [
        (lambda: spm(model_type="char"), "has no models of words or characters"),
        (lambda: spm(user_defined_symbols=["<x>"]), "has no symbols of the user"),
        (lambda: {"codes": CODES, "vocabulary": ["a"]}, "no vocabulary's threshold"),
    ],
)
def test_what_the_page_lacks(side, problem):
    tokenizer = dictionary(*[side()] * 2)
    with pytest.raises(PageError, match=re.escape(problem)):
        contents_of(model_for(tokenizer), tokenizer)
