"""What all tests share: no network, no writing into the user's caches, threads that don't fight, a tiny checkpoint."""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# The libraries read these once, when they are imported, so they are set before anything else is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise it warns in each process forked after its first use
# Every process its own: two that copy remote code into one cache at a time would disturb each other.
_HF_HOME = tempfile.mkdtemp(prefix="hf_vanilla_transformer_tests_")
atexit.register(shutil.rmtree, _HF_HOME, ignore_errors=True)
os.environ["HF_HOME"] = _HF_HOME
for _variable in ("HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_DATASETS_CACHE", "HF_XET_CACHE"):
    os.environ.pop(_variable, None)
# The tests' tensors are so small that threads cost more than they save, all the more beside other processes.
# Subprocesses inherit this: a test that trains in one gives it an environment of its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts what runs in the background with Ctrl-C ignored, which the programs that tests interrupt would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# Derandomized, so that a run says the same thing twice; no deadline, as shared machines stall.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers for a test whichever ran before it, and the same number of threads."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def _transformers_warns() -> None:
    """Commands quiet transformers in this process; every test hears it again."""
    from transformers.utils import logging

    logging.set_verbosity_warning()
    logging.enable_progress_bar()


TINY_TEXTS = [
    "twenty-one", "einundzwanzig", "half past nine", "halb zehn", "the fourth of May", "der vierte Mai",
    "three euros and five cents", "drei Euro und fünf Cent", "it costs two hundred", "es kostet zweihundert",
]  # fmt: skip


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained model of two layers and a tokenizer, as `save_pretrained` writes them."""
    import torch

    from hf_vanilla_transformer import (
        VanillaTransformerConfig,
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerTokenizerFast,
    )

    torch.manual_seed(0)
    tokenizer = VanillaTransformerTokenizerFast.train_from_iterator(TINY_TEXTS, vocab_size=300)
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    )
    folder = tmp_path_factory.mktemp("tiny_checkpoint")
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# torch and transformers are imported once; each program runs in a copy of that process.
FORKS = """
import json, os, sys, traceback
sys.modules["hf_vanilla_transformer"] = None
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainer
for line in sys.stdin:
    program, arguments, folder, out = json.loads(line)
    if not (child := os.fork()):
        os.chdir(folder)
        for number, file in enumerate((os.devnull, out + "/out", out + "/err")):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
        sys.stdin, sys.argv, code = open(0), ["program", *arguments], 1
        try:
            exec(program, {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="session")
def without_the_package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Runs a program with arguments in a folder where this package can't be imported; returns what it printed."""
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=-1, stdout=-1, text=True) as process:

        def run(program: str, folder: Path, *arguments: object) -> str:
            out = tmp_path_factory.mktemp("program")
            print(json.dumps([program, [*map(str, arguments)], str(folder), str(out)]), file=process.stdin, flush=True)
            assert process.stdout is not None
            assert process.stdout.readline() == "0\n", (out / "err").read_text(encoding="utf-8")
            return (out / "out").read_text(encoding="utf-8")

        yield run
        process.kill()  # nothing is to be tidied up


class Result(NamedTuple):
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of an error; fails if there is more, a traceback for instance."""
        lines = [line for line in self.err.splitlines() if line.startswith("vanilla-transformer: error: ")]
        assert "Traceback" not in self.err, self.err
        assert len(lines) == 1, self.err
        return lines[0]


@pytest.fixture
def vanilla_transformer(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs `vanilla-transformer ARGUMENTS` in this process: its exit code, output and errors."""
    from hf_vanilla_transformer import cli

    def run(*arguments: object) -> Result:
        capsys.readouterr()  # what was printed before
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:  # of argparse
            code = int(end.code or 0)
        return Result(code, *capsys.readouterr())

    return run
