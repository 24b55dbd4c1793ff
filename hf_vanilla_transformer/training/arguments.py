"""The options of a training run: three dataclasses, of the data, of the model and of the training."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase, Seq2SeqTrainingArguments

from ..configuration_vanilla_transformer import POSITION_ENCODINGS, VanillaTransformerConfig
from ..data.formats import Corpus, is_table
from ..data.symbols import KINDS, NORMAL_FORMS
from ..metrics import MEASURES
from .options import TASKS, TIED, RecipeError, check_ranges, check_training

Default = TypeVar("Default")


def _list(help: str, *default: str) -> list[str]:
    return field(default_factory=lambda: list(default), metadata={"help": help})


def _option(default: Default, help: str) -> Default:
    return field(default=default, metadata={"help": help})


def _divided(entry: str) -> tuple[str, float | None]:
    """Divides NAME=WEIGHT."""
    name, _, weight = entry.rpartition("=")
    try:
        return (name, float(weight)) if name else (entry, None)
    except ValueError:
        return entry, None


@dataclass
class DataArguments:
    """The corpora, and the selection of their pairs."""

    data_dir: str | None = _option(None, "Folder that relative file names are looked up in (default: the current one).")
    train_source: list[str] = _list(
        "Plain text files to train on, one sentence per line, compressed or not; NAME=WEIGHT gives a corpus a share."
    )
    train_target: list[str] = _list("Their translations, line by line.")
    train_data: list[str] = _list(
        "Tables (.tsv, .csv, .jsonl, .parquet) to train on, or data sets on the Hub; NAME=WEIGHT as above."
    )
    validation_source: list[str] = _list("Text files for the evaluations during training.")
    validation_target: list[str] = _list("Their translations.")
    validation_data: list[str] = _list("Tables or data sets on the Hub for the evaluations during training.")
    test_source: list[str] = _list("Text files to translate and score after training.")
    test_target: list[str] = _list("Their translations.")
    test_data: list[str] = _list("Tables or data sets on the Hub to translate and score after training.")
    source_column: str = _option("source", "Column of the source in tables, or its language in a 'translation' column.")
    target_column: str = _option("target", "Column of the target, or its language.")
    feature_columns: list[str] = _list(
        "Columns with features of the source, such as V;PST, each of which is a symbol (a .tsv without a header: 3)."
    )
    dataset_config_name: str | None = _option(None, "Configuration of the data sets on the Hub, such as de-en.")
    train_split: str = _option("train", "Split of the data sets on the Hub to train on.")
    validation_split: str = _option("validation", "Split for the evaluations during training.")
    test_split: str = _option("test", "Split to score after training.")
    streaming: bool = _option(False, "Read the training data during training, if it is too large for the disk.")
    max_length: int = _option(256, "Leave out pairs with more tokens than this on either side.")
    max_length_ratio: float | None = _option(None, "Leave out pairs with a larger ratio of their lengths.")
    train_weights: list[float] = field(init=False, default_factory=list)  # of texts, then of data; []: none is given

    def __post_init__(self) -> None:
        weights: list[float | None] = []
        for option in ("train_source", "train_data"):
            divided = [_divided(entry) for entry in getattr(self, option)]
            setattr(self, option, [name for name, _ in divided])
            weights += [weight for _, weight in divided]
        if any(weight is not None for weight in weights):
            self.train_weights = [1.0 if weight is None else weight for weight in weights]
        for part in ("train", "validation", "test"):
            source, target, data = (getattr(self, f"{part}_{kind}") for kind in ("source", "target", "data"))
            if source and not target and all(map(is_table, source)):  # both sides are there
                setattr(self, f"{part}_source", [])
                setattr(self, f"{part}_data", [*source, *data])

    def corpus(self, part: str) -> Corpus:
        """Returns the corpus of "train", "validation" or "test"; it is false if no source is given."""
        return Corpus(
            source=tuple(map(self._path, getattr(self, f"{part}_source"))),
            target=tuple(map(self._path, getattr(self, f"{part}_target"))),
            # data_dir doesn't apply to a data set on the Hub.
            tables=tuple(self._path(name) if is_table(name) else name for name in getattr(self, f"{part}_data")),
            source_column=self.source_column,
            target_column=self.target_column,
            feature_columns=tuple(self.feature_columns),
            configuration=self.dataset_config_name,
            split=getattr(self, f"{part}_split"),
            weights=tuple(self.train_weights) if part == "train" else (),
        )

    def _path(self, name: str) -> str:
        return str(Path(self.data_dir or ".", name).expanduser())


@dataclass
class ModelArguments:
    """The model; None means the preset's value."""

    preset: str = _option("base", "Size: base, big, tiny, or a row of Table 3 (A-h1 ... E).")
    tokenizer: list[str] = _list(
        f"Kind of a new tokenizer, {', '.join(KINDS)} (the paper's: bpe); or two of them, for source and target, each "
        "with a vocabulary of its own.",
        "bpe",
    )
    vocab_size: int = _option(37_000, "Most tokens of a new vocabulary (5.1).")
    min_frequency: int | None = _option(None, "Times that a symbol occurs to be known, or a pair of bpe to be merged.")
    merge_punctuation: bool = _option(True, "Whether a token of bpe may span a word and punctuation.")
    source_normalization: str | None = _option(
        None, f"Unicode's form of sources, with two kinds of tokenizers: {', '.join(NORMAL_FORMS)}."
    )
    tokenizer_name_or_path: str | None = _option(None, "A saved tokenizer to use instead of a new one.")
    model_name_or_path: str | None = _option(
        None, "A saved model to start from; its architecture replaces the preset's."
    )
    embeddings: str | None = _option(
        None, "Pretrained vectors of words for a new model: a text file of Word2Vec or GloVe, of size d_model."
    )
    d_model: int | None = _option(None, "Width of every layer's output.")
    encoder_layers: int | None = _option(None, "Layers of the encoder (N).")
    decoder_layers: int | None = _option(None, "Layers of the decoder (N).")
    encoder_attention_heads: int | None = _option(None, "Attention heads of the encoder (h).")
    decoder_attention_heads: int | None = _option(None, "Attention heads of the decoder (h).")
    encoder_ffn_dim: int | None = _option(None, "Feed-forward width of the encoder (d_ff).")
    decoder_ffn_dim: int | None = _option(None, "Feed-forward width of the decoder (d_ff).")
    head_dim: int | None = _option(None, "Width of a head's queries and keys (d_k; default: d_model / h).")
    value_head_dim: int | None = _option(None, "Width of a head's values (d_v; default: d_model / h).")
    dropout: float | None = _option(None, "P_drop on sub-layers and embeddings (5.4).")
    attention_dropout: float | None = _option(None, "Dropout on attention weights (the paper: none).")
    activation_dropout: float | None = _option(None, "Dropout inside the feed-forward layers (the paper: none).")
    label_smoothing: float | None = _option(None, "Label smoothing of the loss (eps_ls, 5.4).")
    max_position_embeddings: int | None = _option(None, "Rows of the positional table.")
    position_encoding: str | None = _option(None, f"{', '.join(POSITION_ENCODINGS)} (learned: Table 3, row E).")
    attention_init_gain: float | None = _option(None, "Gain of Glorot's initialisation of W^Q, W^K, W^V (default: 1).")
    norm_position: str | None = _option(None, "LayerNorm after each sub-layer (post, the paper's) or before it (pre).")
    final_layer_norm: bool | None = _option(
        None, "One more LayerNorm at the end of each stack, as pre-norm models have."
    )
    tied: str | None = _option(
        None, "Matrices that are one (3.4). all: both embeddings and the projection; decoder: the last two; none."
    )
    num_beams: int | None = _option(None, "Beam size in the saved generation config (default: 4, 6.1).")
    gnmt_length_penalty: float | None = _option(None, "alpha in the saved generation config (default: 0.6, 6.1).")
    early_stopping: bool | str | None = _option(None, "When a search ends: true, false or never (default: true, 6.1).")

    @property
    def saved_tokenizer(self) -> str | None:
        """Where the tokenizer is, if it isn't a new one."""
        return self.tokenizer_name_or_path or self.model_name_or_path

    def decoding(self) -> dict[str, object]:
        """Returns the fields of the model's generation config that differ from the paper's."""
        given = self._given("num_beams", "gnmt_length_penalty", "early_stopping")
        return given | ({"early_stopping": False} if self.num_beams == 1 else {})  # it is an option of beam search

    def regularization(self) -> dict[str, object]:
        """Returns the fields of the configuration that regularise training, as far as they are given."""
        return self._given("dropout", "attention_dropout", "activation_dropout", "label_smoothing")

    def _given(self, *names: str) -> dict[str, object]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def config(self, vocab_size: int, **fields: object) -> VanillaTransformerConfig:
        """Returns the configuration of a new model; `fields` are others that the tokenizer decides."""
        known = {field.name for field in dataclasses.fields(VanillaTransformerConfig)}
        given = self._given(*(name for name in vars(self) if name in known)) | TIED.get(self.tied or "", {})
        try:
            return VanillaTransformerConfig.from_preset(self.preset, **{**fields, **given, "vocab_size": vocab_size})
        except Exception as error:  # strict dataclasses raise their own errors
            raise RecipeError(str(error.__cause__ or error)) from error

    def config_for(self, tokenizer: PreTrainedTokenizerBase) -> VanillaTransformerConfig:
        """Returns the configuration of a new model with a tokenizer's ids."""
        ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        if None in (ids["pad_token_id"], ids["eos_token_id"]):
            raise RecipeError("the tokenizer has no padding or no end-of-sentence token; choose another")
        if tokenizer(["a"], text_target=["a"], verbose=False)["labels"][0][-1] != ids["eos_token_id"]:
            raise RecipeError("the tokenizer doesn't end a target with its end-of-sentence token; choose another")
        start = ids["eos_token_id" if ids["bos_token_id"] is None else "bos_token_id"]
        fields: dict[str, object] = {**ids, "decoder_start_token_id": start}
        if getattr(tokenizer, "separate_vocabs", False):  # with a vocabulary for each side
            if self.tied == "all":
                raise RecipeError("the tokenizer has two vocabularies, which can't share a matrix; give tied decoder")
            size = max(tokenizer.target_encoder.values()) + 1
            fields |= {"decoder_vocab_size": size, "share_encoder_decoder_embeddings": False}
        return self.config(max(tokenizer.get_vocab().values()) + 1, **fields)


