"""Converts models of other systems into checkpoints of this package.

Each system has a module here with `load`, and with `recognises` if the looks of a file or folder tell that it is its.
Any other folder with a config.json is taken for a Marian model, and any name on the Hub unless its repository is
in CTranslate2's format.
"""

import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..checkpoints.files import check_new_folder, new_folder
from ..checkpoints.kinds import CONFIG
from ..checkpoints.loading import tokenizer_fingerprint
from ..errors import first_line
from ..hub.facts import RunFacts, local_name, origin_of, said_in, with_what_was_said
from ..hub.model_card import save_card
from . import ON_HUB, SYSTEMS
from .ctranslate2_hub import from_hub
from .interface import ConversionError, ConversionOptions, Converted, check_distance, check_savable, distance
from .pickles import read, tensors_of

UNKNOWN = (
    "isn't the model of a known system; give --from with one of {known}, or --mapping (--list-mappings has the shipped "
    "ones). docs/interop.md says what their models consist of; tensor2tensor isn't supported"
)
LIMITS = "Quality, training data and licence are those of the original model."


def convert(source: str | Path, output: str | Path, *, system: str | None = None, **options: Any) -> tuple[str, ...]:
    """Writes a checkpoint: weights, configuration, generation settings, tokenizer, code and a model card.

    Args:
        source: A folder or file of another system's model, or for Marian and CTranslate2 also a name on the Hub.
        output: The folder to write. It appears when it is complete, and may exist if it is empty.
        system: The system that the model comes from; None: it is recognised.
        **options: Fields of `ConversionOptions`.

    Returns:
        Notes for the user: what isn't exact, and by how much, and what is missing.

    Raises:
        ConversionError: The model can't be converted, or computes other logits than the original.
        OSError: The output exists, or can't be written.
    """
    output, given = Path(output), ConversionOptions(**options)
    check_new_folder(output)
    name = system or ("mapping" if given.mapping is not None else recognise(source))
    if given.mapping is not None and name != "mapping":
        raise ConversionError(f"a mapping describes a state dict, and {name} models need none; leave it out")
    if given.vocab and name != "marian-npz":
        raise ConversionError(f"vocabularies are for marian-npz, and {name} models have their own; leave them out")
    if given.revision is not None and (name not in ON_HUB or Path(source).exists()):
        raise ConversionError(f"a revision is of a name on the Hub, and {source} is none; leave it out")
    folder = None
    if name in ON_HUB and system != "marian" and not Path(source).exists():
        folder = from_hub(str(source), given.revision, local_files_only=given.local_files_only)
    if folder is None:
        loaded: Converted = _module_of(name).load(source, given)
    else:
        loaded = replace(_module_of("ctranslate2").load(folder, given), base_model=str(source))
    notes = loaded.notes
    if given.check is not None:
        notes += (_checked(loaded, Path(given.check)),)
    if loaded.tokenizer is None:
        notes += ("no tokenizer is written: save yours beside the model",)
    else:
        loaded.model.config.tokenizer_fingerprint = tokenizer_fingerprint(loaded.tokenizer)
    check_savable(loaded.model.generation_config)
    facts = _facts(local_name(output), loaded)
    with new_folder(output) as folder:
        loaded.model.save_pretrained(folder)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(folder)
        save_card(folder, facts)
    return notes


def recognise(source: str | Path) -> str:
    """Returns the system that a model comes from; the layout of a mapping's model is known to its owner only."""
    place = Path(source)
    recognises = {name: getattr(_module_of(name), "recognises", None) for name in SYSTEMS}
    found = [name for name, tells in recognises.items() if tells is not None and tells(place)]
    if not found and (not place.exists() or (place / CONFIG).exists()):  # Marian's error says more
        return "marian"
    known = ", ".join(SYSTEMS)
    if not found:
        raise ConversionError(f"{source} {UNKNOWN.format(known=known)}")
    if len(found) > 1:
        raise ConversionError(
            f"{source} looks like several systems' ({', '.join(found)}); give --from with one of {known}"
        )
    return found[0]


def _module_of(system: str) -> ModuleType:
    return import_module(f".{SYSTEMS[system][0]}", __package__)


@torch.no_grad()
def _checked(loaded: Converted, file: Path) -> str:
    """Compares a model's logits, up to a constant, with the original's, and returns a note about the difference."""
    example = tensors_of(read(file), file)
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    inputs = {name: example[name].long() for name in names if name in example}
    try:
        logits = copy.deepcopy(loaded.model).float()(**inputs, use_cache=False).logits
        found, expected = logits.log_softmax(-1), example["logits"].log_softmax(-1)  # some give log-probabilities
        pad = loaded.model.config.pad_token_id
        kept = inputs["decoder_input_ids"].ne(-1 if pad is None else pad)
        kept[:, 0] = True  # padding may be the start token
        difference = distance(found[kept], expected[kept])
    except (KeyError, IndexError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConversionError(f"{file} lacks ids or logits, or has others than this model's ({reason})") from error
    check_distance(difference, "original", "; check what no tensor tells: heads, norms, activation, positions, scaling")
    return f"logits differ from those in {file} by at most {difference:.0e} of the largest"


def _facts(name: str, loaded: Converted) -> RunFacts:
    """Returns what the card says: languages, data, licence and base model as in the source's card."""
    said = said_in(loaded.metadata)
    facts = RunFacts(
        name=name,
        config=loaded.model.config.to_dict(),
        parameters=loaded.model.num_parameters(),
        languages=said.get("languages", ()),
        datasets=said.get("datasets", ()),
        converted=True,
        base_model=loaded.base_model,
        limits="\n\n".join([LIMITS, *(f"{note[0].upper()}{note[1:]}." for note in loaded.notes)]),
    )
    return with_what_was_said(facts, origin_of(said))
