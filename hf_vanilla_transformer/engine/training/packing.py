"""The forward pass of packed batches: rows of one shape with many sentences, each of which sees itself alone."""

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, causal_mask_function
from transformers.modeling_outputs import Seq2SeqModelOutput
from transformers.utils import logging

from ...errors import first_line
from ...modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration as Model
from .loss import loss_of_chunk

logger = logging.get_logger(__name__)
SDPA_IN_FLOAT32 = "sdpa_in_float32"  # the shortcuts' attention; it takes block masks too
BLOCKS_ON = ("cuda",)  # FlexAttention takes sdpa's place there, and leaves out blocks without a common pair
# What a packed batch is called with: its own tensors, and what is the same for it whatever the value.
ARGUMENTS = {
    "input_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
    "num_items_in_batch",
    "return_dict",
    "use_cache",
}


class CompileOptions(TypedDict, total=False):
    """Options of torch.compile."""

    backend: str
    mode: str | None


class PackedForward:
    """Stands in for the `forward` of encoder and decoder; runs packed batches, and leaves others to the class's own.

    In a packed batch, `encoder_attention_mask`, (R, S), and `decoder_attention_mask`, (R, T), have the number of each
    token's pair in its row, from 1, or 0 for filler. Without a PackedForward, models take no `encoder_attention_mask`.
    `compiled` has options of torch.compile, for the layers and the loss; None: they aren't compiled.
    """

    def __init__(self, model: Model, compiled: CompileOptions | None = None) -> None:
        self.model, self.compiled, self.is_new = model, compiled, True
        self.uses_blocks = not model.config.attention_dropout  # which FlexAttention doesn't have
        self.call, self.loss_of_chunk = _call, loss_of_chunk
        if compiled is not None:
            self.call = torch.compile(_call, dynamic=False, **compiled)
            self.loss_of_chunk = torch.compile(loss_of_chunk, dynamic=False, **compiled)

    def __call__(self, encoder_attention_mask: Tensor | None = None, **batch: Any) -> object:
        """Runs a batch with the arguments of the class's `forward`, or a packed one."""
        if encoder_attention_mask is None:
            return type(self.model.model).forward(self.model.model, **batch)
        if unread := [name for name, value in batch.items() if name not in ARGUMENTS and value is not None]:
            raise TypeError(f"a packed batch has no use for the argument '{unread[0]}'; leave it out")
        targets = batch["decoder_input_ids"], batch["decoder_attention_mask"]
        if self.is_new and self.model.training and torch.is_grad_enabled():
            self.is_new = False
            self._rehearse(batch["input_ids"], encoder_attention_mask, *targets)
        return Seq2SeqModelOutput(last_hidden_state=self._run(batch["input_ids"], encoder_attention_mask, *targets))

    def _run(self, source_ids: Tensor, source: Tensor, target_ids: Tensor, target: Tensor) -> Tensor:
        encoder, decoder = self.model.model.encoder, self.model.model.decoder
        x = encoder.embed(source_ids, None, _steps(source))
        mask = self._mask(x, source, source)
        for layer in encoder.layers:
            x = self.call(layer, x, mask=mask)
        memory = encoder.layer_norm(x)
        x = decoder.embed(target_ids, None, _steps(target))
        mask = self._mask(x, target, target, causal_mask_function)
        # Filler sees what the source ends with, so that no query sees nothing.
        cross = self._mask(x, target.where(target > 0, source[:, -1:]), source)
        for layer in decoder.layers:
            x = self.call(layer, x, memory, mask=mask, cross=cross)
        return decoder.layer_norm(x)

    def _mask(self, x: Tensor, queries: Tensor, keys: Tensor, *others: Callable[..., object]) -> Tensor | BlockMask:
        """Makes the mask by which queries, (R, T), see keys, (R, S), of their own pair, as the kernel takes it."""
        name = self.model.config._attn_implementation
        if name not in ("sdpa", SDPA_IN_FLOAT32, "eager", "flex_attention"):
            raise ValueError(f'{name} has no masks for packed batches; use attn_implementation="sdpa"')
        if name == SDPA_IN_FLOAT32 and x.device.type in BLOCKS_ON and self.uses_blocks:
            name = "flex_attention"

        def is_own(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return queries[row, query] == keys[row, key]

        return ALL_MASK_ATTENTION_FUNCTIONS[name](
            batch_size=len(x),
            q_length=queries.shape[1],
            kv_length=keys.shape[1],
            mask_function=and_masks(*others, is_own),
            allow_is_causal_skip=False,
            dtype=x.dtype,
            device=x.device,
        )

    def _rehearse(self, source_ids: Tensor, source: Tensor, target_ids: Tensor, target: Tensor) -> None:
        """Compiles forward and backward pass, without an effect on gradients and random numbers, or gives it up."""
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        if (target.is_cpu and self.compiled is None) or any(type(one) is not nn.Parameter for one in weights):
            return  # there is nothing to compile, or FSDP, which follows every pass, has sharded the weights
        kwargs = {"encoder_attention_mask": source, "label_smoothing": self.model.config.label_smoothing}
        try:
            with torch.random.fork_rng([target.device] if target.is_cuda else []):
                hidden = self._run(source_ids, source, target_ids, target)
                loss = self.model.loss_of_targets(hidden, torch.where(target > 0, 0, -100), **kwargs)
                torch.autograd.grad(loss, weights, allow_unused=True)
        except Exception as error:  # of dynamo, of a compiler, of a kernel
            reason = getattr(error, "inner_exception", error)
            logger.warning(f"packed batches train uncompiled, as compiling them failed: {first_line(reason)}")
            self.compiled, self.uses_blocks, self.call, self.loss_of_chunk = None, False, _call, loss_of_chunk


def _call(layer: nn.Module, *inputs: Tensor, **masks: object) -> Tensor:
    """Runs a layer: one function for all, so that layers of a kind are compiled once."""
    return layer(*inputs, **masks)


def _steps(numbers: Tensor) -> Tensor:
    """Returns what the paper's `positions_of` adds up to count positions from 0 in each sentence, (R, T)."""
    places = torch.arange(numbers.shape[1], device=numbers.device)
    begins = numbers.diff(dim=-1, prepend=torch.full_like(numbers[:, :1], -1)) != 0
    positions = (places - (places * begins).cummax(dim=-1).values) * (numbers > 0)
    return (positions + 1).diff(dim=-1, prepend=torch.zeros_like(numbers[:, :1]))
