"""The command line as torchrun and accelerate launch start it, with two additions for tests.

Each process writes what every evaluation has gathered to `evaluations-RANK.json` in the current folder: lists of
sources, translations and references.

FSDP works on CPUs. Accelerate turns it on for devices of certain kinds only, and CPUs are not among them, although
PyTorch's FSDP runs on them with gloo. So CPU processes that are asked for FSDP are called GPU processes once their
group and device are set up; what follows is what happens on GPUs, but for the kernels.
"""

import json
import os
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import EvalPrediction

from hf_vanilla_transformer.cli import main
from hf_vanilla_transformer.training.evaluation import TranslationMetrics

evaluations: list[list[list[str]]] = []
score, set_device = TranslationMetrics.__call__, PartialState.set_device


def recorded(metrics: TranslationMetrics, outputs: EvalPrediction) -> dict[str, float]:
    """Replaces `TranslationMetrics.__call__`."""
    columns = (outputs.inputs, outputs.predictions, outputs.label_ids)
    if len(outputs.predictions) > 3:  # not in the rehearsal before training
        evaluations.append([metrics._texts(column) for column in columns])
    Path(f"evaluations-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(evaluations), encoding="utf-8")
    return score(metrics, outputs)


def called_gpu(state: PartialState) -> None:
    """Replaces `PartialState.set_device`, the end of its construction."""
    set_device(state)
    state.distributed_type = DistributedType.MULTI_GPU


def process_of(rank: int, processes: int, port: int, folder: Path, arguments: list[str]) -> None:
    """Runs the command in a folder as one of the processes that a launcher starts."""
    os.chdir(folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with Path("log").open("a", encoding="utf-8") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    if processes > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    TranslationMetrics.__call__ = recorded
    sys.exit(main(arguments))


if __name__ == "__main__":
    TranslationMetrics.__call__ = recorded
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState.set_device = called_gpu
    sys.exit(main())
