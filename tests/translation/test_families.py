"""Models of several languages, of families that transformers has."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, normalizers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, pipeline

from hf_vanilla_transformer import Translator, evaluate
from hf_vanilla_transformer.serving.models import LanguagesError, batcher_of
from hf_vanilla_transformer.translation.attention import attention_of
from hf_vanilla_transformer.translation.languages import known_languages
from hf_vanilla_transformer.translation.scoring import score_pairs, score_targets
from tests.interop.opus_mt import TEXTS, opus_mt_folder
from tests.translation.families import LANGUAGES, TASKS, family

SOURCES, TARGETS = TEXTS["source"][:2], TEXTS["target"][:2]
FEW = {"num_beams": 2, "max_new_tokens": 12}
FAMILIES = [kind for kind in LANGUAGES if kind != "t5"]
FAMILY_OPTIONS = dict.fromkeys(FAMILIES, "forced_bos_token_id") | {"mbart": "decoder_start_token_id"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: family(kind, tmp_path_factory.mktemp(kind)) for kind in LANGUAGES}


@pytest.fixture
def opened(folders):
    """What transformers opens: a function from a family to its tokenizer and model."""
    return lambda kind: (
        AutoTokenizer.from_pretrained(folders[kind]),
        AutoModelForSeq2SeqLM.from_pretrained(folders[kind]).eval(),
    )


def by_hand(tokenizer, model, source, target, texts, **options):
    """Translations as transformers' documentation of each family has them, one text at a time."""
    tokenizer.src_lang = source
    number = tokenizer.convert_tokens_to_ids(f"__{target}__" if "M2M" in type(tokenizer).__name__ else target)
    first = "decoder_start_token_id" if type(tokenizer).__name__ == "MBartTokenizer" else "forced_bos_token_id"
    rows = [model.generate(**tokenizer(text, return_tensors="pt"), **{first: number}, **options)[0] for text in texts]
    return [text.strip() for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_family_is_told_its_languages(folders, opened, kind):
    source, target = LANGUAGES[kind]
    tokenizer, model = opened(kind)
    there, back = (by_hand(tokenizer, model, *pair, SOURCES, **FEW) for pair in ((source, target), (target, source)))
    assert there != back  # otherwise the languages have no effect
    translator = Translator(folders[kind], src_lang=source, tgt_lang=target)
    few = {**FEW, "unknown_target": "drop"}  # as `skip_special_tokens` does
    before = translator.tokenizer.src_lang, translator.tokenizer.tgt_lang
    assert [one.strip() for one in translator(SOURCES, **few)] == there
    assert [one.strip() for one in translator(SOURCES, src_lang=target, tgt_lang=source, **few)] == back
    assert [one.strip() for one in translator((text for text in SOURCES), window=2, **few)] == there
    assert (translator.tokenizer.src_lang, translator.tokenizer.tgt_lang) == before
    best = translator(SOURCES[0], n_best=2, **few)
    assert best[0].text.strip() == there[0]
    assert best[0].score > best[1].score
    translate = pipeline("vanilla-translation", model=str(folders[kind]), src_lang=source, tgt_lang=target)
    assert [one["translation_text"].strip() for one in translate(SOURCES, **few)] == there  # as transformers 4 had it


@pytest.mark.parametrize("kind", FAMILIES)
def test_scores_and_attention_are_of_these_languages(opened, kind):
    source, target = LANGUAGES[kind]
    tokenizer, model = opened(kind)
    (score,) = score_pairs(model, tokenizer, SOURCES[:1], TARGETS[:1], src_lang=source, tgt_lang=target)
    tokenizer.src_lang, tokenizer.tgt_lang = source, target
    batch = tokenizer(SOURCES[0], text_target=TARGETS[0], return_tensors="pt")
    with torch.no_grad():
        loss = model(**batch).loss.item() * batch["labels"].shape[1]
    assert score.log_probability == pytest.approx(-loss, rel=1e-5)
    model.set_attn_implementation("eager")
    found = attention_of(model, tokenizer, SOURCES[0], TARGETS[0], src_lang=target, tgt_lang=source)
    code = f"__{target}__" if kind == "m2m100" else target
    assert code in (found.source_pieces[0], found.source_pieces[-1])


def test_a_generation_config_may_name_the_target(opened):
    tokenizer, model = opened("mbart50")
    wanted = by_hand(tokenizer, model, "en_XX", "de_DE", SOURCES, **FEW)
    model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids("de_DE")
    translator = Translator(model, tokenizer=tokenizer, src_lang="en_XX")
    assert [one.strip() for one in translator(SOURCES, **FEW)] == wanted


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_call_says_of_the_target_counts_before_the_translators(folders, opened, kind):
    source, target = LANGUAGES[kind]
    translator = Translator(folders[kind], src_lang=target, tgt_lang=target)
    wanted = translator(SOURCES, tgt_lang=source, **FEW)
    assert wanted != translator(SOURCES, **FEW)
    option, number = FAMILY_OPTIONS[kind], known_languages(translator.tokenizer)[source]
    for options in ({option: number, **FEW}, {"generation_config": GenerationConfig(**{option: number}, **FEW)}):
        assert translator(SOURCES, **options) == wanted
        result = evaluate(translator, SOURCES, TARGETS, **options)
        assert result.translations == wanted
        assert result.likelihood == score_targets(
            *opened(kind)[::-1], SOURCES, TARGETS, src_lang=target, tgt_lang=source
        )
        with pytest.raises(ValueError, match=f"tgt_lang is '{target}', and {option} says '{source}'; give one of the"):
            translator(SOURCES, tgt_lang=target, **options)
    with pytest.raises(ValueError, match=f"{option} is 5, no language; give tgt_lang, one of"):
        translator(SOURCES, **{option: 5})


def test_a_plan_has_the_languages_of_its_translator(folders):
    translator = Translator(folders["nllb"], src_lang="eng_Latn", tgt_lang="deu_Latn")
    numbers = known_languages(translator.tokenizer)
    assert translator.plan().forced_begin == numbers["deu_Latn"]
    assert translator.plan(tgt_lang="eng_Latn", num_beams=2).forced_begin == numbers["eng_Latn"]
    plan = Translator(folders["t5"], src_lang="en", tgt_lang="de").plan()
    assert (plan.num_beams, plan.limit) == (3, ("max_length", 15))
    with pytest.raises(ValueError, match="the model has several languages: give tgt_lang"):
        Translator(folders["nllb"]).plan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "the model has several languages: give tgt_lang, one of ace_Arab, .* and 19. more"),
        ({"tgt_lang": "deu_Latin"}, "tgt_lang is 'deu_Latin', but the model's languages are .*did you mean 'deu_Latn'"),
        ({"src_lang": "de", "tgt_lang": "deu_Latn"}, "src_lang is 'de', but"),
        ({"tgt_lang": "deu_Latn", "source_prefix": "to German: "}, "source_prefix is for other models"),
    ],
)
def test_languages_that_cannot_be(folders, options, message):
    with pytest.raises(ValueError, match=message):
        Translator(folders["nllb"])("A man.", **options)


