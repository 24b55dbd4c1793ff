"""The facts that a model card states: what a run knows, what its author wrote, and the file that keeps them."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml
from huggingface_hub import ModelCard

from ..checkpoints.files import write_text
from ..checkpoints.headers import read_json, tensors_in
from ..checkpoints.kinds import CARD, CONFIG, FACTS, MODEL_TYPE, PYTORCH_WEIGHTS, TOKENIZER
from ..data.digests import digest_of
from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..metrics import Score

WEIGHTS = "weights"  # in the file of facts, the digests of the weights that they describe
TAGS = (MODEL_TYPE, "attention-is-all-you-need")
TRANSLATION = "translation"  # the Hub's name of the task
USUAL = {"library_name": "transformers", "pipeline_tag": TRANSLATION}  # metadata, unless the author says otherwise
TEXT2TEXT = "text2text-generation"  # other strings in and out; a tag, as the Hub has no such task any more
TARGET_TOKENS = "target_tokens"  # in the Trainer's log
POINTS_PER_CURVE = 10
# Entries of the Trainer's log -> measurements of a curve.
LOGGED = {
    **{one: one for one in ("step", TARGET_TOKENS, "loss")},
    **{"eval_perplexity": "perplexity", "eval_bleu": "bleu", "eval_chrf": "chrF2", "eval_exact_match": "exact match"},
    **{f"eval_{one}": one for one in ("bleu_multi30k", "bleu_compound_split")},
    **{"eval_wer": "WER", "eval_ser": "SER", "eval_cer": "CER"},
}
# Fields of `RunFacts` that only the author knows, so that they stay true when the weights change.
OF_METADATA = ("languages", "license", "datasets", "base_model", "tags", "metadata")  # a card has them
OF_AUTHOR = ("title", "source_language", "target_language", "limits", *OF_METADATA)
MADE = ("datasets", "language", "model-index", "tags")  # other metadata is kept as it is
ORIGIN = ("base_model", "license", "license_name", "license_link")  # of the metadata, what a derived model inherits


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


@dataclass(frozen=True)
class Sample:
    """One sentence with the model's translation and a reference."""

    source: str
    translation: str
    reference: str | None = None


@dataclass(frozen=True)
class TrainingFacts:
    """How the model was trained; None: unknown, and left out of the card."""

    optimizer: str | None = None  # with its constants, for instance "Adam, beta 0.9 and 0.98, epsilon 1e-9"
    learning_rate: float | None = None  # the highest
    schedule: str | None = None  # for instance "inverse sqrt, 4,000 updates of warm-up"
    mixture: str | None = None  # several corpora with their weights and numbers of pairs
    batch_tokens: int | None = None  # the most tokens per update on either side, padding included, on all devices
    steps: int | None = None  # number of updates
    best_step: int | None = None  # the update that the weights are of, if it isn't the last one
    target_tokens: int | str | None = None  # trained on in all; as text if the number is rounded
    dropout: float | None = None  # P_drop
    dropout_warmup_steps: int | None = None  # number of updates over which dropout rises from 0 to that
    label_smoothing: float | None = None  # epsilon_ls
    consistency: str | None = None  # a loss beside the cross-entropy, for instance "R-Drop, alpha 5"
    precision: str | None = None  # for instance "bfloat16"
    seed: int | None = None
    averaged_checkpoints: int | None = None  # their number
    hardware: str | None = None  # for instance "1 x NVIDIA H200"
    seconds: float | None = None  # duration of the training
    software: str | None = None  # for instance "torch 2.13.0, transformers 5.23.0"


