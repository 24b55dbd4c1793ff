"""One contender of `real`, as a program that imports what it needs and nothing else.

Its argument is a JSON object: `kind` ("marian", "ours" or "ctranslate2"), `folder`, `compute_type`, `threads` and
`vocabulary`. Each line that it reads is a job: `batches` of token ids, `beams`, `longest`, and what only CTranslate2
has, `batch_tokens` and `parallel`. Each line that it writes is an answer: `seconds` and `outputs`, or an `error`.
"""

import json
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

Ids = list[int]


class TransformersProgram:
    """Marian as it comes, or ours as its commands prepare it.

    Args:
        kind: "marian" or "ours".
        folder: The checkpoint.
        compute_type: Of ours; "": the default.
        threads: Number of threads.
    """

    def __init__(self, kind: str, folder: str, compute_type: str, threads: int) -> None:
        self.torch: Any = import_module("torch")
        self.torch.set_num_threads(threads)
        self.options = {"compute_type": compute_type} if compute_type else {}
        self.is_ours = kind == "ours"
        if kind == "marian":
            self.model = import_module("transformers").MarianMTModel.from_pretrained(folder).eval()
        else:
            engine = import_module("hf_vanilla_transformer.engine")
            engine.keep_freed_memory()
            ours = import_module("hf_vanilla_transformer").VanillaTransformerForConditionalGeneration
            self.model = ours.from_pretrained(folder).eval()
            engine.freeze(self.model)

    def translate(self, batches: list[list[Ids]], beams: int, longest: int) -> tuple[float, list[Ids]]:
        """Translates the batches; returns the seconds and the translations."""
        outputs: list[Ids] = []
        began = time.perf_counter()
        for batch in batches:
            outputs += self._generate(batch, beams, longest)
        return time.perf_counter() - began, [self._until_end(row) for row in outputs]

    def _generate(self, batch: list[Ids], beams: int, longest: int) -> list[Ids]:
        torch = self.torch
        rows, lengths = [torch.tensor(ids) for ids in batch], torch.tensor([len(ids) for ids in batch])
        source = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.model.config.pad_token_id)
        mask = (torch.arange(source.shape[1]) < lengths[:, None]).long()
        length = {"max_length": longest + 1, "num_beams": beams}  # the start token counts
        with torch.inference_mode(self.is_ours):  # as `Translator` has it
            return self.model.generate(input_ids=source, attention_mask=mask, **length, **self.options).tolist()

    def _until_end(self, row: Ids) -> Ids:
        end = self.model.config.eos_token_id
        return row[1 : row.index(end, 1) if end in row[1:] else len(row)]


class CTranslate2Program:
    """CTranslate2; the words that it takes and returns are made before and after the time that is measured.

    Args:
        folder: The converted model.
        compute_type: "float32" or "int8".
        threads: Number of threads.
        vocabulary: Marian's vocab.json.
    """

    def __init__(self, folder: str, compute_type: str, threads: int, vocabulary: str) -> None:
        self.library: Any = import_module("ctranslate2")
        self.settings, self.threads = {"model_path": folder, "compute_type": compute_type}, threads
        self.ids: dict[str, int] = json.loads(Path(vocabulary).read_text(encoding="utf-8"))
        self.words = {number: word for word, number in self.ids.items()}
        self._load(1)

    def _load(self, parallel: int) -> None:
        sizes = {"inter_threads": parallel, "intra_threads": self.threads // parallel}
        self.parallel, self.translator = parallel, self.library.Translator(**self.settings, **sizes)

    def translate(
        self, batches: list[list[Ids]], beams: int, longest: int, batch_tokens: int = 2048, parallel: int = 1
    ) -> tuple[float, list[Ids]]:
        """Translates all sentences in batches of its own, several of them at the same time if so asked."""
        if parallel != self.parallel:
            self._load(parallel)
        lines = [[self.words[number] for number in ids] for batch in batches for ids in batch]
        # The end of sentence isn't among the words, and Marian's last token is forced to be it.
        options = {"beam_size": beams, "max_decoding_length": max(longest - 1, 1)}
        began = time.perf_counter()
        results = self.translator.translate_batch(lines, max_batch_size=batch_tokens, batch_type="tokens", **options)
        seconds = time.perf_counter() - began
        return seconds, [[self.ids[word] for word in result.hypotheses[0]] for result in results]


def main() -> None:
    """Answers jobs until there are no more."""
    program: Any = None
    for line in sys.stdin:
        try:
            program = program or load(**json.loads(sys.argv[1]))
            seconds, outputs = program.translate(**json.loads(line))
            answer = {"seconds": seconds, "outputs": outputs}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


def load(kind: str, vocabulary: str, **settings: Any) -> Any:
    """Makes the contender that the argument asks for."""
    if kind == "ctranslate2":
        return CTranslate2Program(vocabulary=vocabulary, **settings)
    return TransformersProgram(kind, **settings)


if __name__ == "__main__":
    main()
