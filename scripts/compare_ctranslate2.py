"""Translations of a model and of its export to CTranslate2: BLEU, lines that differ, and log-probabilities.

    vanilla-transformer export --model DIR --to ctranslate2 --quantization int8 --output DIR-int8
    python -m scripts.compare_ctranslate2 --model DIR --exported DIR-int8 --source test.en --reference test.de

Both search with the penalty length^alpha, end when as many translations as beams have ended, and make at most
--max-new-tokens tokens, of which the last need not be the end. The log-probabilities are those that both give to each
token of the export's translations.
"""

import argparse
from pathlib import Path
from typing import Any

import ctranslate2
import torch

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.interop.ctranslate2_settings import never_chosen
from hf_vanilla_transformer.metrics import corpus_bleu
from hf_vanilla_transformer.translation.reading import namers

BATCH = 32


def main() -> None:
    """Translates with both and prints what differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--exported", required=True, help="folder of its export")
    parser.add_argument("--source", required=True, type=Path)
    parser.add_argument("--reference", required=True, type=Path)
    parser.add_argument("--num-beams", type=int, default=1)
    parser.add_argument("--length-penalty", type=float, default=1.0, help="alpha")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    lines, references = (file.read_text(encoding="utf-8").splitlines() for file in (options.source, options.reference))

    ours = Translator(options.model, "cpu", threads=options.threads)
    settings: dict[str, Any] = {"num_beams": options.num_beams, "max_length": None, "forced_eos_token_id": None}
    if options.num_beams > 1:
        settings |= {"length_penalty": options.length_penalty, "early_stopping": True}
    translations = ours(lines, max_new_tokens=options.max_new_tokens, **settings)

    tokenizer, (source_names, target_names) = ours.tokenizer, namers(ours.tokenizer)
    target = target_names(range(ours.model.config.target_vocab_size))
    ids_of = {name: number for number, name in enumerate(target)}
    theirs = ctranslate2.Translator(options.exported, compute_type="default", intra_threads=options.threads)
    sources = [source_names(ids) for ids in tokenizer(lines)["input_ids"]]
    results = theirs.translate_batch(
        sources,
        beam_size=options.num_beams,
        length_penalty=options.length_penalty,
        max_decoding_length=options.max_new_tokens,
        min_decoding_length=0,
        suppress_sequences=never_chosen(ours.plan(), target) or None,
        max_batch_size=BATCH,
    )
    found = [result.hypotheses[0] for result in results]
    ids = [[ids_of[token] for token in tokens] for tokens in found]
    exported = tokenizer.batch_decode(ids, skip_special_tokens=True)
    for name, texts in {"model": translations, "export": exported}.items():
        print(f"{name}: {corpus_bleu(texts, references)}")
    differing = sum(one != other for one, other in zip(translations, exported, strict=True))
    print(f"{differing} of {len(lines)} lines differ; the export computes in {theirs.compute_type}")

    scores = theirs.score_batch(sources, found, max_batch_size=BATCH)
    theirs_of = [torch.tensor(score.log_probs) for score in scores]
    own = [_log_probabilities(ours, *one) for one in zip(lines, ids, strict=True)]
    differences = (torch.cat(own) - torch.cat(theirs_of)).abs()
    print(f"log-probabilities of {len(differences):,} tokens differ by up to {differences.max():.1e}")


@torch.no_grad()
def _log_probabilities(translator: Translator, line: str, ids: list[int]) -> torch.Tensor:
    """Returns what the model gives to each token of a translation and to its end."""
    model, labels = translator.model, torch.tensor([[*ids, translator.model.config.eos_token_id]])
    logits = model(**translator.tokenizer(line, return_tensors="pt"), labels=labels).logits[0]
    return logits.log_softmax(-1).gather(-1, labels[0, :, None])[:, 0]


if __name__ == "__main__":
    main()
