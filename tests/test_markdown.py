"""The Markdown files: their links lead to files, every option that they name exists, and README names what exists.

test_markdown_shell.py runs their blocks.
"""

import argparse
import ast
import contextlib
import importlib
import inspect
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.training import recipe

ROOT = Path(__file__).parents[1]
FILES = {path.relative_to(ROOT).as_posix(): path for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.md")}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
README = TEXTS["README.md"]
FENCE = re.compile(r"```+\s*(\w*)\s*(.*)")


@dataclass(frozen=True)
class Block:
    """A block of a Markdown file: its language and what follows it, the number of its first line, and its text."""

    language: str
    note: str
    line: int
    text: str


def blocks_of(text: str) -> Iterator[Block]:
    """Reads the blocks of a Markdown file, also those within lists."""
    fence, lines, start = None, [], 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif fence is None:
            fence, lines, start = FENCE.match(line.strip()), [], number + 1
        else:
            yield Block(fence[1], fence[2].strip(), start, "\n".join(lines) + "\n")
            fence = None


BLOCKS = {name: list(blocks_of(text)) for name, text in TEXTS.items()}
PYTHON = {name: [one for one in blocks if one.language == "python"] for name, blocks in BLOCKS.items()}
WITH_PYTHON = sorted(name for name, blocks in PYTHON.items() if any(not one.note for one in blocks))


def python_of(text: str) -> str:
    """Returns a file's Python blocks, one after the other, on the lines where the file has them."""
    lines = [""] * len(text.splitlines())
    for block in blocks_of(text):
        if (block.language, block.note) == ("python", ""):
            code = block.text.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    return "\n".join(lines)


def test_python_blocks_are_found_and_few_are_not_run() -> None:
    assert {"README.md", "model_card.md", "docs/training.md", "docs/engine.md"} <= set(WITH_PYTHON)
    assert python_of("a\n```python\nb\n```\nc\n```\nd\n```\n```python no-run\ne\n```") == "\n\nb" + "\n" * 8
    notes = [one.note for blocks in PYTHON.values() for one in blocks if one.note]
    assert set(notes) <= {"no-run"}  # for what can't run offline
    assert len(notes) <= 3


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_examples_import_public_names(name: str) -> None:
    """Names in the `__all__` of the package or of a module."""
    imports = [node for node in ast.walk(ast.parse(python_of(TEXTS[name]))) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if node.module and node.module.split(".")[0] == "hf_vanilla_transformer"]
    for node in ours:
        public = {*importlib.import_module(node.module).__all__, "engine"}  # a folder is imported by its name
        assert {alias.name for alias in node.names} <= public, node.module


# What the text calls, in `inline code` -> where it is.
CALLED = {
    **dict.fromkeys(("Translator", "export", "from_marian"), "hf_vanilla_transformer"),
    **dict.fromkeys(("attach", "detach", "training_shortcuts"), "hf_vanilla_transformer.engine"),
    **dict.fromkeys(("prepare", "publish"), "hf_vanilla_transformer.hub.upload"),
    **dict.fromkeys(("translate_document", "open_document"), "hf_vanilla_transformer.documents.document"),
    **dict.fromkeys(("Cleaning", "read_corpus", "tokenize"), "hf_vanilla_transformer.data.corpora"),
    "attention_of": "hf_vanilla_transformer.translation.attention",
    "convert": "hf_vanilla_transformer.interop.convert",
    "PackingCollator": "hf_vanilla_transformer.data.packing",
}


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))


def calls_in(text: str) -> list[ast.Call]:
    """Returns the calls in the inline code of a Markdown file, of functions in `CALLED`."""
    calls = []
    for span in inline_code(text):
        with contextlib.suppress(SyntaxError):  # of the shell, or a part of an expression
            calls += [node for node in ast.walk(ast.parse(span)) if isinstance(node, ast.Call)]
    return [call for call in calls if name_of(call) in CALLED]


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def test_calls_in_the_text_have_arguments_that_exist() -> None:
    calls = [call for text in TEXTS.values() for call in calls_in(text)]
    assert {name_of(call) for call in calls} == CALLED.keys()
    for call in calls:
        signature = inspect.signature(getattr(importlib.import_module(CALLED[name_of(call)]), name_of(call)))
        signature.bind_partial(*call.args, **{str(one.arg): None for one in call.keywords})


