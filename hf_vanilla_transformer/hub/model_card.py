"""The model card that the Hub shows, filled from the facts of a run (`model_card_template.md`)."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from ..checkpoints.files import check_links, write_text
from ..data.digests import digest_of
from ..errors import printable

if TYPE_CHECKING:  # sacrebleu takes time to import, and a converted model has no scores
    from ..metrics import Score

CARD = "README.md"
FACTS = "model_card.json"  # the facts of a card, beside it; `vanilla-transformer card` makes a new card from them
WEIGHTS = "weights"  # in that file, the digests of the weights that the facts describe
TEMPLATE = Path(__file__).with_name("model_card_template.md")
TAGS = ("vanilla_transformer", "attention-is-all-you-need")
TRANSLATION = "translation"  # the Hub's name of the task
TEXT2TEXT = "text2text-generation"  # other strings in and out; a tag, as the Hub has no such task any more
LIMITS = (
    "The model {does} at a time. Its quality on text that differs from the training data has not been measured, nor "
    "has any bias in that data: check its {outputs} before you rely on them."
)
LOADS = re.compile(r"from_pretrained\(\s*(\"(?:[^\"\\]|\\.)*\")")  # what the card's code loads, as a literal
# Written for a repository only: if a folder is missing, transformers loads the repository of that name.
OWN_CODE = """\
If the package hf_vanilla_transformer is not installed, use the checkpoint's own code. It runs on your machine, so \
read it or trust its author; then leave out the first line and write

```python
tokenizer = AutoTokenizer.from_pretrained({name}, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained({name}, trust_remote_code=True)
```"""
IMPORTS = "import hf_vanilla_transformer  # registers the model with transformers\n"
AFTER_USAGE = "`generate` uses the settings of the checkpoint's generation configuration."
NORMS = {"post": "after each sub-layer", "pre": "before each sub-layer"}
POSITIONS = {
    "paper": "sinusoids",
    "tensor2tensor": "sinusoids, tensor2tensor's layout",
    "fairseq": "sinusoids, fairseq's layout",
    "marian": "sinusoids, Marian's layout",
    "learned": "learned",
}


class CardError(ValueError):
    """A card can't be made or published; the message says why and names the fix."""


@dataclass(frozen=True)
class Evaluation:
    """Scores on one test set."""

    dataset: str  # the test set's name, for instance "Multi30k, test_2016_flickr"
    scores: "Sequence[Score]"  # BLEU, chrF ... with their signatures
    sentences: int | None = None  # their number
    decoding: str | None = None  # for instance "beam 4, length penalty 0.6"
    split: str | None = None

    @property
    def dataset_type(self) -> str:
        """The name that the Hub lists the results under."""
        return re.sub(r"[^\w.-]+", "-", self.dataset).strip("-").lower() or "test"


@dataclass(frozen=True)
class Sample:
    """One sentence with the model's translation and a reference."""

    source: str
    translation: str
    reference: str | None = None


@dataclass(frozen=True)
class CurvePoint:
    """Measurements after some updates; None: not measured."""

    step: int  # number of updates
    target_tokens: int | None = None  # trained on until then
    loss: float | None = None  # that training minimised, since the last line of the log, in nats per token
    perplexity: float | None = None  # of the validation set, per token
    bleu: float | None = None  # of the validation set, as the training measures it
    scores: Mapping[str, float] = field(default_factory=dict)  # its other measures, by names as "exact match"


@dataclass(frozen=True)
class TrainingFacts:
    """How the model was trained; None: unknown, and left out of the card."""

    optimizer: str | None = None  # with its constants, for instance "Adam, beta 0.9 and 0.98, epsilon 1e-9"
    learning_rate: float | None = None  # the highest
    schedule: str | None = None  # for instance "inverse sqrt, 4,000 updates of warm-up"
    batch_tokens: int | None = None  # the most tokens per update on either side, padding included, on all devices
    steps: int | None = None  # number of updates
    target_tokens: int | str | None = None  # trained on in all; as text if the number is rounded
    dropout: float | None = None  # P_drop
    dropout_warmup_steps: int | None = None  # number of updates over which dropout rises from 0 to that
    bpe_dropout: float | None = None  # probability with which merges were dropped in the training data
    label_smoothing: float | None = None  # epsilon_ls
    consistency: str | None = None  # a loss beside the cross-entropy, for instance "R-Drop, alpha 5"
    precision: str | None = None  # for instance "bfloat16"
    seed: int | None = None
    averaged_checkpoints: int | None = None  # their number
    ema_decay: float | None = None  # of the exponential moving average of the weights
    hardware: str | None = None  # for instance "1 x NVIDIA H200"
    seconds: float | None = None  # duration of the training
    software: str | None = None  # for instance "torch 2.13.0, transformers 5.23.0"


