"""The trainer: section 5's schedule and loss, batches by tokens, resuming."""

import copy
import itertools
import math
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from small_runs import Poison
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from hf_vanilla_transformer import engine
from hf_vanilla_transformer.checkpoints.loading import tokenizer_fingerprint
from hf_vanilla_transformer.engine import memory
from hf_vanilla_transformer.training import trainer as training
from hf_vanilla_transformer.training.arguments import VanillaTransformerTrainingArguments
from hf_vanilla_transformer.training.callbacks import RATES
from hf_vanilla_transformer.training.evaluation import TranslationMetrics, by_length
from hf_vanilla_transformer.training.options import RecipeError
from hf_vanilla_transformer.training.run_facts import run_facts
from hf_vanilla_transformer.training.schedule import paper_learning_rate, peak_learning_rate
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer


def rows(tokenizer, number: int = 40) -> Dataset:
    sources = [f"{'twenty-one half past ' * (n % 5)}nine {n}" for n in range(number)]
    targets = [f"{'halb zehn ' * (n % 4)}einundzwanzig {n}" for n in range(number)]
    return Dataset.from_dict(dict(tokenizer(sources, text_target=targets)))


def arguments(folder: Path, **options) -> VanillaTransformerTrainingArguments:
    defaults = {"max_steps": 4, "per_device_train_batch_tokens": 256, "learning_rate": 0.01, "warmup_steps": 2}
    defaults |= {"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "predict_with_generate": False}
    return VanillaTransformerTrainingArguments(str(folder), **{**defaults, **options})


def trainer_of(checkpoint: Path, folder: Path, **options) -> VanillaTransformerTrainer:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    names = ("model", "train_dataset", "eval_dataset", "compute_metrics")
    others = {name: options.pop(name) for name in names if name in options}
    others.setdefault("model", AutoModelForSeq2SeqLM.from_pretrained(checkpoint))
    return VanillaTransformerTrainer(
        args=arguments(folder, **options),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        **{"train_dataset": rows(tokenizer), **others},
    )


def assert_resuming_is_bitwise(new_trainer: Callable[[], Seq2SeqTrainer], checkpoint: Path) -> None:
    """A run that resumes from a checkpoint of another ends with the same weights."""
    straight = new_trainer()
    straight.train()
    resumed = new_trainer()
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for name, value in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


@pytest.fixture
def warnings(monkeypatch):
    """What the trainer warns of."""
    warnings = []
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(training.logger, name, warnings.append)
    return warnings


def logged(trainer: Seq2SeqTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def losses(trainer: Seq2SeqTrainer) -> list[float]:
    return logged(trainer, "loss")


class Gradients(TrainerCallback):
    """Keeps the gradients of an update."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.of = {name: w.grad.double() for name, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("model", ["ours", "another"])
def test_without_a_learning_rate_it_is_the_papers(tiny_checkpoint, tmp_path, model):
    """As in a library call that leaves all to the defaults; the same arguments train models of other sizes."""
    options = {"learning_rate": None, "warmup_steps": 4, "learning_rate_factor": 0.5, "max_steps": 6}
    trainer = trainer_of(tiny_checkpoint, tmp_path, **options)
    if model == "another":
        trainer = other_trainer(tiny_checkpoint, trainer.args)
    trainer.train()
    d_model = trainer.model.config.d_model
    rates = logged(trainer, "learning_rate")
    paper = [0.5 * d_model**-0.5 * min(step**-0.5, step * 4**-1.5) for step in range(1, 7)]
    assert rates == pytest.approx(paper, rel=1e-12)
    assert trainer.args.learning_rate is None
    assert run_facts(trainer).recipe.learning_rate == pytest.approx(paper_learning_rate(d_model, 4, 0.5))


def test_a_warm_up_in_shares_needs_the_number_of_updates(tmp_path):
    model = SimpleNamespace(config=SimpleNamespace(d_model=16))
    args = arguments(tmp_path, learning_rate=None, warmup_steps=0.1, max_steps=50)
    assert peak_learning_rate(args, model) == paper_learning_rate(16, 5)
    args.max_steps = -1
    with pytest.raises(ValueError, match=r"warmup_steps=0.1 .* max_steps"):
        peak_learning_rate(args, model)
    with pytest.raises(ValueError, match=r"no d_model .* `learning_rate`"):
        peak_learning_rate(args, SimpleNamespace())
    args.learning_rate = 0.1
    assert peak_learning_rate(args, SimpleNamespace()) == 0.1


def test_the_stock_trainer_gives_the_same_loss_and_weights(tiny_checkpoint, tmp_path):
    """transformers' LabelSmoother over logits, its sampler and collator, against our loss without logits.

    Every weight moves.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    data = rows(tokenizer, 8)
    options = {"max_steps": 3, "per_device_train_batch_size": 8, "train_sampling_strategy": "sequential"}
    options["lr_scheduler_type"] = "linear"
    ours = trainer_of(tiny_checkpoint, tmp_path, train_dataset=data, per_device_train_batch_tokens=0, **options)
    ours.model.config.label_smoothing = 0.1
    names = ("learning_rate", "warmup_steps", "adam_beta2", "adam_epsilon", "max_grad_norm", "logging_steps")
    options |= {name: getattr(ours.args, name) for name in names} | {"label_smoothing_factor": 0.1}
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    stock = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(str(tmp_path), save_strategy="no", report_to="none", use_cpu=True, **options),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=data,
    )
    before = copy.deepcopy(model.state_dict())
    for trainer in (ours, stock):
        without_dropout(trainer.model)
        trainer.train()
    # Sums over the vocabulary in another order: float32 agrees to a few units in the last place.
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-5)
    for name, weight in ours.model.named_parameters():
        torch.testing.assert_close(weight, stock.model.get_parameter(name), rtol=1e-3, atol=1e-4, msg=name)
        assert not torch.equal(weight, before[name]), name