@dataclass
class VanillaTransformerTrainingArguments(Seq2SeqTrainingArguments):
    """Seq2SeqTrainingArguments with the paper's values (section 5) as defaults, and a few more options."""

    report_to: list[str] = _list(
        "Where to log: tensorboard, wandb, trackio ...; one or several of them, all or none.", "none"
    )
    per_device_train_batch_tokens: int = _option(
        4096,
        "Most padded tokens per batch, on the source side and on the target side; 0: batches of "
        "per_device_train_batch_size sentences. The paper: about 25,000 per update on all devices together.",
    )
    length_tolerance: float = _option(
        0.0,
        "How far lengths are rounded to batch pairs by them: 0.25 gives each batch several lengths, with some more "
        "padding. Short strings need it: from batches of one length they learn less.",
    )
    packed: bool = _option(False, "Rows full of pairs in place of padding; torch_compile then compiles single layers.")
    shuffle_buffer_size: int = _option(100_000, "Pairs that are shuffled and batched together, with streaming.")
    # lrate = factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5) (5.3)
    learning_rate: float | None = _option(None, "Peak learning rate (default: the paper's times learning_rate_factor).")
    learning_rate_factor: float = _option(1.0, "Multiplies the paper's schedule if learning_rate is not given.")
    lr_scheduler_type: str = _option("inverse_sqrt", "Schedule of the learning rate; the paper's is inverse_sqrt.")
    warmup_steps: float = _option(4000, "Updates of linear warm-up.")
    max_steps: int = _option(100_000, "Number of updates; -1: as many as num_train_epochs says.")
    num_train_epochs: float = _option(0.0, "Number of epochs to train for, instead of max_steps.")
    adam_beta2: float = _option(0.98, "Adam's beta2.")
    adam_epsilon: float = _option(1e-9, "Adam's epsilon.")
    max_grad_norm: float = _option(0.0, "Norm that gradients are clipped to; 0: no clipping, as in the paper.")
    predict_with_generate: bool = _option(True, "Translate the validation set at each evaluation, for its scores.")
    metrics: list[str] = _list(
        f"Measures of translations: {', '.join(MEASURES)} (default: bleu and chrf; with words and characters, "
        "exact_match and ser)."
    )
    include_for_metrics: list[str] = _list("Of inputs and loss; samples need inputs.", "inputs")
    metric_for_best_model: str | None = _option(None, "loss, perplexity or one of metrics' measures (default: loss).")
    greater_is_better: bool | None = _option(None, "Of metric_for_best_model (default: as the metric has it).")
    dropout_warmup_steps: int = _option(
        0, "Updates over which dropout rises from 0 to the model's value (curriculum dropout)."
    )
    rdrop_alpha: float = _option(
        0.0, "Weight of R-Drop's divergence of two passes with other dropout (Liang et al. 2021: 5); 0: none."
    )
    early_stopping_patience: int | None = _option(None, "Stop after this many evaluations without improvement.")
    max_nonfinite_updates: int = _option(
        3, "Stop after this many updates in a row whose loss is NaN or infinite; 0: never."
    )
    average_last: int = _option(0, "Number of last checkpoints to average at the end (6.1); 0: none.")
    num_samples: int = _option(3, "Translations of the validation set to show at each evaluation.")
    task: str | None = _option(
        None, f"The card's: {' or '.join(TASKS)} (default: by the tokenizer; of words and characters, text2text)."
    )
    bleu_tokenize: str = _option("13a", "sacreBLEU's tokeniser; none for tokenised text.")
    logging_steps: float = _option(100, "Updates between two log lines.")
    logging_nan_inf_filter: bool = _option(False, "Leave losses of NaN out of the log; a recipe can't.")
    training_shortcuts: bool = _option(
        True, "On a CPU, compute the same loss and gradients in less memory, in bfloat16 in less time."
    )

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():  # transformers only allows bf16 on a CPU with use_cpu
            self.use_cpu, self.dataloader_pin_memory = True, False
        check_ranges(self)
        if self.num_train_epochs and self.max_steps == type(self).max_steps:  # the default, not a choice
            self.max_steps = -1
        if self.has_best_checkpoint and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"  # as transformers has it for load_best_model_at_end
        if self.greater_is_better is None and not MEASURES.get(self.criterion, self.criterion != "perplexity"):
            self.greater_is_better = False  # transformers would take the greatest perplexity for the best
        super().__post_init__()
        self._n_gpu = min(self.n_gpu, 1)  # one process per device, never DataParallel
        check_training(self)

    def __getstate__(self) -> dict[str, object]:
        """The state to pickle, as in training_args.bin: everything but the token."""
        return {**vars(self), "hub_token": None}

    @property
    def has_best_checkpoint(self) -> bool:
        """Whether the run saves, loads or ends by its best evaluation."""
        return self.load_best_model_at_end or self.save_strategy == "best" or self.early_stopping_patience is not None

    @property
    def criterion(self) -> str:
        """`metric_for_best_model` without the Trainer's prefix."""
        return str(self.metric_for_best_model).removeprefix("eval_")

    @property
    def optimizer(self) -> str:
        """The name of the optimizer, which transformers keeps as an enumeration."""
        return str(getattr(self.optim, "value", self.optim))

    @property
    def seed_of_data(self) -> int:
        """Seed of the order of the training data: `data_seed`, or `seed` if there is none."""
        return int(self.seed if self.data_seed is None else self.data_seed)

    def order_of_batches(self, *, streaming: bool) -> dict[str, object]:
        """Returns the options that decide which pairs are in which batch of an epoch, as far as they have an effect."""
        names = ["per_device_train_batch_tokens", "packed"]
        names.append("length_tolerance" if self.per_device_train_batch_tokens else "per_device_train_batch_size")
        # Devices that share a stream divide it, and so do workers; a plan of batches is the same for all.
        names += ["shuffle_buffer_size", "dataloader_num_workers", "world_size"] if streaming else []
        sizes = {"devices times gradient_accumulation_steps": self.world_size * self.gradient_accumulation_steps}
        return {"seed": self.seed_of_data, **{name: getattr(self, name) for name in names}, **sizes}


Arguments = tuple[DataArguments, ModelArguments, VanillaTransformerTrainingArguments]
