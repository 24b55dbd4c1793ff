"""The files of models in CTranslate2's format: read without PyTorch, transformers and CTranslate2.

An Argos package, a zip of the name .argosmodel, has such a folder, model/, beside its tokenizer and metadata.json.
"""

import json
import math
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from ..checkpoints.headers import read_json
from ..checkpoints.kinds import ARGOS_METADATA, ARGOS_WEIGHTS, CONFIG, CT2_WEIGHTS, GENERATION_CONFIG, SPMS, TOKENIZER
from ..errors import CheckpointError, first_line, named

LANGUAGES_SPM = "sentencepiece.bpe.model"  # of NLLB and M2M100
LANGUAGE = re.compile("__[a-z]{2,3}__|[a-z]{3}_[A-Z][a-z]{3}")
VERSIONS = (4, 5, 6)
LAST_WITHOUT_CONFIG = 5  # up to which settings are variables
# Types of numbers in the order of their ids -> bytes, and the letter of a single one in `struct`.
TYPES = {"float32": (4, "f"), "int8": (1, "b"), "int16": (2, "h"), "int32": (4, "i"), "float16": (2, "e")}
TYPES |= {"bfloat16": (2, "h")}
# Files that say how source and target become tokens: of SentencePiece, but for those of subword-nmt, `CODES`.
CODES = ("bpe.model", "bpe.codes", "codes.bpe", "codes.txt")
TOKENIZERS = (
    *(SPMS, ("src.spm.model", "tgt.spm.model"), ("joint.spm.model",), (TOKENIZER,)),
    *(("sentencepiece.model",), (LANGUAGES_SPM,), ("spiece.model",), *((name,) for name in CODES)),
)
ARGOS_FILES = {"model", "sentencepiece.model", "bpe.model", ARGOS_METADATA}  # not what splits sentences
EMBEDDINGS = ("encoder/embeddings_0/weight", "decoder/embeddings/weight")
MOST_BYTES = 4 * 2**30  # of a package when it is unpacked


class Variable(NamedTuple):
    """A variable of model.bin."""

    shape: tuple[int, ...]
    dtype: str
    offset: int  # of its bytes in the file
    value: float | None  # if it has no dimensions


