"""Section 5 of "Attention Is All You Need" on transformers' Seq2SeqTrainer."""

import copy
import inspect
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import datasets
import torch
from accelerate.data_loader import prepare_data_loader
from datasets.distributed import split_dataset_by_node
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from transformers import (
    EarlyStoppingCallback,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    TrainerState,
)
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import EvalLoopOutput, SchedulerType, TrainOutput, get_last_checkpoint
from transformers.utils import logging

from .. import engine
from ..checkpoints.completeness import OPTIMIZER, OPTIMIZER_OF_FSDP, SCALER, SCHEDULER, TRAINER_STATE, damage_of
from ..checkpoints.loading import not_finite, tokenizer_fingerprint
from ..data.batching import TokenBudgetBatchSampler, TokenBudgetStream
from ..data.corpora import lengths_of
from ..data.packing import ROW_TOKENS, PackedBatchSampler, PackingCollator
from ..engine.training import paused_shortcuts, training_shortcuts
from ..engine.training.packing import CompileOptions
from ..errors import CheckpointError, first_line
from ..hub.facts import TARGET_TOKENS
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .arguments import VanillaTransformerTrainingArguments
from .callbacks import Divergence, DropoutWarmup, in_any_process
from .evaluation import TranslationMetrics
from .options import SIZE_WITHOUT_EFFECT, RecipeError, refuse
from .rdrop import rdrop
from .schedule import count_from_one, peak_learning_rate, set_rates
from .sharding import ShardingTrainer

logger = logging.get_logger(__name__)


