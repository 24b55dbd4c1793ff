"""Ray: many files give the bytes of one process, and a part that is complete isn't translated again."""

import json
from pathlib import Path

import pytest

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.translation.files import ROWS, jobs, outcomes, write

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1_800)]


@pytest.fixture(scope="module")
def ray_files():
    ray = pytest.importorskip("ray", reason="Ray isn't installed: pip install '.[ray]'")
    from hf_vanilla_transformer.serving import ray as ray_files

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray_files
    ray.shutdown()


def test_files_are_those_of_one_process(ray_files, tiny_checkpoint: Path, tmp_path: Path) -> None:
    given = tmp_path / "in"
    given.mkdir()
    for number in range(4):
        lines = (f"{number * ROWS + line} past nine\n" for line in range(ROWS // 2 * number))
        (given / f"{number}.txt").write_text("".join(lines))
    (given / "damaged.gz").write_bytes(b"no gzip")
    options = {"num_beams": 1, "max_new_tokens": 4, "progress_bar": False}

    here = jobs([given], tmp_path / "here")
    translator = Translator(str(tiny_checkpoint), "cpu", threads=1)
    for job in here[:4]:
        list(write(job, "text", lambda rows: outcomes(lambda texts: translator(texts, **options), rows)))

    there = jobs([given], tmp_path / "there")
    # A part that an earlier run has completed is kept as it is.
    parts = there[3].output.parent / ".3.txt.parts"
    parts.mkdir(parents=True)
    (parts / "000000000.json").write_text(json.dumps([["kept", ""]] * ROWS))
    opening = {"device": "cpu", "threads": 1}
    done = list(ray_files.translate_files(there, str(tiny_checkpoint), options=options, opening=opening))

    assert [job.source.name for job, error in done if error] == ["damaged.gz"]
    for one, other in zip(here[:3], there[:3], strict=True):
        assert one.output.read_bytes() == other.output.read_bytes()
    own, kept = (job.output.read_text().splitlines() for job in (here[3], there[3]))
    assert kept == ["kept"] * ROWS + own[ROWS:]
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["0.txt", "1.txt", "2.txt", "3.txt"]


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