@dataclass(frozen=True)
class RunFacts:
    """The facts about a model and its training run; missing ones are left out of the card."""

    name: str  # what the model is loaded by: its name on the Hub, "user/name", or a folder as `local_name` writes it
    title: str | None = None  # the card's, if it isn't the name
    task: str = TRANSLATION  # or TEXT2TEXT: other strings, such as sounds
    config: Mapping[str, object] = field(default_factory=dict)  # the configuration's fields, `model.config.to_dict()`
    parameters: int | None = None  # their number; tied ones count once
    source_language: str | None = None  # ISO 639 code, "en"
    target_language: str | None = None
    languages: Sequence[str] = ()  # ISO 639 codes, if source and target language aren't given
    converted: bool = False  # from a model of another system
    stock: str | None = None  # its class, if that is one of transformers' own, "MarianMTModel"
    base_model: str | None = None  # that one's name on the Hub
    license: str | None = None  # the Hub's identifier, "apache-2.0"
    datasets: Sequence[str] = ()  # names on the Hub of the training data
    training_files: Sequence[str | Path] = ()  # the card shows their names without folders
    training_pairs: int | None = None  # number of sentence pairs in the training data
    recipe: TrainingFacts = field(default_factory=TrainingFacts)
    # In the order of the updates: "step", their number; "target_tokens", trained on until then; "loss" that training
    # minimised, per token; of the validation set, "perplexity" per token, "bleu", "exact match" ...
    curve: Sequence[Mapping[str, float]] = ()
    evaluations: Sequence[Evaluation] = ()  # one per test set
    samples: Sequence[Sample] = ()  # a few translations, preferably of sentences outside the training data
    limits: str | None = None  # what the model can't do, in Markdown; a general remark follows it
    tags: Sequence[str] = ()  # the Hub's, beside those that every card has
    metadata: Mapping[str, Any] = field(default_factory=dict)  # other fields of the metadata, such as `license_name`


Fields: TypeAlias = dict[str, Any]  # of `RunFacts`, some of them


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


def load_card(folder: Path) -> ModelCard:
    """Reads a model's card; `CardError`: its metadata isn't YAML."""
    file = folder / CARD
    try:
        return ModelCard(file.read_text(encoding="utf-8-sig"))
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())[:200]
        raise CardError(f"{file} isn't a model card ({problem}); correct its metadata, or remove it") from error


def read_facts(folder: Path) -> tuple[RunFacts, str | None]:
    """Returns the facts about a saved model: those of its files, of its training, and what its author has said.

    Those of a training are left out if the weights have changed since; then a sentence for the user says so, else None.
    `CardError`: there is no complete model in the folder, or a file that is read can't be.
    """
    saved, note = _saved(folder), None
    try:
        config, tensors = read_json(folder / CONFIG), tensors_in(folder)
        task = saved.get("task") or _task_of(folder)
    except ValueError as error:
        raise CardError(f"{error}; give a folder that save_pretrained or `vanilla-transformer train` wrote") from error
    if saved and saved.pop(WEIGHTS, None) != weights_in(folder):
        note = f"the weights have changed since {FACTS} was written: what it says of their training is left out"
        saved = {}
    of_training = {name: one for name, one in _from_json(folder, saved).items() if name not in OF_AUTHOR}
    # Aliases of a tied matrix aren't saved.
    counted = {"config": config, "parameters": sum(math.prod(shape) for _, (_, shape) in tensors.values())}
    known = {"name": local_name(folder), **of_training, **said_by_author(folder), **counted, "task": task}
    return RunFacts(**known), note


def write_facts(folder: Path, facts: RunFacts) -> None:
    """Writes the facts that the model and the card's metadata don't state, with the weights' digests."""
    values = _stated(asdict(replace(facts, config={}, metadata={})))
    values["recipe"] = _stated(values["recipe"])
    write_text(folder / FACTS, json.dumps({WEIGHTS: weights_in(folder), **values}, indent=1, ensure_ascii=False) + "\n")


def weights_in(folder: Path) -> dict[str, str]:
    """Returns the names of the files with weights in a model's folder, each with the file's digest."""
    files = sorted((*folder.glob("*.safetensors"), *folder.glob(PYTORCH_WEIGHTS)))
    return {file.name: digest_of(file) for file in files}


def said_by_author(folder: Path) -> Fields:
    """Returns what only a model's author can know, as fields of `RunFacts` that aren't empty; `CardError` as above."""
    saved = _saved(folder)
    said = {name: saved[name] for name in OF_AUTHOR if isinstance(saved.get(name), str | list)}
    if (folder / CARD).is_file():  # what isn't there any more, its author has removed
        data = load_card(folder).data.to_dict()  # type: ignore[no-untyped-call]
        said = {name: one for name, one in said.items() if name not in OF_METADATA} | said_in(data)
    languages = said.get("languages")
    if languages and not {said.get("source_language"), said.get("target_language")} <= {*languages, None}:
        said = {name: value for name, value in said.items() if not name.endswith("_language")}  # others are meant now
    return said


