"""Translations of a model and of its export to CTranslate2: BLEU, lines that differ, and log-probabilities.

    vanilla-transformer export --model DIR --to ctranslate2 --quantization int8 --output DIR-int8
    python -m scripts.compare_ctranslate2 --model DIR --exported DIR-int8 --source test.en --reference test.de

Both search with the penalty length^alpha, end when as many translations as beams have ended, and make at most
--max-new-tokens tokens, of which the last need not be the end. The log-probabilities are those that both give to the
export's translations.
"""

import argparse
from pathlib import Path
from typing import Any

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.metrics import corpus_bleu
from hf_vanilla_transformer.translation.scoring import score_pairs


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

    ours, theirs = (Translator(one, "cpu", threads=options.threads) for one in (options.model, options.exported))
    settings: dict[str, Any] = {"num_beams": options.num_beams, "max_length": None, "forced_eos_token_id": None}
    if options.num_beams > 1:
        settings |= {"length_penalty": options.length_penalty, "early_stopping": True}
    translations, exported = (one(lines, max_new_tokens=options.max_new_tokens, **settings) for one in (ours, theirs))
    for name, texts in {"model": translations, "export": exported}.items():
        print(f"{name}: {corpus_bleu(texts, references)}")
    differing = sum(one != other for one, other in zip(translations, exported, strict=True))
    print(f"{differing} of {len(lines)} lines differ; the export computes in {theirs.decodes_with.dtype}")

    scores = [score_pairs(one.decodes_with, ours.tokenizer, lines, exported) for one in (ours, theirs)]
    pairs = [(own, other) for own, other in zip(*scores, strict=True) if own is not None and other is not None]
    largest = max(abs(own.log_probability - other.log_probability) / own.num_tokens for own, other in pairs)
    print(f"log-probabilities of {len(pairs):,} translations differ by up to {largest:.1e} per token")


if __name__ == "__main__":
    main()
