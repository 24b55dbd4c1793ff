"""State dicts by a mapping: every shipped layout beside a small module of that layout, written anew here."""

import collections
import functools
import io
import math
import pickle
import re
import subprocess
import sys
import tarfile

import plain_reference
import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.interop import state_dict
from hf_vanilla_transformer.interop.convert import convert
from hf_vanilla_transformer.interop.interface import ConversionError, ConversionOptions

# All sizes differ, so that no axis can be taken for another.
D, HEADS, FFN, SOURCE_WORDS, TARGET_WORDS, ENCODER_LAYERS, DECODER_LAYERS, POSITIONS = 12, 3, 10, 17, 19, 2, 3, 25
STACKS = ("encoder", "decoder")
PAD, START, END = 1, 2, 3
TOKENS = {"pad_token_id": PAD, "decoder_start_token_id": START, "eos_token_id": END}
HEADS_OF_BOTH = {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}


# ---- What the layouts share ----
def attend(query, key, value, mask, scale=None, heads=HEADS):
    """Multi-head attention (3.2.2) of projected inputs; mask: True where a query may look."""
    heads = [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value)]
    scores = heads[0] @ heads[1].mT * (scale or heads[0].shape[-1] ** -0.5)
    return (scores.masked_fill(~mask, -1e9).softmax(-1) @ heads[2]).transpose(1, 2).flatten(2)


