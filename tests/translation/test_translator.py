"""The Translator against the functions that it calls, plain generate(), and its model's own weights."""

import io
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import datasets
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opus_mt import CODES, marian_tokenizer, opus_mt_folder
from random_models import TEXTS, new_marian, new_model
from safetensors.torch import load_file
from transformers import GenerationConfig, MarianMTModel, pipeline
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.pt_utils import KeyDataset

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerTokenizerFast, engine
from hf_vanilla_transformer.data.hub_names import HubError
from hf_vanilla_transformer.documents.document import open_document, translate_document
from hf_vanilla_transformer.errors import CheckpointError
from hf_vanilla_transformer.translation import division, reading, register_pipeline
from hf_vanilla_transformer.translation.attention import attention_of
from hf_vanilla_transformer.translation.backend import Translation
from hf_vanilla_transformer.translation.evaluation import evaluate
from hf_vanilla_transformer.translation.pipeline import VanillaTranslationPipeline
from hf_vanilla_transformer.translation.scoring import score_pairs
from hf_vanilla_transformer.translation.translator import BACKENDS, DeviceError, Translator
from tests.decoding import decode

SHORT = {"max_extra_length": 5}


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "ctranslate2":
        pytest.importorskip("ctranslate2", reason="ctranslate2 isn't installed (the extra export has it)")
    return request.param