def test_training_sees_no_logits_and_evaluation_does(tiny_checkpoint, tmp_path):
    seen = []
    trainer = trainer_of(tiny_checkpoint, tmp_path, max_steps=1)
    trainer.eval_dataset = trainer.train_dataset
    trainer.model.register_forward_hook(lambda module, _, output: seen.append((module.training, output.logits is None)))
    trainer.train()
    trainer.evaluate()
    assert set(seen) == {(True, True), (False, False)}


class WithoutKwargs(MarianMTModel):
    def forward(self, input_ids=None, attention_mask=None, labels=None):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def other_trainer(tiny_checkpoint, args, kind=MarianMTModel):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    config = MarianConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=1, forced_eos_token_id=2,
    )  # fmt: skip
    return VanillaTransformerTrainer(
        model=kind(config),
        args=args,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        train_dataset=rows(tokenizer),
    )


@pytest.mark.parametrize("accumulation", [1, 3])
def test_updates_are_the_samplers_batches(tiny_checkpoint, tmp_path, accumulation):
    trainer = trainer_of(tiny_checkpoint, tmp_path, max_steps=6, gradient_accumulation_steps=accumulation)
    batches = watched(trainer)
    trainer.train()
    data, sampler, expected = trainer.train_dataset, trainer.get_train_dataloader().batch_sampler, []
    for epoch in range(10):
        sampler.set_epoch(epoch)
        expected += [[data[place]["labels"] for place in batch] for batch in sampler]
    plain = [[row[row != -100].tolist() for row in batch["labels"]] for batch in batches]
    assert plain == expected[: 6 * accumulation]


def test_weights_that_no_checkpoint_has_are_not_trained(tiny_checkpoint, tmp_path):
    """From 5.24 on, transformers would train the sinusoids of its Marian, and not save them."""
    args = trainer_of(tiny_checkpoint, tmp_path, max_steps=2).args
    other_trainer(tiny_checkpoint, args).model.save_pretrained(tmp_path / "marian")
    model = MarianMTModel.from_pretrained(tmp_path / "marian")
    before = copy.deepcopy(model.state_dict())
    other_trainer(tiny_checkpoint, args, kind=lambda config: model).train()
    model.save_pretrained(tmp_path / "saved")
    saved = MarianMTModel.from_pretrained(tmp_path / "saved").state_dict()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert "model.encoder.layers.0.fc1.weight" in changed
    assert not any("embed_positions" in name for name in changed)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("kind", "alpha"), [(None, 0), (None, 3), (MarianMTModel, 0), (WithoutKwargs, 0)])