def sinusoids(length=POSITIONS, exponent=lambda i: 2 * (i // 2)):
    rows = [[pos / 10000 ** (exponent(i) / D) for i in range(D)] for pos in range(length)]
    table = torch.tensor(rows, dtype=torch.float64)
    table[:, 0::2], table[:, 1::2] = table[:, 0::2].sin(), table[:, 1::2].cos()
    return table.float()


class UnbiasedNorm(nn.Module):
    """gain (x - mean) / (std + eps) + bias, with names of its own."""

    def __init__(self, gain, bias, eps=1e-6):
        super().__init__()
        self.names, self.eps = (gain, bias), eps
        self.register_parameter(gain, nn.Parameter(torch.ones(D)))
        self.register_parameter(bias, nn.Parameter(torch.zeros(D)))

    def forward(self, x):
        gain, bias = (getattr(self, name) for name in self.names)
        return gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + bias


def put(root, name, part):
    """Adds a module, or a buffer, at the end of a dotted name."""
    first, *names = name.split(".")
    for below in names:
        if not hasattr(root, first):
            root.add_module(first, nn.ModuleList() if below.isdecimal() else nn.Module())
        root, first = getattr(root, first), below
    (root.add_module if isinstance(part, nn.Module) else root.register_buffer)(first, part)


def linear(inner=D, outer=D, bias=True):
    return nn.Linear(inner, outer, bias=bias)


def masks(source, target):
    """Padding of the source, and padding of the target with what lies ahead: True where one may look."""
    causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
    return (source != PAD)[:, None, None], (target != PAD)[:, None, None] & causal


class Reference(nn.Module):
    """An encoder-decoder, made and computed by the names of its parts; subclasses have other names."""

    is_pre, is_scaled, has_attention_bias = False, True, True
    words = ("encoder.embedding", "decoder.embedding")
    tables = ("encoder.pos_encoding.pe", "decoder.pos_encoding.pe")
    attentions = ("self_attn", "self_attn", "cross_attn")  # the encoder's, and the decoder's
    projections, maps = ("w_q", "w_k", "w_v", "fc"), ("ffn.fc1", "ffn.fc2")
    norms = ("norm1", "norm2", "norm3")  # of a decoder's layer, in the order of the sub-layers
    encoder_norms = slice(2)  # of these, the encoder's
    output, layers = "decoder.fc_out", "{}.layers"

    def __init__(self):
        super().__init__()
        for side, (stack, rows) in enumerate(zip(STACKS, (SOURCE_WORDS, TARGET_WORDS), strict=True)):
            put(self, self.words[side], nn.Embedding(rows, D))
            self.put_table(self.tables[side])
            if self.is_pre:
                put(self, f"{stack}.norm", self.norm())
            for number in range((ENCODER_LAYERS, DECODER_LAYERS)[side]):
                for name, part in self.parts(stack):
                    put(self, f"{self.layers.format(stack)}.{number}.{name}", part)
        put(self, self.output, linear(D, TARGET_WORDS))

    def parts(self, stack):
        """Names and modules of a layer."""
        for attention in self.attentions_of(stack):
            for projection in self.projections:
                yield f"{attention}.{projection}", linear(bias=self.has_attention_bias)
        yield from zip(self.maps, (linear(D, FFN), linear(FFN, D)), strict=True)
        for name in self.norms_of(stack):
            yield name, self.norm()

    def put_table(self, name):
        put(self, name, sinusoids()[None])

    def norm(self):
        return nn.LayerNorm(D)

    def attentions_of(self, stack):
        return self.attentions[:1] if stack == "encoder" else self.attentions[1:]

    def norms_of(self, stack):
        return self.norms[self.encoder_norms] if stack == "encoder" else self.norms

    def run(self, x, norm, sublayer):
        return x + sublayer(norm(x)) if self.is_pre else norm(x + sublayer(x))

    def embedded(self, ids, stack):
        side = STACKS.index(stack)
        words = self.get_submodule(self.words[side])(ids) * (math.sqrt(D) if self.is_scaled else 1)
        return words + self.table(side)[: ids.shape[1]]

    def table(self, side):
        return functools.reduce(getattr, self.tables[side].split("."), self).reshape(-1, D)

    def forward(self, source, target):
        of_source, of_target = masks(source, target)
        memory = None
        for stack, ids, own in (("encoder", source, of_source), ("decoder", target, of_target)):
            x, part = self.embedded(ids, stack), getattr(self, stack, None)
            for layer in self.get_submodule(self.layers.format(stack)):
                first, *norms = (layer.get_submodule(name) for name in self.norms_of(stack))
                attend, *cross = (self.by(layer.get_submodule(name)) for name in self.attentions_of(stack))
                x = self.run(x, first, lambda x: attend(x, x, own))  # noqa: B023
                if memory is not None:
                    x = self.run(x, norms.pop(0), lambda x: cross[0](x, memory, of_source))  # noqa: B023
                x = self.run(x, *norms, self.ffn(layer))
            memory = x = getattr(part, "norm", nn.Identity())(x)
        return self.get_submodule(self.output)(x)

    def by(self, part, scale=None):
        """Attention by the four projections of a module, in the order of q, k, v and the output."""
        q, k, v, out = (part.get_submodule(name) for name in self.projections)
        return lambda x, memory, mask: out(attend(q(x), k(memory), v(memory), mask, scale))

    def ffn(self, layer):
        inner, outer = (layer.get_submodule(name) for name in self.maps)
        return lambda x: outer(inner(x).relu())


# ---- Layouts ----
class Annotated(Reference):
    is_pre, output, attentions = True, "generator.proj", ("self_attn", "self_attn", "src_attn")
    words, tables = ("src_embed.0.lut", "tgt_embed.0.lut"), ("src_embed.1.pe", "tgt_embed.1.pe")
    projections, maps = [f"linears.{n}" for n in range(4)], ("feed_forward.w_1", "feed_forward.w_2")
    norms = tuple(f"sublayer.{n}.norm" for n in range(3))

    def norm(self):
        return UnbiasedNorm("a_2", "b_2")


class AnnotatedA2(Annotated):
    output, maps = "generator.project", ("feed_forward.w1", "feed_forward.w2")

    def norm(self):
        return UnbiasedNorm("a2", "b2")


class Hkproj(Reference):
    is_pre, has_attention_bias, output = True, False, "projection_layer.proj"
    attentions = ("self_attention_block", "self_attention_block", "cross_attention_block")
    words, tables = ("src_embed.embedding", "tgt_embed.embedding"), ("src_pos.pe", "tgt_pos.pe")
    projections, maps = ("w_q", "w_k", "w_v", "w_o"), ("feed_forward_block.linear_1", "feed_forward_block.linear_2")
    norms = tuple(f"residual_connections.{n}.norm" for n in range(3))

    def norm(self):
        return UnbiasedNorm("alpha", "bias")


class SamLynnEvans(Reference):
    is_pre, output, attentions = True, "out", ("attn", "attn_1", "attn_2")
    words, tables = ("encoder.embed.embed", "decoder.embed.embed"), ("encoder.pe.pe", "decoder.pe.pe")
    projections, maps = ("q_linear", "k_linear", "v_linear", "out"), ("ff.linear_1", "ff.linear_2")
    norms = ("norm_1", "norm_2", "norm_3")

    def norm(self):
        return UnbiasedNorm("alpha", "bias")

    def put_table(self, name):
        put(self, name, sinusoids(exponent=lambda i: 2 * i)[None])


class BiasedNorm(nn.LayerNorm):
    """torch's, with its parameters called gamma and beta."""

    def __init__(self, eps):
        super().__init__(D, eps, elementwise_affine=False)
        self.gamma, self.beta = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return super().forward(x) * self.gamma + self.beta


class Hyunwoongko(Reference):
    is_scaled, output, attentions = False, "decoder.linear", ("attention", "self_attention", "enc_dec_attention")
    words, projections = ("encoder.emb.tok_emb", "decoder.emb.tok_emb"), ("w_q", "w_k", "w_v", "w_concat")
    maps = ("ffn.linear1", "ffn.linear2")

    def norm(self):
        return BiasedNorm(1e-12)

    def put_table(self, name):
        """Its sinusoids aren't saved."""

    def table(self, side):
        return sinusoids()


class Bentrevett(Reference):
    attentions = ("self_attention", "self_attention", "encoder_attention")
    words, tables = ([f"{stack}.{kind}_embedding" for stack in STACKS] for kind in ("tok", "pos"))
    projections, maps = [f"fc_{name}" for name in "qkvo"], [f"positionwise_feedforward.fc_{n}" for n in (1, 2)]
    norms, encoder_norms = ("self_attn_layer_norm", "enc_attn_layer_norm", "ff_layer_norm"), slice(None, None, 2)

    def put_table(self, name):
        put(self, name, nn.Embedding(POSITIONS, D))

    def table(self, side):
        return self.get_submodule(self.tables[side]).weight


class ModuleShared(Reference):
    attentions = ("attention", "attention", "attention")


class ModuleWq(Reference):
    is_scaled, output, layers, attentions = False, "fc_out", "{}_layers", ("self_attn", "self_attn", "enc_attn")
    words, tables = ("embedding",) * 2, ("positional_encoding.pe",) * 2
    maps = ("feedforward.linear1", "feedforward.linear2")


class ModulePrenorm(Reference):
    is_pre, output = True, "fc_out"
    projections, maps = ("q_linear", "k_linear", "v_linear", "out"), ("ffn.linear1", "ffn.linear2")


class TorchTutorial(nn.Module):
    def __init__(self, norm_first=False):
        super().__init__()
        layers = ENCODER_LAYERS, DECODER_LAYERS
        self.transformer = nn.Transformer(D, HEADS, *layers, FFN, 0.0, batch_first=True, norm_first=norm_first)
        put(self, "src_tok_emb.embedding", nn.Embedding(SOURCE_WORDS, D))
        put(self, "tgt_tok_emb.embedding", nn.Embedding(TARGET_WORDS, D))
        put(self, "positional_encoding.pos_embedding", sinusoids()[:, None])
        self.generator = linear(D, TARGET_WORDS)

    def forward(self, source, target):
        table = self.positional_encoding.pos_embedding[:, 0]
        embedded = (
            words.embedding(ids) * math.sqrt(D) + table[: ids.shape[1]]
            for words, ids in ((self.src_tok_emb, source), (self.tgt_tok_emb, target))
        )
        return self.generator(torch_hidden(self.transformer, *embedded, source, target))


def torch_hidden(transformer, embedded_source, embedded_target, source, target):
    return transformer(
        embedded_source,
        embedded_target,
        tgt_mask=torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1),
        src_key_padding_mask=source == PAD,
        tgt_key_padding_mask=target == PAD,
        memory_key_padding_mask=source == PAD,
    )


LAYOUTS = {
    "annotated_transformer": (Annotated, {}),
    "annotated_a2": (AnnotatedA2, {}),
    "bentrevett": (Bentrevett, {}),
    "hkproj": (Hkproj, {}),
    "hyunwoongko": (Hyunwoongko, {"layer_norm": "biased"}),
    "module_fc": (Reference, {}),
    "module_prenorm": (ModulePrenorm, {}),
    "module_shared": (ModuleShared, {}),
    "module_wq": (ModuleWq, {}),
    "samlynnevans": (SamLynnEvans, {}),
    "torch_tutorial": (TorchTutorial, {}),
}


def random_model(kind, *arguments):
    """A module with weights on all of which its outputs depend."""
    torch.manual_seed(3)
    model = kind(*arguments).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.4)
            if parameter.ndim == 1 and ("norm" in name or name.endswith(("a_2", "alpha", "gamma"))):
                parameter.add_(1.0)
    return model