@pytest.fixture
def translator(checkpoint):
    return Translator(checkpoint, "cpu")


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Each text by itself."""
    loaded = Translator(checkpoint, "cpu")
    return [decode(loaded.model, loaded.tokenizer, [text], **SHORT)[0][0].text for text in TEXTS]


# ---- What goes in, and what comes out ----
def test_a_string_gives_a_string(translator, expected):
    assert translator(TEXTS[1], **SHORT) == expected[1]
    assert translator("  ") == ""
    assert len(set(expected)) >= 4


def test_what_has_a_length_gives_a_list_and_what_has_none_a_stream(translator, expected):
    data = datasets.Dataset.from_dict({"en": TEXTS})
    items = KeyDataset([{"en": text} for text in TEXTS], "en")  # a data set of torch
    for texts in (TEXTS, data["en"], items):
        assert translator(texts, batch_size=2, **SHORT) == expected
    assert translator([]) == []
    lines = [f"{text}\n" for text in TEXTS]  # as a file has them
    for texts in (iter(TEXTS), io.StringIO("".join(lines)), data.to_iterable_dataset()["en"]):
        stream = translator(texts, **SHORT)
        assert iter(stream) is stream
        assert list(stream) == expected
    assert translator([f"\t {text} \r\n" for text in TEXTS], **SHORT) == expected


def test_a_stream_reads_a_window_ahead_and_no_more(translator, expected):
    read = []

    def producer():
        for text in TEXTS * 3:
            read.append(text)
            yield text

    stream = translator.stream(producer(), window=4, **SHORT)
    assert read == []
    assert next(stream) == expected[0]
    assert len(read) == 4
    assert [next(stream) for _ in range(3)] == expected[1:4]
    assert len(read) == 4
    assert list(stream) == (expected * 3)[4:]
    assert list(translator.stream(TEXTS, window=1, **SHORT)) == expected


@pytest.mark.parametrize("options", [{"num_beams": 1, "early_stopping": False}, {"num_beams": 3}])
def test_alignments_are_generates_own(translator, options):
    rows = translator(TEXTS, alignments=True, **SHORT, **options)
    assert [row.text for row in rows] == translator(TEXTS, **SHORT, **options)
    for text, row in zip(TEXTS, rows, strict=True):
        if not text:
            assert row.alignment is None
            continue
        inputs = translator.tokenizer([text], return_tensors="pt")
        output = translator.model.generate(
            **inputs, **SHORT, **options, output_alignments=True, return_dict_in_generate=True
        )
        assert torch.allclose(row.alignment.weights, output.alignments[0, : row.num_tokens], atol=1e-6)
        assert list(row.alignment.source) == translator.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
        tokens = output.sequences[0, 1 : 1 + row.num_tokens]
        assert list(row.alignment.target) == translator.tokenizer.convert_ids_to_tokens(tokens)
        row.alignment.weights.mul_(2.0)  # which torch refuses outside, if it was made in inference mode
    again = translator(TEXTS[0], output_alignments=True, **SHORT, **options)
    assert (again, again.alignment.source_ids) == (rows[0], rows[0].alignment.source_ids)
    best = translator(TEXTS[0], alignments=True, n_best=2, num_beams=2, **SHORT)
    assert translator(TEXTS[0], num_return_sequences=2, num_beams=2, **SHORT) == best
    assert [one.alignment.weights.shape[0] for one in best] == [one.num_tokens for one in best]


@pytest.mark.parametrize(
    ("texts", "options", "error", "message"),
    [
        (None, {}, TypeError, "sentences is None; give strings in an order"),
        (b"a", {}, TypeError, "sentences is a string"),
        ({"a": 1}, {}, TypeError, "sentences is of type dict"),
        ({"a"}, {}, TypeError, "sentences is of type set"),
        (["a", 7], {}, TypeError, r"sentences\[1\] is of type int"),
        (datasets.Dataset.from_dict({"en": ["a"]}), {}, TypeError, r"sentences\[0\] is of type dict"),
        (pandas.DataFrame({"en": ["a"], "de": ["b"]}), {}, TypeError, "sentences is of type DataFrame"),
        ("a\ud83d", {}, ValueError, "has a lone surrogate at position 1"),
        (["a", "b"], {"prefix": ["a"]}, ValueError, "prefix has 1 strings for 2 sentences; give one for each"),
        (["a", "b"], {"prefix": [None, "a"]}, TypeError, r"prefix\[0\] is None"),
        ("a", {"n_best": 5}, ValueError, "n_best=5 needs a beam search of at least 5 beams, and num_beams is 4; raise"),
        ("a", {"n_best": 1, "num_beams": 1}, ValueError, "n_best=1 needs a beam search of at least 2 beams"),
        ("a", {"num_beams": 10**9}, ValueError, "num_beams is 1000000000; it has to be an integer from 1 to 1,000"),
        ("a", {"num_beams": 4.0}, ValueError, r"num_beams is 4\.0; it has to be an integer"),
        ("a", {"max_new_tokens": 10**9}, ValueError, "max_new_tokens is 1000000000; it has to be an integer from 1 to"),
        ("a", {"batch_size": 0}, ValueError, "batch_size is 0; it has to be an integer from 1 to 100,000"),
        ("a", {"gnmt_length_penalty": -1.0}, ValueError, "`gnmt_length_penalty` is -1.0"),
        ("a", {"decoder_input_ids": [[1, 5]]}, ValueError, "decoder_input_ids comes from the sentences here; leave it"),
    ],
)
def test_what_cannot_be_translated(translator, texts, options, error, message):
    with pytest.raises(error, match=message):
        translator(texts, **options)


CALLS = {
    "a call": lambda translator, **options: translator([], **options),
    "a stream": lambda translator, **options: translator.stream(iter(()), **options),
    "a plan": lambda translator, **options: translator.plan(**options),
    "a page": lambda translator, **options: translate_document(translator, open_document("", ".html"), **options),
    "a file": lambda translator, **options: translate_document(translator, open_document("", ""), **options),
    "a pipeline": lambda translator, **options: VanillaTranslationPipeline(
        translator.model, translator.tokenizer, device="cpu", **options
    )([]),
    "an evaluation": lambda translator, **options: evaluate(translator, ["a"], ["b"], **options),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_option_that_nothing_reads_is_an_error_before_anything_is_translated(translator, name):
    misspelt = GenerationConfig(nmu_beams=2)
    for options in ({"nmu_beams": 2}, {"nmu_beams": None}, {"generation_config": misspelt}):
        with pytest.raises(TypeError, match="there is no option 'nmu_beams'; did you mean 'num_beams'"):
            CALLS[name](translator, **options)
    for unread in ("labels", "past_key_values", "cache", "_num_beams"):
        with pytest.raises(TypeError, match=f"there is no option '{unread}'"):
            CALLS[name](translator, **{unread: 1})


def test_divisions_and_errors_in_a_stream_name_the_text(translator, expected):
    divided = []
    texts = [*TEXTS[:3], "half past nine " * 9, None]
    options = {"max_source_tokens": 20, "on_division": lambda *one: divided.append(one)}
    stream = translator.stream(texts, window=2, **options, **SHORT)
    assert [next(stream) for _ in range(4)][::2] == expected[:3:2]
    assert [index for index, _ in divided if index != 1] == [3]
    with pytest.raises(TypeError, match=r"sentences\[4\] is None"):
        next(stream)
    with pytest.raises(TypeError, match=r"sentences is a string; give "):
        translator.stream("half")
    translator.tokenizer.model_max_length = 20  # which is such a limit too
    divided.clear()
    options = {"on_division": lambda *pair: divided.append(pair), "max_new_tokens": 2}
    translator(["it", "it costs two hundred. " * 4], **options)
    translator(["it costs two hundred. " * 4], max_source_tokens=1_000, **options)
    assert [index for index, _ in divided] == [1]


# ---- N-best lists ----
def test_n_best_lists_have_each_text_once_and_are_filled_by_wider_searches(tokenizer, backend):
    """Of a model for which " t" is as probable as "t": at the beginning of a text, they are the same."""
    model = new_model(len(tokenizer), end=9.0)
    same = tokenizer.convert_tokens_to_ids(["t", "Ġt"])
    model.lm_head.weight.data[same[1]] = model.lm_head.weight.data[same[0]]
    model.lm_head.bias.data[same] = 3.0
    options = {"num_beams": 4, "max_new_tokens": 4}
    translator, texts = Translator(model, "cpu", tokenizer=tokenizer, backend=backend), [*filter(None, TEXTS)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    raw = tokenizer.batch_decode(model.generate(**inputs, **options, num_return_sequences=4), skip_special_tokens=True)
    assert [len({*raw[begin : begin + 4]}) for begin in range(0, len(raw), 4)] == [3] * len(texts)
    found = translator(texts, n_best=4, **options)
    for row, plain in zip(found, translator(texts, **options), strict=True):
        assert len({one.text for one in row}) == 4
        assert row == sorted(row, key=lambda one: -one.score)
        assert row[0].text == plain
    model.generation_config.renormalize_logits = True
    model.generation_config.suppress_tokens = [token for token in range(len(tokenizer)) if token not in (2, *same)]
    translator = Translator(model, "cpu", tokenizer=tokenizer, backend=backend)
    (row,) = translator(texts[:1], n_best=3, num_beams=4, max_new_tokens=1)
    assert {one.text for one in row} == {"", "t"}  # there are no more


# ---- Prefixes ----
def test_a_prefix_begins_the_translation_and_the_rest_follows_from_it(translator):
    prefixes = ["drei Euro", "", " es  ", "es", "der vierte", "zwei"]
    found = translator(TEXTS, prefix=prefixes, n_best=1, **SHORT)
    for text, prefix, (one,) in zip(TEXTS, prefixes, found, strict=True):
        if not text:
            assert one == Translation("", 0, 0.0)
            continue
        ids = translator.tokenizer(text_target=prefix.strip(), add_special_tokens=False)["input_ids"]
        output = translator.model.generate(
            **translator.tokenizer([text], return_tensors="pt"), decoder_input_ids=torch.tensor([[1, *ids]]),
            return_dict_in_generate=True, **SHORT,
        )  # fmt: skip
        assert one.text == translator.tokenizer.decode(output.sequences[0], skip_special_tokens=True).replace("\n", " ")
        assert one.text.startswith(prefix.strip())
        assert one.score == pytest.approx(output.sequences_scores[0].item(), abs=1e-5)
        assert 0 < one.num_tokens <= output.sequences.shape[1] - 1 - len(ids)
    assert translator(TEXTS[0], prefix="es", **SHORT) == translator(TEXTS[:1], prefix=["es"], **SHORT)[0]


@pytest.mark.parametrize(
    ("adds", "forced", "begin"), [(True, None, [1, 1]), (False, 7, [1, 7]), (True, 1, [1, 1]), (True, 7, [1, 7])]
)
def test_targets_begin_as_in_training_and_as_the_model_is_made_to_begin(checkpoint, backend, adds, forced, begin):
    tokenizer = VanillaTransformerTokenizerFast.from_pretrained(checkpoint, add_bos_token=adds)
    model = new_model(len(tokenizer))
    model.generation_config.forced_bos_token_id = forced
    text, sources = "drei Euro", tokenizer(TEXTS[:1], return_tensors="pt")
    whole = torch.tensor([[*begin, *tokenizer("drei Euro", add_special_tokens=False)["input_ids"], 2]])
    if forced is None:  # the same by the model's own shift of labels
        labels = torch.tensor([tokenizer(text_target=text)["input_ids"]])
        assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == whole[:, :-1].tolist()
    (expected,) = model.generate(**sources, decoder_input_ids=whole[:, :-1], num_beams=1, **SHORT)
    translator = Translator(model, "cpu", tokenizer=tokenizer, backend=backend)
    found = translator(TEXTS[:1], prefix=text, num_beams=1, **SHORT)
    assert found == [tokenizer.decode(expected, skip_special_tokens=True).replace("\n", " ")]
    loss = model(**sources, decoder_input_ids=whole[:, :-1], labels=whole[:, 1:]).loss.item()
    (score,) = score_pairs(translator.model, tokenizer, TEXTS[:1], [text])
    assert (score.num_tokens, score.log_probability) == (whole.shape[1] - 1, pytest.approx(-loss * score.num_tokens))
    shown = attention_of(model, tokenizer, TEXTS[0], text)
    assert shown.input_pieces == tokenizer.readable_pieces(whole[0, :-1])


# ---- Paragraphs ----
needs_sentencex = pytest.mark.skipif(division.sentencex is None, reason="sentencex, which splits sentences, is missing")


@needs_sentencex
def test_paragraphs_are_translated_sentence_by_sentence_and_keep_their_lines(translator):
    paragraph = " Dr. Smith has 3.5 euros. It is half past nine!\n\n\tThe fourth of May? Yes.  \n"
    sentences = ["Dr. Smith has 3.5 euros.", "It is half past nine!", "The fourth of May?", "Yes."]
    first, second, third, last = translator(sentences, **SHORT)
    done = []
    found = translator(["it", paragraph, ""], split_sentences="en", progress=done.append, **SHORT)
    assert found[1] == f" {first.strip()} {second.strip()}\n\n\t{third.strip()} {last.strip()}  \n"
    assert (found[0], found[2], sum(done)) == (translator("it", **SHORT), "", 3)
    (row,) = translator(paragraph, split_sentences="en", n_best=1, **SHORT)
    assert (row.score, row.alignment) == (None, None)
    for endless in (" " * 200_000, "e.g. " * 20_000):  # it takes no longer than the text is long
        list(division.split_sentences(endless, "en"))
    (row,) = translator(f"\t{sentences[0]}\r\n", split_sentences="en", n_best=1, **SHORT)
    assert (row.text, row.score is not None) == (f"\t{first}\r\n", True)


@needs_sentencex
@given(st.text(alphabet=st.one_of(st.sampled_from("aB .!?\n\r\t\"'。、3"), st.characters(codec="utf-8"))))
def test_splitting_loses_nothing_but_white_space(text):
    split = list(division.split_sentences(text, "en"))
    assert "".join("".join(sentence for _, sentence in split).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" and not re.search(r"[\r\n]", sentence) for _, sentence in split)
    assert all(not gap.strip() for gap, _ in split)
    assert [gap for gap, _ in split][:1] == ([text[: -len(text.lstrip())]] if text.strip() else [])


def test_without_sentencex_the_error_says_what_to_install(translator, monkeypatch):
    monkeypatch.setattr(division, "sentencex", None)
    with pytest.raises(ImportError, match=r"needs sentencex.*pip install '.\[sentences\]'"):
        translator("it", split_sentences="en")
    assert isinstance(translator("it", **SHORT), str)


# ---- Limits, progress, threads ----
def test_several_threads_get_what_one_gets(checkpoint, backend):
    translator = Translator(checkpoint, "cpu", threads=2, backend=backend)
    lists = [[f"{text} {number}" for text in TEXTS[:4]] for number in range(4)]
    alone = [translator(texts, batch_size=2, **SHORT) for texts in lists]
    together = threading.Barrier(len(lists))

    def work(texts):
        together.wait()
        return translator(texts, batch_size=2, **SHORT)

    with ThreadPoolExecutor(len(lists)) as pool:
        assert list(pool.map(work, lists)) == alone


def test_a_callback_may_call_its_translator(translator):
    inner = []
    call = lambda number: inner.append(translator("nine", **SHORT))  # noqa: E731
    assert translator(TEXTS, batch_size=2, progress=call, **SHORT) == translator(TEXTS, **SHORT)
    assert len(inner) > 1
    assert {*inner} == {translator("nine", **SHORT)}


FORK = """
import os, sys, threading
import torch
from hf_vanilla_transformer.translation.translator import Translator
torch.set_num_threads(1)
folder, backend = sys.argv[1:]
translator = Translator(folder, "cpu", threads=1, backend=backend)
texts = ["half past nine on the fourth of May"] * 8
expected = translator(texts, batch_size=4)
threading.Thread(target=lambda: [translator(texts, batch_size=4) for _ in range(1_000)], daemon=True).start()
codes = []
for _ in range(3):
    if (child := os.fork()) == 0:
        try:
            os._exit(0 if translator(texts) == expected else 1)
        except RuntimeError as error:
            os._exit(2 if 'open a Translator in each process, or start them by "spawn"' in str(error) else 3)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(codes, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize(("backend", "code"), [("engine", 0), pytest.param("ctranslate2", 2, marks=pytest.mark.peers)])
def test_a_fork_while_another_thread_translates(checkpoint, backend, code):
    """Locks of the threads that stay behind are free; without the threads of CTranslate2, there is an error."""
    if backend == "ctranslate2":
        pytest.importorskip("ctranslate2", reason="ctranslate2 isn't installed (the extra export has it)")
    command = [sys.executable, "-c", FORK, str(checkpoint), backend]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stdout) == (0, f"{[code] * 3}\n"), result.stderr


