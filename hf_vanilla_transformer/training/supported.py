"""Options by their names alone, without the seconds that importing transformers takes."""

import re
from importlib.util import find_spec
from pathlib import Path

# `vanilla-transformer train` is tested with these. Others have no effect on its batches, loss or evaluations, or fail
# late, or their runs aren't the same after resuming (groups by length and persistent workers draw random numbers once).
# Python code that uses `VanillaTransformerTrainer` isn't restricted.
SUPPORTED = frozenset(
    (
        *("output_dir", "seed", "data_seed", "full_determinism"),
        *("max_steps", "num_train_epochs", "gradient_accumulation_steps"),
        *("per_device_train_batch_size", "per_device_eval_batch_size"),
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
        *("bf16", "fp16", "tf32", "use_cpu", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"),
        *("ddp_backend", "ddp_timeout", "ddp_find_unused_parameters"),
        *("logging_strategy", "logging_steps", "logging_first_step", "log_level"),
        *("include_num_input_tokens_seen", "report_to", "run_name", "project", "trackio_space_id"),
        *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps"),
        *("prediction_loss_only", "predict_with_generate", "generation_max_length", "generation_num_beams"),
        *("save_strategy", "save_steps", "save_total_limit", "save_only_model"),
        *("load_best_model_at_end", "metric_for_best_model"),
        *("push_to_hub", "hub_model_id", "hub_private_repo", "hub_revision"),
    )
)


def option_names() -> set[str]:
    """Returns the names that options of a recipe have, from the source of their dataclasses."""
    source = Path(__file__).with_name("arguments.py").read_text(encoding="utf-8")
    return {*SUPPORTED, *re.findall(r"^    (\w+): .* = _(?:option|list)\(", source, re.MULTILINE)}


def has_transformers(name: str) -> bool:
    """Tells whether transformers' training arguments have a field of this name, by their source."""
    (folder,) = getattr(find_spec("transformers"), "submodule_search_locations", None) or [""]
    files = [Path(folder, name) for name in ("training_args.py", "training_args_seq2seq.py")]
    return any(re.search(rf"^    {name}: ", file.read_text(encoding="utf-8"), re.MULTILINE) for file in files)
