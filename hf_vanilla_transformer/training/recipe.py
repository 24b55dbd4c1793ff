"""Recipes: all options of a training run, in one YAML file whose values the command line overrides."""

import argparse
import contextlib
import dataclasses
import os
import re
import textwrap
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from ..errors import did_you_mean
from .arguments import Arguments, DataArguments, ModelArguments, VanillaTransformerTrainingArguments
from .options import UNSUPPORTED, RecipeError, check_recipe

RECIPES = Path(__file__).with_name("recipes")  # the package's; they have names
WEIGHTED = ("train_source", "train_data")  # whose entries may be a mapping, of path and weight
NULL = ("null", "~", None)  # stand for an option's default
OPTION = re.compile(r"^--[\w-]+")  # its name

PARTS = {"Data": DataArguments, "Model": ModelArguments, "Training": VanillaTransformerTrainingArguments}
FIELDS = {field.name: field for part in PARTS.values() for field in dataclasses.fields(part) if field.init}
del FIELDS["debug"]  # `--debug` is the command's
NAMES = {part: [field.name for field in dataclasses.fields(part) if field.name in FIELDS] for part in PARTS.values()}
SUPPORTED_NAMES = [name for name in FIELDS if name not in UNSUPPORTED]


def _kinds_of(hint: object) -> tuple[object, ...]:
    """The types of a field without their parameters: `list[str] | None` is list and NoneType."""
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(get_origin(one) or one for one in hints)