def test_a_pickle_opens_the_folder_again_and_changes_nothing(checkpoint, tokenizer, expected, backend):
    """By the pickler of processes, which would move weights into shared memory."""
    translator = Translator(checkpoint, "cpu", "int8", backend=backend)
    other = pickle.loads(ForkingPickler.dumps(translator))
    assert (repr(other), other(TEXTS, **SHORT)) == (repr(translator), translator(TEXTS, **SHORT))
    model = new_model(len(tokenizer))
    translator = Translator(model, "cpu", "float32", tokenizer=tokenizer)
    with pytest.raises(TypeError, match="of a model that was given can't be pickled; open it by a folder or a name"):
        ForkingPickler.dumps(translator)
    assert translator(TEXTS, **SHORT) == expected
    assert model.engine.is_on


def test_datasets_doesnt_take_translations_of_older_weights_from_its_cache(checkpoint, tokenizer, expected, tmp_path):
    folder, data = shutil.copytree(checkpoint, tmp_path / "model"), tmp_path / "data"
    datasets.Dataset.from_dict({"en": TEXTS}).save_to_disk(data)
    calls = []

    def translated():
        translator = Translator(folder, "cpu")
        rows = datasets.load_from_disk(data).map(lambda row: {"de": translator(row["en"], **SHORT)}, batched=True)
        calls.append(translator.model.engine.calls)
        return rows["de"][:]

    assert translated() == translated() == expected
    new_model(len(tokenizer), seed=4).save_pretrained(folder)
    assert translated() == Translator(folder, "cpu")(TEXTS, **SHORT) != expected
    assert [count > 0 for count in calls] == [True, False, True]


