"""scripts/plot_benchmark.py: which tables it draws, and of which files."""

import json

import pytest

from scripts import plot_benchmark

pytest.importorskip("matplotlib")


def results(folder, cpu="one", model="m"):
    row = {"sentences/s": 2.0, "from": 1.0, "to": 4.0, "of marian": 1.5, "rounds": [1.0, 2.0, 4.0]}
    tables = {"start": {"ours": {"s": 1.0}}, "greedy, all lines": {"ours": row, "marian": row}, "beam 4": {"ours": row}}
    machine = {"cpu": cpu, "date": "2026-01-01"}
    path = folder / f"{cpu}{model}.json"
    path.write_text(json.dumps({"tables": tables, "machine": machine, "settings": {"threads": 2, "model": model}}))
    return path


def test_tables_with_rounds_are_drawn(tmp_path, monkeypatch):
    files = [str(results(tmp_path)), str(results(tmp_path, model="n"))]
    plot_benchmark.main([*files, "--output", str(tmp_path / "new" / "F.png")])
    assert (tmp_path / "new" / "F.png").read_bytes().startswith(b"\x89PNG")
    seen = []
    monkeypatch.setattr(plot_benchmark, "draw", lambda *arguments: seen.append(arguments))
    plot_benchmark.main([*files, "--output", "F.png", "--tables", "greedy"])
    ((panels, title, _),) = seen
    assert [name for name, _ in panels] == ["m: greedy, all lines", "n: greedy, all lines"]
    assert title == "one, 2 threads, 2026-01-01"


def test_results_of_two_machines_or_none_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="are of one, 2 threads and of two, 2 threads; draw one chart each"):
        plot_benchmark.main([str(results(tmp_path)), str(results(tmp_path, "two")), "--output", "F.png"])
    with pytest.raises(SystemExit, match="no such table"):
        plot_benchmark.main([str(results(tmp_path)), "--output", "F.png", "--tables", "nothing"])
