"""What the tests of the engine's contract share: a naive `generate()` over `model(...)`, and models to change.

The contract: whatever is done to a model, to its classes or to what surrounds them, `generate()` computes what
`model(...)` does. The reference has no cache, no prepared weights and no loop of transformers'.
"""

import contextlib
import copy
import functools
import itertools
from unittest import mock

import torch
from test_generation import BOS, EOS, PAD, SOURCES, lively_model, padded
from torch import nn
from transformers.modeling_outputs import ModelOutput

from hf_vanilla_transformer import engine
from hf_vanilla_transformer.generation_vanilla_transformer import EngineSlot

LENGTH = 8
BEAMS = 3
ALPHA = 0.6  # the paper's, and the default of generate()
BATCH = padded(SOURCES[:4])
VARIANTS = {
    "default": {},
    "all biases": {"attention_bias": True, "output_bias": True, "final_layer_norm": True},
    "attentive": {"attention_bias": True, "output_bias": True, "final_layer_norm": True},
    "one decoder layer": {"decoder_layers": 1},
    "pre-norm": {"norm_position": "pre", "final_layer_norm": True},
    "learned positions": {"position_encoding": "learned", "max_position_embeddings": 40},
    "tied": {"tie_word_embeddings": True},
    "no dropout": {"dropout": 0.0},
    "gelu": {"activation_function": "gelu"},
    "short table": {"max_position_embeddings": 12},
}


@functools.cache
def _variant(name, attention):
    model = lively_model(**VARIANTS[name])
    model.set_attn_implementation(attention)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 and parameter_name != "lm_head.bias":  # none that can be left out unseen
                parameter += 0.2 * torch.randn_like(parameter)
            elif name == "attentive" and ("out_proj" in parameter_name or "fc2" in parameter_name):
                parameter *= 12  # every sub-layer outweighs what it gets, so that a single query changes tokens
    return model


def new_model(variant="default", attention="sdpa"):
    """A model of its own for a test that changes it."""
    return copy.deepcopy(_variant(variant, attention))


def has_engine():
    """Whether the slot is filled and the engine can be asked about a model."""
    return EngineSlot.engine is not None and hasattr(engine, "unsupported_reason")


def assert_served(model):
    """Where there is an engine it serves the model; otherwise a test of what it holds would show nothing."""
    if has_engine():
        assert engine.unsupported_reason(model) is None


class Changes(contextlib.ExitStack):
    """What a test has changed outside of its model, undone at the end."""

    def set(self, target, name, value):
        """Sets an attribute."""
        self.enter_context(mock.patch.object(target, name, value, create=True))

    def exchange(self, target, name, value):
        """Sets an attribute that can't be deleted in between, as `__class__` and `__code__`."""
        self.callback(setattr, target, name, getattr(target, name))
        setattr(target, name, value)

    def wrap(self, target, name, wrapper, wraps=False):
        """Puts a function around the one there is, which `wrapper` gets first; `wraps` as functools' has it."""
        original = getattr(target, name)

        def wrapped(*args, **kwargs):
            return wrapper(original, *args, **kwargs)

        self.set(target, name, functools.wraps(original)(wrapped) if wraps else wrapped)


def rolled(output):
    """Another output of the same shape: the features of every position moved by one, or the scores of tokens."""
    if isinstance(output, ModelOutput):
        name = "logits" if "logits" in output else "last_hidden_state"
        output[name] = rolled(output[name])
        return output
    if isinstance(output, tuple):
        return (rolled(output[0]), *output[1:])
    return output.roll(1, -1)


def and_roll(original, *args, **kwargs):
    """Calls a function and rolls what it returns; a wrapper for `Changes.wrap`."""
    return rolled(original(*args, **kwargs))


class Rolled(nn.Module):
    """A module that rolls its input; has neither a weight nor a bias."""

    def forward(self, x):
        """Moves the features by one."""
        return x.roll(1, -1)


def in_sequence(name):
    """Replaces a module by itself and one that rolls its output."""

    def replace(model, changes):
        model.set_submodule(name, nn.Sequential(model.get_submodule(name), Rolled()))

    return replace


def by_the_loop_of_transformers(function, *args, **kwargs):
    """What a function returns where the slot is empty."""
    with mock.patch.object(EngineSlot, "engine", None):
        return function(*args, **kwargs)


# ---- The reference ----
def tokens_of(sequence):
    """The tokens of a hypothesis after the start, up to the end of sentence."""
    tokens = sequence.tolist()[1:]
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


@torch.no_grad()
def generated(model, batch=BATCH, length=LENGTH, modes=(1, BEAMS)):
    """What `generate()` finds: the tokens of each sentence, greedily and with beams."""
    rows = [model.generate(**batch, num_beams=num_beams, max_new_tokens=length) for num_beams in modes]
    return [tokens_of(row) for row in itertools.chain(*rows)]


