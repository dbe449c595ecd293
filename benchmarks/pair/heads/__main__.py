r"""Train decoding heads for a target that stays as it is, and see what they are worth.

    python benchmarks/pair/heads train pair --kind medusa             # the shipped pair's target
    python benchmarks/pair/heads train translation --kind blockwise --heads 25   # of pair/seq2seq
    python benchmarks/pair/heads train FOLDER --shared --budget 20    # any causal model, 20 minutes
    python benchmarks/pair/heads train smollm2 --shared --vocabulary 8192 \
        --conversations build/distilled/smollm2/texts    # over the tokens that are likeliest there
    python benchmarks/pair/heads train smollm2 --kind eagle --vocabulary 8192 --unrolled 3 \
        --conversations build/distilled/smollm2/texts --bfloat16   # on what the target itself wrote
    python benchmarks/pair/heads evaluate pair          # all that were trained: tokens a call, time

`train` given again goes on where it was interrupted. Heads lie in build/heads/<target>/<kind>-<K>,
for ``MedusaHeads.from_pretrained`` and its like. Causal targets learn from the standard library's
sources (the shipped pair's text), or from conversations that they wrote (`pair/distilled texts`),
encoder-decoders from the pairs of their task; either way what is learned is the target's own law,
see `specdec_ext.models.heads_training`. ``--kind eagle`` (causal targets) is one layer over the
target's states, `specdec_ext.models.eagle`; K is then the length of the chains that `evaluate`
drafts.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import common  # noqa: E402

from pair.heads.evaluation import KINDS, WIDTHS, evaluate, table, trained_heads  # noqa: E402
from pair.heads.sources import Rows, Source, open_source  # noqa: E402
from pair.heads.training import Options, train  # noqa: E402
from pair.seq2seq.schedule import Pace  # noqa: E402
from specdec_ext.decoding import pack_linears  # noqa: E402
from specdec_ext.models.eagle import EagleHead, eagle_loss  # noqa: E402
from specdec_ext.models.heads_training import heads_loss  # noqa: E402

BUILD = HERE.parents[2] / "build"
TRAINING = "training.json"  # beside the weights: how they were trained


# Options of one kind of heads, which no other kind would heed.
OPTION_OF = {
    "layers": "medusa",
    "shared": "medusa",
    "units": "blockwise",
    "unrolled": "eagle",
    "law_weight": "eagle",
}


def work_of(given: argparse.Namespace) -> Path:
    """Return where all heads of the target lie."""
    return given.work / Path(given.target).name


def folder_of(given: argparse.Namespace) -> Path:
    """Return where the heads to train lie."""
    return work_of(given) / f"{given.kind}-{given.heads}"


def source_of(given: argparse.Namespace) -> Source:
    """Open the target and its texts."""
    if given.threads:
        torch.set_num_threads(given.threads)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return open_source(
        given.target, work_of(given), given.tasks, given.batch_tokens, given.seed, device,
        given.conversations, torch.bfloat16 if given.bfloat16 else torch.float32,
    )  # fmt: skip


def build_heads(given: argparse.Namespace, source: Source) -> Any:
    """Make fresh heads for the target; what they copy and share stays the target's."""
    changes: dict[str, Any] = {}
    if given.kind == "medusa":
        changes = {"shared_projection": given.shared, "num_layers": given.layers or 1}
    elif given.units:
        changes = {"intermediate_size": given.units}
    torch.manual_seed(given.seed)
    ids = frequent_tokens(source, given.vocabulary) if given.vocabulary is not None else None
    if given.kind == "eagle":
        head = EagleHead.from_target(source.target, ids).float().requires_grad_(True)
        head.layers.embed_tokens.requires_grad_(False)
        head.projection.requires_grad_(False)
        return head
    heads = KINDS[given.kind].from_target(
        source.target, given.heads, inputs=source.inputs, draft_token_ids=ids, **changes
    )
    heads.requires_grad_(True)
    if heads.projection is not None:
        heads.projection.requires_grad_(False)
    return heads


def frequent_tokens(source: Source, number: int) -> torch.Tensor:
    """Return the tokens that the target finds likeliest most often, as many as asked for."""
    if source.frequent is not None:
        return source.frequent(number)
    likeliest = torch.cat([source.rows(step).logits.argmax(-1).flatten() for step in range(32)])
    counts = torch.bincount(likeliest, minlength=source.rows(0).logits.shape[-1])
    return counts.argsort(descending=True, stable=True)[:number].sort().values


