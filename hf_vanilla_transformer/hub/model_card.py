"""The model card that the Hub shows, filled from the facts of a run (`model_card_template.md`)."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import xxhash
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..checkpoints.files import write_text

if TYPE_CHECKING:  # sacrebleu takes time to import, and a converted model has no scores
    from ..metrics import Score

CARD = "README.md"
FACTS = "model_card.json"  # what a card was made of, beside it: `vanilla-transformer card` makes another one of it
WEIGHTS = "weights"  # in that file, the digests of the weights that the facts are about
TEMPLATE = Path(__file__).with_name("model_card_template.md")
TAGS = ("vanilla_transformer", "attention-is-all-you-need")
LIMITS = (
    "The model translates one sentence at a time. Its quality on text that differs from the training data has not been "
    "measured, nor has any bias in that data: check its translations before you rely on them."
)
POSITIONS = {
    "paper": "sinusoids",
    "tensor2tensor": "sinusoids, tensor2tensor's layout",
    "fairseq": "sinusoids, fairseq's layout",
    "marian": "sinusoids, Marian's layout",
    "learned": "learned",
}


@dataclass(frozen=True)
class Evaluation:
    """Scores on one test set.

    Attributes:
        dataset: The test set's name, for instance "Multi30k, test_2016_flickr".
        scores: BLEU, chrF ... with their signatures.
        sentences: Number of sentences.
        decoding: How they were decoded, for instance "beam 4, length penalty 0.6".
        dataset_id: The data set's name on the Hub.
        split: Its split. Two test sets with the same `dataset_id` need different splits.
    """

    dataset: str
    scores: "Sequence[Score]"
    sentences: int | None = None
    decoding: str | None = None
    dataset_id: str | None = None
    split: str | None = None

    @property
    def dataset_type(self) -> str:
        """The name that the Hub lists the results under: `dataset_id`, or one made from `dataset`."""
        return self.dataset_id or re.sub(r"[^\w.-]+", "-", self.dataset).strip("-").lower() or "test"


@dataclass(frozen=True)
class Sample:
    """One sentence with the model's translation and a reference."""

    source: str
    translation: str
    reference: str | None = None


@dataclass(frozen=True)
class CurvePoint:
    """What was measured after some updates; None means that it wasn't.

    Attributes:
        step: Number of updates.
        target_tokens: Target tokens trained on.
        loss: Mean loss of training since the last line of the log, with label smoothing, in nats per token.
        perplexity: On the validation set, per token.
        bleu: On the validation set, as the training measures it.
    """

    step: int
    target_tokens: int | None = None
    loss: float | None = None
    perplexity: float | None = None
    bleu: float | None = None


@dataclass(frozen=True)
class Recipe:
    """How the model was trained; None means unknown, and is left out of the card.

    Attributes:
        optimizer: With its constants, for instance "Adam, beta 0.9 and 0.98, epsilon 1e-9".
        schedule: For instance "inverse square root, 4,000 steps of warm-up".
        learning_rate: The peak learning rate.
        batch_tokens: Target tokens per update, on all devices together.
        steps: Number of updates.
        target_tokens: Target tokens trained on, in all; as text if the number is rounded.
        dropout: P_drop.
        dropout_warmup_steps: Number of updates over which dropout rises from 0 to that.
        bpe_dropout: Probability with which merges were dropped in the training data.
        label_smoothing: epsilon_ls.
        consistency: A loss beside the cross-entropy, for instance "SimCut, alpha 3, p 0.05".
        precision: For instance "bfloat16".
        seed: Of the random numbers.
        averaged_checkpoints: Number of checkpoints that were averaged.
        ema_decay: Decay of the exponential moving average of the weights.
        hardware: For instance "1 x NVIDIA H200".
        seconds: Duration of the training, in seconds.
        software: Versions, for instance "torch 2.13.0, transformers 5.23.0".
    """

    optimizer: str | None = None
    schedule: str | None = None
    learning_rate: float | None = None
    batch_tokens: int | None = None
    steps: int | None = None
    target_tokens: int | str | None = None
    dropout: float | None = None
    dropout_warmup_steps: int | None = None
    bpe_dropout: float | None = None
    label_smoothing: float | None = None
    consistency: str | None = None
    precision: str | None = None
    seed: int | None = None
    averaged_checkpoints: int | None = None
    ema_decay: float | None = None
    hardware: str | None = None
    seconds: float | None = None
    software: str | None = None


