"""The shell and Python blocks of the Markdown files run, one after the other, on small files.

A block that begins with ```bash runs; ```bash no-run REASON doesn't, with one of `REASONS`; a block without a language
shows output. A block of another language with a file's name, ```yaml mapping.yaml, is that file. The Python blocks of
a file share their names, as if a reader had typed them.

What takes hours on real data takes seconds here: `QUICK` is added to every training, and nothing else is changed.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from opus_mt import opus_mt_folder
from test_fairseq import checkpoint as fairseq_checkpoint
from test_joeynmt import settings as joeynmt_settings
from test_joeynmt import weights as joeynmt_weights
from test_joeynmt import write as write_joeynmt
from test_markdown import BLOCKS, ROOT, TEXTS, WITH_PYTHON, Block, blocks_of, python_of
from test_opennmt import checkpoint as opennmt_checkpoint

# Why a block doesn't run -> how many there may be.
REASONS = {
    "network": 5,  # it downloads packages, data or models, or sends something
    "docker": 1,
    "machines": 3,  # several GPUs or machines
    "hours": 4,  # it measures, needs a GPU, or trains for a given time
    "elsewhere": 2,  # the service and Marian's files, which other tests run
}
# Added to `vanilla-transformer train` and to the same command under torchrun: a model of 40 wide, whose heads may be 5
# or 8, and ten updates.
QUICK = {
    "--d-model": 40, "--encoder-layers": 1, "--decoder-layers": 1, "--encoder-ffn-dim": 32, "--decoder-ffn-dim": 32,
    "--vocab-size": 300, "--max-steps": 10, "--save-steps": 1, "--eval-steps": 5, "--logging-steps": 5,
}  # fmt: skip
SIZES = {"--d-model", "--encoder-layers", "--decoder-layers", "--encoder-ffn-dim", "--decoder-ffn-dim", "--vocab-size"}
QUICK_SYMBOLS = "--d-model 40 --encoder-layers 1 --decoder-layers 1 --num-train-epochs 6"  # to the recipe g2p
QUICK_SCRIPT = {"--max-steps": 2, "--eval-steps": 2, "--vocab-size": 300}  # to scripts/fine_tune.py
SENTENCES = {"en": "half past nine and {} euros", "de": "halb zehn und {} Euro"}


SHELL = {name: [one for one in blocks if one.language == "bash"] for name, blocks in BLOCKS.items()}
WITH_SHELL = sorted(name for name, blocks in SHELL.items() if any(not one.note for one in blocks))


def script_of(blocks: list[Block]) -> str:
    """The blocks that run, each with an echo of its line, so that an error names it."""
    runs = (one for one in blocks if not one.note)
    return "set -euo pipefail\n" + "".join(f"echo '--- line {one.line}' >&2\n{one.text}" for one in runs)


def is_file(block: Block) -> bool:
    return block.language not in ("bash", "python") and re.fullmatch(r"[\w.-]+", block.note) is not None


# ---- The place ----
def executable(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)


def written(options: Mapping[str, object]) -> str:
    return " ".join(f"{name} {value}" for name, value in options.items())


def write_programs(folder: Path) -> Path:
    """The programs that the blocks call: this Python and this checkout, with shorter trainings."""
    folder.mkdir()
    python, ours = sys.executable, f"{sys.executable} -m hf_vanilla_transformer"  # what the command starts
    of_a_model = {name: value for name, value in QUICK.items() if name not in SIZES}  # which has sizes already
    without_validation = {name: value for name, value in QUICK.items() if name != "--eval-steps"}
    executable(
        folder / "vanilla-transformer",
        f'case "$*" in "train "*--model-name-or-path*) exec {ours} "$@" {written(of_a_model)};; '
        f'"train --train-source "*) exec {ours} "$@" {written(without_validation)};; '
        f'"train --config g2p "*) exec {ours} "$@" {QUICK_SYMBOLS};; '
        f'"train "*) exec {ours} "$@" {written(QUICK)};; *) exec {ours} "$@";; esac',
    )
    executable(
        folder / "python",
        f'case "$1" in *fine_tune.py) exec {python} "$@" {written(QUICK_SCRIPT)};; *) exec {python} "$@";; esac',
    )
    executable(folder / "torchrun", f'exec {python} -m torch.distributed.run "$@" {written(QUICK)}')
    return folder


def write_corpora(place: Path) -> None:
    """Parallel files of twenty lines, by all names that the blocks have for such files."""
    parts = ("train", "val", "test", "test_2016_flickr")
    for folder in (place, place / "multi30k", place / "multi30k_tok"):
        folder.mkdir(exist_ok=True)
        for name in (f"{part}.{language}" for part in parts for language in SENTENCES):
            lines = (SENTENCES[name[-2:]].format(number) for number in range(20))
            (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for part in ("train", "dev", "test"):
        (place / f"{part}.tsv").write_text("thought\tθ ɔː t\nthing\tθ ɪ ŋ\nfull\tf ʊ l\n" * 5, encoding="utf-8")
    shutil.copy(place / "test.en", place / "source.txt")


def write_other_systems(place: Path) -> None:
    """Models of fairseq, OpenNMT-py, JoeyNMT, Marian and The Annotated Transformer, with their tokenizers' codes."""
    codes = "#version: 0.2\n" + "".join(f"{s} {n}</w>\n" for s in "wst" for n in range(9))
    fairseq_checkpoint(place / "checkpoints", {})
    (place / "checkpoints" / "codes").write_text(codes, encoding="utf-8")
    data = {"transforms": ["bpe"], "src_subword_model": "src.codes", "tgt_subword_model": None}
    torch.save(opennmt_checkpoint(**data), place / "model_step_100000.pt")
    (place / "src.codes").write_text(codes, encoding="utf-8")
    joeynmt = place / "models" / "my_joeynmt"
    joeynmt.mkdir(parents=True)
    side = {"level": "bpe", "tokenizer_type": "subword-nmt", "tokenizer_cfg": {"codes": "codes"}}
    write_joeynmt(joeynmt, {**joeynmt_settings(), "data": {"src": side, "trg": side}}, joeynmt_weights(False))
    (joeynmt / "codes").write_text(codes, encoding="utf-8")
    opus_mt_folder(place / "Helsinki-NLP" / "opus-mt-en-de")
    (mapping,) = (one.text for one in BLOCKS["docs/interop.md"] if one.note == "mapping.yaml")
    (place / "mapping.yaml").write_text(mapping, encoding="utf-8")
    torch.save(annotated_transformer(place / "mapping.yaml"), place / "model.pt")


