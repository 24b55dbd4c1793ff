"""Every private name of transformers, torch and the libraries around them that the package uses, each with its reason.

A name with one underscore at its beginning counts

- where it is used: as an attribute, an argument's keyword, a part of an import or a string (in full, or between dots),
  unless its folder defines it (at the top of the package: its file);
- where it is defined: as a class's method or attribute, if a class of these libraries that it inherits from has it.

What a version renames is looked for here first. A new name needs a line, and a reason why no public one does.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_vanilla_transformer"
LIBRARIES = ("accelerate", "datasets", "huggingface_hub", "peft", "tokenizers", "torch", "transformers")
CONFIG, MODEL, INTEGRATION, TOKENIZATION = (
    f"{part}_vanilla_transformer.py" for part in ("configuration", "modeling", "integration", "tokenization")
)
HOOKS = "_forward_hooks _forward_pre_hooks"

# File, names, reason.
USED = [
    # What transformers asks of a model, a tokenizer or a pipeline by these names
    (CONFIG, "_auto_class", "the code is saved with the model if the class is registered for that"),
    (MODEL, "_init_weights _tied_weights_keys _can_record_outputs", "the model's declarations"),
    (MODEL, "_tp_plan _fsdp_plan", "plans of tensor parallelism and FSDP"),
    (INTEGRATION, "_supports_attention_backend _supports_flash_attn _supports_flex_attn _supports_sdpa", "kernels"),
    (INTEGRATION, "_can_compile_fullgraph _no_split_modules _skip_keys_device_placement", "the model's declarations"),
    (INTEGRATION, "_resize_token_embeddings _get_resized_embeddings _get_resized_lm_head", "two vocabularies grow"),
    (INTEGRATION, "_tied_weights_keys", "the submodels' ties are the model's own"),
    (INTEGRATION, "_attn_implementation _from_model_config", "the kernel; whether decoding is as config.json says"),
    (TOKENIZATION, "_add_tokens _decode _encode_plus _tokenizer", "added tokens; the text of ids; calls check options"),
    (TOKENIZATION, "_extra_special_tokens _should_update_post_processor", "added tokens are special to the texts only"),
    ("tokenization_dictionary.py", "_add_tokens _decode", "as above"),
    ("tokenization_dictionary.py", "_tokenize _convert_token_to_id _convert_id_to_token", "a tokenizer's three steps"),
    ("tokenization_dictionary.py", "_added_tokens_encoder _in_target_context_manager", "unknown words; the side"),
    ("tokenization_source_target.py", "_add_tokens _decode _tokenizer _save_pretrained", "as above, with two files"),
    (INTEGRATION, "_forward _sanitize_parameters _load_tokenizer _load_processor", "a pipeline's steps"),
    (INTEGRATION, "_load_image_processor _load_video_processor _load_feature_extractor", "what it needs"),
    ("translation/pipeline.py", "_batch_size _forward_params", "options of the pipeline's construction"),
    # Folders
    ("checkpoints/averaging.py", "_name_or_path", "may differ between checkpoints"),
    ("checkpoints/loading.py", "_attn_implementation", "a kernel that config.json names"),
    ("checkpoints/loading.py", "_raise_exceptions_for_missing_entries", "an own error without config.json"),
    ("hub/description.py", "_from_model_config", "is no setting of decoding"),
    ("interop/marian.py", "_from_model_config _name_or_path", "Marian's settings aren't added; the card's base model"),
    ("translation/attention.py", "_attn_implementation", "attention weights need the eager kernel"),
    ("translation/reading.py", "_switch_to_input_mode", "after an error, the tokenizer stays on the target's side"),
    # The engine: what could see or change its results, and faster functions
    ("engine/decoding/generate.py", "_get_generation_parameters", "settings in config.json, which generate() reads"),
    ("engine/support.py", f"{HOOKS} _hf_hook _original_forward", "hooks, and Accelerate's changes of `forward`"),
    ("engine/support.py", "_modules _parameters _version", "faster without names; changes of the weights"),
    ("engine/support.py", "_attn_implementation", "the kernel"),
    ("engine/torch_private.py", "_linear_pointwise _reorder_linear_weight _is_mkldnn_bf16_supported", "oneDNN"),
    ("engine/torch_private.py", "_make_per_channel_quantized_tensor", "FBGEMM's weights of integers"),
    ("engine/torch_private.py", "_has_any_global_hook", "hooks on all modules"),
    ("engine/training/packing.py", "_attn_implementation", "the kernel"),
    ("engine/training/shortcuts.py", f"{HOOKS} _backward_hooks _backward_pre_hooks", "hooks see the whole loss"),
    ("engine/training/shortcuts.py", "_attn_implementation", "the kernel, for the time of a training"),
    # Training
    ("training/sharding.py", "_load_from_checkpoint _load_best_model", "the weights of another model are refused"),
    ("training/sharding.py", "_save", "FSDP's class would bring its own code"),
    ("training/sharding.py", "_keys_to_ignore_on_save", "weights that a checkpoint may lack"),
    ("training/trainer.py", "_load_optimizer_and_scheduler", "a resumed run's new options take effect"),
    ("training/trainer.py", "_get_collator_with_removed_columns _remove_unused_columns", "as the Trainer's batches"),
    ("training/preflight.py", "_prepare_inputs", "a batch on the device"),
    ("training/trainer.py", "_compiled_call_impl", "a compiled model is refused"),
    ("training/schedule.py", "_last_lr", "the rate that the scheduler tells"),
]
# Of other libraries and Python itself, and strings that are no names.
OTHERS = {
    *("_actions", "_ArgumentGroup", "_option_string_actions", "_exit", "_run_exitfuncs", "_replace", "_MODEL_LOADERS"),
    *("_source_backend", "_target_backend", "_pipeline", "_float_tensor", "_name", "_attn", "_pre", "_quantized"),
}
CUT_OR_COMPARED = {"endswith", "removeprefix", "removesuffix", "replace", "startswith"}


def is_private(name: str) -> bool:
    """Whether a name has one underscore at its beginning, and more than that."""
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yields the names that are used in a syntax tree."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        children = list(ast.iter_child_nodes(node))
        match node:
            case ast.JoinedStr():
                children = [child for child in children if isinstance(child, ast.FormattedValue)]
            case ast.Call(func=ast.Attribute(attr=method)) if method in CUT_OR_COMPARED:
                children = [node.func]
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(name)):
                yield from name.split(".")
            case ast.ImportFrom(level=0) | ast.Import():
                for part in (getattr(node, "module", ""), *(alias.name for alias in node.names)):
                    yield from part.split(".")
        nodes += children


def defined_in(tree: ast.AST) -> set[str]:
    """The names that a file or a class defines: functions, classes, variables, parameters, attributes of `self`."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.arg(arg=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                names.add(name)
    return names


