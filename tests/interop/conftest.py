"""Exports that take long, made once in a process."""

import functools

import pytest


@pytest.fixture(scope="session")
def exports(tmp_path_factory):
    """What commands make of models of a kind of `graphs.KINDS`."""
    pytest.importorskip("onnx", reason="onnx isn't installed")
    pytest.importorskip("onnxscript", reason="onnxscript isn't installed")
    from graphs import export

    return functools.cache(lambda kind: export(kind, tmp_path_factory.mktemp("exports")))
