"""The training run of `vanilla-transformer train`, from the corpora to the scores."""

import copy
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import datasets
import torch
from datasets import Dataset, IterableDataset
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging

from ..checkpoints.completeness import step_of
from ..checkpoints.loading import check_tokenizer, load_config, load_model, load_tokenizer
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..data.corpora import (
    Cleaning,
    counts_per_epoch,
    joined,
    mixed,
    read_corpus,
    rows_with,
    state_of,
    tokenize,
)
from ..data.formats import Corpus
from ..data.symbols import reads_features, shown, train_tokenizer, unknown_ids, unknown_symbols
from ..data.vectors import use_vectors
from ..engine.memory import keep_freed_memory
from ..errors import first_line
from ..hub.upload import create_repository, prepare, publish
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .arguments import Arguments
from .callbacks import Console
from .evaluation import TranslationMetrics, by_length, measures_of
from .finish import finish_run
from .options import RecipeError
from .preflight import check_inputs, measured, preflight
from .run_facts import run_facts
from .run_folder import (
    TOKENIZER,
    check_folder,
    check_same_data,
    checkpoint_to_resume,
    fixed_options,
    only_process_in,
    save_model,
    write_recipe,
)
from .trainer import VanillaTransformerTrainer


class FinishError(RuntimeError):
    """The model is trained, but averaging, scoring or the card has failed; the message says why, and the fix."""


