"""Tiny random models of families that translate between many languages, with their real tokenizer classes."""

import json
from pathlib import Path

import sentencepiece
import torch
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

from tests.interop.opus_mt import TEXTS, spm_model

# Two languages of each family, by its tokenizer's names; T5 has them in the names of tasks.
LANGUAGES = {
    "nllb": ("eng_Latn", "deu_Latn"),
    "m2m100": ("en", "de"),
    "mbart50": ("en_XX", "de_DE"),
    "mbart": ("en_XX", "de_DE"),
    "t5": ("en", "de"),
}
TASKS = {"translation_en_to_de": {"prefix": "translate English to German: ", "num_beams": 3, "max_length": 15}}
SMALL = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
SMALL |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "init_std": 0.6, "max_position_embeddings": 200}


def _tokenizer(kind: str, folder: Path) -> PreTrainedTokenizerBase:
    file = folder / "spm.model"
    file.write_bytes(spm_model([*TEXTS["source"], *TEXTS["target"]], 150))
    model = sentencepiece.SentencePieceProcessor(str(file))
    scored = [(model.id_to_piece(one), model.get_score(one)) for one in range(len(model))]
    special = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    if kind == "mbart50":
        return MBart50Tokenizer(vocab=scored)
    if kind == "mbart":
        return MBartTokenizer(vocab=[*special, *scored[3:]])
    if kind == "t5":
        return T5Tokenizer(vocab=[*special[1:], *scored[3:]])
    if kind == "nllb":
        letters = sorted(set("".join([*TEXTS["source"], *TEXTS["target"]]).replace(" ", "▁")))
        tokens = [*(token for token, _ in special), *letters]
        return NllbTokenizer(vocab={token: place for place, token in enumerate(tokens)}, merges=[])
    tokens = [token for token, _ in [*special, *scored[3:]]]
    vocabulary = folder / "vocab.json"
    vocabulary.write_text(json.dumps({token: place for place, token in enumerate(tokens)}), encoding="utf-8")
    codes = M2M100Tokenizer(str(vocabulary), str(file)).lang_token_to_id
    return M2M100Tokenizer(str(vocabulary), str(file), additional_special_tokens=list(codes))  # as published ones


def family(kind: str, folder: Path) -> Path:
    """Writes a model of a family with random weights, and its tokenizer; returns the folder."""
    tokenizer = _tokenizer(kind, folder)
    torch.manual_seed(1)
    size = max(len(tokenizer), *(one + 1 for one in tokenizer.convert_tokens_to_ids(tokenizer.all_special_tokens)))
    size += {"m2m100": 8, "nllb": 2, "t5": 3}.get(kind, 0)  # rows that no token has, as in published models
    if kind == "t5":
        config = T5Config(
            vocab_size=size, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0,
            task_specific_params=TASKS, initializer_factor=3.0,
        )  # fmt: skip
        model: PreTrainedModel = T5ForConditionalGeneration(config)
    elif kind.startswith("mbart"):
        start = None if kind == "mbart" else 2
        model = MBartForConditionalGeneration(MBartConfig(vocab_size=size, decoder_start_token_id=start, **SMALL))
    else:
        model = M2M100ForConditionalGeneration(M2M100Config(vocab_size=size, decoder_start_token_id=2, **SMALL))
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
