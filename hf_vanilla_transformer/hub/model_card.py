"""The model card that the Hub shows: `model_card_template.md` filled with the facts about a model."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path, PureWindowsPath

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..checkpoints.files import check_links, write_text
from ..checkpoints.kinds import CARD, FACTS, MODEL_TYPE
from ..errors import printable
from .facts import (
    TAGS,
    TARGET_TOKENS,
    TRANSLATION,
    USUAL,
    Evaluation,
    RunFacts,
    TrainingFacts,
    is_repository,
    local_name,
    strings,
    write_facts,
)

TEMPLATE = Path(__file__).with_name("model_card_template.md")
NORMS = {"post": "after each sub-layer", "pre": "before each sub-layer"}
POSITIONS = {
    "paper": "sinusoids",
    "tensor2tensor": "sinusoids, tensor2tensor's layout",
    "fairseq": "sinusoids, fairseq's layout",
    "marian": "sinusoids, Marian's layout",
    "learned": "learned",
}
SHARED = "share_encoder_decoder_embeddings"
SHARING: dict[tuple[object, object], str] = {  # that, and whether the output has the target's embeddings
    **{(True, True): "source, target and output", (True, False): "source and target"},
    **{(False, True): "target and output", (False, False): "none"},
}


def save_card(folder: str | Path, facts: RunFacts) -> None:
    """Writes a model's card, `README.md`, and its facts, `model_card.json`, beside the model's weights."""
    folder = Path(folder)
    check_links(folder, [folder / CARD, folder / FACTS])
    write_text(folder / CARD, str(fill_model_card(facts)))
    write_facts(folder, _publishable(facts))


def fill_model_card(facts: RunFacts) -> ModelCard:
    """Returns the card, whose text is `str(card)`. The facts' text is escaped, except for `limits`."""
    facts, seconds = _publishable(facts), facts.recipe.seconds
    measures = dict.fromkeys(name for point in facts.curve for name in point)
    card: ModelCard = ModelCard.from_template(
        _metadata(facts),
        template_path=str(TEMPLATE),
        text=_text,
        code=_code,
        literal=literal,
        number=_number,
        duration=None if seconds is None else str(timedelta(seconds=round(seconds))),
        facts=facts,
        is_repository=is_repository(facts.name),
        package=_package(),
        architecture=architecture_rows(facts.config, facts.parameters),
        recipe=facts.recipe if facts.recipe != TrainingFacts() else None,
        measures=[name for name in measures if name not in ("step", TARGET_TOKENS, "loss")],
        signatures=list(dict.fromkeys(score.signature for one in facts.evaluations for score in one.scores)),
    )
    card.text = printable(card.text.rstrip()) + "\n"
    return card


def _publishable(facts: RunFacts) -> RunFacts:
    """The facts without the folders of this machine, and with the class of a model that isn't this package's."""
    names = [PureWindowsPath(path).name for path in facts.training_files]  # splits at both kinds of slash
    name = facts.name if is_repository(facts.name) else local_name(facts.name)
    has_code = facts.config.get("model_type", MODEL_TYPE) == MODEL_TYPE or "auto_map" in facts.config
    stock = facts.stock or (None if has_code else ", ".join(strings(facts.config.get("architectures"))))
    return replace(facts, name=name, training_files=names, stock=stock)


def _metadata(facts: RunFacts) -> ModelCardData:
    is_translation = facts.task == TRANSLATION
    usual = {**USUAL, **({} if is_translation else {"pipeline_tag": None})}
    known = {
        "license": facts.license,
        "language": _once([facts.source_language, facts.target_language, *facts.languages]),
        "base_model": facts.base_model,
        "tags": _once([*TAGS, None if is_translation else facts.task, *facts.tags]),
        "datasets": list(facts.datasets),
        "model_name": facts.name.rpartition("/")[2] if facts.evaluations else None,
        "eval_results": _eval_results(facts.evaluations, facts.task),
    }
    return ModelCardData(**{**usual, **facts.metadata, **{name: value for name, value in known.items() if value}})


def _once(values: Iterable[str | None]) -> list[str]:
    return [one for one in dict.fromkeys(values) if one]


def _eval_results(evaluations: Sequence[Evaluation], task: str) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=task,
            task_name=task.replace("-", " ").title(),
            dataset_type=re.sub(r"[^\w./-]+", "-", evaluation.dataset).strip("-").lower() or "test",
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


def architecture_rows(config: Mapping[str, object], parameters: int | None = None) -> list[tuple[str, str]]:
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
        ("shared embeddings", SHARING.get((config.get(SHARED), config.get("tie_word_embeddings")))),
        ("parameters", parameters),
    ]
    return [(label, f"{one:,}" if isinstance(one, int) else str(one)) for label, one in rows if one is not None]


def _both_stacks(config: Mapping[str, object], name: str) -> object:
    """The encoder's and the decoder's value, "6 + 6"; a single one if they are equal and not numbers of layers."""
    encoder, decoder = config.get(f"encoder_{name}"), config.get(f"decoder_{name}")
    if encoder is None or decoder is None:
        return None
    return encoder if encoder == decoder and name != "layers" else f"{encoder:,} + {decoder:,}"


def _vocabulary(config: Mapping[str, object]) -> str | None:
    if config.get("vocab_size") is None:
        return None
    target = config.get("decoder_vocab_size")
    source, is_one = f"{config['vocab_size']:,} tokens", target is None or config.get(SHARED)
    return f"{source}, one for both sides" if is_one else f"{source} (source), {target:,} (target)"


def _number(value: float | None, form: str = ",") -> str:
    return "" if value is None else format(value, form)


def _text(text: str) -> str:
    """Escapes text for Markdown, on one line: mark-up, links, HTML and formulas in it have no effect."""
    return re.sub(r"([\\`*_\[\]<>|~$&])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """Formats text as Markdown code, which can't contain a backtick; not for tables, where a bar would end a cell."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


def literal(text: str) -> str:
    """Returns text as a literal of Python in a card's code."""
    return json.dumps(text, ensure_ascii=False)
