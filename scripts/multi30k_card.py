"""Writes model_card.md, the card of the best Multi30k model, from its recipes and what docs/results.md says of it.

    python -m scripts.multi30k_card

A test holds that model_card.md is what this writes.
"""

import re
from dataclasses import replace
from pathlib import Path

import torch

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.checkpoints.files import write_text
from hf_vanilla_transformer.hub.facts import Evaluation, RunFacts, Sample
from hf_vanilla_transformer.hub.model_card import fill_model_card
from hf_vanilla_transformer.metrics import Score
from hf_vanilla_transformer.training.recipe import parse_recipe
from hf_vanilla_transformer.training.run_facts import recipe_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results.md"
HEADING = "## Multi30k English-German, the best model"
MEASURED = re.compile(
    r"The model has (?P<parameters>[\d,]+) parameters\. Training took (?P<steps>[\d,]+) updates and "
    r"(?P<tokens>[\d.]+ million) target tokens, on one core for (?P<minutes>\d+) minutes "
    r"\([^)]*(?P<date>\d{4}-\d\d-\d\d)\)\. These are the scores of the mean of the last ten checkpoints, [^.]*decoded "
    r"as in the paper \((?P<beam>beam \d+), alpha (?P<alpha>[\d.]+)\)"
)
MACHINE = re.compile(r"Unless stated otherwise, the machine has 2 cores of (.*); each run used one core")
LIMITS = (
    "The model knows captions of photographs, lower-cased and tokenised as in Multi30k's own form lc.norm.tok. Its "
    "input must have that form, and its output has it. Its translations tend to be too short. Single training "
    "runs vary a little: [docs/results.md](docs/results.md) shows by how much, with the published score for this "
    "architecture and the command that trains such a model. The weights aren't published."
)


def facts() -> RunFacts:
    """Returns the facts about the model.

    Raises:
        ValueError: docs/results.md doesn't say what it is expected to, or contradicts the recipe.
    """
    text = RESULTS.read_text(encoding="utf-8")
    section = text.partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    measured, machine = MEASURED.search(section), MACHINE.search(text)
    if measured is None or machine is None:
        raise ValueError(f"{RESULTS}: the sentences under {HEADING!r}, or on the machine, have changed; adapt MEASURED")
    folder = "outputs/multi30k_best"
    options = {"bf16": True, "output_dir": folder}  # of the command there
    data, model_arguments, args = parse_recipe(["multi30k_tiny", "multi30k_best"], options)
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(model_arguments.config(model_arguments.vocab_size))
    said = [int(measured[name].replace(",", "")) for name in ("parameters", "steps")]
    recipe = [model.num_parameters(), args.max_steps]
    if said != recipe or args.average_last != 10:
        raise ValueError(f"{RESULTS} says {said} parameters and updates; the recipe has {recipe}, or averages others")
    return RunFacts(
        name=f"{folder}/averaged-{args.average_last}",
        title=HEADING.removeprefix("## "),
        config=model.config.to_dict(),
        parameters=model.num_parameters(),
        source_language="en",
        target_language="de",
        training_files=[*data.train_source, *data.train_target],
        recipe=replace(
            recipe_of(args, model, processes=1),
            averaged_checkpoints=args.average_last,
            steps=args.max_steps,
            target_tokens=measured["tokens"],
            hardware=f"one core of {machine[1]}, {measured['date']}",
            seconds=60.0 * int(measured["minutes"]),
        ),
        evaluations=_evaluations(section, f"{measured['beam']}, length penalty {measured['alpha']}"),
        samples=[Sample(*row) for row in _table(section, "| source | translation | reference |")],
        limits=LIMITS,
    )


def _table(section: str, header: str) -> list[list[str]]:
    """The cells of the table with this header."""
    rows = section.partition(f"{header}\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [re.split(r" *(?<!\\)\| *", row.strip("| ")) for row in rows]


def _evaluations(section: str, decoding: str) -> list[Evaluation]:
    """The scores that have a signature, on the validation and on the test set."""
    rows = [row for row in _table(section, "| | validation | test_2016_flickr | signature |") if len(row) == 4]
    evaluations = []
    for place, name, sentences in ((1, "validation", 1_014), (2, "test_2016_flickr", 1_000)):
        scores = [
            Score("chrF2" if row[0] == "chrF2" else "BLEU", float(row[place].strip("*")), _code(row[3]))
            for row in rows
            if row[3]
        ]
        evaluations.append(Evaluation(f"Multi30k, {name}", scores, sentences, decoding, split=name))
    return evaluations


def _code(cell: str) -> str:
    return cell.strip("`").replace("\\|", "|")


def main() -> None:
    """Writes the card."""
    write_text(ROOT / "model_card.md", str(fill_model_card(facts())))


if __name__ == "__main__":
    main()
