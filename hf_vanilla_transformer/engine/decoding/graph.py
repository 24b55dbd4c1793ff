"""Decoding on a GPU: a step of the search, from tokens to tokens, is captured once as a CUDA graph and replayed.

A step is some 200 kernels, and PyTorch takes longer to start most of them than they run. Here embedding, layers, scores
and the choice of the next tokens read and write tensors of fixed shapes that stay in place, so that one call starts all
of them. Shapes are rounded up to buckets, and a graph is captured when it is first needed. Python waits for the device
every `STEPS_UNSEEN` steps, to see whether all sentences have ended. Without CUDA, the same step runs uncaptured.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...plan_vanilla_transformer import Plan
from . import search
from .packed import Packed
from .scores import barred, least, other_words
from .search import NONE, Beams, Hypothesis
from .weights import Weights, through_layers

# Sentences of a bucket: up to 16, a step takes as long as its kernels take to start; beyond, as long as it has rows.
SENTENCES = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
SHORTEST, LONGEST = 32, 2048  # positions of a bucket's target and source, doubled from the one to the other
MOST_ENDS = 9  # for more, `torch.isin` sorts and waits for the device
WARM_UP_STEPS = 2  # before a capture: libraries are loaded and choose their kernels
BUDGET_WITHOUT_CUDA = 2**30
CHANGED = ("scores", "active", "finished_scores", "finished_codes", "finished_steps")  # of `Beams`, by a step


class Bucket(NamedTuple):
    """What a captured step depends on: shapes, and what of a plan isn't a number in a tensor."""

    sentences: int  # B
    positions: int  # T, of the target
    source: int  # S
    num_beams: int  # K
    num_ends: int
    early_stopping: bool | str
    rewards_length: bool  # whether "never" has to look at longer hypotheses
    has_bars: bool  # whether tokens are barred
    renormalize: bool
    forces_end: bool


