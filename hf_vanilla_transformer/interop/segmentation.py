"""Models that come with dictionaries: with subword-nmt's codes or SentencePiece models, these become one tokenizer.

A folder has one file of codes or one SentencePiece model for both sides, or one per side, told by its name.
"""

import base64
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from google.protobuf.message import DecodeError
from transformers.convert_slow_tokenizer import import_protobuf

from ..errors import first_line
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..tokenization_dictionary import SIDES, DictionaryTokenizer
from .interface import ConversionError, ConversionOptions, Converted
from .pickles import read_text

logger = logging.getLogger(__name__)

# The end of errors about missing files.
WITHOUT = "; add it, or convert without a tokenizer: --no-tokenizer"
# A note on tokenizers with subword-nmt's codes.
TOKENIZED_TEXT = (
    "the tokenizer does no Moses tokenization (nor truecasing or lowercasing): if the training data had it, give it "
    "such text, and expect such text from it"
)
PIECE = re.compile("@@$|^[▁Ġ]|^##|￭")  # as subword-nmt, SentencePiece, GPT-2, WordPiece and OpenNMT mark them
CODES = re.compile(r"(.*[._-])?(bpe|bpe_?codes?|codes?)\d*([._-].*)?", re.IGNORECASE)
NO_CODES = (".bin", ".ckpt", ".gz", ".json", ".pt", ".py", ".yaml", ".yml", ".zip")
SIDES_IN_NAMES = (("src", "source"), ("tgt", "trg", "target"))
LONGEST_CODES = 50_000_000  # bytes


def converted(
    model: VanillaTransformerForConditionalGeneration,
    options: ConversionOptions,
    make_tokenizer: Callable[[], DictionaryTokenizer],
    *notes: str,
    metadata: Mapping[str, object] | None = None,
) -> Converted:
    """Returns a model, with a tokenizer made of its dictionaries where one is asked for, and the notes on both."""
    if not options.with_tokenizer:
        return Converted(model, None, metadata or {}, notes=notes)
    return Converted(model, make_tokenizer(), metadata or {}, notes=(*notes, TOKENIZED_TEXT))


def sizes_of(dictionaries: Sequence[Sequence[str]]) -> dict[str, int]:
    """Returns the fields of a configuration that dictionaries tell: those of unknown ones are left out."""
    sizes = zip(("vocab_size", "decoder_vocab_size"), map(len, dictionaries), strict=True)
    return {name: size for name, size in sizes if size}


def tokenizer_of(
    folder: Path,
    dictionaries: Sequence[list[str]],
    special: dict[str, str],
    *,
    files: Sequence[str | Path | None] = (None, None),
    languages: tuple[str, ...] = (),
    source_eos: bool = True,
    restricted: bool = False,
    levels: Sequence[str | None] = (None, None),
) -> DictionaryTokenizer:
    """Makes the tokenizer of a model from its dictionaries and from the codes or SentencePiece models in its folder.

    Dictionaries have the special tokens too; an empty one is unknown. `files` are the codes or models of source and
    target, where these are known: of a name in a text, its folder doesn't count. `languages` may be parts of the files'
    names. `restricted`: only pieces of the dictionary are given where there is a choice, as JoeyNMT does. `levels` has
    "word" or "char" for a side that is known to have no pieces of words.
    """
    if [] in dictionaries:
        raise ConversionError(f"{folder} doesn't have the dictionaries of source and target{WITHOUT}")
    paths = [folder / PureWindowsPath(one).name if one and isinstance(one, str) else one for one in files]
    named = [path for path in paths if path]
    if missing := [file for file in named if not file.is_file()]:
        raise ConversionError(f"the tokenizer needs {missing[0]}, and there is no such file{WITHOUT}")
    _check(dictionaries, special)
    ways: list[Any] = [level or path for level, path in zip(levels, paths, strict=True)]
    if not all(ways):
        ways = [one or own for one, own in zip(levels, _files_in(folder, languages, dictionaries), strict=True)]
    segmentation = {
        side: {"tokens": tokens, **_segmenter(way, tokens if restricted else None, special)}
        for side, way, tokens in zip(SIDES, ways, dictionaries, strict=True)
    }
    try:
        return DictionaryTokenizer(segmentation=segmentation, source_eos=source_eos, **special)
    except ImportError as error:
        raise ConversionError(f"{first_line(error)}; or convert without a tokenizer: --no-tokenizer") from error
    except SystemExit as error:  # subword-nmt ends the process, and has said which line is wrong
        names = _names([way for way in ways if isinstance(way, Path)])
        raise ConversionError(f"{names}: no codes of subword-nmt (fastBPE's have a third column)") from error


