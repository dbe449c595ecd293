"""Speculative decoding of pictures: a small autoregressive model of digits, pixel by pixel.

    python examples/pixels.py [--gamma 5] [--temperature 0.8] [--png digits.png] [--quick]

Leviathan et al. (arXiv 2211.17192, section 6) ask whether their method works on images; nothing in
verification knows what tokens stand for. Here a token is a grey level, and a picture 12 x 12 of
them, row by row, after the digit that it shows. The target is a Llama of a few small layers,
trained on digits that are drawn here, stroke by stroke, askew and with noise: about a minute on one
core, once (it is kept in `build`). The draft is a table, counted on the same digits: the law of
a pixel given five neighbours above and to the left. `specdec_ext.generate` runs them as it runs
models of text, and verification is `torch.ops.specdec.verify`.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import math
import os
import statistics
import struct
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import specdec_ext
from specdec_ext.decoding import Draft, Statistics

GREYS = " .:-=+*#%@"  # a token is one of these, or, at a picture's beginning, its digit
CACHE = Path(__file__).resolve().parents[1] / "build"
STROKES = (  # of 0 to 9: corners "x y" on a grid of 4 by 6, y downwards; strokes apart by commas
    "1 0 3 0 4 1 4 5 3 6 1 6 0 5 0 1 1 0",
    "1 1 2 0 2 6, 1 6 3 6",
    "0 1 1 0 3 0 4 1 4 2 0 6 4 6",
    "0 1 1 0 3 0 4 1 4 2 3 3 2 3, 3 3 4 4 4 5 3 6 1 6 0 5",
    "3 6 3 0 0 4 4 4",
    "4 0 0 0 0 3 3 3 4 4 4 5 3 6 0 6",
    "4 0 2 0 0 2 0 5 1 6 3 6 4 5 4 4 3 3 0 3",
    "0 0 4 0 1 6",
    "1 3 0 2 0 1 1 0 3 0 4 1 4 2 3 3 1 3 0 4 0 5 1 6 3 6 4 5 4 4 3 3",
    "4 3 1 3 0 2 0 1 1 0 3 0 4 1 4 4 2 6 0 6",
)


class Settings(NamedTuple):
    """What is trained, and for how long."""

    size: int  # pixels from side to side
    width: int
    layers: int
    steps: int  # of training
    counted: int  # pictures for the draft


FULL = Settings(size=12, width=48, layers=3, steps=2_000, counted=5_000)
QUICK = Settings(size=8, width=32, layers=2, steps=60, counted=1_000)
BATCH, RATE = 8, 8e-3


# --- pictures -------------------------------------------------------------------------------------


def segments():
    """Give the digits' lines, [10, n, 2 ends, 2]; those with fewer repeat their last one."""
    digits = []
    for strokes in STROKES:
        corners = [torch.tensor([*map(float, s.split())]).view(-1, 2) for s in strokes.split(",")]
        digits.append(torch.cat([torch.stack([c[:-1], c[1:]], 1) for c in corners]))
    most = max(map(len, digits))
    return torch.stack([torch.cat([d, d[-1:].expand(most - len(d), 2, 2)]) for d in digits])


