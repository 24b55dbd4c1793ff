"""What options may be: those of transformers that recipes can have, ranges, and what goes together.

All that options alone decide is decided here, before anything is read. `preflight` checks what needs files or the Hub,
and the trainer what only Python code can give it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from transformers import Seq2SeqTrainingArguments
from transformers.integrations import get_available_reporting_integrations

from ..data.symbols import check_kinds
from ..errors import install
from ..hub.facts import is_repository
from ..metrics import MEASURES
from .supported import SUPPORTED

UNSUPPORTED = frozenset(field.name for field in fields(Seq2SeqTrainingArguments) if field.init) - SUPPORTED
TASKS = ("translation", "text2text")
TIED = {  # which matrices are one
    "all": {"share_encoder_decoder_embeddings": True, "tie_word_embeddings": True},
    "decoder": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": True},
    "none": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
}
PARTS = ("train", "validation", "test")  # of the data
LOSSES = ("loss", "perplexity")  # criteria that need no translations
WITHOUT_ARGUMENTS = ("adamw_torch", "adamw_torch_fused", "adafactor")  # optimizers that ignore optim_args
SIZE_WITHOUT_EFFECT = (
    "per_device_train_batch_size has no effect on batches by tokens; set per_device_train_batch_tokens to 0 for "
    "batches of equally many sentences, or leave it out"
)
OF_ANY_MODEL = {"preset", "tokenizer_name_or_path", "model_name_or_path", "embeddings"}  # checked or documented
# A saved tokenizer has its own.
OF_NEW_TOKENIZERS = {"tokenizer", "vocab_size", "min_frequency", "merge_punctuation", "source_normalization"}


class RecipeError(ValueError):
    """A recipe or an option that overrides it is wrong; the message names it and the fix."""


Range = tuple[str, Callable[[float], bool]]  # what an error says, and whether it contains a value
_POSITIVE: Range = ("more than 0", lambda value: 0 < value < math.inf)
_NOT_NEGATIVE: Range = ("0 or more", lambda value: 0 <= value < math.inf)
_COUNT: Range = ("1 or more", lambda value: 1 <= value < math.inf)
RANGES: dict[str, Range] = {
    **dict.fromkeys(("learning_rate", "learning_rate_factor"), _POSITIVE),
    **dict.fromkeys(("warmup_steps", "num_train_epochs", "per_device_train_batch_tokens"), _NOT_NEGATIVE),
    **dict.fromkeys(("dropout_warmup_steps", "average_last", "max_nonfinite_updates", "num_samples"), _NOT_NEGATIVE),
    **dict.fromkeys(("rdrop_alpha", "gnmt_length_penalty", "length_tolerance"), _NOT_NEGATIVE),
    **dict.fromkeys(("early_stopping_patience", "shuffle_buffer_size", "max_length", "max_length_ratio"), _COUNT),
    **dict.fromkeys(("num_beams", "min_frequency"), _COUNT),
}


def check_ranges(arguments: object) -> None:
    """Refuses numbers out of their range that this package has added, or given another meaning."""
    for name, value in vars(arguments).items():
        text, contains = RANGES.get(name, ("", lambda _: True))
        if value is not None and not contains(value):
            raise RecipeError(f"{name} is {value}; give {text}")


def refuse(problems: Mapping[str, object]) -> None:
    """Raises the first of these errors that applies."""
    for problem, applies in problems.items():
        if applies:
            raise RecipeError(problem)


def check_training(args: Any) -> None:
    """Refuses VanillaTransformerTrainingArguments that are wrong in Python code too."""
    compiles = args.torch_compile
    refuse({
        f"max_steps is {args.max_steps}; give num_train_epochs, or max_steps of 0 or more":
            args.max_steps < 0 and not args.num_train_epochs,
        f"task is {args.task!r}; give one of {', '.join(TASKS)}": args.task not in (None, *TASKS),
        "packed batches are bounded by tokens; give per_device_train_batch_tokens":
            args.packed and not args.per_device_train_batch_tokens,
        "packed batches aren't sorted by length; leave length_tolerance or packed out":
            args.packed and args.length_tolerance > 0,
        "dropout_warmup_steps would compile packed batches at each update; leave torch_compile out":
            args.packed and compiles and args.dropout_warmup_steps,
        "packed batches aren't supported with CUDA graphs; leave torch_compile_mode out":
            args.packed and args.torch_compile_mode in ("reduce-overhead", "max-autotune"),
        "rdrop_alpha doesn't work with torch.compile; leave torch_compile out":
            args.rdrop_alpha and compiles and not args.packed,
        "rdrop_alpha needs the model's own loss; set label_smoothing in the model's configuration instead of "
        "label_smoothing_factor": args.rdrop_alpha and args.label_smoothing_factor,
    })  # fmt: skip


def check_recipe(places: Sequence[Mapping[str, object]], given: Mapping[str, object], arguments: Any) -> None:
    """Refuses options that are wrong, or contradict each other so that a run would ignore one, or fail late.

    They are `given` in `places`: each recipe, and then the command line.
    """
    data, model, args = arguments
    check_ranges(data)
    check_ranges(model)
    _check_saved_model(places, given, model)
    _check_together(given, data, args)
    _check_model(data, model)


def _check_model(data: Any, model: Any) -> None:
    refuse({
        f"early_stopping is {model.early_stopping!r}; give true, false or never":
            model.early_stopping not in (None, True, False, "never"),
        f"tied is {model.tied!r}; give one of {', '.join(TIED)}": model.tied not in (None, *TIED),
        "two kinds of tokenizers have two vocabularies; give tied decoder or none, or one kind":
            model.tied == "all" and len(model.tokenizer) > 1,
        "embeddings are for a new model, and model_name_or_path has its own; leave one out":
            model.embeddings and model.model_name_or_path,
    })  # fmt: skip
    if not model.saved_tokenizer:
        check_kinds(model.tokenizer, bool(data.feature_columns), model.source_normalization)


def _check_saved_model(places: Sequence[Mapping[str, object]], given: Mapping[str, object], model: Any) -> None:
    """Refuses options of a new model, or tokenizer, in the recipe of a saved one, which replaces them.

    Another recipe's are its own model's, whose place the saved one takes.
    """
    used = OF_ANY_MODEL | model.regularization().keys() | model.decoding().keys()
    replaced = {
        "model_name_or_path": (vars(model).keys() - used, "architecture and tokenizer"),
        "tokenizer_name_or_path": (OF_NEW_TOKENIZERS, "vocabulary"),
    }
    *recipes, command_line = places
    for saved, (names, own) in replaced.items():
        together = set().union(command_line, *(recipe for recipe in recipes if saved in recipe))
        lost = [name for name in vars(model) if name in given and name in together & names]
        if saved in given and lost:
            raise RecipeError(f"{', '.join(lost)} would have no effect: {saved} has its own {own}; leave them out")


def _check_together(given: Mapping[str, object], data: Any, args: Any) -> None:
    streaming, evaluates = data.streaming, args.eval_strategy != "no"
    by_tokens = args.per_device_train_batch_tokens > 0
    measured = [*LOSSES, *(MEASURES if args.predict_with_generate and not args.prediction_loss_only else ())]
    unknown = [name for name in args.metrics if name not in MEASURES]
    last, kept = args.average_last, args.save_total_limit or math.inf
    available = get_available_reporting_integrations()
    missing = [name for name in args.report_to if name not in available]
    refuse({
        "num_train_epochs and max_steps are both given; set num_train_epochs to 0, or max_steps to -1":
            args.num_train_epochs > 0 and given.get("max_steps", -1) != -1,
        "a stream has no epochs that could be counted; give max_steps with streaming":
            streaming and args.max_steps < 1,
        "packed batches need the lengths of all pairs; leave streaming or packed out": streaming and args.packed,
        "streaming shuffles sentences only for batches by tokens; give per_device_train_batch_tokens":
            streaming and not by_tokens,
        f"a sentence of max_length {data.max_length} may not fit into per_device_train_batch_tokens "
        f"{args.per_device_train_batch_tokens}; lower the one or raise the other":
            streaming and 0 < args.per_device_train_batch_tokens < data.max_length,
        "a weight has no effect on a single corpus; leave it out": len(data.train_weights) == 1,
        f"weights of training data are {', '.join(map('{:g}'.format, data.train_weights))}; give numbers above 0":
            not all(0 < weight < math.inf for weight in data.train_weights),
        "feature_columns are columns of tables; give tables, or write features behind tabs":
            data.feature_columns and any(getattr(data, f"{part}_source") for part in PARTS),
        SIZE_WITHOUT_EFFECT: by_tokens and "per_device_train_batch_size" in given,
        "lr_scheduler_type reduce_lr_on_plateau and greedy aren't supported by `train`; choose another":
            args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"),
        "lr_scheduler_type constant has no warm-up; set warmup_steps to null, or choose constant_with_warmup":
            args.lr_scheduler_type == "constant" and given.get("warmup_steps"),
        f"optim_args has no effect on {args.optimizer}; leave it out (Adam's are adam_beta1, _beta2, _epsilon)":
            args.optim_args and args.optimizer in WITHOUT_ARGUMENTS,
        "the paper's learning rate depends on the warm-up; give warmup_steps 1 or more, or learning_rate":
            not args.warmup_steps and args.learning_rate is None,
        "eval_steps has no effect without eval_strategy steps or epoch":
            "eval_steps" in given and "eval_strategy" not in given and not evaluates,
        "early_stopping_patience, load_best_model_at_end and save_strategy best need eval_strategy steps or epoch":
            args.has_best_checkpoint and not evaluates,
        f"metric_for_best_model is {args.criterion!r}, which isn't measured; choose one of: {', '.join(measured)}":
            args.metric_for_best_model is not None and args.criterion not in measured,
        f"metrics has {', '.join(unknown)}; choose from: {', '.join(MEASURES)}": unknown,
        "load_best_model_at_end and average_last choose the final model in two ways; leave one of the two out":
            args.load_best_model_at_end and last > 0,
        f"average_last is {last}, but save_total_limit keeps {kept} checkpoints; keep at least {last}": kept < last,
        f"average_last is {last}, but save_strategy no saves no checkpoints": last > 0 and args.save_strategy == "no",
        f"hub_model_id is {args.hub_model_id!r}; give the repository to push to, user/name":
            (args.push_to_hub or args.hub_model_id) and not is_repository(args.hub_model_id or ""),
        "nothing would be computed in float16 on a CPU; use bf16": args.fp16 and args.device.type == "cpu",
        f"report_to is {', '.join(missing)}, which isn't available; {install('train')} for tensorboard, or choose "
        f"from: {', '.join(available)}": missing,
    })  # fmt: skip
