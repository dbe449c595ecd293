"""examples/pixels.py: pictures, the draft's table, the law of what is emitted, greedy pictures."""

from __future__ import annotations

import importlib.util
import itertools
import math
import struct
import zlib
from collections import Counter

import pytest
import torch
from conftest import ROOT

pytest.importorskip("transformers")

from generate_models import tables  # noqa: E402
from test_generate_law import ALPHA, p_value  # noqa: E402

import specdec_ext  # noqa: E402

GREYS = 4


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("pixels", ROOT / "examples" / "pixels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_table(example, size, greys, seed=0):
    """Logits of a draft that was counted nowhere."""
    contexts = example.Neighbours(size, greys).contexts
    return torch.randn(contexts, greys, generator=torch.Generator().manual_seed(seed))


# --- pictures -------------------------------------------------------------------------------------


def test_digits(example):
    digits = torch.arange(10).repeat(20)
    texts = example.draw(digits, 16, torch.Generator().manual_seed(0))
    assert torch.equal(texts[:, 0], digits) and texts.shape == (200, 257)
    assert 0 <= texts.min() and texts.max() < len(example.GREYS)
    pixels = texts[:, 1:].view(20, 10, 16, 16).double().mean(0)
    inked = pixels.flatten(1).mean(1)
    assert inked.argmin() == 1 or inked.argmin() == 7  # one or two strokes
    assert inked.argmax() == 8
    assert (pixels[:, [0, 0, -1, -1], [0, -1, 0, -1]] < 0.5).all()  # the corners
    assert pixels[1, :, 7:9].mean() > 2 * pixels[0, :, 7:9].mean()  # a 1 is where a 0 is hollow
    other = example.draw(digits, 16, torch.Generator().manual_seed(1))
    assert not torch.equal(other, texts)


def test_png(example, tmp_path):
    pixels = torch.tensor([[0, 9, 3], [1, 2, 9]])
    example.write_png(tmp_path / "a.png", pixels, zoom=1)
    data = (tmp_path / "a.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (check,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert check == zlib.crc32(name + body)
        chunks[name], at = body, at + 12 + length
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (3, 2)
    rows = zlib.decompress(chunks[b"IDAT"])
    assert list(rows) == [0, 0, 255, 85, 0, 28, 56, 255]


# --- the draft's table ----------------------------------------------------------------------------


def around(pixels, size, k):
    """The neighbours of pixel k by hand: left and above, then three coarse ones."""
    row, column = divmod(k, size)

    def grey(y, x):
        return pixels[y * size + x] if 0 <= y and 0 <= x < size else 0

    near = [grey(row, column - 1), grey(row - 1, column)]
    far = [(row - 1, column - 1), (row - 1, column + 1), (row, column - 2)]
    return (*near, *(grey(*place) * 4 // 10 for place in far))


def test_the_table_holds_frequencies(example):
    size, texts = 5, torch.randint(10, (40, 26), generator=torch.Generator().manual_seed(0))
    texts[:20] = texts[0]  # so that some contexts come again
    found = example.count(texts, size, 10).softmax(-1)
    seen = Counter()
    for pixels in texts[:, 1:].tolist():
        seen.update((around(pixels, size, k), pixel) for k, pixel in enumerate(pixels))
    neighbours = example.Neighbours(size, 10)
    for pixels in texts[15:25, 1:].tolist():
        for k in range(size**2):
            context = around(pixels, size, k)
            counts = torch.tensor([seen[context, grey] + 0.1 for grey in range(10)])
            row = neighbours(torch.tensor([[7, *pixels]]), torch.tensor([[k + 1]]))
            torch.testing.assert_close(found[row.item()], counts / counts.sum())


# --- the law of what is emitted -------------------------------------------------------------------


@pytest.mark.every("rule")
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("gamma, size", [(1, 2), (3, 2), (2, 3)])
def test_joint_law(example, rule, gamma, size):
    target, _ = tables(GREYS)
    drafter = example.NeighbourDrafter(size, random_table(example, size, GREYS))
    assert p_value(target, drafter, 0.8, rule=rule, gamma=gamma) > ALPHA


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mistake", [lambda rows: rows.roll(1, 2), lambda rows: rows / 2], ids=["other", "flatter"]
)
def test_control_a_law_that_was_not_sampled(example, mistake):
    class Wrong(example.NeighbourDrafter):
        def propose(self, gamma, positions, go_on=None):
            draft = super().propose(gamma, positions, go_on)
            return draft._replace(logits=mistake(draft.logits)) if gamma else draft

    target, _ = tables(GREYS)
    drafter = Wrong(2, random_table(example, 2, GREYS))
    assert p_value(target, drafter, 0.8, gamma=2) < ALPHA


# --- a small Llama --------------------------------------------------------------------------------


def test_greedy_pictures_and_batches(example):
    """Untrained, so that the draft is often wrong; requests accept and end apart."""
    settings = example.QUICK._replace(size=4)
    target = example.new_target(settings).eval()
    drafter = example.NeighbourDrafter(4, random_table(example, 4, 10))
    digits = torch.arange(10)[:, None]
    limits = [16] * 7 + [3, 9, 15]
    options = {"max_new_tokens": limits, "gamma": 4, "pad_token_id": 0, "eos_token_id": ()}
    plain = specdec_ext.generate(target, None, digits, **options).sequences
    found, statistics = specdec_ext.generate(target, drafter, digits, **options)
    assert torch.equal(found, plain)
    assert 0 < statistics.accepted < statistics.drafted

    options |= {"temperature": 1.0, "seeds": range(10)}
    together = specdec_ext.generate(target, drafter, digits, **options).sequences
    for digit in (0, 4, 8):
        options |= {"seeds": digit, "max_new_tokens": limits[digit]}
        alone = specdec_ext.generate(target, drafter, digits[digit : digit + 1], **options)
        assert torch.equal(alone.sequences[0], together[digit, : 1 + limits[digit]])


@pytest.mark.thorough
def test_the_command(example, tmp_path, capsys):
    arguments = ["--quick", f"--cache={tmp_path}", f"--png={tmp_path / 'digits.png'}"]
    outputs = []
    for _ in range(2):
        assert example.main(arguments) == 0
        outputs.append(capsys.readouterr().out)
    assert "Training" in outputs[0] and "Training" not in outputs[1]
    assert "pictures as without 10" in outputs[1]
    assert len(list(tmp_path.glob("pixels-*.pt"))) == 1
    pictures = outputs[1].partition("\n\n")[0]
    assert outputs[0].partition("nats a pixel\n")[2].startswith(pictures)
    assert len(pictures.splitlines()) == 2 * example.QUICK.size
    assert struct.unpack(">II", (tmp_path / "digits.png").read_bytes()[16:24]) == (320, 128)


@pytest.mark.thorough
def test_training_teaches(example):
    """After a few steps the target is better than a law of single greys, and not yet the best."""
    settings = example.QUICK._replace(steps=40)
    target = example.train_target(settings)
    texts = example.draw(torch.arange(200) % 10, 8, torch.Generator().manual_seed(9))
    with torch.inference_mode():
        logits = target(texts[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten()).item()
    law = torch.bincount(texts[:, 1:].flatten(), minlength=10).double()
    entropy = torch.distributions.Categorical(law).entropy().item()
    assert loss < entropy < math.log(10)


def test_who_drew_what(example):
    marks = example.as_marks(torch.tensor([True, False, False, True]), 2)
    assert marks == ["  oo", "oo  "]
    rows = example.side_by_side([marks] * 7).splitlines()
    assert [len(row) for row in rows] == [24, 24, 9, 9]
    assert example.as_text(torch.tensor([0, 9, 3, 1]), 2) == ["  @@", "--.."]
    assert list(itertools.chain(example.GREYS)) == list(" .:-=+*#%@")
