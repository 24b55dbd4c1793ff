"""`vanilla-transformer info`: what it prints of this machine, and of the variable that overrides it."""

from dataclasses import fields

import pytest
import torch
import transformers

from hf_vanilla_transformer import __version__, cli
from hf_vanilla_transformer.engine.cpu import CPU, VARIABLE


def test_info_has_the_versions(capsys):
    assert cli.main(["info"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (rows["hf_vanilla_transformer"], rows["torch"]) == (__version__, torch.__version__)
    assert (rows["transformers"], rows["threads"]) == (transformers.__version__, str(torch.get_num_threads()))
    assert VARIABLE not in rows


@pytest.mark.parametrize("value", ["", "mkl_is_fastest=true"])
def test_info_of_the_machine_has_every_field_with_what_it_decides(capsys, monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    assert cli.main(["info", "--machine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith(VARIABLE)).split(maxsplit=1)[1] == (value or "not set")
    rows = [line.split(maxsplit=2) for line in lines[lines.index("") + 1 :]]
    expected = [[one.name, str(getattr(CPU, one.name)).lower(), one.metadata["decides"]] for one in fields(CPU)]
    assert rows == expected
    assert max(map(len, lines)) <= 120
