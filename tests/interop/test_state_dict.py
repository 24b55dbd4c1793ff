"""State dicts by a mapping: every shipped layout beside the same model in plain formulas, and mappings of one's own."""

import collections
import math
import re

import plain_reference
import pytest
import torch
import yaml
from plain_reference import Reference, random_weights
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer.interop import state_dict
from hf_vanilla_transformer.interop.interface import ConversionError, ConversionOptions

# All sizes differ, so that no axis can be taken for another.
D, HEADS, FFN, ROWS, LAYERS, POSITIONS = 12, 3, 10, (17, 19), {"encoder": 2, "decoder": 3}, 25
PAD, START, END = 1, 2, 3
TOKENS = {"pad_token_id": PAD, "decoder_start_token_id": START, "eos_token_id": END}
HEADS_OF_BOTH = {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}


def sinusoids(exponent=lambda i: 2 * (i // 2)):
    rows = [[pos / 10000 ** (exponent(i) / D) for i in range(D)] for pos in range(POSITIONS)]
    table = torch.tensor(rows, dtype=torch.float64)
    table[:, 0::2], table[:, 1::2] = table[:, 0::2].sin(), table[:, 1::2].cos()
    return table.float()


# ---- Layouts ----
def roles(norms, words, *, layers="{}.layers", own=("self_attn",) * 2, first_and_last=slice(2), **more):
    """Names by the roles of a `Reference`; `norms` are a decoder's layer's, of which the encoder has some."""
    return {
        **{stack: f"{layers.format(stack)}.{{}}" for stack in LAYERS},
        **dict(zip(("source", "target"), words, strict=True)),
        **{"own": own, "decoder_norms": norms, "encoder_norms": norms[first_and_last], "last": "{}.norm"},
        **more,
    }


def of_stacks(name):
    return [f"{stack}.{name}" for stack in LAYERS]


MODULE = {
    "norms": ("norm1", "norm2", "norm3"), "words": of_stacks("embedding"), "attention": ("w_q", "w_k", "w_v", "fc"),
    "cross": "cross_attn", "feed_forward": ("ffn.fc1", "ffn.fc2"), "output": "decoder.fc_out",
    "tables": of_stacks("pos_encoding.pe"),
}  # fmt: skip
ANNOTATED = {
    "norms": [f"sublayer.{n}.norm" for n in range(3)], "words": ("src_embed.0.lut", "tgt_embed.0.lut"),
    "attention": [f"linears.{n}" for n in range(4)], "cross": "src_attn", "norm": ("a_2", "b_2"),
    "feed_forward": ("feed_forward.w_1", "feed_forward.w_2"), "output": "generator.proj",
    "tables": ("src_embed.1.pe", "tgt_embed.1.pe"),
}  # fmt: skip
LINEAR = ("q_linear", "k_linear", "v_linear", "out")
BENTREVETT = {
    "norms": ("self_attn_layer_norm", "enc_attn_layer_norm", "ff_layer_norm"), "first_and_last": slice(None, None, 2),
    "words": of_stacks("tok_embedding"), "attention": [f"fc_{name}" for name in "qkvo"],
    "own": ("self_attention",) * 2, "cross": "encoder_attention", "output": "decoder.fc_out",
    "feed_forward": [f"positionwise_feedforward.fc_{n}" for n in (1, 2)],
    "tables": [f"{one}.weight" for one in of_stacks("pos_embedding")],
}  # fmt: skip
UNBIASED = {"pre": True, "unbiased": True}
# Names, and what the model computes.
LAYOUTS = {
    "annotated_transformer": (ANNOTATED, UNBIASED),
    "annotated_a2": (
        {
            **ANNOTATED, "norm": ("a2", "b2"), "output": "generator.project",
            "feed_forward": ("feed_forward.w1", "feed_forward.w2"),
        },
        UNBIASED,
    ),
    "bentrevett": (BENTREVETT, {"eps": 1e-5}),
    "hkproj": (
        {
            "norms": [f"residual_connections.{n}.norm" for n in range(3)], "own": ("self_attention_block",) * 2,
            "words": ("src_embed.embedding", "tgt_embed.embedding"), "attention": ("w_q", "w_k", "w_v", "w_o"),
            "cross": "cross_attention_block", "norm": ("alpha", "bias"), "output": "projection_layer.proj",
            "feed_forward": [f"feed_forward_block.linear_{n}" for n in (1, 2)], "tables": ("src_pos.pe", "tgt_pos.pe"),
        },
        {**UNBIASED, "attention_bias": False},
    ),
    "hyunwoongko": (
        {
            **MODULE, "words": of_stacks("emb.tok_emb"), "own": ("attention", "self_attention"),
            "cross": "enc_dec_attention", "attention": ("w_q", "w_k", "w_v", "w_concat"), "norm": ("gamma", "beta"),
            "feed_forward": ("ffn.linear1", "ffn.linear2"), "output": "decoder.linear", "tables": (),
        },
        {"scaled": False, "eps": 1e-12},
    ),
    "module_fc": (MODULE, {"eps": 1e-5}),
    "module_prenorm": (
        {**MODULE, "attention": LINEAR, "feed_forward": ("ffn.linear1", "ffn.linear2"), "output": "fc_out"},
        {"pre": True, "eps": 1e-5},
    ),
    "module_shared": ({**MODULE, "own": ("attention",) * 2, "cross": "attention"}, {"eps": 1e-5}),
    "module_wq": (
        {
            **MODULE, "layers": "{}_layers", "words": ("embedding",) * 2, "cross": "enc_attn", "output": "fc_out",
            "feed_forward": ("feedforward.linear1", "feedforward.linear2"), "tables": ("positional_encoding.pe",) * 2,
        },
        {"scaled": False, "eps": 1e-5},
    ),
    "samlynnevans": (
        {
            "norms": ("norm_1", "norm_2", "norm_3"), "words": of_stacks("embed.embed"), "attention": LINEAR,
            "own": ("attn", "attn_1"), "cross": "attn_2", "feed_forward": ("ff.linear_1", "ff.linear_2"),
            "norm": ("alpha", "bias"), "output": "out", "tables": of_stacks("pe.pe"),
        },
        UNBIASED,
    ),
}  # fmt: skip


def made(layout, **changes):
    """A model with random weights: its state dict, and its formulas, which read them."""
    torch.manual_seed(3)
    names, computed = LAYOUTS[layout]
    names = roles(**{**names, **changes.pop("names", {})})
    computed = {"pre": False, **computed, **changes}
    tensors = random_weights(
        *(names, ROWS, D, (FFN, FFN), (*LAYERS.values(),)),
        attention_bias=computed.pop("attention_bias", True),
        last_norms=computed["pre"],
    )
    tensors |= {f"{names['output']}.weight": torch.randn(ROWS[1], D) * 0.6, f"{names['output']}.bias": torch.randn(19)}
    table = sinusoids(lambda i: 2 * i) if layout == "samlynnevans" else sinusoids()
    saved = {one: table[None] for one in names["tables"]}
    if layout == "bentrevett":
        saved = {one: torch.randn(POSITIONS, D) for one in names["tables"]}
    tables = [saved[one].reshape(-1, D) for one in names["tables"]] or [table, table]
    return tensors | saved, Reference(tensors, names, (HEADS, HEADS), tables=tables, **computed)


def written(folder, entries, name="mapping.yaml"):
    (folder / name).write_text(yaml.safe_dump(entries))
    return folder / name


def entries_of(layout, more=None, **config):
    return {"extends": layout, "config": {**HEADS_OF_BOTH, **TOKENS, **config}, **(more or {})}


def load(folder, tensors, entries):
    torch.save(tensors, folder / "model.pt")
    return state_dict.load(folder / "model.pt", ConversionOptions(mapping=written(folder, entries))).model


def assert_same(ours, theirs, search=False):
    """Compares logits and, if asked, searches with the other model; padding has an embedding and an output."""
    ours.generation_config.suppress_tokens = [PAD]
    logits = theirs.logits if isinstance(theirs, Reference) else lambda source, mask, target: theirs(source, target)
    plain_reference.assert_same(ours, logits, PAD, START, search)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shipped_layouts(layout, tmp_path):
    tensors, theirs = made(layout)
    more = {"layer_norm": "biased"} if layout == "hyunwoongko" else {}
    ours = load(tmp_path, tensors, entries_of(layout, more))
    assert (ours.config.encoder_layers, ours.config.decoder_layers) == (*LAYERS.values(),)
    assert_same(ours, theirs, search=layout in ("annotated_transformer", "bentrevett"))


class Torch(nn.Module):
    """PyTorch's tutorial, or a user's model without saved sinusoids and unscaled."""

    def __init__(self, is_tutorial=True, norm_first=False):
        super().__init__()
        activation = "relu" if is_tutorial else "gelu"
        options = {"batch_first": True, "norm_first": norm_first}
        self.transformer = nn.Transformer(D, HEADS, *LAYERS.values(), FFN, 0.0, activation, **options)
        self.src_tok_emb, self.tgt_tok_emb = (nn.ModuleDict({"embedding": nn.Embedding(rows, D)}) for rows in ROWS)
        self.generator, self.scale = nn.Linear(D, ROWS[1]), math.sqrt(D) if is_tutorial else 1
        if is_tutorial:
            self.positional_encoding = nn.Module()
            self.positional_encoding.register_buffer("pos_embedding", sinusoids()[:, None])
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.6)

    def forward(self, source, target):
        sides = ((self.src_tok_emb, source), (self.tgt_tok_emb, target))
        embedded = (words["embedding"](ids) * self.scale + sinusoids()[: ids.shape[1]] for words, ids in sides)
        ahead = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        hidden = self.transformer(
            *embedded,
            tgt_mask=ahead,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return self.generator(hidden)


def test_every_shipped_layout_is_tested():
    assert set(state_dict.shipped_mappings()) == {*LAYOUTS, "torch", "torch_tutorial"}


# ---- What a user's own mapping can say ----
OWN_TORCH = {
    "prefix": "transformer.",
    "names": {
        "encoder.embed_tokens.weight": "src_tok_emb.embedding.weight",
        "decoder.embed_tokens.weight": "tgt_tok_emb.embedding.weight",
        "lm_head": "generator",
    },
}
OWN_FIELDS = {"activation_function": "gelu", "scale_embedding": False, "position_encoding": "paper"}


@pytest.mark.parametrize("norm_first", [None, False, True], ids=["the tutorial", "post", "pre"])
def test_torch_with_embeddings_named_by_the_user(norm_first, tmp_path):
    theirs = Torch(norm_first is None, bool(norm_first)).eval()
    if norm_first is None:
        assert_same(load(tmp_path, theirs.state_dict(), entries_of("torch_tutorial")), theirs, search=True)
        return
    fields = {"norm_position": "pre" if norm_first else "post", **OWN_FIELDS}
    ours = load(tmp_path, theirs.state_dict(), entries_of("torch", OWN_TORCH, **fields))
    assert ours.config.final_layer_norm
    assert_same(ours, theirs)


QUIRKS = {
    "attention_scale": D**-0.5,
    "first_position": 1,
    "names": {
        f"decoder.layers.*.encoder_attn.{ours}": f"decoder.layers.*.self_attention.fc_{theirs}"
        for ours, theirs in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("out_proj", "o"))
    },
}


def test_shared_attention_another_scale_and_a_row_of_positions_for_padding(tmp_path):
    names = {"cross": "self_attention"}
    tensors, theirs = made("bentrevett", names=names, scaled=False, scale=D**-0.5)
    rows = {name: torch.cat([torch.zeros(1, D), tensors[name]]) for name in BENTREVETT["tables"]}
    entries = entries_of("bentrevett", QUIRKS, scale_embedding=False)
    ours = load(tmp_path, tensors | rows, entries)
    assert ours.config.max_position_embeddings == POSITIONS
    assert_same(ours, theirs)
    del entries["first_position"]
    with pytest.raises(ConversionError, match=r"row 0 of encoder.pos_embedding.weight is zeros.*give first_position"):
        load(tmp_path, tensors | rows, entries)


def own_names(change):
    """Compares entries under bentrevett's names with what a function of the original and of this model gives."""
    pairs = state_dict._entries("bentrevett")["names"].items()
    return dict(pair for ours, name in pairs for pair in change(ours, name))


def test_keys_and_values_of_unlike_widths_in_one_matrix_and_convolutions(tmp_path):
    """d_k is 5, d_v is 2; keys and values have no bias, and the mapping no name for one."""
    tensors, theirs = made("bentrevett")
    for name in [name for name in tensors if re.search("fc_[qkv].weight", name)]:
        tensors[name] = torch.randn(HEADS * (2 if "fc_v" in name else 5), D) * 0.6
        tensors[name.replace("weight", "bias")] = torch.randn(len(tensors[name])) * ("fc_q" in name)
    for name in [name for name in tensors if "fc_o.weight" in name]:
        tensors[name] = torch.randn(D, HEADS * 2) * 0.6
    theirs.tensors = tensors
    state = {name: one for name, one in tensors.items() if "fc_k" not in name and "fc_v" not in name}
    for name in [name for name in tensors if "fc_v.weight" in name]:
        state[name.replace("fc_v", "both")] = torch.cat([tensors[name], tensors[name.replace("fc_v", "fc_k")]])
    state |= {name: one[..., None] for name, one in state.items() if re.search("feedforward.*weight", name)}

    def entries(ours, name):
        if ".k_proj" not in ours and ".v_proj" not in ours:
            yield ours, name
        if ours.endswith(".q_proj"):
            yield ours.replace("q_proj", "{v,k}_proj.weight"), name.replace("fc_q", "both.weight")

    own = {"stacking": "blocks", "layer_norm": "biased", "names": own_names(entries)}
    config = {"norm_position": "post", "layer_norm_eps": 1e-5, "activation_function": "relu", "scale_embedding": True}
    widths = {"head_dim": 5, "value_head_dim": 2}
    assert_same(load(tmp_path, state, {**own, "config": {**HEADS_OF_BOTH, **TOKENS, **config, **widths}}), theirs)


def test_one_matrix_missing_biases_and_heads_apart(tmp_path):
    tensors, theirs = made("bentrevett")
    for name in ("encoder.tok_embedding.weight", "decoder.fc_out.weight"):
        tensors[name] = tensors["decoder.tok_embedding.weight"]
    for name in [name for name in tensors if re.search(r"self_attention.fc_[qk].bias|fc_out.bias", name)]:
        del tensors[name]
    theirs.tensors, state = dict(tensors), dict(tensors)
    for name in [name for name in tensors if "self_attention.fc_k" in name]:
        for head, part in enumerate(state.pop(name).chunk(HEADS)):
            state[name.replace("fc_k", f"heads.{head}")] = part
    heads = "layers.*.self_attention.heads.{0,1,2}.weight"
    names = {f"{stack}.layers.*.self_attn.k_proj.weight": f"{stack}.{heads}" for stack in LAYERS}
    ours = load(tmp_path, state, entries_of("bentrevett", {"names": names}))
    assert (ours.config.tie_word_embeddings, ours.config.share_encoder_decoder_embeddings) == (True, True)
    assert not ours.config.output_bias
    assert_same(ours, theirs)


def test_a_matrix_stacked_head_by_head(tmp_path):
    """As GPT-NeoX and Megatron have it."""
    tensors, theirs = made("bentrevett")
    state = dict(tensors)
    for name in [name for name in tensors if "self_attention.fc_q" in name]:
        parts = [state.pop(name.replace("fc_q", f"fc_{one}")).unflatten(0, (HEADS, -1)) for one in "qkv"]
        state[name.replace("fc_q", "qkv")] = torch.stack(parts, 1).flatten(0, 2)
    places = ("encoder.layers.*.self_att", "decoder.layers.*.self_att")
    names = {f"{place}n.{{q,k,v}}_proj": f"{place}ention.qkv" for place in places}
    config = {"norm_position": "post", "layer_norm_eps": 1e-5, "activation_function": "relu", "scale_embedding": True}
    entries = {"extends": "bentrevett", "names": names, "config": {**HEADS_OF_BOTH, **TOKENS, **config}}
    assert_same(load(tmp_path, state, {**entries, "stacking": "heads"}), theirs)
    with pytest.raises(ConversionError, match="stacking is missing; give blocks or heads"):
        load(tmp_path, state, entries)


def test_one_list_of_sub_layers_counted_from_one(tmp_path):
    """Attention and feed-forward in turns: 1 to 4 are the encoder's, and 5 to 13 the decoder's."""
    tensors, theirs = made("bentrevett")

    def renamed(name, number):
        stack, part = name.split(".")[0], name.split(".")[3]
        turn = {"self": 0, "enc": 1, "encoder": 1}.get(part.split("_")[0], 1 if stack == "encoder" else 2)
        place = number(2, turn + 1) if stack == "encoder" else number(3, turn + 2 * LAYERS["encoder"] + 1)
        return f"blocks.{place}.{name.split('.', 3)[3]}"

    def entries(ours, name):
        yield ours, renamed(name, lambda step, first: f"{{{step}n+{first}}}") if "*" in name else name

    state, names = {}, own_names(entries)
    for name, value in tensors.items():
        layer = re.search(r"layers\.(\d+)", name)
        state[renamed(name, lambda step, first, n=layer: step * int(n[1]) + first) if layer else name] = value
    assert {int(name.split(".")[1]) for name in state if name.startswith("blocks.")} == set(range(1, 14))
    with pytest.raises(ConversionError, match="of the encoder and of the decoder: give encoder_layers and decoder_lay"):
        load(tmp_path, state, entries_of("bentrevett", {"names": names}))
    layers = {f"{stack}_layers": number for stack, number in LAYERS.items()}
    assert_same(load(tmp_path, state, entries_of("bentrevett", {"names": names}, **layers)), theirs)
    explicit = {
        ours.replace("*", str(number)): re.sub(
            r"{(\d)n\+(\d+)}", lambda found, n=number: str(int(found[1]) * n + int(found[2])), name
        )
        for ours, name in names.items()
        for number in range(LAYERS[ours.partition(".")[0]] if "*" in ours else 1)
    }
    merged = state_dict._entries(written(tmp_path, entries_of("bentrevett", {"names": explicit})))
    assert_same(load(tmp_path, state, {**merged, "names": explicit}), theirs)


def test_norms_without_gain_and_bias(tmp_path):
    tensors, theirs = made("bentrevett")
    theirs.tensors = {name: one for name, one in tensors.items() if "layer_norm" not in name}
    norms = [ours for ours in state_dict._entries("bentrevett")["names"] if ours.endswith("layer_norm")]
    names = {f"{ours}.{kind}": int(kind == "weight") for ours in norms for kind in ("weight", "bias")}
    state = {name: one for name, one in tensors.items() if "layer_norm" not in name}
    assert_same(load(tmp_path, state, entries_of("bentrevett", {"names": names})), theirs)


# ---- What is refused ----
class Planted:
    """What a pickle may run when it is read."""

    def __reduce__(self):
        return exec, ("open('planted', 'w').close()",)


class Holder:
    """A harmless class of PyTorch's list, whose state is what runs code."""

    def __reduce__(self):
        return collections.OrderedDict, (), {"state": Planted()}


OTHER_FILES = {
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
@pytest.mark.parametrize("kind", ["pt", "state_dict", "safetensors"])
def test_convert(kind, tmp_path, vanilla_transformer):
    tensors, theirs = made("annotated_transformer")
    file = tmp_path / f"model.{'safetensors' if kind == 'safetensors' else 'pt'}"
    if kind == "safetensors":
        save_file({name: one.clone() for name, one in tensors.items()}, file)
    else:
        torch.save({"state_dict": tensors, "epoch": 3} if kind == "state_dict" else tensors, file)
    given = written(tmp_path, entries_of("annotated_transformer"))
    result = vanilla_transformer("convert", file, "--mapping", given, "--output", tmp_path / "ours")
    assert "note: no tokenizer is written: save yours beside the model" in result.out
    assert "1e-06 |1/s - 1/s^2|" in result.out
    assert_same(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours"), theirs)