# ---- Models ----
def test_options_that_make_no_sense(checkpoint, tokenizer):
    own = {"tokenizer": tokenizer}
    for model, options, message in (
        (checkpoint, {"compute_type": "int4"}, "compute_type is 'int4'; choose one of 'default', 'float32'"),
        (checkpoint, {"threads": 0}, "threads is 0; it has to be an integer of at least 1"),
        (checkpoint, own, "tokenizer is for a model that is given"),
        (new_model(len(tokenizer)), {}, "a model needs its tokenizer; give tokenizer="),
        (None, {}, "model is of type NoneType; give a folder, a name on the Hub, or a model"),
        (new_marian(len(tokenizer)), own | {"compute_type": "int8"}, "MarianMTModel is not VanillaT"),
        (new_model(len(tokenizer)).train(), own, r"in training mode.*model.eval\(\)"),
        (new_model(5_000), own, "nothing says that the two belong together"),
    ):
        with pytest.raises(ValueError, match=message):
            Translator(model, **options)
    with pytest.raises(DeviceError, match="device toaster can't be used here"):
        Translator(checkpoint, "toaster")
    with pytest.raises(HubError, match="neither a folder here nor a name"):
        Translator(checkpoint / "missing")
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no config.json; give a folder that"):
        Translator(checkpoint.parent)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_are_no_longer_those_of_the_file(checkpoint, expected, tmp_path, name):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    weights = folder / "model.safetensors"
    if name != weights.name:
        torch.save(load_file(weights), folder / name)
        weights.unlink()
    translator, translate_too = Translator(folder, "cpu"), pipeline("vanilla-translation", str(folder), device="cpu")
    with (folder / name).open("r+b") as opened:
        opened.write(bytes((folder / name).stat().st_size))
    assert translator(TEXTS, **SHORT) == expected
    assert translate_too(TEXTS[1], **SHORT) == [{"translation_text": expected[1]}]


