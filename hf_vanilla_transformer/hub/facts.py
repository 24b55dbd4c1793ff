"""Collects the facts for a saved model's card: those that a run saved, or else those in the model's files."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoints.kinds import CONFIG
from ..checkpoints.loading import read_json, tensors_in
from ..metrics import Score
from .model_card import (
    CARD,
    FACTS,
    TAGS,
    TEXT2TEXT,
    TRANSLATION,
    WEIGHTS,
    CardError,
    CurvePoint,
    Evaluation,
    RunFacts,
    Sample,
    TrainingFacts,
    is_repository,
    load_card,
    local_name,
    weights_in,
)

SCORES = "scores.json"
TARGET_TOKENS = "target_tokens"  # in the Trainer's log
POINTS_PER_CURVE = 10
# The log's entries of other measures than BLEU -> their names.
OTHER_SCORES = {"eval_exact_match": "exact match", "eval_wer": "WER", "eval_ser": "SER", "eval_cer": "CER"}
# Saved facts that stay true when the weights change.
BY_AUTHOR = ("title", "source_language", "target_language", "limits")
# Fields of a card's metadata that come from the facts; all others are the author's.
MADE = ("base_model", "datasets", "language", "library_name", "license", "model-index", "pipeline_tag", "tags")


def read_facts(folder: Path) -> tuple[RunFacts, str | None]:
    """Collects the facts about a saved model.

    The saved facts of a training are used only if the weights are still the same. Languages, licence, data sets and
    base model in the metadata of an existing card come from its author and replace saved ones; the author's own fields
    are kept.

    Args:
        folder: The model's folder, as `save_pretrained` writes it.

    Returns:
        The facts, and a sentence for the user if the weights aren't those that a training was saved for, or None.

    Raises:
        CardError: There is no complete model in the folder, or a file that is read can't be.
    """
    try:
        config = read_json(folder / CONFIG)
        tensors = tensors_in(folder)
        saved = read_json(folder / FACTS) if (folder / FACTS).exists() else None
    except ValueError as error:
        raise CardError(f"{error}; give a folder that save_pretrained or `vanilla-transformer train` wrote") from error
    values, note = {}, None
    if saved is not None and saved.pop(WEIGHTS, None) == weights_in(folder):
        values = _from_json(folder, saved)
    elif saved is not None:
        note = f"the weights have changed since {FACTS} was written: what it says of their training is left out"
    on_card = _from_card(folder)  # what isn't there any more, its author has removed
    values = {name: value for name, value in values.items() if name not in BY_AUTHOR and name not in on_card}
    values |= said_by_author(folder)
    name, is_folder = str(values.get("name")), values.get("name") == "/".join(folder.resolve().parts[-2:])
    # Version 0.2 saved folders as names that look like a repository's: "run/averaged-3".
    values["name"] = name if is_repository(name) and not is_folder else local_name(folder)
    # Aliases of a tied matrix aren't saved.
    values["parameters"] = sum(math.prod(shape) for _, (_, shape) in tensors.values())
    return RunFacts(**{**values, "config": config}), note


def said_by_author(folder: Path) -> dict[str, Any]:
    """Returns what only a model's author can know, for a new card of the model, also after more training.

    Returns:
        Names of fields of `RunFacts` -> values that aren't empty.

    Raises:
        CardError: The card, or what was saved of it, can't be read.
    """
    try:
        saved = read_json(folder / FACTS) if (folder / FACTS).exists() else {}
    except ValueError as error:
        raise CardError(f"{error}; remove it") from error
    said = {name: saved[name] for name in BY_AUTHOR if isinstance(saved.get(name), str)}
    said |= {name: value for name, value in _from_card(folder).items() if value}
    languages = said.get("languages", ())
    if languages and not {said.get("source_language"), said.get("target_language")} <= {*languages, None}:
        said = {name: value for name, value in said.items() if not name.endswith("_language")}  # others are meant now
    return said


def with_what_was_said(facts: RunFacts, said: Mapping[str, Any]) -> RunFacts:
    """Fills in missing facts of a new card by what `said_by_author` returns for the older one."""
    if facts.languages or facts.source_language or facts.target_language:
        said = {name: value for name, value in said.items() if "language" not in name}
    return replace(facts, **{name: value for name, value in said.items() if not getattr(facts, name)})


def curve_of(log: Iterable[Mapping[str, Any]]) -> list[CurvePoint]:
    """Returns the learning curve in a Trainer's `log_history`, at most ten points of it, the last one among them.

    Its evaluations are the points; without evaluations, the logged losses are.
    """
    steps: dict[int, dict[str, Any]] = {}
    for entry in log:
        if isinstance(entry.get("step"), int):
            steps.setdefault(entry["step"], {}).update(entry)
    evaluated = [step for step, entry in steps.items() if "eval_loss" in entry]
    chosen = sorted(evaluated or [step for step, entry in steps.items() if "loss" in entry])
    if len(chosen) > POINTS_PER_CURVE:
        last = len(chosen) - 1
        chosen = [chosen[round(n * last / (POINTS_PER_CURVE - 1))] for n in range(POINTS_PER_CURVE)]
    names = {TARGET_TOKENS: TARGET_TOKENS, "loss": "loss", "perplexity": "eval_perplexity", "bleu": "eval_bleu"}
    return [
        CurvePoint(
            step,
            **{name: steps[step].get(key) for name, key in names.items()},
            scores={name: steps[step][key] for key, name in OTHER_SCORES.items() if key in steps[step]},
        )
        for step in chosen
    ]


def _from_json(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    try:
        read = {
            "recipe": TrainingFacts(**values.get("recipe", {})),
            "curve": [CurvePoint(**one) for one in values.get("curve", ())],
            "evaluations": _evaluations(values.get("evaluations", ())),
            "samples": [Sample(**one) for one in values.get("samples", ())],
        }
        RunFacts(**{"name": "", **values, **read})
    except (TypeError, AttributeError, KeyError, ValueError) as error:  # of a newer version, or edited
        raise CardError(f"{folder / FACTS} can't be read ({error}); correct it, or remove it") from error
    return {**values, **read}


def _evaluations(values: Iterable[Mapping[str, Any]]) -> list[Evaluation]:
    return [Evaluation(**{**one, "scores": [Score(**score) for score in one["scores"]]}) for one in values]


def _from_card(folder: Path) -> dict[str, Any]:
    """Reads the fields of `RunFacts` in the metadata of the folder's card."""
    if not (folder / CARD).is_file():
        return {}
    data = load_card(folder / CARD).data
    others = {name: value for name, value in data.to_dict().items() if name not in MADE}  # type: ignore[no-untyped-call]
    if len(bases := strings(data.get("base_model"))) > 1:  # the facts name one
        others["base_model"] = bases
    if data.get("pipeline_tag") not in (None, TRANSLATION):
        others["pipeline_tag"] = data.get("pipeline_tag")
    return {
        "languages": strings(data.get("language")),
        "license": data.get("license"),
        "datasets": strings(data.get("datasets")),
        "base_model": next(iter(bases), None),
        "tags": [tag for tag in strings(data.get("tags")) if tag not in (*TAGS, TEXT2TEXT)],
        "metadata": json.loads(json.dumps(others, default=str)),  # which makes text of dates
    }


def strings(value: Any) -> list[str]:
    """Returns the strings of a field of metadata, one or a list; the language "no" is a boolean to YAML."""
    values = ["no" if one is False else one for one in (value if isinstance(value, list) else [value])]
    return [one for one in values if isinstance(one, str)]
