"""The end of a run: averaging checkpoints, scoring the validation and test sets, the model card."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.averaging import average_checkpoints
from ..checkpoints.completeness import complete_checkpoints
from ..checkpoints.files import write_text
from ..checkpoints.kinds import SCORES
from ..checkpoints.loading import load_checkpoint
from ..data.corpora import read_corpus
from ..data.formats import Corpus, is_table
from ..engine import attach_if_supported
from ..hub.facts import Evaluation, RunFacts, Sample, inherited, local_name, said_by_author, with_what_was_said
from ..hub.model_card import save_card
from ..translation.evaluation import evaluate
from .arguments import DataArguments
from .evaluation import TranslationMetrics
from .trainer import VanillaTransformerTrainer

SAMPLES_PER_CARD = 5


def finish_run(
    trainer: VanillaTransformerTrainer,
    facts: RunFacts,
    data: DataArguments,
    corpora: Mapping[str, Corpus],
    say: Callable[[str], object],
    trust_remote_code: bool = False,
) -> Path:
    """Averages the last checkpoints if asked to, scores the model and writes its card; returns its folder.

    Of the corpora, "validation" and "test" are scored unless they are empty.
    """
    args, run = trainer.args, Path(trainer.args.output_dir or "")
    averaged = _checkpoints_to_average(run, args.average_last, say, to_resume=not args.save_only_model)
    folder = run / f"averaged-{len(averaged)}" if averaged else run
    # Averaging replaces the folder.
    said = inherited(trainer.model.name_or_path) | said_by_author(run) | said_by_author(folder)
    if averaged:
        average_checkpoints(averaged, folder, overwrite=True, trust_remote_code=trust_remote_code)
        # The checkpoints' may be of an earlier start: a resumed run can change it.
        trainer.model.generation_config.save_pretrained(folder)
        say(f"Averaged the last {len(averaged)} checkpoint{'s' if averaged[1:] else ''}: {folder}")
    tokenizer, model = load_checkpoint(folder, trust_remote_code=trust_remote_code)
    model = model.to(args.device)
    attach_if_supported(model)
    evaluations: list[Evaluation] = []
    samples: list[Sample] = []
    for part in ("validation", "test"):
        if corpora[part]:
            names = [*getattr(data, f"{part}_source"), *getattr(data, f"{part}_data")]
            evaluation, samples = _score(
                part, corpora[part], names, folder, (tokenizer, model), trainer.compute_metrics
            )
            evaluations.append(evaluation)
            say(f"{part}: {', '.join(map(str, evaluation.scores))}")
            if evaluation.scores[0].details:
                say(f"{part}: {evaluation.scores[0].details}")
    write_text(folder / SCORES, json.dumps([asdict(entry) for entry in evaluations], indent=1))
    files = [*data.train_source, *data.train_target, *data.train_data]
    on_hub = [name for name in data.train_data if is_on_hub(name)]
    facts = replace(
        facts,
        name=args.hub_model_id or local_name(folder),
        recipe=replace(facts.recipe, averaged_checkpoints=len(averaged) or None),
        samples=samples,
        training_files=list(dict.fromkeys(one for one in files if one not in on_hub)),
        datasets=on_hub,
        evaluations=evaluations,
    )
    save_card(folder, with_what_was_said(facts, said))
    return folder


def _checkpoints_to_average(run: Path, last: int, say: Callable[[str], object], *, to_resume: bool) -> list[Path]:
    """Returns the last complete checkpoints of a run, oldest first, at most `last`.

    One that the run couldn't resume from may be of an earlier start, so `to_resume` leaves it out.
    """
    newest = list(islice(complete_checkpoints(run, to_resume=to_resume), last))
    if 0 < len(newest) < last:  # the run was stopped early
        complete = f"{len(newest)} complete checkpoint{'s' if newest[1:] else ''}"
        say(f"The run has {complete}, not {last}: all of them are averaged")
    return newest[::-1]


def _score(
    part: str,
    corpus: Corpus,
    names: Sequence[str],
    folder: Path,
    checkpoint: tuple[PreTrainedTokenizerBase, PreTrainedModel],
    metrics: TranslationMetrics,
) -> tuple[Evaluation, list[Sample]]:
    """Translates and scores a part of the data, and writes the translations; returns scores and a few samples."""
    tokenizer, model = checkpoint
    pairs = read_corpus(corpus)
    sources, references = list(pairs["source"]), list(pairs["target"])
    result = evaluate(
        model, sources, references, tokenizer=tokenizer, metrics=metrics.measures, perplexity=False, progress_bar=False
    )
    write_text(folder / f"{part}.translations.txt", "".join(f"{text}\n" for text in result.translations))
    evaluation = Evaluation(
        dataset=", ".join(name if is_on_hub(name) else Path(name).name for name in names),
        scores=list(result.scores.values()),
        sentences=result.num_sentences,
        decoding=str(result.plan),
        split=part,
    )
    step = max(len(sources) // SAMPLES_PER_CARD, 1)
    triples = list(zip(sources, result.translations, references, strict=True))[::step][:SAMPLES_PER_CARD]
    return evaluation, [Sample(*triple) for triple in triples]


def is_on_hub(name: str) -> bool:
    """Whether training data of this name is a data set on the Hub, rather than a table's file or a folder."""
    return not is_table(name) and not Path(name).exists()
