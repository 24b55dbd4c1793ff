"""Models in CTranslate2's format: their settings, and the tokenizers of those that others made."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from ..checkpoints.headers import read_json
from ..checkpoints.kinds import CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, Kind, kind_of
from ..errors import CheckpointError, first_line
from ..interop.ctranslate2_files import CODES, Folder, unpacked
from ..plan_vanilla_transformer import LENGTHS
from .languages import CODE, own_code

SEPARATOR = "@@"  # behind all pieces of a word but the last, in subword-nmt
Change = Callable[[str], str]  # of a text
FIX = "export the model again"
NO_END = 100_000  # positions of a model without a table of them


def open_tokenizer_of(folder: Folder, place: str | Path | None = None) -> Any:
    """Opens the tokenizer of a model, or that of another place or name; raises `CheckpointError` if there is none."""
    if place is not None and (not Path(place).is_dir() or Path(place, TOKENIZER_CONFIG).is_file()):
        from ..checkpoints.loading import load_tokenizer  # it imports PyTorch and transformers

        return load_tokenizer(place)
    files = folder.tokenizer_files(None if place is None else Path(place))
    if folder.is_of_transformers(files[0]):
        from ..interop.ctranslate2_folder import of_transformers  # as well

        return of_transformers(folder, files[0])
    return PieceTokenizer(folder, files)


class PieceTokenizer:
    """SentencePiece's or subword-nmt's pieces, numbered by a model's vocabularies, as far as translating needs it.

    Its methods and arguments are those of transformers, for lists of texts.
    """

    model_max_length, pad_token_id, bos_token_id = int(1e30), None, None

    def __init__(self, folder: Folder, files: tuple[Path, Path]) -> None:
        self._names = folder.vocabularies
        self._encoders = [{token: number for number, token in reversed([*enumerate(own)])} for own in self._names]
        self.target_encoder = self._encoders[1]
        self.unk_token, end = folder.settings["unk_token"], folder.settings["eos_token"]
        self.unk_token_id, self.unknown_target = (own.get(self.unk_token) for own in self._encoders)
        self.eos_token_id = self.target_encoder.get(end)
        end_of_source = [self._encoders[0][end]] if folder.source_ends else []
        self._ends: list[list[int | None]] = [[*end_of_source], [self.eos_token_id]]
        special = (end, self.unk_token, folder.prefix, "<pad>", "<blank>")
        self.all_special_ids = [self.target_encoder[one] for one in special if one in self.target_encoder]
        self.separate_vocabs = self._names[0] != self._names[1]
        self.supported_language_codes = [token for token in self._names[0] if CODE.fullmatch(token)]
        self._pieces, self._spell = _segmenters(folder, files)
        self.added_tokens_decoder: dict[int, object] = {}
        self.name_or_path = str(files[0].parent)

    def __call__(
        self,
        text: Sequence[str] | None = None,
        text_target: Sequence[str] = (),
        add_special_tokens: bool = True,
        **_: object,
    ) -> dict[str, list[list[int | None]]]:
        """Tokenizes a list of sources, or of targets."""
        is_target = text is None
        ends = self._ends[is_target] if add_special_tokens else []
        texts = text_target if text is None else text
        return {"input_ids": [[*self._ids(self.tokenize(one, is_target), is_target), *ends] for one in texts]}

    def tokenize(self, text: str, is_target: bool = False) -> list[str]:
        """Returns the pieces of a source or of a target, the former behind a code such as ">>deu<<"."""
        code = None if is_target else own_code(self, text)
        pieces = self._pieces[is_target](text[code.end() :] if code else text)
        return [code[1], *pieces] if code else pieces

    def _ids(self, pieces: Iterable[str], is_target: bool = False) -> list[int | None]:
        unknown = self.unknown_target if is_target else self.unk_token_id
        return [self._encoders[is_target].get(piece, unknown) for piece in pieces]

    convert_tokens_to_ids = _ids

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        """Returns the names of a target's tokens, or of one."""
        return self._names[1][ids] if isinstance(ids, int) else [self._names[1][number] for number in ids]

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = False, use_source_tokenizer: bool = False, **_: object
    ) -> str:
        """Returns the text of tokens of the target, with unknown ones as they are called."""
        names = self._names[not use_source_tokenizer]
        kept = [names[one] for one in ids if not (skip_special_tokens and one in self.all_special_ids)]
        spell, parts = self._spell[not use_source_tokenizer], []
        for is_unknown, run in groupby(kept, lambda name: name == self.unk_token):
            pieces = list(run)
            parts.append(" ".join(pieces) if is_unknown else spell(pieces))
        return " ".join(filter(None, parts)).replace("▁", " ").strip()

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids of a source's tokens."""
        return dict(self._encoders[0])