def _files_in(
    folder: Path, languages: tuple[str, ...], dictionaries: Sequence[list[str]]
) -> tuple[Path | str, Path | str]:
    """Returns the files that say how source and target are segmented, or "words" for a model of words."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file()]
    models = [file for file in files if file.suffix in (".model", ".spm")]
    codes = [file for file in files if file not in models and _is_codes(file)]
    if models and codes:
        raise ConversionError(
            f"{folder} has SentencePiece models ({_names(models)}) and codes of subword-nmt ({_names(codes)}); "
            "leave those there that the model was trained with"
        )
    found = models or codes
    tokens = [token for one in dictionaries for token in one]
    # GPT-2's pieces are numbers in a dictionary of fairseq.
    is_words = not any(map(PIECE.search, tokens)) and not all(one.isdecimal() for one in tokens if one[:1] not in "<[")
    if not found and is_words:
        logger.warning(f"{folder} has neither codes nor a SentencePiece model: its tokenizer takes words as they are")
        return "words", "words"
    if not found:
        raise ConversionError(
            f"the dictionaries have pieces of words, and {folder} has neither codes of subword-nmt (a file whose name "
            "has bpe or codes in it) nor a SentencePiece "
            f"model (.model, .spm) to segment words{WITHOUT}"
        )
    if len(found) == 1:
        return found[0], found[0]
    names = [(*words, *languages[n : n + 1]) for n, words in enumerate(SIDES_IN_NAMES)]
    parts = {file: re.split(r"[._-]", file.name.lower()) for file in found}
    sides = [[file for file in found if not set(words).isdisjoint(parts[file])] for words in names]
    if [len(side) for side in sides] != [1, 1] or sides[0] == sides[1]:
        kind = "model" if models else "codes"
        raise ConversionError(
            f"{folder} has {_names(found)}, and nothing says which is whose; name one source.{kind} and the other "
            f"target.{kind}, or leave only one there if it is for both"
        )
    return sides[0][0], sides[1][0]


def _is_codes(file: Path) -> bool:
    if file.suffix in NO_CODES or file.stat().st_size > LONGEST_CODES:
        return False
    with file.open("rb") as opened:
        first = opened.readline(LONGEST_CODES)
    return first.startswith(b"#version:") or bool(CODES.fullmatch(file.name) and len(first.split()) in (2, 3))


def _names(files: list[Path]) -> str:
    return ", ".join(file.name for file in files)


def _check(dictionaries: Sequence[list[str]], special: dict[str, str]) -> None:
    if missing := [name for name in ("pad_token", "eos_token", "unk_token") if name not in special]:
        raise ConversionError(f"the model has no {missing[0]}, and its tokenizer needs one")
    # Where a token occurs twice, its first place is the special token's.
    ids = [{token: n for n, token in reversed(list(enumerate(tokens)))} for tokens in dictionaries]
    for side, known in zip(SIDES, ids, strict=True):
        if missing := [token for token in special.values() if token not in known]:
            raise ConversionError(f"the {side} dictionary has no {', '.join(missing)}{WITHOUT}")
    if other := [token for token in special.values() if ids[0][token] != ids[1][token]]:
        raise ConversionError(
            f"{other[0]} has the id {ids[0][other[0]]} in the source and {ids[1][other[0]]} in the target"
        )


def _segmenter(file: str | Path, vocabulary: list[str] | None, special: dict[str, str]) -> dict[str, object]:
    """Returns what DictionaryTokenizer has of a side beside its tokens; `vocabulary`: the only pieces to give.

    In place of a file, `file` may be a level, "words", "word" or "char".
    """
    if isinstance(file, str):
        return {"level": file}
    if file.suffix in (".model", ".spm"):
        return {"spm": base64.b64encode(_sentencepiece(file, vocabulary)).decode()}
    allowed = None if vocabulary is None else [token for token in vocabulary if token not in special.values()]
    return {"codes": read_text(file), "vocabulary": allowed}


def _sentencepiece(file: Path, vocabulary: list[str] | None) -> bytes:
    """Reads a SentencePiece model; with a vocabulary, changed as SentencePiece's SetVocabulary, now gone, did it."""
    content, model = file.read_bytes(), import_protobuf().ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        raise ConversionError(f"{file} is damaged, or no SentencePiece model ({error})") from error
    normal = [piece for piece in model.pieces if piece.type == piece.NORMAL]
    if not normal:
        raise ConversionError(f"{file} is damaged, or no SentencePiece model: it has no pieces")
    if vocabulary is None:
        return content
    allowed = set(vocabulary)
    for piece in normal:
        if piece.piece not in allowed and len(piece.piece) > 1:
            piece.type = piece.UNUSED
    # The lowest score decides what an unknown character costs. No text has a space any more when it is looked up.
    model.pieces.add(piece=" ", score=min(piece.score for piece in normal))
    return model.SerializeToString()
