"""A model to translate with.

    translator = Translator("Helsinki-NLP/opus-mt-en-de")
    translator("It is half past three.")  # a string; a list gives a list, and a generator a stream

A Marian model, such as this one, is converted when it is loaded.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..checkpoints.kinds import Kind, kind_of
from ..plan_vanilla_transformer import Plan
from . import decoding
from .backend import Backend, DeviceError, Translation, check_number
from .ctranslate2 import CTranslate2Backend, import_library
from .languages import target_of
from .tokenizer_file import open_tokenizer

if TYPE_CHECKING:  # an exported model is translated without
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..checkpoints.loading import Where

WINDOW = 1_000  # texts of a stream that are read, sorted by length and translated at a time
BACKENDS = ("engine", "ctranslate2")
WARM_UP = (1, 32)  # texts at a time
SECONDS_TO_BAR = 2  # a shorter call shows no progress bar

Result = str | Translation | list[Translation]


class Translator:
    """Translates texts with one model.

        translator = Translator("outputs/quickstart/model")
        translator("It is half past nine.")  # a string
        translator(["It is half past nine.", "She has to pay twenty euros."], num_beams=1)  # a list in the same order
        for text in translator(line for line in file): ...  # a stream, read and translated window by window

    Several threads may call one translator: with the engine, one call waits for the other. A pickle, such as a process
    that is spawned gets, is the folder or name with these options, and is opened again.

    The engine is attached to a model that is loaded here, if it is one of this package: as long as it is, don't change
    the model's weights and settings (`engine.attach` says what is noticed). A model that you give isn't copied:
    `device` moves it, and a `compute_type` that you name attaches the engine to it; otherwise it decodes with the
    engine only if you have attached it.

    Args:
        model: A folder that `save_pretrained` wrote or a name on the Hub, of any sequence-to-sequence model (a Marian
            model, Helsinki-NLP/opus-mt-..., is converted when it is loaded); or a model, a `PeftModel` among them; or a
            folder that `vanilla-transformer export --to ctranslate2` wrote.
        device: None: CUDA if it is available, else the CPU; a model that is given stays where it is.
        compute_type: As for `engine.attach`: "default" computes in the type of the weights, "int8" with weights of 8
            bits, on a CPU. The backend "ctranslate2" has types of its own; an ensemble's members have theirs, and a
            device.
        threads: Number of PyTorch's threads, for the complete process; None: unchanged. With the backend "ctranslate2",
            those of this translator; None: as many as PyTorch has.
        backend: "engine" or "ctranslate2". The latter needs the package of that name and decodes as in
            `translation.ctranslate2`; a model is converted for it each time. None: "engine", or the one that a folder
            was exported for.
        tokenizer: That of a model that is given; a folder or a name has its own.
        src_lang: The source language of calls that don't name one, for a model of several (NLLB, M2M100, mBART, T5).
        tgt_lang: The target language, as well (OPUS-MT, too).
        source_prefix: What sources begin with in such calls, for models that want a task's name there.
        dtype: Type of the weights; "auto": as they were saved, but float32 for float16 on a CPU. A model that is given
            keeps its own.
        revision: Branch, tag or commit on the Hub.
        token: For the Hub, as for `from_pretrained`.
        trust_remote_code: Whether code that comes with the checkpoint may run.
        warm_up: Whether to translate a few words now. On a GPU, the first batches of each size wait for their steps to
            be captured.

    Attributes:
        model: The model, or a `CTranslate2Backend`.
        backend: The name of what translates; `decodes_with`: the object.

    Raises:
        ValueError: An option has a wrong value, the model can't be loaded (`CheckpointError`) or isn't on the Hub
            (`HubError`), the device can't be used (`DeviceError`), or a model that is given is in training mode, has no
            tokenizer, or another model's.
    """

    def __init__(
        self,
        model: "str | Path | PreTrainedModel",
        device: "str | torch.device | None" = None,
        compute_type: str = "default",
        threads: int | None = None,
        *,
        backend: str | None = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        source_prefix: str | None = None,
        dtype: "torch.dtype | str" = "auto",
        revision: str | None = None,
        token: str | bool | None = None,
        trust_remote_code: bool = False,
        warm_up: bool = False,
    ) -> None:
        self.backend = _backend(model, backend)
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads is {threads!r}; it has to be an integer of at least 1")
        if isinstance(model, str | Path) and tokenizer is not None:
            raise ValueError("tokenizer is for a model that is given; a folder or a name has its own")
        if self.backend == "ctranslate2":
            import_library()  # before anything is downloaded
            if dtype != "auto":
                raise ValueError('dtype is for the backend "engine"; give compute_type')
        where: Where = {"revision": revision, "token": token, "trust_remote_code": trust_remote_code}
        self.languages = {"src_lang": src_lang, "tgt_lang": tgt_lang, "source_prefix": source_prefix}
        options: dict[str, Any] = {"backend": backend, "dtype": dtype, "warm_up": warm_up, **self.languages, **where}
        again = partial(type(self), model, device, compute_type, threads, **options)
        self._open_again = again if isinstance(model, str | Path) else None
        if isinstance(model, str | Path) and kind_of(model) is Kind.CTRANSLATE2:
            opened = _open_exported(Path(model), device, compute_type, threads)
        else:
            from .opening import open_model  # it needs PyTorch and transformers

            opened = open_model(model, tokenizer, self.backend, device, compute_type, dtype, threads, where)
        self.tokenizer, self.model, self.decodes_with = opened
        self.compute_type = compute_type
        # A lock of each process: after a fork, none of another thread's is held for ever.
        self._locks: defaultdict[int, threading.RLock] = defaultdict(threading.RLock)
        if any(one is not None for one in self.languages.values()):
            self.check()
        for number in WARM_UP if warm_up else ():
            with suppress(ValueError):  # a model of several languages waits for the first call
                self._translate(["a b c"] * number, {})

    def __reduce__(self) -> tuple[Any, ...]:
        if self._open_again is None:
            raise TypeError("a Translator of a model that was given can't be pickled; open it by a folder or a name")
        return self._open_again, ()

    @property
    def device(self) -> "torch.device":
        """Where the model is."""
        return import_module("torch").device(self.decodes_with.device)

    def plan(self, **options: Any) -> Plan:
        """Resolves how a call with these options decodes, languages and options for `generate()` among them.

        Errors are those of a call: an option is unknown or has a wrong value, the backend lacks it, or no language is
        given.
        """
        return decoding.plan_of(self.decodes_with, self.tokenizer, **self._resolved(options))

    def _with_languages(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns a call's options with this translator's languages where they name none."""
        target = target_of(self.tokenizer, self.decodes_with, options)
        return {**self.languages, **({"tgt_lang": target} if target else {}), **options}

    def _resolved(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns a call's options for `decode`."""
        return with_names_of_decode(self._with_languages(options))

    def check(self, **options: Any) -> None:
        """Raises what a call with these options would, before there are any texts."""
        self._translate([], {**options, "progress": None, "progress_bar": False})

    def __repr__(self) -> str:
        name = getattr(self.model, "name_or_path", "") or type(self.model).__name__
        given = f"device={str(self.decodes_with.device)!r}, compute_type={self.compute_type!r}"
        return f"Translator({name!r}, {given}, backend={self.backend!r})"

    def __call__(self, texts: str | Iterable[str], **options: Any) -> Any:
        """Translates one text, several, or a stream of them.

        Args:
            texts: A string gives one translation. An object with a length, such as a list or a column of a
                `datasets.Dataset`, gives a list in the same order. Anything else that can be iterated over, such as a
                generator, a file or a column of a streamed data set, gives an iterator: see `stream`.
            **options: `n_best`, `alignments`, `src_lang`, `tgt_lang`, `source_prefix`, `prefix`, `split_sentences`,
                `batch_size`, `batch_tokens`, `max_source_tokens`, `unknown`, `unknown_target`, `progress` and
                `on_division` as for `decoding.decode`; `progress_bar`: True, False, or None: if standard error is a
                terminal and it takes more than two seconds; all others are for `generate()`, such as `num_beams` or
                `max_new_tokens`, by default the model's generation config. `num_return_sequences` above 1 is `n_best`,
                and `output_alignments` is `alignments`.

        Returns:
            For each text its translation as a string; with `n_best`, a list of `Translation`s with their scores; with
            `alignments=True`, a `Translation`, or a list of them.

        Raises:
            TypeError: Texts are not strings, or a set, a dictionary or None; or an option is unknown.
            ValueError: As `decoding.decode`.
        """
        if isinstance(texts, str):
            return self._translate([texts], options)[0]
        if isinstance(texts, Iterable) and not hasattr(texts, "__len__"):
            return self.stream(texts, **options)
        return self._translate(texts, options)

    def stream(self, texts: Iterable[str], *, window: int = WINDOW, **options: Any) -> Iterator[Result]:
        """Translates texts that need not all be there yet, or fit into memory; errors come when a text is reached.

        They are read a `window` of texts at a time, translated in batches of similar length, and yielded in their
        order: 1 answers each as soon as it is read; many fill the batches. Options are those of a call, with a `prefix`
        of one string; those that need no text are checked at once.
        """
        decoding.check_texts("sentences", texts)
        check_number("window", window)
        if not isinstance(options.get("prefix"), str | None):
            raise ValueError("prefix has to be one string for a stream, or give the texts as a list")
        self.check(**options)
        return self._windows(iter(texts), window, options)

    def _windows(self, texts: Iterator[str], window: int, options: dict[str, Any]) -> Iterator[Result]:
        first = 0
        with _bar(None, options.get("progress_bar")) as bar:
            while part := list(islice(texts, window)):
                yield from self._translate(part, {**options, "progress_bar": False}, first)
                first += len(part)
                bar.update(len(part))

    def _translate(self, texts: Iterable[str], options: dict[str, Any], first: int = 0) -> list[Any]:
        texts, options = decoding.texts_of("sentences", texts, first), self._resolved(options)
        progress, shown = options.pop("progress", None) or (lambda number: None), options.pop("progress_bar", None)
        one_at_a_time = self._locks[os.getpid()] if self.backend == "engine" else nullcontext()
        with _bar(len(texts), shown) as bar, one_at_a_time:
            rows = decoding.decode(
                self.decodes_with,
                self.tokenizer,
                texts,
                first=first,
                progress=lambda number: (bar.update(number), progress(number)),
                **options,
            )
        if options.get("n_best") is not None:
            return rows
        return [row[0] if options.get("alignments") else row[0].text for row in rows]


def with_names_of_decode(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call's options with those of `generate()` that `decode` has under another name renamed."""
    renamed = dict(options)
    if renamed.get("output_alignments"):
        renamed["alignments"] = renamed.pop("output_alignments")
    if isinstance(count := renamed.get("num_return_sequences"), int) and count > 1:
        del renamed["num_return_sequences"]
        renamed["n_best"] = count if renamed.get("n_best") is None else renamed["n_best"]
    return renamed


def _bar(total: int | None, shown: bool | None) -> tqdm:
    delay = SECONDS_TO_BAR if shown is None else 0
    return tqdm(total=total, unit=" texts", disable=None if shown is None else not shown, delay=delay, leave=False)


def _backend(model: object, backend: str | None) -> str:
    """Returns the backend for a model: the given one, or that which its folder was exported for."""
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend is {backend!r}; choose one of {', '.join(map(repr, BACKENDS))}")
    is_exported = isinstance(model, str | Path) and kind_of(model) is Kind.CTRANSLATE2
    if backend == "engine" and is_exported:
        raise ValueError(f'{model} is in CTranslate2\'s format; give backend="ctranslate2", or the model itself')
    return backend or ("ctranslate2" if is_exported else "engine")


def _open_exported(folder: Path, device: Any, compute_type: str, threads: int | None) -> tuple[Any, Any, Backend]:
    """Opens a folder in CTranslate2's format, with neither PyTorch nor transformers if its tokenizer is a file."""
    default = "cuda" if import_library().get_cuda_device_count() else "cpu"
    opened = CTranslate2Backend(folder, str(device or default), compute_type, threads)
    tokenizer = open_tokenizer(folder)
    opened.check_tokenizer(tokenizer)
    return tokenizer, opened, opened


__all__ = ["DeviceError", "Translation", "Translator"]