@dataclass(frozen=True)
class RunFacts:
    """The facts about a model and its training run; what is missing is left out of the card.

    Attributes:
        name: What the model is loaded by: its name on the Hub, "user/name", or a folder. Of an absolute path, the last
            folder's name is used.
        title: The card's title, if it isn't the name.
        config: Fields of the model's configuration, `model.config.to_dict()`.
        parameters: Number of parameters; tied ones count once.
        source_language: ISO 639 code, "en".
        target_language: ISO 639 code, "de".
        languages: ISO 639 codes, where source and target language aren't given.
        converted: Whether the model was converted from one of another system.
        base_model: That one's name on the Hub.
        license: The Hub's identifier, "apache-2.0".
        datasets: Names on the Hub of the training data.
        training_files: Files with the training data; the card shows their names without folders.
        training_pairs: Number of sentence pairs in the training data.
        recipe: How the model was trained.
        curve: How it learned, in the order of the updates.
        evaluations: Scores, one entry per test set.
        samples: A few translations, preferably of sentences outside the training data.
        limits: What the model can't do, in Markdown; a general remark follows it.
        tags: The Hub's tags, beside those that every card has.
        metadata: Other fields of the card's metadata, such as `license_name`.
    """

    name: str
    title: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    parameters: int | None = None
    source_language: str | None = None
    target_language: str | None = None
    languages: Sequence[str] = ()
    converted: bool = False
    base_model: str | None = None
    license: str | None = None
    datasets: Sequence[str] = ()
    training_files: Sequence[str | Path] = ()
    training_pairs: int | None = None
    recipe: Recipe = field(default_factory=Recipe)
    curve: Sequence[CurvePoint] = ()
    evaluations: Sequence[Evaluation] = ()
    samples: Sequence[Sample] = ()
    limits: str | None = None
    tags: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


def save_card(folder: str | Path, facts: RunFacts) -> None:
    """Writes a model's card, `README.md`, and what it was made of, `model_card.json`, beside the model's weights.

    Args:
        folder: The folder of the saved model.
        facts: The facts. Of files with training data, the names are kept without their folders.

    Raises:
        ValueError: As for `fill_model_card`.
        OSError: The folder can't be written.
    """
    folder = Path(folder)
    text = str(fill_model_card(facts))
    names = [_file_name(path) for path in facts.training_files]
    facts = replace(facts, name=_without_path(facts.name), config={}, training_files=names)
    values = {name: value for name, value in asdict(facts).items() if value not in (None, (), [], {})}
    values["recipe"] = {name: value for name, value in values["recipe"].items() if value is not None}
    write_text(folder / CARD, text)
    write_text(folder / FACTS, json.dumps({WEIGHTS: weights_in(folder), **values}, indent=1, ensure_ascii=False) + "\n")


def weights_in(folder: Path) -> dict[str, str]:
    """Returns the files with weights in a model's folder, each with a digest of all of it."""
    files = sorted((*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")))
    digests = {}
    for file in files:
        with file.open("rb") as opened:
            digests[file.name] = hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
    return digests


def fill_model_card(facts: RunFacts) -> ModelCard:
    """Returns the card: `str(card)` is its text, `card.save(folder / "README.md")` writes it.

    Args:
        facts: The facts. Their text is escaped, except for `limits`.

    Raises:
        ValueError: Two evaluations have the same `dataset_id` and `split`, so that the Hub couldn't tell them apart.
    """
    name = _without_path(facts.name)
    sentence = facts.samples[0].source if facts.samples else "..."
    metadata = _metadata(facts, name)
    card: ModelCard = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        metadata=metadata.to_yaml(),
        title=_text(facts.title or name),
        introduction=_introduction(facts),
        # A JSON string is a Python string, too.
        name_literal=json.dumps(name, ensure_ascii=False),
        sentence_literal=json.dumps(sentence, ensure_ascii=False),
        architecture=_architecture(facts),
        training_data=_training_data(facts),
        recipe=_recipe(facts.recipe),
        curve=_curve(facts.curve),
        results=_results(facts.evaluations),
        samples=_samples(facts.samples),
        limits="\n\n".join(filter(None, (facts.limits, LIMITS))),
    )
    card.text = card.text.rstrip() + "\n"
    return card


def _metadata(facts: RunFacts, name: str) -> ModelCardData:
    languages = [one for one in (facts.source_language, facts.target_language, *facts.languages) if one]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="translation",
        license=facts.license,
        language=list(dict.fromkeys(languages)) or None,
        base_model=facts.base_model,
        tags=list(dict.fromkeys((*TAGS, *facts.tags))),
        datasets=list(facts.datasets) or None,
        model_name=name.rpartition("/")[2] if facts.evaluations else None,
        eval_results=_eval_results(facts.evaluations) or None,
        **facts.metadata,
    )


