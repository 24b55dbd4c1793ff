"""Section 5 of "Attention Is All You Need" on transformers' Seq2SeqTrainer."""

import copy
import inspect
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import TorchDynamoPlugin
from datasets.distributed import split_dataset_by_node
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, GenerationConfig, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import EvalLoopOutput, SchedulerType, TrainOutput
from transformers.utils import logging

from .. import engine
from ..checkpoints.completeness import OPTIMIZER, SCALER, SCHEDULER, checkpoints_in, damage_of
from ..checkpoints.loading import not_finite, tokenizer_fingerprint
from ..data.batching import TokenBudgetBatchSampler, TokenBudgetStream
from ..data.corpora import lengths_of
from ..data.packing import ROW_TOKENS, PackedBatchSampler, PackingCollator
from ..engine.training import paused_shortcuts, training_shortcuts
from ..errors import CheckpointError, first_line
from ..hub.facts import TARGET_TOKENS
from ..metrics import Score
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .arguments import RecipeError, VanillaTransformerTrainingArguments
from .callbacks import DropoutWarmup
from .evaluation import TranslationMetrics
from .pushes import PushingTrainer
from .rdrop import RDropTrainer
from .schedule import count_from_one, peak_learning_rate, set_rates

logger = logging.get_logger(__name__)


class DivergedError(RuntimeError):
    """Losses or gradients aren't finite any more; the message says since when, and the fix."""


