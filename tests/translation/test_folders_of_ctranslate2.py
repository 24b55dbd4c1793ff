"""Models in CTranslate2's format that others made, translated as CTranslate2 is called by their authors."""

import io
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import ctranslate2
import pytest
import sentencepiece
from ctranslate2.converters import TransformersConverter

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.errors import CheckpointError
from hf_vanilla_transformer.serving.models import LanguagesError, languages_of
from tests.interop.ctranslate2_origins import ALL, ORIGINS, argos, sharpened
from tests.interop.opus_mt import opus_mt_folder
from tests.translation.families import LANGUAGES, family

LINES = [*ALL[:18], "", "xyz 漢 unknown"]
# What each origin's authors give to `translate_batch`, beside CTranslate2's defaults.
GIVEN = {"quickmt": {"beam_size": 5, "max_decoding_length": 512}, "argos": {"beam_size": 4, "length_penalty": 0.2}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: sharpened(origin(tmp_path_factory.mktemp(name))) for name, origin in ORIGINS.items()}
    return made | {"argos": argos(tmp_path_factory.mktemp("argos"))}


def models(folder):
    """The SentencePiece models of source and target."""
    pairs = (("source.spm", "target.spm"), ("src.spm.model", "tgt.spm.model"), ("sentencepiece.model",) * 2)
    pairs += (("sentencepiece.bpe.model",) * 2,)
    found = next(pair for pair in pairs if (folder / pair[0]).is_file())
    return [sentencepiece.SentencePieceProcessor(str(folder / name)) for name in found]


def as_its_authors_do(folder, name, spm_folder=None, **options):
    """Tokens by CTranslate2 itself, and their texts."""
    source, target = models(spm_folder or folder)
    end = ["</s>"] if name == "opus_mt" else []
    pieces = [source.encode(line, out_type=str) + end for line in LINES if line]
    found = ctranslate2.Translator(str(folder)).translate_batch(pieces, **{**GIVEN.get(name, {}), **options})
    rows = [one.hypotheses[0] for one in found]
    dropped = {"<unk>", "<blank>", *(token for prefix in options.get("target_prefix", ()) for token in prefix)}
    rows = [[token for token in row if token not in dropped] for row in rows]
    return [*(target.decode_pieces(row).replace("▁", " ").strip() for row in rows)]


@pytest.mark.parametrize("name", ORIGINS)
def test_each_origin(folders, name):
    translator = Translator(folders[name], "cpu", threads=1)
    given = translator.plan()
    assert (given.num_beams, given.limit) == (
        (5, ("max_new_tokens", 512)) if name == "quickmt" else (2, ("max_new_tokens", 256))
    )
    for options, theirs in ({}, {}), ({"num_beams": 1}, {"beam_size": 1}):
        options, theirs = options | {"max_new_tokens": 30}, theirs | {"max_decoding_length": 30}
        found = translator(LINES, unknown_target="drop", **options)
        assert found.pop(18) == ""
        assert found == as_its_authors_do(folders[name], name, **theirs)
        assert len({*found}) > 3


def unpacked(package, folder):
    """The folder of an Argos package."""
    with zipfile.ZipFile(package) as packed:
        packed.extractall(folder)
    return folder / "translate-en_de-1_0"


@pytest.mark.parametrize("language", [None, "d"])
def test_a_package_of_argos(tmp_path, language):
    """The token of a target language isn't part of the translation, wherever a model writes it."""
    package = argos(tmp_path, target_prefix=language)
    place = unpacked(package, tmp_path / "unpacked")
    begin = {} if language is None else {"target_prefix": [[language]] * (len(LINES) - 1)}
    wanted = as_its_authors_do(place / "model", "argos", place, max_decoding_length=30, **begin)
    wanted.insert(18, "")
    for one in (package, place, place / "model") if language is None else (package, place):
        found = Translator(one, "cpu")(LINES, unknown_target="drop", max_new_tokens=30)
        assert found == wanted


