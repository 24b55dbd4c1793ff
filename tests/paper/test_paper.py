"""The model against the paper, written down again in NumPy, and against other implementations with the same weights."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MarianConfig, MarianMTModel
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
FLOAT32_KERNELS = [(kernel, torch.float32) for kernel in ALL_KERNELS]
# Rounding: a few float32 roundings of numbers around 1 stay far below 1e-5; in float64 only a wrong formula is above
# 1e-10 (LayerNorm's eps of 1e-6 in place of 1e-5, for instance, passes most of the comparisons in float32).
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}

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


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(("kernel", "dtype"), [*FLOAT32_KERNELS, ("sdpa", torch.bfloat16)])
def test_padding_is_not_seen(kernel, dtype, left):
    model = model_of(dtype, kernel)
    source, target = (padded_left(ids) if left else ids for ids in (SOURCE, TARGET))
    masks = {"attention_mask": (source != PAD).long(), "decoder_attention_mask": (target != PAD).long()}
    changed_source, changed_target = source.masked_fill(source == PAD, 20), target.masked_fill(target == PAD, 21)
    with torch.no_grad():
        ours = model(source, decoder_input_ids=target, **masks).logits[target != PAD]
        # Bitwise, as above.
        assert torch.equal(model(changed_source, decoder_input_ids=changed_target, **masks).logits[target != PAD], ours)
        masks["attention_mask"][1] = 1
        assert not torch.equal(model(changed_source, decoder_input_ids=target, **masks).logits[target != PAD], ours)


# ---- 5.4 Dropout and label smoothing ----
def _stand_in_for_dropout(monkeypatch, factor=3.0):
    """Multiplies by a factor where torch would drop, so that its place can be seen; returns its calls, (p, shape)."""
    calls = []

    def scale(x, p=0.5, training=True, inplace=False):
        if not training or p == 0.0:
            return x
        calls.append((p, tuple(x.shape)))
        return factor * x

    monkeypatch.setattr(F, "dropout", scale)
    return calls


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_dropout_is_on_embeddings_and_on_what_sublayers_add(monkeypatch, norm_position):
    """Section 5.4: "to the output of each sub-layer, before it is added to the sub-layer input and normalized"."""
    model = model_of(torch.float64, norm_position=norm_position, dropout=0.3)
    source, target = SOURCE[0], TARGET[0]
    _stand_in_for_dropout(monkeypatch)
    without = NumpyTransformer(model).logits(source.numpy(), target.numpy())
    dropped = NumpyTransformer(model, dropout=lambda x: 3.0 * x).logits(source.numpy(), target.numpy())
    assert np.abs(without - dropped).max() > 0.1
    _close(model.eval()(source[None], decoder_input_ids=target[None]).logits[0], without, 1e-10)
    _close(model.train()(source[None], decoder_input_ids=target[None]).logits[0], dropped, 1e-10)


@pytest.mark.parametrize("attention_dropout", [0.0, 0.2])
@pytest.mark.parametrize("activation_dropout", [0.0, 0.4])
def test_every_dropout_of_a_training_step(monkeypatch, attention_dropout, activation_dropout):
    rates = {"dropout": 0.3, "attention_dropout": attention_dropout, "activation_dropout": activation_dropout}
    model = model_of(encoder_layers=2, decoder_layers=1, **rates).train()
    (B, S), (_, T), h = SOURCE.shape, TARGET.shape, 4

    def attention(queries, keys):
        return [(attention_dropout, (B, h, queries, keys)), (0.3, (B, queries, 12))]

    def feed_forward(positions):
        return [(activation_dropout, (B, positions, 20)), (0.3, (B, positions, 12))]

    encoder = [(0.3, (B, S, 12)), *(2 * [*attention(S, S), *feed_forward(S)])]
    decoder = [(0.3, (B, T, 12)), *attention(T, T), *attention(T, S), *feed_forward(T)]
    calls = _stand_in_for_dropout(monkeypatch)
    for mask in (None, SOURCE != PAD):  # padding changes no shape
        calls.clear()
        model(SOURCE, mask, TARGET)
        assert calls == [(p, shape) for p, shape in encoder + decoder if p > 0]
    calls.clear()
    model.eval()(SOURCE, SOURCE != PAD, TARGET)
    assert not calls


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_dropout_reaches_each_kernel(kernel):
    torch.manual_seed(1)
    model = model_of(attn_implementation=kernel, attention_dropout=0.5)
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


# ---- Hugging Face's Marian with the same weights ----
def _with_marian(dtype=torch.float32, kernel="eager", **overrides):
    """One of our models and the Marian with its weights: (ours, theirs, {their name: our name})."""
    ours = model_of(
        dtype,
        kernel,
        position_encoding="marian",
        attention_bias=True,
        output_bias=True,
        layer_norm_eps=1e-5,
        decoder_start_token_id=PAD,
        bos_token_id=None,
        **overrides,
    )
    own = MarianConfig(forced_eos_token_id=None).to_dict().keys() - {"model_type", "transformers_version"}
    shared = {field: value for field, value in ours.config.to_dict().items() if field in own}
    config = MarianConfig(**shared, forced_eos_token_id=None)
    config._attn_implementation = kernel
    theirs = MarianMTModel(config).to(dtype).eval()
    names = {
        name: name.replace("shared", "encoder.embed_tokens").replace("fc", "feed_forward.fc")
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    parameters = dict(ours.named_parameters())
    assert {*names.values(), "lm_head.bias"} == parameters.keys()
    with torch.no_grad():
        for their_name, our_name in names.items():
            theirs.get_parameter(their_name).copy_(parameters[our_name])
        theirs.final_logits_bias.copy_(parameters["lm_head.bias"])
    return ours, theirs, names


@pytest.mark.parametrize(("kernel", "dtype"), zip(KERNELS, TOLERANCE, strict=True), ids=str)
@pytest.mark.parametrize(
    "overrides",
    [
        {"scale_embedding": True, "activation_function": "swish"},
        {"scale_embedding": False, "activation_function": "relu"},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 19},
        {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    ],
    ids=["scaled, swish", "unscaled, relu", "two vocabularies", "untied"],
)
def test_model_is_marian(overrides, kernel, dtype):
    """Logits, loss and all gradients of a padded batch."""
    ours, theirs, names = _with_marian(dtype, kernel, **overrides)
    theirs.final_logits_bias.requires_grad_()
    batch = {"input_ids": SOURCE, "attention_mask": (SOURCE != PAD).long(), "labels": LABELS}
    our_outputs, their_outputs = ours(**batch), theirs(**batch)
    _close(our_outputs.logits, their_outputs.logits, TOLERANCE[dtype])
    _close(our_outputs.loss, their_outputs.loss, TOLERANCE[dtype])
    our_outputs.loss.backward()
    their_outputs.loss.backward()
    for their_name, our_name in names.items():
        our_gradient, their_gradient = ours.get_parameter(our_name).grad, theirs.get_parameter(their_name).grad
        if "embed" in our_name:  # Marian keeps the gradient of padding's embedding, its first decoder input, at zero
            our_gradient, their_gradient = our_gradient[PAD + 1 :], their_gradient[PAD + 1 :]
        # There is something to compare, but for a key's bias, which softmax doesn't see.
        assert their_gradient.abs().max() > 1e-6 or "k_proj.bias" in our_name
        _close(our_gradient, their_gradient, TOLERANCE[dtype])
    _close(ours.lm_head.bias.grad, theirs.final_logits_bias.grad[0], TOLERANCE[dtype])
