"""Functions of tensors that the model calls; they hold no parameters."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def positions_of(attention_mask: Tensor | None, past_length: int | Tensor, x: Tensor) -> Tensor:
    """Numbers the positions of a batch from 0; padding counts for nothing, on whichever side it stands.

    Args:
        attention_mask: Which positions, those of the past included, are no padding: (B, past + T); or a causal mask,
            (B, 1, T, S), whose row for a position sees that position and all before it. None: no padding.
        past_length: Number of positions before these.
        x: The batch, (B, T, d_model).

    Returns:
        Positions, (1 or B, T); those of padding are arbitrary.
    """
    length = x.shape[1]
    if attention_mask is None:
        return (torch.arange(length, device=x.device) + past_length)[None]
    if attention_mask.ndim == 4:
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        return (visible[:, 0].sum(dim=-1) - 1).clamp(min=0)
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -length:]


def shift_right(labels: Tensor, start_token_id: int | None, pad_token_id: int | None) -> Tensor:
    """Makes the decoder's input of its labels: each row's first label is preceded by the start token (3.1).

    Args:
        labels: Target tokens, (B, T), padded with -100 on either side.
        start_token_id: Token that starts a target.
        pad_token_id: Token in place of -100.

    Returns:
        Token ids, (B, T).

    Raises:
        ValueError: One of the two tokens is None.
    """
    if start_token_id is None or pad_token_id is None:
        raise ValueError("Shifting labels right needs `decoder_start_token_id` and `pad_token_id` in the config.")
    real = labels != -100
    first = real & (real.cumsum(dim=-1) == 1)
    first[:, 0] |= ~real.any(dim=-1)  # a row without labels starts too
    shifted = F.pad(labels, (1, -1), value=-100)
    return shifted.masked_fill(shifted == -100, pad_token_id).masked_fill(first, start_token_id)


def label_smoothed_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    label_smoothing: float = 0.0,
    **kwargs: Any,
) -> Tensor:
    """Cross-entropy with eps_ls spread over the whole vocabulary (section 5.4), a mean over target tokens.

    Args:
        logits: (B, T, V).
        labels: (B, T), -100 where there is no target.
        num_items_in_batch: Targets of the whole batch, of which this may be a part (gradient accumulation, several
            processes); None: those of `labels`.
        label_smoothing: eps_ls.
        **kwargs: Ignored; transformers hands more to a loss function.

    Returns:
        The loss, in float32 at least; 0 where there is no target.

    Raises:
        IndexError: A label is outside of the vocabulary (on a CPU).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    labels = labels.to(logits.device).flatten()
    try:
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum", label_smoothing=label_smoothing)
    except IndexError as error:
        raise _outside_vocabulary(labels[labels != -100], logits.shape[-1]) from error
    if num_items_in_batch is None:
        num_items_in_batch = (labels != -100).sum()
    return loss / torch.as_tensor(num_items_in_batch, device=loss.device).clamp(min=1)


def look_up(embedding: nn.Embedding, token_ids: Any, embeddings: Tensor | None) -> Tensor:
    """Looks token ids up, unless their embeddings are given.

    Args:
        embedding: The table, (V, d_model).
        token_ids: Tensor (B, T), or None.
        embeddings: (B, T, d_model), or None.

    Returns:
        Embeddings, (B, T, d_model).

    Raises:
        ValueError: Both are given or neither.
        IndexError: An id is outside of the vocabulary (on a CPU).
    """
    if (token_ids is None) == (embeddings is None):
        raise ValueError(
            "Encoder and decoder each need exactly one of token ids and embeddings. The decoder's ids are "
            "`decoder_input_ids` (the target shifted right), made of `labels` where they are given; with the Trainer's "
            "`label_smoothing_factor`, use `DataCollatorForSeq2Seq(tokenizer, model=model)`."
        )
    if embeddings is not None:
        return embeddings
    try:
        return embedding(token_ids)
    except IndexError as error:
        raise _outside_vocabulary(token_ids, embedding.num_embeddings) from error


def _outside_vocabulary(token_ids: Tensor, vocab_size: int) -> IndexError:
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    return IndexError(
        f"Token id {outside[0].item()} is outside of the vocabulary of {vocab_size} tokens, 0 to {vocab_size - 1}. "
        "Do tokenizer and model belong together? Compare `len(tokenizer)` with `config.vocab_size` (and "
        "`config.decoder_vocab_size`), or call `model.resize_token_embeddings(len(tokenizer))` after adding tokens."
    )


def attention_kernel(
    module: Any, mask: Any, is_cross: bool, output_attentions: bool | None = False, **kwargs: Any
) -> tuple[str, Any]:
    """Names the implementation of eq. 1 to take: the configuration's, where it can do what is asked for.

    Args:
        module: The attention, with its configuration, `head_dim` and `value_head_dim`.
        mask: As transformers makes it for the configuration's implementation.
        is_cross: Whether the keys are another sequence's than the queries.
        output_attentions: Whether weights are asked for.
        **kwargs: Ignored.

    Returns:
        Its name, and the mask in its form.

    Raises:
        ValueError: Flash attention can't have values wider than keys.
    """
    name = module.config._attn_implementation or "eager"
    if name == "sdpa" and output_attentions:
        return "eager", mask  # sdpa has no weights to show, and its masks are understood
    if "flash" in name and module.value_head_dim > module.head_dim:
        raise ValueError(f'{name} needs d_v <= d_k (`value_head_dim`, `head_dim`); use attn_implementation="sdpa".')
    if "flash" in name and is_cross and mask is not None:
        return "sdpa", mask[:, None, None, :].bool()  # there, transformers would unpad queries by the keys' mask
    return name, mask


__all__ = ["attention_kernel", "label_smoothed_cross_entropy", "look_up", "positions_of", "shift_right"]
