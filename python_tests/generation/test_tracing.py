"""RoundTrace: the lines of every round, and that their tokens are those of `generate`."""

from __future__ import annotations

import io
import re

import pytest
import torch
from generate_models import pair

import specdec_ext
from specdec_ext.decoding import Burst, RoundTrace


class Numbers:
    """A tokenizer whose text of a token is its number."""

    def decode(self, ids):
        return " ".join(map(str, ids))


def test_the_lines_tell_the_tokens():
    target, draft = pair(noise=0.02)
    prompts, file, bursts = torch.tensor([[3, 4, 5], [9, 8, 7]]), io.StringIO(), []
    trace = RoundTrace(Numbers(), file=file)

    def on_round(added):
        bursts.extend(added)
        trace(added)

    found = specdec_ext.generate(target, draft, prompts, max_new_tokens=24, on_round=on_round)
    lines = file.getvalue().splitlines()
    assert len(lines) == len(bursts)
    assert any("[-" in line for line in lines) and any("[-" not in line for line in lines)
    texts = {0: [], 1: []}
    for line in lines:
        head, said = line.split(":", 1)
        accepted = re.findall(r"(?<!\S)'(\d+)'", said)
        assert f"{len(accepted)} accepted" in head
        own = re.findall(r"\{\+'(\d+)'\+\}", said)
        request = re.search(r"request (\d)", head)  # not named when the other one has ended
        texts[int(request[1]) if request else 0] += [int(token) for token in accepted + own]
    assert [texts[0], texts[1]] == found.sequences[:, 3:].tolist()
    assert len({line.split(",")[0] for line in lines}) == found.statistics.rounds


def test_colours():
    file = io.StringIO()
    RoundTrace(Numbers(), file=file, color=True)([Burst(0, [1, 2], 1, 7, [0.0, 0.0])])
    assert file.getvalue() == (
        "round 1, 1 accepted: \x1b[32m'1'\x1b[0m \x1b[31;9m'7'\x1b[0m \x1b[1m'2'\x1b[0m\n"
    )


def test_a_tokenizer_is_wanted():
    with pytest.raises(TypeError, match=r"tokenizer must have decode\(ids\), got int 3"):
        RoundTrace(3)