def loss_of(heads: Any, rows: Rows, **eagle: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the heads with the target on what it computed, in the dtype in which it did."""
    bfloat16 = rows.features.dtype == torch.bfloat16
    with torch.autocast(rows.tokens.device.type, torch.bfloat16, enabled=bfloat16):
        if isinstance(heads, EagleHead):
            return eagle_loss(heads, *rows, **eagle)
        return heads_loss(heads, rows.features, rows.logits, rows.mask)


def run_train(given: argparse.Namespace) -> int:
    """Train the heads and save them."""
    for name, kind in OPTION_OF.items():
        if getattr(given, name) not in (None, False) and given.kind != kind:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is for --kind {kind}, got --kind {given.kind}")
    eagle = {name: getattr(given, name) for name in ("unrolled", "law_weight")}
    eagle = {name: value for name, value in eagle.items() if value is not None}
    source = source_of(given)
    heads = build_heads(given, source)
    details = {**eagle, "conversations": str(given.conversations), "bfloat16": given.bfloat16}
    options = Options(
        given.target, given.kind, given.seed, given.batch_tokens, given.lr, details=str(details)
    )
    pace = Pace(given.steps, None if given.steps else 60.0 * given.budget)
    folder = folder_of(given)
    loss = partial(loss_of, **eagle)
    among = None if given.vocabulary is None else heads.draft_token_ids
    rows = partial(source.rows, among=among)
    report = train(heads, rows, loss, pace, options, folder / "training")
    heads.save_pretrained(folder)
    facts = {**common.machine_facts(), **asdict(report), "options": asdict(options)}
    (folder / TRAINING).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    losses = ", ".join(f"{loss:.3f}" for loss in report.parts)
    parts = "distance of states, nats" if given.kind == "eagle" else "nats by head"
    print(f"{folder}: {report.steps:,} steps, {report.seconds:.0f} s, {parts}: {losses}")
    return 0


def run_evaluate(given: argparse.Namespace) -> int:
    """Say what trained heads are worth on texts that training did not see."""
    source = source_of(given)
    folders = trained_heads(work_of(given))
    if given.only:
        folders = [folder for folder in folders if folder.name in given.only]
    if not folders or len(folders) < len(given.only):
        wanted = f"not all of {', '.join(given.only)}" if given.only else "no heads"
        raise FileNotFoundError(f"{work_of(given)} has {wanted}: run `train` first")
    if given.packed:
        pack_linears(source.target)
    records = evaluate(source, folders, given)
    shown = table(records)
    print(shown)
    if given.record:
        trained = {folder.name: json.loads((folder / TRAINING).read_text()) for folder in folders}
        text = f"{record_head(given, trained)}\n\n{shown}"
        common.write_record(
            given.record, {**common.machine_facts(), "trained": trained}, records, text
        )
    return int(any(record["wrong"] for record in records))


def record_head(given: argparse.Namespace, trained: dict[str, Any]) -> str:
    """Say of a record what was run, and what the heads had learned from."""
    lines = [
        f"# Decoding heads of {given.target}", "",
        f"{given.texts} texts that training did not see, {given.new_tokens} new tokens each, one at"
        f" a time and by turns, on {torch.get_num_threads()} threads"
        f"{', the target with packed weights' if given.packed else ''}. In brackets, standard"
        f" errors over the texts. Trees are of the widths {', '.join(map(str, WIDTHS))}.", "",
    ]  # fmt: skip
    for name, facts in trained.items():
        losses = ", ".join(f"{loss:.2f}" for loss in facts["parts"])
        most = facts["options"]["batch_tokens"]
        lines.append(
            f"- {name}: {facts['steps']:,} steps of up to {most} tokens in"
            f" {facts['seconds'] / 60:.0f} minutes, losses {losses}"
        )
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="train | evaluate")
    shared = argparse.ArgumentParser(add_help=False)
    add = shared.add_argument
    add("target", help="pair, a task of build/seq2seq, or the folder of a causal model")
    add("--seed", type=int, default=0)
    add("--batch-tokens", type=int, default=Options.batch_tokens, help="of a step")
    add("--work", type=Path, default=BUILD / "heads")
    add("--tasks", type=Path, default=BUILD / "seq2seq", help="what pair/seq2seq trained")
    add("--device", help="default: cuda where there is one")
    add("--threads", type=int, help="default: torch's own")
    add(
        "--conversations", type=Path, metavar="FOLDER",
        help="texts that a causal target wrote, of pair/distilled; default: the standard library",
    )  # fmt: skip
    add("--bfloat16", action="store_true", help="a causal target, and training, in bfloat16")

    command = commands.add_parser("train", parents=[shared])
    command.set_defaults(run=run_train)
    add = command.add_argument
    add("--kind", choices=KINDS, default="medusa")
    add("--heads", type=int, default=4, help="K, tokens beyond the target's own next one (4)")
    add("--budget", type=float, default=5.0, help="minutes (5)")
    add("--steps", type=int, help="steps in place of minutes: repeatable to the bit")
    add("--lr", type=float, default=Options.peak_lr, help="at its height")
    add("--layers", type=int, help="residual layers of a Medusa head (1)")
    add("--shared", action="store_true", help="one projection for all Medusa heads: the target's")
    add("--vocabulary", type=int, help="tokens that the heads can propose (all)")
    add("--units", type=int, help="of a blockwise head's hidden layer (2048)")
    add("--unrolled", type=int, help="places of a round an EAGLE-style head learns (1)")
    add("--law-weight", type=float, help="beside the distance of its states (.1)")

    command = commands.add_parser("evaluate", parents=[shared])
    command.set_defaults(run=run_evaluate)
    add = command.add_argument
    add("--texts", type=int, default=16, help="continued (16)")
    add("--new-tokens", type=int, default=64, help="of each (64)")
    add("--only", nargs="+", default=[], metavar="KIND-K", help="such as medusa-4; default: all")
    add("--packed", action="store_true", help="pack the target's weights, see pack_linears")
    add("--record", type=Path, help="stem of the files that keep the figures")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    given = parse_arguments(arguments)
    try:
        return given.run(given)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