def test_accumulating_is_the_same_as_larger_batches(tiny_checkpoint, tmp_path, kind, alpha):
    """Three batches an update against their union: the loss is a mean over the update's tokens.

    Marian takes the number of tokens and ignores it; the last kind can't be given it.
    """
    trainer = trainer_of(tiny_checkpoint, tmp_path, max_steps=1, gradient_accumulation_steps=3, rdrop_alpha=alpha)
    trainer = trainer if kind is None else other_trainer(tiny_checkpoint, trainer.args, kind)
    model = copy.deepcopy(without_dropout(trainer.model)).train()
    trainer.add_callback(gradients := Gradients())
    trainer.train()
    batches = list(trainer.get_train_dataloader().batch_sampler)[:3]
    places = [place for batch in batches for place in batch]
    batch = trainer.data_collator([trainer.train_dataset[place] for place in places])
    loss = model(**batch).loss * (2 if alpha else 1)  # R-Drop's two passes agree without dropout
    loss.backward()
    assert losses(trainer) == pytest.approx([loss.item()], rel=1e-5)
    trained = {name: w for name, w in model.named_parameters() if w.grad is not None and "embed_positions" not in name}
    expected = torch.cat([w.grad.flatten() for w in trained.values()])
    found = torch.cat([gradients.of[name].flatten() for name in trained])
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert trainer.target_tokens == (batch["labels"] != -100).sum()


def without_dropout(model):
    for module in model.modules():
        for name in ("p", *RATES):  # of torch's module, and of models that call the function
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def watched(trainer):
    """What a trainer's model is given from now on."""
    batches = []
    trainer.model.register_forward_pre_hook(lambda _, args, kwargs: batches.append(kwargs), with_kwargs=True)
    return batches


def targets_in(batches):
    return sum(int((batch["labels"] != -100).sum()) for batch in batches)