def test_languages_that_a_tokenizer_does_not_treat_as_special(opened):
    tokenizer, model = opened("m2m100")
    tokenizer._extra_special_tokens = []
    with pytest.raises(ValueError, match="languages aren't special tokens, so that translations would begin with 'de'"):
        Translator(model, tokenizer=tokenizer)("A man.", src_lang="en", tgt_lang="de")


@pytest.mark.parametrize("how", ["add_tokens", "add_special_tokens"])
@pytest.mark.parametrize("kind", ["nllb", "mbart50", "mbart"])
def test_a_language_may_be_added(opened, tmp_path, kind, how):
    tokenizer, model = opened(kind)
    tokenizer.add_tokens(["plain"])
    added = {"add_tokens": [AddedToken("new_Latn", special=True)]}
    added["add_special_tokens"] = {"extra_special_tokens": [*tokenizer.extra_special_tokens, "new_Latn"]}
    getattr(tokenizer, how)(added[how])
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    translator, old = Translator(tmp_path), LANGUAGES[kind][0]
    for source, target in (("new_Latn", old), (old, "new_Latn")):
        wanted = by_hand(tokenizer, model, source, target, SOURCES, **FEW)
        assert [one.strip() for one in translator(SOURCES, src_lang=source, tgt_lang=target, **FEW)] == wanted
    number = tokenizer.convert_tokens_to_ids("new_Latn")
    assert [one.strip() for one in translator(SOURCES, src_lang=old, **{FAMILY_OPTIONS[kind]: number}, **FEW)] == wanted
    assert not {"plain", "<mask>", "</s>"} & known_languages(translator.tokenizer).keys()