def test_make_targets_are_documented() -> None:
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [one for one in targets if f"`make {one}`" not in TEXTS["CONTRIBUTING.md"] + README] == []


def test_the_readme_and_the_documentation_are_short() -> None:
    assert len(README.split()) <= 900
    assert sum(len(text.split()) for name, text in TEXTS.items() if name.startswith(("README.md", "docs/"))) <= 16_000


def test_the_chinese_readme_says_the_same() -> None:
    """The same code, links to files and figures; where Chinese counts in units of its own, the English is beside it."""
    chinese = TEXTS["README.zh.md"]
    for pattern in (r"^```.*?^```", r"\]\(([\w./]+)", r"!\[.*?\]\((.*?)\)", r"\| `([^`]+)`", r"\(\d[\d.]*\)"):
        ours, theirs = (re.findall(pattern, text, re.MULTILINE | re.DOTALL) for text in (README, chinese))
        other = {"README.md", "README.zh.md"}  # each links to the other
        assert [one for one in ours if one not in other] == [one for one in theirs if one not in other]
    ours, theirs = (set(re.findall(r"\d[\d.,]*\d", text)) for text in (README, chinese))
    assert ours <= theirs


def markdown_of(notebook: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def anchors(page: Path) -> set[str]:
    """Those of the headings; of code, the lines."""
    lines = page.read_text(encoding="utf-8").splitlines()
    if page.suffix != ".md":
        return {f"L{number + 1}" for number in range(len(lines))}
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_files_and_headings_that_are_linked_exist() -> None:
    notebooks = [*(ROOT / "notebooks").glob("*.ipynb")]
    for file in [*FILES.values(), *(ROOT / "findings").glob("*.md"), *notebooks]:
        text = markdown_of(file) if file in notebooks else file.read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!\w+://)([^)\s]+)", text):
            path, _, anchor = link.partition("#")
            page = file.parent / path if path else file
            assert page.exists(), f"{file}: {link}"
            assert not anchor or anchor in anchors(page), f"{file}: {link}"


def test_the_readme_links_to_the_documentation() -> None:
    """To all but the appendix of the results, which they link to."""
    assert "](trials.md" in TEXTS["docs/results.md"]
    linked = {*re.findall(r"\]\((docs/\w+\.md)", README), "docs/trials.md"}
    assert {name for name in FILES if name.startswith("docs/")} <= linked


# ---- Options ----
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


def code_of(text: str) -> list[str]:
    """Inline code and the lines of shell blocks; continued lines are one."""
    shell = "".join(block.text for block in blocks_of(text) if block.language == "bash").replace("\\\n", " ")
    return [*(line.partition(" # ")[0] for line in shell.splitlines()), *inline_code(text)]


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
    found = [(option, code) for code in code_of(text) for option in OPTION.findall(code)]
    return [f"{option} in {code!r}" for option, code in found if option.replace("_", "-") not in owners(code)]


def test_options_exist() -> None:
    unknown = {name: unknown_options(text) for name, text in TEXTS.items() if name not in HISTORY}
    assert {name: options for name, options in unknown.items() if options} == {}


def test_unknown_options_are_noticed() -> None:
    text = "`--num-beam 3`, `--num-beams 3`\n```bash\nvanilla-transformer score --model x \\\n  --greedy\n```\n"
    assert unknown_options(text) == [
        "--greedy in 'vanilla-transformer score --model x    --greedy'",
        "--num-beam in '--num-beam 3'",
    ]
    assert unknown_options("`python -m benchmarks train --config base --beams 3`") != []
    assert unknown_options("```\n--output\n```\n`vanilla-transformer info DIR --json`") == []


def test_scripts_that_are_named_exist() -> None:
    named = {path for text in TEXTS.values() for path in re.findall(r"python (?:-m )?(scripts[./]\w+)", text)}
    assert named
    places = {path: [f"{path.replace('.', '/')}{end}" for end in (".py", "/__main__.py")] for path in named}
    assert [path for path, files in places.items() if not any((ROOT / file).is_file() for file in files)] == []


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