@dataclass(frozen=True)
class Folder:
    """A model in CTranslate2's format."""

    weights: Path
    config: Mapping[str, Any]
    places: tuple[Path, ...]  # where its tokenizer may be
    metadata: Mapping[str, Any]  # of an Argos package

    @classmethod
    def read(cls, path: Path) -> "Folder":
        """Reads the folder of a model or of an Argos package; raises `CheckpointError` for a damaged file."""
        place = (path / ARGOS_WEIGHTS).parent if (path / ARGOS_WEIGHTS).is_file() else path
        file = place.parent / ARGOS_METADATA
        is_package = file.is_file() and place.name == "model"
        config, weights = place / CONFIG, place / CT2_WEIGHTS
        with weights.open("rb") as opened:
            version = int.from_bytes(opened.read(4), "little")
        return cls(
            weights,
            read_json(config) if config.is_file() or version > LAST_WITHOUT_CONFIG else {},
            (place, place.parent) if is_package else (place,),
            read_json(file) if is_package else {},
        )

    @cached_property
    def variables(self) -> dict[str, Variable]:
        """The variables of model.bin by their names; raises `CheckpointError` if it is damaged."""
        try:
            with self.weights.open("rb") as opened:
                return _index(opened, self.weights.stat().st_size)
        except (OSError, ValueError, KeyError, struct.error) as error:
            reason = first_line(error)
            raise CheckpointError(f"{self.weights} is damaged, or isn't CTranslate2's ({reason})") from error

    def value(self, name: str, default: float) -> float:
        """Returns a variable without dimensions, "encoder/num_heads" say, that older files have for both stacks."""
        found = self.variables.get(name) or self.variables.get(name.partition("/")[2])
        return default if found is None or found.value is None else found.value

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What config.json says, or else CTranslate2's defaults and the variables of older files."""
        begin: str | None = "<s>" if self.value("with_target_bos", 1) else "</s>"
        begin = None if self.value("user_decoder_start_tokens", 0) else begin
        flags = {f"add_source_{one}": bool(self.value(f"with_source_{one}", 0)) for one in ("bos", "eos")}
        tokens = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "decoder_start_token": begin}
        return {**tokens, **flags, **self.config}

    @cached_property
    def decoding(self) -> dict[str, Any]:
        """How the model's authors decode: generation_config.json, or what their programs give CTranslate2."""
        if (file := self.weights.with_name(GENERATION_CONFIG)).is_file():
            return read_json(file)
        usual: dict[str, Any] = {"num_beams": 2, "length_penalty": 1.0, "max_new_tokens": 256, "early_stopping": True}
        if any(self.weights.with_name(name).is_file() for name in ("src.spm.model", "joint.spm.model")):  # quickmt's
            usual |= {"num_beams": 5, "max_new_tokens": 512}
        if self.metadata:
            usual |= {"num_beams": 4, "length_penalty": 0.2}
        if self.prefix:
            usual["forced_bos_token_id"] = self.vocabularies[1].index(self.prefix)
        return usual

    @property
    def pair(self) -> tuple[str, str] | None:
        """The languages of an Argos package, source and target; raises `CheckpointError` if it names none."""
        if missing := [name for name in ("from_code", "to_code") if self.metadata and not self.metadata.get(name)]:
            raise CheckpointError(f"{self.places[-1] / ARGOS_METADATA} has no {missing[0]}")
        return (str(self.metadata["from_code"]), str(self.metadata["to_code"])) if self.metadata else None

    @property
    def prefix(self) -> str | None:
        """The token of a target language that an Argos package has translations begin with."""
        token = self.metadata.get("target_prefix") or None
        if token is not None and token not in self.vocabularies[1]:
            raise CheckpointError(f"{self.places[-1] / ARGOS_METADATA}: {token!r} (target_prefix) is no token")
        return token

    def is_of_transformers(self, file: Path) -> bool:
        """Whether a tokenizer's file is read by transformers: a tokenizer.json, or one of several languages."""
        return file.name == TOKENIZER or (file.name == LANGUAGES_SPM and len(self.languages) > 0)

    @cached_property
    def languages(self) -> list[str]:
        """The tokens of target languages, of NLLB's or M2M100's names."""
        found = [token for token in self.vocabularies[1] if LANGUAGE.fullmatch(token)]
        return found if len(found) > 1 else []

    @cached_property
    def starts_from_zeros(self) -> bool:
        """Whether the decoder begins with a vector of zeros, as Marian's."""
        return bool(self.value("decoder/start_from_zero_embedding", 0))

    @cached_property
    def source_ends(self) -> bool:
        """Whether the model reads an end behind a source, written by CTranslate2 or by Marian's tokenizer."""
        return bool(self.settings["add_source_eos"]) or self.starts_from_zeros

    @cached_property
    def vocabularies(self) -> tuple[list[str], list[str]]:
        """The tokens of source and target by their ids; raises `CheckpointError` if embeddings are more or fewer."""
        return self._tokens("source", EMBEDDINGS[0]), self._tokens("target", EMBEDDINGS[1])

    def _tokens(self, side: str, embeddings: str) -> list[str]:
        names = [f"{one}_vocabulary.{kind}" for one in (side, "shared") for kind in ("json", "txt")]
        file = next((file for name in names if (file := self.weights.with_name(name)).is_file()), None)
        if file is None:
            raise CheckpointError(f"{self.weights.parent} has no vocabulary of the {side}: none of {', '.join(names)}")
        try:
            text = file.read_bytes().decode()
            tokens = json.loads(text) if file.suffix == ".json" else text.removesuffix("\n").split("\n")
            if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
                raise ValueError("it isn't a list of tokens")
            if len(tokens) != (rows := self.variables[embeddings].shape[0]):
                raise ValueError(f"it has {len(tokens):,} tokens, and {embeddings} {rows:,} rows")
        except (OSError, ValueError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{file} isn't this model's, or is damaged ({first_line(error)})") from error
        return tokens

    def tokenizer_files(self, place: Path | None = None) -> tuple[Path, Path]:
        """Returns the files that say how source and target become tokens, the model's or those of another place."""
        places = self.places if place is None else (place,)
        for names in TOKENIZERS:
            for files in ([one / name for name in names] for one in places):
                if all(file.is_file() for file in files):
                    return files[0], files[-1]
        known = ", ".join(" and ".join(names) for names in TOKENIZERS)
        raise CheckpointError(f"{places[-1]} has no tokenizer, none of {known}; give one: tokenizer=, --tokenizer DIR")


# ---- model.bin ----
def _index(opened: BinaryIO, end: int) -> dict[str, Variable]:
    """Reads the names, shapes and places of variables; an alias has the variable that it stands for."""

    def number(kind: str) -> int:
        found: int = struct.unpack(f"<{kind}", opened.read(struct.calcsize(f"<{kind}")))[0]
        return found

    def text() -> str:
        return opened.read(number("H")).rstrip(b"\0").decode()

    if (version := number("I")) not in VERSIONS:
        raise ValueError(f"its version is {version}, not {named(map(str, VERSIONS))}")
    if (kind := text()) != "TransformerSpec":
        raise ValueError(f"it is a {kind}, and an encoder-decoder is a TransformerSpec")
    number("I")  # the revision of names, which tell it themselves
    found: dict[str, Variable] = {}
    for _ in range(number("I")):
        name, rank = text().replace("encoder/embeddings/", "encoder/embeddings_0/"), number("B")  # until revision 4
        shape, kind_number = tuple(number("I") for _ in range(rank)), number("B")
        size = number("I")
        offset = opened.tell()
        dtype = [*TYPES][kind_number] if kind_number < len(TYPES) else ""
        if not dtype or size != math.prod(shape) * TYPES[dtype][0] or offset + size > end:
            raise ValueError(f"{name} has another size than its shape, or is cut off")
        content = opened.read(size) if not shape else b""
        opened.seek(offset + size)
        value = struct.unpack(f"<{TYPES[dtype][1]}", content)[0] if content else None
        found[name] = Variable(shape, dtype, offset, value)
    for _ in range(number("I")):
        alias, name = text(), text()
        found[alias] = found[name]
        if f"{name}_scale" in found:
            found.setdefault(f"{alias}_scale", found[f"{name}_scale"])
    return found


# ---- Argos packages ----
@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Yields a folder as it is, and the folder of an Argos package, a file, for the time that it is open.

    Raises `CheckpointError` for a file that is damaged or too large.
    """
    if not path.is_file():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="hf_vanilla_transformer-") as folder:
        try:
            with zipfile.ZipFile(path) as opened:
                _extract(opened, Path(folder))
        except (OSError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise CheckpointError(f"{path} can't be unpacked ({first_line(error)})") from error
        found = sorted(Path(folder).glob(f"*/model/{CT2_WEIGHTS}"))
        if not found:
            raise CheckpointError(f"{path} is no Argos package: it has no folder with model/{CT2_WEIGHTS}")
        yield found[0].parent.parent


def _extract(opened: zipfile.ZipFile, folder: Path) -> None:
    wanted = [one for one in opened.infolist() if {*PurePosixPath(one.filename).parts[1:2]} & ARGOS_FILES]
    if (size := sum(one.file_size for one in wanted)) > MOST_BYTES:
        raise ValueError(f"it has {size:,} bytes, more than {MOST_BYTES:,}")
    opened.extractall(folder, wanted)  # without the ".." and the root of a path