def annotated_transformer(mapping: Path) -> dict[str, torch.Tensor]:
    """A state dict with the names of The Annotated Transformer, of the sizes and tokens of docs/interop.md."""
    from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
    from hf_vanilla_transformer.interop.layout import rules_of
    from hf_vanilla_transformer.interop.state_dict import read_mapping
    from hf_vanilla_transformer.modeling_vanilla_transformer import sinusoidal_table

    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_layers": 2, "decoder_layers": 2}
    kinds = {"norm_position": "pre", "final_layer_norm": True, "attention_bias": True, "output_bias": True}
    config = VanillaTransformerConfig(vocab_size=40, pad_token_id=2, **sizes, **kinds)
    tables = {f"{side}_embed.1.pe": sinusoidal_table(50, config.d_model)[None] for side in ("src", "tgt")}
    model = VanillaTransformerForConditionalGeneration(config)
    own = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    rules = rules_of(read_mapping(mapping), {"encoder": 2, "decoder": 2})
    return {rule.theirs[0]: own[rule.ours[0]] for rule in rules if rule.ours[0] in own} | tables


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_programs(tmp_path_factory.mktemp("programs") / "bin")


@pytest.fixture(scope="session")
def run(programs: Path) -> Callable[[str, Path], None]:
    """Runs a script as a reader's shell would, in a folder."""

    def run_script(script: str, place: Path) -> None:
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        environment["XDG_CACHE_HOME"] = str(place / ".cache")
        command = ["bash", "-c", script]
        options = {"cwd": place, "env": environment, "stdin": subprocess.DEVNULL, "timeout": 1400}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]

    return run_script


