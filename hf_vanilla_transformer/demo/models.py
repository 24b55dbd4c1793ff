"""What the page shows of a model: its translations and its attention, here with transformers alone.

This file travels with a Space: it imports nothing of the package outside of this folder's `page`, `tables`, `server`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

MOST_SOURCE_TOKENS = 1_024
MOST_TOKENS_SHOWN = 100  # of a matrix; more would be no picture, and 10,000 cells are slow to draw
NO_HYPOTHESIS = -1e8  # transformers gives the score -1e9 to places that hold none


@dataclass(frozen=True)
class Candidate:
    """One translation of a line.

    Attributes:
        text: The translation.
        tokens: Tokens that the model wrote, the end of the sentence included; None: they weren't counted.
        score: Its log-probability in nats divided by the length penalty; None: it has none.
    """

    text: str
    tokens: int | None = None
    score: float | None = None


@dataclass(frozen=True, eq=False)
class Matrix:
    """The attention weights of all layers and heads.

    Attributes:
        rows: The tokens that attend.
        columns: The tokens that they attend to.
        weights: (layers, heads, rows, columns), each row a distribution.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    weights: Tensor


@dataclass(frozen=True)
class Model:
    """A model as the page needs it.

    Attributes:
        name: What it is called on the page.
        about: Its size in a few words.
        scoring: What its scores are, a sentence.
        num_beams: Beams by default.
        layers: Layers of the encoder, and of the decoder.
        heads: Heads of the encoder's layers, and of the decoder's.
        translate: Lines, number of beams and most tokens (None: the model's own limit) -> the candidates of each line,
            the best first. It raises an error of one line for what it can't translate.
        attend: A line and its translation -> the weights by kind: "encoder", "decoder" and "cross".
    """

    name: str
    about: str
    scoring: str
    num_beams: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    translate: Callable[[list[str], int, int | None], list[list[Candidate]]]
    attend: Callable[[str, str], dict[str, Matrix]]


def check_size(tokens: int) -> None:
    """Checks, before the weights are computed or kept, that a matrix can be shown.

    Raises:
        ValueError: It would have too many rows or columns.
    """
    if tokens > MOST_TOKENS_SHOWN:
        raise ValueError(f"Attention is shown for up to {MOST_TOKENS_SHOWN} tokens; here there are {tokens:,}.")


def described(name: str, model: Any, translate: Any, attend: Any) -> Model:
    """Returns a model for the page: what its configuration says of it, and the two functions.

    Args:
        name: What it is called on the page.
        model: A sequence-to-sequence model of transformers.
        translate: As in `Model`.
        attend: As in `Model`.
    """
    config = model.config
    layers = (_first(config, "encoder_layers", "num_layers"), _first(config, "decoder_layers", "num_decoder_layers"))
    heads = (
        _first(config, "encoder_attention_heads", "num_heads"),
        _first(config, "decoder_attention_heads", "num_heads"),
    )
    about = [f"{model.num_parameters():,} parameters", f"{layers[0]} + {layers[1]} layers", f"{heads[1]} heads"]
    if isinstance(width := getattr(config, "d_model", None), int):
        about.append(f"d_model {width:,}")
    num_beams = getattr(model.generation_config, "num_beams", None) or 1
    return Model(name, ", ".join(about), _scoring(model.generation_config), num_beams, layers, heads, translate, attend)


def _first(config: Any, *names: str) -> int:
    """The first of these fields that the configuration has; architectures name them differently."""
    values = (getattr(config, name, None) for name in (*names, "num_hidden_layers", "num_attention_heads"))
    return next((value for value in values if isinstance(value, int)), 1)


def _scoring(config: Any) -> str:
    alpha, power = getattr(config, "gnmt_length_penalty", None), getattr(config, "length_penalty", None)
    if alpha is not None and power in (None, 1.0):
        penalty = f" divided by ((5 + tokens) / 6)^{alpha:g}"
    else:
        power = 1.0 if power is None else power
        penalty = f" divided by tokens^{power:g}" if power else ""
    return f"Score: log-probability (natural logarithm){penalty}. The nearer to 0, the more probable."


