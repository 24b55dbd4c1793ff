"""docs/paper.md: links into the code lead to what they name, no class is missing, commands draw the pictures."""

import ast
import math
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, cli
from hf_vanilla_transformer.cli import plot
from notebooks.diagrams import PICTURES, draw_masks, draw_positions, draw_schedule

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "paper.md").read_text(encoding="utf-8")
MODEL = "../hf_vanilla_transformer/modeling_vanilla_transformer.py"
# [`name`](file.py#L12) or [`a part of the line`](file.py#L12)
LINK = re.compile(r"\[`([^`]+)`\]\(([^)#]+\.py)#L(\d+)\)")


@cache
def definitions(source: str) -> dict[str, int]:
    """Where each class, function and variable of a module is defined; members as `Class.member`."""
    lines: dict[str, int] = {}
    module = ast.parse(source)
    classes = (node for node in module.body if isinstance(node, ast.ClassDef))
    for prefix, body in [("", module.body), *((f"{one.name}.", one.body) for one in classes)]:
        for node in body:
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    lines[prefix + name] = node.lineno
                case ast.Assign(targets=targets):
                    lines |= {prefix + one.id: node.lineno for one in targets if isinstance(one, ast.Name)}
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
    """All but the five that name the files themselves."""
    without = re.findall(r"\]\(([^)]+\.py)\)", PAGE)
    assert len(without) == len(set(without)) == 5
    assert not re.search(r"\[`[^`]+`\](?!\()", PAGE)  # a name without its link
    links = LINK.findall(PAGE)
    assert len(re.findall(r"\.py#", PAGE)) == len(links) > 40
    problems = [
        f"{file}: {found}"
        for text, file, number in links
        if (found := problem(text, (DOCS / file).read_text(encoding="utf-8"), int(number)))
    ]
    assert problems == []


def test_every_class_and_function_of_the_model_is_named() -> None:
    defined = definitions((DOCS / MODEL).read_text(encoding="utf-8"))
    named = {text.split(".")[0] for text, file, _ in LINK.findall(PAGE) if file == MODEL}
    assert sorted({name for name in defined if "." not in name} - named) == []


# A picture, and after it a command that writes it.
PICTURE = re.compile(
    r"^!\[([^\]]+)\]\((images/[\w.]+)\)\n\n`(vanilla-transformer plot [^`]+|python -m notebooks[^`]+)`", re.MULTILINE
)


def test_every_kind_of_plot_and_every_diagram_has_its_picture() -> None:
    commands = [command.split() for _, _, command in PICTURE.findall(PAGE)]
    assert {words[2] for words in commands if words[1] == "plot"} == set(plot.KINDS)
    assert {Path(words[-1]).stem for words in commands if words[1] == "-m"} == set(PICTURES)
    assert len(PICTURE.findall(PAGE)) == PAGE.count("![") == PAGE.count("](images/")


@pytest.mark.parametrize(("text", "file", "command"), PICTURE.findall(PAGE))
def test_pictures_are_small_and_drawn_by_a_command_that_exists(text: str, file: str, command: str) -> None:
    assert len(text.split()) > 5  # for those who don't see it
    content = (DOCS / file).read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 100_000
    if command.startswith("python"):
        assert command == f"python -m notebooks.diagrams docs/{file}"
        return
    arguments = cli._parser().parse_args(shlex.split(command)[1:])
    assert arguments.output == f"docs/{file}"


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_that_need_no_model_are_what_the_command_draws(name: str, tmp_path: Path) -> None:
    """Up to the version of matplotlib: the same size, and nearly the same colours."""
    image = pytest.importorskip("PIL.Image", reason="Pillow isn't installed, with which pictures are compared")
    draw, dpi = PICTURES[name]
    draw().savefig(tmp_path / "drawn.png", dpi=dpi)
    drawn, shown = (image.open(file).convert("RGB") for file in (tmp_path / "drawn.png", DOCS / f"images/{name}.png"))
    assert drawn.size == shown.size
    pairs = zip(drawn.resize((40, 30)).tobytes(), shown.resize((40, 30)).tobytes(), strict=True)
    assert sum(abs(one - other) for one, other in pairs) / (40 * 30 * 3) < 3


def test_masks_positions_and_rates_are_those_of_the_model_and_of_the_paper() -> None:
    """What a model with random weights attends to in a padded batch is blue in the picture."""
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=20, encoder_layers=1, decoder_layers=1)
    source, target = torch.tensor([[5, 6, 7, 0, 0]]), torch.tensor([[1, 8, 9, 0, 0]])
    masks = {"attention_mask": source != 0, "decoder_attention_mask": target != 0}
    model = VanillaTransformerForConditionalGeneration(config).eval()
    seen = model(source, decoder_input_ids=target, **masks, output_attentions=True, use_cache=False)
    encoder, _, decoder = (axes.collections[0].get_array() for axes in draw_masks("a b c", "<s> d e").axes)
    assert (encoder == (seen.encoder_attentions[0][0, 0] > 0).numpy()).all()
    assert (decoder == (seen.decoder_attentions[0][0, 0] > 0).numpy()).all()
    sines = draw_positions(d_model=16, positions=9).axes[0].images[0].get_array()
    assert sines[3, 8] == pytest.approx(math.sin(8 / 10000 ** (6 / 16)))
    (line,) = draw_schedule([(512, 4000)], updates=9000).axes[0].get_lines()
    for update in (1, 4000, 9000):
        expected = 512**-0.5 * min(update**-0.5, update * 4000**-1.5)
        assert line.get_ydata()[update - 1] == pytest.approx(expected)


SOURCE = "class A:\n    size: int = 3\n    def f(self):\n        return 1 + 2\n\ndef f():\n    pass\nX = Y = 1\n"


def test_wrong_lines_are_found() -> None:
    assert problem("A.f", SOURCE, 3) == problem("return 1 + 2", SOURCE, 4) == ""
    assert problem("f", SOURCE, 3) == "`f` is not in line 3, but in 6"
    assert problem("def f(", SOURCE, 4) == "`def f(` is not in line 4, but in 3 or 6"
