"""A dictionary's tokenizer as a tokenizer.json, if one SentencePiece model divides the texts of both languages."""

import base64
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers
from tokenizers.models import Unigram
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import import_protobuf

from ..errors import named
from ..tokenization_dictionary import SPACE, DictionaryTokenizer
from .interface import ConversionError

UNIGRAM = 1  # of SentencePiece's kinds of models
NORMAL, USER_DEFINED, BYTE = 1, 4, 6  # of its kinds of pieces
NEVER = -1e4  # what tokens score that are no pieces of texts
SAMPLE = 100  # pieces of a text that both tokenizers are given
INSTEAD = "; publish the checkpoint as it is"


def plain(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Returns a tokenizer of transformers' own with the same ids, or a tokenizer of another kind as it is.

    A special token's name in a text is that token, as in other tokenizers there, if its characters are unknown.
    Raises `ConversionError` if a tokenizer.json would give other ids.
    """
    if not isinstance(tokenizer, DictionaryTokenizer):
        return tokenizer
    segmentation: Any = tokenizer.content[0]
    if segmentation["source"].get("spm") is None or segmentation["source"] != segmentation["target"]:
        return tokenizer
    model = import_protobuf().ModelProto.FromString(base64.b64decode(segmentation["source"]["spm"]))
    scores = {one.piece: one.score for one in model.pieces if one.type in (NORMAL, BYTE)}
    if model.trainer_spec.model_type != UNIGRAM or any(one.type == USER_DEFINED for one in model.pieces):
        raise ConversionError(f"its SentencePiece model is of another kind than unigram, or has symbols{INSTEAD}")
    if lacking := scores.keys() - tokenizer.get_vocab().keys():
        found = named(lacking, 5)
        raise ConversionError(f"its dictionary lacks pieces, as no tokenizer.json can: {found}{INSTEAD}")
    made = PreTrainedTokenizerFast(
        tokenizer_object=_backend(tokenizer, model, scores),
        split_special_tokens=tokenizer.split_special_tokens,
        **{name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    )
    pieces = [*scores]
    for first in range(0, len(pieces), SAMPLE):
        text = "".join(pieces[first : first + SAMPLE]).replace(SPACE, " ")
        if made(text)["input_ids"] != tokenizer(text)["input_ids"]:
            raise ConversionError(f"a tokenizer.json of its SentencePiece model divides {text!r} otherwise{INSTEAD}")
    return made


def _backend(tokenizer: DictionaryTokenizer, model: Any, scores: dict[str, float]) -> Tokenizer:
    ids, rules, has_bytes = tokenizer.get_vocab(), model.normalizer_spec, model.trainer_spec.byte_fallback
    vocabulary = [(token, scores.get(token, NEVER)) for token in sorted(ids, key=ids.__getitem__)]
    made = Tokenizer(Unigram(vocabulary, ids[str(tokenizer.unk_token)], has_bytes))
    made.add_special_tokens([token for token in ids if token not in scores])  # which no text shows
    steps: list[Any] = [normalizers.Precompiled(rules.precompiled_charsmap)] if rules.precompiled_charsmap else []
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(SPACE)] if rules.add_dummy_prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    of_bytes = [decoders.ByteFallback()] if has_bytes else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), *of_bytes, decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if tokenizer.source_eos:
        end = str(tokenizer.eos_token)
        made.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, ids[end])])
    return made
