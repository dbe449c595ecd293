"""The commands' exit statuses: 1 is a verdict, and only that; what cannot be compared is 2."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from generate_models import TableModel, tables

from specdec_ext import __main__ as commands
from specdec_ext.commands import check, plot, simulate
from specdec_ext.commands import pair as loading

NEITHER = 2**63


@pytest.fixture
def status(monkeypatch, capsys):
    """Run a command line in this process; give its status, output and errors."""

    def run(*line: str):
        monkeypatch.setattr(sys, "argv", ["specdec_ext", *map(str, line)])
        return commands.main(), *capsys.readouterr()

    return run


@pytest.fixture
def table_pair(monkeypatch):
    """Put a table model and its draft in place of the shipped pair."""
    target, draft = tables(5)
    prompt = loading.Prompt("a prompt", "", torch.tensor([[1, 2, 3]]))
    pair = loading.Pair(target, draft, None, [])
    monkeypatch.setattr(loading, "load_pair", lambda *_, **__: pair)
    monkeypatch.setattr(loading, "find_prompts", lambda *_: [prompt])
    monkeypatch.setattr(loading.Pair, "device", torch.device("cpu"))
    TableModel.dtype = torch.float32
    yield pair
    del TableModel.dtype


def strict(text: str):
    """Read JSON as its grammar says: it has no NaN and no infinities."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


# --- check and demo ---------------------------------------------------------------------------

REFUSED = [
    ("--gamma", "0", "--gamma must be in [1, 65534], got 0"),
    ("--gamma", "-1", "--gamma must be in [1, 65534], got -1"),
    ("--gamma", "65535", "--gamma must be in [1, 65534], got 65535"),
    ("--max-new-tokens", "0", "--max-new-tokens must be at least 2 (no draft"),
    ("--max-new-tokens", "1", "got 1"),
    ("--max-new-tokens", "-5", "got -5"),
    ("--max-new-tokens", NEITHER, "--max-new-tokens must be an int of 64 bits"),
    ("--temperature", "nan", "--temperature must be in [0, 3.4028234663852886e+38], got nan"),
    ("--temperature", "-1", "got -1"),
    ("--temperature", "inf", "got inf"),
    ("--temperature", "1e39", "got 1e+39"),
    ("--seed", NEITHER, f"--seed must be an int of 64 bits, got {NEITHER}"),
    ("--seed", -NEITHER - 1, f"--seed must be an int of 64 bits, got -{NEITHER + 1}"),
    ("--device", "nonsense", "--device nonsense cannot be used here: "),
    ("--device", "meta", "--device meta cannot be used here: "),
    ("--device", "", "--device  cannot be used here: "),
    ("--prompt", "", "--prompt is empty"),
    ("--draft", "nowhere", "--target and --draft go together"),
]


