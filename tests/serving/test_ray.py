"""Ray: many files give the bytes of one process, whatever is killed."""

import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.data.formats import GZIP
from hf_vanilla_transformer.documents.files import file_jobs, translate_files
from hf_vanilla_transformer.documents.rows import ROWS
from tests.serving.processes import PATIENCE, ask, serving

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1_800)]


@pytest.fixture(scope="module")
def ray_files():
    ray = pytest.importorskip("ray", reason="Ray isn't installed: pip install '.[ray]'")
    from hf_vanilla_transformer.serving import ray as ray_files

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray_files
    ray.shutdown()


def test_files_are_those_of_one_process(ray_files, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """By an ensemble of two models."""
    given, other = tmp_path / "in", shutil.copytree(tiny_checkpoint, tmp_path / "other")
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    with torch.no_grad():
        model.get_input_embeddings().weight += 0.1 * torch.randn_like(model.get_input_embeddings().weight)
    model.save_pretrained(other)
    models = [str(tiny_checkpoint), str(other)]
    given.mkdir()
    for number in range(4):
        lines = (f"{number * ROWS + line} past nine\n" for line in range(ROWS // 2 * number))
        (given / f"{number}.txt").write_text("".join(lines))
    (given / "3").write_text("half past nine\n")  # its name begins that of another file
    (given / "damaged.gz").write_bytes(GZIP + b"no gzip")
    options = {"num_beams": 1, "max_new_tokens": 4, "progress_bar": False}

    here = file_jobs([given], tmp_path / "here")
    translator = Translator(models, "cpu", threads=1)
    assert [problem for _, problem in translate_files(here[:5], translator, options)] == [""] * 5

    there = file_jobs([given], tmp_path / "there", how=options)
    opening = {"device": "cpu", "threads": 1}
    done = list(ray_files.translate_files(there, models, options=options, opening=opening))

    assert [job.source.name for job, error in done if error] == ["damaged.gz"]
    for one, two in zip(here[:5], there[:5], strict=True):
        assert one.output.read_bytes() == two.output.read_bytes()
    names = [path.name for path in (tmp_path / "there").iterdir() if path not in [job.record for job in there]]
    assert sorted(names) == ["0.txt", "1.txt", "2.txt", "3", "3.txt"]


def test_the_class_for_ones_own_pipelines(ray_files, tiny_checkpoint: Path) -> None:
    import ray

    data = ray.data.from_items([{"text": "half past nine", "n": number} for number in range(8)])
    options = {"num_beams": 1, "max_new_tokens": 4}
    rows = data.map_batches(
        ray_files.Translate,
        fn_constructor_args=(str(tiny_checkpoint),),
        fn_constructor_kwargs={"options": options, "device": "cpu", "threads": 1},
        compute=ray.data.ActorPoolStrategy(size=1),
        batch_size=4,
    ).take_all()
    expected = Translator(str(tiny_checkpoint), "cpu", threads=1)("half past nine", **options)
    assert sorted(row["n"] for row in rows) == list(range(8))
    assert {row["translation"] for row in rows} == {expected}


def _driver(address: str, model: Path, given: Path, there: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "hf_vanilla_transformer", "translate", "--model", str(model), "--threads", "1"]
    files = ["--input", str(given), "--output", str(there), "--ray", address, "--actors", "2"]
    return subprocess.Popen([*command, *files, "--num-beams", "1", "--max-new-tokens", "4"])


def _wait_for_files(there: Path, number: int, driver: "subprocess.Popen[bytes]") -> None:
    found = 0
    while found < number:
        assert driver.poll() is None
        found = len(list(there.glob("*.txt")))
        time.sleep(0.01)


def _kill_actor(driver: "subprocess.Popen[bytes]") -> None:
    while not (actors := [one for one in psutil.process_iter(["cmdline"]) if "MapWorker" in str(one.info["cmdline"])]):
        assert driver.poll() is None
        time.sleep(0.01)
    actors[0].kill()


def test_killed_workers_nodes_and_drivers_lose_no_line(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray isn't installed: pip install '.[ray]'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    given, here, there = (tmp_path / name for name in ("in", "here", "there"))
    given.mkdir()
    for number in range(40):
        lines = (f"{number * 500 + line} past nine\n" for line in range(500))
        (given / f"{number:02}.txt").write_text("".join(lines))
    (given / "damaged.txt.gz").write_bytes(GZIP + b"no gzip")
    translator = Translator(str(tiny_checkpoint), "cpu", threads=1)
    options = {"num_beams": 1, "max_new_tokens": 4, "progress_bar": False}
    assert not any(problem for _, problem in translate_files(file_jobs([given], here)[:40], translator, options))

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        second = cluster.add_node(num_cpus=1)
        driver = _driver(cluster.address, tiny_checkpoint, given, there)
        _wait_for_files(there, 3, driver)
        driver.kill()  # and is started again below
        assert driver.wait() == -signal.SIGKILL
        driver = _driver(cluster.address, tiny_checkpoint, given, there)
        _wait_for_files(there, 8, driver)
        _kill_actor(driver)
        _wait_for_files(there, 14, driver)
        cluster.remove_node(second, allow_graceful=False)
        assert driver.wait(PATIENCE) == 1  # as one file is damaged
    finally:
        cluster.shutdown()
    names = sorted(file.name for file in here.glob("[!.]*"))
    assert len(names) == 40
    assert sorted(file.name for file in there.glob("[!.]*")) == names
    assert all((there / name).read_bytes() == (here / name).read_bytes() for name in names)


def test_the_service_on_a_cluster(tiny_checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray isn't installed: pip install '.[ray]'")
    other = shutil.copytree(tiny_checkpoint, tmp_path / "other")
    models = ["--model", f"en-de={tiny_checkpoint}", f"de-en={other}", "--models-per-replica", "1", "--threads", "1"]
    command = ["-m", "hf_vanilla_transformer", "serve", "--ray", "--port", "{port}", *models]
    with serving(*command, ready="http://127.0.0.1:{port} translates en-de, de-en\n") as (port, process):
        texts = [f"{number} past nine" for number in range(30)]
        expected = Translator(str(tiny_checkpoint), "cpu")(texts, progress_bar=False)
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda text: ask(port, text), texts))
        assert answers == [(200, text) for text in expected]
        assert ask(port, texts[0], "de", "en") == answers[0]  # the model takes the other's place
        assert ask(port, "x" * 60_000) == (413, "q has 60,000 characters, and the limit is 50,000")
        process.terminate()
        assert process.wait(PATIENCE) == 0