@pytest.mark.parametrize("counts", ["non_padding", "no"])
def test_tokens_are_counted(tiny_checkpoint, tmp_path, monkeypatch, counts):
    """The Trainer's own count, of source tokens, is left to it, and only where it is told to.

    A resumed run counts its speed from where it goes on, here by a clock that is one second later at each look.
    """
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    options = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 2, "include_num_input_tokens_seen": counts}
    trainer = trainer_of(tiny_checkpoint, tmp_path, **options)
    batches = watched(trainer)
    trainer.train()
    assert logged(trainer, "target_tokens") == [targets_in(batches[:2]), targets_in(batches)]
    source = sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert trainer.state.num_input_tokens_seen == (source if counts == "non_padding" else 0)
    resumed = trainer_of(tiny_checkpoint, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.target_tokens == trainer.target_tokens
    assert resumed.state.num_input_tokens_seen == trainer.state.num_input_tokens_seen
    assert logged(resumed, "tokens_per_second") == logged(trainer, "tokens_per_second")
    resumed.train()  # from the beginning, with the same trainer
    assert resumed.target_tokens == trainer.target_tokens
    assert logged(resumed, "tokens_per_second") == logged(trainer, "tokens_per_second")


def test_the_fingerprint_is_that_of_the_tokenizer_without_dropout(tiny_checkpoint, tmp_path):
    trainer = trainer_of(tiny_checkpoint, tmp_path, max_steps=1)
    expected = tokenizer_fingerprint(trainer.processing_class)
    trainer.processing_class.backend_tokenizer.model.dropout = 0.9
    trainer.train()
    assert trainer.model.config.tokenizer_fingerprint == expected
    assert trainer.processing_class.backend_tokenizer.model.dropout == pytest.approx(0.9)


def test_a_schedule_of_the_users_own_keeps_its_rate(tiny_checkpoint, tmp_path):
    def trainer(rate):
        it = trainer_of(tiny_checkpoint, tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
        it.optimizer = torch.optim.SGD(it.model.parameters(), lr=rate)
        it.lr_scheduler = torch.optim.lr_scheduler.StepLR(it.optimizer, 10)
        return it

    trainer(0.01).train()
    trainer(0.01).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with pytest.raises(RecipeError, match="with this scheduler, a resumed run can't change its learning rate"):
        trainer(0.02).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("length", [{"max_steps": 6}, {"max_steps": -1, "num_train_epochs": 1.5}])
def test_a_run_resumed_at_its_end_trains_no_more(tiny_checkpoint, tmp_path, length):
    """As one does that was killed between its last checkpoint and its scores; in the middle of an epoch."""
    options = {"save_strategy": "steps", "save_steps": 1, **length}
    whole = trainer_of(tiny_checkpoint, tmp_path, **options)
    whole.train()
    assert whole.state.epoch % 1 != 0
    resumed = trainer_of(tiny_checkpoint, tmp_path, **options)
    end = whole.state.global_step
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{end}"))
    assert resumed.state.global_step == end
    for mine, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    further = trainer_of(tiny_checkpoint, tmp_path, **{**options, "max_steps": end + 1})
    further.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{end}"))
    assert further.state.global_step == end + 1


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_perplexity_is_that_of_every_token(tiny_checkpoint, tmp_path, smoothing):
    """Batches of unlike length, so that a mean of batch means would be another number; the Trainer's smoothing too."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    data = rows(tokenizer, 11)
    options = {"per_device_eval_batch_size": 3, "label_smoothing_factor": smoothing}
    trainer = trainer_of(tiny_checkpoint, tmp_path, eval_dataset=data, **options)
    metrics = trainer.evaluate()
    assert (trainer.label_smoother is None) == (smoothing == 0)
    model, total, tokens = trainer.model.eval(), 0.0, 0
    for row in data:
        labels = torch.tensor([row["labels"]])
        logits = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).logits
        total += F.cross_entropy(logits[0].double(), labels[0], reduction="sum").item()
        tokens += labels.shape[1]
    assert metrics["eval_loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-6)


def test_metrics_are_sacrebleus_with_samples_in_place(tiny_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    texts = [f"half past nine {n}" for n in range(9)]
    ids = tokenizer(texts, padding=True, return_tensors="np")["input_ids"]
    labels = np.where(ids == tokenizer.pad_token_id, -100, ids)
    metrics = TranslationMetrics(tokenizer)
    scores = metrics(EvalPrediction(predictions=ids, label_ids=labels, inputs=ids))
    assert scores == pytest.approx({"bleu": 100.0, "chrf": 100.0})
    assert metrics.samples == [(texts[n],) * 3 for n in (2, 4, 6)]
    assert "tok:13a" in metrics.scores["bleu"].signature
    one = metrics(EvalPrediction(predictions=ids[:1], label_ids=labels[1:2], inputs=None))
    assert one["bleu"] < 100
    assert metrics.samples == [("", texts[0], texts[1])]
    named = TranslationMetrics(tokenizer, metrics=["bleu", "exact_match"], num_samples=1)
    scores = named(EvalPrediction(predictions=ids, label_ids=ids, inputs=ids))
    assert scores == pytest.approx({"bleu": 100.0, "exact_match": 100.0})
    assert all(type(score) is float for score in scores.values())
    assert len(named.samples) == 1
    with pytest.raises(ValueError, match=r"there is no measure 'accuracy'; give some of bleu"):
        TranslationMetrics(tokenizer, metrics=["accuracy"])(EvalPrediction(predictions=ids, label_ids=ids))
    with pytest.raises(TypeError, match="are logits, not translations; set predict_with_generate=True"):
        metrics(EvalPrediction(predictions=np.zeros((2, 3, 300)), label_ids=ids))


@pytest.mark.parametrize(
    ("texts", "tokenize", "is_measured"),
    [
        (["zehn", "halb zehn"], "13a", False),
        (["zehn", "halb zehn"], "char", True),
        (["我看见两只猫。", "你好"], "13a", False),
        (["我看见两只猫。", "你好"], "zh", True),
        (["", "zehn", "am vierten Mai um zehn"], "13a", True),  # one long text is enough
    ],
)
def test_bleu_that_stays_0_is_no_criterion(tiny_checkpoint, tmp_path, warnings, texts, tokenize, is_measured):
    """It is refused before the first update; where it is only reported, that is said."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    options = {"eval_dataset": Dataset.from_dict(dict(tokenizer(texts, text_target=texts))), "max_steps": 1}
    options |= {"compute_metrics": TranslationMetrics(tokenizer, tokenize), "predict_with_generate": True}
    trainer_of(tiny_checkpoint, tmp_path, **options).check_beginning()
    assert [("bleu_tokenize" in one, "chrf" in one) for one in warnings] == ([] if is_measured else [(True, True)])
    trainer = trainer_of(tiny_checkpoint, tmp_path, **options, metric_for_best_model="bleu")
    if is_measured:
        trainer.check_beginning()
        return
    with pytest.raises(ValueError, match="is bleu, but BLEU stays 0: the references"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("opening", "generation", "told"),
    [
        ("", {}, []),
        ("<s> ", {}, []),  # it is learned, and left out of the text
        ("<s> ", {"forced_bos_token_id": 1}, []),
        ("", {"forced_bos_token_id": 1}, ["'forced_bos_token_id': 1}, .*'forced_bos_token_id': None}"]),
        ("<s> ", {"forced_bos_token_id": 5}, ["'forced_bos_token_id': 5}, .*'forced_bos_token_id': 1}"]),
        ("", {"decoder_start_token_id": 2}, ["{'decoder_start_token_id': 2, .*{'decoder_start_token_id': 1, "]),
    ],
)
def test_translations_that_begin_unlike_targets_are_told(
    tiny_checkpoint, tmp_path, warnings, opening, generation, told
):
    trainer = trainer_of(tiny_checkpoint, tmp_path)
    tokens = [("<s>", 1), ("</s>", 2)]
    trainer.processing_class.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{opening}$A </s>", pair="$A $B", special_tokens=tokens
    )
    trainer.model.generation_config.update(**generation)
    trainer.check_beginning()
    assert len(warnings) == len(told)
    assert all(re.search(pattern, warning) for pattern, warning in zip(told, warnings, strict=True))


def test_sentences_are_predicted_with_labels_or_without(tiny_checkpoint, tmp_path):
    """With the collator of training, which then gives labels of None; the generation config stays as it was.

    Seq2SeqTrainer writes transformers' defaults into it, which would end translations at 20 tokens.
    """
    trainer = trainer_of(tiny_checkpoint, tmp_path, predict_with_generate=True, generation_num_beams=1)
    data, before = trainer.train_dataset.select(range(2)), copy.deepcopy(vars(trainer.model.generation_config))
    found = trainer.predict(data.remove_columns("labels")).predictions
    assert found.tolist() == trainer.predict(data).predictions.tolist()
    trainer.evaluate(data)
    assert vars(trainer.model.generation_config) == before
    assert before["max_length"] is None
    trainer.args.predict_with_generate = False
    with pytest.raises(ValueError, match=r"without labels, `DataCollatorWithPadding` and `predict_with_generate=True`"):
        trainer.predict(data.remove_columns("labels"))


@pytest.mark.parametrize("bf16", [False, True])
def test_evaluations_attach_the_engine(tiny_checkpoint, tmp_path, monkeypatch, bf16):
    """With `bf16` too, for which Accelerate puts autocast into the model's `forward`; training has no engine."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    options = {"compute_metrics": TranslationMetrics(tokenizer), "eval_dataset": by_length(rows(tokenizer, 3))}
    options |= {"predict_with_generate": True, "bf16": bf16, "eval_strategy": "steps", "eval_steps": 2}
    options["generation_max_length"] = 8
    trainer = trainer_of(tiny_checkpoint, tmp_path, **options, per_device_eval_batch_size=1)
    used, attach = [], engine.attach_if_supported
    monkeypatch.setattr(
        engine, "attach_if_supported", lambda *given, **named: used.append(attach(*given, **named)) or used[-1]
    )
    trainer.train()
    trainer.evaluate()
    assert [(one.calls, one.fallbacks) for one in used] == [(3, 0)] * 3
    assert trainer.model.engine is None


def test_evaluation_translates_and_keeps_the_best(tiny_checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    data = by_length(rows(tokenizer, 6))
    lengths = [len(row["input_ids"]) for row in data]
    assert lengths == sorted(lengths, reverse=True)
    metrics = TranslationMetrics(tokenizer)
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(
        tiny_checkpoint, tmp_path, eval_dataset=data, compute_metrics=metrics, predict_with_generate=True,
        metric_for_best_model="perplexity", greater_is_better=False, load_best_model_at_end=True,
        generation_num_beams=1, generation_max_length=8, early_stopping_patience=2, max_steps=40, learning_rate=1.0,
        **options,
    )  # fmt: skip
    trainer.train()
    perplexities = logged(trainer, "eval_perplexity")
    assert len(perplexities) < 40  # a rate of 1 makes it worse, so patience ends the run
    assert trainer.state.best_metric == min(perplexities)
    assert {"eval_bleu", "eval_chrf"} <= trainer.state.log_history[-2].keys() | trainer.state.log_history[-3].keys()
    steps, best = trainer.state.global_step, trainer.state.best_global_step
    assert run_facts(trainer).recipe.best_step == best
    trainer.train()
    assert trainer.state.global_step == steps  # and not at once, as patience had been used up


def scored(checkpoint, folder, *scores, **options):
    """A trainer whose evaluations have these scores, one after each update."""
    values, data = iter(scores), rows(AutoTokenizer.from_pretrained(checkpoint), 3)
    options |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "greater_is_better": True}
    options |= {"metric_for_best_model": "score", "compute_metrics": lambda _: {"score": next(values)}}
    return trainer_of(checkpoint, folder, eval_dataset=data, **options)


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_of_equal_values_the_later_one_is_the_best(tiny_checkpoint, tmp_path, strategy):
    """Though for early stopping it is no improvement."""
    options = {"save_strategy": strategy, "max_steps": 9, "early_stopping_patience": 2}
    trainer = scored(tiny_checkpoint, tmp_path, 1.0, 2.0, 2.0, 1.5, **options)
    trainer.train()
    state = trainer.state
    assert (state.global_step, state.best_global_step, state.best_metric) == (4, 3, 2.0)
    assert Path(state.best_model_checkpoint).name == "checkpoint-3"


def test_early_stopping_counts_on_in_a_resumed_run(tiny_checkpoint, tmp_path):
    """A score that stays as it is ends a run after four evaluations, resumed or not."""
    ends = []
    for max_steps, step in ((2, None), (60, 2), (60, 4), (60, None)):  # the third one has ended
        options = {"save_strategy": "steps", "early_stopping_patience": 3, "max_steps": max_steps}
        trainer = scored(tiny_checkpoint, tmp_path, *[1.0] * 9, **options)
        trainer.train(resume_from_checkpoint=step and str(tmp_path / f"checkpoint-{step}"))
        ends.append(trainer.state.global_step)
    assert ends == [2, 4, 4, 4]


def test_weights_that_are_not_finite_are_never_the_best(tiny_checkpoint, tmp_path):
    """Whatever their score is."""
    options = {"save_strategy": "best", "max_steps": 3, "max_nonfinite_updates": 0}
    trainer = scored(tiny_checkpoint, tmp_path, 1.0, 2.0, 3.0, **options)
    trainer.add_callback(Poison(2, math.nan))
    trainer.train()
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert trainer.state.best_global_step == 1


def test_weights_in_half_precision_are_no_beginning(tiny_checkpoint, tmp_path, warnings):
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint, dtype=torch.bfloat16)
    VanillaTransformerTrainer(model=model, args=arguments(tmp_path))
    (warning,) = warnings
    assert "rounding loses small updates; load the model with dtype=torch.float32" in warning
    with pytest.raises(RecipeError, match="weights are float16, too coarse to be trained; load"):
        VanillaTransformerTrainer(model=model.half(), args=arguments(tmp_path))


def test_what_the_card_says_of_a_training(tiny_checkpoint, tmp_path):
    trainer = trainer_of(tiny_checkpoint, tmp_path, max_steps=2, rdrop_alpha=3.0)
    trainer.train()
    facts = run_facts(trainer, seconds=7.0)
    recipe = facts.recipe
    assert (facts.training_pairs, recipe.steps, recipe.best_step, recipe.seconds) == (40, 2, None, 7.0)
    assert (recipe.optimizer, recipe.consistency) == ("Adam, beta 0.9 and 0.98, epsilon 1e-09", "R-Drop, alpha 3")
    assert recipe.schedule == "inverse sqrt, 2 updates of warm-up"
    assert run_facts(trainer_of(tiny_checkpoint, tmp_path, lr_scheduler_type="constant")).recipe.schedule == "constant"


def test_glibc_keeps_freed_memory():
    """In a process of its own, as it can't be undone; the file alone, as it needs no torch."""
    code = "import runpy, sys; sys.exit(0 if runpy.run_path(sys.argv[1])['keep_freed_memory']() else 3)"
    expected = 0 if platform.libc_ver()[0] == "glibc" else 3
    assert subprocess.run([sys.executable, "-c", code, memory.__file__], check=False).returncode == expected


def test_batches_by_tokens_need_a_dataset(tiny_checkpoint, tmp_path):
    trainer = trainer_of(tiny_checkpoint, tmp_path)
    trainer.train_dataset = list(trainer.train_dataset)
    with pytest.raises(TypeError, match=r"train_dataset is a list, .* or set per_device_train_batch_tokens to 0"):
        trainer.train()


def test_a_size_without_effect_is_refused(tiny_checkpoint, tmp_path):
    with pytest.raises(RecipeError, match="per_device_train_batch_size has no effect on batches by tokens; set"):
        trainer_of(tiny_checkpoint, tmp_path, per_device_train_batch_size=64)
    trainer = trainer_of(tiny_checkpoint, tmp_path, per_device_train_batch_size=3, per_device_train_batch_tokens=0)
    assert {len(batch["labels"]) for batch in trainer.get_train_dataloader()} == {3, 1}  # of 40 pairs


def test_dropout_rises_over_the_first_updates_and_goes_on_when_resumed(tiny_checkpoint, tmp_path):
    options = {"dropout_warmup_steps": 4, "save_strategy": "steps", "save_steps": 1}
    seen, of_attention = [], []
    for steps, checkpoint in ((2, None), (6, str(tmp_path / "checkpoint-2"))):
        trainer = trainer_of(tiny_checkpoint, tmp_path, max_steps=steps, **options)
        layer = trainer.model.model.encoder.layers[0]
        module, attention = layer.final_layer_norm.dropout, layer.self_attn
        module.p, attention.attention_dropout = 0.2, 0.4
        module.register_forward_pre_hook(lambda module, args: seen.append(module.p))
        attention.register_forward_pre_hook(lambda module, args: of_attention.append(module.attention_dropout))
        trainer.train(resume_from_checkpoint=checkpoint)
        assert (module.p, attention.attention_dropout) == (0.2, 0.4)
    assert seen == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2, 0.2])
    assert of_attention == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])


def test_dropout_rises_again_after_an_interruption(tiny_checkpoint, tmp_path):
    """And that of another architecture, which calls the function."""
    trainer = other_trainer(tiny_checkpoint, arguments(tmp_path, max_steps=6, dropout_warmup_steps=4))
    layer, seen = trainer.model.model.encoder.layers[0], []
    layer.dropout = 0.4

    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and len(seen) == 2:
                raise KeyboardInterrupt

    layer.register_forward_pre_hook(lambda module, args: seen.append(module.dropout))
    trainer.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert seen == pytest.approx([0.0, 0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.4])
    assert layer.dropout == 0.4
