"""Two processes that share a batch train as one process with the whole of it does (gloo, on the CPU)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

# What each process runs; batches hold sentences of very different lengths, so that a mean of means would be wrong.
TRAIN = """
import json, sys
import torch
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments
from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer import VanillaTransformerTokenizerFast

folder, batch_size, accumulation, smoothing = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
tokenizer = VanillaTransformerTokenizerFast.train_from_iterator(["a b c d e f"], vocab_size=300, show_progress=False)
sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
             encoder_ffn_dim=32, decoder_ffn_dim=32)
torch.manual_seed(0)
config = VanillaTransformerConfig(vocab_size=len(tokenizer), dropout=0.0, label_smoothing=smoothing, **sizes)
model = VanillaTransformerForConditionalGeneration(config)
data = [dict(tokenizer("x" * (1 + i % 3), text_target="y z " * (1 + 7 * (i % 8 // 2)))) for i in range(32)]
trainer = Seq2SeqTrainer(
    model=model,
    args=Seq2SeqTrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=4, per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation, learning_rate=1e-2, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, train_sampling_strategy="sequential", max_grad_norm=0.0,
        lr_scheduler_type="constant", optim="sgd",
    ),
    train_dataset=data,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
)
trainer.train()
if trainer.is_world_process_zero():
    model.save_pretrained(folder)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    json.dump([float(loss) for loss in losses], open(folder + "/losses.json", "w"))
"""


def train(folder: Path, processes: int, *settings: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps and the weights at the end."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(TRAIN)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, str(script), str(folder), *map(str, settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "losses.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_two_processes_and_accumulation_train_as_one_process(tmp_path: Path) -> None:
    one_losses, one = train(tmp_path / "one", 1, 8, 1, 0.1)
    for name, processes, batch_size, accumulation in (("two", 2, 4, 1), ("two_accumulate", 2, 2, 2)):
        losses, weights = train(tmp_path / name, processes, batch_size, accumulation, 0.1)
        # float32 sums in another order; a mean of the processes' means would be off by some percent. The Trainer logs
        # losses with four digits.
        assert losses == pytest.approx(one_losses, rel=1e-3)
        for parameter, value in one.items():
            torch.testing.assert_close(weights[parameter], value, rtol=1e-4, atol=1e-6, msg=f"{name}: {parameter}")