def draw(digits, size, generator):
    """Draw digits [n]: tokens [n, 1 + size * size], the digit and its pixels."""

    def between(low, high):
        return torch.rand(len(digits), 1, 1, generator=generator) * (high - low) + low

    x, y = (segments()[digits] - torch.tensor([2.0, 3.0])).unbind(-1)  # [n, lines, 2 ends]
    scale, turn = size / 9.5 * between(0.85, 1.15), between(-0.15, 0.15)
    x, y = (x * between(0.8, 1.2) - y * between(-0.25, 0.25)) * scale, y * scale
    x, y = x * turn.cos() - y * turn.sin(), x * turn.sin() + y * turn.cos()
    middle, shift = (size - 1) / 2, size / 16
    ends = torch.stack([x + between(-shift, shift), y + between(-shift, shift)], -1) + middle

    pixels = torch.cartesian_prod(torch.arange(size), torch.arange(size)).flip(1)  # [P, (x, y)]
    begin, line = ends[:, :, None, 0], (ends[:, :, 1] - ends[:, :, 0])[:, :, None]
    along = ((pixels - begin) * line).sum(-1) / line.square().sum(-1)
    nearest = begin + along.clamp(0, 1)[..., None] * line
    distance = (pixels - nearest).norm(dim=-1).amin(1)  # [n, P], to the nearest line
    ink = (1 - distance + between(0.4, 0.9)[:, 0] * size / 16).clamp(0, 1) * between(0.75, 1)[:, 0]
    ink += 0.02 * torch.randn(ink.shape, generator=generator)
    top = len(GREYS) - 1
    return torch.cat([digits[:, None], (ink * top).round().clamp(0, top).long()], 1)


def as_text(pixels, size):
    """Show a picture [size * size] as lines for the terminal."""
    rows = pixels.view(size, size).tolist()
    return ["".join(2 * GREYS[grey] for grey in row) for row in rows]


def as_marks(guessed, size):
    """Show who drew a picture [size * size]: blank where a draft token was accepted."""
    return ["".join("  " if own else "oo" for own in row) for row in guessed.view(size, size)]


def side_by_side(pictures):
    """Join pictures, lists of lines, five to a row."""
    rows = [pictures[k : k + 5] for k in range(0, len(pictures), 5)]
    return "\n".join("\n".join(map(" ".join, zip(*row, strict=True))) for row in rows)


def write_png(path, pixels, zoom=8):
    """Write greys [height, width] as a PNG."""
    shades = (pixels * 255 // (len(GREYS) - 1)).to(torch.uint8)
    shades = shades.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)
    height, width = shades.shape
    lines = b"".join(b"\0" + bytes(row.tolist()) for row in shades)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    with Path(path).open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for name, data in chunks:
            check = zlib.crc32(name + data)
            file.write(struct.pack(">I", len(data)) + name + data + struct.pack(">I", check))


# --- the target -----------------------------------------------------------------------------------


def new_target(settings):
    """Make a small Llama whose tokens are greys."""
    torch.manual_seed(0)
    width = settings.width
    return LlamaForCausalLM(
        LlamaConfig(
            **dict(vocab_size=len(GREYS), hidden_size=width, intermediate_size=2 * width),
            **dict(num_hidden_layers=settings.layers, num_attention_heads=width // 16),
            **dict(max_position_embeddings=settings.size**2 + 1),
            # Short waves: to find the pixel above, a dozen tokens back, is soon learnt.
            **dict(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
            **dict(bos_token_id=None, eos_token_id=None),
        )
    )


def train_target(settings):
    """Train it; give it ready for use."""
    model = new_target(settings).train()
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0.01)
    losses = []
    for step in range(settings.steps):
        fallen = 0.5 + 0.5 * math.cos(math.pi * step / settings.steps)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 20) * fallen
        digits = torch.randint(10, (BATCH,), generator=generator)
        tokens = draw(digits, settings.size, generator)
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 500 == 499 or step == settings.steps - 1:
            recent = statistics.mean(losses[-100:])
            print(f"  step {step + 1} of {settings.steps}: {recent:.3f} nats a pixel")
    return model.eval()


# --- the draft ------------------------------------------------------------------------------------


