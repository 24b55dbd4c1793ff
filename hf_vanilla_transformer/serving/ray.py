"""Translating with Ray: rows of a data set, or many files on many machines.

ray.data.read_parquet("in").map_batches(
Translate, fn_constructor_args=("outputs/model",), compute=ray.data.ActorPoolStrategy(size=2), batch_size=1_000
).write_parquet("out")
"""

import glob
import hashlib
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from ..checkpoints.files import write_text
from ..data.formats import CorpusError
from ..errors import first_line, install
from ..translation.files import ROWS, TRANSLATION, FileJob, Outcome, Row, caller, outcomes, rows_of, write
from ..translation.translator import Translator

try:
    import ray
except ImportError as error:
    raise ImportError(f"Ray isn't installed: {install('ray')}") from error

BLOCKS = 1_000  # of parts, at most; each takes some 40 KB of the driver's memory
PARTS = ".parts"  # the folder of what is translated of a file that isn't complete


def connected(address: str) -> AbstractContextManager[Any]:
    """Connects to a cluster until the block ends; "local" starts one on this machine."""
    return ray.init(address, log_to_driver=False)


class Translate:
    """Translates a column of batches of rows, for `Dataset.map_batches`.

    Args:
        model: As for `Translator`.
        column: The column with the texts.
        translation: The column that is added.
        options: For each call of the translator.
        **opening: For `Translator`.
    """

    def __init__(
        self,
        model: str,
        column: str = "text",
        translation: str = TRANSLATION,
        options: dict[str, Any] | None = None,
        **opening: Any,
    ) -> None:
        self.column, self.translation, self.options = column, translation, options or {}
        # Ray calls from other threads than the constructor's, and PyTorch has a thread pool for each calling thread.
        self._thread = ThreadPoolExecutor(1)
        self.translator = self._thread.submit(Translator, model, **opening).result()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Adds the translations to a batch: column -> values."""
        return {**batch, self.translation: self.translate(list(batch[self.column]))}

    def translate(self, texts: list[str], form: str = "") -> list[str]:
        """Translates texts of files of one form."""
        call = caller(self.translator, form, **{"progress_bar": False, **self.options})
        return self._thread.submit(call, texts).result()


class _TranslateParts(Translate):
    """Translates parts of files into files of their own; each appears when it is complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The file that is being read, and the number of its next row.
        self._opened, self._source, self._next = ExitStack(), "", 0

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        columns = (batch[name] for name in ("source", "form", "first", "place"))
        for source, form, first, place in zip(*columns, strict=True):
            if Path(place).exists():  # a block is translated once more when its actor is lost
                continue
            # A file that has become unreadable lacks this part when it is put together, and is reported then.
            with suppress(CorpusError):
                part = outcomes(partial(self.translate, form=form), self._rows_from(source, int(first), form))
                write_text(place, json.dumps(part, ensure_ascii=False))
        return {"job": batch["job"]}

    def _rows_from(self, source: str, first: int, form: str = "") -> list[Row]:
        """Reads a part; the file stays open, as an actor's next part is mostly further on in it."""
        if source != self._source or first < self._next:
            self._opened.close()
            _, self._rows = self._opened.enter_context(rows_of(Path(source), form, self.column))
            self._next = 0
        self._source = ""  # unless this part can be read, the next one opens the file again
        part = list(islice(self._rows, first - self._next, first - self._next + ROWS))
        self._source, self._next = source, first + ROWS
        return part


def translate_files(
    jobs: list[FileJob],
    model: str,
    *,
    actors: tuple[int, int] = (1, 1),
    cpus: int = 1,
    options: dict[str, Any] | None = None,
    opening: dict[str, Any] | None = None,
) -> Iterator[tuple[FileJob, CorpusError | None]]:
    """Translates files part by part on a cluster; Ray has to be initialized, and all nodes see the files.

    A part has 1,000 rows. Parts that are complete are kept beside the output, in a hidden folder, until the file is: a
    job that is started again translates the others only. The driver holds the names of parts and no texts.

    Args:
        jobs: The files; leave out those that are complete. Parts of an earlier job are used if its `how` was the same.
        model: As for `Translator`, on every node.
        actors: Models at least and at most.
        cpus: CPUs of each.
        options: For each call of the translator.
        opening: For `Translator`.

    Yields:
        Each file when it is complete, or with the reason why it can't be read.
    """
    parts: list[dict[str, Any]] = []
    left: dict[int, int] = {}  # number of a job -> its parts that aren't translated
    for number, job in enumerate(jobs):
        try:
            missing = _missing_parts(job)
        except CorpusError as error:
            yield job, error
            continue
        parts += [{"job": number, **part} for part in missing]
        left[number] = len(missing)
        if not missing:
            yield job, _put_together(job)
    if not parts:
        return
    data = ray.data.from_items(parts, override_num_blocks=min(len(parts), BLOCKS)).map_batches(
        _TranslateParts,
        fn_constructor_args=(model, jobs[0].column, TRANSLATION, options),
        fn_constructor_kwargs=opening or {},
        compute=ray.data.ActorPoolStrategy(min_size=actors[0], max_size=actors[1]),
        num_cpus=cpus,
        batch_size=1,
    )
    for batch in data.iter_batches(batch_size=None, prefetch_batches=0):
        for number in batch["job"].tolist():
            left[number] -= 1
            if not left[number]:
                yield jobs[number], _put_together(jobs[number])


def _folder(job: FileJob) -> Path:
    """Returns the folder for the parts of a file; another model, other options or another source have another one."""
    digest = hashlib.sha256(json.dumps(job.origin()).encode()).hexdigest()[:16]
    return job.output.with_name(f".{job.output.name}.{digest}{PARTS}")


def _place(folder: Path, number: int) -> Path:
    return folder / f"{number:09}.json"


def _missing_parts(job: FileJob) -> list[dict[str, Any]]:
    with rows_of(job.source, job.form, job.column) as (_, rows):
        number = sum(1 for _ in rows)
    folder = _folder(job).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    places = ((first, _place(folder, first // ROWS)) for first in range(0, number, ROWS))
    return [
        {"source": str(job.source.resolve()), "form": job.form, "first": first, "place": str(place)}
        for first, place in places
        if not place.exists()
    ]


def _saved(job: FileJob, numbers: Iterator[int], rows: list[Row]) -> list[Outcome]:
    """Returns the outcomes of the part with the next number."""
    saved = json.loads(_place(_folder(job), next(numbers)).read_text(encoding="utf-8"))
    return [Outcome(*one) for _, one in zip(rows, saved, strict=True)]


def _put_together(job: FileJob) -> CorpusError | None:
    """Writes the output from its parts, and removes these and those of other options."""
    problem = None
    try:
        for _ in write(job, partial(_saved, job, count())):
            pass
    except CorpusError as error:
        return error
    except (ValueError, FileNotFoundError) as error:  # the parts are those of other rows, or damaged
        problem = CorpusError(f"{job.source} has changed while it was translated ({first_line(error)}); start again")
    digest = "[0-9a-f]" * 16
    for folder in job.output.parent.glob(f".{glob.escape(job.output.name)}.{digest}{PARTS}"):
        shutil.rmtree(folder, ignore_errors=True)
    return problem