def load(name: str, source: str, *, trust_remote_code: bool = False) -> Model:
    """Loads a model with transformers alone.

    Args:
        name: What it is called on the page.
        source: Its folder, or its name on the Hub.
        trust_remote_code: Whether code that comes with it may run, without which a model of this package needs the
            package.
    """
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    model = AutoModelForSeq2SeqLM.from_pretrained(source, trust_remote_code=trust_remote_code).eval()

    def translate(lines: list[str], num_beams: int, longest: int | None) -> list[list[Candidate]]:
        inputs = [_inputs(tokenizer, model, line) if line.strip() else None for line in lines]  # all before the work
        return [[] if one is None else _candidates(tokenizer, model, one, num_beams, longest) for one in inputs]

    def attend(source: str, target: str) -> dict[str, Matrix]:
        return attention(tokenizer, model, source, target)

    return described(name, model, translate, attend)


def _inputs(tokenizer: Any, model: Any, line: str) -> Any:
    inputs = tokenizer(line, return_tensors="pt", verbose=False)
    count, limit = inputs["input_ids"].shape[1], MOST_SOURCE_TOKENS
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and getattr(model.config, "position_encoding", "learned") == "learned":
        limit = min(limit, positions)
    if count > limit:
        shown = line if len(line) <= 40 else f"{line[:39]}…"
        raise ValueError(
            f"the line that begins with {shown!r} has {count:,} tokens, and {limit:,} are the most; divide it"
        )
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def _candidates(tokenizer: Any, model: Any, inputs: Any, num_beams: int, longest: int | None) -> list[Candidate]:
    options: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": num_beams, "do_sample": False}
    if num_beams == 1:
        options["early_stopping"] = False  # of a beam search, about which transformers would warn
    if longest is not None:
        options |= {"max_new_tokens": longest, "max_length": None}
    output = model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=num_beams > 1)
    texts = tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
    if num_beams == 1:
        padding = model.generation_config.pad_token_id
        counts, scores = [sum(token != padding for token in output.sequences[0, 1:].tolist())], [None]
    else:
        counts, scores = (output.beam_indices >= 0).sum(dim=1).tolist(), output.sequences_scores.tolist()
    rows = zip(texts, counts, scores, strict=True)
    found = [Candidate(text.replace("\r", " ").replace("\n", " "), count, score) for text, count, score in rows]
    return found[:1] + [one for one in found[1:] if one.score is not None and one.score > NO_HYPOTHESIS]


@torch.no_grad()
def attention(tokenizer: Any, model: Any, source: str, target: str) -> dict[str, Matrix]:
    """Returns the weights of all layers and heads for a sentence and a translation that the model is forced to write.

    Args:
        tokenizer: The model's.
        model: A sequence-to-sequence model of transformers, in evaluation mode.
        source: The sentence.
        target: The translation.

    Raises:
        ValueError: They are too long, or the model shows no attention weights.
    """
    inputs = tokenizer(source, return_tensors="pt", verbose=False)
    labels = tokenizer(text_target=target, return_tensors="pt", verbose=False)["input_ids"]  # (1, T)
    check_size(max(inputs["input_ids"].shape[1], labels.shape[1]))
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    output = model(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        decoder_input_ids=shifted,
        output_attentions=True,
        use_cache=False,
    )
    readable = getattr(tokenizer, "readable_pieces", None) or tokenizer.convert_ids_to_tokens
    sources, read, written = (readable(ids[0].tolist()) for ids in (inputs["input_ids"], shifted, labels))
    if getattr(tokenizer, "separate_vocabs", False):  # those above are the target's
        names = {number: token for token, number in tokenizer.get_vocab().items()}
        sources = [names[number] for number in inputs["input_ids"][0].tolist()]
    return {
        "encoder": Matrix(sources, sources, _stacked(output.encoder_attentions)),
        "decoder": Matrix(read, read, _stacked(output.decoder_attentions)),
        "cross": Matrix(written, sources, _stacked(output.cross_attentions)),
    }


def _stacked(layers: Sequence[Tensor] | None) -> Tensor:
    if not layers or layers[0] is None:
        raise ValueError("this model shows no attention weights")
    return torch.stack([layer[0] for layer in layers]).float().cpu()