@pytest.fixture(scope="session")
def trained(run: Callable[[str, Path], None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run: a model, ten checkpoints and `averaged-10`."""
    place = tmp_path_factory.mktemp("trained")
    write_corpora(place)
    run("vanilla-transformer train --config multi30k_tiny --data-dir multi30k --output-dir run", place)
    return place / "run"


@pytest.fixture
def place(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A folder with what the blocks name and don't make."""
    write_corpora(tmp_path)
    for model in ("quickstart/model", "multi30k_best/averaged-10"):
        shutil.copytree(tiny_checkpoint, tmp_path / "outputs" / model)
    (tmp_path / "DIR").symlink_to(tmp_path / "outputs" / "quickstart" / "model")
    write_other_systems(tmp_path)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    return tmp_path


# ---- The tests ----
@pytest.mark.docs
@pytest.mark.timeout(1500)  # some twenty programs for one page, each of which imports torch and transformers
@pytest.mark.parametrize("name", WITH_SHELL)
def test_shell_blocks_run_one_after_the_other(
    name: str, place: Path, trained: Path, run: Callable[[str, Path], None]
) -> None:
    files = [one for one in BLOCKS[name] if is_file(one)]
    for block in files:
        (place / block.note).write_text(block.text, encoding="utf-8")
    script = script_of(SHELL[name])
    texts = script + "".join(one.text for one in files)
    made = re.findall(r"(?:--output-dir |^output_dir: )(\S+)", texts, re.MULTILINE)
    for output in made:
        shutil.rmtree(place / output, ignore_errors=True)
    for output in {"outputs/multi30k_tiny", "outputs/my-run"} - set(made):
        shutil.copytree(trained, place / output)
    run(script, place)


@pytest.mark.docs
@pytest.mark.parametrize("name", WITH_PYTHON)
def test_python_blocks_run_one_after_the_other(name: str, place: Path, run: Callable[[str, Path], None]) -> None:
    (place / "blocks_of_the_page.py").write_text(python_of(TEXTS[name]), encoding="utf-8")
    run("python blocks_of_the_page.py", place)


def test_shell_blocks_are_found() -> None:
    assert {"README.md", "docs/training.md", "docs/deploy.md", "docs/interop.md"} <= set(WITH_SHELL)
    text = (
        "a\n```bash\nb \\\n  c\n```\n```bash no-run docker\nd\n```\n```\ne\n```\n- x\n  ```yaml y.yaml\n  z: 1\n  ```"
    )
    bash, not_run, output, file = blocks_of(text)
    assert (bash.language, bash.note, bash.line, bash.text) == ("bash", "", 3, "b \\\n  c\n")
    assert (not_run.note, output.language, file.note) == ("no-run docker", "", "y.yaml")
    assert script_of([bash, not_run]) == "set -euo pipefail\necho '--- line 3' >&2\nb \\\n  c\n"


def test_an_error_in_the_middle_of_a_block_is_noticed(run: Callable[[str, Path], None], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no_such_program"):
        run(script_of([Block("bash", "", 1, "no_such_program\ntrue\n")]), tmp_path)


def test_few_shell_blocks_are_not_run() -> None:
    notes = [one.note for blocks in SHELL.values() for one in blocks if one.note]
    assert {note.removeprefix("no-run ") for note in notes} <= set(REASONS)
    assert {reason: notes.count(f"no-run {reason}") for reason in REASONS} == REASONS


def test_commands_are_in_bash_blocks() -> None:
    """What has no language is output: nothing there begins like a command."""
    commands = r"(\S+=\S+ )*(\.venv/bin/)?(vanilla-transformer|python|pip|make|torchrun|accelerate|docker|hf|git) "
    blocks = [(name, one) for name in BLOCKS for one in BLOCKS[name]]
    assert [(name, one.line) for name, one in blocks if not one.language and re.match(commands, one.text)] == []
    assert {one.language for _, one in blocks} <= {"", "bash", "python", "yaml", "dockerfile", "bibtex", "toml"}