def test_a_source_language_has_to_be_given(opened):
    tokenizer, model = opened("nllb")
    del tokenizer.init_kwargs["src_lang"]  # as in published folders
    with pytest.raises(ValueError, match="several languages: give src_lang, one of"):
        Translator(model, tokenizer=tokenizer)("A man.", tgt_lang="deu_Latn")


def test_the_prefix_and_settings_of_a_task(folders, opened, caplog):
    tokenizer, model = opened("t5")
    prefix = TASKS["translation_en_to_de"]["prefix"]
    inputs = [tokenizer(prefix + text, return_tensors="pt") for text in SOURCES]
    rows = [model.generate(**one, num_beams=3, max_length=15)[0] for one in inputs]
    wanted = tokenizer.batch_decode(rows, skip_special_tokens=True)
    translator = Translator(folders["t5"])
    assert translator(SOURCES, src_lang="en", tgt_lang="de") == wanted
    assert not caplog.records
    assert translator(SOURCES, source_prefix=prefix, num_beams=3, max_length=15) == wanted
    longer = translator(SOURCES, src_lang="en", tgt_lang="de", max_new_tokens=20, num_beams=1)
    assert longer == translator(SOURCES, source_prefix=prefix, max_new_tokens=20, num_beams=1)
    config = GenerationConfig(max_new_tokens=20, num_beams=1)
    assert translator(SOURCES, src_lang="en", tgt_lang="de", generation_config=config) == longer
    plain = translator(SOURCES, num_beams=3, max_length=15)
    assert plain != wanted
    assert "trained for translation_en_to_de" in caplog.text
    with pytest.raises(ValueError, match="the model's tasks are translation_en_to_de; give source_prefix for others"):
        translator("A man.", src_lang="en", tgt_lang="fr")


@pytest.mark.parametrize("options", [{"source_prefix": "translate it: "}, {"src_lang": "en", "tgt_lang": "de"}])
def test_nothing_is_translated_from_the_bare_prefix(folders, options):
    translator = Translator(folders["t5"], **options)
    translator.model.generation_config.update(max_new_tokens=9, min_new_tokens=3)
    text = next(one for one in SOURCES if translator(one))  # a random model may write special tokens alone
    assert translator(f"{text}\u2603", unknown="ignore") == translator(text)
    assert translator(["\u2603", " \u2603\u2603"], unknown="ignore") == ["", ""]
    translator.tokenizer.backend_tokenizer.normalizer = normalizers.Nmt()  # as SentencePiece drops invisible characters
    assert translator(["\u200b", "\ufeff \u200b"]) == ["", ""]


def test_lines_of_which_nothing_is_left_stay_lines(folders):
    pytest.importorskip("sentencex")
    translator = partial(Translator(folders["m2m100"], src_lang="en", tgt_lang="de"), max_new_tokens=3)
    one = translator("hello")
    for text, unknown in (("hello\n\u200b\n\thello", "keep"), ("hello\n\u2603\n\thello", "ignore")):
        assert translator(text, split_sentences="en", unknown=unknown) == f"{one}\n\n\t{one}"
    assert translator("\u200b\n hello\n\u200b\n", split_sentences="en") == f"\n {one}\n\n"


def test_a_model_that_names_no_limit_is_not_cut_at_20_tokens(folders):
    (row,) = Translator(folders["t5"])(["Two girls."], source_prefix="", num_beams=2, n_best=1, min_new_tokens=30)
    assert row[0].num_tokens > 30


@pytest.mark.parametrize("kind", ["nllb", "m2m100", "mbart50", "t5"])
def test_ctranslate2_gives_the_same(folders, kind):
    pytest.importorskip("ctranslate2")
    pair = dict(zip(("src_lang", "tgt_lang"), LANGUAGES[kind], strict=True))
    own, other = (Translator(folders[kind], "cpu", backend=name, **pair) for name in ("engine", "ctranslate2"))
    for options in ({"num_beams": 1}, {"num_beams": 3, "early_stopping": True}):
        assert other(SOURCES, max_new_tokens=12, **options) == own(SOURCES, max_new_tokens=12, **options)


def test_what_ctranslate2_would_make_wrong_is_refused(opened, folders):
    pytest.importorskip("ctranslate2")
    with pytest.raises(ValueError, match="its decoder starts with a language, and CTranslate2's with one token"):
        Translator(folders["mbart"], backend="ctranslate2")
    tokenizer, model = opened("nllb")
    model.model.encoder.embed_positions.offset = 3  # CTranslate2 then cuts the table at another row
    with pytest.raises(ValueError, match="makes another model of this one"):
        Translator(model, tokenizer=tokenizer, backend="ctranslate2")