def written(folder, entries, name="mapping.yaml"):
    (folder / name).write_text(yaml.safe_dump(entries))
    return folder / name


def saved(folder, model, **more):
    torch.save({"state_dict": model.state_dict(), **more} if more else model.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def entries_of(layout, more=None, **config):
    return {"extends": layout, "config": {**HEADS_OF_BOTH, **TOKENS, **config}, **(more or {})}


def batch():
    source = torch.tensor([[5, 6, 7, 8, 9, END], [10, 11, END, PAD, PAD, PAD]])
    target = torch.tensor([[START, 4, 5, 6, 7], [START, 8, 9, PAD, PAD]])
    return source, target


def assert_same(ours, theirs):
    """Compares logits, and searches by plain loops with the other model; padding has an embedding and an output."""
    ours.generation_config.suppress_tokens = [PAD]
    with torch.no_grad():
        plain_reference.assert_same(ours, lambda source, mask, target: theirs(source, target), PAD, START)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shipped_layouts(layout, tmp_path):
    kind, more = LAYOUTS[layout]
    theirs = random_model(kind)
    file = written(tmp_path, entries_of(layout, more))
    loaded = state_dict.load(saved(tmp_path, theirs), ConversionOptions(mapping=file))
    assert (loaded.model.config.encoder_layers, loaded.model.config.decoder_layers) == (ENCODER_LAYERS, DECODER_LAYERS)
    assert_same(loaded.model, theirs)


def test_every_shipped_layout_is_tested():
    assert set(state_dict.shipped_mappings()) == {*LAYOUTS, "torch"}


# ---- What a user's own mapping can say ----
OWN_TORCH = {
    "prefix": "core.",
    "names": {
        "encoder.embed_tokens.weight": "source_words.weight",
        "decoder.embed_tokens.weight": "target_words.weight",
        "lm_head": "head",
    },
}


class OwnTorch(nn.Module):
    """A user's model around torch.nn.Transformer: sinusoids that aren't saved, and unscaled embeddings."""

    def __init__(self, norm_first):
        super().__init__()
        layers = ENCODER_LAYERS, DECODER_LAYERS
        self.core = nn.Transformer(D, HEADS, *layers, FFN, 0.0, "gelu", batch_first=True, norm_first=norm_first)
        self.source_words, self.target_words = nn.Embedding(SOURCE_WORDS, D), nn.Embedding(TARGET_WORDS, D)
        self.head = linear(D, TARGET_WORDS)

    def forward(self, source, target):
        sides = ((self.source_words, source), (self.target_words, target))
        embedded = (words(ids) + sinusoids()[: ids.shape[1]] for words, ids in sides)
        return self.head(torch_hidden(self.core, *embedded, source, target))


OWN_FIELDS = {"activation_function": "gelu", "scale_embedding": False, "position_encoding": "paper"}


def load_own(folder, model, entries, **options):
    return state_dict.load(saved(folder, model), ConversionOptions(mapping=written(folder, entries), **options)).model


@pytest.mark.parametrize("norm_first", [False, True])
def test_torch_with_embeddings_named_by_the_user(norm_first, tmp_path):
    theirs = random_model(OwnTorch, norm_first)
    position = "pre" if norm_first else "post"
    ours = load_own(tmp_path, theirs, entries_of("torch", OWN_TORCH, norm_position=position, **OWN_FIELDS))
    assert ours.config.final_layer_norm
    assert_same(ours, theirs)


class Quirks(Bentrevett):
    """One attention for self- and cross-attention, scores over sqrt(d_model), and a row of positions for padding."""

    is_scaled, attentions = False, ("self_attention", "self_attention", "self_attention")

    def put_table(self, name):
        put(self, name, nn.Embedding(POSITIONS + 1, D))

    def table(self, side):
        return super().table(side)[1:]

    def by(self, part):
        return super().by(part, scale=D**-0.5)


QUIRKS = {
    "attention_scale": D**-0.5,
    "first_position": 1,
    "names": {
        f"decoder.layers.*.encoder_attn.{ours}": f"decoder.layers.*.self_attention.fc_{theirs}"
        for ours, theirs in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "o"))
    },
}


