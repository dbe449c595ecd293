"""What a block costs: drafting k tokens in one call of a Spec-Drafter, for several k.

    python benchmarks/bench_block_drafting.py                  # the paper's size, random weights
    python benchmarks/bench_block_drafting.py --model FOLDER   # a trained one
    python benchmarks/bench_block_drafting.py --draft-vocabulary 8192 --packed  # of these tokens
    python benchmarks/bench_block_drafting.py --quick          # does it run?

Milliseconds are those of `BlockDrafter.propose` in a round: the decoder's call on the tokens that
the last round emitted and on k slots, behind a cached prefix, and the choice of the tokens (arg
max). The encoder has run before. All k share the model, the source, the prefix, and the number of
new tokens; they are timed by turns.

Before anything counts, a call behind a cache is compared with one on the whole prefix: the exit
code is 1 where they differ by more than rounding.

Bar: 25 tokens cost at most 1.5 times as much as one. The exit code is 1 where the bar is missed,
unless ``--quick`` is given.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from specdec_ext.decoding import BlockDrafter, Counts, Requests, pack_linears
from specdec_ext.models.reduced import vocabulary_entries
from specdec_ext.models.spec_drafter import SpecDrafter, SpecDrafterConfig

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common  # noqa: E402

BAR = 1.5
COMPARED = (1, 25)
SIZES = (1, 5, 10, 15, 20, 25)
NEW = 4  # tokens that a round emitted


def started(
    model: SpecDrafter, block: int, batch: int, source: int, prefix: int
) -> tuple[BlockDrafter, torch.Tensor]:
    """Return a drafter whose cache holds a prefix, and the tokens of the next round."""
    generator = torch.Generator().manual_seed(0)

    def some(length: int) -> torch.Tensor:
        shape = (batch, length)
        drawn = torch.randint(2, model.config.vocab_size, shape, generator=generator)
        return drawn.to(model.device)

    drafter = BlockDrafter(model, some(source), block_size=block)
    ends = torch.full((batch,), 1 << 20, device=model.device)
    drafter.start(Requests(some(prefix), None, ends, 2 * prefix, None, {}, True, False))
    drafter.propose(block, ends)
    return drafter, some(NEW)


def round_of(drafter: BlockDrafter, tokens: torch.Tensor, prefix: int) -> torch.Tensor:
    """Run one round behind the same prefix as every round before."""
    state = drafter._state.prefix
    state.shorten(Counts.full(len(tokens), prefix, tokens.device))
    drafter.observe(tokens, Counts.full(len(tokens), NEW, tokens.device))
    return drafter.propose(drafter.block_size, tokens[:, 0]).tokens


def difference(model: SpecDrafter) -> float:
    """Return how far logits behind a cache are from those of a whole call, as a share of them."""
    source = torch.arange(2, 12, device=model.device)[None]
    text = torch.arange(3, 10, device=model.device)[None]
    state = model.read(source)
    model.draft_block(state, text[:, :3], Counts.full(1, 3, model.device))
    found = model.draft_block(state, text[:, 3:], Counts.full(1, 4, model.device))
    with torch.inference_mode():
        expected = model(source, prefix_ids=text).logits
    return float((found - expected).abs().max() / expected.abs().max())


def build(given: argparse.Namespace) -> SpecDrafter:
    """Return the model that is measured."""
    torch.manual_seed(0)
    if given.model is not None:
        model = SpecDrafter.from_pretrained(given.model, dtype=getattr(torch, given.dtype))
    else:
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2} if given.quick else {}
        config = SpecDrafterConfig(vocab_size=given.vocabulary, **sizes)
        model = SpecDrafter(config).to(getattr(torch, given.dtype))
    if given.draft_vocabulary is not None:  # which tokens these are takes no time
        model = model.with_vocabulary(torch.arange(given.draft_vocabulary))
    if given.packed:
        pack_linears(model)
    return model.eval()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="folder of a saved Spec-Drafter")
    add("--vocabulary", type=int, default=32_000, help="of a model with random weights (32,000)")
    add("--draft-vocabulary", type=int, help="tokens that it can propose (all)")
    add("--packed", action="store_true", help="weights packed by oneDNN (float32 on a CPU)")
    add("--batch", type=int, default=1)
    add("--source", type=int, default=30, help="tokens of each source (30)")
    add("--prefix", type=int, default=20, help="tokens of each prefix (20)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, help="default: torch's own")
    add("--budget", type=float, default=20.0, help="seconds of timing (20)")
    add("--quick", action="store_true", help="a small model, a second")
    add("--record", help="name of a record in benchmarks/results, without suffix")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    given = parse_arguments(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    model = build(given).to(given.device)
    apart = difference(model)
    if apart > (1e-3 if given.dtype == "float32" else 0.1):
        print(f"the cache changes logits by {apart:.2g} of their size", file=sys.stderr)
        return 1
    blocks = sorted({*(k for k in SIZES if k <= model.config.block_size), model.config.block_size})
    drafters = {k: started(model, k, given.batch, given.source, given.prefix) for k in blocks}
    times = common.measure(
        {
            str(k): lambda _, drafter=drafter, tokens=tokens: round_of(
                drafter, tokens, given.prefix
            )
            for k, (drafter, tokens) in drafters.items()
        },
        budget=1.0 if given.quick else given.budget,
        device=model.device,
    )
    one = times[str(COMPARED[0])].median
    records = [
        {
            "block": k,
            "milliseconds": 1e3 * times[str(k)].median,
            "p90": 1e3 * times[str(k)].p90,
            "calls": times[str(k)].calls,
            "times_one": times[str(k)].median / one,
        }
        for k in blocks
    ]
    lines = ["| k | ms | 90 % | times k = 1 |", "|---|---|---|---|"]
    lines += [
        f"| {r['block']} | {r['milliseconds']:.2f} | {r['p90']:.2f} | {r['times_one']:.2f} |"
        for r in records
    ]
    compared = next((r["times_one"] for r in records if r["block"] == COMPARED[1]), None)
    verdict = "" if compared is None else f"25 tokens cost {compared:.2f} times 1; at most {BAR}"
    table = "\n".join([*lines, "", verdict])
    print(table)
    if given.record:
        facts = common.machine_facts()
        about = (
            f"{model.num_parameters():,} parameters, {model.config.num_layers} + "
            f"{model.config.num_decoder_layers} layers, V = {model.config.vocab_size:,}, of which "
            f"it proposes {vocabulary_entries(model):,}, batch {given.batch}, source "
            f"{given.source}, prefix {given.prefix}, {given.dtype}{' packed' * given.packed}, "
            f"{given.device}"
        )
        heading = (
            f"# The cost of a block\n\n`python benchmarks/bench_block_drafting.py`, {about}; "
            f"{facts['cpu']}, {facts['threads']} threads, {facts['time']}.\n"
        )
        common.write_record(common.RESULTS / given.record, facts, records, f"{heading}\n{table}\n")
    missed = compared is not None and compared > BAR
    return 1 if missed and not given.quick else 0


if __name__ == "__main__":
    sys.exit(main())