# Labels of a recipe's fields in the card; other fields have their names.
LABELS = {
    "learning_rate": "peak learning rate",
    "batch_tokens": "tokens per update, at most",
    "target_tokens": "target tokens in all",
    "steps": "updates",
    "dropout_warmup_steps": "updates of warm-up of dropout",
    "bpe_dropout": "BPE-dropout",
    "ema_decay": "decay of the average of the weights",
    "seconds": "time (h:mm:ss)",
}


@dataclass(frozen=True)
class RunFacts:
    """The facts about a model and its training run; missing ones are left out of the card."""

    name: str  # what the model is loaded by: its name on the Hub, "user/name", or a folder as `local_name` writes it
    title: str | None = None  # the card's, if it isn't the name
    task: str = TRANSLATION  # or TEXT2TEXT: other strings, such as sounds
    config: Mapping[str, Any] = field(default_factory=dict)  # the configuration's fields, `model.config.to_dict()`
    parameters: int | None = None  # their number; tied ones count once
    source_language: str | None = None  # ISO 639 code, "en"
    target_language: str | None = None
    languages: Sequence[str] = ()  # ISO 639 codes, if source and target language aren't given
    converted: bool = False  # from a model of another system
    stock: str | None = None  # the class of transformers' own that it was exported to, "MarianMTModel"
    base_model: str | None = None  # that one's name on the Hub
    license: str | None = None  # the Hub's identifier, "apache-2.0"
    datasets: Sequence[str] = ()  # names on the Hub of the training data
    training_files: Sequence[str | Path] = ()  # the card shows their names without folders
    training_pairs: int | None = None  # number of sentence pairs in the training data
    recipe: TrainingFacts = field(default_factory=TrainingFacts)
    curve: Sequence[CurvePoint] = ()  # in the order of the updates
    evaluations: Sequence[Evaluation] = ()  # one per test set
    samples: Sequence[Sample] = ()  # a few translations, preferably of sentences outside the training data
    limits: str | None = None  # what the model can't do, in Markdown; a general remark follows it
    tags: Sequence[str] = ()  # the Hub's, beside those that every card has
    metadata: Mapping[str, Any] = field(default_factory=dict)  # other fields of the metadata, such as `license_name`


