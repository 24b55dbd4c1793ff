"""A model to translate with.

    translator = Translator("Helsinki-NLP/opus-mt-en-de")
    translator("It is half past three.")  # a string; a list gives a list, and a generator a stream

A Marian model, such as this one, is converted when it is loaded.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..checkpoints.kinds import Kind, kind_of
from ..interop.ctranslate2_files import unpacked
from ..plan_vanilla_transformer import Plan
from .backend import Call, DeviceError, Opening, Translation, check_number
from .ctranslate2 import CTranslate2Backend, import_library
from .ctranslate2_folder import is_exported, open_tokenizer_of
from .decoding import check_texts, texts_of, translate
from .tokenizer_file import open_tokenizer

if TYPE_CHECKING:  # an exported model is translated without
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..checkpoints.loading import Where
    from .opening import Opened

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

    The engine is attached to a model of this package that is loaded here: as long as it is, don't change its weights
    and settings (`engine.attach` says what is noticed). A model that you give isn't copied: `device` moves it, and a
    `compute_type` that you name attaches the engine; otherwise it decodes with the engine only if you have attached it.

    Args:
        model: A folder that `save_pretrained` wrote or a name on the Hub, of any sequence-to-sequence model (a Marian
            model, Helsinki-NLP/opus-mt-..., is converted when it is loaded); or a model, a `PeftModel` among them; or a
            folder in CTranslate2's format, as `export`, its converters, Argos Translate or quickmt have it. A list of
            folders or names: they decode as one, by the mean of their probabilities (`translation.ensembles`).
        device: None: CUDA if it is available, else the CPU; a model that is given stays where it is.
        compute_type: "default" computes in the type of the weights, "int8" with weights of 8 bits, on a CPU. The
            backend "ctranslate2" has types of its own; an ensemble's members have theirs, and a device.
        threads: Number of PyTorch's threads, for the complete process; None: unchanged. With the backend "ctranslate2",
            those of this translator; None: as many as PyTorch has.
        backend: "engine" or "ctranslate2" (`translation.ctranslate2`), for which a model is converted each time. None:
            "engine", or the one that a folder was exported for.
        tokenizer: That of a model that is given; a folder or a name has its own. Of a folder in CTranslate2's format
            without one: also the place of its files.
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
            (`HubError`), the device can't be used (`DeviceError`), or the tokenizer is another model's.
    """

    def __init__(
        self,
        model: "str | Path | PreTrainedModel | Sequence[str | Path]",
        device: "str | torch.device | None" = None,
        compute_type: str = "default",
        threads: int | None = None,
        *,
        backend: str | None = None,
        tokenizer: "PreTrainedTokenizerBase | str | Path | None" = None,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        source_prefix: str | None = None,
        dtype: "torch.dtype | str" = "auto",
        revision: str | None = None,
        token: str | bool | None = None,
        trust_remote_code: bool = False,
        warm_up: bool = False,
    ) -> None:
        _check(backend, threads)
        place, kind = _place(model, backend, revision, token)
        is_ready = kind is Kind.CTRANSLATE2
        self.backend = backend or ("ctranslate2" if is_ready else "engine")
        if kind is not None and tokenizer is not None and not is_ready:
            raise ValueError("tokenizer is for a model that is given; a folder or a name has its own")
        if self.backend == "ctranslate2" and dtype != "auto":
            raise ValueError('dtype is for the backend "engine"; give compute_type')
        where: Where = {"revision": revision, "token": token, "trust_remote_code": trust_remote_code}
        self.languages = {"src_lang": src_lang, "tgt_lang": tgt_lang, "source_prefix": source_prefix}
        options: dict[str, Any] = {"backend": backend, "dtype": dtype, "warm_up": warm_up, **self.languages, **where}
        again = partial(type(self), model, device, compute_type, threads, tokenizer=tokenizer, **options)
        self._open_again = again if isinstance(model, str | Path | Sequence) else None
        self._files = _files(model)
        how = Opening(self.backend, tokenizer, device, compute_type, dtype, threads, where)
        if is_ready:
            opened = _open_exported(Path(str(place)), how)
        else:
            from .opening import open_to_translate  # it needs PyTorch and transformers

            opened = open_to_translate(model, how)
        self.tokenizer, self.model, self.decodes_with = opened
        self.compute_type = compute_type
        # A lock of each process: after a fork, none of another thread's is held for ever.
        self._locks: defaultdict[int, threading.RLock] = defaultdict(threading.RLock)
        if any(one is not None for one in self.languages.values()):
            self.check()
        for number in WARM_UP if warm_up else ():
            with suppress(ValueError):  # a model of several languages waits for the first call
                self(["a b c"] * number, progress_bar=False)

    def __reduce__(self) -> tuple[object, ...]:
        if self._open_again is None:
            raise TypeError("a Translator of a model that was given can't be pickled; open it by a folder or a name")
        return self._open_again, (), {"_files": self._files}  # by which `datasets` knows a model that has changed

    @property
    def device(self) -> "torch.device":
        """Where the model is."""
        return import_module("torch").device(self.decodes_with.device)

    def plan(self, **options: object) -> Plan:
        """Resolves how a call with these options decodes; errors are those of the call."""
        return self.call(options).plan

    def check(self, **options: object) -> None:
        """Raises what a call with these options would, before there are any texts."""
        self.call(options)

    def call(self, options: Mapping[str, object]) -> Call:
        """Resolves and checks the options of a call; what isn't said there of languages is as for this translator."""
        options = {name: value for name, value in options.items() if name != "progress_bar"}
        return Call.of(self.decodes_with, self.tokenizer, options, self.languages)

    def source_limit(self, max_source_tokens: int | None = None) -> int:
        """Returns how many tokens a source may have to be translated as one."""
        return self.decodes_with.source_limit(self.tokenizer, max_source_tokens)

    def __repr__(self) -> str:
        name = getattr(self.model, "name_or_path", "") or type(self.model).__name__
        given = f"device={str(self.decodes_with.device)!r}, compute_type={self.compute_type!r}"
        return f"Translator({name!r}, {given}, backend={self.backend!r})"

    def __call__(self, texts: str | Iterable[str], **options: Any) -> Any:
        """Translates one text, several, or a stream of them.

        Args:
            texts: A string gives one translation. An object with a length, such as a list or a column of a
                `datasets.Dataset`, gives a list in the same order. Anything else that can be iterated over, such as a
                generator, a file or a column of a streamed data set, gives an iterator: see `stream`. White space
                around a text doesn't count.
            **options: Those of a `translation.backend.Call`; `progress_bar`: True, False, or None: if standard error is
                a terminal and it takes more than two seconds; all others are for `generate()`, such as `num_beams` or
                `max_new_tokens`, by default the model's generation config. `num_return_sequences` above 1 is `n_best`,
                and `output_alignments` is `alignments`.

        Returns:
            For each text its translation as a string; with `n_best`, a list of `Translation`s with their scores; with
            `alignments=True`, a `Translation`, or a list of them.

        Raises:
            TypeError: Texts are not strings, or a set, a dictionary or None; or an option is unknown.
            ValueError: As `Call.of` and `decoding.translate`.
        """
        if isinstance(texts, Iterable) and not hasattr(texts, "__len__"):
            return self.stream(texts, **options)
        listed = [texts] if isinstance(texts, str) else texts_of("sentences", texts)
        results = self._translate(listed, self.call(options), options.get("progress_bar"))
        return results[0] if isinstance(texts, str) else results

    def stream(self, texts: Iterable[str], *, window: int = WINDOW, **options: object) -> Iterator[Result]:
        """Translates texts that need not all be there yet, or fit into memory; errors come when a text is reached.

        They are read a `window` of texts at a time, translated in batches of similar length, and yielded in their
        order: 1 answers each as soon as it is read; many fill the batches. Options are those of a call, with a `prefix`
        of one string; those that need no text are checked at once.
        """
        check_texts("sentences", texts)
        check_number("window", window)
        if not isinstance(options.get("prefix"), str | None):
            raise ValueError("prefix has to be one string for a stream, or give the texts as a list")
        return self._windows(iter(texts), window, self.call(options), options.get("progress_bar"))

    def _windows(self, texts: Iterator[str], window: int, call: Call, shown: object) -> Iterator[Result]:
        first = 0
        with _bar(None, shown) as bar:
            while part := list(islice(texts, window)):
                yield from self._translate(texts_of("sentences", part, first), call, False, first)
                first += len(part)
                bar.update(len(part))

    def _translate(self, texts: list[str], call: Call, shown: object, first: int = 0) -> Sequence[Result]:
        one_at_a_time = self._locks[os.getpid()] if self.backend == "engine" else nullcontext()
        with _bar(len(texts), shown) as bar, one_at_a_time:
            both = replace(call, progress=lambda number: (bar.update(number), call.progress(number)))
            rows = translate(both, texts, first)
        if call.n_best is not None:
            return rows
        return [row[0] if call.alignments else row[0].text for row in rows]


