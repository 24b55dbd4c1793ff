"""Models of transformers as a backend: those of this package by the engine's search, all others by `generate()`."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from inspect import isfunction, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

from ..engine import Engine
from ..engine.decoding.module import Module
from ..engine.decoding.prepared import Prepared
from ..engine.decoding.search import Hypothesis
from ..engine.support import HEAD
from ..generation_vanilla_transformer import DecodingMixin
from ..integration_vanilla_transformer import CACHE
from ..plan_vanilla_transformer import Plan
from .backend import Backend, Batch, Call, Found, batches_of, tasks_in
from .reading import Segment

# Padded source tokens per batch, times the number of beams: on two cores, more give no speed-up, and caches and logits
# grow with it.
BATCH_TOKENS = 4_096
BATCH_TOKENS_ON_GPU = 16_384  # not measured; as with CTranslate2
# What decodes in `generate()`; a subclass, an instance may have its own.
GENERATING = [
    name for kind in (GenerationMixin, DecodingMixin) for name, value in vars(kind).items() if isfunction(value)
]
# Arguments of generate() that belong to a batch, which a caller doesn't know.
INPUTS = {
    *("inputs", "input_ids", "attention_mask", "encoder_outputs", "inputs_embeds"),
    *("decoder_input_ids", "decoder_attention_mask"),
}
# What transformers has for all models; generate() takes the last three from its `**kwargs`.
NAMES = {
    *INPUTS,
    *vars(GenerationConfig()),
    *signature(GenerationMixin.generate).parameters,
    *("tokenizer", "assistant_tokenizer", "trust_remote_code"),
}


class EngineBackend(Backend):
    """Decodes with a model of transformers, in evaluation mode.

    A model of this package is searched by the engine, where it is attached, and else by the model's own modules, which
    may have adapters, hooks, or weights in a few bits. What neither has (sampling, say), and all other architectures,
    is `generate()`.
    """

    name = "engine"

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.models = [model]  # of an ensemble, several
        has_end = getattr(model.config, "position_encoding", "learned") == "learned"
        self.positions = getattr(model.config, "max_position_embeddings", None) if has_end else None
        self.tasks = tasks_in(model.config)
        # The model below a `PeftModel`; it holds the adapters' layers.
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.is_own = isinstance(self.base, DecodingMixin)

    @property
    def own(self) -> PreTrainedModel | None:
        """The model whose modules decode, if nothing stands before the package's `generate()` now; or None."""
        return self.base if self.is_own and _decodes_plainly(self.model, self.base) else None

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's generation config, which may be replaced."""
        return self.model.generation_config

    @property
    def device(self) -> torch.device:
        """Where the model is now."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights."""
        return self.model.dtype

    @property
    def training(self) -> bool:  # type: ignore[override]
        """Whether one of the models is in training mode."""
        return any(one.training for one in self.models)

    # ---- Options ----
    @property
    def option_names(self) -> set[str]:
        """Names that options of `generate()` may have; it says itself which of them it lacks."""
        return super().option_names.union(NAMES, signature(self.base.generate).parameters)

    def unsupported(self, call: Call) -> str | None:
        """Says what of a call the model lacks, and why, or None; what is left is for `generate()` to tell."""
        if given := sorted(INPUTS & call.options.keys()):
            return f"{given[0]} comes from the sentences here; leave it out, or give a prefix"
        kinds = [str(one.peft_type).rpartition(".")[2] for one in _adapters(self.model)]
        if CACHE == "cache" and {"PREFIX_TUNING", "CARTRIDGE"}.intersection(kinds):
            return "it has a prefix that PEFT has trained, which generate() loses from transformers 5.24 on; use 5.23"
        if not call.plan.needs_attention:
            return None
        if (own := self.own) is not None:
            return Module(own).unsupported(call.plan)
        what = "alignments need" if call.plan.alignments else "coverage_penalty needs"
        return f"{what} a model of this package, and this one is a {type(self.model).__name__}"

    # ---- Searching ----
    def prepared(self, plan: Plan) -> Prepared | None:
        """Returns what searches as a plan says, the engine first; None: `generate()` does."""
        if (own := self.own) is None:
            return None
        reason, attached = None, vars(self.model).get("engine")  # not that of a model with adapters below
        if isinstance(attached, Engine):
            prepared, reason = attached.ready(self.model, plan)
            if prepared is not None:
                attached.calls += 1
                return prepared
        module = Module(own)
        if module.unsupported(plan) is not None:
            return None
        if isinstance(attached, Engine):
            attached.step_aside(str(reason))
        return module

    def search(self, call: Call, segments: list[Segment]) -> Iterator[Batch]:
        """Searches for translations of segments, the longest first."""
        batch_tokens = BATCH_TOKENS_ON_GPU if self.device.type == "cuda" else BATCH_TOKENS
        most = (call.batch_tokens or batch_tokens) // call.plan.num_beams
        for places in batches_of(segments, call.batch_size, most):
            batch = [segments[place] for place in places]
            with no_gradients(self.models):  # not while the caller works
                rows = self.hypotheses(call, batch)
            yield places, [[_found(segment, one) for one in row] for segment, row in zip(batch, rows, strict=True)]

    def hypotheses(self, call: Call, segments: list[Segment]) -> list[list[Hypothesis]]:
        """Returns what is found for each of some segments with prefixes of one length, the best first."""
        if (prepared := self.prepared(call.plan)) is not None:
            rows = self.searched(prepared, call.plan, segments)
            if all(rows):  # otherwise all is impossible for one of them
                return rows
        return self._generated(call, segments)

    def searched(self, prepared: Prepared, plan: Plan, segments: list[Segment]) -> list[list[Hypothesis]]:
        """Returns what the package's search finds for segments with prefixes of one length."""
        rows = [torch.tensor(one.token_ids) for one in segments]
        lengths = [len(row) for row in rows]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=plan.padding or 0)
        mask = None
        if len(set(lengths)) > 1:
            mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long().to(prepared.device)
        prompts = torch.tensor([one.prefix or (plan.start,) for one in segments], device=prepared.device)
        longest = self.max_new_tokens(plan, lengths, prompts.shape[1])
        return prepared.search(plan, prepared.encode(ids.to(prepared.device), mask), mask, prompts, longest)

    def max_new_tokens(self, plan: Plan, lengths: Sequence[int], prompt_length: int) -> list[int]:
        """Returns how many tokens each sentence gets at most, by the tokens of its source and of its prompt."""
        if self.is_own:
            return self.base.max_new_tokens(plan, lengths, prompt_length)
        return [plan.max_new_tokens(length, prompt_length) for length in lengths]

    def _generated(self, call: Call, segments: list[Segment]) -> list[list[Hypothesis]]:
        """Returns what `generate()` finds for segments with prefixes of one length."""
        inputs = self.tokenizer.pad({"input_ids": [one.token_ids for one in segments]}, return_tensors="pt")
        inputs = inputs.to(self.model.device)
        batch = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        if segments[0].prefix:
            batch["decoder_input_ids"] = torch.tensor([one.prefix for one in segments], device=self.model.device)
        output = self.model.generate(**batch, **self._arguments(call))
        rows = output.sequences[:, max(len(segments[0].prefix), 1) :].tolist()
        if output.get("beam_indices") is None:
            counts = [_num_tokens(row, call.plan) for row in rows]
        else:
            counts = (output.beam_indices >= 0).sum(dim=1).tolist()
        scores = output.sequences_scores.tolist() if "sequences_scores" in output else [None] * len(rows)
        found = [Hypothesis(row[:count], score) for row, count, score in zip(rows, counts, scores, strict=True)]
        width = len(found) // len(segments)
        return [found[start : start + width] for start in range(0, len(found), width)]

    def _arguments(self, call: Call) -> dict[str, object]:
        plan, known = call.plan, call.plan.settings()  # for some options that are None, transformers has no meaning
        options = {name: known.get(name) if value is None else value for name, value in call.options.items()}
        options["return_dict_in_generate"] = True  # for the beams' lengths
        if not self.is_own:
            options |= dict([plan.limit])
        if call.spelling.barred:
            options["suppress_tokens"] = list(plan.barred)
        if options.get("max_new_tokens") is not None:
            options.setdefault("max_length", None)  # transformers would warn of a generation config's at each batch
        if call.n_best is not None:
            # transformers' beam search gives scores of sequences only with those of every step.
            options |= {"num_beams": plan.num_beams, "num_return_sequences": plan.num_hypotheses, "output_scores": True}
        return options

    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[float]:
        """Returns how probable each target is, in nats; the tokens of sources and targets end with `</s>`.

        Modules compute it, or the engine where its weights are in 8 bits: it translates with those.
        """
        padded = self.tokenizer.pad({"input_ids": sources}, return_tensors="pt").to(self.device)
        inputs = {name: padded[name] for name in ("input_ids", "attention_mask")}
        rows = [torch.tensor(ids) for ids in targets]
        labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100).to(self.device)  # (B, T)
        by_model = []
        with no_gradients(self.models):
            for model in self.models:
                shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
                target = {"labels": labels} if shift is None else {"decoder_input_ids": shift(labels)}
                logits: Tensor  # (B, T, V)
                if (rounded := _rounded(model)) is not None:
                    mask = inputs["attention_mask"]
                    decoder = rounded.decoder(rounded.encode(inputs["input_ids"], mask), mask, Plan())
                    logits = torch.stack(
                        [decoder.step(ids) for ids in target["decoder_input_ids"].unbind(dim=1)], dim=1
                    )
                else:
                    logits = model(**inputs, **target, use_cache=False).logits.float()
                losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
                by_model.append(-losses.double().view(labels.shape))
        mean = torch.stack(by_model).logsumexp(dim=0) - math.log(len(self.models))
        return mean.masked_fill(labels == -100, 0.0).sum(dim=1).tolist()