def is_repository(name: str) -> bool:
    """Whether a name can be a repository's, "user/name"; loading it could run code from the Hub."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) is not None


def local_name(folder: str | Path) -> str:
    """Returns a card's name for a folder: it begins with "./", so that it can't be a repository's name.

    An absolute path is cut to the last folder's name, because a card says nothing about its author's machine.
    """
    path = Path(folder)
    if path.name in ("", ".."):
        path = path.resolve()
    name = path.name if path.is_absolute() else path.as_posix()
    return "./" + " ".join(name.split())


def save_card(folder: str | Path, facts: RunFacts) -> None:
    """Writes a model's card, `README.md`, and its facts, `model_card.json`, beside the model's weights.

    Args:
        folder: The folder of the saved model.
        facts: The facts. Of files with training data, the names are kept without their folders.

    Raises:
        LinkError: One of the files is a link out of the folder.
        OSError: The folder can't be written.
    """
    folder = Path(folder)
    check_links(folder, [folder / CARD, folder / FACTS])
    text = str(fill_model_card(facts))
    names = [_file_name(path) for path in facts.training_files]
    facts = replace(facts, name=_loaded_by(facts.name), config={}, training_files=names)
    values = {name: value for name, value in asdict(facts).items() if value not in (None, (), [], {})}
    values["recipe"] = {name: value for name, value in values["recipe"].items() if value is not None}
    write_text(folder / CARD, text)
    write_text(folder / FACTS, json.dumps({WEIGHTS: weights_in(folder), **values}, indent=1, ensure_ascii=False) + "\n")


def weights_in(folder: Path) -> dict[str, str]:
    """Returns the names of the files with weights in a model's folder, each with the file's digest."""
    files = sorted((*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")))
    return {file.name: digest_of(file) for file in files}


def fill_model_card(facts: RunFacts) -> ModelCard:
    """Returns the card: `str(card)` is its text, `card.save(folder / "README.md")` writes it.

    Args:
        facts: The facts. Their text is escaped, except for `limits`.
    """
    name = _loaded_by(facts.name)
    sentence = facts.samples[0].source if facts.samples else "..."
    metadata = _metadata(facts, name)
    card: ModelCard = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        metadata=metadata.to_yaml(),
        title=_text(facts.title or _title(name)),
        introduction=_introduction(facts),
        after_usage=f"It is a {facts.stock} and needs no code of its own. {AFTER_USAGE}"
        if facts.stock
        else AFTER_USAGE,
        imports="" if facts.stock else IMPORTS,
        name_literal=_literal(name),
        sentence_literal=_literal(sentence),
        own_code=OWN_CODE.format(name=_literal(name)) if is_repository(name) and not facts.stock else "",
        architecture=_value_table(architecture_rows(facts.config, facts.parameters)),
        training_data=_training_data(facts),
        recipe=_value_table(recipe_rows(facts.recipe)),
        curve=_curve(facts.curve),
        results=_results(facts.evaluations),
        samples=_samples(facts.samples, _outputs(facts)),
        outputs=_outputs(facts),
        measures=" and ".join(["perplexity", *_measures(facts.curve)]),
        limits="\n\n".join(filter(None, (facts.limits, LIMITS.format(does=_does(facts), outputs=_outputs(facts))))),
    )
    card.text = printable(card.text.rstrip()) + "\n"
    return card


def load_card(file: Path) -> ModelCard:
    """Reads a card.

    Raises:
        CardError: It isn't UTF-8, its metadata isn't YAML, or has aliases, which can expand to any size.
    """
    try:
        block = REGEX_YAML_BLOCK.search(file.read_text(encoding="utf-8-sig"))
        if block and any(isinstance(token, yaml.AliasToken) for token in yaml.scan(block[2])):
            raise ValueError("it has an alias of YAML; write its value")
        card: ModelCard = ModelCard.load(file)
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())[:200]
        raise CardError(f"{file} isn't a model card ({problem}); correct its metadata, or remove it") from error
    return card


def _outputs(facts: RunFacts) -> str:
    return "translations" if facts.task == TRANSLATION else "outputs"


def _does(facts: RunFacts) -> str:
    return "translates one sentence" if facts.task == TRANSLATION else "reads one line"


def _metadata(facts: RunFacts, name: str) -> ModelCardData:
    languages = [one for one in (facts.source_language, facts.target_language, *facts.languages) if one]
    made = {
        "library_name": "transformers",
        "pipeline_tag": facts.task if facts.task == TRANSLATION else None,
        "license": facts.license,
        "language": list(dict.fromkeys(languages)) or None,
        "base_model": facts.base_model,
        "tags": list(dict.fromkeys((*TAGS, *([] if facts.task == TRANSLATION else [facts.task]), *facts.tags))),
        "datasets": list(facts.datasets) or None,
        "model_name": name.rpartition("/")[2] if facts.evaluations else None,
        "eval_results": _eval_results(facts.evaluations, facts.task) or None,
    }
    return ModelCardData(**{**made, **facts.metadata})


def _eval_results(evaluations: Sequence[Evaluation], task: str) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=task,
            task_name=task.replace("-", " ").title(),
            dataset_type=evaluation.dataset_type,
            dataset_name=evaluation.dataset,
            dataset_split=evaluation.split,
            metric_type="chrf" if score.name.startswith("chrF") else score.name.lower().replace(" ", "_"),
            metric_name=score.name,
            metric_value=round(score.value, 2),
            metric_args={"signature": score.signature},
        )
        for evaluation in evaluations
        for score in evaluation.scores
    ]


def _introduction(facts: RunFacts) -> str:
    languages, origin = "", "trained with"
    if facts.source_language and facts.target_language:
        languages = f" that translates from {_code(facts.source_language)} to {_code(facts.target_language)}"
    if facts.converted:
        base = facts.base_model
        link = f" from [{_text(base)}](https://huggingface.co/{quote(base)})" if base else ""
        origin = f"converted{link} by"
    return (
        "A Transformer as in [Attention Is All You Need](https://arxiv.org/abs/1706.03762) (Vaswani et al. 2017)"
        f"{languages}, {origin} hf_vanilla_transformer."
    )


def architecture_rows(config: Mapping[str, Any], parameters: int | None = None) -> list[tuple[str, str]]:
    """Describes a model's sizes in the paper's symbols, as text: labels and values, without unknown ones."""
    rows = [
        ("layers (N), encoder + decoder", _both_stacks(config, "layers")),
        ("width (d_model)", config.get("d_model")),
        ("attention heads (h)", _both_stacks(config, "attention_heads")),
        ("width of a head's queries and keys (d_k)", config.get("head_dim")),
        ("width of a head's values (d_v)", config.get("value_head_dim")),
        ("feed-forward width (d_ff)", _both_stacks(config, "ffn_dim")),
        ("feed-forward activation", config.get("activation_function")),
        ("layer normalisation", NORMS.get(str(config.get("norm_position")))),
        ("positions", POSITIONS.get(str(config.get("position_encoding")))),
        ("vocabulary", _vocabulary(config)),
        ("shared embeddings", _sharing(config)),
        ("parameters", parameters),
    ]
    return _known(rows)


def _known(rows: Iterable[tuple[str, object]]) -> list[tuple[str, str]]:
    """Leaves out unknown values, and writes numbers with commas."""
    return [
        (label, f"{value:,}" if isinstance(value, int) else str(value)) for label, value in rows if value is not None
    ]


def _both_stacks(config: Mapping[str, Any], name: str) -> str | int | None:
    """The encoder's and the decoder's value, "6 + 6"; a single one if they are equal and not numbers of layers."""
    encoder, decoder = config.get(f"encoder_{name}"), config.get(f"decoder_{name}")
    if encoder is None or decoder is None:
        return None
    return int(encoder) if encoder == decoder and name != "layers" else f"{_value(encoder)} + {_value(decoder)}"


def _vocabulary(config: Mapping[str, Any]) -> str | None:
    if config.get("vocab_size") is None:
        return None
    target = config.get("decoder_vocab_size")
    source = f"{config['vocab_size']:,} tokens"
    return f"{source}, one for both sides" if target is None else f"{source} (source), {target:,} (target)"


def _sharing(config: Mapping[str, Any]) -> str | None:
    shared, tied = config.get("share_encoder_decoder_embeddings"), config.get("tie_word_embeddings")
    if shared is None or tied is None:
        return None
    if shared:
        return "source, target and output" if tied else "source and target"
    return "target and output" if tied else "none"


def _training_data(facts: RunFacts) -> str:
    lines = [f"- [{_text(name)}](https://huggingface.co/datasets/{quote(name)})" for name in facts.datasets]
    if facts.training_files:
        lines.append("- files: " + ", ".join(_code(_file_name(path)) for path in facts.training_files))
    if facts.training_pairs is not None:
        pairs = "sentence pairs" if facts.task == TRANSLATION else "pairs"
        lines.append(f"- {facts.training_pairs:,} {pairs}")
    return "\n".join(lines)


def recipe_rows(recipe: TrainingFacts) -> list[tuple[str, str]]:
    """Describes a training as text: labels and values, without unknown ones."""
    values = {name: value for name, value in asdict(recipe).items() if value is not None}
    texts: dict[str, Callable[[Any], object]] = {
        "learning_rate": "{:.4g}".format,
        "seed": str,
        "seconds": lambda seconds: timedelta(seconds=round(seconds)),
    }
    return _known(
        (LABELS.get(name, name.replace("_", " ")), texts[name](value) if name in texts else value)
        for name, value in values.items()
    )


def _curve(curve: Sequence[CurvePoint]) -> str:
    """The table of the learning curve; a column that no point has a value for is left out."""
    measures = _measures(curve)
    rows = [
        (
            f"{point.step:,}",
            _value(point.target_tokens),
            "" if point.loss is None else f"{point.loss:.3f}",
            "" if point.perplexity is None else f"{point.perplexity:,.2f}",
            *(f"{scores[name]:.2f}" if name in (scores := _scores(point)) else "" for name in measures),
        )
        for point in curve
    ]
    titles = ["updates", "target tokens", "training loss", "validation perplexity"]
    return _table([*titles, *(f"validation {name}" for name in measures)], rows)


def _scores(point: CurvePoint) -> Mapping[str, float]:
    return point.scores if point.bleu is None else {"BLEU": point.bleu, **point.scores}


def _measures(curve: Sequence[CurvePoint]) -> list[str]:
    """The names of the measures that a curve has beside perplexity."""
    return list(dict.fromkeys(name for point in curve for name in _scores(point)))


def _results(evaluations: Sequence[Evaluation]) -> str:
    rows = [
        (
            _text(evaluation.dataset),
            _value(evaluation.sentences),
            _text(evaluation.decoding or ""),
            _text(score.name),
            f"{score.value:.2f}",
            _code(score.signature),
        )
        for evaluation in evaluations
        for score in evaluation.scores
    ]
    return _table(["test set", "sentences", "decoding", "metric", "value", "signature"], rows)


def _samples(samples: Sequence[Sample], outputs: str) -> str:
    rows = [(_text(sample.source), _text(sample.translation), _text(sample.reference or "")) for sample in samples]
    return _table(["source", outputs.removesuffix("s"), "reference"], rows)


def _value_table(rows: Sequence[tuple[str, str]]) -> str:
    return _table(["", "value"], [(label, _text(value)) for label, value in rows])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of Markdown cells, without empty columns."""
    if not rows:
        return ""
    columns = [place for place in range(len(header)) if any(row[place] for row in rows)]

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    lines = [[header[place] for place in columns], ["---"] * len(columns)]
    return "\n".join(map(line, lines + [[row[place] for place in columns] for row in rows]))