def test_shared_attention_another_scale_and_a_row_of_positions_for_padding(tmp_path):
    theirs = random_model(Quirks)
    entries = entries_of("bentrevett", QUIRKS, scale_embedding=False)
    ours = load_own(tmp_path, theirs, entries)
    assert ours.config.max_position_embeddings == POSITIONS
    assert_same(ours, theirs)


UNLIKE_WIDTHS = {"head_dim": 5, "value_head_dim": 2}


class Stacked(Bentrevett):
    """Values and keys of unlike widths in one matrix without a bias, feed-forward maps that are convolutions."""

    def __init__(self):
        super().__init__()
        d_k, d_v = (HEADS * width for width in UNLIKE_WIDTHS.values())
        for name, part in list(self.named_modules()):
            if name.endswith("_attention"):
                del part.fc_k, part.fc_v
                part.fc_q, part.both, part.fc_o = linear(D, d_k), linear(D, d_v + d_k, bias=False), linear(d_v, D)
            elif name.endswith("feedforward"):
                part.fc_1, part.fc_2 = nn.Conv1d(D, FFN, 1), nn.Conv1d(FFN, D, 1)

    def by(self, part):
        width = HEADS * UNLIKE_WIDTHS["value_head_dim"]
        both = lambda memory: part.both(memory)  # noqa: E731
        return lambda x, memory, mask: part.fc_o(
            attend(part.fc_q(x), both(memory)[..., width:], both(memory)[..., :width], mask)
        )

    def ffn(self, layer):
        inner, outer = layer.positionwise_feedforward.fc_1, layer.positionwise_feedforward.fc_2
        return lambda x: outer(inner(x.mT).relu()).mT