def test_a_loaded_model_has_the_engine_until_it_changes(checkpoint, expected):
    for compute_type in ("default", "int8", "float32"):
        translator = Translator(checkpoint, "cpu", compute_type)
        found, attached = translator(TEXTS, **SHORT), translator.model.engine
        assert attached.compute_type == compute_type.replace("default", "float32")
        assert attached.calls > 0 == attached.fallbacks
        assert found == expected or compute_type == "int8"
    with pytest.raises(ValueError, match="compute_type"):
        translator("it", compute_type="default")
    model = translator.model.train()
    with pytest.raises(ValueError, match="in training mode"):
        translator(TEXTS[0])
    model.eval().lm_head.weight.data.mul_(-1)  # a write that torch doesn't count
    found = translator(TEXTS, **SHORT)
    assert not model.engine.is_on
    engine.detach(model)
    assert found == translator(TEXTS, **SHORT) != expected


def test_a_model_that_is_given_stays_as_it_is(tokenizer, expected):
    """It has the engine where the user attaches it, himself or by naming a `compute_type`."""
    model = new_model(len(tokenizer))
    translator = Translator(model, tokenizer=tokenizer)
    assert translator.model is model
    assert translator(TEXTS, **SHORT) == expected
    assert model.engine is None
    with engine.attach(model) as attached:
        assert translator(TEXTS, **SHORT) == expected
    assert attached.calls > 0 == attached.fallbacks
    Translator(model, compute_type="int8", tokenizer=tokenizer)
    assert model.engine.compute_type == "int8"