def plain_step(model, memory, mask, ids):
    """Logits of the next token after each row of ids, (N, V), by one pass over the whole prefix."""
    output = model(encoder_outputs=(memory,), attention_mask=mask, decoder_input_ids=ids, use_cache=False)
    return output.logits[:, -1]


def naive_greedy(model, memory, mask, length, step):
    """The most probable token at each step: (B, 1 + steps)."""
    ids = torch.full((len(memory), 1), BOS)
    ended = torch.zeros(len(memory), dtype=torch.bool)
    for _ in range(length):
        token = step(model, memory, mask, ids).argmax(dim=-1).masked_fill(ended, PAD)
        ids, ended = torch.cat([ids, token[:, None]], dim=1), ended | (token == EOS)
        if ended.all():
            break
    return ids


def naive_beams(model, memory, mask, length, step, num_beams=BEAMS):
    """Beam search of section 6.1 in plain Python: the best hypothesis of each sentence, start token included."""
    sentences = range(len(memory))
    memory, mask = memory.repeat_interleave(num_beams, dim=0), mask.repeat_interleave(num_beams, dim=0)
    live = [[([BOS], 0.0)] for _ in sentences]
    finished = [[] for _ in sentences]
    for steps in range(1, length + 1):
        # A sentence with fewer beams repeats its first one; what is found there is left out below.
        rows = [(beams + beams[:1] * num_beams)[:num_beams] for beams in live]
        ids = torch.tensor([tokens for beams in rows for tokens, _ in beams])
        log_probs = step(model, memory, mask, ids).double().log_softmax(dim=-1).view(len(sentences), num_beams, -1)
        for i in sentences:
            if len(finished[i]) == num_beams:
                continue
            totals = log_probs[i, : len(live[i])] + torch.tensor([score for _, score in live[i]])[:, None]
            best = totals.flatten().topk(min(2 * num_beams, totals.numel()))
            found = [
                ([*live[i][place // totals.shape[1]][0], place % totals.shape[1]], score)
                for place, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
            ends = [tokens[-1] == EOS or steps == length for tokens, _ in found]
            divisor = ((5 + steps) / 6) ** ALPHA
            finished[i] += [(t, s / divisor) for (t, s), end in zip(found[:num_beams], ends, strict=False) if end]
            finished[i] = sorted(finished[i], key=lambda item: -item[1])[:num_beams]
            live[i] = [item for item, end in zip(found, ends, strict=True) if not end][:num_beams] or live[i]
            live[i] = [(tokens + [PAD] * (steps + 1 - len(tokens)), score) for tokens, score in live[i]]
        for i in sentences:  # rows of sentences that are done grow with the others
            live[i] = [(tokens + [PAD] * (steps + 1 - len(tokens)), score) for tokens, score in live[i]]
    return [torch.tensor(beams[0][0]) for beams in finished]


def naive_encode(model, batch=BATCH):
    """What the model's own encoder says with the true mask, (B, S, d_model), and the mask that a decoder needs."""
    return model.get_encoder()(**batch).last_hidden_state, batch["attention_mask"]


@torch.no_grad()
def naive(model, batch=BATCH, length=LENGTH, modes=(1, BEAMS), step=plain_step, encode=naive_encode):
    """What `generated` has to find."""
    memory, mask = encode(model, batch)
    searches = {1: naive_greedy, BEAMS: naive_beams}
    rows = [searches[num_beams](model, memory, mask, length, step) for num_beams in modes]
    return [tokens_of(row) for row in itertools.chain(*rows)]


def check(model, change, differs=True, restored=False, first_length=LENGTH, **settings):
    """Changes a model that has generated before, and compares what it generates then with the naive reference.

    Args:
        model: The model, which is changed.
        change: Called with the model and `Changes`; returns another model if it isn't the same.
        differs: Whether the change has to be seen in the output of greedy decoding.
        restored: Whether the output has to be the former one once what is in `Changes` is undone.
        first_length: Tokens that the model generates before the change.
        **settings: Of `generated` and `naive`.
    """
    shared = {name: value for name, value in settings.items() if name not in ("step", "encode")}
    greedy = shared | {"modes": (1,)}
    before = generated(model, **greedy | {"length": first_length})
    assert_served(model)
    with Changes() as changes:
        changed = change(model, changes)
        changed = changed if isinstance(changed, nn.Module) else model
        found = generated(changed, **shared)
        expected = naive(changed, **settings)
    assert found == expected
    if differs:
        assert found[: len(before)] != before, "The change has no effect: this test would pass without it."
    if restored:
        assert generated(model, **greedy) == before
