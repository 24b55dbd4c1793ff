"""The model's own modules with transformers' cache: whatever was put into them, on any device."""

from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ...integration_vanilla_transformer import CACHE
from ...plan_vanilla_transformer import Plan
from .prepared import Prepared
from .search import Decoder


class Module(Prepared):
    """A model that computes with its own modules: adapters, hooks, quantized weights and all kernels of attention.

    It is an encoder-decoder of transformers in evaluation mode; attention is shown by this package's alone.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        self.vocab_size = getattr(model.config, "target_vocab_size", model.config.vocab_size)

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Encodes a source."""
        return self.model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    def decoder(self, memory: Tensor, attention_mask: Tensor | None, plan: Plan) -> "ModuleDecoder":
        """Begins to decode a batch."""
        return ModuleDecoder(self.model, memory, attention_mask, plan.needs_attention)


class ModuleDecoder(Decoder):
    """A batch's decoder: the cache holds keys and values of each row. Arguments are those of `PackedDecoder`."""

    def __init__(
        self, model: PreTrainedModel, memory: Tensor, memory_mask: Tensor | None, keeps_attention: bool = False
    ) -> None:
        self.model, self.memory, self.keeps_attention, self.keeps_places = model, memory, keeps_attention, False
        self.memory_mask = memory_mask
        self.attention: Tensor | None = None
        self.cache: EncoderDecoderCache | None = None

    def step(self, tokens: Tensor) -> Tensor:
        """Advances by one position, with the token of each row, (rows,); returns logits of the next, (rows, V)."""
        output = self.model(
            encoder_outputs=BaseModelOutput(self.memory),
            attention_mask=self.memory_mask,
            decoder_input_ids=tokens[:, None],
            use_cache=True,
            **{CACHE: self.cache},
            **({"output_attentions": True} if self.keeps_attention else {}),
        )
        self.cache = getattr(output, CACHE)
        if self.keeps_attention:
            self.attention = output.cross_attentions[-1][:, :, -1].mean(dim=1).float()
        return output.logits[:, -1]

    def move(self, rows: Tensor, sentences: Tensor) -> None:
        """Gives each row the past of a former row, and each sentence the source of a former one."""
        assert self.cache is not None, "a step comes first"
        self.cache.reorder_cache(rows)
        self.memory = self.memory[rows]
        if self.memory_mask is not None:
            self.memory_mask = self.memory_mask[rows]