class VanillaTransformerTrainer(ShardingTrainer):
    """Seq2SeqTrainer with the paper's schedule, batches by tokens, a loss without logits, and perplexity per token.

    It stops a run that diverges (`max_nonfinite_updates`) and saves no checkpoint with weights that aren't finite.

    Arguments are those of Seq2SeqTrainer; `args` has to be `VanillaTransformerTrainingArguments`. Any other
    sequence-to-sequence model can be trained too. This package's model is trained with the shortcuts of
    `hf_vanilla_transformer.engine.training`; loss and gradients are the same.
    """

    args: VanillaTransformerTrainingArguments
    label_smoother: LabelSmoother | None
    _training: ExitStack | None = None  # what is undone at the end of `train`, while it runs

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
        self._check_options()
        self._evaluated = torch.zeros(2, dtype=torch.float64)  # of an evaluation: loss times tokens, and tokens
        self._begin(None)
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

    def _check_options(self) -> None:
        """Refuses a size that has no effect, and packed batches and R-Drop where they can't work."""
        packed, alpha, kind = self.args.packed, self.args.rdrop_alpha, type(self.model)
        is_sized = self.args.per_device_train_batch_size != Seq2SeqTrainingArguments.per_device_train_batch_size
        is_ours = isinstance(self.model, VanillaTransformerForConditionalGeneration)
        refuse({
            SIZE_WITHOUT_EFFECT: is_sized and self.args.per_device_train_batch_tokens,
            f"packed is for this package's model, not {kind.__name__}; leave it out":
                packed and kind is not VanillaTransformerForConditionalGeneration,
            "packed batches need the lengths of all pairs, which a stream doesn't have; leave it out":
                packed and isinstance(self.train_dataset, datasets.IterableDataset),
            "packed batches can't be compiled with FSDP; leave torch_compile out":
                packed and self.args.torch_compile and self.is_fsdp_enabled,
            f"rdrop_alpha is for this package's model, not {kind.__name__}; leave it out": alpha and not is_ours,
            "rdrop_alpha needs the model's own loss; leave compute_loss_func out": alpha and self.compute_loss_func,
            "rdrop_alpha doesn't work with torch.compile; give the model as it is":
                alpha and self.model._compiled_call_impl,
            "rdrop_alpha needs the complete model in each process; train without FSDP": alpha and self.is_fsdp_enabled,
        })  # fmt: skip

    def create_accelerator_and_postprocess(self) -> None:
        """Creates the Accelerator; for packed batches, the shortcuts compile each layer, and it nothing."""
        backend = self.args.torch_compile_backend
        if self.args.packed:  # evaluations have batches of all shapes
            self.args.torch_compile_backend = "no"
        super().create_accelerator_and_postprocess()
        self.args.torch_compile_backend = backend

    def _note_tokenizer(self) -> None:
        """Writes the tokenizer's fingerprint into the configuration of this package's model."""
        is_ours = isinstance(self.model, VanillaTransformerForConditionalGeneration)
        if is_ours and isinstance(self.processing_class, PreTrainedTokenizerBase):
            tokenizer = copy.deepcopy(self.processing_class)
            pieces = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
            if pieces is not None and getattr(pieces, "dropout", None):
                pieces.dropout = None  # it would segment a text differently each time
            self.model.config.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)

    def check_beginning(self) -> None:
        """Checks what a run would only show at its end: BLEU that stays 0, and translations that begin differently."""
        metrics, data = self.compute_metrics, self.eval_dataset or ()
        if isinstance(metrics, TranslationMetrics) and (problem := metrics.why_unmeasurable(data)):
            if self.args.criterion.endswith("bleu"):
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

    def _begin(self, checkpoint: str | None) -> None:
        """Sets what is counted in a training to its beginning, or to where a checkpoint was."""
        self._since: float | None = None  # the last line of the log, evaluations left out, in seconds
        self._tokens_then = 0
        self._divergence = Divergence()
        state = TrainerState()
        if checkpoint is not None:
            files = [OPTIMIZER, OPTIMIZER_OF_FSDP]  # without FSDP, and with it
            own, other = reversed(files) if self.is_fsdp_enabled else files
            if Path(checkpoint, other).exists():
                how = "without" if self.is_fsdp_enabled else "with"
                raise CheckpointError(f"{checkpoint} was saved {how} FSDP; resume {how} it")
            for name in (own, SCHEDULER, SCALER) if self.args.fp16 else (own, SCHEDULER):
                if not Path(checkpoint, name).exists():  # the Trainer would begin with a new one
                    fix = ", or leave fp16 out if the run had none" if name == SCALER else ""
                    raise CheckpointError(f"{checkpoint} has no {name}; remove it to resume from an earlier one{fix}")
            state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE)))
        self._updates_before = state.global_step
        saved = (state.stateful_callbacks or {}).get("EarlyStoppingCallback")
        counter = saved["attributes"]["early_stopping_patience_counter"] if isinstance(saved, dict) else 0
        for callback in self._early_stopping:
            callback.early_stopping_patience_counter = counter

    @property
    def _early_stopping(self) -> list[EarlyStoppingCallback]:
        return [one for one in self.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback)]

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object) -> TrainOutput:
        """Trains as the Trainer does; a resumed run ends with the weights and scores of an uninterrupted one.

        Raises:
            CheckpointError: The checkpoint lacks files, or is of another model.
            DivergedError: The loss has not been finite for `max_nonfinite_updates` updates.
        """
        checkpoint = resume_from_checkpoint or None
        self._begin(get_last_checkpoint(self.args.output_dir) if checkpoint is True else checkpoint)
        self.check_beginning()
        self.add_callback(self._divergence)  # the last one, so that none saves after all
        with ExitStack() as self._training:
            self._training.callback(setattr, self, "_training", None)
            self._training.callback(self.remove_callback, self._divergence)
            self._training.enter_context(self._no_half_checkpoint())
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Creates the optimizer, after shortcuts were put into the model: in a training, it is wrapped next."""
        shortcuts = self.args.training_shortcuts and not self.args.torch_compile and not self.is_fsdp_enabled
        if self._training is not None and (shortcuts or self.args.packed):
            options = CompileOptions(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)
            compiled = options if self.args.packed and self.args.torch_compile else None
            self._training.enter_context(training_shortcuts(self.model, compiled))
        self._note_tokenizer()  # `model_init` may have made another model
        for name, parameter in self.model.named_parameters():
            if name in self.unsaved:  # transformers 5.24 trains the sinusoids of its Marian without saving them
                parameter.requires_grad = False
        return super().create_optimizer(model)

    def set_initial_training_values(self, args: object, dataloader: DataLoader[object]) -> tuple[int, ...]:
        """Epochs, updates per epoch ... updates; no epoch if a run resumes at its end, or `max_steps` is 0."""
        epochs, *others = super().set_initial_training_values(args, dataloader)
        early = self._early_stopping
        has_stopped = any(one.early_stopping_patience_counter >= one.early_stopping_patience for one in early)
        return (0 if has_stopped or others[-1] <= self._updates_before else epochs, *others)

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
        options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
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
        own = {"num_processes": 1, "process_index": 0, "dispatch_batches": False}
        return prepare_data_loader(loader, device=self.args.device, put_on_device=True, non_blocking=True, **own)

    def _sampler(self, dataset: datasets.Dataset) -> TokenBudgetBatchSampler:
        kind: Callable[..., TokenBudgetBatchSampler] = TokenBudgetBatchSampler
        args, lengths = self.args, [lengths_of(dataset, name) for name in ("input_ids", "labels")]
        if args.packed:  # no pair is longer than a row, and so than the model's positions
            row_tokens = min(ROW_TOKENS, self.model.config.max_position_embeddings)
            kind = partial(PackedBatchSampler, row_tokens=row_tokens)
        place = {"num_processes": args.world_size, "process_index": args.process_index}
        place["accumulation_steps"] = args.gradient_accumulation_steps
        order = {"length_tolerance": args.length_tolerance, "seed": args.seed_of_data}
        return kind(*lengths, args.per_device_train_batch_tokens, **place, **order)

    def _stream(self, dataset: datasets.IterableDataset) -> TokenBudgetStream:
        args, seed, window = self.args, self.args.seed_of_data, self.args.shuffle_buffer_size
        own = split_dataset_by_node(dataset, args.process_index, args.world_size)
        shuffled = own.shuffle(seed=seed, buffer_size=window)
        tolerance = args.length_tolerance
        return TokenBudgetStream(
            shuffled, args.per_device_train_batch_tokens, window, length_tolerance=tolerance, seed=seed
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Tensor | int | None]:
        """Returns the batches of one update and its number of target tokens, and counts the tokens."""
        if self._since is None:
            self._since, self._tokens_then = time.perf_counter(), self.target_tokens
            # A resumed run would have its checkpoint's intervals, and no place for a callback that it hadn't.
            self.state.compute_steps(self.args, self.state.max_steps)
            self._note_order()
            for callback in self._early_stopping:
                self.state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if items is not None:
            count = self.target_tokens + int(items)
            self.state.stateful_callbacks[TOKEN_COUNT] = {"args": {}, "attributes": {"count": count}}
        return batches, items

    def _note_order(self) -> None:
        """Saves the options that decide the batches, and warns of others than before: batches are skipped by count."""
        now = self.args.order_of_batches(streaming=isinstance(self.train_dataset, datasets.IterableDataset))
        before = now | self.state.stateful_callbacks.get(ORDER, {}).get("attributes", {})
        changed = [f"{name} {now[name]}, not {before[name]}" for name in now if now[name] != before[name]]
        if changed and not self.args.ignore_data_skip and self.is_world_process_zero():
            logger.warning(
                f"resuming with {', '.join(changed)} makes other batches: in the rest of this epoch, some pairs come a "
                "second time and others never, and epochs are counted as if all batches had been such"
            )
        self.state.stateful_callbacks[ORDER] = {"args": {}, "attributes": now}

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
        kind, kwargs = ShardingTrainer.get_optimizer_cls_and_kwargs(args, model)
        names = [one.partition("=")[0].strip() for one in (args.optim_args or "").split(",") if one]
        if kind.__module__.startswith("torch.optim") and (unread := [name for name in names if name not in kwargs]):
            raise RecipeError(f"optim_args: {kind.__name__} has no {unread[0]!r}; check the spelling")
        return kind, kwargs

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """The schedule; the paper's, "inverse_sqrt", counts updates from 1 (5.3), where transformers begins with 0."""
        is_new = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if is_new and self.args.lr_scheduler_type == SchedulerType.INVERSE_SQRT:
            count_from_one(scheduler)
        return scheduler

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, Tensor | bool], *args: object, **kwargs: object
    ) -> Tensor:
        """The model's own smoothed loss; in training without logits, as its share of the mean over an update's tokens.

        Models are asked for the batch's mean: some, as transformers' Marian, take `num_items_in_batch` and ignore it.
        """
        if self.compute_loss_func is not None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        items, labels = kwargs.pop("num_items_in_batch", None), inputs.get("labels")
        if not isinstance(labels, Tensor) or not model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        if self._can_skip_logits and self.label_smoother is None:
            inputs = {**inputs, "skip_logits": True}
        alpha = self.args.rdrop_alpha
        with rdrop(self.model, inputs, alpha) if alpha else nullcontext(inputs) as batch:
            loss: Tensor = super().compute_loss(model, batch, *args, **kwargs)
        if items is None:
            return loss
        share = (labels != -100).sum() / torch.as_tensor(items, device=labels.device).clamp(min=1)
        # The count is over all processes, whose gradients are averaged.
        return loss * share * (self.accelerator.num_processes if self.args.average_tokens_across_devices else 1)

    def training_step(self, *args: object, **kwargs: object) -> Tensor:
        """Forward and backward of one batch; its loss is added to that of the update."""
        loss: Tensor = super().training_step(*args, **kwargs)
        self._divergence.add(loss)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs, with the target tokens seen and their number per second since the last line."""
        if "loss" in logs:
            tokens, now = self.target_tokens, time.perf_counter()
            rate = (tokens - self._tokens_then) / max(now - (self._since or 0.0), 1e-9)
            self._since, self._tokens_then = now, tokens
            logs |= {TARGET_TOKENS: tokens, "tokens_per_second": round(rate, 1)}
        super().log(logs, start_time)

    # ---- Checkpoints ----

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Refuses `push_to_hub`: the Trainer would send all files of the run's folder, with a card of its own."""
        folder, name = self.args.output_dir, self.args.hub_model_id or "USER/NAME"
        raise RecipeError(
            "push_to_hub would send files that only training needs; leave it out, call trainer.save_model(), and run "
            f"`vanilla-transformer card {folder}` and `vanilla-transformer push {folder} {name}`"
        )

    @contextmanager
    def _no_half_checkpoint(self) -> Iterator[None]:
        """Removes a checkpoint of this training that a full disk has left incomplete."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:  # each library has its own error for a full disk
            folder = Path(self.args.output_dir or "", f"checkpoint-{self.state.global_step}")
            is_own = self._since is not None and self.state.global_step > self._updates_before and folder.is_dir()
            if not is_own or damage_of(folder, to_resume=not self.args.save_only_model) is None:
                raise
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

    # ---- Evaluations ----

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        """Evaluates; in training, of equal values of the best model's criterion the later one is the best."""
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        name = f"eval_{self.args.criterion}"
        if not self.is_in_train or name not in metrics:
            return metrics
        if in_any_process(bool(not_finite(self.model)), self.args.device):
            metrics[name] = math.nan  # never the best
        elif metrics[name] == self.state.best_metric:  # the Trainer keeps the earlier one of equal values
            worse = -math.inf if self.args.greater_is_better else math.inf
            self.state.best_metric = math.nextafter(metrics[name], worse)
        return metrics

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
                engine.attach_if_supported(self.model) if self.args.predict_with_generate else nullcontext(),
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


# Keys of the target tokens and of the batches' order in `stateful_callbacks`; TrainerState saves only its own fields.
TOKEN_COUNT, ORDER = "TargetTokens", "OrderOfBatches"
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