def _value(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else _text(str(value))


def _file_name(path: str | Path) -> str:
    return PureWindowsPath(path).name  # splits at both kinds of slash


def _text(text: str) -> str:
    """Escapes text for Markdown, on one line: mark-up, links, HTML and formulas in it have no effect."""
    return re.sub(r"([\\`*_\[\]<>|~$&])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """Formats text as Markdown code. It can't contain a backtick, and a bar would end a table's cell."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`".replace("|", "\\|")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a JSON string is a Python string, too


def _loaded_by(name: str) -> str:
    return name if is_repository(name) else local_name(name)


def _title(name: str) -> str:
    return name.removeprefix("./")


def published_as(text: str, repository: str, name: str) -> str:
    """Names a repository in a card that is published: in the code that loads the model, as title, in `model-index`.

    Args:
        text: The card.
        repository: The repository, "user/name".
        name: The model's name in the card's facts. A folder's name, "./...", may have changed since.

    Returns:
        The text. It is the same if the card's code loads the repository, or neither the model's name nor a folder.
    """
    loaded = LOADS.findall(text)
    own = next((literal for literal in loaded if literal.startswith('"./') or literal == _literal(name)), None)
    if own is None or _literal(repository) in loaded:
        return text
    text = text.replace(own, _literal(repository))
    if "trust_remote_code" not in text and IMPORTS in text:
        text = text.replace(AFTER_USAGE, f"{OWN_CODE.format(name=_literal(repository))}\n\n{AFTER_USAGE}", 1)
    old = str(json.loads(own))
    text = text.replace(f"\n# {_text(_title(old))}\n", f"\n# {_text(repository)}\n", 1)
    index = "\nmodel-index:\n- name: {}\n"
    return text.replace(index.format(old.rpartition("/")[2]), index.format(repository.rpartition("/")[2]), 1)
