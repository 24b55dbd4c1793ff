"""Folders like those of Helsinki-NLP/opus-mt-*: two small SentencePiece models, one vocabulary, random weights."""

import io
import json
import warnings
from collections.abc import Iterable
from pathlib import Path

import sentencepiece
import torch

TEXTS = {
    "source": [
        "A man is riding a bicycle.",
        "Two young girls are playing football in the street.",
        "The old woman with the red hat buys bread and milk at the market.",
        "A brown dog runs through the snow, and a white dog watches it.",
        "Several people are standing in front of a large building.",
        "The children are reading 12 books; they don't want to sleep.",
        "It costs 3.50 euros, or 1,000 in total!",
        "Who is the boy that jumps into the water?",
        '"I am hungry", says the worker (he has worked since half past nine).',
        "The quick brown fox jumps over the lazy dog; John & Zoe have 6, 7, 8 or 45 of them.",
        "An XQ-Y cable: WHKMVGUL/NOPRSD - EFIJBC.",
    ],
    "target": [
        "Ein Mann fährt Fahrrad.",
        "Zwei junge Mädchen spielen Fußball auf der Straße.",
        "Die alte Frau mit dem roten Hut kauft Brot und Milch auf dem Markt.",
        "Ein brauner Hund läuft durch den Schnee, und ein weißer Hund schaut ihm zu.",
        "Mehrere Leute stehen vor einem großen Gebäude.",
        "Die Kinder lesen 12 Bücher; sie wollen nicht schlafen.",
        "Es kostet 3,50 Euro, oder insgesamt 1.000!",
        "Wer ist der Junge, der ins Wasser springt?",
        "„Ich habe Hunger“, sagt der Arbeiter (er arbeitet seit halb zehn).",
        "Franz jagt im komplett verwahrlosten Taxi quer durch Bayern; 6, 7, 8 oder 45 Äpfel.",
        "Übrigens: Öl aus Jena, Quark, Typ XYZ - CVLPN.",
    ],
}
PIECES = {"source": 120, "target": 150}
CODES = [">>deu<<", ">>fra<<", ">>nld<<"]


def spm_model(texts: Iterable[str], pieces: int, **options) -> bytes:
    """A unigram SentencePiece model, trained as OPUS-MT trains its own."""
    model = io.BytesIO()
    options = {"model_type": "unigram", "character_coverage": 1.0, "hard_vocab_limit": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=pieces, minloglevel=2, num_threads=1, **options
    )
    return model.getvalue()


def opus_mt_tokenizer_files(
    path: Path,
    *,
    multi_target: bool = False,
    separate_vocabs: bool = False,
    texts: dict[str, list[str]] = TEXTS,
    pieces: dict[str, int] = PIECES,
    **options,
) -> Path:
    """Writes source.spm, target.spm, vocab.json and tokenizer_config.json into a folder, and returns the folder."""
    path.mkdir(parents=True, exist_ok=True)
    own = {}
    for side in ("source", "target"):
        model = spm_model(texts[side], pieces[side], **options)
        (path / f"{side}.spm").write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        # Marian's vocabularies are sorted by frequency; here, the order of the .spm is another one too.
        own[side] = sorted(processor.id_to_piece(i) for i in range(3, len(processor)))
    codes = CODES if multi_target else []
    if separate_vocabs:
        _write_vocabulary(path / "vocab.json", own["source"])
        _write_vocabulary(path / "target_vocab.json", own["target"])
    else:
        _write_vocabulary(path / "vocab.json", [*own["source"], *codes, *own["target"]])
    config = {"source_lang": "eng", "target_lang": "mul" if multi_target else "deu", "model_max_length": 512}
    config |= {"separate_vocabs": True} if separate_vocabs else {}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def opus_mt_folder(path: Path, *, multi_target: bool = False, separate_vocabs: bool = False, **config) -> Path:
    """Writes a whole OPUS-MT folder with random weights: all sizes small, and all of them different.

    With `multi_target`, the vocabulary has codes of target languages, `>>deu<<`; `config` has fields of MarianConfig.
    """
    from transformers import GenerationConfig, MarianConfig, MarianMTModel

    opus_mt_tokenizer_files(path, multi_target=multi_target, separate_vocabs=separate_vocabs)
    size = len(json.loads((path / "vocab.json").read_text(encoding="utf-8")))
    target = path / "target_vocab.json"
    decoder_size = len(json.loads(target.read_text(encoding="utf-8"))) if separate_vocabs else size
    fields = {
        "vocab_size": size,
        "decoder_vocab_size": decoder_size,
        "share_encoder_decoder_embeddings": not separate_vocabs,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 40,
        "max_position_embeddings": 512,
        "activation_function": "swish",
        "scale_embedding": True,
        "static_position_embeddings": True,
        "normalize_before": False,
        "pad_token_id": size - 1,
        "decoder_start_token_id": size - 1,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "bos_token_id": None,
        "init_std": 0.2,  # so that logits differ clearly
        "dropout": 0.1,
        **config,
    }
    model = MarianMTModel(MarianConfig(**fields)).eval()
    with torch.no_grad():
        pad = model.config.pad_token_id
        for embeddings in {model.model.encoder.embed_tokens, model.model.decoder.embed_tokens}:
            embeddings.weight[pad] = 0
        model.final_logits_bias.normal_()
    model.generation_config = GenerationConfig(
        bad_words_ids=[[pad]],
        bos_token_id=0,
        decoder_start_token_id=pad,
        eos_token_id=0,
        forced_eos_token_id=0,
        max_length=512,
        num_beams=4,
        pad_token_id=pad,
        renormalize_logits=True,
    )
    model.save_pretrained(path)
    return path


def marian_tokenizer(folder: Path):
    """Transformers' own MarianTokenizer, the yardstick, without its advice to install sacremoses."""
    from transformers import MarianTokenizer

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
        return MarianTokenizer.from_pretrained(folder)


def _write_vocabulary(file: Path, pieces: list[str]) -> None:
    tokens = dict.fromkeys(["</s>", "<unk>", *pieces, "<pad>"])
    file.write_text(json.dumps({token: number for number, token in enumerate(tokens)}, indent=2), encoding="utf-8")
