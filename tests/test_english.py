"""The words and phrases that the documentation, notebooks and the package's comments and messages don't use."""

import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What is out -> what to write.
OUT = {
    r"mend(s|ed|ing)?": "fix",
    r"(the )?whole": "complete, all of, throughout",
    r"stands in(?! for)|stood in(?! for)": "is saved in, is in",
    r"go(es|ing)? on from": "resume from",
    r"(has|have) no words? for": "has no equivalent",
    r"take(s|n)? no notice of": "ignore",
    r"worked for a minute": "compiles for about a minute",
    r"in other pieces": "a new segmentation",
    r"who multiplies": "GEMM backend",
    r"more information needed": "leave it out",
    r"delve|leverag(e|es|ing)|seamless(ly)?|cutting[- ]edge|state[- ]of[- ]the[- ]art": "say what it does",
    r"blazing(ly)?|lightning[- ]fast|supercharge[sd]?|game[- ]chang(er|ing)|effortless(ly)?": "give the figure",
    r"utili[sz](e|es|ed|ing)": "use",
    r"in order to": "to",
    r"please note|it is worth noting|note that": "say it",
    r"who(m)?ever": "name who",
    r"can't be had|haven't got": "isn't available",
    r"ha(s|ve) room (for|in)": "fits",
    r"anew": "again, new",
    r"nobody": "name the thing: isn't known, isn't set",
    r"(models?|checkpoints?|one|none|names?|parameters?) of ours": "this package's, this model's",
    r"without a word|out wrong": "without an error; say what is wrong",
}
# The same for the documentation alone.
OUT_OF_DOCS = {
    r"be it": "either, or",
    r"(is|are|was) wanted": "name who needs it",
    r"(is|are) up to (the|its|his|you|them|it)": "the X decides, the X has the default",
    r"ours": "this package's",
    r"(he|his|him)": "you, the user, the caller",
    r"one's own": "your own",
    r"takes? (the|a) user's word": "marks as, assumes",
    r"brings? nothing": "gives no speed-up",
    r"(is|are|was|were) told(?! apart)": "an error says, a warning names",
}
PATTERNS = {re.compile(rf"\b({pattern})\b", re.IGNORECASE): instead for pattern, instead in OUT.items()}
DOCS = {re.compile(rf"\b({pattern})\b", re.IGNORECASE): instead for pattern, instead in OUT_OF_DOCS.items()}
# A sentence whose subject is a clause: "What the file has is read." A question may begin like that.
CLAUSE = re.compile(r"(?:^|[.;:] )What (?!to |if |is |are |does |do |can )[^.?!|*`]+ (?:is|are|has|have|can|stays) ")
MOST_WHICH = 2  # ", which" in a page
MARKDOWN = [path for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.md")]
CODE = [
    path
    for folder in ("hf_vanilla_transformer", "scripts", "benchmarks", "notebooks")
    for path in (ROOT / folder).rglob("*.py")
]
NOTEBOOKS = list((ROOT / "notebooks").glob("*.ipynb"))
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted([*MARKDOWN, *CODE, *NOTEBOOKS])}


def parts_of(path: Path) -> list[tuple[str, bool]]:
    """A file's text, or each cell's of a notebook, and whether it is Markdown."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return [("".join(cell["source"]), cell["cell_type"] == "markdown") for cell in json.loads(text)["cells"]]
    return [(text, path.suffix == ".md")]


def english_in(text: str, is_markdown: bool) -> Iterator[tuple[int, str]]:
    """The English by lines: all of Markdown; comments and strings of Python, without {expressions}."""
    if is_markdown:
        yield from enumerate(text.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            text = re.sub(r"\{[^{}\n]*\}", "", token.string)
            yield from enumerate(text.splitlines(), start=token.start[0])


def found_in(name: str, patterns: dict[re.Pattern[str], str]) -> list[str]:
    """What a file has of the patterns, a line each."""
    any_of_them = re.compile("|".join(pattern.pattern for pattern in patterns), re.IGNORECASE)
    return [
        f"{name}:{number}: {match.group()!r}; write: {instead}"
        for text, is_markdown in parts_of(FILES[name])
        if any_of_them.search(text)  # most have none, and aren't read token by token
        for number, line in english_in(text, is_markdown)
        for pattern, instead in patterns.items()
        for match in pattern.finditer(line)
    ]


def test_words_that_are_out_are_not_used() -> None:
    assert [found for name in FILES for found in found_in(name, PATTERNS)] == []


def test_documentation_has_plain_sentences() -> None:
    which = {re.compile(r", which\b"): "two sentences"}
    pages = [name for name in FILES if name.endswith((".md", ".ipynb"))]
    assert [found for name in pages for found in found_in(name, {**DOCS, CLAUSE: "name the thing first"})] == []
    chains = [found_in(name, which) for name in pages]
    assert [found for found in chains if len(found) > MOST_WHICH] == []


def test_words_and_clauses_are_found() -> None:
    """In Markdown, comments, docstrings and messages; a variable may have any name."""
    assert all(map(CLAUSE.search, ["What the file has is read.", "Good. What no tensor tells, nothing can check"]))
    assert not any(map(CLAUSE.search, ["What is a head? It is a matrix.", "See what it has and what is left."]))
    code = '"""Mends it."""\nwhole = 1  # goes on from here\nprint(f"{whole} Note that")\n'
    found = [(n, m.group().lower()) for n, line in english_in(code, False) for p in PATTERNS for m in p.finditer(line)]
    assert found == [(1, "mends"), (2, "goes on from"), (3, "note that")]
    assert not any(pattern.search("It stands in for a model.") for pattern in PATTERNS)