def _segmenters(folder: Folder, files: tuple[Path, Path]) -> tuple[list[Callable[..., Any]], list[Callable[..., str]]]:
    """Returns what makes pieces of texts of both sides, and texts of pieces."""
    try:
        if files[0].name not in CODES:
            import sentencepiece  # what `export` wrote needs none

            models = [sentencepiece.SentencePieceProcessor(model_file=str(file)) for file in files]
            return [partial(one.encode, out_type=str) for one in models], [one.decode_pieces for one in models]
        from subword_nmt.apply_bpe import BPE

        with files[0].open(encoding="utf-8") as opened:
            bpe = BPE(opened)
        sides: list[tuple[Change, Change]] = [_moses(code) for code in folder.pair] if folder.pair else [(str, str)] * 2
    except ImportError as error:
        raise ImportError(f"{files[0].name} needs {error.name}: pip install {error.name}".replace("_", "-")) from error
    except (OSError, RuntimeError, ValueError, SystemExit) as error:  # the latter of subword-nmt
        raise CheckpointError(f"{files[0]} can't be used ({first_line(error)})") from error
    join = partial(re.sub, f"{SEPARATOR} | *{SEPARATOR}$", "")
    return (
        [lambda text, own=one: bpe.segment(own(text)).split() for one, _ in sides],
        [lambda pieces, own=one: own(join(" ".join(pieces))) for _, one in sides],
    )


def _moses(language: str) -> tuple[Change, Change]:
    """Returns what Argos Translate does to texts of a language before subword-nmt, and after it."""
    from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

    normalize, tokenize = MosesPunctNormalizer(language).normalize, MosesTokenizer(language).tokenize
    detokenize = MosesDetokenizer(language).detokenize
    return lambda text: " ".join(tokenize(normalize(text))), lambda text: detokenize(text.split(" "))


def is_exported(folder: Folder) -> bool:
    """Whether `export` wrote a folder, and not other programs."""
    return "num_parameters" in folder.config


def pair_of(model: str) -> tuple[str, str] | None:
    """Returns the languages of an Argos package, source and target; None for any other model."""
    if kind_of(model) is not Kind.CTRANSLATE2:
        return None
    with unpacked(Path(model)) as place:
        return Folder.read(place).pair


def settings_of(folder: Folder) -> dict[str, object]:
    """Returns the attributes of a `CTranslate2Backend`; raises `CheckpointError` for a folder that is damaged."""
    return _settings_of_exported(folder) if is_exported(folder) else _settings_of_others(folder)


def _settings_of_exported(folder: Folder) -> dict[str, object]:
    place, config = folder.weights.parent, folder.config
    if "max_position_embeddings" not in config:
        raise CheckpointError(f"{place / CONFIG} has no max_position_embeddings; {FIX}")
    try:
        (source, target), decoding = folder.vocabularies, read_json(place / GENERATION_CONFIG)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {FIX}") from error
    return {"config": config, "generation_config": decoding, "source": source, "target": target}


def _settings_of_others(folder: Folder) -> dict[str, object]:
    (source, target), settings = folder.vocabularies, folder.settings
    if (end := settings["eos_token"]) not in target or settings["decoder_start_token"] is None:
        wrong = "eos_token" if end not in target else "decoder_start_token"
        raise CheckpointError(f"{folder.weights.parent}: {wrong} is {settings[wrong]!r}, no token to translate with")
    ids = {token: number for number, token in enumerate(target)}
    start = ids.get(settings["decoder_start_token"], ids[end])  # of zeros, whatever it is called
    tables = [folder.variables.get(f"{stack}/position_encodings/encodings") for stack in ("encoder", "decoder")]
    positions = min((table.shape[0] for table in tables if table is not None), default=NO_END)
    limits = {name: min(folder.decoding[name], positions) for name in LENGTHS[:2] if folder.decoding.get(name)}
    parameters = {one.offset: math.prod(one.shape) for one in folder.variables.values()}
    return {
        "config": {"max_position_embeddings": positions, "num_parameters": sum(parameters.values()), **settings},
        "generation_config": {**folder.decoding, **limits, "decoder_start_token_id": start, "eos_token_id": ids[end]},
        "source": source,
        "target": target,
        "is_own": False,
        "least_length": 1,
        "adds_end": bool(settings["add_source_eos"]),
    }
