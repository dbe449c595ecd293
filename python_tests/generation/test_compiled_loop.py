"""examples/compiled_loop.py: the output of plain decoding, from three graphs a model pair."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import specdec_ext  # noqa: E402
from specdec_ext.commands.pair import find_prompts, load_pair  # noqa: E402

PATH = Path(__file__).resolve().parents[2] / "examples" / "compiled_loop.py"
GAMMA = 3


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("compiled_loop", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
def test_greedy_output_and_graphs(example):
    pair = load_pair()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for prompt in find_prompts(pair)[:2]:
        graphs.clear()
        torch.compiler.reset()
        found = example.complete(
            pair.target, pair.draft, prompt.ids, 40, gamma=GAMMA, temperature=0.0, backend=backend
        )
        plain, _ = specdec_ext.generate(
            pair.target, None, prompt.ids, max_new_tokens=40, eos_token_id=()
        )
        assert torch.equal(found, plain)
        # The target on gamma + 1 tokens; the draft on the last two, then on one.
        assert len(graphs) == 3


def test_sampled_tokens_are_those_of_the_loop(example):
    """The same seeds, the same drafts, the same coins: token by token what `generate` gives."""
    pair = load_pair()
    prompt = find_prompts(pair)[0]
    found = example.complete(
        pair.target, pair.draft, prompt.ids, 40, gamma=GAMMA, temperature=0.8, seed=5,
        backend="eager",
    )  # fmt: skip
    loop, _ = specdec_ext.generate(
        pair.target, pair.draft, prompt.ids, max_new_tokens=40 + GAMMA, gamma=GAMMA,
        temperature=0.8, seeds=5, eos_token_id=(),
    )  # fmt: skip
    assert torch.equal(found, loop[:, : found.shape[1]])
