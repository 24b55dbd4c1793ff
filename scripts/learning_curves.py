"""Draws the learning curves of training runs: loss, validation perplexity and BLEU by updates.

    python scripts/learning_curves.py outputs/one outputs/other --output curves.png

For a run that is still training, the curves end at its last checkpoint.
"""

import argparse
import json
from pathlib import Path

from hf_vanilla_transformer.publish.plotting import plot_training
from hf_vanilla_transformer.training.checkpoints import TRAINER_STATE, last_complete_checkpoint


def main() -> None:
    """Reads the runs' logs and writes the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="output folders of `vanilla-transformer train`")
    parser.add_argument("--output", required=True, type=Path, help="the PNG to write")
    options = parser.parse_args()
    logs = {run.name: json.loads(state_of(run).read_text())["log_history"] for run in options.runs}
    plot_training(logs).savefig(options.output, dpi=150)


def state_of(run: Path) -> Path:
    """Returns the file with the log of a run: of all of it, or up to the last checkpoint if it is still training."""
    if (run / TRAINER_STATE).is_file():
        return run / TRAINER_STATE
    checkpoint = last_complete_checkpoint(run)
    if checkpoint is None:
        raise SystemExit(f"{run} has neither {TRAINER_STATE} nor a checkpoint; give the output folder of a run")
    return checkpoint / TRAINER_STATE


if __name__ == "__main__":
    main()