def test_a_short_sequence_that_ctranslate2_would_make_wrong_is_enough(folders, monkeypatch):
    backend = pytest.importorskip("hf_vanilla_transformer.translation.ctranslate2").CTranslate2Backend
    of_ctranslate2 = backend.log_probabilities

    def changed(self, sources, targets):  # by less than a thousandth of the longest one's
        first, *others = of_ctranslate2(self, sources, targets)
        return [first - 0.0005 * abs(min(others)), *others]

    monkeypatch.setattr(backend, "log_probabilities", changed)
    with pytest.raises(ValueError, match="makes another model of this one"):
        Translator(folders["nllb"], backend="ctranslate2")


def test_ctranslate2_takes_half_precision(opened):
    pytest.importorskip("ctranslate2")
    tokenizer, model = opened("mbart50")
    translator = Translator(model.to(torch.bfloat16), tokenizer=tokenizer, backend="ctranslate2")
    assert translator("A man.", src_lang="en_XX", tgt_lang="de_DE", max_new_tokens=5)
    assert model.dtype == torch.bfloat16


def test_the_service_tells_each_request_its_languages(folders):
    translator, pairs = Translator(folders["nllb"]), [("eng_Latn", "deu_Latn"), ("deu_Latn", "eng_Latn")]
    translator.model.generation_config.max_new_tokens = 9
    task = Translator(folders["t5"])
    with ThreadPoolExecutor(1) as thread:
        batcher = batcher_of(translator, pairs, thread=thread)

        async def answers():
            some = (batcher.translate(SOURCES[:1], source=source, target=target) for source, target in pairs)
            return [row[0][0].text for row in await asyncio.gather(*some)]

        wanted = [translator(SOURCES[0], src_lang=source, tgt_lang=target) for source, target in pairs]
        assert asyncio.run(answers()) == wanted
        with pytest.raises(LanguagesError, match="eng_Latn-de: tgt_lang is 'de', but the model's languages are"):
            batcher_of(translator, [("eng_Latn", "de")], thread=thread)
        batcher = batcher_of(task, [("en", "de")], thread=thread)  # whose alternatives are searched as the task says
        rows = asyncio.run(batcher.translate(SOURCES, 2, source="en", target="de"))
    wanted = task(SOURCES, src_lang="en", tgt_lang="de", n_best=2)
    assert [[one.text for one in row] for row in rows] == [[one.text for one in row] for row in wanted]


def test_the_command(folders, vanilla_transformer, tmp_path, monkeypatch):
    lines = tmp_path / "in.txt"
    lines.write_text("\n".join(SOURCES) + "\n", encoding="utf-8")
    command = ("translate", "--model", folders["nllb"], "--input", lines, "--num-beams", 2, "--max-new-tokens", 12)
    code, output, _ = vanilla_transformer(*command, "--src-lang", "eng_Latn", "--tgt-lang", "deu_Latn")
    wanted = Translator(folders["nllb"])(SOURCES, src_lang="eng_Latn", tgt_lang="deu_Latn", **FEW)
    assert (code, output.splitlines()) == (0, wanted)
    code, _, errors = vanilla_transformer(*command)
    assert code == 2
    assert "the model has several languages: give tgt_lang" in errors
    command = ("evaluate", "--model", folders["t5"], "--source", lines, "--reference", lines, "--json", "figures.json")
    monkeypatch.chdir(tmp_path)
    assert vanilla_transformer(*command, "--src-lang", "en", "--tgt-lang", "de")[0] == 0
    settings = json.loads(Path("figures.json").read_text(encoding="utf-8"))["results"][0]["decoding"]
    assert (settings["num_beams"], settings["max_length"]) == (3, 15)


def test_codes_of_opus_mt_count_in_scores(tmp_path):
    folder = opus_mt_folder(tmp_path / "opus", multi_target=True)
    translator = Translator(folder)
    model = translator.model, translator.tokenizer
    own = score_pairs(*model, [">>fra<< A man.", "A man."], TARGETS[:2], tgt_lang="deu")
    assert own == score_pairs(*model, [">>fra<< A man.", ">>deu<< A man."], TARGETS[:2])
    with pytest.raises(ValueError, match="src_lang is 'eng', but the model isn't told the source language"):
        translator("A man.", src_lang="eng", tgt_lang="deu")
