"""examples/cached_loop.py and examples/chat.py."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from conftest import ROOT
from generate_models import pair, prompts

import specdec_ext


@pytest.fixture
def examples(monkeypatch):
    """Import an example by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return import_module


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3])
def test_caches_change_no_token(examples, length, noise):
    """Nor is a token run twice: those of the loop without caches, and of `generate`."""
    target, draft = (model.float() for model in pair(noise=noise))
    tokens, _ = prompts([length])
    options = {"gamma": 3, "temperature": 0.9, "seed": 4}
    fed = []
    hook = target.register_forward_pre_hook(lambda model, given: fed.append(given[0].shape[1]))
    found = examples("cached_loop").complete(target, draft, tokens, 30, **options)
    hook.remove()
    expected = examples("drop_in_loop").complete(target, draft, tokens, 30, **options)
    assert found.tolist() == expected.tolist()
    rounds = fed[1:] if length > 1 else fed
    assert set(rounds) == {4} and (len(rounds) == 8 if noise == 0 else len(rounds) > 8)
    ours = specdec_ext.generate(
        target, draft, tokens, max_new_tokens=28, gamma=3, temperature=0.9, seeds=4
    )
    assert found[:, : length + 24].tolist() == ours.sequences[:, : length + 24].tolist()


def test_a_reply_to_a_chat_template(examples, capsys):
    """The text that is returned is the text that is shown, and the turns are in the prompt."""
    from specdec_ext.commands.pair import load_pair

    chat, shipped = examples("chat"), load_pair()
    shipped.tokenizer.chat_template = chat.COMMENTS
    messages = [{"role": "user", "content": "How?"}]
    options = {"max_new_tokens": 16, "gamma": 2}
    answer, statistics = chat.reply(
        shipped.target, shipped.draft, shipped.tokenizer, messages, **options
    )
    assert capsys.readouterr().out == answer + "\n" and statistics.emitted == 16
    ids = shipped.tokenizer("# user: How?\n# assistant:", return_tensors="pt").input_ids
    plain = specdec_ext.generate(shipped.target, None, ids, max_new_tokens=16).sequences
    assert shipped.tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True) == answer


@pytest.mark.thorough
def test_chat_as_a_program():
    command = [sys.executable, "examples/chat.py", "How?", "And why?"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("> And why?\n")
    assert first.startswith("> How?\n") and all(
        "tokens a target call]" in x for x in (first, second)
    )