def inherited(file: Path, tree: ast.Module) -> Iterator[str]:
    """Yields private names that a file's classes define and that a library's class has already."""
    for node in (one for one in tree.body if isinstance(one, ast.ClassDef) and one.bases):
        members = {name for name in defined_in(node) if is_private(name)}
        if not members:
            continue
        with suppress(ImportError):  # of Ray, which few environments have
            module = importlib.import_module(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
            for base in getattr(module, node.name).__mro__:
                if base.__module__.split(".")[0] in LIBRARIES:
                    yield from members & vars(base).keys()


@pytest.mark.slow
def test_every_private_name_has_a_reason() -> None:
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}
    defined = {file: defined_in(tree) for file, tree in trees.items()}
    found, others = set(), set()
    for file, tree in trees.items():
        neighbours = [file] if file.parent == PACKAGE else [one for one in trees if one.is_relative_to(file.parent)]
        own = set().union(*(defined[one] for one in neighbours))
        used = {name for name in names_in(tree) if is_private(name) and name not in own}
        others |= used & OTHERS
        names = (used - OTHERS) | set(inherited(file, tree))
        found |= {(file.relative_to(PACKAGE).as_posix(), name) for name in names}
    told = {(file, name) for file, names, _ in USED for name in names.split()}
    assert not found - told, f"use public names, or add a line with the reason: {sorted(found - told)}"
    assert not told - found, f"no longer used, so remove the name from its line: {sorted(told - found)}"
    assert not OTHERS - others, f"no longer used: {OTHERS - others}"