TYPES = {name: _kinds_of(hint) for part in PARTS.values() for name, hint in get_type_hints(part).items()}
# What an error says of a type.
KINDS: dict[object, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "text", dict: "a mapping",
    list: "a list of strings",
}  # fmt: skip
# The readers of text, in the order in which they are tried.
READERS: dict[object, Callable[[str], object]] = {
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    int: int,
    float: float,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of recipes to a parser; those that aren't given have no attribute, and values are text."""
    for name in FIELDS:
        nargs = "+" if list in TYPES[name] else "?" if bool in TYPES[name] else None
        how, const = "extend" if nargs == "+" else "store", True if nargs == "?" else None
        parser.add_argument(
            _dashed(name), nargs=nargs, action=how, const=const, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def options_of(words: Sequence[str]) -> dict[str, object]:
    """Returns the options in the words of a command line, `["--max-steps", "100"]`: names and values, as text."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_options(parser)
    try:
        dashed = [OPTION.sub(lambda name: name[0].replace("_", "-"), word) for word in words]
        options, unknown = parser.parse_known_args(dashed)
    except argparse.ArgumentError as error:
        raise RecipeError(str(error)) from error
    if unknown:
        known = map(_dashed, SUPPORTED_NAMES)
        raise RecipeError(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(unknown[0], known)}")
    return vars(options)


class _Loader(yaml.BaseLoader):
    """YAML whose scalars are text, as on the command line; an option given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        names: set[str] = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in names:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is given twice", key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep=deep)


def parse_recipe(paths: Iterable[str | Path] = (), overrides: Mapping[str, object] | None = None) -> Arguments:
    """Reads recipes, by their paths or names, and the options that override them; returns the run's arguments.

    Later recipes override earlier ones. `null` means an option's default, and values may be text as on the command
    line. A RecipeError says what is wrong.
    """
    places = [*(_named(_read(Path(path)), f"{path}: ") for path in paths), _named(overrides or {})]
    values = {name: value for place in places for name, value in place.items()}
    given = {name: _typed(name, value) for name, value in values.items() if value not in NULL}
    data, model, training = ({name: given[name] for name in NAMES[part] if name in given} for part in PARTS.values())
    try:
        arguments = (
            DataArguments(**data),
            ModelArguments(**model),
            VanillaTransformerTrainingArguments(**{"output_dir": "", **training}),
        )
        check_recipe(places, given, arguments)
    # transformers checks that options are compatible, with errors of many kinds
    except (ValueError, TypeError, ImportError, OSError, RuntimeError) as error:
        raise RecipeError(" ".join(str(error).split())) from error
    if not arguments[2].predict_with_generate:
        arguments[2].prediction_loss_only = True  # no scores can be computed of the logits that there are instead
    return arguments


def _read(path: Path) -> dict[object, object]:
    """Reads a recipe by its path or its name."""
    packaged = RECIPES / f"{path}.yaml"
    file = packaged if packaged.is_file() and not path.exists() else path
    try:
        recipe = yaml.load(file.read_text(encoding="utf-8-sig"), _Loader)
    except OSError as error:
        recipes = sorted(file.stem for file in RECIPES.glob("*.yaml"))
        raise RecipeError(
            f"{path} can't be read ({error.strerror}); give a YAML file, or one of the package's recipes: "
            f"{', '.join(recipes)}{did_you_mean(str(path), recipes)}"
        ) from error
    except yaml.MarkedYAMLError as error:
        # What isn't ended is found lines later; a block is at fault where it can't go on.
        mark = (None if "block" in str(error.context) else error.context_mark) or error.problem_mark
        where = f"{path}:{mark.line + 1}" if mark else path
        raise RecipeError(f"{where}: {error.problem}; write one line per option, `max_steps: 1000`") from error
    except (yaml.YAMLError, ValueError) as error:  # not UTF-8
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(recipe, dict):
        raise RecipeError(f"{path} is not a recipe; write one line per option, `max_steps: 1000`")
    return {option: "null" if value == "" else value for option, value in recipe.items()}


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _named(options: Mapping[str, object] | Mapping[object, object], where: str = "") -> dict[str, object]:
    """Returns options under the names of their fields, which may have dashes; refuses unknown ones."""
    named = {str(option).replace("-", "_"): value for option, value in options.items()}
    for name in named:
        if name in UNSUPPORTED:
            raise RecipeError(
                f"{name} isn't supported by `train`; leave it out, or use VanillaTransformerTrainer in a script of "
                f"your own{did_you_mean(name, SUPPORTED_NAMES)}"
            )
        if name not in FIELDS:
            raise RecipeError(f"{where}unknown option {name!r}{did_you_mean(name, SUPPORTED_NAMES)}")
    return named


def _typed(name: str, value: object) -> Any:
    """Returns a value of the type that an option has, read from text if it is text."""
    kinds = TYPES[name]
    value = os.fspath(value) if isinstance(value, os.PathLike) else list(value) if isinstance(value, tuple) else value
    if name in WEIGHTED and isinstance(value, list):
        value = [_with_weight(one) for one in value]
    if isinstance(value, str):
        value = [value] if list in kinds else _from_text(value, kinds)
    elif isinstance(value, dict):
        value = _from_text(value)
    elif type(value) is int and int not in kinds and float in kinds:
        value = float(value)
    if type(value) not in kinds or (isinstance(value, list) and not all(isinstance(one, str) for one in value)):
        wanted = " or ".join(KINDS[kind] for kind in KINDS if kind in kinds)
        wanted += ", or of mappings {path: NAME, weight: NUMBER}" if name in WEIGHTED else ""
        raise RecipeError(f"{name} is {value!r}; give {wanted}")
    choices = FIELDS[name].metadata.get("choices")
    if choices and value not in choices:
        raise RecipeError(f"{name} is {value!r}; choose one of: {', '.join(choices)}")
    return value


def _with_weight(entry: object) -> object:
    """Returns a corpus with its weight as it is given on the command line, NAME=WEIGHT."""
    if not isinstance(entry, dict) or entry.keys() != {"path", "weight"}:
        return entry
    weight = _from_text(entry["weight"])
    return f"{entry['path']}={weight}" if type(weight) in (int, float) else entry


def _from_text(value: object, kinds: Container[object] = READERS) -> object:
    """Returns what text stands for, of the first of these kinds that can be read, else the text; of mappings alike."""
    if isinstance(value, dict):
        return {name: _from_text(one) for name, one in value.items()}
    for kind, read in READERS.items():
        if kind in kinds and isinstance(value, str):
            with contextlib.suppress(ValueError, KeyError):
                return read(value)
    return value


# Of transformers' options that mean something else here.
HELP = {
    "output_dir": "Folder of the run: checkpoints, model, scores, card.",
    "per_device_train_batch_size": "Sentences per batch, with per_device_train_batch_tokens 0 only.",
    "gradient_accumulation_steps": "Batches per update on each device.",
    "generation_num_beams": "Beams of evaluations during training (default: the generation config's).",
    "generation_max_length": "max_length of evaluations during training (default: the generation config's limit).",
    "push_to_hub": "Push the final model with its card, once at the end.",
    "hub_model_id": "Repository to push to, user/name.",
    "hub_private_repo": "Create the repository as a private one; an existing public one is refused.",
}


def describe_options() -> str:
    """Returns the help text of all options of a recipe, in groups, each with its default."""
    lines = []
    for title, part in PARTS.items():
        names = [name for name in NAMES[part] if name not in UNSUPPORTED]
        lines += [f"{title}:", *(f"  {_dashed(name):34} {_help(name)}" for name in names), ""]
    return "\n".join(lines)


def _help(name: str) -> str:
    """The first sentences of an option's help, with its default."""
    field = FIELDS[name]
    text = HELP.get(name) or field.metadata.get("help", "").replace("%%", "%")
    text = textwrap.shorten(text, 200, placeholder=" ...")
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    default = getattr(default, "value", default)  # of an enumeration
    is_said = "default:" in text or default in (None, [], "")
    return text if is_said else f"{text} (default: {default})"


def describe_recipes() -> str:
    """Returns the names of the package's recipes, each with what it trains, and where they are."""
    summaries = {file.stem: file.read_text(encoding="utf-8").splitlines()[0] for file in sorted(RECIPES.glob("*.yaml"))}
    lines = [f"{name:28}{summary.removeprefix('# ')}" for name, summary in summaries.items()]
    launch = [f"  {file}" for file in sorted(RECIPES.glob("accelerate/*.yaml"))]
    where = f"They are in {RECIPES}; copy one to change it. For `accelerate launch --config_file`:"
    return "\n".join([*lines, "", where, *launch])