# ---- Marian ----
@pytest.fixture(scope="module")
def marian_folder(tmp_path_factory):
    return opus_mt_folder(tmp_path_factory.mktemp("opus") / "opus-mt-en-de")


OPUS_TEXTS = ["A man is riding a bicycle.", "", "Who is the boy?", "It costs 3.50 euros."]
FEW = {"max_new_tokens": 6}


def test_a_marian_folder_is_converted(marian_folder, tmp_path):
    translator = Translator(marian_folder, "cpu")
    assert isinstance(translator.model, VanillaTransformerForConditionalGeneration)
    assert engine.unsupported_reason(translator.model) is None
    marian, own = MarianMTModel.from_pretrained(marian_folder).eval(), marian_tokenizer(marian_folder)
    assert translator(OPUS_TEXTS, **FEW) == [row[0].text for row in decode(marian, own, OPUS_TEXTS, **FEW)]
    assert Translator(marian_folder, "cpu", dtype="bfloat16").model.dtype == torch.bfloat16
    broken = shutil.copytree(marian_folder, tmp_path / "broken")
    (broken / "vocab.json").unlink()
    with pytest.raises(CheckpointError, match=r"can't convert .*broken .*vocab\.json"):
        Translator(broken, "cpu")


# ---- Target languages ----
@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A translator of a model with several target languages."""
    root = tmp_path_factory.mktemp("many")
    return Translator(opus_mt_folder(root / "opus-mt-en-mul", multi_target=True), "cpu")


@pytest.mark.parametrize("tgt_lang", ["deu", ">>deu<<"])
def test_the_tgt_language_begins_each_text(many, tgt_lang):
    texts = ["A man is riding.", ">>fra<< Who is the boy?", "", "  >>nld<<   It costs 3.50 euros."]
    by_hand = [">>deu<< A man is riding.", ">>fra<< Who is the boy?", "", ">>nld<< It costs 3.50 euros."]
    assert many(texts, tgt_lang=tgt_lang, **FEW) == many(by_hand, **FEW)
    assert len({many("A man is riding.", tgt_lang=one, n_best=1, **FEW)[0].score for one in ("deu", "fra")}) == 2


def test_every_piece_of_a_text_has_its_target_language(many, monkeypatch):
    seen, search = [], many.decodes_with.hypotheses

    def hypotheses(call, segments):
        seen.extend(segment.token_ids for segment in segments)
        return search(call, segments)

    monkeypatch.setattr(many.decodes_with, "hypotheses", hypotheses)
    long = "The old woman buys bread and milk. A brown dog runs. " * 4
    warned, options = [], {"tgt_lang": "deu", "max_source_tokens": 40, **FEW}
    many([f">>fra<< {long}", long], on_division=lambda *one: warned.append(one), **options)
    first = [many.tokenizer.convert_ids_to_tokens(row[0]) for row in seen]
    assert sorted(set(first)) == [">>deu<<", ">>fra<<"]
    assert first.count(">>deu<<") == first.count(">>fra<<") == warned[0][1] > 1
    if division.sentencex is not None:
        seen.clear()
        many(f">>fra<< {long}", split_sentences="en", **FEW)
        assert {many.tokenizer.convert_ids_to_tokens(row[0]) for row in seen} == {">>fra<<"}
        assert len(seen) == 8


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("A man.", {}, r"several target languages, and sentences\[0\] doesn't say which; give tgt_lang, or begin"),
        ("A man.", {"tgt_lang": "eng"}, "tgt_lang is 'eng', but the model's codes are >>deu<<, >>fra<<, >>nld<<"),
        ("A man.", {"tgt_lang": "due"}, "did you mean '>>deu<<'"),
        (">>xyz<< A man.", {}, r"sentences\[0\] begins with >>xyz<<, but the model's codes are >>deu<<"),
        (">>xyz<< A man.", {"tgt_lang": "deu"}, r"sentences\[0\] begins with >>xyz<<, but"),
    ],
)
def test_tgt_languages_that_cannot_be(many, text, options, message):
    with pytest.raises(ValueError, match=message):
        many(text, **options)
    assert many(["", " ", ">>deu<<", ">>fra<< \u200b"]) == [""] * 4
    assert set(CODES) == set(many.tokenizer.supported_language_codes)


def test_threads_that_read_sources_and_targets(tmp_path):
    """MarianTokenizer switches to the target's side and back: without a lock, other threads read with that one."""
    translator = Translator(opus_mt_folder(tmp_path / "opus", separate_vocabs=True), "cpu")
    model, tokenizer = translator.model, translator.tokenizer
    jobs = {
        "source": lambda: translator(OPUS_TEXTS, max_new_tokens=1, num_beams=1),
        "prefix": lambda: translator(OPUS_TEXTS, prefix="Ein Mann", max_new_tokens=1, num_beams=1),
        "score": lambda: [one.log_probability for one in score_pairs(model, tokenizer, OPUS_TEXTS, OPUS_TEXTS)],
        "read": lambda: reading.encoder(tokenizer)(OPUS_TEXTS * 50),
        "attention": lambda: attention_of(model, tokenizer, "A man", "Ein Mann").target_pieces,
    }
    wanted = {name: job() for name, job in jobs.items()}
    wanted["score"] = pytest.approx(wanted["score"], rel=1e-4)  # the sums of attention may be in another order
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(jobs)) as pool:
            right = list(pool.map(lambda name: all(jobs[name]() == wanted[name] for _ in range(8)), jobs))
    finally:
        sys.setswitchinterval(interval)
    assert right == [True] * len(jobs)


# ---- The pipeline ----
@pytest.fixture
def registered():
    register_pipeline("vanilla-translation")
    assert "vanilla-translation" in PIPELINE_REGISTRY.get_supported_tasks()


@pytest.mark.usefixtures("registered")
def test_the_pipeline_has_the_outputs_of_transformers_own(checkpoint, expected, caplog):
    pipe = pipeline("vanilla-translation", model=str(checkpoint), device="cpu", **SHORT)
    assert pipe(TEXTS[0]) == [{"translation_text": expected[0]}]
    assert pipe(TEXTS) == [{"translation_text": text} for text in expected]
    assert pipe(TEXTS, batch_size=2, num_workers=1) == pipe(TEXTS)
    assert list(pipe(text for text in TEXTS)) == [[{"translation_text": text}] for text in expected]
    two = pipe(TEXTS[:2], num_return_sequences=2)
    assert [len(row) for row in two] == [2, 2]
    assert [row[0]["translation_text"] for row in two] == expected[:2]
    assert pipe(TEXTS[:1], num_return_sequences=1) == [{"translation_text": expected[0]}]
    assert [len(row) for row in pipe(["", ""], num_return_sequences=2)] == [1, 1]
    assert caplog.records == []
