"""Translations of a model and of its export to CTranslate2: lines that differ, and BLEU.

    vanilla-transformer export --model DIR --to ctranslate2 --quantization int8 --output DIR-int8
    python -m scripts.compare_ctranslate2 --model DIR --exported DIR-int8 --source test.en --reference test.de

Both search with the penalty length^alpha, end when as many translations as beams have ended, and make at most
--max-new-tokens tokens, of which the last need not be the end.
"""

import argparse
from pathlib import Path
from typing import Any

import ctranslate2

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.evaluation.metrics import corpus_bleu


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

    tokenizer = ours.tokenizer
    theirs = ctranslate2.Translator(options.exported, compute_type="default", intra_threads=options.threads)
    results = theirs.translate_batch(
        [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(lines)["input_ids"]],
        beam_size=options.num_beams,
        length_penalty=options.length_penalty,
        max_decoding_length=options.max_new_tokens,
        min_decoding_length=0,
        max_batch_size=32,
    )
    ids = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in results]
    exported = tokenizer.batch_decode(ids, skip_special_tokens=True)
    for name, texts in {"model": translations, "export": exported}.items():
        print(f"{name}: {corpus_bleu(texts, references)}")
    differing = sum(one != other for one, other in zip(translations, exported, strict=True))
    print(f"{differing} of {len(lines)} lines differ; the export computes in {theirs.compute_type}")


if __name__ == "__main__":
    main()
