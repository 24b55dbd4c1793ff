"""How the page reads and writes texts: with the package's BPE, SentencePiece models, subword-nmt's codes, or words."""

import base64
import json
from array import array
from collections.abc import Sequence
from typing import Any

from transformers import MarianTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import import_protobuf

from .. import tokenization_vanilla_transformer
from ..tokenization_dictionary import SIDES, DictionaryTokenizer
from ..tokenization_vanilla_transformer import LETTER_OF_BYTE, VanillaTransformerTokenizerFast

# What the page reads and writes when it opens, beside its examples: it shows no model if it differs from Python.
ODD_TEXTS = (
    *("", "  two  spaces ", "Odd: «é», e\u0301 ﬁ ½ 漢字 🙂!", "a\u200b\x85\t\ufeffx\u3000y_z"),
    *(
        "▁ </s> <unk><pad> ⁇ @@ ",
        ">>deu<< a, >>x",
        "it's 1,000.50 -- (x) [y] don ' t .",
        "<0x41> \x00\x1c\u2028",
        "xyz" * 50,
    ),
)


class PageError(ValueError):
    """The page can't compute or contain a model; the message says what it lacks, and what to do."""


def tokenizer_of(
    tokenizer: PreTrainedTokenizerBase, sizes: tuple[int, int], examples: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns how source and target are read, one after the other if they differ; `sizes`: rows of their embeddings.

    `samples` are texts with their ids as sources and targets, and the texts of the latter. `PageError`: the page
    doesn't read texts so.
    """
    line: str | None = "pieces"
    spells_by_source = False
    if type(tokenizer) is VanillaTransformerTokenizerFast:
        line, sides = "tokens", [_bytes(tokenizer, sizes)]
    elif isinstance(tokenizer, DictionaryTokenizer):
        sides = _dictionaries(tokenizer)
    elif type(tokenizer) is MarianTokenizer:
        line, sides = None, _marian(tokenizer, sizes[1])
        spells_by_source = not tokenizer.separate_vocabs
    else:
        raise PageError(
            "the page reads texts as VanillaTransformerTokenizer, DictionaryTokenizer and MarianTokenizer do; the "
            f"model has a {type(tokenizer).__name__}"
        )
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        raise PageError("the page leaves spaces before punctuation; set clean_up_tokenization_spaces to false")
    return {
        "line": line,
        "sides": sides[:1] if sides[0] == sides[-1] else sides,
        "spells_by_source": spells_by_source,
        "samples": [_sample(tokenizer, text) for text in (*examples, *ODD_TEXTS)],
    }


def _sample(tokenizer: Any, text: str) -> tuple[str, list[int], list[int], str]:
    source, target = (tokenizer(**{side: text}, verbose=False)["input_ids"] for side in ("text", "text_target"))
    return text, source, target, tokenizer.decode(target, skip_special_tokens=True)


# ---- The package's BPE ----
def _bytes(tokenizer: VanillaTransformerTokenizerFast, sizes: tuple[int, int]) -> dict[str, Any]:
    state, rules = json.loads(tokenizer.backend_tokenizer.to_str()), _rules(tokenizer.backend_tokenizer)
    usual = [_rules(tokenization_vanilla_transformer._pipeline(merges)) for merges in (False, True)]
    if rules not in usual:
        raise PageError("the tokenizer divides texts into words by rules of its own, which the page doesn't have")
    special = {token["content"]: token["id"] for token in state["added_tokens"]}
    control = {tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token}
    if others := sorted(special.keys() - control):
        raise PageError(f"the page doesn't read added tokens, and the tokenizer has {', '.join(others[:3])}")
    if not tokenizer.split_special_tokens or tokenizer("")["input_ids"] != [tokenizer.eos_token_id]:
        raise PageError("the page reads texts with </s> at their end alone, and special tokens in them as plain text")
    if len(tokenizer) > min(sizes):
        raise PageError(f"the tokenizer has {len(tokenizer):,} tokens, more than the model; give the model's own")
    ids = list(range(max(sizes)))  # the model may have more than the tokenizer
    return {
        "pieces": [token or "" for token in tokenizer.convert_ids_to_tokens(ids)],
        "shown": tokenizer.readable_pieces(ids),
        "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "letters": [LETTER_OF_BYTE[byte] for byte in range(256)],
        "special": sorted(special.values()),
        "end": tokenizer.eos_token_id,
        "merges_punctuation": rules == usual[True],
    }


def _rules(backend: Any) -> dict[str, Any]:
    state = json.loads(backend.to_str())
    return {part: state[part] for part in ("normalizer", "pre_tokenizer", "decoder")}


# ---- Pieces of a vocabulary ----
def _dictionaries(tokenizer: DictionaryTokenizer) -> list[dict[str, Any]]:
    """Returns how converted models read texts: of fairseq, OpenNMT-py, CTranslate2 and the like."""
    segmentation: Any = tokenizer.content[0]
    sides = []
    for side, end in zip(SIDES, (tokenizer.source_eos, True), strict=True):
        own = segmentation[side]
        if own.get("vocabulary") is not None:
            raise PageError("the page has no vocabulary's threshold for subword-nmt's codes, and the tokenizer has one")
        model = None if own.get("spm") is None else _sentencepiece(base64.b64decode(own["spm"]))
        ways = {"sentencepiece": model, "codes": own.get("codes"), "level": own.get("level")}
        end_id = tokenizer.eos_token_id if end else None
        sides.append({**_common(tokenizer, own["tokens"]), "unknown": tokenizer.unk_token_id, "end": end_id, **ways})
    return sides


def _marian(tokenizer: MarianTokenizer, target_size: int) -> list[dict[str, Any]]:
    if tokenizer.sp_model_kwargs:
        raise PageError("the page's SentencePiece has no options, and the tokenizer has some: sp_model_kwargs")
    if any(one.lstrip or one.rstrip or one.single_word for one in tokenizer.added_tokens_decoder.values()):
        raise PageError("the page leaves spaces around added tokens; the tokenizer has some with lstrip or rstrip")
    encoders = (tokenizer.encoder, tokenizer.target_encoder if tokenizer.separate_vocabs else tokenizer.encoder)
    source, target = ({number: token for token, number in encoder.items()} for encoder in encoders)
    if lacking := {*range(target_size)} - target.keys():
        raise PageError(f"the model writes {target_size:,} tokens, and its tokenizer has no token {min(lacking)}")
    models = (tokenizer.spm_source, tokenizer.spm_target)
    return [
        {
            **_common(tokenizer, [tokens.get(number, "") for number in range(1 + max(tokens))]),
            "unknown": encoder[tokenizer.unk_token],
            "end": tokenizer.eos_token_id,
            "sentencepiece": _sentencepiece(model.serialized_model_proto()),
            "is_marian": True,
        }
        for tokens, encoder, model in zip((source, target), encoders, models, strict=True)
    ]


def _common(tokenizer: Any, tokens: list[str]) -> dict[str, Any]:
    return {"tokens": tokens, "added": tokenizer.added_tokens_encoder, "special": tokenizer.all_special_ids}


def _sentencepiece(content: bytes) -> dict[str, Any]:
    """Returns a SentencePiece model; `charsmap` is that of its normalizer, as it is."""
    model = import_protobuf().ModelProto.FromString(content)
    trained, rules, pieces = model.trainer_spec, model.normalizer_spec, model.pieces
    is_unigram = trained.model_type == trained.UNIGRAM
    of_kind = {kind: [one for one in pieces if one.type == kind] for kind in {one.type for one in pieces}}
    piece = type(pieces[0])
    lacking = {
        "models of words or characters": not is_unigram and trained.model_type != trained.BPE,
        "symbols of the user": piece.USER_DEFINED in of_kind,
        "unused pieces of BPE": not is_unigram and piece.UNUSED in of_kind,
        "denormalizer": bool(model.denormalizer_spec.precompiled_charsmap),
        "spaces other than ▁ before words": trained.treat_whitespace_as_suffix or not rules.escape_whitespaces,
    }
    if found := [name for name, is_there in lacking.items() if is_there]:
        raise PageError(f"the page's SentencePiece has no {found[0]}, and the tokenizer needs them")
    normal = of_kind.get(piece.NORMAL, [])
    return {
        "is_unigram": is_unigram,
        "pieces": [one.piece for one in normal],
        "scores": base64.b64encode(array("f", [one.score for one in normal]).tobytes()).decode(),
        "known": [one.piece for one in pieces if one.type != piece.NORMAL],
        "control": [one.piece for one in of_kind.get(piece.CONTROL, [])],
        "unknown": next((one.piece for one in of_kind.get(piece.UNKNOWN, [])), None),
        "unknown_surface": trained.unk_surface,
        "charsmap": base64.b64encode(rules.precompiled_charsmap).decode(),
        "begins_with_space": rules.add_dummy_prefix,
        "trims": rules.remove_extra_whitespaces,
        "has_bytes": trained.byte_fallback,
    }