class Run:
    """A training run: call `check`, then `run`, which calls `prepare`, `train` and `finish` in turn.

    Its arguments, and the errors of its steps, are those of `training.train`.
    """

    def __init__(
        self,
        arguments: Arguments,
        say: Callable[[str], object],
        *,
        resume: bool = False,
        dry_run: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        self.arguments = arguments
        self.data, self.model, self.args = arguments
        self.resume, self.dry_run, self.trust_remote_code = resume, dry_run, trust_remote_code
        self.output = Path(self.args.output_dir or "")
        self.main = self.args.process_index == 0
        self.say = say if self.main else lambda line: None
        self.checkpoint: Path | None = None  # to resume from
        self.corpora: dict[str, Corpus] = {}  # of each part, once it is checked
        self.cleaning = Cleaning(self.data.max_length, self.data.max_length_ratio)
        self.mixture: str | None = None  # of corpora with weights, in words
        self.pushes = bool(self.args.push_to_hub) and not dry_run
        self.args.push_to_hub = False  # the Trainer refuses it; `finish` pushes

    def check(self) -> None:
        """Checks what can be checked before any data is read."""
        self.corpora = check_inputs(self.arguments, resume=self.resume, dry_run=self.dry_run)
        if self.main and not self.dry_run:
            check_folder(self.arguments, resume=self.resume)
        if self.main and self.pushes:  # what would fail at the end fails now
            create_repository(str(self.args.hub_model_id), private=bool(self.args.hub_private_repo))

    def run(self) -> VanillaTransformerTrainer:
        """Prepares, trains and finishes as the only process in the output folder, or makes a dry run.

        Returns:
            The trainer. Of several processes, keep it: freeing its process group may hang.
        """
        with ExitStack() as stack:
            if self.dry_run:
                folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="dry-run-"))]
                if self.args.world_size > 1:
                    torch.distributed.broadcast_object_list(folders)  # that of the main process
                self.args.output_dir = folders[0]
                self.output = Path(folders[0])
            if self.main:
                stack.enter_context(only_process_in(self.output))
                # Once more, as another process may have been faster.
                check_folder(self.arguments, resume=self.resume)
            trainer = self.prepare()
            if self.dry_run:
                for line in measured(trainer):
                    self.say(line)
                return trainer
            seconds = self.train(trainer)
            if self.main:
                self.finish(trainer, seconds)
            return trainer

    def prepare(self) -> VanillaTransformerTrainer:
        """Returns the trainer, with tokenizer, data and model, after the run's end was rehearsed with it."""
        set_seed(self.args.seed)
        _be_quiet()
        if self.resume:
            self.checkpoint = checkpoint_to_resume(self.output, self.args.max_steps)
        elif self.main and not self.model.saved_tokenizer and (self.output / TOKENIZER).is_dir():
            shutil.rmtree(self.output / TOKENIZER)  # that of a run that stopped before its first update
        trainer = self._trainer()
        counts = copy.deepcopy(vars(self.cleaning))
        preflight(trainer)
        vars(self.cleaning).update(counts)  # the rehearsal has read the first pairs of a stream
        return trainer

    def train(self, trainer: VanillaTransformerTrainer) -> float:
        """Trains, saves the model, and returns the seconds that training took."""
        if self.resume:
            start = f"Resuming from {self.checkpoint}" if self.checkpoint else "No complete checkpoint: starting over"
            self.say(start)
        if self.args.device.type == "cpu":
            keep_freed_memory()
        began = time.perf_counter()
        trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        seconds = time.perf_counter() - began
        if self.cleaning.seen and self.data.streaming:
            self.say(f"Training data, as far as the stream was read: {self.cleaning}")
        save_model(trainer, self.output)
        total = trainer.state.global_step
        before = (step_of(self.checkpoint) or 0) if self.checkpoint else 0
        updates = f"{total - before:,} updates ({total:,} in all)" if before else f"{total:,} updates"
        self.say(f"Trained {updates} in {seconds / 60:.1f} minutes: {self.output}")
        trainer.accelerator.wait_for_everyone()
        trainer.end()
        return seconds

    def finish(self, trainer: VanillaTransformerTrainer, seconds: float) -> None:
        """Averages the checkpoints, scores the model, writes its card and pushes it; training took `seconds`."""
        in_all = None if self.checkpoint else seconds  # the time up to the checkpoint isn't known
        try:
            facts = run_facts(trainer, in_all)
            if self.mixture:  # a pair that is repeated is one
                pairs = None if self.data.streaming else self.cleaning.kept
                facts = replace(facts, training_pairs=pairs, recipe=replace(facts.recipe, mixture=self.mixture))
            folder = finish_run(trainer, facts, self.data, self.corpora, self.say, self.trust_remote_code)
            if self.pushes:
                repo, private = str(self.args.hub_model_id), bool(self.args.hub_private_repo)
                done = publish(prepare(folder, repo), repo, private=private, revision=self.args.hub_revision)
                self.say(f"Pushed to the Hub: {done.url}")
        except (ValueError, OSError) as error:  # of the checkpoints or the data; a full disk, no connection to the Hub
            fix = "fix it, and give --resume to repeat what follows training"
            raise FinishError(f"the model is trained, but {first_line(error)}; {fix}") from error

    def _trainer(self) -> VanillaTransformerTrainer:
        """Reads and tokenizes the corpora, trains the tokenizer, builds the model and its trainer."""
        # One process per machine does the work and the others read its cache; the tokenizer is trained by one in all.
        with self.args.main_process_first(desc="reading the corpus"):
            parts = [read_corpus(part, self.data.streaming) for part in self.corpora["train"].parts]
            pairs = joined(parts)
            if self.corpora["test"]:
                read_corpus(self.corpora["test"])  # a wrong line is an error now
            if self.main:
                fingerprint = state_of(self.corpora["train"], pairs)
                if self.resume:
                    check_same_data(self.output, fingerprint)
                write_recipe(self.output, fixed_options(self.arguments), fingerprint)
        with self.args.main_process_first(local=False, desc="training the tokenizer"):
            tokenizer = self._tokenizer(pairs)
            if self.checkpoint is not None:  # it may have changed since
                config = load_config(self.checkpoint, trust_remote_code=self.trust_remote_code)
                check_tokenizer(tokenizer, config, str(self.checkpoint))
        validation = None
        with self.args.main_process_first(desc="tokenizing the corpus"):
            train = self._mixed(parts, tokenizer)
            if self.corpora["validation"]:
                lines, cleaning = read_corpus(self.corpora["validation"]), Cleaning(sys.maxsize)
                validation = by_length(tokenize(lines, tokenizer, cleaning))
                if cleaning.left_out:
                    self.say(f"Validation data during training: {cleaning}")
                self._say_unknown("Validation", validation, tokenizer)
        if not self.data.streaming:
            self.say(f"Training data: {self.cleaning}")
        if self.mixture:
            self.say(f"Mixture: {self.mixture}")
        model = self._model(tokenizer)
        args, names = self.args, measures_of(self.args, tokenizer)
        metrics = TranslationMetrics(tokenizer, args.bleu_tokenize, metrics=names, num_samples=args.num_samples)
        trainer = VanillaTransformerTrainer(
            model=model,
            args=args,
            train_dataset=train,
            eval_dataset=validation,
            processing_class=tokenizer,
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            compute_metrics=metrics,
            callbacks=[Console(metrics, self.say)],
        )
        for callback in (PrinterCallback, ProgressCallback):  # Console replaces them
            trainer.remove_callback(callback)
        return trainer

    def _mixed(
        self, parts: list[Dataset | IterableDataset], tokenizer: PreTrainedTokenizerBase
    ) -> Dataset | IterableDataset:
        """Tokenizes the training data, mixes corpora by their weights if they have any, and notes how."""
        weights, seed = self.data.train_weights, self.args.seed_of_data
        shares = [f"{weight / sum(weights):.1%} of pairs read" for weight in weights]
        if self.data.streaming:  # mixed first: threads read the parts, and a tokenizer is for one
            train = tokenize(mixed(parts, weights, seed), tokenizer, self.cleaning)
        else:
            tokenized = [tokenize(part, tokenizer, self.cleaning) for part in parts]
            self._say_unknown("Training", joined(tokenized), tokenizer)
            train = mixed(tokenized, weights, seed)
            sizes = [len(part) for part in tokenized if isinstance(part, Dataset)]
            counts = zip(sizes, counts_per_epoch(sizes, weights), strict=True) if weights else ()
            shares = [f"{size:,} pairs, {count:,} per epoch" for size, count in counts]
        if weights:
            corpora = zip(self.corpora["train"].parts, weights, shares, strict=True)
            self.mixture = "; ".join(f"{one.name}, weight {weight:g}: {share}" for one, weight, share in corpora)
        return train

    def _say_unknown(self, part: str, pairs: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase) -> None:
        """Says which symbols of a corpus the tokenizer doesn't know; a stream isn't read for it."""
        columns = {"source": "input_ids", "target": "labels"}
        if isinstance(pairs, IterableDataset) or not set(columns) <= set(pairs.column_names):
            return
        for (side, ids), unknown in zip(columns.items(), unknown_ids(tokenizer), strict=True):
            if unknown is not None and len(rows := rows_with(pairs, ids, unknown)):
                found = unknown_symbols(tokenizer, pairs.select(rows)[side], is_target=side == "target")
                self.say(f"{part} data: the {side} has {shown(found)}")

    def _tokenizer(self, pairs: Dataset | IterableDataset) -> PreTrainedTokenizerBase:
        """Loads the tokenizer that the recipe, a checkpoint or an earlier process names, or trains a new one."""
        saved = self.output / TOKENIZER
        if name := self.model.saved_tokenizer:
            loaded = load_tokenizer(name, trust_remote_code=self.trust_remote_code)
            if self.data.feature_columns and not reads_features(loaded):
                raise RecipeError(f"the tokenizer of {name} reads no features; leave feature_columns out")
            self.say(f"Tokenizer: that of {name}")
            return loaded
        if self.checkpoint is not None:
            return load_tokenizer(self.checkpoint, trust_remote_code=self.trust_remote_code)
        if (saved / "tokenizer.json").is_file():
            return load_tokenizer(saved)
        if not self.main:
            raise RecipeError(
                f"the main process has not written {saved}; if it reports no error of its own, --output-dir has to "
                "be the same folder on all machines"
            )
        try:
            tokenizer = train_tokenizer(
                pairs,
                self.model.tokenizer,
                vocab_size=self.model.vocab_size,
                min_frequency=self.model.min_frequency,
                merge_punctuation=self.model.merge_punctuation,
                features=bool(self.data.feature_columns),
                source_normalization=self.model.source_normalization,
                show_progress=sys.stderr.isatty(),
            )
        except ValueError as error:  # too small a vocabulary, or no text
            raise RecipeError(first_line(error)) from error
        tokenizer.save_pretrained(saved)
        return tokenizer

    def _model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        model: PreTrainedModel
        if name := self.model.model_name_or_path:
            fields = self.model.regularization()
            # Half precision is too coarse for updates; bf16 and fp16 train in mixed precision.
            model = load_model(name, dtype=torch.float32, trust_remote_code=self.trust_remote_code, fields=fields)
            check_tokenizer(tokenizer, model.config, name)
            is_ours = model.config.model_type == VanillaTransformerConfig.model_type
            if self.model.gnmt_length_penalty is not None and not is_ours:
                raise RecipeError(f"gnmt_length_penalty has no effect on a {type(model).__name__}; leave it out")
        else:
            config = self.model.config_for(tokenizer)
            model = VanillaTransformerForConditionalGeneration(config)
            if self.model.embeddings and self.checkpoint is None:
                file, scale = self.model.embeddings, config.embedding_scale
                # One where they are shared.
                sides = {model.get_decoder().embed_tokens.weight: True, model.get_encoder().embed_tokens.weight: False}
                for weight, is_target in sides.items():
                    found = use_vectors(file, tokenizer, weight, scale, is_target=is_target)
                    self.say(f"Embeddings: {found:,} of {len(weight):,} tokens have a vector of {file}")
        for option, value in self.model.decoding().items():
            setattr(model.generation_config, option, value)
        if self.args.ddp_find_unused_parameters is None:
            self.args.ddp_find_unused_parameters = False  # every update uses all; looking for others takes time
        words = f"vocabulary of {len(tokenizer):,}"
        if getattr(tokenizer, "separate_vocabs", False):
            words = f"vocabularies of {len(tokenizer):,} (source) and {len(tokenizer.target_encoder):,} (target)"
        self.say(f"Model: {model.num_parameters():,} parameters, {words}")
        return model


def _be_quiet() -> None:
    """Silences everything but the run's own lines and warnings."""
    transformers_logging.disable_progress_bar()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    logging.getLogger("accelerate").setLevel(logging.WARNING)
