"""R-Drop, against its formula in float64."""

from pathlib import Path

import pytest
import test_training
import torch
import torch.nn.functional as F
from test_training import losses, rows
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.checkpoints.completeness import OPTIMIZER_OF_FSDP
from hf_vanilla_transformer.errors import CheckpointError
from hf_vanilla_transformer.training import rdrop
from hf_vanilla_transformer.training.arguments import VanillaTransformerTrainingArguments
from hf_vanilla_transformer.training.options import RecipeError
from hf_vanilla_transformer.training.rdrop import rdrop_loss
from hf_vanilla_transformer.training.recipe import parse_recipe
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer

EPS, ALPHA = 0.1, 3.0
RDROP = {"rdrop_alpha": ALPHA}


def trainer_of(checkpoint: Path, folder: Path, dropout: float = 0.0, **options) -> VanillaTransformerTrainer:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    data = {"train_dataset": rows(tokenizer, 24), "eval_dataset": rows(tokenizer, 6)}
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, dropout=dropout, label_smoothing=EPS)
    return test_training.trainer_of(checkpoint, folder, model=model, **data, **options)


def cross_entropy(logits, labels):
    log_p = logits - logits.exp().sum(-1, keepdim=True).log()
    return -((1 - EPS) * log_p[torch.arange(len(labels)), labels] + EPS * log_p.mean(-1)).sum()


def divergence(one, other):
    p, q = one.softmax(-1), other.softmax(-1)
    return (p * (p / q).log()).sum()


def formula(first, second, labels):
    """The paper's loss, summed over targets, of logits in float64, (N, V) each."""
    both = cross_entropy(first, labels) + cross_entropy(second, labels)
    return both + ALPHA / 2 * (divergence(first, second) + divergence(second, first))


@pytest.mark.parametrize("per_chunk", [1, 4, 100])
def test_loss_and_gradients_are_the_papers(monkeypatch, per_chunk):
    number, vocab_size, items = 11, 7, 50
    monkeypatch.setattr(rdrop, "LOGITS_PER_CHUNK", per_chunk * vocab_size)
    logits = torch.randn(2 * number, vocab_size, dtype=torch.float64).requires_grad_()
    labels = torch.randint(vocab_size, (number,))
    loss = rdrop_loss(logits, labels.repeat(2), torch.tensor(items), EPS, alpha=ALPHA)
    expected = formula(*logits.chunk(2), labels) / items
    gradients = [torch.autograd.grad(one, logits)[0] for one in (loss, expected)]
    # The same sums in another order, in float64.
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
    mean = rdrop_loss(logits, labels.repeat(2), label_smoothing=EPS, alpha=ALPHA)
    torch.testing.assert_close(mean, expected * items / number, rtol=1e-12, atol=0)
    assert rdrop_loss(logits[:0], labels[:0], alpha=ALPHA).item() == 0


def batch_of(trainer, *places):
    columns = ("input_ids", "attention_mask", "labels")
    return trainer.data_collator([{name: trainer.train_dataset[n][name] for name in columns} for n in places])


def test_rdrop_of_a_model_is_that_of_its_predictions(tiny_checkpoint, tmp_path):
    """The same dropout twice: in the trainer's loss, and in logits that the formula takes."""
    trainer = trainer_of(tiny_checkpoint, tmp_path, dropout=0.3, **RDROP)
    batch, model = batch_of(trainer, 3, 4, 5), trainer.model.double().train()
    torch.manual_seed(1)
    loss = trainer.compute_loss(model, dict(batch))
    torch.manual_seed(1)
    logits = model(**{name: torch.cat([x, x]) for name, x in batch.items()}).logits
    real = batch["labels"] != -100
    first, second = (half[real] for half in logits.chunk(2))
    assert not torch.allclose(first, second, atol=1e-2)  # they had other dropout
    expected = formula(first, second, batch["labels"][real]) / real.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_padding_changes_nothing(tiny_checkpoint, tmp_path):
    trainer = trainer_of(tiny_checkpoint, tmp_path, **RDROP)
    batch, model = batch_of(trainer, 3, 4, 5), trainer.model.double().train()
    fill = {"input_ids": model.config.pad_token_id, "attention_mask": 0, "labels": -100}
    padded = {name: F.pad(x, (0, 5), value=fill[name]) for name, x in batch.items()}
    both = [trainer.compute_loss(model, dict(one)) for one in (batch, padded)]
    torch.testing.assert_close(*both, rtol=1e-12, atol=0)


