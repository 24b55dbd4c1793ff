"""`vanilla-transformer train`."""

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import first_line
from .common import RunError, UsageError, loading

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedModel

    from ..training.recipe import Arguments, DataArguments, ModelArguments, VanillaTransformerTrainingArguments
    from ..training.trainer import VanillaTransformerTrainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Train a model from a recipe."""
    parser.epilog = (
        "Every option of a recipe can also be given on the command line, which overrides the recipe: --max-steps 1000, "
        "--learning-rate 5e-4 ... (--list-options lists them). Several devices or machines: accelerate launch -m "
        "hf_vanilla_transformer train --config RECIPE"
    )
    parser.add_argument(
        "--config",
        nargs="+",
        action="extend",
        default=[],
        metavar="RECIPE",
        help="a YAML file of options, or the name of one of the package's recipes, such as multi30k_tiny; of several, "
        "later ones override earlier ones",
    )
    parser.add_argument(
        "--resume", action="store_true", help="resume from the last complete checkpoint of --output-dir"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, train for a few updates in a temporary folder, and show sizes, a batch and the time",
    )
    parser.add_argument(
        "--verify-data",
        action="store_true",
        help="compare all bytes of the training files with those that the run was started with (with --resume; give it "
        "at the start, too), not only a sample",
    )
    parser.add_argument(
        "--accept-changed-data", action="store_true", help="with --resume, train on although the files have changed"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that comes with model_name_or_path or tokenizer_name_or_path",
    )
    parser.add_argument("--list-options", action="store_true", help="list all options of a recipe with their defaults")
    parser.add_argument("--list-recipes", action="store_true", help="list the package's recipes, and where they are")
    parser.set_defaults(run=_train, takes_overrides=True)


@dataclass(frozen=True)
class _Switches:
    """What the command line says beside the recipe."""

    resume: bool
    dry_run: bool
    verify_data: bool
    accept_changed_data: bool
    trust_remote_code: bool


def _train(arguments: argparse.Namespace) -> None:
    """Parses the recipe and runs the training, or lists options or recipes."""
    if arguments.list_options or arguments.list_recipes:
        with loading():
            from ..training.recipe import describe_options, describe_recipes
        print(describe_options() if arguments.list_options else describe_recipes())
        return
    recipe = _recipe(arguments)
    with loading():
        from .. import register
        from ..checkpoints.files import LinkError
        from ..checkpoints.loading import CheckpointError
        from ..data.batching import BatchingError
        from ..data.formats import CorpusError
        from ..data.hub_names import HubError
        from ..training.recipe import RecipeError
        from ..training.trainer import DivergedError

        register()
    switches = {field.name: getattr(arguments, field.name) for field in fields(_Switches)}
    try:
        run = _Run(*recipe, _Switches(**switches))
        run.check()
        run.run()
    except (RecipeError, CorpusError, BatchingError, HubError, CheckpointError, LinkError) as error:
        raise UsageError(first_line(error)) from error
    except DivergedError as error:
        raise RunError(first_line(error)) from error


def _recipe(arguments: argparse.Namespace) -> "Arguments":
    """Parses the recipe before what only a training needs is imported, so that a mistyped option is told at once."""
    with loading():
        from ..training.recipe import RecipeError, parse_recipe

        try:
            switches = [option for option in arguments.parser._option_string_actions if option.startswith("--")]
            return parse_recipe(arguments.config, arguments.overrides, switches)
        except RecipeError as error:
            raise UsageError(first_line(error)) from error


class _Run:
    """One training run, from the corpora to the scores."""

    def __init__(
        self,
        data: "DataArguments",
        model: "ModelArguments",
        training: "VanillaTransformerTrainingArguments",
        switches: _Switches,
    ) -> None:
        self.data, self.model, self.args, self.switches = data, model, training, switches
        self.resume = switches.resume or training.resume_from_checkpoint is not None
        self.output = self.folder = Path(training.output_dir or "")  # they differ in a dry run
        self.main = training.process_index == 0

    def check(self) -> None:
        """Checks the options before anything is read.

        Raises:
            UsageError: They contradict each other.
            CorpusError: A file is missing or empty.
            RecipeError: The model's decoding options make no sense, or too few checkpoints are saved to be averaged.
            HubError: A model or tokenizer is neither a folder nor on the Hub, or there is no token to push with.
        """
        from ..data.hub_names import check_model_on_hub
        from ..hub.upload import check_token
        from ..training.preflight import check_average

        if not self.args.output_dir:
            raise UsageError("the run needs an output folder: --output-dir outputs/my-run")
        if not self.data.corpus("train"):
            raise UsageError("no training data; give train_source and train_target, or train_data")
        if self.args.eval_strategy != "no" and not self.data.corpus("validation"):
            raise UsageError("eval_strategy needs validation_source and validation_target, or validation_data")
        for part in ("validation", "test"):
            self.data.corpus(part)  # checks that the files exist
        for name in (self.model.model_name_or_path, self.model.tokenizer_name_or_path):
            if name and not Path(name).is_dir():
                check_model_on_hub(name)
        if self.main and self.args.push_to_hub and not self.switches.dry_run:
            check_token()
        if self.switches.accept_changed_data and not self.resume:
            raise UsageError("--accept-changed-data is for a run that is resumed; give --resume too, or leave it out")
        self.model.decoding()
        self._check_bpe_dropout()
        self._check_metrics()
        check_average(self.args)
        if self.main:
            self._check_folder()

    def _check_bpe_dropout(self) -> None:
        if not 0 <= self.data.bpe_dropout <= 1:
            raise UsageError(f"bpe_dropout is {self.data.bpe_dropout}; give a probability, such as 0.1")
        if self.data.bpe_dropout and self.data.bpe_dropout_copies < 1:
            raise UsageError(f"bpe_dropout_copies is {self.data.bpe_dropout_copies}; give 1 or more")
        if self.data.bpe_dropout and self.data.streaming:
            raise UsageError(
                "bpe_dropout segments the corpus before training starts, and streaming reads it during training; leave "
                "one of the two out"
            )

    def _check_metrics(self) -> None:
        from ..metrics import corpus_bleu

        try:
            corpus_bleu(["a"], ["a"], tokenize=self.args.bleu_tokenize)
        except Exception as error:  # an unknown tokeniser, or a package or a file that it needs
            raise UsageError(f"bleu_tokenize is {self.args.bleu_tokenize!r}: {first_line(error)}") from error

    def run(self) -> None:
        """Trains, or does what `--dry-run` says, as the only process in the output folder."""
        from ..training.run_folder import locked

        with ExitStack() as stack:
            if self.main and not self.switches.dry_run:
                stack.enter_context(locked(self.output))
                self._check_folder()  # once more, as another process may have been faster
            self._check_data()
            if self.switches.dry_run:
                self.output = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dry-run-")))
                self.args.output_dir = str(self.output)
                self.args.push_to_hub = False
            self.train()

    def _check_folder(self) -> None:
        """Checks that the output folder is new, or has a run with the same options to resume."""
        from ..checkpoints.files import check_links
        from ..training.run_folder import check_same_recipe, is_empty, read_recipe

        check_links(self.output)  # a run would write there
        if not self.resume:
            if not is_empty(self.output):
                raise UsageError(f"{self.output} is not empty; resume with --resume, or give another --output-dir")
            return
        # An older file lacks newer options.
        before = asdict(type(self.data)()) | asdict(type(self.model)()) | read_recipe(self.output)
        check_same_recipe(self.output, before, self._fixed())

    def _check_data(self) -> None:
        """Takes the fingerprints of the training data; those of a run that is resumed must not have changed."""
        from ..data.fingerprints import changes, fingerprints
        from ..training.run_folder import FINGERPRINTS, check_same_data, read_recipe

        self.fingerprints = fingerprints(self.data.corpus("train"), complete=self.switches.verify_data)
        if not (self.resume and self.main) or self.switches.accept_changed_data:
            return
        before = read_recipe(self.output).get(FINGERPRINTS, {})  # an older run has none
        if before != {}:
            check_same_data(self.output, changes(before, self.fingerprints))
            self.fingerprints = before
        if self.switches.verify_data and not all(entry.get("digest", True) for entry in before.values()):
            self._say("The run was started without --verify-data, so only samples of large files can be compared")

    def _fixed(self) -> dict[str, Any]:
        """The options that must not change when a run resumes: those which decide what it trains on, and the model."""
        free = {"preprocessing_num_workers", "data_dir", "num_beams", "gnmt_length_penalty", "early_stopping"}
        fixed = {name: value for name, value in (asdict(self.data) | asdict(self.model)).items() if name not in free}
        fixed = {name: value for name, value in fixed.items() if not name.startswith(("validation_", "test_"))}
        return fixed | ({"seed": self.args.seed_of_data} if self.data.bpe_dropout else {})  # decides the segmentations

    def train(self) -> None:
        """Trains a model, saves and averages it, scores it and writes its card."""
        from transformers import set_seed

        from ..training.preflight import dry_run, preflight
        from ..training.run_folder import TOKENIZER, check_checkpoint, checkpoint_to_resume, write_recipe

        set_seed(self.args.seed)
        _be_quiet()
        self.checkpoint = None
        if self.resume and not self.switches.dry_run:
            self.checkpoint = checkpoint_to_resume(self.output, self.args.resume_from_checkpoint)
            if self.checkpoint is not None:
                check_checkpoint(self.checkpoint, self._fixed(), self.args.max_steps)
        elif self.main and not self._tokenizer_name:
            shutil.rmtree(self.output / TOKENIZER, ignore_errors=True)
        if self.main and not self.switches.dry_run:
            write_recipe(self.output, self._fixed(), self.fingerprints)
        trainer = self._trainer()
        cleaning = replace(self.cleaning, left_out=self.cleaning.left_out.copy())
        preflight(trainer, self.folder)
        vars(self.cleaning).update(vars(cleaning))  # which has counted the first pairs of a stream
        if self.switches.dry_run:
            for line in dry_run(trainer):
                self._say(line)
        else:
            self._train_and_finish(trainer)

    def _train_and_finish(self, trainer: "VanillaTransformerTrainer") -> None:
        from ..training.finish import finish_run
        from ..training.run_folder import save_model
        from ..training.trainer import run_facts

        if self.resume:
            start = f"Resuming from {self.checkpoint}" if self.checkpoint else "No complete checkpoint: starting anew"
            self._say(start)
        began = time.perf_counter()
        trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        seconds = time.perf_counter() - began
        if self.cleaning.seen and self.data.streaming:
            self._say(f"Training data, as far as the stream was read: {self.cleaning}")
        save_model(trainer, self.output)
        self._say(f"Trained {trainer.state.global_step:,} updates in {seconds / 60:.1f} minutes: {self.output}")
        trainer.accelerator.wait_for_everyone()
        trainer.end()
        if not self.main:
            _end_process()
        in_all = None if self.checkpoint else seconds  # nobody knows how long it took up to the checkpoint
        try:
            finish_run(trainer, run_facts(trainer, in_all), self.data, self._say)
        except ValueError as error:
            fix = "fix it, and give --resume to repeat what follows training"
            raise RunError(f"the model is trained, but {first_line(error)}; {fix}") from error

    def _trainer(self) -> "VanillaTransformerTrainer":
        """Reads and tokenizes the corpora, trains the tokenizer, builds the model and its trainer."""
        from transformers import DataCollatorForSeq2Seq
        from transformers.trainer_callback import PrinterCallback, ProgressCallback

        from ..checkpoints.loading import check_tokenizer, load_config
        from ..data.bpe_dropout import BPEDropout
        from ..data.corpora import Cleaning, resegment, tokenize
        from ..training.run_folder import RecipeKeeper
        from ..training.trainer import TranslationMetrics, VanillaTransformerTrainer, by_length, callbacks_for
        from ..training.translation_log import TranslationLog
        from .console import Console

        self.cleaning = cleaning = Cleaning(self.data.max_length, self.data.max_length_ratio)
        # One process per machine does the work and the others read its cache; the tokenizer is trained by one in all.
        with self.args.main_process_first(desc="reading the corpus"):
            pairs = self._read("train", self.data.streaming)
            if self.data.corpus("test"):
                self._read("test")  # so that a wrong line is told now
        with self.args.main_process_first(local=False, desc="training the tokenizer"):
            tokenizer = self._tokenizer(pairs)
            if self.checkpoint is not None:  # it may have changed since
                check_tokenizer(tokenizer, load_config(self.checkpoint), str(self.checkpoint))
        with self.args.main_process_first(desc="tokenizing the corpus"):
            workers = self.data.preprocessing_num_workers
            train = tokenize(pairs, tokenizer, cleaning, workers)
            if self.data.bpe_dropout:
                try:
                    dropout = BPEDropout(tokenizer, self.data.bpe_dropout)
                except ValueError as error:  # another kind of tokenizer
                    raise UsageError(first_line(error)) from error
                copies, longest = self.data.bpe_dropout_copies, self.data.max_length
                train = resegment(train, dropout, copies, self.args.seed_of_data, longest, workers)
            validation = None
            if self.data.corpus("validation"):
                everything = Cleaning(sys.maxsize)
                lines = self._read("validation")
                lines = lines.add_column("line", range(len(lines)))
                validation = by_length(tokenize(lines, tokenizer, everything))
        if not self.data.streaming:
            self._say(f"Training data: {cleaning}")
        model = self._model(tokenizer)
        metrics = TranslationMetrics(tokenizer, self.args.bleu_tokenize, num_samples=self.args.num_samples)
        trainer = VanillaTransformerTrainer(
            model=model,
            args=self.args,
            train_dataset=train,
            eval_dataset=validation,
            processing_class=tokenizer,
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            compute_metrics=metrics,
            callbacks=[*callbacks_for(self.args), RecipeKeeper(), Console(metrics)],
        )
        for callback in (PrinterCallback, ProgressCallback):  # Console replaces them
            trainer.remove_callback(callback)
        if validation is not None:
            trainer.add_callback(TranslationLog(trainer, validation["line"], len(lines)))
        return trainer

    def _read(self, part: str, streaming: bool = False) -> Any:
        from ..data.corpora import read_corpus

        corpus = self.data.corpus(part)
        if part == "train":
            # What is read from the Hub is what the fingerprints say.
            revisions = [
                self.fingerprints.get(f"data {n}", {}).get("revision") for n in range(1, len(corpus.tables) + 1)
            ]
            corpus = replace(corpus, revisions=tuple(revisions))
        return read_corpus(corpus, streaming)

    @property
    def _tokenizer_name(self) -> str | None:
        return self.model.tokenizer_name_or_path or self.model.model_name_or_path

    def _tokenizer(self, pairs: "Dataset | IterableDataset") -> Any:
        """Loads the tokenizer that the recipe, a checkpoint or an earlier process names, or trains a new one."""
        from .. import VanillaTransformerTokenizerFast
        from ..checkpoints.loading import CheckpointError, load_tokenizer
        from ..data.corpora import texts_of
        from ..training.run_folder import TOKENIZER

        saved = self.output / TOKENIZER
        if name := self._tokenizer_name:
            return load_tokenizer(name, trust_remote_code=self.switches.trust_remote_code)
        if (saved / "tokenizer.json").is_file():
            try:
                return load_tokenizer(saved)
            except CheckpointError as error:
                if self.checkpoint is None:
                    raise
                self._say(f"{first_line(error)}; that of {self.checkpoint.name} is used")
        if self.checkpoint is not None:
            return load_tokenizer(self.checkpoint)
        if not self.main:
            raise UsageError(
                f"the main process has not written {saved}; if it reports no error of its own, --output-dir is not the "
                "same folder on all machines, which it must be"
            )
        try:
            tokenizer = VanillaTransformerTokenizerFast.train_from_iterator(
                texts_of(pairs),
                vocab_size=self.model.vocab_size,
                merge_punctuation=self.model.merge_punctuation,
                show_progress=sys.stderr.isatty(),
            )
        except ValueError as error:  # too small a vocabulary, or no text
            raise UsageError(first_line(error)) from error
        tokenizer.save_pretrained(saved)
        return tokenizer

    def _model(self, tokenizer: Any) -> "PreTrainedModel":
        import torch

        from .. import VanillaTransformerForConditionalGeneration
        from ..checkpoints.loading import check_tokenizer, load_model
        from ..training.preflight import check_memory

        model: PreTrainedModel
        if name := self.model.model_name_or_path:
            model = load_model(name, trust_remote_code=self.switches.trust_remote_code, **self.model.regularization())
            if self.model.tokenizer_name_or_path is None:
                check_tokenizer(tokenizer, model.config, name)
        else:
            config = self.model.config(len(tokenizer))
            with torch.device("meta"):  # which takes no memory
                check_memory(VanillaTransformerForConditionalGeneration(config).num_parameters())
            model = VanillaTransformerForConditionalGeneration(config)
        for option, value in self.model.decoding().items():
            setattr(model.generation_config, option, value)
        if self.args.ddp_find_unused_parameters is None:
            self.args.ddp_find_unused_parameters = False  # every update uses all; looking for others takes time
        if self.args.keep_freed_memory is None:
            self.args.keep_freed_memory = True
        self._say(f"Model: {model.num_parameters():,} parameters, vocabulary of {len(tokenizer):,}")
        return model

    def _say(self, line: str) -> None:
        if self.main:
            print(line, flush=True)


def _end_process() -> NoReturn:
    """Ends one of several training processes, which has nothing left to do, without shutting the interpreter down.

    A thread of Gloo may still hold a tensor that Python knows. If it lets go of it while the interpreter shuts down,
    the process aborts ("terminate called without an active exception"), and the launcher then kills the main process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _be_quiet() -> None:
    """Silences everything but the run's own lines and warnings."""
    import datasets
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    logging.getLogger("accelerate").setLevel(logging.WARNING)