@pytest.mark.parametrize("command", ["check", "demo"])
@pytest.mark.parametrize(("option", "value", "text"), REFUSED, ids=lambda value: str(value)[:16])
def test_options_that_leave_nothing_to_compare(status, command, option, value, text):
    found, output, errors = status(command, f"{option}={value}")
    assert found == 2
    assert output == ""
    assert errors.startswith(f"{command}: ") and text in errors
    assert errors.count("\n") == 1 and errors.endswith("\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["check", "demo"])
def test_a_device_that_is_not_here(status, command):
    found, output, errors = status(command, "--device=cuda")
    assert found == 2 and not output
    assert errors.startswith(f"{command}: --device cuda cannot be used here: ")
    assert errors.count("\n") == 1


def test_one_gamma_of_several(status):
    found, output, errors = status("check", "--gamma", "2", "0")
    assert found == 2 and "--gamma must be in [1, 65534], got 0" in errors and not output


def test_the_exit_code_of_the_process():
    line = [sys.executable, "-m", "specdec_ext", "check", "--gamma", "0"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 2, done.stderr
    assert done.stderr == "check: --gamma must be in [1, 65534], got 0\n" and not done.stdout


def checkpoint(folder: Path, files: dict[str, bytes]) -> str:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return str(folder)


CONFIG = json.dumps(
    {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
     "num_hidden_layers": 1, "num_attention_heads": 1, "architectures": ["LlamaForCausalLM"]}
).encode()  # fmt: skip
WORDS = json.dumps(
    {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
).encode()


@pytest.mark.parametrize("files", [
    {},
    {"config.json": b"garbage"},
    {"config.json": CONFIG, "model.safetensors": b"garbage", "tokenizer.json": WORDS},
    {"config.json": CONFIG, "tokenizer.json": WORDS},
], ids=["empty", "config", "weights", "no weights"])  # fmt: skip
@pytest.mark.parametrize("command", ["check", "demo"])
def test_checkpoints_that_are_none(status, tmp_path, command, files):
    folder = checkpoint(tmp_path / "model", files)
    found, output, errors = status(command, f"--target={folder}", f"--draft={folder}")
    assert found == 2 and not output
    assert f"{command}: cannot load {folder}: " in errors.splitlines()[-1]


def test_what_fails_within_a_comparison_is_no_verdict(status, table_pair):
    table_pair.target.table[:] = math.nan
    found, _, errors = status("check", "--gamma", "2", "--max-new-tokens", "4")
    assert found == 2
    assert errors.startswith("check: generate: request 0: the target's logits hold NaN")
    assert errors.count("\n") == 1
    found, _, errors = status("demo", "--max-new-tokens", "4")
    assert found == 2 and errors.startswith("demo: generate: request 0: ")


@pytest.mark.parametrize("command", list(commands.COMMANDS))
def test_what_nobody_foresaw_is_no_verdict(status, monkeypatch, command):
    def fail(args):
        raise KeyError("unforeseen")

    monkeypatch.setattr(commands.COMMANDS[command][0], "run", fail)
    required = {"simulate": ["file"], "fetch": ["smollm2"]}.get(command, [])
    found, _, errors = status(command, *required)
    assert found == 2 and "Traceback" in errors and "unforeseen" in errors


@pytest.mark.parametrize("gap", [math.inf, math.nan, 0.5])
def test_the_json_of_check_is_strict(status, table_pair, monkeypatch, gap):
    finding = check.Finding("greedy", "a prompt", check.BUG, 3, gap, 0.0)
    monkeypatch.setattr(check, "compare", lambda *_: iter([finding]))
    found, output, _ = status("check", "--json")
    assert found == 1
    assert strict(output)["findings"][0]["gap"] == (gap if math.isfinite(gap) else None)


def test_a_temperature_that_is_greedy_is_checked_as_such(status, table_pair):
    """One under 1e-6 samples nothing: its race would be compared at a temperature that was not."""
    line = ("check", "--gamma", "2", "--max-new-tokens", "6")
    found, output, _ = status(*line, "--temperature", "1e-9")
    assert found == 0 and "sampled" not in output and "lossless: 6 tokens agree" in output
    found, output, _ = status(*line, "--temperature", "1e-3")
    assert found == 0 and "sampled at T 0.001" in output


# --- simulate ---------------------------------------------------------------------------------


def saved(path: Path, changes: dict | None = None, batch: int = 4) -> Path:
    """Write chains of two tokens over a vocabulary of five."""
    generator = torch.Generator().manual_seed(0)
    held = {
        "target_logits": torch.randn(batch, 3, 5, generator=generator),
        "draft_tokens": torch.randint(0, 5, (batch, 2), generator=generator),
        "draft_logits": torch.randn(batch, 2, 5, generator=generator),
    }
    torch.save({**held, **(changes or {})}, path)
    return path


def other_file(path: Path, kind: str) -> Path:
    """Write what torch.save does not write."""
    contents = {
        "empty": b"",
        "text": b"hello\nworld\n",
        "garbage": bytes(range(7, 256)) * 9,
        "zip": b"PK\x03\x04" + bytes(60),
        "json": b'{"target_logits": 3}',
    }
    if kind == "npy":
        np.save(path.open("wb"), np.zeros(3))
    elif kind == "npz":
        np.savez(path.open("wb"), target_logits=np.zeros(3))
    elif kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(contents[kind])
    return path


KINDS = {
    "empty": "got an empty file", "text": "got something else", "garbage": "got something else",
    "zip": "got something else", "json": "got something else", "npy": "got a NumPy file",
    "npz": "got a NumPy file", "folder": "Is a directory", "missing": "No such file",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_torch_did_not_save(status, tmp_path, kind):
    path = other_file(tmp_path / "file", kind)
    found, output, errors = status("simulate", path, "--json")
    assert found == 2 and not output
    assert errors.startswith("simulate: ") and KINDS[kind] in errors and str(path) in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(("changes", "text"), [
    ({"draft_logits": [1.0]}, "must hold draft_logits [B, G, Vd], got list"),
    ({"draft_tokens": torch.full((4, 2), 5)}, "under 5, or -1 behind a draft's end, got 5"),
    ({"draft_tokens": torch.full((4, 2), -2)}, "got -2"),
    ({"draft_tokens": torch.zeros(4, 2)}, "draft_tokens of int32 or int64, got float32"),
    ({"draft_tokens": torch.zeros(4, 2, dtype=torch.uint8)}, "got uint8"),
    ({"target_logits": torch.zeros(4, 3, 5, device="meta")}, "dense tensors, got a meta tensor"),
    ({"target_logits": torch.zeros(4, 3, 5).to_sparse()}, "dense tensors, got sparse_coo"),
    ({"target_logits": torch.zeros(4, 3, 0)}, "must hold [B, G+1, V]"),
    ({"target_logits": torch.zeros(4, 3, 5).long()}, "must be [R, V] float32"),
    ({"target_logits": torch.full((4, 3, 5), math.nan)}, "has no law"),
    ({"target_logits": 3, 5: "mixed keys"}, "must hold a dict with target_logits and draft_tokens"),
])  # fmt: skip
def test_files_that_hold_no_chains(status, tmp_path, changes, text):
    found, output, errors = status("simulate", saved(tmp_path / "chains.pt", changes), "--json")
    assert found == 2 and not output
    assert errors.startswith("simulate: ") and text in errors and errors.count("\n") == 1


@pytest.mark.parametrize(("options", "text"), [
    (["--cost=nan"], "costs must be finite and at least 0, got [nan]"),
    (["--cost=inf"], "got [inf]"),
    (["--cost=-1"], "got [-1.0]"),
    (["--gamma=0"], "gamma must be in [1, 2]"),
    (["--temperature=nan"], "--temperature must be in [0, 3.4028234663852886e+38], got nan"),
    (["--temperature=1e300"], "got 1e+300"),
    (["--temperature=-1"], "got -1"),
    (["--top-k", NEITHER], "--top-k must be an int of 64 bits"),
    (["--top-p=nan"], "--top-p must be finite and at least 0, got nan"),
    (["--top-p=-1"], "--top-p must be at least 0, got -1"),
    (["--min-p=2"], "--min-p must be in [0, 1], got 2"),
    (["--lenience=nan"], "--lenience must be in [0, 1], got nan"),
    (["--rule=lenient", "--lenience=0"], "lenience must be in (0, 1], got 0"),
])  # fmt: skip
def test_options_of_simulate(status, tmp_path, options, text):
    found, output, errors = status("simulate", saved(tmp_path / "chains.pt"), *options)
    assert found == 2 and not output
    assert errors.startswith("simulate: ") and text in errors and errors.count("\n") == 1


def test_the_json_of_simulate_is_strict(status, tmp_path):
    """One chain has no standard error."""
    found, output, _ = status("simulate", saved(tmp_path / "chains.pt", batch=1), "--json")
    assert found == 0
    assert {prediction["tokens"]["standard_error"] for prediction in strict(output)} == {None}
    found, output, _ = status("simulate", saved(tmp_path / "chains.pt"), "--json")
    assert all(prediction["tokens"]["standard_error"] > 0 for prediction in strict(output))


# --- plot and info ----------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "text"), [
    (["--tokens=-1"], "--tokens must be at least 1, got -1"),
    (["--tokens", 2**64, "leviathan-5", "--json"], "max_new_tokens must be"),
    (["nosuch"], "no figure nosuch"),
])  # fmt: skip
def test_options_of_plot(status, table_pair, options, text):
    found, output, errors = status("plot", *options)
    assert found == 2 and not output
    assert errors.startswith("plot: ") and text in errors and errors.count("\n") == 1


def test_a_trace_that_cannot_be_recorded(status, table_pair):
    table_pair.target.table[:] = math.nan
    found, output, errors = status("plot", "leviathan-5", "--json")
    assert found == 2 and not output and errors.startswith("plot: generate: request 0: ")


def test_the_json_of_plot_is_strict(status, monkeypatch):
    chart = plot.Chart("", "", "", [plot.Curve("", [0.0, 1.0], [math.inf, math.nan])])
    monkeypatch.setitem(plot.CHARTS, "report-1", lambda: chart)
    found, output, _ = status("plot", "report-1", "--json")
    assert found == 0 and strict(output)["report-1"]["curves"][0]["y"] == [None, None]


def test_info(status):
    found, output, errors = status("info")
    assert found == 0 and "specdec_ext" in output and not errors


# --- without transformers ---------------------------------------------------------------------

WITHOUT = """
import sys
sys.modules["transformers"] = None  # what imports it gets an ImportError
import torch
from specdec_ext import *
import specdec_ext
assert callable(verify) and callable(generate) and "hf" not in globals()
assert set(specdec_ext.__all__) <= set(globals())
assert not hasattr(specdec_ext, "hf")
assert getattr(specdec_ext, "hf", None) is None
try:
    specdec_ext.hf
except AttributeError as error:
    assert isinstance(error.__cause__, ImportError)
    assert "has no attribute 'hf'" in str(error) and "pip install 'specdec_ext[hf]'" in str(error)
else:
    raise AssertionError
for statement in ("import specdec_ext.hf", "from specdec_ext import hf"):
    try:
        exec(statement)
    except ImportError as error:
        assert "pip install 'specdec_ext[hf]'" in str(error)
    else:
        raise AssertionError(statement)

class Model(torch.nn.Module):
    def forward(self, input_ids, past_key_values=None, use_cache=True):
        raise AssertionError

try:
    generate(Model().eval(), None, torch.tensor([[1, 2]]))
except ImportError as error:
    assert "pip install 'specdec_ext[hf]'" in str(error)
else:
    raise AssertionError

from specdec_ext import __main__ as commands
torch.save(
    {"target_logits": torch.zeros(2, 2, 3), "draft_tokens": torch.zeros(2, 1).long()}, sys.argv[1]
)
for line, expected in (
    (["info"], 0), (["simulate", sys.argv[1]], 0), (["plot", "--json", "report-1"], 0),
    (["plot", "--json", "leviathan-5"], 2), (["check"], 2), (["demo"], 2),
):
    sys.argv = ["specdec_ext", *line]
    assert commands.main() == expected, line
"""


def test_without_transformers(run_python, tmp_path):
    done = run_python(WITHOUT, str(tmp_path / "chains.pt"))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line]
    assert [line.partition(":")[0] for line in lines] == ["plot", "check", "demo"]
    assert all("needs transformers: pip install 'specdec_ext[hf]'" in line for line in lines)


@pytest.mark.thorough
def test_with_transformers(run_python):
    done = run_python(
        "import sys\n"
        "from specdec_ext import *\n"
        "import specdec_ext\n"
        "assert 'transformers' not in sys.modules\n"  # seconds of imports
        "assert hasattr(specdec_ext, 'hf') and callable(specdec_ext.hf.generate_fn)\n"
        "from specdec_ext import hf\n"
        "assert not hasattr(specdec_ext, 'nosuch')\n"
    )
    assert done.returncode == 0, done.stderr


def test_chains_are_read_as_they_were_saved(tmp_path):
    chains = simulate.load(saved(tmp_path / "chains.pt"))
    assert [list(t.shape) for t in chains] == [[4, 3, 5], [4, 2], [4, 2, 5]]