class Graph(Packed):
    """A model whose steps of decoding are captured. Calls take turns.

    All buckets may take a `budget` of bytes, a quarter of the GPU's memory; the ones unused for longest are freed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.budget = BUDGET_WITHOUT_CUDA
        self._steps: OrderedDict[Bucket, Steps] = OrderedDict()  # those that were used last come last
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self.budget = torch.cuda.get_device_properties(self.device).total_memory // 4
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def captures(self, plan: Plan) -> bool:
        """Tells whether captured steps have all settings of a plan; else its steps are uncaptured."""
        return not (
            plan.needs_attention
            or plan.no_repeat_ngram_size
            or plan.repetition_penalty != 1
            or plan.forced_begin is not None
            or any(token >= self.vocab_size for token in plan.forced_end)
            or other_words(plan, self.vocab_size)
            or len(plan.ends) > MOST_ENDS
        )

    def search(
        self, plan: Plan, memory: Tensor, attention_mask: Tensor | None, prompts: Tensor, max_new_tokens: Sequence[int]
    ) -> list[list[Hypothesis]]:
        """Searches for the translations of a batch, part by part where no bucket holds it, or with uncaptured steps."""
        count, lengths, found = len(prompts), (max(max_new_tokens), memory.shape[1]), list[list[Hypothesis]]()
        bucket = self._bucket(plan, count, *lengths)
        if bucket is None or prompts.shape[1] > 1:
            return super().search(plan, memory, attention_mask, prompts, max_new_tokens)
        # Calls take turns, outside inference mode: tensors made in it couldn't be written outside it later.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            while bucket is not None and len(found) < count:
                part = slice(len(found), len(found) + bucket.sentences)
                mask = None if attention_mask is None else attention_mask[part]
                found += self._steps_of(bucket, plan).search(
                    plan, memory[part], mask, prompts[part], max_new_tokens[part]
                )
                bucket = self._bucket(plan, count - len(found), *lengths)
        return found

    def _bucket(self, plan: Plan, sentences: int, positions: int, source: int) -> Bucket | None:
        """Returns the smallest bucket that holds a call, or the largest one for a part of it; None: there is none."""
        most = getattr(self.weights.decoder.positions, "num_embeddings", LONGEST)  # learned ones are limited
        if positions > min(most, LONGEST) or source > LONGEST or not self.captures(plan):
            return None
        shape = (min(rounded_up(positions), most), rounded_up(source), plan.num_beams, len(plan.ends))
        stopping = plan.early_stopping if plan.num_beams > 1 else False
        rewards = stopping == "never" and plan.length_penalty > 0
        bars = any(barred(plan, self.vocab_size, prompt_length=1))
        facts = (rewards, bars, bars and plan.renormalize, bool(plan.forced_end))
        buckets = (Bucket(size, *shape, stopping, *facts) for size in SENTENCES)
        fitting = [one for one in buckets if self._bytes(one) <= self.budget]
        return next((one for one in fitting if one.sentences >= sentences), fitting[-1] if fitting else None)

    def _bytes(self, bucket: Bucket) -> int:
        """Estimates what a bucket takes: caches, and logits with their log-probabilities in float32."""
        stack, rows = self.weights.decoder, bucket.sentences * bucket.num_beams
        size, positions = stack.dtype.itemsize, rows * bucket.positions + bucket.sentences * bucket.source
        caches = len(stack.layers) * sum(stack.qkv_sizes[1:]) * positions * size
        return caches + rows * self.vocab_size * (size + 8)

    def _steps_of(self, bucket: Bucket, plan: Plan) -> "Steps":
        if bucket not in self._steps:
            rest = self.budget - self._bytes(bucket)
            while self._steps and sum(map(self._bytes, self._steps)) > rest:
                self._steps.popitem(last=False)
            self._steps[bucket] = Steps(self.weights, bucket, plan, self._stream)
        self._steps.move_to_end(bucket)
        return self._steps[bucket]


class Steps:
    """The tensors of a bucket, and the steps that read and write them; without a `stream`, steps aren't captured.

    Caches never move. Keys of all beams of a sentence lie side by side, each beam is a query to all of them, and a mask
    leaves it its own past: a step reads each cache once. To copy caches as beams move would be to read and write them
    twice more at each step; to gather each beam's past for attention, once more.
    """

    def __init__(self, weights: Weights, bucket: Bucket, plan: Plan, stream: torch.cuda.Stream | None) -> None:
        self.weights, self.bucket, self.plan, self.stream = weights, bucket, plan, stream
        stack, device = weights.decoder, weights.device
        sentences, positions, source, beams = bucket[:4]
        layers, width = len(stack.layers), sum(stack.qkv_sizes[1:])
        values = partial(torch.zeros, dtype=stack.dtype, device=device)
        numbers = partial(torch.zeros, dtype=torch.long, device=device)
        self.past = values(layers, sentences, positions, beams, width)  # keys and values of what each beam read
        self.memory = values(layers, sentences, source, width)  # and of the source
        self.source_mask = values(sentences, 1, 1, source)  # added to scores
        self.position_table = stack.positions(torch.arange(positions, device=device), positions).to(stack.dtype)
        self.tokens, self.position = numbers(sentences * beams), numbers(1)
        start = Beams.start(plan, torch.ones(sentences, dtype=torch.long), beams)
        self.beams = Beams(*(one.to(device) for one in start))
        self.places = torch.arange(beams, dtype=torch.int16, device=device)
        # The place in which each beam's past was at each position; -1: it is still to come.
        self.lineage = torch.zeros(sentences, beams, positions, dtype=torch.int16, device=device)
        self.codes = numbers(positions, sentences, beams)  # of all steps; of a greedy search, tokens
        self.ends, self.divisors = numbers(bucket.num_ends), torch.ones(positions, device=device)
        # What is added to logits, (3, V): in the first step, before the least length, and from there on.
        self.bars, self.phases = values(3, weights.vocab_size if bucket.has_bars else 0), numbers(positions)
        # The same, before the last step and in it, where an end is forced.
        self.forcing, self.last = values(2, weights.vocab_size if bucket.forces_end else 0), numbers(1)
        self.pool = None if stream is None else torch.cuda.graph_pool_handle()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by the number of positions that they see

    # ---- A search ----
    def search(
        self, plan: Plan, memory: Tensor, attention_mask: Tensor | None, prompts: Tensor, max_new_tokens: Sequence[int]
    ) -> list[list[Hypothesis]]:
        """Searches for the translations of at most B sentences; arguments as those of `Prepared.search`."""
        self._start(plan, max_new_tokens)
        self._show(memory, attention_mask)
        self.tokens.view(-1, plan.num_beams)[: len(prompts)] = prompts
        length = 0
        while length < max(max_new_tokens):
            length += 1
            self._run(min(rounded_up(length), self.bucket.positions))  # a short hypothesis reads no long cache
            if length % search.STEPS_UNSEEN == 0 and not self.beams.active.any():
                break
        codes = self.codes[:length, : len(prompts)]
        if plan.num_beams > 1:
            return search.trace(self.beams, codes, plan.num_hypotheses, self.weights.vocab_size)
        return search.cut(codes[..., 0], plan, max_new_tokens)

    def _start(self, plan: Plan, max_new_tokens: Sequence[int]) -> None:
        """Begins with one beam for each sentence; those that fill the bucket up have ended."""
        limits = torch.ones(self.bucket.sentences, dtype=torch.long)
        limits[: len(max_new_tokens)] = torch.tensor(max_new_tokens)
        beams = Beams.start(plan, limits, plan.num_beams)
        beams.active[len(max_new_tokens) :] = False
        for name in (*CHANGED, "limits", "bounds"):
            getattr(self.beams, name).copy_(getattr(beams, name))
        self.beams.ranks.copy_(self.places)  # here beams are in the order of their ranks
        divisors = [length**plan.length_penalty for length in range(1, max(max_new_tokens) + 1)]
        self.divisors[: len(divisors)] = torch.tensor(divisors)
        self.ends.copy_(torch.tensor(plan.ends, dtype=torch.long))
        last, below = max(max_new_tokens) - 1, least(plan, prompt_length=1)
        if self.bucket.forces_end:
            self.last.fill_(last)
            self.forcing[1].fill_(NONE)[plan.forced_end[0]] = 0.0
            below = min(below, last)
        if self.bucket.has_bars:
            bars = torch.zeros(self.bars.shape)
            groups = barred(plan, self.weights.vocab_size, prompt_length=1)
            for phases, tokens in zip((3, 1, 2 if below else 0), groups, strict=True):
                bars[:phases].index_fill_(1, torch.tensor(tokens, dtype=torch.long), NONE)
            self.bars.copy_(bars)
            self.phases.fill_(2)[:below] = 1
            self.phases[0] = 0
        for one in (self.position, self.tokens, self.past):
            one.zero_()
        self.lineage.fill_(-1)

    def _show(self, memory: Tensor, attention_mask: Tensor | None) -> None:
        """Projects the encoder's output, (n, s, d_model), to keys and values of all layers."""
        (count, length, _), (layers, *_, width) = memory.shape, self.memory.shape
        fused = self.weights.memory(memory.to(self.memory.dtype).flatten(0, 1))
        self.memory.zero_()[:, :count, :length] = fused.view(count, length, layers, width).permute(2, 0, 1, 3)
        mask, lowest = self.source_mask.zero_()[:count, 0, 0], torch.finfo(self.source_mask.dtype).min
        mask[:, length:] = lowest
        if attention_mask is not None:
            mask[:, :length].masked_fill_(attention_mask == 0, lowest)

    def _run(self, seen: int) -> None:
        if self.stream is None:
            self._step(seen)
            return
        if seen not in self.graphs:
            changed = [*(getattr(self.beams, name) for name in CHANGED), self.tokens, self.position, self.lineage]
            self.graphs[seen] = capture(partial(self._step, seen), changed, self.stream, self.pool)
        self.graphs[seen].replay()

    # ---- A step: here are kernels only; nothing is read from the device or written to it ----
    def _step(self, seen: int) -> None:
        """Advances all rows by one position."""
        self.lineage.index_copy_(2, self.position, self.places[:, None].expand(self.bucket.sentences, -1, 1))
        logits = self._logits(seen)
        if self.bucket.num_beams > 1:
            self._choose_by_beams(logits)
        else:
            self._choose_the_best(logits)
        self.position.add_(1)

    def _logits(self, seen: int) -> Tensor:
        """Computes the logits of the rows' next tokens, (B K, V)."""
        stack, (sentences, beams) = self.weights.decoder, (self.bucket.sentences, self.bucket.num_beams)
        x = stack.embed(self.tokens, self.position_table.index_select(0, self.position))
        is_another = self.lineage[:, :, :seen, None] != self.places  # (B, K, seen, K)
        mask = torch.zeros(is_another.shape, dtype=stack.dtype, device=x.device).masked_fill_(is_another, NONE)
        mask = mask.view(sentences, 1, beams, seen * beams)

        def attend_to_past(number: int, x: Tensor) -> Tensor:
            past = self.past[number]
            query, new = stack.layers[number].qkv(x).split_with_sizes([stack.qkv_sizes[0], past.shape[-1]], dim=-1)
            past.index_copy_(1, self.position, new.view(sentences, 1, beams, -1))
            return attend(query, past[:, :seen].flatten(1, 2), mask)

        def attend_to_memory(number: int, x: Tensor, residual: Tensor) -> Tensor:
            layer = stack.layers[number]
            return layer.cross_out(attend(layer.cross_query(x), self.memory[number], self.source_mask), residual)

        def attend(query: Tensor, cache: Tensor, mask: Tensor) -> Tensor:
            keys, values = cache.split_with_sizes(stack.qkv_sizes[1:], dim=-1)
            return stack.attend(query.view(sentences, beams, -1), keys, values, mask)

        logits = self.weights.lm_head(through_layers(stack, x, attend_to_past, attend_to_memory))
        if self.bucket.forces_end:  # of the one token that is left, the probability is 1
            logits.add_(self.forcing.index_select(0, (self.position == self.last).long()))
        return logits

    def _choose_the_best(self, logits: Tensor) -> None:
        tokens, beams = self._bar(logits).argmax(dim=-1), self.beams
        ended = torch.isin(tokens, self.ends) | (beams.limits <= self.position + 1)
        beams.active.logical_and_(~ended)
        self.tokens.copy_(tokens)
        self.codes.index_copy_(0, self.position, tokens.view(1, -1, 1))

    def _choose_by_beams(self, logits: Tensor) -> None:
        length, divided_by = self.position + 1, self.divisors.index_select(0, self.position)
        candidates = self._candidates(logits)
        beams, tokens, codes, parents = search.advance(
            self.plan,
            self.beams,
            candidates,
            self.weights.vocab_size,
            self.ends,
            self.beams.limits <= length,
            length,
            divided_by,
        )
        for name in CHANGED:
            getattr(self.beams, name).copy_(getattr(beams, name))
        self.tokens.copy_(tokens.flatten())
        self.codes.index_copy_(0, self.position, codes[None])
        self.lineage.copy_(self.lineage.gather(1, parents[:, :, None].expand_as(self.lineage)))

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the best tokens of each row by its logits, in their own type, then the best of each sentence: (B, C).

        Sorting log-probabilities of all tokens in float32 would read twice as much in twice as many passes.
        """
        sentences, count = self.bucket.sentences, search.num_candidates(self.plan)
        if self.bucket.renormalize:
            logits = self._bar(logits)
        log_probabilities = torch.log_softmax(logits, -1, torch.float32)
        if not self.bucket.renormalize:
            logits = self._bar(logits)
        best, choices = logits.topk(min(count, logits.shape[1]))
        values = log_probabilities.gather(1, choices).masked_fill_(best == NONE, NONE)
        values = values.add_(self.beams.scores.view(-1, 1)).view(sentences, -1)
        values, order = values.topk(min(count, values.shape[1]))
        tokens, places = choices.view(sentences, -1).gather(1, order), order // choices.shape[1]
        return values, places * logits.shape[1] + tokens

    def _bar(self, logits: Tensor) -> Tensor:
        """Bars tokens, in the logits' memory."""
        if not self.bucket.has_bars:
            return logits
        return logits.add_(self.bars.index_select(0, self.phases.index_select(0, self.position)))


def rounded_up(length: int) -> int:
    """Returns how many positions a bucket has that holds this many."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


def capture(
    step: Callable[[], None], changed: Sequence[Tensor], stream: torch.cuda.Stream, pool: Any
) -> torch.cuda.CUDAGraph:
    """Captures a step, which only starts kernels on tensors that stay in place, as a CUDA graph.

    What is `changed` is put back after the steps of the warm-up; what they write elsewhere, a replay writes again. It
    runs and captures on one stream, as libraries keep memory for each. Graphs may share the `pool`, where tensors that
    live within the step lie, if they aren't replayed at the same time.
    """
    with torch.cuda.device(stream.device):
        before = [one.clone() for one in changed]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                step()
                for one, value in zip(changed, before, strict=True):
                    one.copy_(value)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            step()
    return graph