def test_bfloat16_and_shortcuts_give_nearly_the_same_losses(tiny_checkpoint, tmp_path):
    plain, mixed = (
        trainer_of(tiny_checkpoint, tmp_path, bf16=bf16, training_shortcuts=fast, seed=3, **RDROP)
        for bf16, fast in ((False, False), (True, True))
    )
    for trainer in (plain, mixed):
        trainer.train()
    logged = [losses(trainer) for trainer in (plain, mixed)]
    assert logged[0] != logged[1]
    assert all(weight.dtype == torch.float32 for weight in mixed.model.parameters())
    assert logged[1] == pytest.approx(logged[0], rel=0.02)  # bfloat16 has 8 bits


def test_evaluations_and_the_model_are_as_without(tiny_checkpoint, tmp_path):
    plain, other = trainer_of(tiny_checkpoint, tmp_path), trainer_of(tiny_checkpoint, tmp_path, **RDROP)
    assert other.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    loss_function = other.model.loss_function
    other.train()
    assert other.model.loss_function is loss_function


def test_what_the_options_need_of_a_checkpoint_is_there(tiny_checkpoint, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer_of(tiny_checkpoint, tmp_path, **settings).train()
    checkpoint, trainer = tmp_path / "checkpoint-1", trainer_of(tiny_checkpoint, tmp_path, **settings)
    trainer.args.fp16 = True  # which needs a GPU to train
    fix = "has no scaler.pt; remove it to resume from an earlier one, or leave fp16 out if the run had none"
    with pytest.raises(CheckpointError, match=fix):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    trainer.args.fp16 = False
    trainer.is_fsdp_enabled = True
    with pytest.raises(CheckpointError, match="checkpoint-1 was saved without FSDP; resume without it"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    trainer.is_fsdp_enabled = False
    (checkpoint / "optimizer.pt").rename(checkpoint / OPTIMIZER_OF_FSDP)
    with pytest.raises(CheckpointError, match="checkpoint-1 was saved with FSDP; resume with it"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / OPTIMIZER_OF_FSDP).unlink()
    with pytest.raises(CheckpointError, match=r"has no optimizer.pt; remove it to resume from an earlier one$"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_another_model_and_another_loss_are_refused(tiny_checkpoint, tmp_path):
    args = VanillaTransformerTrainingArguments(output_dir=str(tmp_path), learning_rate=0.1, **RDROP)
    with pytest.raises(RecipeError, match="is for this package's model, not Linear"):
        VanillaTransformerTrainer(model=torch.nn.Linear(1, 1), args=args)
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    with pytest.raises(RecipeError, match="needs the model's own loss; leave compute_loss_func out"):
        VanillaTransformerTrainer(model=model, args=args, compute_loss_func=lambda *_, **__: 0)
    model.compile()
    with pytest.raises(RecipeError, match=r"doesn't work with torch\.compile; give the model as it is"):
        VanillaTransformerTrainer(model=model, args=args)


def test_regularization_of_a_recipe_arrives(tmp_path):
    """Weight decay is on matrices alone: on no LayerNorm and no bias."""
    options = {"attention_dropout": 0.25, "activation_dropout": 0.125, "weight_decay": 0.01, "preset": "tiny"}
    _, model_options, args = parse_recipe([], {**options, "output_dir": str(tmp_path)})
    model = VanillaTransformerForConditionalGeneration(model_options.config(100))
    layer = model.model.decoder.layers[0]
    assert layer.self_attn.attention_dropout == layer.encoder_attn.attention_dropout == 0.25
    assert layer.feed_forward.dropout.p == 0.125
    optimizer = VanillaTransformerTrainer(model=model, args=args).create_optimizer()
    decays = {weight: group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    for name, weight in model.named_parameters():
        assert decays[weight] == (0.01 if weight.ndim == 2 else 0.0), name
