"""The model against the paper, written down again in NumPy; tests/interop/test_marian.py has another implementation."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.modeling_vanilla_transformer import (
    label_smoothed_cross_entropy,
    shift_right,
    sinusoidal_table,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),  # see _uncompiled
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask"),  # transformers' own
]

SINUSOIDS = ("paper", "tensor2tensor", "fairseq", "marian")
KERNELS = ("eager", "sdpa")
ALL_KERNELS = (*KERNELS, "flex_attention")
PAD, BOS, EOS = 0, 1, 2
SOURCE = torch.tensor([[5, 9, 7, 11, 3, EOS], [8, 4, EOS, PAD, PAD, PAD], [13, 12, 6, 10, EOS, PAD]])
TARGET = torch.tensor([[BOS, 6, 12, 5, 9], [BOS, 14, 3, PAD, PAD], [BOS, 7, 8, 15, PAD]])
LABELS = torch.tensor([[6, 12, 5, 9, EOS], [14, 3, EOS, -100, -100], [7, 8, 15, EOS, -100]])


@pytest.fixture(autouse=True, scope="module")
def _uncompiled():
    """For tensors this small, flex_attention's compiling costs more than it brings."""
    with torch.compiler.set_stance("force_eager"):
        yield


def config_of(**overrides):
    small = {
        "vocab_size": 23,
        "d_model": 12,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 20,
        "decoder_ffn_dim": 20,
        "dropout": 0.0,
    }
    return VanillaTransformerConfig(**{**small, **overrides})