class VanillaTransformerTrainer(PushingTrainer, RDropTrainer):
    """Seq2SeqTrainer with the paper's schedule, batches by tokens, a loss without logits, and perplexity per token.

    It stops a run that diverges (`max_nonfinite_updates`) and saves no checkpoint with weights that aren't finite.

    Arguments are those of Seq2SeqTrainer; `args` has to be `VanillaTransformerTrainingArguments`. Any other
    sequence-to-sequence model can be trained too. This package's model is trained with the shortcuts of
    `hf_vanilla_transformer.engine.training`; loss and gradients are the same.
    """

    args: VanillaTransformerTrainingArguments
    label_smoother: LabelSmoother | None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        warms_up = any(isinstance(one, DropoutWarmup) for one in self.callback_handler.callbacks)
        if self.args.dropout_warmup_steps and not warms_up:
            self.add_callback(DropoutWarmup(self.args.dropout_warmup_steps))
        patience = self.args.early_stopping_patience
        if patience is not None and not self._early_stopping:
            self.add_callback(EarlyStoppingCallback(early_stopping_patience=patience))
        forward = self.accelerator.unwrap_model(self.model).forward
        self._can_skip_logits = "skip_logits" in inspect.signature(forward).parameters
        self._check_precision()
        self._check_packed()
        self._evaluated = torch.zeros(2, dtype=torch.float64)  # of an evaluation: loss times tokens, and tokens
        given = self.optimizer, self.lr_scheduler, self.optimizer_cls_and_kwargs
        self.has_own_optimizer = given != (None, None, None)  # in place of the one that the arguments describe
        self._begin()
        self._note_tokenizer()
        if self.compute_loss_func is None:
            self.model_accepts_loss_kwargs = True  # target tokens are counted for each model; `compute_loss` divides

    # ---- The beginning ----

    def _check_precision(self) -> None:
        """Refuses weights in float16, and warns of bfloat16: most updates are smaller than their rounding."""
        types = {parameter.dtype for parameter in self.model.parameters() if parameter.requires_grad}
        fix = "load the model with dtype=torch.float32 (bf16=True then trains in mixed precision)"
        if torch.float16 in types:
            raise RecipeError(f"the model's weights are float16, too coarse to be trained; {fix}")
        if torch.bfloat16 in types:
            logger.warning(f"the model's weights are bfloat16, whose rounding loses small updates; {fix}")

    def _check_packed(self) -> None:
        if not self.args.packed:
            return
        if type(self.model) is not VanillaTransformerForConditionalGeneration:
            raise RecipeError(f"packed is for this package's model, not {type(self.model).__name__}; leave it out")
        if isinstance(self.train_dataset, datasets.IterableDataset):
            raise RecipeError("packed batches need the lengths of all pairs, which a stream doesn't have; leave it out")
        if self.args.torch_compile and self.is_fsdp_enabled:
            raise RecipeError("packed batches can't be compiled with FSDP; leave torch_compile out")

    def _build_accelerator_args(self, **kwargs: object) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        # For packed batches, the shortcuts compile each layer; evaluations have batches of all shapes.
        return built | ({"dynamo_plugin": TorchDynamoPlugin(backend="no")} if self.args.packed else {})

    def _note_tokenizer(self) -> None:
        """Writes the tokenizer's fingerprint into the configuration of this package's model."""
        is_ours = isinstance(self.model, VanillaTransformerForConditionalGeneration)
        if is_ours and isinstance(self.processing_class, PreTrainedTokenizerBase):
            tokenizer = copy.deepcopy(self.processing_class)
            pieces: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
            if getattr(pieces, "dropout", None):
                pieces.dropout = None  # it would segment a text differently each time
            self.model.config.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)

    def check_beginning(self) -> None:
        """Checks what a run would only show at its end: BLEU that stays 0, and translations that begin differently.

        Raises:
            ValueError: BLEU is to choose the best model, but can only be 0.
        """
        metrics, data = self.compute_metrics, self.eval_dataset or ()
        if isinstance(metrics, TranslationMetrics) and (problem := metrics.why_unmeasurable(data)):
            if str(self.args.metric_for_best_model).endswith("bleu"):
                raise ValueError(f"metric_for_best_model is bleu, but {problem}")
            logger.warning_once(problem)
        self._check_start()

    def _check_start(self) -> None:
        """Warns where generation doesn't begin translations as training begins targets."""
        tokenizer, config = self.processing_class, getattr(self.model, "generation_config", None)
        if config is None or not isinstance(tokenizer, PreTrainedTokenizerBase):
            return
        empty = tokenizer(text_target=[""], verbose=False)["input_ids"][0]
        start = getattr(self.model.config, "decoder_start_token_id", config.decoder_start_token_id)
        if empty and hasattr(self.model, "prepare_decoder_input_ids_from_labels"):
            start = self.model.prepare_decoder_input_ids_from_labels(labels=torch.tensor([empty]))[0, 0].item()
        first = empty[0] if empty and empty[0] != tokenizer.eos_token_id else None
        trained = {"decoder_start_token_id": start, "forced_bos_token_id": first}
        given = {name: getattr(config, name) for name in trained}
        if any(value not in (None, trained[name]) for name, value in given.items()):
            logger.warning_once(
                f"translations will not begin as targets do in training: the generation config has {given}, the "
                f"tokenizer and the model's configuration {trained}; make them agree"
            )

    def _begin(self) -> None:
        """Sets what is counted in a training to its beginning."""
        self._since: float | None = None  # the last line of the log, evaluations left out, in seconds
        self._tokens_then = 0
        self._loss_of_update: Tensor | float = 0.0
        self._checked_update = 0
        self._failures = 0  # updates in a row whose loss or gradients were not finite
        # Scores and samples of the validation set, the last ones after each number of updates.
        self.validations: dict[int, tuple[dict[str, Score], list[tuple[str, str, str]]]] = {}
        for callback in self._early_stopping:
            callback.early_stopping_patience_counter = 0

    def _inner_training_loop(self, *args: object, **kwargs: object) -> TrainOutput:
        self._begin()
        self._note_tokenizer()  # `model_init` has made another model
        self.check_beginning()
        uses_shortcuts = self.args.training_shortcuts and not self.args.torch_compile and not self.is_fsdp_enabled
        options = {"backend": self.args.torch_compile_backend, "mode": self.args.torch_compile_mode}
        compiled = options if self.args.packed and self.args.torch_compile else None
        with training_shortcuts(self.model, compiled) if uses_shortcuts or self.args.packed else nullcontext():
            return super()._inner_training_loop(*args, **kwargs)

    # ---- Batches ----

    def get_train_dataloader(self) -> DataLoader[object]:
        """Batches within `per_device_train_batch_tokens`, this process's part of them."""
        if not self.args.per_device_train_batch_tokens or self.train_dataset is None:
            return super().get_train_dataloader()
        if not isinstance(self.train_dataset, (datasets.Dataset, datasets.IterableDataset)):
            kind = type(self.train_dataset).__name__
            raise TypeError(
                f"train_dataset is a {kind}, but batches by tokens need a datasets.Dataset; make one by from_list(...) "
                "or set per_device_train_batch_tokens to 0"
            )
        names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
        options: dict[str, Any] = {name: getattr(self.args, f"dataloader_{name}") for name in names}
        options["collate_fn"] = self._get_collator_with_removed_columns(self.data_collator, "training")
        loader: DataLoader[object]
        if isinstance(self.train_dataset, datasets.IterableDataset):
            loader = DataLoader(self._stream(self.train_dataset), batch_size=None, **options)
        else:
            dataset = self._remove_unused_columns(self.train_dataset, description="training")
            sampler = self._sampler(dataset)
            if isinstance(sampler, PackedBatchSampler):
                options["collate_fn"] = PackingCollator(self.model.config, sampler.shape)
            loader = DataLoader(dataset, batch_sampler=sampler, **options)
        # The batches are this process's own already; Accelerate only has to bring them to the device.
        return prepare_data_loader(
            loader,
            device=self.args.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            non_blocking=True,
            dispatch_batches=False,
        )

    def _sampler(self, dataset: datasets.Dataset) -> TokenBudgetBatchSampler:
        kind: Callable[..., TokenBudgetBatchSampler] = TokenBudgetBatchSampler
        if self.args.packed:  # no pair is longer than a row, and so than the model's positions
            row_tokens = min(ROW_TOKENS, self.model.config.max_position_embeddings)
            kind = partial(PackedBatchSampler, row_tokens=row_tokens)
        return kind(
            lengths_of(dataset, "input_ids"),
            lengths_of(dataset, "labels"),
            self.args.per_device_train_batch_tokens,
            num_processes=self.args.world_size,
            process_index=self.args.process_index,
            accumulation_steps=self.args.gradient_accumulation_steps,
            length_tolerance=self.args.length_tolerance,
            seed=self.args.seed_of_data,
        )

    def _stream(self, dataset: datasets.IterableDataset) -> TokenBudgetStream:
        window = self.args.shuffle_buffer_size
        own = split_dataset_by_node(dataset, self.args.process_index, self.args.world_size)
        shuffled = own.shuffle(seed=self.args.seed_of_data, buffer_size=window)
        return TokenBudgetStream(
            shuffled,
            self.args.per_device_train_batch_tokens,
            window,
            length_tolerance=self.args.length_tolerance,
            seed=self.args.seed_of_data,
        )

    def _run_epoch(self, **kwargs: object) -> None:
        # The Trainer would train one more update when it resumes at the end, and three epochs if max_steps is 0.
        early = self._early_stopping
        has_stopped = any(one.early_stopping_patience_counter >= one.early_stopping_patience for one in early)
        if has_stopped or self.state.max_steps <= self.state.global_step:
            self.control.should_training_stop = True
            return
        self.state.compute_steps(self.args, self.state.max_steps)  # a resumed run would have its checkpoint's intervals
        if self._since is None:
            self._since, self._tokens_then = time.perf_counter(), self.target_tokens
        super()._run_epoch(**kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Tensor | int | None]:
        """Returns the batches of one update and its number of target tokens, and counts the tokens."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if items is not None:
            count = self.target_tokens + int(items)
            self.state.stateful_callbacks[TOKEN_COUNT] = {"args": {}, "attributes": {"count": count}}
        return batches, items

    @property
    def target_tokens(self) -> int:
        """Target tokens trained on so far, by all processes and before resuming too."""
        saved = self.state.stateful_callbacks.get(TOKEN_COUNT, {})
        return int(saved.get("attributes", {}).get("count", 0))

    # ---- Updates ----

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: VanillaTransformerTrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[Optimizer], dict[str, object]]:
        """The optimizer's class and arguments; its rate is the paper's where `learning_rate` is None."""
        args, rate = copy.copy(args), peak_learning_rate(args, model)
        args.learning_rate = rate  # of the copy: the same arguments may train a model of another size
        return RDropTrainer.get_optimizer_cls_and_kwargs(args, model)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """The schedule; the paper's, "inverse_sqrt", counts updates from 1 (5.3), where transformers begins with 0."""
        is_new = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if is_new and self.args.lr_scheduler_type == SchedulerType.INVERSE_SQRT:
            count_from_one(scheduler)
        return scheduler

    def compute_loss(self, model: nn.Module, inputs: Mapping[str, Any], *args: object, **kwargs: object) -> Tensor:
        """The model's own smoothed loss; in training without logits, as its share of the mean over an update's tokens.

        Models are asked for the batch's mean: some, as transformers' Marian, take `num_items_in_batch` and ignore it.
        """
        if self.compute_loss_func is not None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        items, labels = kwargs.pop("num_items_in_batch", None), inputs.get("labels")
        if self._can_skip_logits and self.label_smoother is None and model.training and labels is not None:
            inputs = {**inputs, "skip_logits": True}
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if items is None or labels is None or not model.training:
            return loss
        share = (labels != -100).sum() / torch.as_tensor(items, device=labels.device).clamp(min=1)
        # The count is over all processes, whose gradients are averaged.
        return loss * share * (self.accelerator.num_processes if self.args.average_tokens_across_devices else 1)

    def training_step(self, *args: object, **kwargs: object) -> Tensor:
        """Forward and backward of one batch; its loss is added to that of the update."""
        loss: Tensor = super().training_step(*args, **kwargs)
        self._loss_of_update = self._loss_of_update + loss.detach()
        return loss

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Tensor | float | None, *args: object, **kwargs: object
    ) -> None:
        if self._checked_update != self.state.global_step:  # it is called once more at the end of an epoch
            self._checked_update = self.state.global_step
            # With float16, the loss scaler skips updates whose gradients overflow: that does no harm.
            values = [self._loss_of_update, *([grad_norm] if grad_norm is not None and not self.args.fp16 else [])]
            failed = self._in_any_process(not all(math.isfinite(float(value)) for value in values))
            self._failures = self._failures + 1 if failed else 0
            self._loss_of_update = 0.0
        if 0 < self.args.max_nonfinite_updates <= self._failures:
            raise DivergedError(self._divergence())
        if self._failures:
            self.control.should_save = False
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _in_any_process(self, found: bool) -> bool:
        """Whether one of the processes has found something: all have to agree, or some would wait for the others."""
        number = torch.tensor(float(found), device=self.args.device)
        return bool(self.accelerator.reduce(number, reduction="sum").item())

    def _divergence(self) -> str:
        saved = checkpoints_in(Path(self.args.output_dir or ""))
        kept = f"the last checkpoint is {saved[-1].name}" if saved else "no checkpoint was saved before"
        precision = "bf16 in place of fp16, " if self.args.fp16 else ""
        failures = self._failures
        return (
            f"the training diverged: loss or gradients have been NaN or infinite in {failures} updates in a row, since "
            f"update {self.state.global_step - failures + 1:,}; try {precision}a lower learning_rate (it reached "
            f"{self._get_learning_rate():.1e}), a longer warmup_steps or max_grad_norm 1; {kept}"
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs, with the target tokens seen and their number per second since the last line."""
        if "loss" in logs:
            tokens, now = self.target_tokens, time.perf_counter()
            rate = (tokens - self._tokens_then) / max(now - (self._since or 0.0), 1e-9)
            self._since, self._tokens_then = now, tokens
            logs |= {TARGET_TOKENS: tokens, "tokens_per_second": round(rate, 1)}
        super().log(logs, start_time)

    # ---- Checkpoints ----

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Saves a checkpoint, or none if weights aren't finite; a failed attempt leaves no half of one."""
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self._in_any_process(bool(not_finite(self.model))):  # with FSDP, each has its own part
            logger.warning(f"{folder.name} is not saved, as weights contain NaN or infinity")
            return
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:  # each library has its own error for a full disk
            if damage_of(folder, to_resume=not self.args.save_only_model) is None:
                raise  # a push to the Hub after saving, for instance
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise OSError(
                f"{folder} can't be saved ({first_line(error)}); if the disk is full, make room or keep fewer "
                "checkpoints (save_total_limit), then resume the run"
            ) from error

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the state of a checkpoint; with schedules that are functions of the update, the rest is as configured.

        That is the learning rate, the betas and the weight decay.
        """
        if checkpoint is None:
            return
        needed = {OPTIMIZER: None, SCHEDULER: None, SCALER: "fp16"}  # by which option
        for file, option in needed.items():
            if (option is None or getattr(self.args, option)) and not Path(checkpoint, file).exists():
                fix = f", or leave {option} out if the run had none" if option else ""
                raise CheckpointError(f"{checkpoint} has no {file}; remove it to resume from an earlier one{fix}")
        wanted = [{name: group[name] for name in RESUMABLE if name in group} for group in self.optimizer.param_groups]
        rates = list(getattr(self.lr_scheduler, "base_lrs", ()))
        super()._load_optimizer_and_scheduler(checkpoint)
        if not isinstance(self.lr_scheduler, LambdaLR):
            if rates != list(getattr(self.lr_scheduler, "base_lrs", ())):
                raise RecipeError("with this scheduler, a resumed run can't change its learning rate")
            return
        for group, values in zip(self.optimizer.param_groups, wanted, strict=True):
            group.update(values)
        self.lr_scheduler.base_lrs = rates
        before, after = set_rates(self.lr_scheduler)
        if before != after:
            logger.warning(f"resuming with a learning rate of {after[0]:.3g}, not {before[0]:.3g}")

    def _load_callback_state(self) -> None:
        """Restores the count of early stopping, so that a resumed run ends as an uninterrupted one."""
        super()._load_callback_state()
        saved = self.state.stateful_callbacks.get("EarlyStoppingCallback", {})
        for callback in self._early_stopping if isinstance(saved, dict) else ():
            vars(callback).update(saved.get("attributes", {}))

    @property
    def _early_stopping(self) -> list[EarlyStoppingCallback]:
        return [one for one in self.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback)]

    def _determine_best_metric(self, metrics: dict[str, float], trial: object) -> bool:
        """Whether an evaluation is the best so far: of equal values, the later one; warns where it can't tell."""
        name = f"eval_{str(self.args.metric_for_best_model).removeprefix('eval_')}"
        values = [entry[name] for entry in self.state.log_history if name in entry][-EQUAL_VALUES:]
        if len(values) == EQUAL_VALUES and len(set(values)) == 1:
            logger.warning_once(
                f"metric_for_best_model {name} was {values[0]:.6g} in {EQUAL_VALUES} evaluations in a row: it doesn't "
                "tell one checkpoint from another; choose another one"
            )
        if metrics.get(name) == self.state.best_metric:
            self.state.best_metric = None
        return bool(super()._determine_best_metric(metrics, trial))

    # ---- Evaluations ----

    def evaluation_loop(self, *args: object, metric_key_prefix: str = "eval", **kwargs: object) -> EvalLoopOutput:
        """Evaluates; the loss is the mean over tokens, not over batches, and its exponential the perplexity."""
        began = time.perf_counter()
        self._evaluated.zero_()
        smoother, self.label_smoother = self.label_smoother, None  # the loss of an evaluation isn't smoothed
        # Seq2SeqTrainer would count repeated sentences twice (`_without_repeated`).
        self.gather_function = self.accelerator.gather_for_metrics
        try:
            with (
                paused_shortcuts(self.model),  # first, as the engine doesn't attach to a model with them
                engine.attach_if_supported(self.model, allow_autocast=True)
                if self.args.predict_with_generate
                else nullcontext(),
            ):
                output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        finally:
            self.label_smoother = smoother
        sums = self._evaluated.float() if self.args.device.type == "mps" else self._evaluated
        loss, tokens = self.accelerator.reduce(sums.to(self.args.device), reduction="sum").tolist()
        if tokens:
            output.metrics[f"{metric_key_prefix}_loss"] = loss / tokens
            output.metrics[f"{metric_key_prefix}_perplexity"] = math.exp(min(loss / tokens, 700.0))
        if self._since is not None:
            self._since += time.perf_counter() - began
        metrics = self.compute_metrics
        if isinstance(metrics, TranslationMetrics) and f"eval_{metrics.measures.names[0]}" in output.metrics:
            self.validations[self.state.global_step] = (metrics.scores, metrics.samples)
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *args: object, **kwargs: object
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """One batch of the evaluation; its loss is added up by tokens."""
        inputs = {name: value for name, value in inputs.items() if value is not None}  # DataCollatorForSeq2Seq's labels
        if "labels" in inputs:
            inputs = {**inputs, "labels": self._without_repeated(inputs["labels"])}
        with _unchanged(getattr(self.model, "generation_config", None)):
            outputs = super().prediction_step(model, inputs, *args, **kwargs)
        if outputs[0] is not None and "labels" in inputs:
            tokens = int((inputs["labels"] != -100).sum())
            self._evaluated += torch.tensor(
                [outputs[0].item() * tokens if tokens else 0.0, tokens], dtype=torch.float64
            )
        return outputs

    def _without_repeated(self, labels: Tensor) -> Tensor:
        """The labels, -100 for sentences that fill up the last batch so that all processes have equally many."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return labels
        own = state.remainder - self.args.process_index * len(labels)  # the others are the first ones once more
        repeated = torch.arange(len(labels), device=labels.device) >= own
        return labels.masked_fill(repeated[:, None], -100)


EQUAL_VALUES = 3  # evaluations after which a constant criterion is told
# The key of the target tokens in `stateful_callbacks`; TrainerState saves only its own fields.
TOKEN_COUNT = "TargetTokens"
# Settings of an optimizer's groups of parameters that a resumed run may change.
RESUMABLE = ("initial_lr", "betas", "eps", "weight_decay", "momentum")


@contextmanager
def _unchanged(config: GenerationConfig | None) -> Iterator[None]:
    """Keeps a generation config as it is: Seq2SeqTrainer writes transformers' defaults into it, `max_length` 20 too."""
    before = None if config is None else dict(vars(config))
    try:
        yield
    finally:
        if before is not None:
            vars(config).clear()
            vars(config).update(before)
