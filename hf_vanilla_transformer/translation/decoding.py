"""Translating many sentences with one model or an ensemble: batches by length, n-best lists, alignments.

Everything here takes a sequence-to-sequence model of transformers in evaluation mode and its tokenizer. Decoding is the
model's own `generate()`: options are its keyword arguments, by default those of the model's generation config.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..engine import Engine
from ..engine.decoding.search import round_down
from ..engine.decoding.together import run_together
from ..generation_vanilla_transformer import DecodingMixin
from .limits import BATCH_TOKENS, MAX_SOURCE_TOKENS, check_generation, check_limit
from .sources import Namer, Piece, Reader, check_splitting, encoder, join_pieces, namers, target_code

logger = logging.get_logger(__name__)

# Texts that are tokenized at a time.
TEXTS_AT_ONCE = 1_000
# transformers gives the score -1e9 to places that hold no hypothesis.
NO_HYPOTHESIS = -1e8


@dataclass(frozen=True, eq=False)
class Alignment:
    """How much each token of a translation attends to each token of its source.

    Attributes:
        source: The source's tokens, (S,).
        target: The tokens that the model wrote, (T,); those of a prefix are not among them.
        weights: The mean of the last layer's heads, (T, S).
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: Tensor


@dataclass(frozen=True)
class Translation:
    """One translation of a text.

    Attributes:
        text: Its text; on one line, unless the text was split into sentences and has several lines.
        num_tokens: Tokens that the model wrote, the end of sentence included where it wrote one, without a prefix.
        score: Its log-probability in nats divided by the length penalty, `sequences_scores` of `generate()`; None
            where n-best lists weren't asked for, or the text was translated in pieces.
        alignment: Where it was asked for, and the text was translated as one.
    """

    text: str
    num_tokens: int
    score: float | None = None
    alignment: Alignment | None = field(default=None, compare=False)


class OtherModel(ABC):
    """A model that another library runs: what the functions here need of it in place of a `PreTrainedModel`.

    Attributes:
        config: Its special tokens, and as `max_position_embeddings` its positions.
        generation_config: How it decodes by default.
        device: Where it is.
        dtype: The type of its weights, by its name.
    """

    config: Any
    generation_config: GenerationConfig
    device: torch.device
    dtype: str
    training = False

    @abstractmethod
    def check_options(self, options: dict[str, Any], n_best: int | None, alignments: bool) -> dict[str, Any]:
        """Checks the options of a call of `decode` and returns those for `search`; raises `ValueError`."""

    @abstractmethod
    def search(
        self,
        tokenizer: PreTrainedTokenizerBase,
        windows: Iterator[list[Piece]],
        options: dict[str, Any],
        *,
        batch_size: int | None,
        batch_tokens: int | None,
        lock: AbstractContextManager[Any],
    ) -> Iterator[tuple[list[int], list[list[Translation]]]]:
        """Translates pieces, which are numbered through all windows: yields some numbers with their translations.

        Args:
            tokenizer: The model's.
            windows: Pieces, some at a time; the next ones are tokenized when they are asked for.
            options: What `check_options` returned.
            batch_size: As for `decode`.
            batch_tokens: As for `decode`.
            lock: To be held while the tokenizer is used.
        """

    @abstractmethod
    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[float]:
        """Returns how probable each target is, in nats; tokens of sources and targets end with `</s>`."""


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Iterable[str],
    **options: Any,
) -> list[str]:
    """Translates sentences: one line each, in their order; one that is empty or white space stays empty.

    Args:
        model: A model, or what `ensemble` made of several.
        tokenizer: Its tokenizer.
        sentences: The sentences, in any order of length: a list, a generator or the like, which is read once.
        **options: As for `decode`, except for `n_best`, and for `generate()`, such as `num_beams` or
            `gnmt_length_penalty`.

    Returns:
        As many translations as there are sentences.

    Raises:
        TypeError: As `decode`.
        ValueError: As `decode`.
    """
    return [translations[0].text for translations in decode(model, tokenizer, sentences, **options)]


def decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Iterable[str],
    *,
    n_best: int | None = None,
    alignments: bool = False,
    target_lang: str | None = None,
    prefix: str | Sequence[str] | None = None,
    split_sentences: str | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    max_source_tokens: int | None = None,
    progress: Callable[[int], object] | None = None,
    on_division: Callable[[int, int], object] | None = None,
    lock: AbstractContextManager[Any] | None = None,
    **options: Any,
) -> list[list[Translation]]:
    """Translates sentences into translations with their lengths and, for n-best lists, scores.

    Args:
        model: A model, what `ensemble` made of several, or one of another library.
        tokenizer: Its tokenizer.
        sentences: The sentences.
        n_best: Translations per sentence, of a beam search at least as wide. None: the best alone, without its score.
        alignments: Whether translations have their alignments; a model of this package has them.
        target_lang: What to translate into, for a tokenizer that has codes such as ">>deu<<": "deu" or ">>deu<<". A
            sentence that begins with a code keeps it.
        prefix: What translations have to begin with: a string for all, or a list with one for each sentence. White
            space at its end doesn't count. It should end with a word, as it is tokenized by itself: the model goes on
            with a new token.
        split_sentences: The language of the sentences in two letters (ISO 639-1), by whose rules each is first split,
            as it may be a paragraph or several; their translations are joined, with line breaks where they were. It
            needs sentencex. None: nothing is split.
        batch_size: Sentences at a time at most; None: as many as `batch_tokens` allows.
        batch_tokens: Padded source tokens at a time, times beams, at most; a longer sentence is a batch by itself.
            None: 4,096, or what suits the backend.
        max_source_tokens: Tokens of a source that is translated as one, at most; None: 1,024, or the tokenizer's
            `model_max_length` where it is less. It is the model's positions where they end earlier. A longer one is
            divided into pieces of at most 256 tokens at the ends of its sentences, else at white space, else
            anywhere; the translations are joined.
        progress: Called with the number of sentences done since its last call.
        on_division: Called with the index and the number of pieces of each sentence that is divided as it is too long;
            None: a warning is logged.
        lock: Held while the tokenizer or the model works on a batch, so that several threads may share them.
        **options: For `generate()`; lengths are those of a piece.

    Returns:
        Translations of each sentence, the best first: one, or `n_best` (fewer where the search found no more). An
        empty sentence has one, empty, of no tokens and score 0. A sentence that is divided or split has one, without a
        score or an alignment: the best of each piece, joined.

    Raises:
        TypeError: `sentences` is one string, a set, a dictionary or nothing, or one of them is not a string.
        ValueError: The model is in training mode, an option is beyond its limit (`evaluation.limits`), or
            `generate()` refuses an option or a sentence; `n_best` is below 1 or above the number of beams, or there
            is but one beam; the model has no such target language, or no alignments; a prefix has special or unknown
            tokens.
        ImportError: `split_sentences` is asked for and sentencex is not installed.
    """
    texts = texts_of("sentences", sentences)
    check_model(model)
    for name, value in (
        ("batch_size", batch_size), ("batch_tokens", batch_tokens), ("max_source_tokens", max_source_tokens)
    ):  # fmt: skip
        check_limit(name, value)
    check_splitting(split_sentences)
    check = model.check_options if isinstance(model, OtherModel) else partial(_checked_options, model)
    options = check(options, n_best, alignments)
    code = "" if target_lang is None else target_code(tokenizer, target_lang)
    lock = nullcontext() if lock is None else lock
    reader = Reader(tokenizer, source_limit(model, max_source_tokens, tokenizer), code, split_sentences)
    with lock:
        prefixes = _prefix_tokens(model, tokenizer, prefix, len(texts), options)
    left: Counter[int] = Counter()  # pieces of each text that aren't translated yet
    tell = progress or (lambda number: None)
    pieces: list[Piece] = []
    lists: dict[int, list[Translation]] = {}

    def windows() -> Iterator[list[Piece]]:
        for window in _windows(reader, texts, prefixes, lock, on_division, tell):
            left.update(piece.text for piece in window)
            pieces.extend(window)
            yield window

    search = model.search if isinstance(model, OtherModel) else partial(_search, model)
    for batch, decoded in search(
        tokenizer, windows(), options, batch_size=batch_size, batch_tokens=batch_tokens, lock=lock
    ):
        lists.update(zip(batch, decoded, strict=True))
        left.subtract(pieces[place].text for place in batch)
        tell(sum(left[text] == 0 for text in {pieces[place].text for place in batch}))
    results = [[Translation("", 0, None if n_best is None else 0.0)] for _ in texts]
    for text, own in _by_text(pieces, [lists[place] for place in range(len(pieces))]).items():
        results[text] = own[0][1] if len(own) == 1 else [_joined([(gap, one[0]) for gap, one in own])]
    return results


