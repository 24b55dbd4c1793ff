"""What follows training: averaging checkpoints, scoring the validation and test sets, writing the model card."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from ..data.corpora import read_corpus
from ..evaluation.metrics import corpus_bleu, corpus_chrf
from ..evaluation.translation import translate
from ..publish.model_card import Evaluation, RunFacts, Sample, fill_model_card
from .averaging import average_checkpoints
from .checkpoints import last_complete_checkpoints
from .recipe import DataArguments, VanillaTransformerTrainingArguments

SCORES = "scores.json"
SAMPLES_PER_CARD = 5


def finish_run(
    facts: RunFacts, data: DataArguments, args: VanillaTransformerTrainingArguments, say: Callable[[str], None]
) -> None:
    """Averages the last checkpoints if `args` asks for it, scores the resulting model and writes its card.

    Args:
        facts: What the trainer knows about the run.
        data: Validation and test sets; a set without files is not scored.
        args: The run's folder, and how many checkpoints to average.
        say: Is called with each line that the user should see.

    Raises:
        ValueError: There are fewer complete checkpoints than `args.average_last`, or they can't be averaged.
        CorpusError: The validation or the test set can't be read.
    """
    folder = Path(args.output_dir or "")
    if last := args.average_last:
        checkpoints = last_complete_checkpoints(folder, last, to_resume=False)
        folder = folder / f"averaged-{last}"
        average_checkpoints(checkpoints, folder, overwrite=True)
        say(f"Averaged the last {last} checkpoints: {folder}")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).to(args.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    evaluations, samples = [], list(facts.samples)
    for part in ("validation", "test"):
        if data.corpus(part):
            evaluation, samples = _score(part, folder, model, tokenizer, data, args)
            evaluations.append(evaluation)
            say(f"{part}: {', '.join(map(str, evaluation.scores))}")
            say(f"{part}: {evaluation.scores[0].details}")
    (folder / SCORES).write_text(json.dumps([asdict(entry) for entry in evaluations], indent=1), encoding="utf-8")
    if data.bpe_dropout and facts.training_pairs is not None:
        facts = replace(facts, training_pairs=facts.training_pairs // data.bpe_dropout_copies)
    facts = replace(facts, recipe=replace(facts.recipe, bpe_dropout=data.bpe_dropout or None))
    files = [*data.train_source, *data.train_target, *data.train_data]
    facts = replace(facts, evaluations=evaluations or facts.evaluations, samples=samples, training_files=files)
    fill_model_card(facts).save(folder / "README.md")


def _score(
    part: str, folder: Path, model: Any, tokenizer: Any, data: DataArguments, args: VanillaTransformerTrainingArguments
) -> tuple[Evaluation, list[Sample]]:
    """Translates and scores a part of the data, and writes the translations; returns scores and a few samples."""
    pairs = read_corpus(data.corpus(part))
    sources, references = list(pairs["source"]), list(pairs["target"])
    translations = translate(model, tokenizer, sources)
    (folder / f"{part}.translations.txt").write_text("\n".join(translations) + "\n", encoding="utf-8")
    scores = [
        corpus_bleu(translations, references, tokenize=args.bleu_tokenize),
        corpus_chrf(translations, references),
    ]
    names = [*getattr(data, f"{part}_source"), *getattr(data, f"{part}_data")]
    evaluation = Evaluation(
        dataset=", ".join(Path(name).name for name in names),
        scores=scores,
        sentences=len(sources),
        decoding=_decoding(model.generation_config),
        split=part,
    )
    step = max(len(sources) // SAMPLES_PER_CARD, 1)
    triples = list(zip(sources, translations, references, strict=True))[::step][:SAMPLES_PER_CARD]
    return evaluation, [Sample(*triple) for triple in triples]


def _decoding(config: Any) -> str:
    if config.num_beams == 1:
        return "greedy"
    penalty = getattr(config, "gnmt_length_penalty", None)
    penalties = f", length penalty {penalty}" if penalty is not None else ""
    return f"beam {config.num_beams}{penalties}" + ("" if config.early_stopping is True else ", searched further")
