"""OPUS-MT's tokenizers: reads their SentencePiece models, without SentencePiece, into an OpusMTTokenizerFast."""

from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import import_protobuf

from ..checkpoints.loading import json_object
from ..tokenization_opus_mt import LONGEST_RULE, OTHER_SIDE, SPACE, OpusMTTokenizerFast

SIDES = ("source", "target")
UNIGRAM, BPE = 1, 2  # types of models
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of SentencePiece's pieces
SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# What is taken from tokenizer_config.json; the rest is MarianTokenizer's own.
KEPT = ("source_lang", "target_lang", "model_max_length", "padding_side", "truncation_side")
NOT_SPM = "OPUS-MT models with BPE instead of SentencePiece can't be converted"


def opus_mt_tokenizer(folder: str | Path) -> OpusMTTokenizerFast:
    """Makes the tokenizer of an OPUS-MT model from source.spm, target.spm, vocab.json and tokenizer_config.json.

    Args:
        folder: Contains the files, as a repository Helsinki-NLP/opus-mt-* does.

    Returns:
        A tokenizer that gives the same ids as MarianTokenizer from the same files.

    Raises:
        ValueError: Files are missing or damaged, or ask for something that couldn't be done in exactly the same way;
            the message names the file and the reason.
    """
    folder = Path(folder)
    config = json_object(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    special = {name: _content(config.get(name) or default) for name, default in SPECIAL.items()}
    separate = bool(config.get("separate_vocabs", False))
    if any((config.get("sp_model_kwargs") or {}).values()):
        raise ValueError(f"{folder}: sp_model_kwargs in tokenizer_config.json samples pieces, which isn't supported")
    files = [folder / "vocab.json", folder / ("target_vocab.json" if separate else "vocab.json")]
    vocabularies = [_vocabulary(file, special) for file in files]
    for name in ("eos_token", "unk_token"):
        if len({vocabulary[special[name]] for vocabulary in vocabularies}) > 1:
            raise ValueError(f"{folder}: {special[name]} has different ids in vocab.json and target_vocab.json")
    backends, rest = [], {}
    for side, vocabulary in zip(SIDES, vocabularies, strict=True):
        file = folder / f"{side}.spm"
        if not file.is_file():
            raise ValueError(f"{folder}: {file.name} is missing; {NOT_SPM}")
        model = sentencepiece_model(file, (UNIGRAM,))
        backend, rest[side] = _side(model, vocabulary, special)
        backends.append(backend)
    tokenizer = OpusMTTokenizerFast(
        tokenizer_object=backends[0],
        target_tokenizer_object=backends[1],
        sentencepiece=rest,
        **special,
        **({"separate_vocabs": True} if separate else {}),
        **{key: config[key] for key in KEPT if config.get(key) is not None},
    )
    _add_tokens(tokenizer, folder, config)
    return tokenizer


def _side(model: Any, vocabulary: dict[str, int], special: dict[str, str]) -> tuple[Tokenizer, dict[str, Any]]:
    """The backend of one side, and what has no place in its file."""
    # The shortest decimal numbers that are these scores in 32 bits: files in JSON keep them through any reader.
    scores = {piece.piece: float(str(np.float32(piece.score))) for piece in model.pieces if piece.type == NORMAL}
    lowest = min(scores.values())  # for entries that never match: unknown characters cost more than the lowest score
    codes = [entry for entry in vocabulary if entry.startswith(">>") and entry.endswith("<<")]
    plain = scores.keys() | set(codes) | set(special.values())
    entries = [(e if e in plain else OTHER_SIDE + e, scores.get(e, lowest)) for e in vocabulary]
    backend = Tokenizer(models.Unigram(entries, vocabulary[special["unk_token"]], False))
    charsmap = model.normalizer_spec.precompiled_charsmap
    backend.normalizer = normalizers.Sequence(
        [
            *([normalizers.Precompiled(charsmap)] if charsmap else []),
            normalizers.Strip(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=True)
    eos = special["eos_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", eos], pair=["$A", "$B", eos], special_tokens=[(eos, vocabulary[eos])]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special.values()])
    backend.add_tokens([AddedToken(code, normalized=False) for code in codes])
    rest = {
        "unlisted": {piece: score for piece, score in scores.items() if piece not in vocabulary},
        "unused": [piece.piece for piece in model.pieces if piece.type == UNUSED],
        "control": [piece.piece for piece in model.pieces if piece.type == CONTROL],
        "others": [entry for entry, _ in entries if entry in plain and entry not in scores],
    }
    return backend, rest


def sentencepiece_model(file: Path, kinds: tuple[int, ...]) -> Any:
    """Reads a SentencePiece model, and refuses those whose rules the tokenizers here don't have.

    Args:
        file: The model.
        kinds: The types that it may be of, `UNIGRAM` and `BPE`.

    Returns:
        Its protobuf.

    Raises:
        ValueError: It is damaged, of another type, or asks for something that couldn't be done in exactly the same way.
    """
    model = import_protobuf().ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise ValueError(f"{file} is damaged, or no SentencePiece model ({error})") from error
    types = {piece.type for piece in model.pieces}
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    reasons = {
        "it has no pieces": NORMAL not in types,
        "it isn't a unigram model" + (" nor BPE" if BPE in kinds else ""): trainer.model_type not in kinds,
        "it writes unknown characters as bytes": trainer.byte_fallback or BYTE in types,
        "it has user-defined symbols": USER_DEFINED in types,
        "it writes spaces behind words": trainer.treat_whitespace_as_suffix,
        "it puts no space before the first word": not normalizer.add_dummy_prefix,
        "it keeps extra spaces": not normalizer.remove_extra_whitespaces,
        "it doesn't write spaces as ▁": not normalizer.escape_whitespaces,
        "it changes decoded texts": model.denormalizer_spec.precompiled_charsmap,
        "its unknown token isn't <unk>": trainer.unk_piece != "<unk>",
        "its normalisation has rules with spaces, or very long ones": _has_odd_rules(normalizer.precompiled_charsmap),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"{file} can't be converted: {reason}")
    return model


def _has_odd_rules(charsmap: bytes) -> bool:
    """Whether a table of normalisations has a rule for something with a space, or very long, or one that writes `▁`."""
    size = int.from_bytes(charsmap[:4], "little") // 4  # of the double-array trie of all that it replaces
    units = np.frombuffer(charsmap, "<u4", size, 4) if charsmap else np.zeros(0, np.uint32)
    offsets = (units >> 10) << ((units & 0x200) >> 6)
    nodes = np.arange(min(size, 1), dtype=np.uint32)
    for _ in range(LONGEST_RULE):
        bases, children = nodes ^ offsets[nodes], []
        for label in range(1, 256):
            places = bases ^ np.uint32(label)
            places = places[places < size]
            children.append(places[units[places] & 0x800000FF == label])
        if children[ord(" ") - 1].size:
            return True
        nodes = np.concatenate(children)
    return nodes.size > 0 or SPACE.encode() in charsmap[4 + 4 * size :]


def _vocabulary(file: Path, special: dict[str, str]) -> dict[str, int]:
    """Token -> id, in the order of ids."""
    vocabulary = json_object(file)
    if any(not isinstance(number, int) for number in vocabulary.values()):
        raise ValueError(f"{file} has ids that are no integers")
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise ValueError(f"{file} doesn't number its {len(vocabulary):,} tokens from 0 on, each with an id of its own")
    if missing := [token for token in special.values() if token not in vocabulary]:
        raise ValueError(f"{file} has no {', '.join(missing)}")
    if wrong := [token for token in vocabulary if not token or token.startswith(OTHER_SIDE)]:
        raise ValueError(f"{file} has the token {wrong[0]!r}, and none may be empty or begin with a space")
    return dict(sorted(vocabulary.items(), key=lambda item: item[1]))


def _add_tokens(tokenizer: OpusMTTokenizerFast, folder: Path, config: dict[str, Any]) -> None:
    """Adds the tokens that a user of MarianTokenizer had added, with the ids that they had."""
    added = {int(number): token for number, token in (config.get("added_tokens_decoder") or {}).items()}
    if (folder / "added_tokens.json").exists():
        added |= {number: token for token, number in json_object(folder / "added_tokens.json").items()}
    for number, token in sorted(added.items()):
        fields = {k: v for k, v in token.items() if k != "__type"} if isinstance(token, dict) else {"content": token}
        new = AddedToken(**fields)
        if new.content in SPECIAL.values():
            continue
        tokenizer.add_tokens([new])
        if (own := tokenizer.convert_tokens_to_ids(new.content)) != number:
            raise ValueError(f"{folder}: the added token {new.content!r} has id {number}, which would become {own}")
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if extra:
        tokenizer.add_special_tokens({"extra_special_tokens": [_content(token) for token in extra]})


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
