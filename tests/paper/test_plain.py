"""The model is plain PyTorch: whatever works on any module works on it, and says the same as its formulas."""

import shutil

import pytest
import torch
from test_paper import LABELS, PAD, SOURCE, model_of
from torch.func import functional_call, grad, vmap
from transformers.dynamic_module_utils import get_class_from_dynamic_module

# float64: values are of order 1 and sums have a few dozen terms, so that rounding stays below 1e-13.
EXACT = {"rtol": 1e-10, "atol": 1e-12}
# float32 keeps 24 bits: rounding is below 1e-5 where logits are of order 1.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


def make(dtype=torch.float64, dropout=0.0, attention="eager", **fields):
    rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), dropout)
    return model_of(dtype, attention, **rates, **fields)


def batch_of(padded):
    source, labels = (
        (SOURCE, LABELS) if padded else (SOURCE.masked_fill(SOURCE == PAD, 20), LABELS.where(LABELS > 0, 21))
    )
    return {"input_ids": source, "attention_mask": (source != PAD).long(), "labels": labels}


def loss_function(model):
    """The loss as a pure function of parameters and batch, as torch.func wants it."""
    buffers = dict(model.named_buffers())

    def loss(parameters, batch):
        return functional_call(model, (parameters, buffers), kwargs={**batch, "use_cache": False}).loss

    return loss


def parameters_of(model):
    return {name: value.detach() for name, value in model.named_parameters()}


def backward(model, batch):
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: value.grad for name, value in model.named_parameters() if value.requires_grad}


# ---- torch.func and derivatives of derivatives ----
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_grad_is_backward(training, padded):
    """With dropout too: the same seed drops the same."""
    model, batch = make(dropout=0.2).train(training), batch_of(padded)
    torch.manual_seed(5)
    expected = backward(model, batch)
    torch.manual_seed(5)
    found = grad(loss_function(model))(parameters_of(model), batch)
    torch.testing.assert_close(found, expected, **EXACT)
    assert all(value.abs().max() > 1e-6 for name, value in found.items() if "k_proj.bias" not in name)


def test_gradients_of_each_sample():
    """vmap over the sentences of a batch gives what each gives alone."""
    model, batch = make().train(), batch_of(padded=True)
    loss, parameters = loss_function(model), parameters_of(model)

    def loss_of_one(parameters, one):
        return loss(parameters, {name: value[None] for name, value in one.items()})

    found = vmap(grad(loss_of_one), in_dims=(None, 0))(parameters, batch)
    for row in range(len(SOURCE)):
        expected = backward(model, {name: value[row : row + 1] for name, value in batch.items()})
        torch.testing.assert_close({name: value[row] for name, value in found.items()}, expected, **EXACT)


# ---- No look at values ----
def for_a_training_step(attention, dtype, device):
    """A model and a padded batch; for sdpa without masks, as transformers' own function for those reads their `all()`.

    Ours makes a mask of padding before a target's first token, unless padding can't be told from the start token.
    """
    model = make(dtype=dtype, dropout=0.1, attention=attention, label_smoothing=0.1)
    batch = batch_of(padded=True)
    if attention == "sdpa":
        model.config.decoder_start_token_id = PAD
        del batch["attention_mask"]
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    return model.to(device), {name: value.to(device) for name, value in batch.items()}


