"""The model as users of transformers handle it: kernels, padding, arguments, losses, training, tying, files, graphs."""

import copy
import functools
import pickle
import re
import shutil

import accelerate
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from trainer_runs import stock_trainer
from transformers import AttentionInterface, DataCollatorForSeq2Seq, masking_utils
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import flex_attention as flex_integration
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutput

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizerFast,
)
from hf_vanilla_transformer import modeling_vanilla_transformer as modeling

V, D_MODEL, HEADS = 50, 16, 2
# float32 keeps 24 bits, values here are of order 1 and sums have a few dozen terms: 1e-6 apart is rounding.
ROUNDING = {"rtol": 1e-5, "atol": 3e-6}
BITWISE = {"rtol": 0, "atol": 0}


def tiny_config(**fields):
    small = {f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 32))}
    heads = {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
    sizes = {"vocab_size": V, "d_model": D_MODEL, "max_position_embeddings": 64, "dropout": 0.0}
    return VanillaTransformerConfig(**{**small, **heads, **sizes, **fields})


def tiny_model(model_class=VanillaTransformerForConditionalGeneration, **fields):
    torch.manual_seed(0)
    return model_class(tiny_config(**fields)).eval()


def ids(batch, length, vocab_size=V, seed=1):
    return torch.randint(3, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


SOURCE, TARGET, LABELS = ids(3, 7), ids(3, 5, seed=2), ids(3, 5, seed=3)
# Padded on the right, on the left, not at all.
SOURCE_MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
TARGET_MASK = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
PAIR = {"input_ids": SOURCE, "decoder_input_ids": TARGET}
MASKS = {"attention_mask": SOURCE_MASK, "decoder_attention_mask": TARGET_MASK}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# ---- Attention: every implementation, as transformers calls it ----
class FlashKernels:
    """flash-attn's two functions by PyTorch's, with its one width asserted."""

    def __init__(self):
        self.calls = 0

    def attend(self, query, key, value, softmax_scale, causal):  # (length, heads, width) each
        self.calls += 1
        assert query.shape[-1] == key.shape[-1] == value.shape[-1], "flash-attn knows one width"
        queries, keys = query.shape[0], key.shape[0]
        # A causal mask is aligned at the last key, as flash-attn has it from 2.1 on.
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if causal else keys)
        heads = (one.transpose(0, 1) for one in (query, key, value))
        return F.scaled_dot_product_attention(*heads, attn_mask=visible, scale=softmax_scale).transpose(0, 1)

    def flash_attn_func(self, q, k, v, softmax_scale=None, causal=False):
        return torch.stack([self.attend(*row, softmax_scale, causal) for row in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(self, q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False):
        lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        rows = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
        return torch.cat([self.attend(*row, softmax_scale, causal) for row in rows])


@pytest.fixture
def model_with(monkeypatch):
    """Makes a model with an implementation; flash-attn is replaced by its formula, flex_attention isn't compiled."""
    kernels = FlashKernels()

    def make(implementation, **fields):
        if implementation == "flash_attention_2":
            names = ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn")
            for name in (*names, "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):
                monkeypatch.setattr(flash_utils, name, None)
            functions = (kernels.flash_attn_func, kernels.flash_attn_varlen_func, None)
            paddings = (flash_utils._pad_input, flash_utils._unpad_input)
            monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *args, **kwargs: (*functions, *paddings))
            model = tiny_model(**fields)
            model.config._attn_implementation = implementation
            model.flash_kernels = kernels
            return model
        if implementation == "flex_attention":
            from torch.nn.attention import flex_attention as flex

            monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
            make_mask = functools.partial(flex.create_block_mask)
            monkeypatch.setattr(masking_utils, "create_block_mask", lambda *a, _compile, **kw: make_mask(*a, **kw))
            monkeypatch.setattr(
                flex_integration,
                "compile_friendly_flex_attention",
                lambda query, key, value, training, **kwargs: flex.flex_attention(query, key, value, **kwargs),
            )
        return tiny_model(attn_implementation=implementation, **fields)

    return make


IMPLEMENTATIONS = ["eager", "sdpa", "flex_attention", "flash_attention_2"]


@pytest.mark.parametrize("masks", [MASKS, {}], ids=["padded", "whole"])
@pytest.mark.parametrize(("d_k", "d_v"), [(8, 8), (4, 12), (12, 4)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_every_kernel_is_eager_attention(model_with, implementation, d_k, d_v, masks):
    """Which test_paper.py holds against equation 1."""
    widths = {"head_dim": d_k, "value_head_dim": d_v}
    model = model_with(implementation, **widths)
    if implementation == "flash_attention_2" and d_v > d_k:
        with pytest.raises(ValueError, match=r"d_v <= d_k.*head_dim.*sdpa"):
            model(**PAIR, **masks)
        return
    real = masks.get("decoder_attention_mask", torch.ones_like(TARGET)).bool()
    with torch.no_grad():
        expected = tiny_model(attn_implementation="eager", **widths)(**PAIR, **masks, use_cache=False).logits
        found = model(**PAIR, **masks, use_cache=False).logits
    torch.testing.assert_close(found[real], expected[real], **ROUNDING)
    if implementation == "flash_attention_2":
        # A call a sentence; cross-attention to padded sources goes to sdpa.
        assert model.flash_kernels.calls == 3 * (4 if masks else 6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_padding_alone(model_with, implementation):
    """A sentence that is all padding, on both sides, gives numbers, and the others keep theirs."""
    masks = {name: mask.clone() for name, mask in MASKS.items()}
    for mask in masks.values():
        mask[2] = 0
    model = model_with(implementation)
    with torch.no_grad():
        logits, expected = model(**PAIR, **masks).logits, model(**PAIR, **MASKS).logits
    assert logits.isfinite().all()
    real = TARGET_MASK[:2].bool()
    torch.testing.assert_close(logits[:2][real], expected[:2][real], **ROUNDING)
    if implementation == "flex_attention":
        return  # PyTorch has no backward of it on a CPU
    for name, gradient in gradients(model.train(), model(**PAIR, **masks, labels=LABELS).loss).items():
        assert gradient.isfinite().all(), name


# ---- What comes out ----
@pytest.mark.parametrize("masks", [MASKS, {}], ids=["padded", "whole"])
def test_attentions_under_sdpa_are_eagers(masks):
    models = [tiny_model(attn_implementation=name) for name in ("eager", "sdpa")]
    eager, sdpa = (model(**PAIR, **masks, output_attentions=True) for model in models)
    torch.testing.assert_close(sdpa.logits, eager.logits, **ROUNDING)
    torch.testing.assert_close(sdpa.logits, models[1](**PAIR, **masks).logits, **ROUNDING)
    for kind, (queries, keys) in {"encoder": (7, 7), "decoder": (5, 5), "cross": (5, 7)}.items():
        weights = sdpa[f"{kind}_attentions"]
        assert [layer.shape for layer in weights] == [(3, HEADS, queries, keys)] * 2
        torch.testing.assert_close(weights, eager[f"{kind}_attentions"], **ROUNDING)
    assert all(not layer.triu(1).any() for layer in sdpa.decoder_attentions)
    real = masks.get("decoder_attention_mask", torch.ones_like(TARGET)).bool()
    for layer in (*sdpa.decoder_attentions, *sdpa.cross_attentions):
        torch.testing.assert_close(layer.sum(-1).transpose(1, 2)[real], torch.ones(int(real.sum()), HEADS))
    if masks:
        padding = ~SOURCE_MASK.bool()[:, None, None]
        for layer in (*sdpa.encoder_attentions, *sdpa.cross_attentions):
            assert not layer.masked_select(padding).any()


def test_hidden_states():
    model = tiny_model(encoder_layers=1, decoder_layers=3, final_layer_norm=True)
    output = model(**PAIR, output_hidden_states=True)
    assert [state.shape for state in output.encoder_hidden_states] == [(3, 7, D_MODEL)] * 2
    assert [state.shape for state in output.decoder_hidden_states] == [(3, 5, D_MODEL)] * 4
    positions = modeling.sinusoidal_table(7, D_MODEL)
    embedded = model.get_input_embeddings()(SOURCE) * D_MODEL**0.5 + positions
    torch.testing.assert_close(output.encoder_hidden_states[0], embedded, **ROUNDING)
    torch.testing.assert_close(output.encoder_hidden_states[-1], output.encoder_last_hidden_state, **BITWISE)
    torch.testing.assert_close(model.lm_head(output.decoder_hidden_states[-1]), output.logits, **BITWISE)
    assert model(**PAIR).decoder_hidden_states is None


# ---- Any length, any id ----
@pytest.mark.parametrize("grow", ["source", "target", "cache"])
def test_learned_positions_end(grow):
    model = tiny_model(position_encoding="learned", max_position_embeddings=8)
    assert model(ids(2, 8), decoder_input_ids=ids(2, 8)).logits.isfinite().all()
    inputs = {
        "source": {"input_ids": ids(2, 9), "decoder_input_ids": ids(2, 8)},
        "target": {"input_ids": ids(2, 8), "decoder_input_ids": ids(2, 9)},
        "cache": {"input_ids": ids(2, 8), "decoder_input_ids": ids(2, 1)},
    }[grow]
    if grow == "cache":
        inputs["cache"] = model(ids(2, 8), decoder_input_ids=ids(2, 8)).cache
    with pytest.raises(ValueError, match=r"9 tokens.* 8 learned positions.*max_position_embeddings.*Truncate"):
        model(**inputs)


def _calls(model):
    """Calls of each module that hands keyword arguments down."""
    x = torch.zeros(2, 3, model.config.d_model)
    encoder, decoder = model.get_encoder(), model.get_decoder()
    return (
        functools.partial(model, **PAIR),
        functools.partial(model, input_ids=SOURCE, labels=LABELS),
        functools.partial(model, encoder_outputs=(x,), decoder_input_ids=TARGET[:2]),
        functools.partial(model.model, **PAIR),
        functools.partial(encoder, SOURCE),
        functools.partial(decoder, TARGET[:2], encoder_hidden_states=x),
        functools.partial(encoder.layers[0], x, mask=None),
        functools.partial(decoder.layers[0], x, x, mask=None, cross=None),
    )


@pytest.mark.parametrize("name", ["atention_mask", "position_ids", "cu_seq_lens_q"])
def test_an_argument_that_nothing_reads(name):
    """A typo, what this model counts by itself, what the configuration has, what another kernel reads."""
    for call in _calls(tiny_model()):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'.* sdpa, reads it"):
            call(**{name: 0.5})


def test_arguments_that_a_kernel_reads():
    def soft(module, query, key, value, attention_mask, scaling=1.0, dropout=0.0, softness=1.0, **kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling * softness)

    AttentionInterface.register("soft", soft)
    model = tiny_model()
    expected = model(**PAIR).logits
    model.set_attn_implementation("soft")
    assert torch.equal(model(**PAIR, softness=1.0).logits, expected)
    assert not torch.allclose(model(**PAIR, softness=0.0).logits, expected)
    with pytest.raises(TypeError, match="'softnes': neither the model nor its attention, soft, reads it"):
        model(**PAIR, softnes=0.0)


@pytest.mark.parametrize("bad", [V, -1])
@pytest.mark.parametrize("where", ["input_ids", "decoder_input_ids", "last label"])
def test_token_outside_the_vocabulary(where, bad):
    inputs = {"input_ids": SOURCE.clone(), **({"labels": LABELS.clone()} if "label" in where else PAIR)}
    inputs = {name: value.clone() for name, value in inputs.items()}
    name, position = ("labels", -1) if where == "last label" else (where, 2)  # the last one is no decoder input
    inputs[name][1, position] = bad
    text = rf"^Token ids go from (-?\d+) to (\d+), but the vocabulary has {V} tokens, from 0 up\."
    with pytest.raises(IndexError, match=text) as error:
        tiny_model()(**inputs)
    lowest, highest = map(int, re.match(text, str(error.value)).groups())
    assert bad == (lowest if bad < 0 else highest)
    for check in ("tokenizer", "config.vocab_size", "resize_token_embeddings"):
        assert check in str(error.value)


# ---- Padding on either side ----
def pad_rows(rows, side, value):
    return pad_sequence(list(map(torch.tensor, rows)), batch_first=True, padding_value=value, padding_side=side)


SENTENCES = [[5, 6, 7, 2], [8, 2], [9, 10, 2]]


@pytest.mark.parametrize("start", [1, 0], ids=["its own start token", "padding as start token"])
def test_labels_padded_on_either_side(start):
    model = tiny_model(label_smoothing=0.1, decoder_start_token_id=start).train()
    right, left = (model(SOURCE, labels=pad_rows(SENTENCES, side, -100)).loss for side in ("right", "left"))
    torch.testing.assert_close(left, right, **ROUNDING)
    alone = [model(SOURCE[[i]], labels=torch.tensor([row])).loss * len(row) for i, row in enumerate(SENTENCES)]
    torch.testing.assert_close(right, sum(alone) / sum(map(len, SENTENCES)), **ROUNDING)


def test_a_row_without_labels_changes_nothing():
    model = tiny_model()
    labels = LABELS.clone()
    labels[2] = -100
    torch.testing.assert_close(model(SOURCE, labels=labels).loss, model(SOURCE[:2], labels=LABELS[:2]).loss, **ROUNDING)


# ---- Other ways in ----
@pytest.mark.parametrize("start", [1, 0])
def test_padding_is_no_input_to_learn_from(start):
    """As in transformers' own models; where it is the start token, too, its embedding stays what it is."""
    model = tiny_model(decoder_start_token_id=start, tie_word_embeddings=False)
    model(SOURCE.masked_fill(SOURCE_MASK == 0, 0), SOURCE_MASK, labels=LABELS).loss.backward()
    gradient = model.get_input_embeddings().weight.grad
    assert not gradient[0].any()
    assert gradient[1].any() == (start == 1)


def test_embeddings_in_place_of_ids():
    model = tiny_model(decoder_vocab_size=40, share_encoder_decoder_embeddings=False)
    target = ids(3, 5, vocab_size=40)
    expected = model(SOURCE, SOURCE_MASK, target, labels=target)
    embeds = {
        "inputs_embeds": model.get_encoder().get_input_embeddings()(SOURCE),
        "decoder_inputs_embeds": model.get_decoder().get_input_embeddings()(target),
    }
    output = model(**embeds, attention_mask=SOURCE_MASK, labels=target)
    torch.testing.assert_close((output.loss, output.logits), (expected.loss, expected.logits), **BITWISE)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"decoder_input_ids": TARGET}, "exactly one"),
        ({"input_ids": SOURCE}, "exactly one.*labels"),
        ({**PAIR, "inputs_embeds": torch.zeros(3, 7, D_MODEL)}, "exactly one"),
        ({**PAIR, "decoder_inputs_embeds": torch.zeros(3, 5, D_MODEL)}, "exactly one"),
    ],
    ids=["no source", "no target", "two sources", "two targets"],
)
def test_missing_and_double_input(inputs, message):
    with pytest.raises(ValueError, match=message):
        tiny_model()(**inputs)


def test_encoder_outputs_in_place_of_a_source():
    model = tiny_model()
    expected = model(**PAIR, **MASKS).logits
    bare = model.get_encoder()(SOURCE, SOURCE_MASK).last_hidden_state
    for given in (BaseModelOutput(bare), (bare,), [bare]):
        output = model(encoder_outputs=given, decoder_input_ids=TARGET, **MASKS)
        torch.testing.assert_close((output.logits, output.encoder_last_hidden_state), (expected, bare), **BITWISE)
    encoded = model.get_encoder()(SOURCE, SOURCE_MASK, output_hidden_states=True, output_attentions=True)
    assert isinstance(encoded, BaseModelOutput)
    for given in (encoded, encoded.to_tuple()):  # states and attentions are handed on
        output = model(encoder_outputs=given, decoder_input_ids=TARGET, **MASKS)
        torch.testing.assert_close(output.encoder_hidden_states, encoded.hidden_states, **BITWISE)
        torch.testing.assert_close(output.encoder_attentions, encoded.attentions, **BITWISE)


@pytest.mark.parametrize("keep", [2, torch.tensor([0, 3])], ids=str)
def test_logits_to_keep(keep):
    model = tiny_model()
    expected = model(**PAIR).logits
    expected = expected[:, -keep:] if isinstance(keep, int) else expected[:, keep]
    kept_labels = LABELS[:, -keep:] if isinstance(keep, int) else LABELS[:, keep]
    output = model(**PAIR, labels=LABELS, logits_to_keep=keep)
    torch.testing.assert_close(output.logits, expected, **ROUNDING)
    torch.testing.assert_close(output.loss, F.cross_entropy(expected.flatten(0, 1), kept_labels.flatten()), **ROUNDING)


def test_masks_of_four_dimensions():
    """What each token may look at, said in full, is what the padding masks say in short."""
    model = tiny_model()
    causal = torch.ones(5, 5).tril().bool()
    full = {
        "attention_mask": SOURCE_MASK.bool()[:, None, None].expand(-1, 1, 7, -1),
        "decoder_attention_mask": (TARGET_MASK.bool()[:, None] & causal)[:, None],
    }
    memory = model.get_encoder()(SOURCE, SOURCE_MASK)
    inputs = {"encoder_outputs": memory, "attention_mask": SOURCE_MASK, "decoder_input_ids": TARGET}
    expected = model(**inputs, decoder_attention_mask=TARGET_MASK).logits
    output = model(**inputs, decoder_attention_mask=full["decoder_attention_mask"]).logits
    right = TARGET_MASK.bool()
    torch.testing.assert_close(output[right], expected[right], **ROUNDING)
    # Bidirectional: a full mask doesn't tell where a sentence begins, so only the one padded on the right agrees.
    states = model.get_encoder()(SOURCE, full["attention_mask"]).last_hidden_state
    torch.testing.assert_close(states[0, :5], memory.last_hidden_state[0, :5], **ROUNDING)


# ---- The loss ----
@pytest.mark.parametrize("as_tensor", [False, True])
def test_num_items_in_batch(as_tensor):
    """Parts of a batch that know how many targets the whole has add up to its loss and its gradient."""
    model = tiny_model(label_smoothing=0.1).train()
    labels = pad_rows(SENTENCES, "right", -100)  # unequal: a mean of means would be another number
    count = (labels != -100).sum() if as_tensor else int((labels != -100).sum())
    whole = model(SOURCE, labels=labels).loss
    parts = [model(SOURCE[i], labels=labels[i], num_items_in_batch=count).loss for i in ([0], [1, 2])]
    torch.testing.assert_close(sum(parts), whole, **ROUNDING)
    assert abs(sum(model(SOURCE[i], labels=labels[i]).loss for i in ([0], [1, 2])) / 2 - whole) > 1e-3
    torch.testing.assert_close(gradients(model, sum(parts)), gradients(model, whole), **ROUNDING)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return VanillaTransformerTokenizerFast.from_pretrained(tiny_checkpoint)


def translations(tokenizer, count=8):
    """Pairs of unequal lengths, as a tokenized dataset has them."""
    numbers = ["one", "two two", "three", "four four four", "five", "six six", "seven", "eight"][:count]
    return [dict(tokenizer(number), labels=tokenizer(number[::-1])["input_ids"]) for number in numbers]


# ---- Training with the stock Trainer ----
def trainer_of(model, tokenizer, folder, **arguments):
    settings = {"max_steps": 6, "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no"}
    data, name = translations(tokenizer), tokenizer.name_or_path
    return stock_trainer(name, folder, model, data, **{**settings, **arguments})


def losses_of(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer(tokenizer, tmp_path):
    """The loss falls and every parameter moves; two halves of a batch, accumulated, are the whole."""
    model = tiny_model(vocab_size=len(tokenizer), position_encoding="learned", output_bias=True)
    before = copy.deepcopy(model)
    halves = copy.deepcopy(model)
    losses = losses_of(trainer_of(model, tokenizer, tmp_path, label_smoothing_factor=0.1))
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5
    for (name, parameter), old in zip(model.named_parameters(), before.parameters(), strict=True):
        assert parameter.requires_grad
        assert not torch.equal(parameter, old), name
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = trainer_of(halves, tokenizer, tmp_path, label_smoothing_factor=0.1, **accumulated)
    # Logged losses are rounded to four places; Adam makes more of rounding than the loss does, by the sixth step.
    assert losses_of(trainer) == pytest.approx(losses, abs=2e-3)


@pytest.mark.parametrize("max_length", [None, 6])
def test_predict_with_generate(tokenizer, tmp_path, max_length):
    model = tiny_model(vocab_size=len(tokenizer))
    model.generation_config.max_extra_length = 8
    features = translations(tokenizer)
    arguments = {"predict_with_generate": True, "per_device_eval_batch_size": 3, "generation_num_beams": 2}
    trainer = trainer_of(model, tokenizer, tmp_path, generation_max_length=max_length, **arguments)
    first = trainer.evaluate()
    assert trainer.evaluate()["eval_loss"] == first["eval_loss"]  # nor did the first change what the second does
    collated = DataCollatorForSeq2Seq(tokenizer, model=model)(features)
    assert first["eval_loss"] == pytest.approx(model(**collated).loss.item(), abs=0.05)  # a mean of batches' means
    prediction = trainer.predict(features)
    hypotheses = [row[row >= 0].tolist() for row in prediction.predictions]
    for feature, hypothesis in zip(features, hypotheses, strict=True):
        limit = max_length or len(feature["input_ids"]) + 8 + 1
        alone = model.generate(torch.tensor([feature["input_ids"]]), num_beams=2, max_length=limit)[0].tolist()
        assert len(alone) <= limit
        assert hypothesis[: len(alone)] == alone
        assert {*hypothesis[len(alone) :]} <= {tokenizer.pad_token_id, tokenizer.eos_token_id}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant):
    """Computing activations twice changes neither loss nor gradient, with dropout as without."""
    model = tiny_model(dropout=0.1, attention_dropout=0.1).train()
    assert model.supports_gradient_checkpointing

    def step():
        torch.manual_seed(0)
        loss = model(SOURCE, SOURCE_MASK, labels=LABELS).loss
        return loss.detach(), gradients(model, loss)

    expected = step()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    assert model.is_activation_checkpointing
    calls = []
    model.get_encoder().layers[0].feed_forward.register_forward_hook(lambda *args: calls.append(1))
    torch.testing.assert_close(step(), expected, **ROUNDING)  # sums of the same numbers in another order
    assert len(calls) == 2
    assert model(**PAIR, use_cache=True).logits.isfinite().all()  # no cache while it is on
    model.activation_checkpointing_disable()
    torch.testing.assert_close(step(), expected, **BITWISE)


# ---- Which parameters are one ----
ENCODER, DECODER = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
HEAD, BIAS = "lm_head.weight", "lm_head.bias"
APART = {"share_encoder_decoder_embeddings": False}
UNTIED = {"tie_word_embeddings": False}
MODES = {  # fields, and which are one matrix
    "one matrix": ({}, {ENCODER, DECODER, HEAD}),
    "projection apart": (UNTIED, {ENCODER, DECODER}),
    "source apart": (APART, {DECODER, HEAD}),
    "source apart, target of its own size": ({**APART, "decoder_vocab_size": 40}, {DECODER, HEAD}),
    "three matrices": ({**APART, **UNTIED}, set()),
    "three matrices, target of its own size": ({**APART, **UNTIED, "decoder_vocab_size": 40}, set()),
}
every_mode = pytest.mark.parametrize(("fields", "one"), MODES.values(), ids=MODES.keys())


def assert_tied(model, one):
    """Of the vocabulary's matrices exactly those named are one tensor, and one parameter to an optimizer."""
    by_address = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_address.setdefault((parameter.data_ptr(), id(parameter)), set()).add(name)
    matrices = {ENCODER, DECODER, HEAD}
    expected = [one] * bool(one) + [{name} for name in matrices - one]
    assert sorted(map(sorted, expected)) == sorted(sorted(names) for names in by_address.values() if names & matrices)
    assert all(len(names) == 1 for names in by_address.values() if not names & matrices)


def learning_step(model):
    target = ids(3, 5, vocab_size=min(40, model.config.target_vocab_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(ids(3, 7, vocab_size=40), labels=target).loss.backward()
    optimizer.step()
    model.zero_grad()
    model.eval()


def saved_and_loaded(model, folder, **options):
    model.save_pretrained(folder)
    return VanillaTransformerForConditionalGeneration.from_pretrained(folder, **options)


def with_the_state_of(model, folder):
    other = VanillaTransformerForConditionalGeneration(model.config).eval()
    other.load_state_dict(model.state_dict())
    return other


COPIES = {
    "deepcopy": lambda model, folder: copy.deepcopy(model),
    "pickle": lambda model, folder: pickle.loads(pickle.dumps(model)),
    "state_dict": with_the_state_of,
    "file": saved_and_loaded,
}


@every_mode
@pytest.mark.parametrize("how", COPIES)
def test_ties_and_copies(fields, one, how, tmp_path):
    """Ties hold at birth, after a step, and in a copy, which is the same bit by bit and learns by itself."""
    model = tiny_model(**fields, output_bias=how != "pickle")
    assert_tied(model, one)
    learning_step(model)
    assert_tied(model, one)
    other = COPIES[how](model, tmp_path)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), **BITWISE)
    assert_tied(other, one)
    assert not other.training
    inputs = (SOURCE, SOURCE_MASK, ids(3, 5, vocab_size=40))
    expected = model(*inputs).logits
    torch.testing.assert_close(other(*inputs).logits, expected, **BITWISE)
    assert len(other(*inputs, output_attentions=True).cross_attentions) == 2
    learning_step(other)
    assert_tied(other, one)
    torch.testing.assert_close(model(*inputs).logits, expected, **BITWISE)
    if how == "file":  # which has each matrix once
        names = load_file(tmp_path / "model.safetensors").keys()
        assert len({ENCODER, DECODER, HEAD} & names) == 3 - len(one) + bool(one)
        assert not [name for name in names if "position" in name]  # computed, never saved
        assert BIAS in names


@every_mode
def test_replaced_embeddings_stay_tied(fields, one):
    model = tiny_model(**fields)
    assert model.get_input_embeddings() is model.get_encoder().get_input_embeddings()
    source = torch.nn.Embedding(V, D_MODEL)
    model.set_input_embeddings(source)
    assert model.get_input_embeddings() is model.get_encoder().get_input_embeddings() is source
    assert (model.get_decoder().get_input_embeddings() is source) == ({ENCODER, DECODER} <= one)
    model.tie_weights()
    assert model.get_input_embeddings().weight is source.weight
    assert_tied(model, one)
    target_size = model.config.target_vocab_size
    assert model(SOURCE, decoder_input_ids=ids(3, 5, vocab_size=40)).logits.shape == (3, 5, target_size)
    head = torch.nn.Linear(D_MODEL, target_size, bias=False)
    model.set_output_embeddings(head)
    assert model.get_output_embeddings() is head
    model.tie_weights()
    assert_tied(model, one)


RESIZED = [
    *((mode, "encoder", rows) for mode in MODES for rows in (57, 45)),
    *((mode, "decoder", 47) for mode in MODES if "target of its own size" in mode),
]


@pytest.mark.parametrize(("mode", "side", "new_size"), RESIZED)
def test_resized_vocabulary(mode, side, new_size, tmp_path):
    """Old rows stay, ties stay, the configuration follows, and a file brings it all back."""
    fields, one = MODES[mode]
    model = tiny_model(**fields, output_bias=True)
    if side == "encoder":
        resize, rows, target_rows = model.resize_token_embeddings, new_size, fields.get("decoder_vocab_size", new_size)
    else:
        resize, rows, target_rows = model.resize_decoder_token_embeddings, V, new_size
    learning_step(model)  # so that the bias isn't all zeros
    old = {name: value.clone() for name, value in model.state_dict().items()}
    assert resize(new_size) is getattr(model.model, side).embed_tokens
    assert (model.config.vocab_size, model.config.target_vocab_size) == (rows, target_rows)
    sizes, new = {ENCODER: rows, DECODER: target_rows, HEAD: target_rows, BIAS: target_rows}, model.state_dict()
    assert new.keys() == old.keys()
    for name, value in old.items():
        assert len(new[name]) == sizes.get(name, len(value)), name
        kept = min(len(new[name]), len(value))
        assert torch.equal(new[name][:kept], value[:kept]), name
        assert new[name].isfinite().all()
    assert model.get_encoder().embed_tokens.num_embeddings == rows
    assert model.get_decoder().embed_tokens.num_embeddings == target_rows
    assert model.get_output_embeddings().out_features == target_rows
    assert_tied(model, one)
    top = torch.tensor([[rows - 1]])
    assert model(top, decoder_input_ids=top.clamp(max=target_rows - 1)).logits.shape == (1, 1, target_rows)
    learning_step(model)
    assert_tied(model, one)
    reloaded = saved_and_loaded(model, tmp_path)
    torch.testing.assert_close(reloaded.state_dict(), model.state_dict(), **BITWISE)
    assert_tied(reloaded, one)


# ---- Files and copies ----
def test_offloaded_weights(tmp_path):
    """Weights that wait elsewhere come in layer by layer; the cache isn't moved with them."""
    model = tiny_model()
    expected = model.generate(SOURCE, attention_mask=SOURCE_MASK, max_new_tokens=5)
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert offloaded.lm_head.weight.device.type == "meta"
    assert torch.equal(offloaded.generate(SOURCE, attention_mask=SOURCE_MASK, max_new_tokens=5), expected)


LOADED = {
    "as asked for": lambda model, folder: saved_and_loaded(model, folder, dtype=torch.bfloat16),
    "as saved": lambda model, folder: saved_and_loaded(model.to(torch.bfloat16), folder),
    "from its configuration": lambda model, _: type(model)._from_config(model.config, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("how", LOADED)
def test_dtype_of_a_loaded_model(how, tmp_path):
    """Weights take the type asked for; the positional table stays what it is in float32."""
    loaded = LOADED[how](tiny_model(), tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    for stack in (loaded.get_encoder(), loaded.get_decoder()):
        assert torch.equal(stack.embed_positions.table, modeling.sinusoidal_table(64, D_MODEL))
        assert stack.embed_positions.table.dtype == torch.float32
    assert loaded(**PAIR).logits.dtype == torch.bfloat16
    assert_tied(loaded, {ENCODER, DECODER, HEAD})


# ---- Compiled ----
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("backend", "encoding", "implementation"),
    [pytest.param("inductor", "paper", "sdpa", marks=pytest.mark.hard), ("eager", "learned", "eager")],
)
def test_compiled_forward_and_backward(backend, encoding, implementation, request):
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler")
    torch.compiler.reset()
    request.addfinalizer(torch.compiler.reset)
    one_layer = {"encoder_layers": 1, "decoder_layers": 1}
    model = tiny_model(**one_layer, position_encoding=encoding, attn_implementation=implementation)
    shorter = {"input_ids": SOURCE[:, :4], "attention_mask": SOURCE_MASK[:, :4], "labels": LABELS[:, :3]}
    others = [{**PAIR, **MASKS, "labels": LABELS}] if backend == "inductor" else []  # another shape is compiled anew
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for given in [*others, shorter]:
        output, expected = compiled(**given), model(**given)
        torch.testing.assert_close((output.logits, output.loss), (expected.logits, expected.loss), **ROUNDING)
    torch.testing.assert_close(gradients(model, output.loss), gradients(model, expected.loss), **ROUNDING)


# ---- What transformers is told about the model ----
def test_nothing_is_said_while_a_model_is_made_saved_and_loaded(tmp_path, said):
    saved_and_loaded(tiny_model(), tmp_path)(**PAIR, **MASKS, labels=LABELS)
    assert said == []