def _rounded(model: PreTrainedModel) -> Prepared | None:
    """Returns the engine that decodes for a model, if its weights are rounded to 8 bits."""
    attached = vars(model).get("engine")
    prepared = attached.ready(model)[0] if isinstance(attached, Engine) else None
    return None if prepared is None or prepared.is_exact else prepared


def _decodes_plainly(model: PreTrainedModel, base: PreTrainedModel) -> bool:
    """Tells whether `generate()` is the package's in all of its parts, and nothing stands before the modules."""
    own = vars(base)
    for name in GENERATING:
        is_changed = name in own and not str(getattr(own[name], "__module__", "")).startswith("peft.")
        if is_changed or getattr(type(base), name) is not getattr(HEAD, name):
            return False
    if model is not base and ("generate" in vars(model) or not type(model).__module__.startswith("peft.")):
        return False
    return not any(getattr(one, "is_prompt_learning", False) for one in _adapters(model))


def _adapters(model: PreTrainedModel) -> Iterable[Any]:
    return (getattr(model, "peft_config", None) or {}).values()


def _found(segment: Segment, one: Hypothesis) -> Found:
    if one.attention is None:
        return Found(one.tokens, one.score)
    return Found(one.tokens, one.score, one.attention[:, : len(segment.token_ids)].clone())  # a view holds the batch's


def _num_tokens(row: list[int], plan: Plan) -> int:
    """Counts the tokens that the model generated in a row, without the padding after them."""
    if (end := next((place for place, token in enumerate(row, start=1) if token in plan.ends), None)) is not None:
        return end
    return max((place for place, token in enumerate(row, start=1) if token != plan.padding), default=0)


def no_gradients(models: Sequence[PreTrainedModel]) -> AbstractContextManager[None]:
    """Turns gradients off. Quantized weights may be of tensor classes that inference mode refuses (quanto)."""
    is_quantized = any(getattr(one, "is_quantized", False) for one in models)
    return torch.no_grad() if is_quantized else torch.inference_mode()