def test_a_package_with_codes(tmp_path, monkeypatch):
    """As argostranslate's BPETokenizer does it, around CTranslate2."""
    names = ("sacremoses", "subword_nmt.learn_bpe", "subword_nmt.apply_bpe")
    moses, learn, apply = map(pytest.importorskip, names)
    tokenizer, normalizer = moses.MosesTokenizer("en"), moses.MosesPunctNormalizer("en")
    detokenizer = moses.MosesDetokenizer("de")

    def words(text):
        return " ".join(tokenizer.tokenize(normalizer.normalize(text))).strip("\r\n ").split(" ")

    codes = io.StringIO()
    learn.learn_bpe(io.StringIO("\n".join(" ".join(words(line)) for line in ALL)), codes, 60)
    bpe = apply.BPE(io.StringIO(codes.getvalue()))
    lines = [*ALL, "Mr. O'Neil's “dog” — isn’t & <b> 1,000.50 % [x] | http://a.de/?b=1", "… ... «a» l'eau"]
    pieces = sorted({piece for line in lines[:-2] for piece in bpe.segment_tokens(words(line))})
    package = argos(tmp_path, None, codes.getvalue(), pieces)
    model = ctranslate2.Translator(str(unpacked(package, tmp_path / "unpacked") / "model"))
    tokens = [bpe.segment_tokens(words(line)) for line in lines]
    found = model.translate_batch(tokens, beam_size=4, length_penalty=0.2, max_decoding_length=30)
    rows = [[token for token in one.hypotheses[0] if token != "<unk>"] for one in found]
    translator = Translator(package, "cpu")
    assert [translator.tokenizer.tokenize(line) for line in lines] == tokens
    translated = translator(lines, unknown_target="drop", max_new_tokens=30)
    texts = [" ".join(row).replace("@@ ", "").removesuffix("@@") for row in rows]  # Argos Translate keeps the latter
    assert translated == [detokenizer.detokenize(text.split(" ")) for text in texts]
    assert len({*translated}) > 3
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(ImportError, match=r"bpe\.model needs sacremoses: pip install sacremoses"):
        Translator(package, "cpu")


@pytest.mark.parametrize("kind", ["nllb", "m2m100"])
def test_languages(tmp_path, kind):
    source, target = LANGUAGES[kind]
    original = family(kind, tmp_path)
    names = ("tokenizer.json", "tokenizer_config.json", "sentencepiece.bpe.model", "vocab.json")
    copied = [name for name in names if (original / name).is_file()]
    made = Path(TransformersConverter(str(original), copy_files=copied).convert(str(tmp_path / "ct2")))
    translator = Translator(made, "cpu", src_lang=source, tgt_lang=target)
    tokenizer = translator.tokenizer
    tokenizer.src_lang = source
    pieces = [tokenizer.convert_ids_to_tokens(tokenizer(line)["input_ids"]) for line in ALL]
    first = target if kind == "nllb" else f"__{target}__"
    found = ctranslate2.Translator(str(made)).translate_batch(
        pieces, target_prefix=[[first]] * len(ALL), max_decoding_length=50
    )
    rows = [tokenizer.convert_tokens_to_ids(one.hypotheses[0]) for one in found]
    translations = zip(translator(ALL, max_new_tokens=50), rows, strict=True)
    known = [(text, row) for text, row in translations if tokenizer.unk_token_id not in row]  # ids that fill up, too
    assert len(known) > len(ALL) / 2
    assert [text for text, _ in known] == [tokenizer.decode(row, skip_special_tokens=True) for _, row in known]
    if kind == "nllb":
        (made / "tokenizer.json").unlink()
        shutil.copy(original / "spm.model", made / "sentencepiece.bpe.model")
        with pytest.raises(CheckpointError, match=r"isn't enough for NLLB: add the original model's tokenizer\.json"):
            Translator(made, "cpu")


def test_a_model_of_several_targets(tmp_path):
    original = opus_mt_folder(tmp_path / "marian", multi_target=True, decoder_attention_heads=2)
    files = ["source.spm", "target.spm", "generation_config.json"]
    made = Path(TransformersConverter(str(original), copy_files=files).convert(str(tmp_path / "ct2")))
    translator = Translator(made, "cpu", tgt_lang="fra")
    source, target = models(made)
    pieces = [[">>fra<<", *source.encode(line, out_type=str), "</s>"] for line in ALL]
    found = ctranslate2.Translator(str(made)).translate_batch(
        pieces, beam_size=4, max_decoding_length=511, max_input_length=0
    )
    wanted = [target.decode_pieces([t for t in one.hypotheses[0] if not t.startswith((">>", "<unk"))]) for one in found]
    assert len({*wanted}) > 3
    assert translator.plan().num_beams == 4
    assert translator.tokenizer.supported_language_codes == [">>deu<<", ">>fra<<", ">>nld<<"]


