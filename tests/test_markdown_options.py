"""Every `--option` that the Markdown files name exists: in the command or script it is given to, or elsewhere."""

import argparse
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_markdown import ROOT, TEXTS

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.training import recipe

OPTION = re.compile(r"(?<![\w/-])--[A-Za-z][\w-]*")
# Options of other programs: who has them.
OTHERS = {
    "pip": ["--constraint"],
    "jupyter execute": ["--inplace"],
    "docker": ["--tag", "--rm", "--publish", "--volume"],
    "kubectl": ["--port", "--target-port"],
    "torchrun": ["--nproc-per-node"],
    "accelerate launch": [
        *("--config-file", "--machine-rank", "--main-process-ip", "--use-fsdp", "--fsdp-version"),
        *("--fsdp-auto-wrap-policy", "--fsdp-state-dict-type", "--fsdp-cpu-ram-efficient-loading"),
    ],
    "fairseq": [
        *("--max-tokens", "--update-freq", "--max-update", "--lr-scheduler", "--warmup-updates", "--lenpen"),
        *("--joined-dictionary", "--share-all-embeddings", "--encoder-normalize-before"),
    ],
    "vanilla-transformer": ["--help", "--version", "--debug"],
}
HISTORY = ("CHANGELOG.md",)  # name what older versions had


def commands() -> dict[str, set[str]]:
    """Each command's options."""
    found = {name: options_of(command) for name, command in commands_of(cli._parser()).items()}
    found["train"] |= {f"--{name.replace('_', '-')}" for name in recipe.SUPPORTED_NAMES}
    return found


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return {name: command for action in actions for name, command in action.choices.items()}


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """A parser's options, with those of the kinds that the command `plot` has."""
    return set(parser._option_string_actions).union(*map(options_of, commands_of(parser).values()))


def options_in(source: str) -> set[str]:
    """The options that a script declares: to argparse, or as fields of dataclasses that are parsed."""
    named = set(re.findall(r'"(--[a-z][\w-]*)"', source))
    fields = re.findall(r"^    (\w+): .+ = ", source, re.MULTILINE)
    looped = re.findall(r'"([a-z][\w-]*)"', source) if 'argument(f"--{' in source else []
    return named | {f"--{name}".replace("_", "-") for name in (*fields, *looped)}


COMMANDS = commands()
SCRIPTS = {
    **{f"scripts/{path.name}": options_in(path.read_text()) for path in (ROOT / "scripts").glob("*.py")},
    "benchmarks": options_in((ROOT / "benchmarks" / "__main__.py").read_text()),
}
SCRIPTS["scripts/quickstart.py"] = options_in((ROOT / "scripts" / "quickstart" / "__main__.py").read_text())
SCRIPTS["scripts/quickstart.py"] |= COMMANDS["train"]  # which it starts
SCRIPTS["scripts/fine_tune.py"] |= COMMANDS["train"]  # both have all of Seq2SeqTrainingArguments
ANYWHERE = set().union(*COMMANDS.values(), *SCRIPTS.values(), *OTHERS.values())


def code_of(text: str) -> Iterator[tuple[int, str]]:
    """Yields inline code and the lines of shell blocks, each with the number of its line; continued lines are one."""
    shell, fence = False, ""
    joined = re.sub(r"\\\n", lambda match: "\\\0", text)
    number = 0
    for line in joined.split("\n"):
        number += 1
        if line.lstrip().startswith("```"):
            fence = "" if fence else line.strip()
            shell = fence.startswith("```bash")
        elif shell:
            yield number, line.replace("\\\0", " ").partition(" # ")[0]
        elif not fence:
            yield from ((number, code) for code in re.findall(r"`([^`]+)`", line))
        number += line.count("\0")


def owners(code: str) -> set[str]:
    """The options that may follow what a piece of code begins with; all that there are if it begins with none."""
    if match := re.search(r"(?:vanilla-transformer|hf_vanilla_transformer) ([a-z]+)", code):
        return COMMANDS[match[1]] | set(OTHERS["torchrun"]) | set(OTHERS["accelerate launch"])
    if match := re.match(r"([a-z]+) --", code):
        return COMMANDS.get(match[1], ANYWHERE)
    if match := re.search(r"scripts[./](\w+)", code):
        return SCRIPTS[f"scripts/{match[1]}.py"]
    return SCRIPTS["benchmarks"] | {"--help"} if "-m benchmarks" in code else ANYWHERE


def unknown_options(text: str) -> list[str]:
    return [
        f"line {number}: {option} in {code.strip()!r}"
        for number, code in code_of(text)
        for option in OPTION.findall(code)
        if option.replace("_", "-") not in owners(code)
    ]


@pytest.mark.parametrize("name", [name for name in TEXTS if name not in HISTORY])
def test_options_exist(name: str) -> None:
    assert unknown_options(TEXTS[name]) == []


def test_unknown_options_are_noticed() -> None:
    text = "`--num-beam 3`, `--num-beams 3`\n```bash\nvanilla-transformer score --model x \\\n  --greedy\n```\n"
    assert unknown_options(text) == [
        "line 1: --num-beam in '--num-beam 3'",
        "line 3: --greedy in 'vanilla-transformer score --model x    --greedy'",
    ]
    assert unknown_options("`python -m benchmarks train --config base --beams 3`") != []
    assert unknown_options("```\n--output\n```\n`vanilla-transformer info DIR --json`") == []


def test_scripts_that_are_named_exist() -> None:
    named = {path for text in TEXTS.values() for path in re.findall(r"python (?:-m )?(scripts[./]\w+)", text)}
    assert named
    files = {path: Path(ROOT, path.replace(".", "/")) for path in named}
    assert [
        path
        for path, file in files.items()
        if not (file.with_suffix(".py").is_file() or (file / "__main__.py").is_file())
    ] == []


def trainings_that_do_not_run() -> list[str]:
    """The `train` commands of blocks that no test runs."""
    shell = "\n".join(re.findall(r"```bash no-run.*?\n(.*?)```", "\n".join(TEXTS.values()), re.DOTALL))
    lines = shell.replace("\\\n", " ").splitlines()
    return [line.split(" train ", 1)[1] for line in lines if re.search(r"vanilla[_-]transformer train ", line)]


@pytest.mark.parametrize("arguments", trainings_that_do_not_run())
def test_the_options_of_trainings_that_do_not_run_go_together(arguments: str) -> None:
    """Values are of the right type, and the run saves as many checkpoints as it averages."""
    words = shlex.split(arguments)
    assert words[0] == "--config"
    configs = list(itertools.takewhile(lambda word: not word.startswith("--"), words[1:]))
    _, _, training = recipe.parse_recipe(configs, recipe.options_of(words[1 + len(configs) :]))
    saves = 0 if training.save_strategy == "no" else training.max_steps // training.save_steps
    assert training.average_last <= saves
