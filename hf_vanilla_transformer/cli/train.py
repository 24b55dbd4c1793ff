"""`vanilla-transformer train`."""

import argparse
import json
import logging
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.messages import first_line
from .common import UsageError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedModel

    from ..training.recipe import DataArguments, ModelArguments, VanillaTransformerTrainingArguments
    from ..training.trainer import VanillaTransformerTrainer

RECIPE = "recipe.json"  # the options a run was started with, in its output folder
TOKENIZER = "tokenizer"  # the folder of the tokenizer that a run trains


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Train a model from a recipe."""
    parser.epilog = (
        "Every option of a recipe can also be given on the command line, which overrides the recipe: --max_steps 1000, "
        "--learning_rate 5e-4 ... (--list-options lists them). Several devices or machines: accelerate launch -m "
        "hf_vanilla_transformer train --config RECIPE"
    )
    parser.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="RECIPE",
        help="a YAML file of options, or the name of one of the package's recipes, such as multi30k_tiny; of several, "
        "later ones override earlier ones",
    )
    parser.add_argument(
        "--resume", action="store_true", help="resume from the last complete checkpoint of --output_dir"
    )
    parser.add_argument("--list-options", action="store_true", help="list all options of a recipe with their defaults")
    parser.set_defaults(run=_train, takes_overrides=True)


def _train(arguments: argparse.Namespace) -> None:
    """Parses the recipe and runs the training, or lists the options."""
    from .. import register
    from ..data.batching import BatchingError
    from ..data.corpora import CorpusError
    from ..training.recipe import RecipeError, describe_options, parse_recipe

    if arguments.list_options:
        print(describe_options())
        return
    register()
    try:
        data, model, training = parse_recipe(arguments.config, arguments.overrides)
        run = _Run(data, model, training, arguments.resume)
        run.check()
        run.train()
    except (RecipeError, CorpusError, BatchingError) as error:
        raise UsageError(first_line(error)) from error


class _Run:
    """One training run, from the corpora to the scores."""

    def __init__(
        self,
        data: "DataArguments",
        model: "ModelArguments",
        training: "VanillaTransformerTrainingArguments",
        resume: bool,
    ) -> None:
        self.data, self.model, self.args, self.resume = data, model, training, resume
        self.output = Path(training.output_dir or "")
        self.main = training.process_index == 0

    def check(self) -> None:
        """Checks the options before anything is read.

        Raises:
            UsageError: They contradict each other, or the output folder can't be used.
            CorpusError: A file is missing or empty.
            RecipeError: The model's decoding options make no sense.
        """
        if not self.args.output_dir:
            raise UsageError("the run needs an output folder: --output_dir outputs/my-run")
        if not self.data.corpus("train"):
            raise UsageError("no training data; give train_source and train_target, or train_data")
        if self.args.eval_strategy != "no" and not self.data.corpus("validation"):
            raise UsageError("eval_strategy needs validation_source and validation_target, or validation_data")
        for part in ("validation", "test"):
            self.data.corpus(part)  # checks that the files exist
        self.model.decoding()
        self._check_bpe_dropout()
        self._check_output()
        last, kept = self.args.average_last, self.args.save_total_limit
        if kept and kept < last:
            raise UsageError(
                f"average_last is {last}, but save_total_limit keeps {kept} checkpoints; keep at least {last}"
            )

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

    def _check_output(self) -> None:
        """Checks that the output folder is new, or has a run with the same options to resume."""
        started = self.output / RECIPE
        if not self.resume:
            # A run that stopped before training leaves only these two, which may be replaced.
            if (
                self.main
                and self.output.is_dir()
                and {path.name for path in self.output.iterdir()} - {RECIPE, TOKENIZER}
            ):
                raise UsageError(f"{self.output} is not empty; resume with --resume, or give another --output_dir")
            return
        if not started.is_file():
            raise UsageError(f"there is no run to resume in {self.output}; start one without --resume")
        before, now = json.loads(started.read_text(encoding="utf-8")), self._fixed()
        before = asdict(type(self.data)()) | asdict(type(self.model)()) | before  # an older file lacks newer options
        if changed := [name for name in now if before.get(name) != now[name]]:
            name = changed[0]
            raise UsageError(
                f"{self.output} was started with {name} {before.get(name)!r}, not {now[name]!r}; resume with the same "
                "data and model, or give another --output_dir"
            )

    def _fixed(self) -> dict[str, Any]:
        """The options that must not change when a run resumes."""
        free = {"preprocessing_num_workers", "data_dir", "num_beams", "gnmt_length_penalty", "early_stopping"}
        fixed = {name: value for name, value in (asdict(self.data) | asdict(self.model)).items() if name not in free}
        return fixed | ({"seed": self.args.seed_of_data} if self.data.bpe_dropout else {})  # decides the segmentations

    def train(self) -> None:
        """Trains a model, saves and averages it, scores it and writes its card."""
        from transformers import set_seed

        from ..training.checkpoints import last_complete_checkpoint
        from ..training.finish import finish_run
        from ..training.trainer import run_facts

        set_seed(self.args.seed)
        _be_quiet()
        if self.main and not self.resume:
            self.output.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.output / TOKENIZER, ignore_errors=True)
            (self.output / RECIPE).write_text(json.dumps(self._fixed(), indent=1), encoding="utf-8")
        trainer = self._trainer()
        checkpoint = last_complete_checkpoint(self.output) if self.resume else None
        if self.resume:
            self._say(f"Resuming from {checkpoint}" if checkpoint else "No complete checkpoint: starting from scratch")
        began = time.perf_counter()
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        seconds = time.perf_counter() - began
        if self.cleaning.seen and self.data.streaming:
            self._say(f"Training data, as far as the stream was read: {self.cleaning}")
        trainer.save_model()
        trainer.save_state()
        self._say(f"Trained {trainer.state.global_step:,} updates in {seconds / 60:.1f} minutes: {self.output}")
        trainer.accelerator.wait_for_everyone()
        trainer.end()  # the main process does the rest, and the others end
        if self.main:
            finish_run(run_facts(trainer, seconds), self.data, self.args, self._say)

    def _trainer(self) -> "VanillaTransformerTrainer":
        """Reads and tokenizes the corpora, trains the tokenizer, builds the model and its trainer."""
        from transformers import DataCollatorForSeq2Seq
        from transformers.trainer_callback import PrinterCallback, ProgressCallback

        from ..data.bpe_dropout import BPEDropout
        from ..data.corpora import Cleaning, resegment, tokenize
        from ..training.trainer import TranslationMetrics, VanillaTransformerTrainer, by_length, callbacks_for
        from .console import Console

        self.cleaning = cleaning = Cleaning(self.data.max_length, self.data.max_length_ratio)
        # One process per machine does the work and the others read its cache; the tokenizer is trained by one in all.
        with self.args.main_process_first(desc="reading the corpus"):
            pairs = self._read("train", self.data.streaming)
        with self.args.main_process_first(local=False, desc="training the tokenizer"):
            tokenizer = self._tokenizer(pairs)
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
                validation = by_length(tokenize(self._read("validation"), tokenizer, everything))
        if not self.data.streaming:
            self._say(f"Training data: {cleaning}")
        model = self._model(len(tokenizer))
        metrics = TranslationMetrics(tokenizer, self.args.bleu_tokenize)
        trainer = VanillaTransformerTrainer(
            model=model,
            args=self.args,
            train_dataset=train,
            eval_dataset=validation,
            processing_class=tokenizer,
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            compute_metrics=metrics,
            callbacks=[*callbacks_for(self.args), Console(metrics)],
        )
        for callback in (PrinterCallback, ProgressCallback):  # Console replaces them
            trainer.remove_callback(callback)
        return trainer

    def _read(self, part: str, streaming: bool = False) -> Any:
        from ..data.corpora import read_corpus

        return read_corpus(self.data.corpus(part), streaming)

    def _tokenizer(self, pairs: "Dataset | IterableDataset") -> Any:
        """Loads the tokenizer that the recipe or an earlier process names, or trains and saves a new one."""
        from transformers import AutoTokenizer

        from .. import VanillaTransformerTokenizerFast
        from ..data.corpora import texts_of

        saved = self.output / TOKENIZER
        name = self.model.tokenizer_name_or_path or self.model.model_name_or_path
        if name:
            return AutoTokenizer.from_pretrained(name)
        if (saved / "tokenizer.json").is_file():
            return AutoTokenizer.from_pretrained(saved)
        if not self.main:
            raise UsageError(
                f"the main process has not written {saved}; if it reports no error of its own, --output_dir is not the "
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

    def _model(self, vocab_size: int) -> "PreTrainedModel":
        from transformers import AutoModelForSeq2SeqLM

        from .. import VanillaTransformerForConditionalGeneration

        model: PreTrainedModel
        if self.model.model_name_or_path:
            model = AutoModelForSeq2SeqLM.from_pretrained(self.model.model_name_or_path)
        else:
            model = VanillaTransformerForConditionalGeneration(self.model.config(vocab_size))
        for name, value in self.model.decoding().items():
            setattr(model.generation_config, name, value)
        if self.args.ddp_find_unused_parameters is None:
            self.args.ddp_find_unused_parameters = False  # every update uses all; looking for others takes time
        if self.args.keep_freed_memory is None:
            self.args.keep_freed_memory = True
        self._say(f"Model: {model.num_parameters():,} parameters, vocabulary of {vocab_size:,}")
        return model

    def _say(self, line: str) -> None:
        if self.main:
            print(line, flush=True)


def _be_quiet() -> None:
    """Silences everything but the run's own lines and warnings."""
    import datasets
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    logging.getLogger("accelerate").setLevel(logging.WARNING)