# ---- Tokenizers and files ----
def test_a_folder_without_a_tokenizer(folders, tmp_path, vanilla_transformer):
    bare, other = tmp_path / "bare", tmp_path / "tokenizer"
    shutil.copytree(folders["opennmt"], bare)
    other.mkdir()
    shutil.move(bare / "sentencepiece.model", other)
    with pytest.raises(CheckpointError, match=r"source\.spm and target\.spm, .*bpe\.codes.*--tokenizer DIR"):
        Translator(bare, "cpu")
    wanted = Translator(folders["opennmt"], "cpu")(ALL)
    assert Translator(bare, "cpu", tokenizer=other)(ALL) == wanted
    command = ("translate", "--model", bare, "--tokenizer", other, "--device", "cpu")
    code, output, _ = vanilla_transformer(*command, *ALL[:3])
    assert (code, output.split("\n")[:-1]) == (0, wanted[:3])


def test_vocabularies_as_text_and_codes(folders, tmp_path):
    folder = shutil.copytree(folders["opennmt"], tmp_path / "model")
    tokens = json.loads((folder / "shared_vocabulary.json").read_text())
    (folder / "shared_vocabulary.json").unlink()
    (folder / "shared_vocabulary.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    assert Translator(folder, "cpu")(ALL) == Translator(folders["opennmt"], "cpu")(ALL)
    (folder / "sentencepiece.model").unlink()
    (folder / "bpe.codes").write_text("#version: 0.2\n▁ A</w>\n")
    assert Translator(folder, "cpu").tokenizer.tokenize("▁A x") == ["▁A", "x"]


def test_damaged_files(folders, tmp_path):
    content = (folders["opennmt"] / "model.bin").read_bytes()
    tokens = json.loads((folders["opennmt"] / "shared_vocabulary.json").read_text())
    other = content.replace(b"Transformer", b"Transfarmer", 1)
    cases = {
        "model.bin": [content[: len(content) // 2], content[:30], b"\x09" + content[1:], other],
        "shared_vocabulary.json": [json.dumps(tokens[:-1]).encode(), b"{}", b"["],
        "config.json": [b"["],
        "sentencepiece.model": [b"xx"],
    }
    for file, contents in cases.items():
        for damaged in contents:
            folder = shutil.copytree(folders["opennmt"], tmp_path / "model", dirs_exist_ok=True)
            (folder / file).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
                Translator(folder, "cpu")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        Translator(folder, "cpu")


def test_zips_that_are_refused(folders, tmp_path, monkeypatch):
    package = tmp_path / "a.argosmodel"
    package.write_bytes(folders["argos"].read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"a\.argosmodel can't be unpacked"):
        Translator(package, "cpu")
    for name in ("../model/model.bin", "/model/model.bin", "x/readme"):
        with zipfile.ZipFile(package, "w") as packed:
            packed.writestr(name, "x")
        with pytest.raises(CheckpointError, match=r"is no Argos package: .*model/model\.bin"):
            Translator(package, "cpu")
    monkeypatch.setattr("hf_vanilla_transformer.interop.ctranslate2_files.MOST_BYTES", 1000)
    with pytest.raises(CheckpointError, match="bytes, more than 1,000"):
        Translator(folders["argos"], "cpu")


# ---- Commands ----
def test_the_service_knows_the_languages_of_a_package(folders):
    assert languages_of(str(folders["argos"])) == ("en", "de")
    with pytest.raises(LanguagesError, match="doesn't say what it translates"):
        languages_of(str(folders["opennmt"]))


def test_commands(folders, tmp_path, vanilla_transformer):
    (tmp_path / "source").write_text("\n".join(ALL[:6]) + "\n", encoding="utf-8")
    (tmp_path / "target").write_text("\n".join(ALL[11:17]) + "\n", encoding="utf-8")
    for name, side, title in (("evaluate", "--reference", "BLEU"), ("score", "--target", "log_probability\ttokens")):
        files = ("--source", tmp_path / "source", side, tmp_path / "target")
        code, output, error = vanilla_transformer(name, "--model", folders["argos"], "--device", "cpu", *files)
        assert (code, title in output) == (0, True), error


def test_without_pytorch(folders):
    """Two vocabularies (quickmt's) may number unknown tokens differently: a prefix is checked by the target's."""
    texts, names = [*ALL[:3], "xyz 漢"], ("argos", "marian", "quickmt")
    options = [{"max_new_tokens": 9}, {"max_new_tokens": 9, "prefix": "Ein"}]
    script = (
        "import sys; from hf_vanilla_transformer import Translator\n"
        f"found = [Translator(name, 'cpu')({texts!r}, **one) for name in sys.argv[1:] for one in {options!r}]\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\nprint(found)"
    )
    command = [sys.executable, "-c", script, *(str(folders[name]) for name in names)]
    wanted = [Translator(folders[name], "cpu")(texts, **one) for name in names for one in options]
    assert subprocess.check_output(command, text=True) == f"{wanted}\n"
