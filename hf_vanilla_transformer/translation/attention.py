"""The attention weights of one sentence and its translation, with the tokens as people read them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from .backend import Backend, Call
from .decoding import backend_of, read_pairs
from .reading import namers

# Weights grow with the square of the length, and no picture shows that many tokens.
MAX_TOKENS = 512


@dataclass(frozen=True, eq=False)
class Attention:
    """Where each token attends to, for one sentence and its translation."""

    source_pieces: list[str]  # the source's S tokens, readable: keys of the encoder's and of the cross-attention
    input_pieces: list[str]  # the T tokens that the decoder reads, the start token first: keys of its self-attention
    target_pieces: list[str]  # the T tokens that the decoder predicts at these positions, a token later
    encoder: Tensor  # self-attention of the encoder, (layers, heads, S, S), float32 on the CPU as all of them
    decoder: Tensor  # self-attention of the decoder, (layers, heads, T, T)
    cross: Tensor  # attention of the decoder to the encoder's output, (layers, heads, T, S)


def attention_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    target: str | None = None,
    **languages: str | None,
) -> Attention:
    """Returns the attention of all layers and heads for one sentence, as `model(..., output_attentions=True)` does.

    The model is forced to write the `target`; None: it writes its own, by its generation config. `languages` are
    `src_lang`, `tgt_lang` and `source_prefix` of a `Call`.

    Raises:
        ValueError: A text is empty or has more than 512 tokens or than the model has positions, weights are NaN or
            infinite, or the model shows no attention weights.
    """
    if isinstance(model, Backend):
        raise ValueError("a model in CTranslate2's format shows no attention weights; give the model itself")
    texts = {"source": source} if target is None else {"source": source, "target": target}
    for name, text in texts.items():
        _check(name, text)
    call = Call.of(backend_of(model, tokenizer), tokenizer, languages)
    sources, targets = read_pairs(call, [source], [] if target is None else [target])
    limit, rows = min(MAX_TOKENS, call.limit), dict[str, list[int]]()
    for name, ids in zip(texts, [*sources, *targets], strict=True):
        if ids is None or len(ids) > limit:
            raise ValueError(f"{name} has more than {limit:,} tokens; give one sentence of it")
        rows[name] = ids
    with torch.no_grad():
        inputs = torch.tensor([rows["source"]], device=model.device)
        batch = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
        if target is None:
            found = model.generate(**batch, **call.options, num_return_sequences=1, return_dict_in_generate=False)
            sequence = found[0].tolist()
        else:  # the start token, and the target
            sequence = [call.plan.start, *rows["target"]]
        read, predicted = sequence[:-1], sequence[1:]
        decoder_inputs = torch.tensor([read], device=model.device)
        output = model(**batch, decoder_input_ids=decoder_inputs, output_attentions=True, use_cache=False)
    return Attention(
        source_pieces=_readable(tokenizer, rows["source"], side=0),
        input_pieces=_readable(tokenizer, read, side=1),
        target_pieces=_readable(tokenizer, predicted, side=1),
        encoder=_stacked(model, output, "encoder_attentions"),
        decoder=_stacked(model, output, "decoder_attentions"),
        cross=_stacked(model, output, "cross_attentions"),
    )


def _check(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} is of type {type(text).__name__}; give one sentence, a string")
    if not text.strip():
        fix = "" if name == "source" else ", or leave it out to see the model's own translation"
        raise ValueError(f"{name} is empty; give a sentence{fix}")


def _stacked(model: PreTrainedModel, output: ModelOutput, name: str) -> Tensor:
    """Returns the weights of all layers, (layers, heads, queries, keys)."""
    layers = getattr(output, name, None)
    if not layers or layers[0] is None:
        kernel = getattr(model.config, "_attn_implementation", None)
        raise ValueError(
            f"{type(model).__name__} shows no attention weights with attn_implementation={kernel!r}; load it with "
            'attn_implementation="eager"'
        )
    weights = torch.stack([layer[0] for layer in layers]).to(device="cpu", dtype=torch.float32)
    if not weights.isfinite().all():
        raise ValueError(f"{name} contains NaN or infinity; compute in float32, or check the training")
    return weights


def _readable(tokenizer: PreTrainedTokenizerBase, ids: list[int], side: int) -> list[str]:
    """Returns the tokens of the source, side 0, or of the target, side 1, as people read them."""
    if hasattr(tokenizer, "readable_pieces"):
        return list(tokenizer.readable_pieces(ids))
    return [token or "" for token in namers(tokenizer)[side](ids)]  # None: an id that only the model has


__all__ = ["attention_of"]