def _windows(
    reader: Reader,
    texts: list[str],
    prefixes: list[tuple[int, ...]],
    lock: AbstractContextManager[Any],
    on_division: Callable[[int, int], object] | None,
    progress: Callable[[int], object],
) -> Iterator[list[Piece]]:
    """Yields the pieces of some texts at a time."""
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        some = slice(first, first + TEXTS_AT_ONCE)
        with lock:
            pieces, divided = reader.pieces(texts[some], prefixes[some], first)
        for index, count in divided.items():
            (on_division or partial(_warn_of_division, reader.limit))(index, count)
        if empty := len(texts[some]) - len({piece.text for piece in pieces}):
            progress(empty)
        yield pieces


def _search(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: Iterator[list[Piece]],
    options: dict[str, Any],
    *,
    batch_size: int | None,
    batch_tokens: int | None,
    lock: AbstractContextManager[Any],
) -> Iterator[tuple[list[int], list[list[Translation]]]]:
    """Translates pieces as `OtherModel.search` does, with `generate()`."""
    pieces = [piece for window in windows for piece in window]
    num_beams = _setting(model, options, "num_beams") or 1
    begin = partial(_begin, model, tokenizer, pieces, options)
    with lock:
        names = namers(tokenizer) if options.get("output_alignments") else None
    outputs = run_together(begin, batches_of(pieces, batch_size, (batch_tokens or BATCH_TOKENS) // num_beams))
    while True:
        with lock:
            with no_gradients(model):
                batch, output = next(outputs, (None, None))
            if batch is None:
                return
            decoded = _translations(model, tokenizer, [pieces[place] for place in batch], options, output, names)
        yield batch, decoded


def no_gradients(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Keeps gradients off. Quantized weights may be tensors of classes that inference mode has no room for (quanto)."""
    return torch.no_grad() if getattr(model, "is_quantized", False) else torch.inference_mode()


def _warn_of_division(limit: int, index: int, count: int) -> None:
    logger.warning(f"sentences[{index}] has more than {limit:,} tokens and is translated in {count} pieces.")


def _checked_options(
    model: PreTrainedModel, options: dict[str, Any], n_best: int | None, alignments: bool
) -> dict[str, Any]:
    """Returns the options for `generate()`; raises `ValueError`."""
    config = options.get("generation_config") or model.generation_config
    check_generation(options, config)
    num_beams = options.get("num_beams") or config.num_beams or 1
    options = {**options, "return_dict_in_generate": True}  # for the beams' lengths
    if options.get("max_new_tokens") is not None:
        options.setdefault("max_length", None)  # transformers would warn of a generation config's at each batch
    if n_best is not None:
        check_n_best(n_best, num_beams)
        options["num_return_sequences"] = n_best
    if alignments and not isinstance(without_adapters(model), DecodingMixin):
        raise ValueError(f"alignments need a model of this package, and this one is a {type(model).__name__}")
    if alignments:
        options["output_alignments"] = True
    return options


def without_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model that a `PeftModel` has been made of, which holds the adapters' layers; any other as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _prefix_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prefix: str | Sequence[str] | None,
    count: int,
    options: dict[str, Any],
) -> list[tuple[int, ...]]:
    """Returns the tokens that the decoder begins with, for each text; none where the model is free to begin."""
    if prefix is None:
        return [()] * count
    given = [prefix] * count if isinstance(prefix, str) else texts_of("prefix", prefix)
    if len(given) != count:
        raise ValueError(f"prefix has {len(given)} strings for {count} sentences; give one for each, or one string")
    begin = [_setting(model, options, "decoder_start_token_id"), _setting(model, options, "forced_bos_token_id")]
    begin = [token for token in begin if token is not None]
    known: dict[str, tuple[int, ...]] = {}
    read = encoder(tokenizer, is_target=True, add_special_tokens=False)
    for text in dict.fromkeys(given):
        ids = read([text.rstrip()])[0]
        if special := set(ids) & set(tokenizer.all_special_ids):
            shown = ", ".join(tokenizer.convert_ids_to_tokens(sorted(special)))
            raise ValueError(f"the prefix {text!r} becomes {shown} for the tokenizer; leave out what it doesn't know")
        known[text] = (*begin, *ids) if ids else ()
    return [known[text] for text in given]


def _setting(model: PreTrainedModel, options: dict[str, Any], name: str) -> Any:
    """Returns an option of `generate()` as it counts, which older models have in their configuration."""
    places = (options.get("generation_config"), model.generation_config, model.config)
    values = [options.get(name), *(getattr(place, name, None) for place in places)]
    return next((value for value in values if value is not None), None)


def source_limit(
    model: PreTrainedModel, max_tokens: int | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> int:
    """Returns how many tokens a source may have to be translated as one.

    Args:
        model: A model, or what `ensemble` made of several.
        max_tokens: The limit that is asked for; None: `MAX_SOURCE_TOKENS`, or the tokenizer's if it is less.
        tokenizer: Its tokenizer, whose `model_max_length` is as long as the texts that it was trained on.

    Returns:
        That, or the model's number of positions where it is less: that of a learned table, and whatever another
        architecture has as `max_position_embeddings`. Our sinusoids have no end.
    """
    limit = max_tokens
    if limit is None:
        limit = min(MAX_SOURCE_TOKENS, int(getattr(tokenizer, "model_max_length", MAX_SOURCE_TOKENS)))
    for member in getattr(model, "members", [model]):
        positions = getattr(member.config, "max_position_embeddings", None)
        if isinstance(positions, int) and getattr(member.config, "position_encoding", "learned") == "learned":
            limit = min(limit, positions)
    return limit


def batches_of(
    pieces: Sequence[Piece], batch_size: int | None, max_tokens: int, size_of: Callable[[int], int] = round_down
) -> Iterator[list[int]]:
    """Groups pieces for a batch each; all of a batch have prefixes of one length, as padding can't begin a target."""
    groups: dict[int, list[int]] = {}
    for place, piece in enumerate(pieces):
        groups.setdefault(len(piece.prefix), []).append(place)
    for group in groups.values():
        for batch in batches([len(pieces[place].token_ids) for place in group], batch_size, max_tokens, size_of):
            yield [group[number] for number in batch]


def _by_text(pieces: list[Piece], lists: list[list[Translation]]) -> dict[int, list[tuple[str, list[Translation]]]]:
    grouped: dict[int, list[tuple[str, list[Translation]]]] = {}
    for piece, translations in zip(pieces, lists, strict=True):
        grouped.setdefault(piece.text, []).append((piece.gap, translations))
    return grouped


def _joined(pieces: list[tuple[str, Translation]]) -> Translation:
    # Scores of several searches add up to no score of one.
    text = join_pieces([(gap, piece.text) for gap, piece in pieces])
    return Translation(text, sum(piece.num_tokens for _, piece in pieces))


def batches(
    lengths: Sequence[int], batch_size: int | None, max_tokens: int, size_of: Callable[[int], int] = round_down
) -> Iterator[list[int]]:
    """Groups sentences of like length, the longest first, so that too little memory shows at once.

    Args:
        lengths: Tokens of each sentence.
        batch_size: Sentences per batch at most; None: any number.
        max_tokens: Padded tokens per batch at most; a sentence that is longer is a batch by itself.
        size_of: Returns how many of as many sentences as there is room for make a batch.

    Yields:
        Indices into `lengths`, each of them once.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) == batch_size or (len(batch) + 1) * lengths[batch[0]] > max_tokens):
            size = size_of(len(batch))
            yield batch[:size]
            batch = batch[size:]
        batch.append(index)
    if batch:
        yield batch


def _begin(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pieces: list[Piece],
    options: dict[str, Any],
    places: Sequence[int],
) -> Any:
    """Begins the search for pieces whose prefixes have one length, or does all of it where there is no engine."""
    tokens = {"input_ids": [pieces[place].token_ids for place in places]}
    inputs = tokenizer.pad(tokens, return_tensors="pt").to(model.device)
    batch = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    if pieces[places[0]].prefix:
        batch["decoder_input_ids"] = torch.tensor([pieces[place].prefix for place in places], device=model.device)
    # transformers' beam search gives scores of sequences only with those of every step.
    scores = {"output_scores": True} if options.get("num_return_sequences") else {}
    attached = vars(model).get("engine")  # not that of a model with adapters below
    if isinstance(attached, Engine) and "generate" not in vars(model):  # the user's own
        return attached.begin(model, {**batch, **options}, scores)
    return model.generate(**batch, **options, **scores)


def _translations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pieces: list[Piece],
    options: dict[str, Any],
    output: Any,
    names: tuple[Namer, Namer] | None,
) -> list[list[Translation]]:
    """Makes translations of what `generate()` returned for pieces; with `names` of tokens, with their alignments."""
    texts = [on_one_line(text) for text in tokenizer.batch_decode(output.sequences, skip_special_tokens=True)]
    scores = output.sequences_scores.tolist() if options.get("num_return_sequences") else [None] * len(texts)
    counts = _numbers_of_tokens(model, output, max(len(pieces[0].prefix), 1))
    width = len(texts) // len(pieces)
    alignments: list[Alignment | None] = [None] * len(texts)
    if names is not None:
        sources = [piece.token_ids for piece in pieces for _ in range(width)]
        alignments = _alignments(names, output, sources, counts)
    rows = [Translation(*row) for row in zip(texts, counts, scores, alignments, strict=True)]
    return [_without_empty_places(rows[start : start + width]) for start in range(0, len(rows), width)]


def _alignments(
    names: tuple[Namer, Namer], output: Any, sources: list[list[int]], counts: list[int]
) -> list[Alignment | None]:
    """Cuts the alignments of each row, (rows, T, S), to its tokens, and names these."""
    made: list[Alignment | None] = []
    of_source, of_target = names
    begin = output.sequences.shape[1] - output.alignments.shape[1]
    for number, (source, count) in enumerate(zip(sources, counts, strict=True)):
        target = output.sequences[number, begin : begin + count].tolist()
        weights = output.alignments[number, :count, : len(source)].clone()  # which doesn't hold the batch's memory
        made.append(Alignment(tuple(of_source(source)), tuple(of_target(target)), weights))
    return made


def on_one_line(text: str) -> str:
    """Returns a translation without line breaks."""
    return text.replace("\r", " ").replace("\n", " ")


def _without_empty_places(translations: list[Translation]) -> list[Translation]:
    # A search with fewer hypotheses than places fills the list up with such.
    return translations[:1] + [one for one in translations[1:] if one.score is not None and one.score > NO_HYPOTHESIS]


def _numbers_of_tokens(model: PreTrainedModel, output: Any, begin: int) -> list[int]:
    """Counts what the model wrote in each row from a place on; rows are filled up to the longest one's length."""
    if output.get("beam_indices") is not None:
        return (output.beam_indices >= 0).sum(dim=1).tolist()
    config = model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return [_number_of_tokens(row[begin:], ends, config.pad_token_id) for row in output.sequences.tolist()]


def _number_of_tokens(tokens: list[int], ends: list[int | None], padding: int | None) -> int:
    for number, token in enumerate(tokens, start=1):
        if token in ends:
            return number
    while tokens and tokens[-1] == padding:
        tokens = tokens[:-1]
    return len(tokens)


def check_n_best(n_best: int, num_beams: int) -> None:
    """Checks that a beam search has enough beams for n-best lists.

    Raises:
        ValueError: There are fewer beams, or just one, or `n_best` is below 1 or beyond its limit.
    """
    check_limit("n_best", n_best)
    if num_beams < max(n_best, 2):
        raise ValueError(
            f"n_best={n_best} needs a beam search of at least {max(n_best, 2)} beams, and num_beams is {num_beams}; "
            "raise num_beams"
        )


def texts_of(name: str, values: Iterable[str], first: int = 0) -> list[str]:
    """Makes a list of what a caller gives as sentences, which may be a generator.

    Args:
        name: What they are called in errors.
        values: The sentences.
        first: The number of the first one, for errors.

    Raises:
        TypeError: It is one string, a set, a dictionary or nothing, or one of them is not a string.
        ValueError: One of them has half of a surrogate pair.
    """
    if isinstance(values, str | bytes):
        raise TypeError(f"{name} is a string; give a list of strings, [text] for a single one")
    if isinstance(values, Mapping | set | frozenset) or not isinstance(values, Iterable):
        kind = "None" if values is None else f"of type {type(values).__name__}"
        raise TypeError(f"{name} is {kind}; give strings in an order, for instance a list of strings")
    texts = list(values)
    for index, text in enumerate(texts, start=first):
        if not isinstance(text, str):
            kind = "None" if text is None else f"of type {type(text).__name__}"
            raise TypeError(f'{name}[{index}] is {kind}; give strings, "" for a missing one')
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name}[{index}] has half of a surrogate pair at position {error.start}, which is no character; "
                'remove it, for instance by text.encode("utf-8", "replace").decode()'
            ) from error
    return texts


def check_model(model: PreTrainedModel) -> None:
    """Checks that a model is in evaluation mode.

    Raises:
        ValueError: It is in training mode.
    """
    if model.training:
        raise ValueError("the model is in training mode, where dropout falsifies its output; call model.eval() first")