def _eval_results(evaluations: Sequence[Evaluation]) -> list[EvalResult]:
    """The scores as the Hub's metadata, after checking that no two evaluations have the same place."""
    places = [(evaluation.dataset_type, evaluation.split) for evaluation in evaluations]
    for place, evaluation in zip(places, evaluations, strict=True):
        if places.count(place) > 1:
            raise ValueError(
                f"there are {places.count(place)} evaluations on {evaluation.dataset_type!r}, split "
                f"{evaluation.split!r}; give each its own split"
            )
    return [
        EvalResult(
            task_type="translation",
            task_name="Translation",
            dataset_type=evaluation.dataset_type,
            dataset_name=evaluation.dataset,
            dataset_split=evaluation.split,
            metric_type="chrf" if score.name.startswith("chrF") else score.name.lower(),
            metric_name=score.name,
            metric_value=round(score.value, 2),
            metric_args={"signature": score.signature},
        )
        for evaluation in evaluations
        for score in evaluation.scores
    ]


def _introduction(facts: RunFacts) -> str:
    languages = ""
    if facts.source_language and facts.target_language:
        languages = f" that translates from {_code(facts.source_language)} to {_code(facts.target_language)}"
    origin = "trained with"
    if facts.converted:
        link = (
            f" from [{_text(facts.base_model)}](https://huggingface.co/{quote(facts.base_model)})"
            if facts.base_model
            else ""
        )
        origin = f"converted{link}, with the same tokens, logits and translations, by"
    return (
        "A Transformer as in [Attention Is All You Need](https://arxiv.org/abs/1706.03762) (Vaswani et al. 2017)"
        f"{languages}, {origin} hf_vanilla_transformer."
    )


def architecture_rows(config: Mapping[str, Any], parameters: int | None = None) -> list[tuple[str, str]]:
    """Describes a model's sizes in the paper's symbols, as text: labels and values, without unknown ones.

    Args:
        config: Fields of the model's configuration.
        parameters: Their number; tied ones count once.
    """
    rows = [
        ("layers (N), encoder + decoder", _both_stacks(config, "layers")),
        ("width (d_model)", config.get("d_model")),
        ("attention heads (h)", _both_stacks(config, "attention_heads")),
        ("width of a head's queries and keys (d_k)", config.get("head_dim")),
        ("width of a head's values (d_v)", config.get("value_head_dim")),
        ("feed-forward width (d_ff)", _both_stacks(config, "ffn_dim")),
        ("feed-forward activation", config.get("activation_function")),
        ("layer normalisation", {"post": "after each sub-layer", "pre": "before each sub-layer"}.get(_norm(config))),
        ("positions", POSITIONS.get(str(config.get("position_encoding")))),
        ("vocabulary", _vocabulary(config)),
        ("shared embeddings", _sharing(config)),
        ("parameters", parameters),
    ]
    return _known(rows)


def _architecture(facts: RunFacts) -> str:
    """The table of the model's sizes."""
    rows = architecture_rows(facts.config, facts.parameters)
    return _table(["", "value"], [(label, _text(value)) for label, value in rows])


