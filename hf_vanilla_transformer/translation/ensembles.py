"""Ensembles: several models that decode as one."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.loading import tokenizer_fingerprint
from ..engine.decoding.module import Module
from ..engine.decoding.prepared import Averaged
from ..engine.decoding.search import Hypothesis
from ..plan_vanilla_transformer import Plan
from .backend import Call
from .engine_backend import EngineBackend
from .reading import Segment

# Fields that the members of an ensemble have in common, beside the tokenizer.
SHARED_FIELDS = ("vocab_size", "decoder_vocab_size", "decoder_start_token_id", "eos_token_id", "pad_token_id")


class EnsembleBackend(EngineBackend):
    """Decodes with several models as one; `ensemble` makes it."""

    def __init__(self, models: Sequence[PreTrainedModel], tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(models[0], tokenizer)
        self.models = list(models)
        self.members = [EngineBackend(one, tokenizer) for one in models]
        self.is_own = all(one.is_own for one in self.members)
        self.positions = min((one.positions for one in self.members if one.positions is not None), default=None)

    def unsupported(self, call: Call) -> str | None:
        """Says what of a call an ensemble lacks, and why, or None."""
        if (reason := next(filter(None, (one.unsupported(call) for one in self.members)), None)) is not None:
            return reason
        reason = Averaged([Module(one) for one in self.models]).unsupported(call.plan)
        return None if reason is None else f"several models decode as one by greedy or beam search alone: {reason}"

    def hypotheses(self, call: Call, segments: list[Segment]) -> list[list[Hypothesis]]:
        """Returns what is found for each of some segments, the best first; an empty one where all is impossible."""
        members = [one.prepared(call.plan) or Module(one.model) for one in self.members]
        return [own or [Hypothesis([])] for own in self.searched(Averaged(members), call.plan, segments)]

    def max_new_tokens(self, plan: Plan, lengths: Sequence[int], prompt_length: int) -> list[int]:
        """Returns how many tokens each sentence gets at most: as many as the shortest table of positions allows."""
        by_member = (one.max_new_tokens(plan, lengths, prompt_length) for one in self.members)
        return [min(longest) for longest in zip(*by_member, strict=True)]


def ensemble(models: Sequence[PreTrainedModel], tokenizers: Sequence[PreTrainedTokenizerBase]) -> EnsembleBackend:
    """Makes one of several models: at each step, its probabilities are the mean of theirs.

    It decodes as the first model does, by that one's generation config, greedily or with beams; `Translator` and
    `score_targets` take it in a model's place. Members are on one device, with the engine attached or not. Their
    sizes may differ; different vocabularies or special tokens, or no member, raise `ValueError`.
    """
    if not models or len(models) != len(tokenizers):
        raise ValueError(f"{len(models)} models and {len(tokenizers)} tokenizers; give each of at least one its own")
    fix = "an ensemble averages the probabilities of one vocabulary, so train its members with one tokenizer"
    vocabulary, fingerprint = tokenizers[0].get_vocab(), tokenizer_fingerprint(tokenizers[0])
    for number, (model, tokenizer) in enumerate(zip(models[1:], tokenizers[1:], strict=True), start=2):
        if tokenizer.get_vocab() != vocabulary or tokenizer_fingerprint(tokenizer) != fingerprint:
            raise ValueError(f"model {number} has another tokenizer than model 1; {fix}")
        for name in SHARED_FIELDS:
            own, wanted = getattr(model.config, name, None), getattr(models[0].config, name, None)
            if own != wanted:
                raise ValueError(f"model {number} has {name}={own} and model 1 {name}={wanted}; {fix}")
    return EnsembleBackend(models, tokenizers[0])