@torch.no_grad()
def shaken(module, dtype=torch.float32):
    """Random numbers in every parameter, always the same: zero biases and unit norms would hide a wrong place."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        parameter.normal_(std=0.4, generator=generator)
        if "norm" in name and name.endswith("weight"):
            parameter.add_(1)
    return module.to(dtype).eval()


def model_of(dtype=torch.float32, attn_implementation="eager", **overrides):
    config = config_of(attn_implementation=attn_implementation, **overrides)
    return shaken(VanillaTransformerForConditionalGeneration(config), dtype)


def _close(ours, theirs, tolerance):
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance, check_dtype=False)


# ---- The paper in NumPy ----
def numpy_positions(positions, d_model, encoding):
    """Section 3.5, a column at a time; the other layouts by their toolkits' definitions."""
    table = np.zeros((len(positions), d_model))
    sines, half = (d_model + 1) // 2, d_model // 2
    for column in range(d_model):
        if encoding == "paper":  # 2i is the even column that it belongs to
            exponent, function = (column - column % 2) / d_model, (np.sin, np.cos)[column % 2]
        elif encoding == "marian":
            exponent, function = 2 * (column % sines) / d_model, (np.sin, np.cos)[column // sines]
        elif column < 2 * half:
            exponent, function = (column % half) / max(half - 1, 1), (np.sin, np.cos)[column // half]
        else:
            continue  # zeros in the last of an odd number of columns
        table[:, column] = function(np.asarray(positions, dtype=np.float64) / 10000.0**exponent)
    return table


def numpy_attention(Q, K, V, visible=None):
    """Eq. 1."""
    scores = Q @ np.swapaxes(K, -2, -1) / math.sqrt(Q.shape[-1])
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ V


class NumpyTransformer:
    """Section 3 with the weights of a model, one sentence pair at a time and without padding."""

    def __init__(self, model, dropout=lambda x: x):
        self.config, self.dropout = model.config, dropout
        self.weights = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def layer_norm(self, name, x):
        centred = x - x.mean(axis=-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.config.layer_norm_eps)
        return centred / deviation * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def multi_head(self, name, x, memory, heads, visible=None):
        """Section 3.2.2, one head after the other."""
        projected = [self.linear(f"{name}.{p}_proj", y) for p, y in (("q", x), ("k", memory), ("v", memory))]
        by_head = zip(*(np.split(y, heads, axis=-1) for y in projected), strict=True)
        outputs = [numpy_attention(query, key, value, visible) for query, key, value in by_head]
        return self.linear(f"{name}.out_proj", np.concatenate(outputs, axis=-1))

    def feed_forward(self, name, x):
        """Eq. 2."""
        return self.linear(f"{name}.fc2", np.maximum(0, self.linear(f"{name}.fc1", x)))

    def residual(self, name, x, sublayer):
        """Section 3.1, or the pre-norm variant."""
        if self.config.norm_position == "post":
            return self.layer_norm(name, x + self.dropout(sublayer(x)))
        return x + self.dropout(sublayer(self.layer_norm(name, x)))

    def embed(self, stack, ids):
        first = self.config.pad_token_id + 1 if self.config.position_encoding == "fairseq" else 0
        encoding, d_model = self.config.position_encoding, self.config.d_model
        if encoding == "learned":
            positions = self.weights[f"{stack}.embed_positions.weight"][: len(ids)]
        else:  # our table is kept in float32
            positions = numpy_positions(range(first, first + len(ids)), d_model, encoding).astype(np.float32)
        scale = math.sqrt(d_model) if self.config.scale_embedding else 1.0
        return self.dropout(scale * self.weights[f"{stack}.embed_tokens.weight"][ids] + positions)

    def layer(self, name, x, heads, memory=None, visible=None):
        def attend(y):
            return self.multi_head(f"{name}.self_attn", y, y, heads, visible)

        def attend_to_memory(y):
            return self.multi_head(f"{name}.encoder_attn", y, memory, heads)

        def feed_forward(y):
            return self.feed_forward(f"{name}.feed_forward", y)

        x = self.residual(f"{name}.self_attn_layer_norm", x, attend)
        if memory is not None:
            x = self.residual(f"{name}.encoder_attn_layer_norm", x, attend_to_memory)
        return self.residual(f"{name}.final_layer_norm", x, feed_forward)

    def finish(self, stack, x):
        return self.layer_norm(f"{stack}.layer_norm", x) if self.config.final_layer_norm else x

    def logits(self, source, target):
        memory, config = self.embed("model.encoder", source), self.config
        for i in range(config.encoder_layers):
            memory = self.layer(f"model.encoder.layers.{i}", memory, config.encoder_attention_heads)
        memory = self.finish("model.encoder", memory)
        x, earlier = self.embed("model.decoder", target), np.tril(np.ones((len(target), len(target)), dtype=bool))
        for i in range(config.decoder_layers):
            x = self.layer(f"model.decoder.layers.{i}", x, config.decoder_attention_heads, memory, earlier)
        return self.linear("lm_head", self.finish("model.decoder", x))


VARIANTS = {
    "paper": {},
    "tensor2tensor": {"position_encoding": "tensor2tensor"},
    "fairseq": {"position_encoding": "fairseq"},
    "marian": {"position_encoding": "marian", "scale_embedding": False},
    "learned": {"position_encoding": "learned"},
    "pre-norm": {"norm_position": "pre", "final_layer_norm": True},
    "pre-norm without last norms": {"norm_position": "pre"},
    "last norms": {"final_layer_norm": True},
    "biases": {"attention_bias": True, "output_bias": True},
    "d_k and d_v": {"head_dim": 5, "value_head_dim": 2},
    "wide d_v": {"head_dim": 2, "value_head_dim": 7},
    "odd d_model": {"d_model": 13, "head_dim": 3, "value_head_dim": 4},
    "one head, three heads": {"encoder_attention_heads": 1, "decoder_attention_heads": 3},
    "two widths": {"encoder_ffn_dim": 9, "decoder_ffn_dim": 31},
    "three matrices": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    "two vocabularies": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 19},
    "eps": {"layer_norm_eps": 0.1},
}


def padded_left(ids):
    return torch.stack([torch.cat([row[row == PAD], row[row != PAD]]) for row in ids])


@pytest.mark.parametrize("pad", [torch.clone, padded_left])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_model_is_section_3(variant, kernel, pad):
    """Batches padded on either side against one sentence at a time in NumPy, every variant of the configuration.

    The target's padding is seen without a mask, as the Trainer gives none when it smooths labels itself.
    """
    model = model_of(torch.float64, kernel, **VARIANTS[variant])
    reference, (source, target) = NumpyTransformer(model), map(pad, (SOURCE, TARGET))
    logits = model(source, source != PAD, target).logits
    for found, sentence, prefix in zip(logits, source, target, strict=True):
        expected = reference.logits(sentence[sentence != PAD].numpy(), prefix[prefix != PAD].numpy())
        _close(found[prefix != PAD], expected, 1e-10)


# ---- 3.5 Positional encoding ----
@pytest.mark.parametrize("d_model", [2, 3, 16, 33, 512])
@pytest.mark.parametrize("encoding", SINUSOIDS)
def test_positional_table(encoding, d_model):
    # The one rounding to float32 is at most 2^-25 = 2.98e-8 for numbers up to 1; float64's own are below 1e-11.
    table = sinusoidal_table(3000, d_model, encoding)
    assert table.dtype == torch.float32
    np.testing.assert_allclose(table.numpy(), numpy_positions(range(3000), d_model, encoding), atol=3e-8, rtol=0)


# ---- 3.1 Stacks: what sees what ----
@pytest.mark.parametrize(("kernel", "norm_position"), [*((kernel, "post") for kernel in ALL_KERNELS), ("sdpa", "pre")])
def test_no_position_sees_a_later_target_token(kernel, norm_position):
    model = model_of(attn_implementation=kernel, norm_position=norm_position)
    with torch.no_grad():
        logits = model(SOURCE, SOURCE != PAD, TARGET).logits
        for position in range(TARGET.shape[1]):
            changed = TARGET.clone()
            changed[:, position] = 20
            others = model(SOURCE, SOURCE != PAD, changed).logits
            # Bitwise: the weight of a masked position is exactly 0, whatever stands there.
            assert torch.equal(others[:, :position], logits[:, :position])
            assert (others[:, position:] != logits[:, position:]).any(dim=-1).all()  # and all that see it change


# ---- 5.4 Dropout and label smoothing ----
@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_dropout_is_on_embeddings_and_on_what_sublayers_add(monkeypatch, norm_position):
    """Section 5.4: "to the output of each sub-layer, before it is added to the sub-layer input and normalized"."""
    model = model_of(torch.float64, norm_position=norm_position, dropout=0.3)
    source, target = SOURCE[0], TARGET[0]
    # A factor where torch would drop, so that its place can be seen.
    monkeypatch.setattr(F, "dropout", lambda x, p, training, *_: 3.0 * x if training and p else x)
    without = NumpyTransformer(model).logits(source.numpy(), target.numpy())
    dropped = NumpyTransformer(model, dropout=lambda x: 3.0 * x).logits(source.numpy(), target.numpy())
    assert np.abs(without - dropped).max() > 0.1
    _close(model.eval()(source[None], decoder_input_ids=target[None]).logits[0], without, 1e-10)
    _close(model.train()(source[None], decoder_input_ids=target[None]).logits[0], dropped, 1e-10)


@pytest.mark.parametrize("field", ["attention_dropout", "activation_dropout"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_dropouts_reach_each_kernel(kernel, field):
    torch.manual_seed(1)
    model = model_of(attn_implementation=kernel, **{field: 0.5})
    inputs = (SOURCE, SOURCE != PAD, TARGET)
    with torch.no_grad():
        assert torch.equal(model(*inputs).logits, model(*inputs).logits)
        model.train()
        assert not torch.equal(model(*inputs).logits, model(*inputs).logits)


def _numpy_loss(logits, labels, smoothing):
    """The mean over targets of -sum_k q(k) log p(k), with q = (1 - eps) [k is the label] + eps / V."""
    logits = logits[labels != -100].detach().double().numpy()
    labels = labels[labels != -100].numpy()
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    q = np.full_like(log_p, smoothing / log_p.shape[-1])
    q[np.arange(len(labels)), labels] += 1 - smoothing
    return -(q * log_p).sum(axis=-1).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.2])
def test_label_smoothing(smoothing):
    """eps_ls is spread over the whole vocabulary, in training alone."""
    model = model_of(torch.float64, label_smoothing=smoothing)
    plain = model(SOURCE, SOURCE != PAD, labels=LABELS)
    _close(plain.loss, _numpy_loss(plain.logits, LABELS, 0.0), 1e-12)
    smoothed = model.train()(SOURCE, SOURCE != PAD, labels=LABELS)
    real = LABELS != -100
    _close(smoothed.logits[real], plain.logits[real], 1e-12)  # no dropout here
    _close(smoothed.loss, _numpy_loss(smoothed.logits, LABELS, smoothing), 1e-12)
    # The Trainer's adds the vocabulary up in float32, of which 1e-6 is the rounding.
    _close(smoothed.loss, LabelSmoother(smoothing)(smoothed, LABELS), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_loss_is_computed_in_float32_at_least(dtype):
    logits = (10 * torch.randn(*LABELS.shape, 23)).to(dtype)
    loss = label_smoothed_cross_entropy(logits, LABELS, label_smoothing=0.1)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    _close(loss, _numpy_loss(logits, LABELS, 0.1), 1e-6)


@pytest.mark.parametrize(
    ("labels", "shifted"),
    [
        ([5, 6, 7], [1, 5, 6]),
        ([5, 6, -100, -100], [1, 5, 6, 0]),
        ([-100, 5, 6, -100], [0, 1, 5, 6]),
        ([5, -100, 6, 7], [1, 5, 0, 6]),  # a target that isn't learned, in the middle
        ([-100, -100], [1, 0]),
        ([0, 1, 2], [1, 0, 1]),  # special tokens are tokens
    ],
)
def test_targets_shifted_right(labels, shifted):
    labels = torch.tensor([labels, labels])
    before = labels.clone()
    assert shift_right(labels, start=1, pad=0).tolist() == [shifted, shifted]
    assert torch.equal(labels, before)
    with pytest.raises(ValueError, match=r"decoder_start_token_id.*pad_token_id"):
        shift_right(labels, None, 0)


# ---- Initialisation, as in the paper's code ----
@pytest.mark.parametrize(
    "tying",
    [
        {},
        {"tie_word_embeddings": False},
        {"share_encoder_decoder_embeddings": False},
        {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    ],
    ids=["one matrix", "untied", "unshared", "three matrices"],
)
def test_embeddings_are_normal_with_variance_1_over_d_model(tying):
    config = config_of(vocab_size=3000, d_model=64, position_encoding="learned", **tying)
    model = VanillaTransformerForConditionalGeneration(config)
    matrices = [value for name, value in model.named_parameters() if "embed" in name or "lm_head" in name]
    assert len(matrices) == 3 + len(tying)
    for weight in matrices:
        # At least 65,000 numbers: their deviation is known within 0.3%, the share within one of it within 0.2%.
        assert weight.std().item() == pytest.approx(64**-0.5, rel=0.015)
        assert weight.mean().item() == pytest.approx(0, abs=0.002)
        within_one = (weight.abs() < 64**-0.5).float().mean().item()
        assert within_one == pytest.approx(0.6827, abs=0.01)  # of a normal distribution


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("gain", [1.0, 0.35])
def test_projections_are_glorot_uniform(norm_position, gain):
    config = config_of(
        attention_init_gain=gain,
        d_model=64,
        head_dim=12,
        value_head_dim=24,
        encoder_ffn_dim=200,
        decoder_ffn_dim=100,
        attention_bias=True,
        output_bias=True,
        final_layer_norm=True,
        norm_position=norm_position,
    )
    model = VanillaTransformerForConditionalGeneration(config)
    for part in (*shaken(model).modules(), *model.parameters()):
        part._is_hf_initialized = False  # transformers' mark of what it leaves as it is
    model.init_weights()  # once more, so that nothing here is as torch made it
    kinds = {nn.Linear: 0, nn.LayerNorm: 0}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            kinds[nn.Linear] += 1
            assert not module.bias.any(), name
            if module is not model.lm_head:
                fan_out, fan_in = module.weight.shape
                bound = math.sqrt(6 / (fan_in + fan_out))
                bound *= gain if name.endswith(("q_proj", "k_proj", "v_proj")) else 1.0
                # Of 3,000 uniform numbers and more, the largest is within 0.4% of the bound but once in 100,000 times.
                assert 0.996 * bound < module.weight.abs().max().item() <= bound, name
                assert module.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
        elif isinstance(module, nn.LayerNorm):
            kinds[nn.LayerNorm] += 1
            assert (module.weight == 1).all(), name
            assert not module.bias.any(), name
            assert module.eps == 1e-6
    # Two encoder layers of 4 + 2 and three decoder layers of 8 + 2 maps, and the projection to the vocabulary; two and
    # three norms a layer, and the last ones.
    assert kinds == {nn.Linear: 2 * 6 + 3 * 10 + 1, nn.LayerNorm: 2 * 2 + 3 * 3 + 2}