def a_training_step(model, batch):
    model.train()(**batch, use_cache=False).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_training_step_needs_no_values(attention):
    """On the meta device tensors have none."""
    model, batch = for_a_training_step(attention, torch.float32, "meta")
    a_training_step(model, batch)
    with pytest.raises((NotImplementedError, RuntimeError)):  # that a look at values would be found
        a_training_step(model, {**batch, "num_items_in_batch": torch.ones((), device="meta"), "skip_logits": True})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_training_step_waits_for_nothing(attention, dtype):
    model, batch = for_a_training_step(attention, dtype, "cuda")
    a_training_step(model, batch)  # the first one loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):  # that the mode finds what it looks for
            batch["labels"].max().item()
        a_training_step(model, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- Edited formulas ----
CONFIGURATION, MODELING, PLAN = ("configuration", "modeling", "plan")
# What a reader may try: a file, a formula in it, what he makes of it, and the attention implementations it is about.
EDITS = {
    "as it is": (MODELING, "", "", ()),
    "activation": (MODELING, "self.activation(self.fc1(x))", "torch.tanh(self.fc1(x))", ("eager", "sdpa")),
    "residual": (
        MODELING,
        "super().forward(x + self.dropout(sublayer(x)))",
        "x + super().forward(self.dropout(sublayer(x)))",
        ("eager", "sdpa"),
    ),
    "scale in the configuration": (CONFIGURATION, "math.sqrt(self.d_model)", "2.0", ("eager", "sdpa")),
    "no look at the source": (
        MODELING,
        "self.encoder_attn(x, memory=memory, mask=cross, **kwargs)[0]",
        "0 * self.encoder_attn(x, memory=memory, mask=cross, **kwargs)[0]",
        ("eager", "sdpa"),
    ),
    "equation 1": (MODELING, "key.transpose(-2, -1)) * scaling", "key.transpose(-2, -1)) * scaling**2", ("eager",)),
    "projection": (MODELING, "= self.lm_head(hidden)", "= self.lm_head(hidden.tanh())", ("eager", "sdpa")),
    "length penalty": (PLAN, "return ((5 + length) / 6)", "return ((1 + length) / 2)", ()),
}  # fmt: skip


def probe(model):
    """What an edited model says: forward, greedy decoding with the cache, beam search, for each implementation."""
    found = {}
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(3, 23, (3, 6), generator=generator)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0]])
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        options = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}
        options |= {"attention_mask": mask, "suppress_tokens": [2]}
        greedy = model.generate(source, num_beams=1, **options)
        beams = model.generate(source, num_beams=3, **options, output_scores=True)
        prompt = torch.ones(3, 1, dtype=torch.long)
        with torch.no_grad():
            for _ in range(5):  # without a cache, everything anew at each step
                logits = model(source, attention_mask=mask, decoder_input_ids=prompt, use_cache=False).logits
                best = logits[:, -1].index_fill(-1, torch.tensor([2]), -torch.inf).argmax(-1, keepdim=True)
                prompt = torch.cat([prompt, best], dim=1)
            total = model.compute_transition_scores(beams.sequences, beams.scores, beams.beam_indices).sum(dim=1)
        found[attention] = {
            "logits": logits,
            "naive": prompt,
            "greedy": greedy.sequences,
            "steps": torch.stack(greedy.logits, dim=1),
            "divisor": total / beams.sequences_scores,
        }
    return found


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """What each edit of a checkpoint's code makes of its model."""
    source, found = tmp_path_factory.mktemp("edited") / "plain", {}
    make(dtype=torch.float32).save_pretrained(source)
    for number, (edit, (part, old, new, _)) in enumerate(EDITS.items()):
        folder = shutil.copytree(source, source.with_name(f"edit_{number}"))
        path = folder / f"{part}_vanilla_transformer.py"
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1 or not old, f"{old!r} is to be found once in {path.name}"
        path.write_text(text.replace(old, new) if old else text, encoding="utf-8")
        name = "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration"
        found[edit] = probe(get_class_from_dynamic_module(name, str(folder)).from_pretrained(folder))
    return found


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_formula_counts_in_forward_and_in_generate(edited, edit, attention):
    found, plain = edited[edit][attention], edited["as it is"][attention]
    assert torch.equal(found["greedy"], found["naive"])
    torch.testing.assert_close(found["steps"], found["logits"], **ROUNDING)
    if attention in EDITS[edit][3]:
        assert (found["logits"][:, 0] - plain["logits"][:, 0]).abs().max() > 1e-3
        assert (found["steps"][:, 0] - plain["steps"][:, 0]).abs().max() > 1e-3
    else:
        assert torch.equal(found["logits"], plain["logits"])
        assert torch.equal(found["greedy"], plain["greedy"])


def test_an_edited_length_penalty_counts(edited):
    length = 5  # tokens of each hypothesis, none of which ends
    for edit, expected in (("as it is", (5 + length) / 6), ("length penalty", (1 + length) / 2)):
        divisor = edited[edit]["sdpa"]["divisor"]
        torch.testing.assert_close(divisor, torch.full_like(divisor, expected**0.6), **ROUNDING)