def _bar(total: int | None, shown: object) -> tqdm:
    delay = SECONDS_TO_BAR if shown is None else 0
    return tqdm(total=total, unit=" texts", disable=None if shown is None else not shown, delay=delay, leave=False)


def _check(backend: str | None, threads: int | None) -> None:
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend is {backend!r}; choose one of {', '.join(map(repr, BACKENDS))}")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads is {threads!r}; it has to be an integer of at least 1")


def _files(model: object) -> list[tuple[str, int, int]]:
    """Returns the files of a folder, or of several, with their sizes and times; none of anything else."""
    names = model if isinstance(model, Sequence) and not isinstance(model, str) else [model]
    places = [Path(name) for name in names if isinstance(name, str | Path)]
    files = [file for place in places for file in (place, *sorted(place.glob("*"))) if file.is_file()]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _place(
    model: object, backend: str | None, revision: str | None, token: str | bool | None
) -> tuple[object, Kind | None]:
    """Returns where a model is, and of which kind; for a model that is given, itself and None."""
    if backend == "ctranslate2":
        import_library()  # before anything is downloaded
    kind = kind_of(model) if isinstance(model, str | Path) else None
    if kind is Kind.CTRANSLATE2 and backend == "engine":
        raise ValueError(f'{model} is in CTranslate2\'s format; give backend="ctranslate2", or the model itself')
    if isinstance(model, str) and kind is Kind.NAME and backend != "engine":
        from ..data.hub_names import check_model_on_hub  # it takes a fifth of a second, as the next one
        from ..interop.ctranslate2_hub import from_hub

        folder = from_hub(model, revision, token, local_files_only=not (token or check_model_on_hub(model)))
        return (model, kind) if folder is None else (folder, Kind.CTRANSLATE2)
    return model, kind


def _open_exported(folder: Path, how: Opening) -> "Opened":
    """Opens a folder in CTranslate2's format, with neither PyTorch nor transformers if its tokenizer is a file."""
    default, tokenizer = "cuda" if import_library().get_cuda_device_count() else "cpu", how.tokenizer
    with unpacked(folder) as place:
        opened = CTranslate2Backend(place, str(how.device or default), how.compute_type, how.threads)
        opened.name_or_path = str(folder)
        is_ours = is_exported(opened.folder)
        if is_ours and tokenizer is not None:
            raise ValueError("tokenizer is for a model that is given, or that others made; an exported one has its own")
        if tokenizer is None or isinstance(tokenizer, str | Path):
            tokenizer = open_tokenizer(place) if is_ours else open_tokenizer_of(opened.folder, tokenizer)
    opened.check_tokenizer(tokenizer)
    return tokenizer, opened, opened


__all__ = ["DeviceError", "Translation", "Translator"]
