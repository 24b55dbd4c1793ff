"""The model card that the Hub shows: `model_card_template.md` filled with the facts about a model."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..checkpoints.files import check_links, write_text
from ..errors import printable
from .card_file import CARD
from .facts import (
    FACTS,
    TAGS,
    TRANSLATION,
    CurvePoint,
    Evaluation,
    RunFacts,
    Sample,
    TrainingFacts,
    is_repository,
    local_name,
    write_facts,
)

TEMPLATE = Path(__file__).with_name("model_card_template.md")
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
# Labels of a recipe's fields in the card; other fields have their names.
LABELS = {
    "learning_rate": "peak learning rate",
    "batch_tokens": "tokens per update, at most",
    "target_tokens": "target tokens in all",
    "steps": "updates",
    "best_step": "update whose weights these are",
    "dropout_warmup_steps": "updates of warm-up of dropout",
    "bpe_dropout": "BPE-dropout",
    "seconds": "time (h:mm:ss)",
}


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
    write_text(folder / CARD, str(fill_model_card(facts)))
    write_facts(folder, _publishable(facts))


def fill_model_card(facts: RunFacts) -> ModelCard:
    """Returns the card: `str(card)` is its text, `card.save(folder / "README.md")` writes it.

    Args:
        facts: The facts. Their text is escaped, except for `limits`.
    """
    facts = _publishable(facts)
    card: ModelCard = ModelCard.from_template(
        _metadata(facts),
        template_path=str(TEMPLATE),
        text=_text,
        code=_code,
        literal=_literal,
        facts=facts,
        name=facts.name,
        package=_package(),
        imports=IMPORTS,
        own_code=OWN_CODE.format(name=_literal(facts.name)) if is_repository(facts.name) and not facts.stock else "",
        after_usage=AFTER_USAGE,
        architecture=architecture_rows(facts.config, facts.parameters),
        recipe=recipe_rows(facts.recipe),
        curve=_curve(facts.curve),
        measures=_measures(facts.curve),
        results=_results(facts.evaluations),
        samples=_samples(facts.samples, "translation" if facts.task == TRANSLATION else "output"),
    )
    card.text = printable(card.text.rstrip()) + "\n"
    return card


def _publishable(facts: RunFacts) -> RunFacts:
    """The facts without the folders of this machine."""
    names = [PureWindowsPath(path).name for path in facts.training_files]  # splits at both kinds of slash
    name = facts.name if is_repository(facts.name) else local_name(facts.name)
    return replace(facts, name=name, training_files=names)


def _metadata(facts: RunFacts) -> ModelCardData:
    languages = [one for one in (facts.source_language, facts.target_language, *facts.languages) if one]
    made = {
        "library_name": "transformers",
        "pipeline_tag": facts.task if facts.task == TRANSLATION else None,
        "license": facts.license,
        "language": list(dict.fromkeys(languages)) or None,
        "base_model": facts.base_model,
        "tags": list(dict.fromkeys((*TAGS, *([] if facts.task == TRANSLATION else [facts.task]), *facts.tags))),
        "datasets": list(facts.datasets) or None,
        "model_name": facts.name.rpartition("/")[2] if facts.evaluations else None,
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


def _package() -> str:
    """The package's name, linked to its repository if `[project.urls]` of pyproject.toml names one as `Source`."""
    try:
        urls = metadata("hf-vanilla-transformer").get_all("Project-URL") or []
    except PackageNotFoundError:  # a checkout that isn't installed
        urls = []
    source = dict(url.split(", ", 1) for url in urls).get("Source")
    return f"[hf_vanilla_transformer]({source})" if source else "hf_vanilla_transformer"


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
    return int(encoder) if encoder == decoder and name != "layers" else f"{encoder:,} + {decoder:,}"


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
    columns = {
        "updates": [_number(point.step) for point in curve],
        "target tokens": [_number(point.target_tokens) for point in curve],
        "training loss": [_number(point.loss, ".3f") for point in curve],
        "validation perplexity": [_number(point.perplexity, ",.2f") for point in curve],
    }
    for name in _measures(curve):
        columns[f"validation {name}"] = [_number(_scores(point).get(name), ".2f") for point in curve]
    return _table(columns)


def _scores(point: CurvePoint) -> Mapping[str, float]:
    return point.scores if point.bleu is None else {"BLEU": point.bleu, **point.scores}


def _measures(curve: Sequence[CurvePoint]) -> list[str]:
    """The names of the measures that a curve has beside perplexity."""
    return list(dict.fromkeys(name for point in curve for name in _scores(point)))


def _results(evaluations: Sequence[Evaluation]) -> str:
    rows = [(evaluation, score) for evaluation in evaluations for score in evaluation.scores]
    return _table(
        {
            "test set": [_text(evaluation.dataset) for evaluation, _ in rows],
            "sentences": [_number(evaluation.sentences) for evaluation, _ in rows],
            "decoding": [_text(evaluation.decoding or "") for evaluation, _ in rows],
            "metric": [_text(score.name) for _, score in rows],
            "value": [_number(score.value, ".2f") for _, score in rows],
            "signature": [_code(score.signature) for _, score in rows],
        }
    )


def _samples(samples: Sequence[Sample], output: str) -> str:
    return _table(
        {
            "source": [_text(sample.source) for sample in samples],
            output: [_text(sample.translation) for sample in samples],
            "reference": [_text(sample.reference or "") for sample in samples],
        }
    )


def _table(columns: Mapping[str, Sequence[str]]) -> str:
    """A Markdown table of columns of Markdown cells, without the empty ones."""
    kept = {title: cells for title, cells in columns.items() if any(cells)}
    lines = [tuple(kept), ("---",) * len(kept), *zip(*kept.values(), strict=True)] if kept else []
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None, form: str = ",") -> str:
    return "" if value is None else format(value, form)


def _text(text: str) -> str:
    """Escapes text for Markdown, on one line: mark-up, links, HTML and formulas in it have no effect."""
    return re.sub(r"([\\`*_\[\]<>|~$&])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """Formats text as Markdown code. It can't contain a backtick, and a bar would end a table's cell."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`".replace("|", "\\|")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a JSON string is a Python string, too


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
    text = text.replace(f"\n# {_text(old.removeprefix('./'))}\n", f"\n# {_text(repository)}\n", 1)
    index = "\nmodel-index:\n- name: {}\n"
    return text.replace(index.format(old.rpartition("/")[2]), index.format(repository.rpartition("/")[2]), 1)