def _known(rows: Iterable[tuple[str, object]]) -> list[tuple[str, str]]:
    """Leaves out what is unknown, and writes numbers with commas."""
    return [
        (label, f"{value:,}" if isinstance(value, int) else str(value)) for label, value in rows if value is not None
    ]


def _norm(config: Mapping[str, Any]) -> str:
    return str(config.get("norm_position"))


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
    return f"{source}, one for both languages" if target is None else f"{source} (source), {target:,} (target)"


def _sharing(config: Mapping[str, Any]) -> str | None:
    names = {
        (True, True): "source, target and output",
        (True, False): "source and target",
        (False, True): "target and output",
        (False, False): "none",
    }
    return names.get((config.get("share_encoder_decoder_embeddings"), config.get("tie_word_embeddings")))  # type: ignore[arg-type]


def _training_data(facts: RunFacts) -> str:
    lines = [f"- [{_text(name)}](https://huggingface.co/datasets/{quote(name)})" for name in facts.datasets]
    if facts.training_files:
        lines.append("- files: " + ", ".join(_code(_file_name(path)) for path in facts.training_files))
    if facts.training_pairs is not None:
        lines.append(f"- {facts.training_pairs:,} sentence pairs")
    return "\n".join(lines)


def recipe_rows(recipe: Recipe) -> list[tuple[str, str]]:
    """Describes a training as text: labels and values, without unknown ones."""
    rows = [
        ("optimizer", recipe.optimizer),
        ("peak learning rate", None if recipe.learning_rate is None else f"{recipe.learning_rate:.4g}"),
        ("schedule", recipe.schedule),
        ("target tokens per update", recipe.batch_tokens),
        ("steps", recipe.steps),
        ("target tokens in all", recipe.target_tokens),
        ("dropout", recipe.dropout),
        ("steps of warm-up of dropout", recipe.dropout_warmup_steps),
        ("BPE-dropout", recipe.bpe_dropout),
        ("label smoothing", recipe.label_smoothing),
        ("consistency", recipe.consistency),
        ("precision", recipe.precision),
        ("seed", None if recipe.seed is None else str(recipe.seed)),
        ("averaged checkpoints", recipe.averaged_checkpoints),
        ("decay of the average of the weights", recipe.ema_decay),
        ("hardware", recipe.hardware),
        ("time", None if recipe.seconds is None else _duration(recipe.seconds)),
        ("software", recipe.software),
    ]
    return _known(rows)


def _recipe(recipe: Recipe) -> str:
    """The table of the training."""
    return _table(["", "value"], [(label, _text(value)) for label, value in recipe_rows(recipe)])


def _curve(curve: Sequence[CurvePoint]) -> str:
    """The table of the learning curve; a column that no point has a value for is left out."""
    rows = [
        (
            f"{point.step:,}",
            _value(point.target_tokens),
            "" if point.loss is None else f"{point.loss:.3f}",
            "" if point.perplexity is None else f"{point.perplexity:,.2f}",
            "" if point.bleu is None else f"{point.bleu:.2f}",
        )
        for point in curve
    ]
    return _table(["steps", "target tokens", "training loss", "validation perplexity", "validation BLEU"], rows)


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


def _samples(samples: Sequence[Sample]) -> str:
    rows = [(_text(sample.source), _text(sample.translation), _text(sample.reference or "")) for sample in samples]
    return _table(["source", "translation", "reference"], rows)


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


def _duration(seconds: float) -> str:
    """For instance "45 s", "3 min 26 s" or "26 h 0 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(whole / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def _file_name(path: str | Path) -> str:
    return PureWindowsPath(path).name  # which splits at both kinds of slash


def _text(text: str) -> str:
    """Escapes text for Markdown, on one line: no mark-up, link, HTML or formula in it takes effect."""
    return re.sub(r"([\\`*_\[\]<>|~$&])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """Formats text as Markdown code, where a backtick isn't possible and a bar would end a table's cell."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`".replace("|", "\\|")


def _without_path(name: str) -> str:
    is_path = PurePosixPath(name).is_absolute() or PureWindowsPath(name).is_absolute()
    return PureWindowsPath(name).name if is_path else " ".join(name.split())