class Neighbours:
    """Numbers what stands around a pixel: left and above finely, three others coarsely."""

    def __init__(self, size, greys):
        pixel = torch.arange(size**2 + 1)
        row, column = pixel // size, pixel % size
        left, above, right = column > 0, row > 0, column < size - 1
        # Where they are in a text, whose slot 0 is no pixel, and whether they are in the picture.
        back = torch.tensor([1, size, size + 1, size - 1, 2])
        self.slots = (pixel[:, None] + 1 - back).clamp(min=0)
        self.inside = torch.stack([left, above, left & above, right & above, column > 1], 1)
        coarse = min(4, greys)
        self.shades = torch.tensor([greys, greys, coarse, coarse, coarse])
        self.radix = torch.tensor([greys * coarse**3, coarse**3, coarse**2, coarse, 1])
        self.greys, self.contexts = greys, greys**2 * coarse**3

    def __call__(self, texts, at):
        """Give the context [B, n] of slots ``at`` [B, n] of texts [B, ...]: a row of the table."""
        slots = self.slots[at - 1]  # [B, n, 5]
        found = texts.gather(1, slots.flatten(1)).view_as(slots) * self.inside[at - 1]
        return (found * self.shades // self.greys * self.radix).sum(-1)


def count(texts, size, greys):
    """Count the draft's table from texts [n, 1 + size * size]: logits [contexts, greys]."""
    neighbours = Neighbours(size, greys)
    at = torch.arange(1, size**2 + 1).expand(len(texts), -1)
    cells = neighbours(texts, at) * greys + texts[:, 1:]
    counts = torch.bincount(cells.flatten(), minlength=neighbours.contexts * greys)
    return (counts.view(-1, greys) + 0.1).log()


class NeighbourDrafter:
    """Draws each pixel from a table, given its neighbours: a `specdec_ext.decoding.Drafter`.

    ``logits`` [contexts, greys] are those of `count`. A text is one token, then pixels by rows.
    """

    calls = 0  # of a model

    def __init__(self, size, logits):
        self.logits = logits
        self.last = size**2 + 1  # a slot behind the pixels, for what overshoots
        self.neighbours = Neighbours(size, logits.shape[1])

    def start(self, requests):
        """Take the prompts."""
        self.requests = requests
        missing = self.last + 1 - requests.input_ids.shape[1]
        self.texts = torch.nn.functional.pad(requests.input_ids, (0, missing))

    def slots(self, number):
        """Give the slots [B, number] that this round writes to."""
        return (self.positions[:, None] + torch.arange(number)).clamp(max=self.last)

    def propose(self, gamma, positions, go_on=None):
        """Draw pixel after pixel. They cost so little that ``go_on`` is not asked."""
        self.positions, rows = positions, []
        slots = self.slots(gamma)
        for i in range(gamma):
            at = slots[:, i : i + 1]
            rows.append(self.logits[self.neighbours(self.texts, at)[:, 0]])
            self.texts.scatter_(1, at, self.requests.draw(rows[i], positions, i)[:, None])
        if not rows:
            return Draft(slots)
        return Draft(self.texts.gather(1, slots), torch.stack(rows, 1))

    def commit(self, tokens, accepted):
        """Write what was emitted; the rest of ``tokens`` is written over before it is looked at."""
        self.texts.scatter_(1, self.slots(tokens.shape[1]), tokens.clamp(min=0))

    def select(self, rows, indices):
        """Keep these requests."""
        self.requests = self.requests.select(rows)
        self.texts, self.positions = self.texts[rows], self.positions[rows]


# --- with and without -----------------------------------------------------------------------------


def models(settings, cache=CACHE):
    """Train the target and count the draft, or take those that were kept; give both."""
    code = (segments, draw, new_target, train_target, count, Neighbours.__init__)
    made_by = repr((settings, GREYS, STROKES, BATCH, RATE, *map(inspect.getsource, code)))
    path = cache / f"pixels-{hashlib.sha256(made_by.encode()).hexdigest()[:12]}.pt"
    if not path.exists():
        print(f"Training the target ({path} will keep it)")
        generator, digits = torch.Generator().manual_seed(2), torch.arange(100) % 10
        hundreds = range(settings.counted // 100)
        texts = torch.cat([draw(digits, settings.size, generator) for _ in hundreds])
        state = train_target(settings).state_dict()
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        torch.save({"target": state, "draft": count(texts, settings.size, len(GREYS))}, unfinished)
        unfinished.replace(path)
    kept = torch.load(path)
    target = new_target(settings).eval()
    target.load_state_dict(kept["target"])
    return target, NeighbourDrafter(settings.size, kept["draft"])


class Picture(NamedTuple):
    """A text [1 + size * size], which new pixels are accepted draft tokens, what it took."""

    text: torch.Tensor
    guessed: torch.Tensor
    counts: Statistics
    seconds: float


def decode(target, drafter, settings, given, **options):
    """Go on from a text; time it by the clock of this process, which others do not slow down."""
    guessed = []
    begin = time.process_time()
    texts, counts = specdec_ext.generate(
        target,
        drafter,
        given[None],
        max_new_tokens=1 + settings.size**2 - len(given),
        eos_token_id=(),
        on_round=lambda bursts: guessed.extend(bursts[0].flags),
        **options,
    )
    seconds = time.process_time() - begin
    return Picture(texts[0], torch.tensor(guessed), counts, seconds)


def compare(target, drafter, settings, temperature, gamma):
    """Decode ten digits with a draft and without; give a record and the pictures.

    At temperature 0 the upper halves of drawn digits are given: the likeliest picture of all is an
    empty one, since no pixel is the likeliest place for a stroke to begin.
    """
    size, greedy = settings.size, temperature == 0
    drawn = draw(torch.arange(10), size, torch.Generator().manual_seed(3))
    pictures, plain = [], []
    for digit, text in enumerate(drawn):
        given = text[: 1 + (size // 2 * size if greedy else 0)]
        options = {"temperature": temperature, "gamma": gamma, "seeds": digit}
        for model, those in ((drafter, pictures), (None, plain)):  # by turns
            those.append(decode(target, model, settings, given, **options))
    counts = sum((picture.counts for picture in pictures[1:]), pictures[0].counts)
    fast, slow = (sum(picture.seconds for picture in those) for those in (pictures, plain))
    pixels = sum(len(picture.guessed) for picture in pictures)
    record = {
        "temperature": temperature,
        "tokens a target call": counts.tokens_per_target_call,
        "accepted of tested": counts.accepted_of_tested,
        "ms a pixel": fast / pixels * 1e3,
        "without a draft": slow / pixels * 1e3,
        "times as fast": slow / fast,
    }
    if greedy:
        same = [torch.equal(a.text, b.text) for a, b in zip(pictures, plain, strict=True)]
        record["pictures as without"] = sum(same)
    return record, pictures


def main(argv=None):
    """Decode the ten digits, with a draft and without, at a temperature and at 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gamma", type=int, default=5, help="draft tokens a round")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--png", help="a file for the pictures")
    parser.add_argument("--cache", type=Path, default=CACHE, help="a folder for what was trained")
    parser.add_argument("--quick", action="store_true", help="smaller pictures and models, seconds")
    options = parser.parse_args(argv)
    settings = QUICK if options.quick else FULL
    torch.set_num_threads(1)  # so small are the models
    target, drafter = models(settings, options.cache)

    record, pictures = compare(target, drafter, settings, options.temperature, options.gamma)
    size = settings.size
    print(side_by_side([as_text(picture.text[1:], size) for picture in pictures]))
    print("\nThe same; o: pixels that the target had to draw itself")
    print(side_by_side([as_marks(picture.guessed, size) for picture in pictures]))
    if options.png:
        squares = torch.stack([picture.text[1:].view(size, size) for picture in pictures])
        write_png(options.png, squares.view(2, 5, size, size).transpose(1, 2).reshape(2 * size, -1))
    greedy_record, pictures = compare(target, drafter, settings, 0.0, options.gamma)
    print("\nThe lower halves greedily, where the upper ones are given")
    print(side_by_side([as_text(picture.text[1:], size) for picture in pictures]))
    for each in (record, greedy_record):
        print("\n" + ", ".join(f"{name} {value:.3g}" for name, value in each.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