def test_keys_and_values_of_unlike_widths_in_one_matrix_and_convolutions(tmp_path):
    theirs = random_model(Stacked)
    names = state_dict._entries("bentrevett")["names"]
    names = {ours: name for ours, name in names.items() if ".k_proj" not in ours and ".v_proj" not in ours}
    for ours in [ours for ours in names if ours.endswith(".q_proj")]:
        names[ours.replace("q_proj", "{v,k}_proj.weight")] = names[ours].replace("fc_q", "both.weight")
    own = {"stacking": "blocks", "layer_norm": "biased", "names": names}
    config = {"norm_position": "post", "layer_norm_eps": 1e-5, "activation_function": "relu", "scale_embedding": True}
    ours = load_own(tmp_path, theirs, {**own, "config": {**HEADS_OF_BOTH, **TOKENS, **config, **UNLIKE_WIDTHS}})
    assert not ours.model.decoder.layers[1].encoder_attn.k_proj.bias.any()  # of which the mapping has no name
    assert_same(ours, theirs)


class OneVocabulary(Bentrevett):
    """One matrix for everything, without any biases in attention but the output's, and heads apart."""

    def __init__(self):
        super().__init__()
        self.encoder.tok_embedding = self.decoder.tok_embedding
        self.decoder.fc_out = linear(D, TARGET_WORDS, bias=False)
        self.decoder.fc_out.weight = self.decoder.tok_embedding.weight
        for stack in (self.encoder, self.decoder):
            for layer in stack.layers:
                layer.self_attention.fc_q = linear(bias=False)
                layer.self_attention.heads = nn.ModuleList(linear(D, D // HEADS, bias=False) for _ in range(HEADS))
                del layer.self_attention.fc_k

    def by(self, part):
        if not hasattr(part, "heads"):
            return super().by(part)
        keys = lambda x: torch.cat([head(x) for head in part.heads], -1)  # noqa: E731
        return lambda x, memory, mask: part.fc_o(attend(part.fc_q(x), keys(memory), part.fc_v(memory), mask))


def test_one_matrix_missing_biases_and_heads_apart(tmp_path):
    theirs = random_model(OneVocabulary)
    heads = "layers.*.self_attention.heads.{0,1,2}.weight"
    names = {f"{stack}.layers.*.self_attn.k_proj.weight": f"{stack}.{heads}" for stack in ("encoder", "decoder")}
    ours = load_own(tmp_path, theirs, entries_of("bentrevett", {"names": names}))
    assert (ours.config.tie_word_embeddings, ours.config.share_encoder_decoder_embeddings) == (True, True)
    assert not ours.config.output_bias
    assert_same(ours, theirs)


class StackedByHeads(Bentrevett):
    """One matrix for queries, keys and values, head by head, as GPT-NeoX and Megatron have it."""

    def __init__(self):
        super().__init__()
        for name, part in list(self.named_modules()):
            if name.endswith("self_attention"):
                del part.fc_q, part.fc_k, part.fc_v
                part.qkv = linear(D, 3 * D)

    def by(self, part):
        if not hasattr(part, "qkv"):
            return super().by(part)

        def attention(x, memory, mask):
            q, k, v = (one.flatten(2) for one in part.qkv(x).unflatten(-1, (HEADS, 3, -1)).unbind(-2))
            return part.fc_o(attend(q, k, v, mask))

        return attention


def test_a_matrix_stacked_head_by_head(tmp_path):
    theirs = random_model(StackedByHeads)
    places = ("encoder.layers.*.self_att", "decoder.layers.*.self_att")
    names = {f"{place}n.{{q,k,v}}_proj": f"{place}ention.qkv" for place in places}
    config = {"norm_position": "post", "layer_norm_eps": 1e-5, "activation_function": "relu", "scale_embedding": True}
    entries = {"extends": "bentrevett", "names": names, "config": {**HEADS_OF_BOTH, **TOKENS, **config}}
    assert_same(load_own(tmp_path, theirs, {**entries, "stacking": "heads"}), theirs)
    with pytest.raises(ConversionError, match="stacking is missing; give blocks or heads"):
        load_own(tmp_path, theirs, entries)


def test_a_row_of_zeros_among_the_positions(tmp_path):
    theirs = random_model(Quirks)
    for stack in (theirs.encoder, theirs.decoder):
        stack.pos_embedding.weight.data[0] = 0
    entries = entries_of("bentrevett", {**QUIRKS, "first_position": 1}, d_model=D, scale_embedding=False)
    assert_same(load_own(tmp_path, theirs, entries), theirs)
    del entries["first_position"]
    with pytest.raises(ConversionError, match=r"row 0 of encoder.pos_embedding.weight is zeros.*give first_position"):
        load_own(tmp_path, theirs, entries)


def test_one_list_of_sub_layers_counted_from_one(tmp_path):
    """Attention and feed-forward in turns: 1 to 4 are the encoder's, and 5 to 13 the decoder's."""
    theirs = random_model(Bentrevett)

    def renamed(name, number):
        stack, part = name.split(".")[0], name.split(".")[3]
        turn = {"self": 0, "enc": 1, "encoder": 1}.get(part.split("_")[0], 1 if stack == "encoder" else 2)
        place = number(2, turn + 1) if stack == "encoder" else number(3, turn + 2 * ENCODER_LAYERS + 1)
        return f"blocks.{place}.{name.split('.', 3)[3]}"

    names = {
        ours: renamed(name, lambda step, first: f"{{{step}n+{first}}}") if "*" in name else name
        for ours, name in state_dict._entries("bentrevett")["names"].items()
    }
    state = {}
    for name, value in theirs.state_dict().items():
        layer = re.search(r"layers\.(\d+)", name)
        state[renamed(name, lambda step, first, n=layer: step * int(n[1]) + first) if layer else name] = value
    assert {int(name.split(".")[1]) for name in state if name.startswith("blocks.")} == set(range(1, 14))
    torch.save(state, tmp_path / "model.pt")
    file = written(tmp_path, entries_of("bentrevett", {"names": names}))
    with pytest.raises(ConversionError, match="of the encoder and of the decoder: give encoder_layers and decoder_lay"):
        state_dict.load(tmp_path / "model.pt", ConversionOptions(mapping=file))
    layers = {"encoder_layers": ENCODER_LAYERS, "decoder_layers": DECODER_LAYERS}
    file = written(tmp_path, entries_of("bentrevett", {"names": names}, **layers))
    assert_same(state_dict.load(tmp_path / "model.pt", ConversionOptions(mapping=file)).model, theirs)
    explicit = {
        ours.replace("*", str(number)): re.sub(
            r"{(\d)n\+(\d+)}", lambda found, n=number: str(int(found[1]) * n + int(found[2])), name
        )
        for ours, name in names.items()
        for number in range(ENCODER_LAYERS if ours.startswith("encoder") else DECODER_LAYERS)
    }
    entries = entries_of("bentrevett", {"names": explicit})
    file = written(tmp_path, {**state_dict._entries(written(tmp_path, entries)), "names": explicit})
    assert_same(state_dict.load(tmp_path / "model.pt", ConversionOptions(mapping=file)).model, theirs)


class PlainNorms(Bentrevett):
    """LayerNorms without gain and bias."""

    def norm(self):
        return nn.LayerNorm(D, elementwise_affine=False)


def test_norms_without_gain_and_bias(tmp_path):
    theirs = random_model(PlainNorms)
    norms = [ours for ours in state_dict._entries("bentrevett")["names"] if ours.endswith("layer_norm")]
    names = {f"{ours}.{kind}": int(kind == "weight") for ours in norms for kind in ("weight", "bias")}
    assert_same(load_own(tmp_path, theirs, entries_of("bentrevett", {"names": names})), theirs)


def test_an_embedding_without_an_output(tmp_path):
    theirs = random_model(Bentrevett)
    theirs.decoder.tok_embedding = nn.Embedding(TARGET_WORDS + 1, D)
    with pytest.raises(ConversionError, match=r"embeddings have 20 rows and the output 19.*insert the missing rows"):
        load_own(tmp_path, theirs, entries_of("bentrevett"))


# ---- What is refused ----
REFUSALS = {
    "unknown entry": ({"nams": {}}, "unknown entry nams"),
    "no such part": ({"names": {"enc.layers.*.fc1": "encoder.x"}}, "enc.layers.*.fc1 is no parameter; they begin"),
    "a scale of nothing": ({"attention_scale": 0}, "attention_scale is 0; give a positive number"),
    "a scale in text": ({"attention_scale": "1e-1"}, "YAML takes numbers such as 1e-1 for text; write 1.0e-1"),
    "a constant where there is none": ({"names": {"lm_head": 1}}, "the name of lm_head is 1; give a text"),
    "no such mapping": ({"extends": "nanogpt"}, "there is no mapping nanogpt; give one of annotated_a2"),
    "a position before the first": ({"first_position": -1}, "first_position is -1; give 0 or more"),
    "unknown tensors": ({"names": {"lm_head": "decoder.head"}}, "unknown: decoder.fc_out.bias, decoder.fc_out.weight"),
    "a wrong name of ours": (
        {
            "names": {
                "lm_head": "decoder.head",
                "lm_head.weight": "decoder.fc_out.weight",
                "decoder.head.bias": "decoder.fc_out.bias",
            }
        },
        "without a place in this model: decoder.fc_out.bias (decoder.head.bias)",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case, tmp_path):
    more, message = REFUSALS[case]
    with pytest.raises(ConversionError) as raised:
        load_own(tmp_path, random_model(Bentrevett), {**entries_of("bentrevett"), **more})
    assert message in str(raised.value)


FIELDS = {
    "wrong number of heads": ({"encoder_attention_heads": 5}, "encoder_attention_heads is 5 and doesn't divide"),
    "an end that isn't there": (
        {"eos_token_id": TARGET_WORDS},
        "eos_token_id is 19, and the target vocabulary has 19 tokens, from 0 up",
    ),
    "a number in text": ({"layer_norm_eps": "1e-6"}, "not a number: YAML takes numbers such as 1e-6 for text"),
    "a layer that isn't there": ({"encoder_layers": 3}, "have 2 encoder layers, and the model's options say 3"),
    "no such activation": ({"activation_function": "step"}, "the fields make no valid model"),
    "no such field": ({"layers": 3}, "VanillaTransformerConfig has no field layers"),
    "too few positions": ({"max_position_embeddings": 512}, "25 learned positions, fewer than the model's 512"),
    "matrices that differ": ({"tie_word_embeddings": True}, "tie_word_embeddings is true, and the matrices differ"),
    "another width": ({"d_model": 24}, "encoder.pos_embedding.weight (25, 12) is no table of positions of width 24"),
    "no sinusoids": ({"position_encoding": "paper"}, "not those of position_encoding='paper'"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_fields_that_make_no_model(case, tmp_path):
    fields, message = FIELDS[case]
    with pytest.raises(ConversionError) as raised:
        load_own(tmp_path, random_model(Bentrevett), entries_of("bentrevett", **fields))
    assert message in str(raised.value)


def test_numbers_that_no_tensor_tells(tmp_path):
    entries = entries_of("bentrevett")
    for name in ("pad_token_id", "decoder_start_token_id"):
        del entries["config"][name]
    with pytest.raises(ConversionError, match="which no tensor tells: give it") as raised:
        load_own(tmp_path, random_model(Bentrevett), entries)
    assert "pad_token_id" in str(raised.value)
    assert "decoder_start_token_id" in str(raised.value)
    entries = entries_of("torch", OWN_TORCH, norm_position="pre", scale_embedding=False)
    with pytest.raises(ConversionError, match="lacks position_encoding"):
        load_own(tmp_path, random_model(OwnTorch, True), entries)
    entries["names"]["encoder.embed_positions.weight"] = "positions.pe"  # not saved, so it may be any
    with pytest.raises(ConversionError, match=r"the weights have no positions\.pe; give position_encoding"):
        load_own(tmp_path, random_model(OwnTorch, True), entries)


def without(state, beginning):
    return {name: value for name, value in state.items() if not name.startswith(beginning)}


FIRST = "encoder.layers.0.self_attention.fc_q.weight"
DAMAGES = {
    "missing": (lambda state: without(state, FIRST), f"missing: {FIRST}"),
    "a layer is missing": (
        lambda state: without(state, "decoder.layers.1."),
        "decoder.layers.1.enc_attn_layer_norm.weight",
    ),
    "unknown": (
        lambda state: state | {"encoder.layers.0.relative": torch.zeros(2)},
        "unknown: encoder.layers.0.relative",
    ),
    "mis-shaped": (
        lambda state: state | {FIRST: torch.zeros(D, D + 1)},
        f"of another shape: {FIRST} (12, 13) instead of (12, 12)",
    ),
    "not finite": (lambda state: state | {FIRST: state[FIRST] * math.nan}, f"not finite: {FIRST}"),
    "integers": (lambda state: state | {FIRST: state[FIRST].long()}, f"not of floating-point numbers: {FIRST}"),
    "no encoder": (
        lambda state: without(state, "encoder.layers."),
        "the encoder has no layers: no tensor is called encoder.layers.*.self_attention.fc_q",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_tensors_that_dont_match_are_listed(case, tmp_path):
    damaged, message = DAMAGES[case]
    torch.save(damaged(dict(random_model(Bentrevett).state_dict())), tmp_path / "model.pt")
    file = written(tmp_path, entries_of("bentrevett"))
    with pytest.raises(ConversionError) as raised:
        convert(tmp_path / "model.pt", tmp_path / "output", mapping=file)
    assert message in str(raised.value)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mapping.yaml", "model.pt"]


class Planted:
    """What a pickle may run when it is read."""

    def __reduce__(self):
        return exec, ("open('planted', 'w').close()",)


def plant_tar(file):
    with tarfile.open(file, "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            content = pickle.dumps(Planted())
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


class Holder:
    """A harmless class of PyTorch's list, whose state is what runs code."""

    def __reduce__(self):
        return collections.OrderedDict, (), {"state": Planted()}


OTHER_FILES = {
    "a tar of PyTorch 0.1": (plant_tar, "torch.save didn't write it"),
    "TorchScript": (lambda file: torch.jit.save(torch.jit.script(nn.Linear(2, 2)), file), "torch.save didn't write it"),
    "a planted state": (lambda file: torch.save({"state_dict": Holder()}, file), "it holds exec, and only data"),
    "a whole module": (lambda file: torch.save(nn.Linear(2, 2), file), "it holds torch.nn.modules.linear.Linear"),
    "a text": (lambda file: file.write_text("encoder"), "torch.save didn't write it"),
}


@pytest.mark.parametrize("case", OTHER_FILES)
def test_files_that_arent_data(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write, message = OTHER_FILES[case]
    write(tmp_path / "model.pt")
    with pytest.raises(ConversionError, match=r"model.pt can't be read \(") as raised:
        state_dict.load(tmp_path / "model.pt", ConversionOptions(mapping=written(tmp_path, entries_of("bentrevett"))))
    assert message in str(raised.value)
    assert "weights_only" not in str(raised.value)  # no advice to run what the file holds
    assert not (tmp_path / "planted").exists()


def test_a_mapping_is_plain_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mapping.yaml").write_text("names: !!python/object/apply:os.system ['touch planted']\n")
    with pytest.raises(ConversionError, match="can't be read"):
        state_dict.read_mapping(tmp_path / "mapping.yaml")
    assert not (tmp_path / "planted").exists()


# ---- The command ----
def test_what_needs_no_torch(tmp_path):
    """The list of mappings and an output that exists are answered before slow imports."""
    program = (
        "import sys\nfrom hf_vanilla_transformer import cli\n"
        "try: code = cli.main()\n"
        "except SystemExit as end: code = end.code\n"
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    (tmp_path / "there").write_text("mine")
    source = str(saved(tmp_path, nn.Linear(2, 2)))
    for arguments, code, message in (
        (["--list-mappings"], 0, "module_fc: Modules with w_q, w_k, w_v and fc in each attention"),
        ([source, "--output", str(tmp_path / "there")], 2, "there exists; choose another output"),
    ):
        command = [sys.executable, "-c", program, "convert", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert message in done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["pt", "state_dict", "safetensors"])
def test_convert(kind, tmp_path, capsys):
    theirs = random_model(Annotated)
    file = saved(tmp_path, theirs, **({"epoch": 3} if kind == "state_dict" else {}))
    if kind == "safetensors":
        file = tmp_path / "model.safetensors"
        save_file({name: value.clone() for name, value in theirs.state_dict().items()}, file)
    given = written(tmp_path, entries_of("annotated_transformer"))
    cli.main(["convert", str(file), "--mapping", str(given), "--output", str(tmp_path / "ours")])
    printed = capsys.readouterr().out
    assert "note: no tokenizer is written: save yours beside the model" in printed
    assert "1e-06 |1/s - 1/s^2|" in printed
    assert_same(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours"), theirs)
