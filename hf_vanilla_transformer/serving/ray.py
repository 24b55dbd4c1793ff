"""Translating with Ray: rows of a data set, or many files on many machines.

In a pipeline of your own:

    actors = ray.data.ActorPoolStrategy(size=2)
    data = ray.data.read_parquet("in")
    data = data.map_batches(Translate, fn_constructor_args=("outputs/model",), compute=actors, batch_size=1_000)
    data.write_parquet("out")
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..documents.files import FileJob
from ..documents.files import translate_files as translate_here
from ..documents.rows import TRANSLATION
from ..errors import install
from ..translation.translator import Translator

try:
    import ray
except ImportError as error:
    raise ImportError(f"Ray isn't installed: {install('ray')}") from error

BLOCKS = 1_000  # of files, at most; each takes some 40 KB of the driver's memory
Batch = Mapping[str, NDArray[np.generic]]  # column -> values


def connected(address: str) -> AbstractContextManager[object]:
    """Connects to a cluster until the block ends; "local" starts one on this machine."""
    return ray.init(address, log_to_driver=False)


class Translate:
    """Translates a column of batches of rows, for `Dataset.map_batches`, and adds the column `translation`.

    `options` are for each call of the `Translator`, `opening` is for the `Translator` itself.
    """

    def __init__(
        self,
        model: str | Sequence[str],
        column: str = "text",
        translation: str = TRANSLATION,
        options: Mapping[str, object] | None = None,
        **opening: Any,
    ) -> None:
        self.column, self.translation = column, translation
        self.options = {"progress_bar": False, **(options or {})}
        # Ray calls from other threads than the constructor's, and PyTorch has a thread pool for each calling thread.
        self._thread = ThreadPoolExecutor(1)
        self.translator = self._thread.submit(Translator, model, **opening).result()

    def __call__(self, batch: Batch) -> dict[str, object]:
        """Adds the translations to a batch."""
        texts = list(batch[self.column])
        return {**batch, self.translation: self._thread.submit(self.translator, texts, **self.options).result()}


class _TranslateFiles(Translate):
    """Translates files by their numbers; an output appears when it is complete."""

    def __init__(self, jobs: Sequence[FileJob], model: str | Sequence[str], **opening: Any) -> None:
        super().__init__(model, **opening)
        self._jobs = jobs

    def __call__(self, batch: Batch) -> dict[str, object]:
        """Returns what is wrong with each file, "" for none."""
        outcomes = translate_here([self._jobs[number] for number in batch["job"]], self.translator, self.options)
        return {**batch, "problem": [problem for _, problem in self._thread.submit(list, outcomes).result()]}


def translate_files(
    jobs: Sequence[FileJob],
    model: str | Sequence[str],  # as for `Translator`, on every node
    *,
    actors: int = 1,  # models at a time, at most
    cpus: int = 1,  # of each
    options: Mapping[str, object] | None = None,  # for each call of the translator
    opening: Mapping[str, object] | None = None,  # for `Translator`
) -> Iterator[tuple[FileJob, str]]:
    """Translates files on a cluster; Ray has to be initialized, and all nodes see the files. Leave complete ones out.

    Yields each file when it is complete, with "", or the reason why it can't be read.
    """
    numbers = [{"job": number} for number in range(len(jobs))]
    data = ray.data.from_items(numbers, override_num_blocks=min(len(jobs), BLOCKS))
    done = data.map_batches(
        _TranslateFiles,
        fn_constructor_args=(jobs, model),
        fn_constructor_kwargs={"options": options, **(opening or {})},
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors),
        num_cpus=cpus,
        batch_size=1,
    )
    for batch in done.iter_batches(batch_size=None, prefetch_batches=0):
        for number, problem in zip(batch["job"].tolist(), batch["problem"], strict=True):
            yield jobs[number], str(problem)