def said_in(data: Mapping[str, object]) -> Fields:
    """Returns what an author says in a card's metadata, as fields of `RunFacts` that aren't empty."""
    single = {name: data[name] for name in ("license", "base_model") if isinstance(data.get(name), str)}
    known = {*MADE, *single, *(name for name, one in USUAL.items() if data.get(name) == one)}
    lists = {
        "languages": strings(data.get("language")),
        "datasets": strings(data.get("datasets")),
        "tags": [tag for tag in strings(data.get("tags")) if tag not in (*TAGS, TEXT2TEXT)],
    }
    others = _stated({name: one for name, one in data.items() if name not in known})
    return _stated({**single, **lists, "metadata": others})


def origin_of(said: Fields) -> Fields:
    """Returns the base model and the licence among what an author has said: derived models have to name them."""
    metadata = {name: one for name, one in said.get("metadata", {}).items() if name in ORIGIN}
    return {**{name: one for name, one in said.items() if name in ORIGIN}, "metadata": metadata}


def inherited(origin: str) -> Fields:
    """Returns what is known of the origin of a model that was trained from another, in a folder or on the Hub."""
    if origin and Path(origin).is_dir():
        return origin_of(said_by_author(Path(origin)))
    return {"base_model": origin} if is_repository(origin) else {}


def with_what_was_said(facts: RunFacts, said: Fields) -> RunFacts:
    """Fills in missing facts of a new card by what `said_by_author` returns for the older one."""
    if facts.languages or facts.source_language or facts.target_language:
        said = {name: value for name, value in said.items() if "language" not in name}
    return replace(facts, **{name: value for name, value in said.items() if not getattr(facts, name)})


def curve_of(log: Iterable[Mapping[str, float]]) -> list[dict[str, float]]:
    """Returns at most ten points of the learning curve in a Trainer's `log_history`, the last one among them.

    Points are its evaluations, or logged losses if there are none.
    """
    steps: dict[int, dict[str, float]] = {}
    for entry in log:
        if isinstance(step := entry.get("step"), int):
            known = steps.setdefault(step, {})
            # Of several evaluations after one update, later ones may be of the best model.
            known.update({} if "eval_loss" in entry and "eval_loss" in known else entry)
    evaluated = [step for step, entry in steps.items() if "eval_loss" in entry]
    chosen = sorted(evaluated or [step for step, entry in steps.items() if "loss" in entry])
    if len(chosen) > POINTS_PER_CURVE:
        last = len(chosen) - 1
        chosen = [chosen[round(n * last / (POINTS_PER_CURVE - 1))] for n in range(POINTS_PER_CURVE)]
    return [{name: steps[step][key] for key, name in LOGGED.items() if key in steps[step]} for step in chosen]


def strings(value: object) -> list[str]:
    """Returns the strings of a field of metadata, one or a list; the language "no" is a boolean to YAML."""
    values = ["no" if one is False else one for one in (value if isinstance(value, list | tuple) else [value])]
    return [one for one in values if isinstance(one, str)]


def _stated(values: Mapping[str, object]) -> Fields:
    return {name: value for name, value in values.items() if value not in (None, (), [], {})}


def _saved(folder: Path) -> Fields:
    try:
        return read_json(folder / FACTS) if (folder / FACTS).exists() else {}
    except CheckpointError as error:
        raise CardError(f"{error}; remove it") from error


def _task_of(folder: Path) -> str:
    """Returns a model's task: targets that are read as symbols, such as sounds, aren't translations."""
    files = [file for file in (folder / f"target_{TOKENIZER}", folder / TOKENIZER) if file.is_file()]
    model = (read_json(files[0]).get("model") or {}) if files else {}
    return TEXT2TEXT if model.get("type") == "WordLevel" else TRANSLATION


def _from_json(folder: Path, values: Fields) -> Fields:
    from ..metrics import Score  # sacrebleu takes half a second, and translating imports this module

    try:
        read = {
            **values,
            "recipe": TrainingFacts(**values.get("recipe", {})),
            # Version 0.3.0 wrote null for what isn't known, and some measures apart.
            "curve": [_stated({**one, **one.get("scores", {}), "scores": None}) for one in values.get("curve", ())],
            "evaluations": [
                Evaluation(**{**one, "scores": [Score(**score) for score in one["scores"]]})
                for one in values.get("evaluations", ())
            ],
            "samples": [Sample(**one) for one in values.get("samples", ())],
        }
        RunFacts(**{"name": "", **read})
    except (TypeError, AttributeError, KeyError, ValueError) as error:  # of a newer version, or edited
        raise CardError(f"{folder / FACTS} can't be read ({error}); correct it, or remove it") from error
    return read
