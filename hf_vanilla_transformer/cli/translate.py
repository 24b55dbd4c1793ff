"""`vanilla-transformer translate`."""

import argparse
import io
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .common import UsageError, check_model_name, first_line, load_model, positive

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Lines are sorted by length within this many batches, whose translations are then written.
BATCHES_A_WINDOW = 50
# Padded source tokens a batch at most, as the memory of attention grows with the square of a line's length.
MAX_TOKENS_A_BATCH = 16_384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Translate sentences given as arguments, or the lines of standard input."""
    parser.epilog = 'A sentence that begins with a dash goes after "--": translate --model DIR -- "- 5 degrees"'
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="to translate (default: standard input)")
    parser.add_argument("--model", required=True, metavar="DIR", help="a saved model's folder, or its name on the Hub")
    beams = parser.add_mutually_exclusive_group()
    beams.add_argument(
        "--num-beams", "--beam", type=positive, metavar="N", help="beam size (default: the model's generation config)"
    )
    beams.add_argument("--greedy", dest="num_beams", action="store_const", const=1, help="the same as --num-beams 1")
    parser.add_argument(
        "--max-new-tokens", type=positive, metavar="N", help="end a translation there (default: the model's own limit)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=32, metavar="N", help="sentences at a time (default: %(default)s)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps ... (default: cuda where available, else cpu)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: as they were saved)"
    )
    parser.set_defaults(run=_translate)


def _translate(arguments: argparse.Namespace) -> None:
    check_model_name(arguments.model)
    sentences = arguments.sentences or list(_lines_of_standard_input())
    _check_unicode(arguments.sentences)
    if not sentences:
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # whatever the locale says, as the input

    import torch
    from tqdm import tqdm

    tokenizer, model = load_model(arguments.model, arguments.device, arguments.dtype)
    options = {"num_beams": arguments.num_beams, "max_new_tokens": arguments.max_new_tokens}
    options = {name: value for name, value in options.items() if value is not None}
    if arguments.num_beams == 1:
        options |= {"do_sample": False, "early_stopping": False}
    window = BATCHES_A_WINDOW * arguments.batch_size
    try:
        # disable=None: a bar if standard error is a terminal, and only then.
        with tqdm(total=len(sentences), unit=" sentences", disable=None, leave=False) as progress:
            for start in range(0, len(sentences), window):
                lines = sentences[start : start + window]
                translations = _translations(tokenizer, model, lines, arguments.batch_size, options, progress)
                progress.write("\n".join(translations))
    except torch.OutOfMemoryError as error:
        raise UsageError("the device's memory is too small; give a smaller --batch-size or --device cpu") from error
    except ValueError as error:  # the model's own words, for instance on a line beyond its learned positions
        raise UsageError(first_line(error)) from error


def _check_unicode(sentences: list[str]) -> None:
    for number, sentence in enumerate(sentences, start=1):
        try:
            sentence.encode()
        except UnicodeEncodeError as error:  # Python's stand-ins for bytes that weren't UTF-8
            raise UsageError(f"sentence {number} is not valid UTF-8; pass it in UTF-8") from error


def _lines_of_standard_input() -> Iterator[str]:
    if sys.stdin.isatty():
        print("Type sentences, one a line; Ctrl-D ends and translates.", file=sys.stderr)
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"line {number} of standard input is not UTF-8 (byte 0x{line[error.start]:02x} at {error.start + 1}); "
                "convert it first, for instance: iconv -f latin1 -t utf-8"
            ) from error
        yield text.rstrip("\r\n")


def _translations(
    tokenizer: "PreTrainedTokenizerBase",
    model: "PreTrainedModel",
    sentences: list[str],
    batch_size: int,
    options: dict[str, Any],
    progress: Any,
) -> list[str]:
    """The sentences' translations in their order; batches hold sentences of like length. An empty one stays empty."""
    import torch

    translations = [""] * len(sentences)
    filled = [index for index, sentence in enumerate(sentences) if sentence.strip()]
    progress.update(len(sentences) - len(filled))
    token_ids = tokenizer([sentences[index] for index in filled])["input_ids"] if filled else []
    for batch in _batches([len(ids) for ids in token_ids], batch_size):
        inputs = tokenizer.pad({"input_ids": [token_ids[place] for place in batch]}, return_tensors="pt")
        with torch.inference_mode():
            outputs = model.generate(
                input_ids=inputs["input_ids"].to(model.device),
                attention_mask=inputs["attention_mask"].to(model.device),
                **options,
            )
        for place, text in zip(batch, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True):
            # One line each, whatever the model writes.
            translations[filled[place]] = text.replace("\r", " ").replace("\n", " ")
        progress.update(len(batch))
    return translations


def _batches(lengths: list[int], batch_size: int) -> Iterator[list[int]]:
    """Places of sentences of like length, the longest first, so that memory that doesn't suffice shows at once."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and (len(batch) == batch_size or (len(batch) + 1) * lengths[batch[0]] > MAX_TOKENS_A_BATCH):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
