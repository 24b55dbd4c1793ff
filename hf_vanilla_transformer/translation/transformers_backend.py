"""Models of transformers as a backend, with the engine where it is attached; ensembles and models with adapters too."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from ..checkpoints.loading import as_list
from ..engine import Engine
from ..generation_vanilla_transformer import DecodingMixin
from .backend import (
    NO_HYPOTHESIS,
    Alignment,
    Backend,
    Found,
    Job,
    Options,
    Translation,
    batches_of,
    check_generation,
    check_n_best,
    on_one_line,
)
from .reading import Namer, Segment, namers

# Padded source tokens per batch, times the number of beams: on two cores, more give no speed-up, and caches and logits
# grow with it on any device.
BATCH_TOKENS = 4_096
# Arguments of generate() that belong to a batch, which a caller doesn't know.
INPUTS = {
    *("inputs", "input_ids", "attention_mask", "encoder_outputs", "inputs_embeds"),
    *("decoder_input_ids", "decoder_attention_mask"),
}


class TransformersBackend(Backend):
    """Decodes by `generate()`, with the engine where it is attached."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.training = False

    def check_options(self, options: Options, n_best: int | None, alignments: bool) -> Options:
        """Checks the options of a call of `decode` and returns those for `generate()`; raises `ValueError`."""
        config = options.get("generation_config") or self.model.generation_config
        check_generation(options, config)
        if given := sorted(INPUTS & options.keys()):
            raise ValueError(f"{given[0]} comes from the sentences here; leave it out, or give a prefix")
        options = {**options, "return_dict_in_generate": True}  # for the beams' lengths
        if options.get("max_new_tokens") is not None:
            options.setdefault("max_length", None)  # transformers would warn of a generation config's at each batch
        if n_best is not None:
            check_n_best(n_best, setting(self.model, options, "num_beams") or 1)
            options["num_return_sequences"] = setting(self.model, options, "num_beams")  # some may be one text
        if alignments:
            # The model below a `PeftModel`; it holds the adapters' layers.
            base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            if not isinstance(base, DecodingMixin):
                kind = type(self.model).__name__
                raise ValueError(f"alignments need a model of this package, and this one is a {kind}")
            options["output_alignments"] = True
        return options

    def search(self, job: Job) -> Iterator[Found]:
        """Translates the segments of a job, the longest first."""
        segments = job.segments
        num_beams = setting(self.model, job.options, "num_beams") or 1
        names = namers(self.tokenizer) if job.options.get("output_alignments") else None
        for numbers in batches_of(segments, job.batch_size, (job.batch_tokens or BATCH_TOKENS) // num_beams):
            batch = [segments[number] for number in numbers]
            with no_gradients(self.model):  # not while the caller works
                output = self._output(batch, job.options)
            yield numbers, self._translations(batch, job.options, output, names)

    def _output(self, segments: list[Segment], options: Options) -> ModelOutput:
        """Returns the output of `generate()` for segments with prefixes of one length."""
        inputs = self.tokenizer.pad({"input_ids": [one.token_ids for one in segments]}, return_tensors="pt")
        inputs = inputs.to(self.model.device)
        batch = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        if segments[0].prefix:
            batch["decoder_input_ids"] = torch.tensor([one.prefix for one in segments], device=self.model.device)
        # transformers' beam search gives scores of sequences only with those of every step.
        scores = {"output_scores": True} if options.get("num_return_sequences") else {}
        attached = vars(self.model).get("engine")  # not that of a model with adapters below
        if isinstance(attached, Engine) and "generate" not in vars(self.model):  # the user's own
            return attached.generate(self.model, {**batch, **options}, scores)
        return self.model.generate(**batch, **options, **scores)

    def _translations(
        self, segments: list[Segment], options: Options, output: ModelOutput, names: tuple[Namer, Namer] | None
    ) -> list[list[Translation]]:
        """Makes translations of what `generate()` returned; with `names` of tokens, with their alignments."""
        begin = max(len(segments[0].prefix), 1)
        counts = self._numbers_of_tokens(output, options, begin)
        # Behind its end, a row is filled up to the longest one's length.
        tokens = [row[: begin + count] for row, count in zip(output.sequences.tolist(), counts, strict=True)]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        scores = output.sequences_scores.tolist() if "sequences_scores" in output else [None] * len(texts)
        width = len(texts) // len(segments)
        rows: list[list[Translation]] = [[] for _ in segments]
        for number, (text, score, count) in enumerate(zip(texts, scores, counts, strict=True)):
            # A beam search with fewer hypotheses than places fills the list up.
            if number % width == 0 or (score is not None and score > NO_HYPOTHESIS):
                source = segments[number // width].token_ids
                alignment = None if names is None else _alignment(names, output, number, source, count)
                rows[number // width].append(Translation(on_one_line(text), count, score, alignment))
        return rows

    def _numbers_of_tokens(self, output: ModelOutput, options: Options, begin: int) -> list[int]:
        """Counts what the model wrote in each row from a place on."""
        if output.get("beam_indices") is not None:
            return (output.beam_indices >= 0).sum(dim=1).tolist()
        ends, padding = (setting(self.model, options, name) for name in ("eos_token_id", "pad_token_id"))
        rows = output.sequences[:, begin:]
        is_end = torch.isin(rows, rows.new_tensor(as_list(ends)))
        is_open = is_end.cumsum(dim=1) - is_end.long() == 0  # up to the first end
        is_filler = rows == (-1 if padding is None else padding)
        is_text = (~is_filler).flip(1).cumsum(dim=1).flip(1) > 0  # a limit's cut has padding behind it
        return (is_open & (is_text | is_end)).sum(dim=1).tolist()

    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[float]:
        """Returns how probable each target is, in nats; the tokens of sources and targets end with `</s>`."""
        model = self.model
        inputs = self.tokenizer.pad({"input_ids": sources}, return_tensors="pt").to(model.device)
        rows = [torch.tensor(ids) for ids in targets]
        labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100).to(model.device)  # (B, T)
        with no_gradients(model):
            logits = model(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels),
                use_cache=False,
            ).logits.float()  # (B, T, V)
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        return (-losses.double().view(labels.shape).sum(dim=1)).tolist()


def setting(model: PreTrainedModel, options: Options, name: str) -> Any:
    """Returns the value of an option of `generate()` in a call; older models have theirs in their configuration."""
    places = (options.get("generation_config"), model.generation_config, model.config)
    values = [options.get(name), *(getattr(place, name, None) for place in places)]
    return next((value for value in values if value is not None), None)


def no_gradients(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Turns gradients off. Quantized weights may be of tensor classes that inference mode refuses (quanto)."""
    return torch.no_grad() if getattr(model, "is_quantized", False) else torch.inference_mode()


def _alignment(names: tuple[Namer, Namer], output: ModelOutput, row: int, source: list[int], count: int) -> Alignment:
    """Cuts the alignments of a row, of (rows, T, S), to its tokens, and names these."""
    begin = output.sequences.shape[1] - output.alignments.shape[1]
    target = output.sequences[row, begin : begin + count].tolist()
    weights = output.alignments[row, :count, : len(source)].clone()  # a view would hold the batch's memory
    return Alignment(tuple(names[0](source)), tuple(names[1](target)), weights, tuple(source), tuple(target))
