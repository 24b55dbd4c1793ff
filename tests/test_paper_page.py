"""docs/paper.md: every link into the code leads to the line that it names, and no class of the model is missing."""

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "paper.md").read_text(encoding="utf-8")
MODEL = "../hf_vanilla_transformer/modeling_vanilla_transformer.py"
# [`name`](file.py#L12) or [`a part of the line`](file.py#L12)
LINK = re.compile(r"\[`([^`]+)`\]\(([^)#]+\.py)#L(\d+)\)")


def definitions(source: str) -> dict[str, int]:
    """Where each class, function and variable of a module is defined; members as `Class.member`."""
    lines: dict[str, int] = {}

    def visit(body: list[ast.stmt], prefix: str = "") -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                lines[prefix + node.name] = node.lineno
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                lines.update({prefix + target.id: node.lineno for target in targets if isinstance(target, ast.Name)})

    visit(ast.parse(source).body)
    return lines


def problem(text: str, source: str, number: int) -> str:
    """What is wrong with a link to a line of a module; nothing if the line is the one that the text names."""
    lines = source.splitlines()
    if re.fullmatch(r"\w+(\.\w+)*", text):
        right = [definitions(source)[text]] if text in definitions(source) else []
    else:
        right = [place for place, line in enumerate(lines, start=1) if text in line]
    if number in right:
        return ""
    return f"`{text}` is not in line {number}, but in {' or '.join(map(str, right)) if right else 'none'}"


def test_links_lead_to_the_lines_that_they_name() -> None:
    links = LINK.findall(PAGE)
    assert len(links) > 40
    problems = [
        f"{file}: {found}"
        for text, file, number in links
        if (found := problem(text, (DOCS / file).read_text(encoding="utf-8"), int(number)))
    ]
    assert problems == []


def test_every_link_into_code_names_its_line() -> None:
    """All but the four that name the files themselves."""
    without = re.findall(r"\]\(([^)]+\.py)\)", PAGE)
    assert len(without) == len(set(without)) == 4
    assert len(re.findall(r"\.py#", PAGE)) == len(LINK.findall(PAGE))
    assert not re.search(r"\[`[^`]+`\](?!\()", PAGE)  # a name without its link


@pytest.mark.parametrize(
    "section", ["3.1", "3.2.1", "3.2.2", "3.2.3", "3.3", "3.4", "3.5", "4", "5.1", "5.2", "5.3", "5.4", "6.1", "6.2"]
)
def test_sections_of_the_paper_are_there(section: str) -> None:
    assert len(re.findall(rf"^## {re.escape(section)} \w", PAGE, re.MULTILINE)) == 1


def test_every_class_and_function_of_the_model_is_named() -> None:
    defined = definitions((DOCS / MODEL).read_text(encoding="utf-8"))
    named = {text.split(".")[0] for text, file, _ in LINK.findall(PAGE) if file == MODEL}
    assert sorted({name for name in defined if "." not in name} - named) == []


@pytest.mark.parametrize("command", ["attention", "positions", "schedule", "masks", "curves"])
def test_pictures_are_drawn_by_commands(command: str) -> None:
    assert f"`vanilla-transformer plot {command}`" in PAGE
    assert not re.search(r"!\[", PAGE)


SOURCE = "class A:\n    size: int = 3\n    def f(self):\n        return 1 + 2\n\ndef f():\n    pass\nX = Y = 1\n"


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("A", 1, ""),
        ("A.size", 2, ""),
        ("A.f", 3, ""),
        ("f", 6, ""),
        ("Y", 8, ""),
        ("return 1 + 2", 4, ""),
        ("f", 3, "`f` is not in line 3, but in 6"),
        ("A.f", 6, "`A.f` is not in line 6, but in 3"),
        ("A.g", 3, "`A.g` is not in line 3, but in none"),
        ("return 1 + 2", 5, "`return 1 + 2` is not in line 5, but in 4"),
        ("def f(", 4, "`def f(` is not in line 4, but in 3 or 6"),
    ],
)
def test_wrong_lines_are_found(text: str, line: int, complaint: str) -> None:
    assert problem(text, SOURCE, line) == complaint
