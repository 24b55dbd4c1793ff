"""An encoder-decoder in a few lines, which reads its weights by the other system's names: a yardstick for tests."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

KINDS, LAST = ("weight", "bias"), "{}.layer_norm"


def random_weights(names, rows, width, inner, layers, *, attention_bias=True, ffn_bias=True, last_norms=True):
    """Random tensors by the names of a `Reference`; `rows`, `inner` and `layers` are those of source and target."""
    tensors = {}

    def module(name, *shape, bias=True):
        kinds = names.get("norm", KINDS) if len(shape) == 1 else KINDS
        tensors[f"{name}.{kinds[0]}"] = torch.randn(*shape) * 0.6 + (len(shape) == 1)
        if bias:
            tensors[f"{name}.{kinds[1]}"] = torch.randn(shape[0])

    for side, (role, stack) in enumerate((("source", "encoder"), ("target", "decoder"))):
        module(names[role], rows[side], width, bias=False)
        if last_norms:
            module(names.get("last", LAST).format(stack), width)
        attentions = [names["own"][side], names["cross"]][: 1 + side]
        for layer in (names[stack].format(number) for number in range(layers[side])):
            for name in (f"{layer}.{attention}.{part}" for attention in attentions for part in names["attention"]):
                module(name, width, width, bias=attention_bias)
            first, second = (f"{layer}.{name}" for name in names["feed_forward"])
            module(first, inner[side], width, bias=ffn_bias)
            module(second, width, inner[side], bias=ffn_bias)
            for norm in names[f"{stack}_norms"]:
                module(f"{layer}.{norm}", width)
    return tensors


@dataclass
class Reference:
    """`names` has, by role, the other system's names with {} for a layer's number."""

    tensors: dict
    names: dict
    heads: tuple
    pre: bool
    scaled: bool = True
    activation: object = F.relu
    eps: float = 1e-6
    concatenated: bool = False  # sines, then cosines
    scale: float | None = None  # of scores; None: 1 / sqrt(d_k)
    unbiased: bool = False  # LayerNorm by the unbiased standard deviation, to which epsilon is added
    tables: tuple = ()  # of positions, of source and target; without them, sinusoids are computed

    def linear(self, name, x):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name, x):
        gain, bias = (self.tensors.get(f"{name}.{kind}") for kind in self.names.get("norm", KINDS))
        if self.unbiased:
            return gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + bias
        return F.layer_norm(x, x.shape[-1:], gain, bias, self.eps)

    def embed(self, name, ids):
        x = F.embedding(ids, self.tensors[f"{name}.weight"])
        width = x.shape[-1]
        if self.tables:
            table = self.tables[name == self.names["target"]]
            return x * (math.sqrt(width) if self.scaled else 1) + table[: ids.shape[1]]
        index = torch.arange(width // 2) / (width // 2 - 1 if self.concatenated else width // 2)
        angles = torch.arange(ids.shape[1])[:, None] / 10000**index
        waves = [angles.sin(), angles.cos()]
        table = torch.cat(waves, -1) if self.concatenated else torch.stack(waves, -1).flatten(1)
        return x * (math.sqrt(width) if self.scaled else 1) + table

    def attend(self, name, x, memory, mask, heads):
        q, k, v = (
            self.linear(f"{name}.{part}", of).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, of in zip(self.names["attention"], (x, memory, memory), strict=False)
        )
        scores = (q @ k.mT * (self.scale or q.shape[-1] ** -0.5)).masked_fill(~mask[:, None], -1e9)
        return self.linear(f"{name}.{self.names['attention'][3]}", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def add(self, name, x, sub_layer):
        return x + sub_layer(self.norm(name, x)) if self.pre else self.norm(name, x + sub_layer(x))

    def feed_forward(self, layer, x):
        first, second = (f"{layer}.{name}" for name in self.names["feed_forward"])
        return self.linear(second, self.activation(self.linear(first, x)))

    def logits(self, source, source_mask, target):
        n, (encoder_heads, decoder_heads) = self.names, self.heads
        memory, number = self.embed(n["source"], source), 0
        while f"{(layer := n['encoder'].format(number))}.{n['feed_forward'][0]}.weight" in self.tensors:
            memory = self.add(
                f"{layer}.{n['encoder_norms'][0]}",
                memory,
                lambda x, at=layer: self.attend(f"{at}.{n['own'][0]}", x, x, source_mask[:, None], encoder_heads),
            )
            memory = self.add(f"{layer}.{n['encoder_norms'][1]}", memory, lambda x, at=layer: self.feed_forward(at, x))
            number += 1
        last = n.get("last", LAST)
        memory = self.norm(last.format("encoder"), memory) if self.pre else memory
        x, number = self.embed(n["target"], target), 0
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()[None]
        while f"{(layer := n['decoder'].format(number))}.{n['feed_forward'][0]}.weight" in self.tensors:
            first, second, third = (f"{layer}.{name}" for name in n["decoder_norms"])
            x = self.add(first, x, lambda y, at=layer: self.attend(f"{at}.{n['own'][1]}", y, y, causal, decoder_heads))
            x = self.add(
                second,
                x,
                lambda y, at=layer: self.attend(f"{at}.{n['cross']}", y, memory, source_mask[:, None], decoder_heads),
            )
            x = self.add(third, x, lambda y, at=layer: self.feed_forward(at, y))
            number += 1
        return self.linear(n["output"], self.norm(last.format("decoder"), x) if self.pre else x)


@torch.no_grad()
def beam_search(logits, start, end, beams, longest, barred=(), shortest=0):
    """Beam search by sums of log-probabilities over complete hypotheses, without a length penalty.

    `logits` maps tokens, (1, T), to (1, T, V). The result has at most `longest` tokens with `start`.
    """
    running, complete = [(0.0, [start])], []
    for step in range(longest - 1):
        scored = []
        for score, tokens in running:
            logs = logits(torch.tensor([tokens]))[0, -1].log_softmax(-1)
            unwanted = {*barred, end} if step < shortest else barred
            scored += [(score + one.item(), [*tokens, n]) for n, one in enumerate(logs) if n not in unwanted]
        scored.sort(reverse=True)
        complete += [one for one in scored[:beams] if one[1][-1] == end]
        running = [one for one in scored[: 2 * beams] if one[1][-1] != end][:beams]
    return max([*complete, *running])[1]


@torch.no_grad()
def assert_same(ours, theirs, pad, start, search=True):
    """Compares logits under padding on both sides, greedy and beam search; `theirs(source, mask, target)` are logits.

    Both searches are plain loops over the other model's logits, without a length penalty.
    """
    torch.manual_seed(3)
    config = ours.config
    source, target = torch.randint(4, config.vocab_size, (3, 9)), torch.randint(4, config.target_vocab_size, (3, 7))
    target[:, 0] = start
    mask = torch.arange(9) < torch.tensor([9, 4, 6])[:, None]
    real = torch.arange(7) < torch.tensor([3, 7, 5])[:, None]
    source, target = source.masked_fill(~mask, pad), target.masked_fill(~real, pad)
    found = ours(source, mask.long(), target, decoder_attention_mask=real.long()).logits
    expected = theirs(source, mask, target)
    assert expected[real].std() > 0.5
    assert (theirs(source.flip(0), mask.flip(0), target) - expected)[real].abs().max() > 0.01  # depends on the source
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-5)
    left = torch.stack([row.roll(-int(n)) for row, n in zip(source, mask.sum(1), strict=True)])
    shifted = ours(left, (left != pad).long(), target, decoder_attention_mask=real.long()).logits
    torch.testing.assert_close(shifted[real], expected[real], rtol=0, atol=1e-5)
    if not search:
        return
    tokens, settings = torch.full((3, 1), start), ours.generation_config
    barred = settings.suppress_tokens or []
    for step in range(8):
        scores = theirs(source, mask, tokens)[:, -1].clone()
        scores[:, barred] = -torch.inf
        if step < (settings.min_new_tokens or 0):
            scores[:, config.eos_token_id] = -torch.inf
        ended = (tokens == config.eos_token_id).any(1)
        tokens = torch.cat([tokens, scores.argmax(-1).masked_fill(ended, pad)[:, None]], 1)
    generated = ours.generate(source, attention_mask=mask.long(), num_beams=1, max_new_tokens=8)
    assert torch.equal(generated, tokens[:, : generated.shape[1]])
    beams = {"num_beams": 4, "max_new_tokens": 8, "gnmt_length_penalty": 0.0, "early_stopping": False}
    for row, seen, found in zip(source, mask, ours.generate(source, attention_mask=mask.long(), **beams), strict=True):
        alone = row[seen][None]
        expected = beam_search(
            lambda tokens, alone=alone: theirs(alone, torch.ones_like(alone, dtype=torch.bool), tokens),
            *(start, config.eos_token_id, 4, 9, barred, settings.min_new_tokens or 0),
        )
        assert [token for token in found.tolist() if token != pad] == [token for token in expected if token != pad]
