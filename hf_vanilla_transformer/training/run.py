"""The training run of `vanilla-transformer train`, from the corpora to the scores."""

import copy
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import datasets
import torch
from datasets import Dataset, IterableDataset
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging

from ..checkpoints.completeness import step_of
from ..checkpoints.files import check_links
from ..checkpoints.loading import check_tokenizer, load_config, load_model, load_tokenizer
from ..data.bpe_dropout import BPEDropout
from ..data.corpora import Cleaning, read_corpus, resegment, rows_with, state_of, tokenize
from ..data.formats import Corpus
from ..data.hub_names import check_model_on_hub
from ..data.symbols import check_kinds, reads_features, shown, train_tokenizer, unknown_ids, unknown_symbols
from ..data.vectors import read_vectors, use_vectors
from ..engine.memory import keep_freed_memory
from ..errors import first_line
from ..hub.upload import check_token
from ..metrics import corpus_bleu
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .callbacks import Console
from .evaluation import TranslationMetrics, by_length, measures_of
from .finish import finish_run
from .preflight import measured, preflight
from .recipe import Arguments, RecipeError
from .run_facts import run_facts
from .run_folder import (
    TOKENIZER,
    check_same_data,
    check_same_options,
    checkpoint_to_resume,
    is_empty,
    only_process_in,
    read_recipe,
    save_model,
    write_recipe,
)
from .trainer import VanillaTransformerTrainer

# Options that may change when a run resumes, beside those of validation and test data.
FREE_OPTIONS = {
    *("preprocessing_num_workers", "num_beams", "gnmt_length_penalty", "early_stopping"),
    # Data may move: the fingerprint of its content decides.
    *("data_dir", "train_source", "train_target", "train_data", "dataset_name"),
}
BEST = "metric_for_best_model"  # checkpoints keep its best value, which another metric's would be compared with


class FinishError(RuntimeError):
    """The model is trained, but averaging, scoring or the card has failed; the message says why, and the fix."""


