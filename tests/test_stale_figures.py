"""No figure is older than the code that it is about: pages name that code in their front matter."""

import re
import subprocess
from datetime import date

import pytest
import yaml
from test_markdown import ROOT, TEXTS

FRONT = re.compile(r"\A---\n(.*?)^---\n", re.DOTALL | re.MULTILINE)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
PAGES = {name: yaml.safe_load(found[1]) for name, text in TEXTS.items() if (found := FRONT.match(text))}
FIGURES = {name: front["figures"] for name, front in PAGES.items() if "figures" in front}


def section_of(text, heading):
    """What stands under a heading, up to the next one of its level or a higher one."""
    (found,) = re.finditer(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,2}} |\Z)", text, re.DOTALL | re.MULTILINE)
    return found[2]


def newest_change(paths):
    """The day of the newest commit that changes any of the paths."""
    command = ["git", "log", "-1", "--format=%cs", "--", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        pytest.skip("needs the history of a git checkout")
    return date.fromisoformat(done.stdout.strip())


@pytest.mark.parametrize(("page", "heading"), [(page, heading) for page, own in FIGURES.items() for heading in own])
def test_figures_are_not_older_than_their_code(page, heading):
    """A change that leaves the figures as they are moves `unchanged_by`, the day up to which that was judged."""
    figures = FIGURES[page][heading]
    assert all((ROOT / path).exists() for path in figures["code"])
    measured = min(map(date.fromisoformat, DATE.findall(section_of(TEXTS[page], heading))))
    known = max(measured, figures.get("unchanged_by", measured))
    assert newest_change(figures["code"]) <= known, f"measure {page}, {heading!r} again, or say that it still holds"


def test_pages_with_figures_of_speed_name_their_code():
    assert {"docs/performance.md", "docs/serving.md"} <= set(FIGURES)