class Run:
    """A training run.

    Args:
        arguments: What `parse_recipe` returns.
        say: Is called with each line for the user, in the main process only.
        resume: Whether to resume from the last complete checkpoint of the output folder.
        dry_run: Whether to train for a few updates in a temporary folder only.
        trust_remote_code: Whether code that comes with a model or a tokenizer may run.
    """

    def __init__(
        self,
        arguments: Arguments,
        say: Callable[[str], object] = print,
        *,
        resume: bool = False,
        dry_run: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        self.data, self.model, self.args = arguments
        self.resume, self.dry_run, self.trust_remote_code = resume, dry_run, trust_remote_code
        self.output = Path(self.args.output_dir or "")
        self.main = self.args.process_index == 0
        self.say = say if self.main else lambda line: None
        self.checkpoint: Path | None = None  # to resume from
        self.trainer: VanillaTransformerTrainer | None = None  # lives on: freeing its process group may hang
        self.corpora: dict[str, Corpus] = {}  # of each part, once it is checked
        self.cleaning = Cleaning(self.data.max_length, self.data.max_length_ratio)
        if dry_run:
            self.args.push_to_hub = False

    def check(self) -> None:
        """Checks the options before any data is read.

        Raises:
            RecipeError: They contradict each other or are invalid, or the output folder can't be used.
            CorpusError: A file is missing or empty.
            HubError: A model or tokenizer is neither a folder nor on the Hub, or there is no token to push with.
        """
        if self.resume and self.dry_run:
            raise RecipeError("--dry-run trains in a temporary folder, with no run to resume; leave --resume out")
        if not self.args.output_dir:
            raise RecipeError("the run needs an output folder: --output-dir outputs/my-run")
        self._check_corpora()
        for name in (self.model.model_name_or_path, self.model.tokenizer_name_or_path):
            if name and not Path(name).is_dir():
                check_model_on_hub(name)
        if self.main and self.args.push_to_hub:
            check_token()
        self._check_model()
        self._check_metrics()
        if self.main and not self.dry_run:
            self._check_folder()

    def _check_model(self) -> None:
        if self.data.feature_columns and any(corpus.source for corpus in self.corpora.values()):
            raise RecipeError("feature_columns are columns of tables; give tables, or write features behind tabs")
        if not self._tokenizer_name:
            try:
                check_kinds(self.model.tokenizer, bool(self.data.feature_columns), self.model.source_normalization)
            except ValueError as error:
                raise RecipeError(str(error)) from error
            if self.data.bpe_dropout and self.model.tokenizer != ["bpe"]:
                raise RecipeError("bpe_dropout drops merges of bpe; leave it out, or give tokenizer bpe")
        if not self.model.model_name_or_path:
            config = self.model.config(self.model.vocab_size)  # the tokenizer's vocabulary may be smaller
            if self.model.embeddings and not self.resume:
                next(read_vectors(self.model.embeddings, config.d_model), None)
        elif self.model.embeddings:
            raise RecipeError("embeddings are for a new model, and model_name_or_path has its own; leave one out")

    def _check_corpora(self) -> None:
        self.corpora = {part: self.data.corpus(part) for part in ("train", "validation", "test")}
        if not self.corpora["train"]:
            raise RecipeError("no training data; give train_source and train_target, or train_data")
        evaluates = self.args.eval_strategy != "no" or self.args.eval_on_start
        if evaluates and not self.corpora["validation"]:
            raise RecipeError("eval_strategy needs validation_source and validation_target, or validation_data")
        if self.data.bpe_dropout and self.data.streaming:
            raise RecipeError(
                "bpe_dropout segments the corpus before training starts, and streaming reads it during training; leave "
                "one of the two out"
            )
        if self.data.streaming and 0 < self.args.per_device_train_batch_tokens < self.data.max_length:
            raise RecipeError(
                f"a sentence of max_length {self.data.max_length} may not fit into per_device_train_batch_tokens "
                f"{self.args.per_device_train_batch_tokens}; lower the one or raise the other"
            )

    def _check_metrics(self) -> None:
        try:
            corpus_bleu(["a"], ["a"], tokenize=self.args.bleu_tokenize)
        except Exception as error:  # an unknown tokeniser, or a package or a file that it needs
            raise RecipeError(f"bleu_tokenize is {self.args.bleu_tokenize!r}: {first_line(error)}") from error

    def _check_folder(self) -> None:
        """Checks that the output folder is new, or has a run with the same options to resume."""
        check_links(self.output)
        if not self.resume:
            if not is_empty(self.output):
                raise RecipeError(f"{self.output} is not empty; resume with --resume, or give another --output-dir")
            return
        fixed, before = self._fixed(), read_recipe(self.output)
        older = fixed | asdict(type(self.data)()) | asdict(type(self.model)())  # has fewer options
        if None in (before.get(BEST), fixed[BEST]):
            del fixed[BEST]
        check_same_options(self.output, older | before, fixed)

    def _fixed(self) -> dict[str, object]:
        """Returns the options that must not change when a run resumes: those of data, model and optimizer."""
        options = asdict(self.data) | asdict(self.model)
        fixed = {name: value for name, value in options.items() if name not in FREE_OPTIONS}
        fixed = {name: value for name, value in fixed.items() if not name.startswith(("validation_", "test_"))}
        fixed["optim"] = str(getattr(self.args.optim, "value", self.args.optim))
        fixed[BEST] = self.args.metric_for_best_model
        return fixed | ({"seed": self.args.seed_of_data} if self.data.bpe_dropout else {})  # decides the segmentations

    def run(self) -> None:
        """Trains as the only process in the output folder, or makes a dry run.

        Raises:
            RecipeError: The run can't start, or its rehearsal fails.
            CorpusError: A corpus can't be read, or nothing of it is left.
            DivergedError: Loss or gradients aren't finite any more.
            FinishError: The model is trained, but can't be averaged, scored or described.
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
                self._check_folder()  # once more, as another process may have been faster
            self._begin()
            self.trainer = trainer = self._prepared()
            if self.dry_run:
                for line in measured(trainer):
                    self.say(line)
            else:
                seconds = self._train(trainer)
                if self.main:
                    self._finish(trainer, seconds)

    def _begin(self) -> None:
        """Finds the checkpoint to resume from, or removes files of a run that stopped before its first update."""
        set_seed(self.args.seed)
        _be_quiet()
        if self.resume:
            self.checkpoint = checkpoint_to_resume(self.output, self.args.max_steps)
        elif self.main and not self._tokenizer_name:
            shutil.rmtree(self.output / TOKENIZER, ignore_errors=True)

    def _prepared(self) -> VanillaTransformerTrainer:
        """Returns the trainer, after the run's end was rehearsed with it."""
        trainer = self._trainer()
        counts = copy.deepcopy(vars(self.cleaning))
        preflight(trainer)
        vars(self.cleaning).update(counts)  # the rehearsal has read the first pairs of a stream
        return trainer

    def _train(self, trainer: VanillaTransformerTrainer) -> float:
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

    def _finish(self, trainer: VanillaTransformerTrainer, seconds: float) -> None:
        in_all = None if self.checkpoint else seconds  # the time up to the checkpoint isn't known
        try:
            facts = run_facts(trainer, in_all)
            finish_run(trainer, facts, self.data, self.corpora, self.say, self.trust_remote_code)
        except ValueError as error:
            fix = "fix it, and give --resume to repeat what follows training"
            raise FinishError(f"the model is trained, but {first_line(error)}; {fix}") from error

    def _trainer(self) -> VanillaTransformerTrainer:
        """Reads and tokenizes the corpora, trains the tokenizer, builds the model and its trainer."""
        # One process per machine does the work and the others read its cache; the tokenizer is trained by one in all.
        with self.args.main_process_first(desc="reading the corpus"):
            pairs = read_corpus(self.corpora["train"], self.data.streaming)
            if self.corpora["test"]:
                read_corpus(self.corpora["test"])  # a wrong line is an error now
            if self.main:
                fingerprint = state_of(self.corpora["train"], pairs)
                if self.resume:
                    check_same_data(self.output, fingerprint)
                write_recipe(self.output, self._fixed(), fingerprint)
        with self.args.main_process_first(local=False, desc="training the tokenizer"):
            tokenizer = self._tokenizer(pairs)
            if self.checkpoint is not None:  # it may have changed since
                config = load_config(self.checkpoint, trust_remote_code=self.trust_remote_code)
                check_tokenizer(tokenizer, config, str(self.checkpoint))
        validation = None
        with self.args.main_process_first(desc="tokenizing the corpus"):
            train = self._tokenized(pairs, tokenizer)
            self._say_unknown("Training", train, tokenizer)
            if self.corpora["validation"]:
                lines = read_corpus(self.corpora["validation"])
                validation = by_length(tokenize(lines, tokenizer, Cleaning(sys.maxsize)))
                self._say_unknown("Validation", validation, tokenizer)
        if not self.data.streaming:
            self.say(f"Training data: {self.cleaning}")
        model = self._model(tokenizer)
        metrics = TranslationMetrics(
            tokenizer,
            self.args.bleu_tokenize,
            metrics=measures_of(self.args, tokenizer),
            num_samples=self.args.num_samples,
        )
        trainer = VanillaTransformerTrainer(
            model=model,
            args=self.args,
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

    def _tokenized(
        self, pairs: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase
    ) -> Dataset | IterableDataset:
        workers = self.data.preprocessing_num_workers
        train = tokenize(pairs, tokenizer, self.cleaning, workers)
        if not self.data.bpe_dropout:
            return train
        try:
            dropout = BPEDropout(tokenizer, self.data.bpe_dropout)
            copies, longest = self.data.bpe_dropout_copies, self.data.max_length
            return resegment(train, dropout, copies, self.args.seed_of_data, longest, workers)
        except ValueError as error:  # another kind of tokenizer
            raise RecipeError(first_line(error)) from error

    def _say_unknown(self, part: str, pairs: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase) -> None:
        """Says which symbols of a corpus the tokenizer doesn't know; a stream isn't read for it."""
        columns = {"source": "input_ids", "target": "labels"}
        if isinstance(pairs, IterableDataset) or not set(columns) <= set(pairs.column_names):
            return
        for (side, ids), unknown in zip(columns.items(), unknown_ids(tokenizer), strict=True):
            if unknown is not None and len(rows := rows_with(pairs, ids, unknown)):
                found = unknown_symbols(tokenizer, pairs.select(rows)[side], is_target=side == "target")
                self.say(f"{part} data: the {side} has {shown(found)}")

    @property
    def _tokenizer_name(self) -> str | None:
        return self.model.tokenizer_name_or_path or self.model.model_name_or_path

    def _tokenizer(self, pairs: Dataset | IterableDataset) -> PreTrainedTokenizerBase:
        """Loads the tokenizer that the recipe, a checkpoint or an earlier process names, or trains a new one."""
        saved = self.output / TOKENIZER
        if name := self._tokenizer_name:
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
            regularization = self.model.regularization()
            # Half precision is too coarse for updates; bf16 and fp16 train in mixed precision.
            model = load_model(name, dtype=torch.float32, trust_remote_code=self.trust_remote_code, **regularization)
            if self.model.tokenizer_name_or_path is None:
                check_tokenizer(tokenizer, model.config, name)
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
        self.say(f"Model: {model.num_parameters():,} parameters, vocabulary of {len(tokenizer):,}")
        return model


def _be_quiet() -> None:
    """Silences everything but the run's own lines and warnings."""
    transformers_logging.disable_progress_bar()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    logging.getLogger("accelerate").setLevel(logging.WARNING)
