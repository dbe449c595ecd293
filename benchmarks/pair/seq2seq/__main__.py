"""Train encoder-decoders of four sizes on a task of benchmarks/tasks, and measure them.

    python benchmarks/tasks                                        # first: the data
    python benchmarks/pair/seq2seq prepare translation             # one BPE, all splits as tokens
    python benchmarks/pair/seq2seq train translation --jobs 2 --compile  # 85 minutes on 2 cores
    python benchmarks/pair/seq2seq train translation --budget full # 40 minutes on one H100
    python benchmarks/pair/seq2seq evaluate translation            # measures, and gates
    python benchmarks/pair/seq2seq distill translation --loss tv   # a draft taught by the target
    python benchmarks/pair/seq2seq drafter translation             # a Spec-Drafter for the target

The task is a folder of build/tasks; what is made of it lies in build/seq2seq/<task>. `train` given
again goes on where it was interrupted, and a size that is trained is not trained again. Times are
those of an idle machine. Sizes train one after another, each for its share of the budget, or so
many at a time as `--jobs` says, each in a process with its part of the cores: on a CPU two
trainings on a core each learn more than one on two cores.

`evaluate` measures the losses and drafts' acceptance on the test split, and BLEU and chrF of greedy
texts; its exit code is 1 where a gate is missed, and the tables of benchmarks/tables would then say
little.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import T5ForConditionalGeneration

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import common  # noqa: E402

from pair.data import save_atomically  # noqa: E402
from pair.seq2seq import evaluation  # noqa: E402
from pair.seq2seq.block_drafter import (  # noqa: E402
    KIND,
    DrafterOptions,
    build_drafter,
    drafting_loss,
    frequent_tokens,
    load_drafter,
    tokens_per_call,
)
from pair.seq2seq.data import Pairs, prepare  # noqa: E402
from pair.seq2seq.distillation import distilled_name, rewrite  # noqa: E402
from pair.seq2seq.models import load_family, save_model  # noqa: E402
from pair.seq2seq.runs import (  # noqa: E402
    device_of,
    facts_of,
    options_of,
    say,
    train_one,
    train_size,
)
from pair.seq2seq.schedule import BUDGETS, Pace, budget_of, seconds_of  # noqa: E402
from pair.seq2seq.sizes import LARGEST, SIZES, TIME_SHARES  # noqa: E402
from pair.seq2seq.training import KL, LABELS, LOSSES, Options, train  # noqa: E402
from specdec_ext.models.spec_drafter import SpecDrafter  # noqa: E402

BUILD = HERE.parents[2] / "build"

# A trained draft is trained further with smaller steps than from scratch.
DISTILLATION_LR = 0.3

# Of a Spec-Drafter that does not begin with the target's encoder.
ENCODER_LAYERS = 12
DECODER_LAYERS, BLOCK = 2, 25

# What of the target a Spec-Drafter can begin with.
ENCODER, BOTH = "encoder", "encoder and decoder"


def run_prepare(given: argparse.Namespace) -> int:
    """Write the tokens of a task."""
    given.work.mkdir(parents=True, exist_ok=True)
    facts = prepare(given.tasks / given.task, given.work, given.permissive, given.reverse)
    print(json.dumps(facts, indent=1))
    return 0


def run_train(given: argparse.Namespace) -> int:
    """Train the sizes, the largest first, so many of them at a time."""
    budget = budget_of(given.budget)
    shares = {name: TIME_SHARES[name] for name in given.sizes}
    seconds = seconds_of(budget.minutes, shares, given.jobs)
    if given.jobs == 1:
        for name in given.sizes:
            train_size(given, name, seconds[name])
        return 0
    # Fresh processes: one that has used OpenMP must not be forked. They know nothing of this file.
    sent = argparse.Namespace(
        **{name: value for name, value in vars(given).items() if name != "run"}
    )
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(train_size, sent, name, seconds[name]) for name in given.sizes]
        for training in waiting:
            training.result()
    return 0


def run_distill(given: argparse.Namespace) -> int:
    """Train a draft further, from its weights on, on the target's laws or texts."""
    device = device_of(given)
    family = load_family(given.work)
    teacher = family.models[family.largest].to(device)
    if given.size not in family.models or given.size == family.largest:
        drafts = ", ".join(list(family.models)[:-1])
        raise ValueError(f"the draft must be one of {drafts}, got {given.size!r}")
    budget = budget_of(given.budget)
    options = replace(
        options_of(given, budget), loss=given.loss, start=given.size, lr_scale=DISTILLATION_LR
    )
    pairs = family.splits["train"]
    if given.written:
        pairs = load_written(given, teacher, pairs)
    name = distilled_name(given.size, given.loss, bool(given.written))
    pace = Pace(seconds=60.0 * budget.minutes)
    teaching = None if given.loss == LABELS else teacher
    train_one(given, name, family.models[given.size], pairs, pace, options, device, teaching)
    return 0


def load_written(
    given: argparse.Namespace, teacher: T5ForConditionalGeneration, pairs: Pairs
) -> Pairs:
    """Return pairs with the teacher's own targets, which are kept for other drafts."""
    how = "" if given.beams == 1 else f"-beam{given.beams}"
    path = given.work / f"written-{given.written}{how}.pt"
    if not path.exists():
        save_atomically(vars(rewrite(teacher, pairs, given.written, given.beams)), path)
    return Pairs(**torch.load(path))


def begun_drafter(
    given: argparse.Namespace,
    target: T5ForConditionalGeneration,
    options: DrafterOptions,
    pairs: Pairs,
) -> SpecDrafter:
    """Return what a training begins with: a drafter, with the commonest tokens of the texts."""
    model = whole_drafter(given, target, options)
    if given.vocabulary is None:
        return model
    return model.with_vocabulary(frequent_tokens(pairs, given.vocabulary))


def whole_drafter(
    given: argparse.Namespace, target: T5ForConditionalGeneration, options: DrafterOptions
) -> SpecDrafter:
    """Return a new drafter, or one that goes on from another's weights."""
    shape = ("block", "encoder_layers", "decoder_layers", "from_target")
    if given.start:
        if wrong := [name for name in shape if getattr(given, name)]:
            told = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
            raise ValueError(f"--start goes on from a drafter as it is: leave out {told}")
        return load_drafter(given.work, given.start, dropout_rate=options.dropout)
    layers = given.encoder_layers
    if layers is None:
        layers = target.config.num_layers if given.from_target else ENCODER_LAYERS
    model = build_drafter(
        target,
        block=given.block or BLOCK,
        encoder_layers=layers,
        decoder_layers=given.decoder_layers or DECODER_LAYERS,
        dropout=options.dropout,
        seed=options.seed,
        from_target=bool(given.from_target),
    )
    if given.from_target == BOTH:
        model.init_decoder_from(target)
    return model


def run_drafter(given: argparse.Namespace) -> int:
    """Train a Spec-Drafter for the largest model, and say how many tokens a call it brings."""
    device = device_of(given)
    family = load_family(given.work)
    target = family.models[family.largest].to(device)
    budget = budget_of(given.budget)
    start = f"{family.largest}'s {given.from_target}" if given.from_target else ""
    options = DrafterOptions(
        **asdict(
            replace(options_of(given, budget), start=given.start or start, lr_scale=given.lr_scale)
        ),
        prefixes=given.prefixes,
        slot_decay=given.slot_decay,
        prefix_weight=given.prefix_weight,
        vocabulary=given.vocabulary,
        written=given.written,
        beams=given.beams,
    )
    pairs = family.splits["train"]
    if given.written:
        pairs = load_written(given, target, pairs)
    model = begun_drafter(given, target, options, pairs)
    report = train(
        given.name,
        model,
        pairs,
        Pace(seconds=60.0 * budget.minutes),
        options,
        given.work / "training" / KIND / given.name,
        device,
        objective=partial(drafting_loss, options=options),
    )
    say(given.name, model, report)
    sentences = family.splits["test"].some(given.sentences)
    tokens = {
        rule: tokens_per_call(target, model, sentences, rule) for rule in ("greedy", "top_beta")
    }
    print(", ".join(f"Tok. of {rule} {found:.2f}" for rule, found in tokens.items()))
    facts = {
        **facts_of(given, model, report, options, device),
        "target": family.largest,
        "sentences": given.sentences,
        "tokens_per_call": tokens,
    }
    save_model(model.cpu(), given.work, given.name, facts, KIND)
    return 0


def run_evaluate(given: argparse.Namespace) -> int:
    """Measure the trained sizes and say which gates they pass."""
    if given.threads:
        torch.set_num_threads(given.threads)
    family = load_family(given.work)
    records = evaluation.measure(family, given.sentences, given.no_repeat_ngram)
    found = evaluation.gates(records)
    text = evaluation.table(records, found)
    print(text)
    if given.record:
        facts = {**common.machine_facts(), "trained": family.facts}
        command = f"python benchmarks/pair/seq2seq evaluate {given.task}"
        command += f" --sentences {given.sentences}"
        if given.no_repeat_ngram:
            command += f" --no-repeat-ngram {given.no_repeat_ngram}"
        heading = (
            f"# Encoder-decoders of {given.task}\n\n`{command}`, {facts['cpu']}, "
            f"{facts['threads']} threads, {facts['time']}.\n\n{TRAINED}\n"
        )
        rows = "\n".join(trained_line(name, family.facts[name]) for name in family.models)
        stem = common.RESULTS / given.record
        common.write_record(stem, facts, records, f"{heading}{rows}\n\n{text}")
    return 0 if all(gate.passed for gate in found) else 1


TRAINED = (
    "| model | budget | begun with | steps | epochs | part of the way spent copying | seconds "
    "| threads | tokens a step | made |\n|---|---|---|---|---|---|---|---|---|---|"
)


def trained_line(name: str, facts: dict[str, Any]) -> str:
    """Return how a model was trained as a line of the table `TRAINED`."""
    cells = (
        name, facts["budget"], facts["options"]["start"] or "nothing",
        f"{facts['steps']:,}", f"{facts['epochs']:.2f}",
        facts["options"]["copying"], f"{facts['seconds']:.0f}", facts["threads"],
        facts["options"]["batch_tokens"], facts["made"],
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def add_writing(command: argparse.ArgumentParser, beams: int) -> None:
    """Add the arguments about texts that the target writes."""
    add = command.add_argument
    add("--written", type=int, default=0, help="of so many sources the target's own texts (0)")
    add("--beams", type=int, default=beams, help=f"of the search that writes them ({beams})")


def layers(text: str) -> tuple[int, int]:
    """Read the layers of an encoder and of a decoder, such as ``12+2``."""
    numbers = text.split("+")
    if len(numbers) != 2 or not all(number.isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"expected two numbers from 1 up, as 12+2; got {text!r}")
    return int(numbers[0]), int(numbers[1])


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(
        required=True, metavar="prepare | train | distill | drafter | evaluate"
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("task", help="a folder of build/tasks, for instance translation")
    shared.add_argument("--work", type=Path, help="folder (build/seq2seq/<task>)")

    command = commands.add_parser("prepare", parents=[shared])
    command.set_defaults(run=run_prepare)
    add = command.add_argument
    add("--tasks", type=Path, default=BUILD / "tasks", help="what benchmarks/tasks wrote")
    add("--permissive", action="store_true", help="only texts whose weights could be shipped")
    add("--reverse", action="store_true",
        help="turn all pairs around, in a folder of its own, <task>-reverse")  # fmt: skip

    training = argparse.ArgumentParser(add_help=False)
    add = training.add_argument
    add("--seed", type=int, default=0)
    add("--dropout", type=float, help="(the budget's)")
    add("--batch-tokens", type=int, help="of a step (the budget's)")
    add("--bfloat16", action=argparse.BooleanOptionalAction, help="autocast (the budget's)")
    add("--compile", action="store_true", help="by torch.compile, for trainings of many minutes")
    add("--device", help="default: cuda where there is one")
    add("--threads", type=int, help="of a training; default: torch's own, or a part of the cores")

    command = commands.add_parser("train", parents=[shared, training])
    command.set_defaults(run=run_train)
    add = command.add_argument
    add("--budget", default="small", help=f"{', '.join(BUDGETS)} or minutes for all sizes (small)")
    add("--copying", type=float,
        help="first part of the way, in which random tokens are copied (a size's own)")  # fmt: skip
    add("--jobs", type=int, default=1, help="sizes trained at a time (1)")
    add("--start", type=Path, help="a work folder with the same tokenizer, whose weights go on")
    add("--sizes", default=",".join(SIZES), help="with commas between (all)")
    add("--layers", type=layers, metavar="ENCODER+DECODER",
        help=f"of {LARGEST} in place of its own, for another target in another folder")  # fmt: skip

    command = commands.add_parser("distill", parents=[shared, training])
    command.set_defaults(run=run_distill)
    add = command.add_argument
    add("--size", default=next(iter(SIZES)), help="whose weights it begins with (the smallest)")
    add("--loss", choices=LOSSES, default=KL, help=f"({KL})")
    add_writing(command, beams=1)
    add("--budget", default="5", help="minutes (5)")

    command = commands.add_parser("drafter", parents=[shared, training])
    command.set_defaults(run=run_drafter)
    add_writing(command, beams=5)
    add = command.add_argument
    add("--name", default="spec-drafter", help="of the drafter (spec-drafter)")
    add("--start", metavar="DRAFTER", help="a trained one that goes on learning under this --name")
    add("--block", type=int, help=f"k, the tokens of a block ({BLOCK})")
    add("--encoder-layers", type=int,
        help=f"({ENCODER_LAYERS}, or as many as the target has)")  # fmt: skip
    add("--decoder-layers", type=int, help=f"({DECODER_LAYERS})")
    add("--vocabulary", type=int, help="the commonest tokens, which alone it can propose (all)")
    add("--from-target", nargs="?", const=ENCODER, choices=(ENCODER, BOTH),
        help=f"begin with the target's {ENCODER}, or layers of its decoder as well")  # fmt: skip
    add("--lr-scale", type=float, default=Options.lr_scale,
        help="of the learning rate; less where little is new (1)")  # fmt: skip
    add("--prefixes", type=int, default=3,
        help="of a text in a step, each with a block behind it (3; 1 in the paper)")  # fmt: skip
    add("--slot-decay", type=float, default=DrafterOptions.slot_decay,
        help="what a slot counts in the loss beside the one before (1, the paper's)")  # fmt: skip
    add("--prefix-weight", type=float, default=DrafterOptions.prefix_weight,
        help="of the prefix's own tokens in the loss (0, the paper's)")  # fmt: skip
    add("--copying", type=float, default=Options.copying,
        help="the first part of the way, in which random tokens are copied")  # fmt: skip
    add("--budget", default="30", help="minutes (30)")
    add("--sentences", type=int, default=50, help="of the test split, for tokens a call (50)")

    command = commands.add_parser("evaluate", parents=[shared])
    command.set_defaults(run=run_evaluate)
    add = command.add_argument
    add("--sentences", type=int, default=400, help="translated for BLEU and chrF (400)")
    add("--no-repeat-ngram", type=int, default=0, metavar="N",
        help="beams find texts without N tokens in a row twice (0: any; summaries: 3)")  # fmt: skip
    add("--threads", type=int, help="default: torch's own")
    add("--record", help="name of a record in benchmarks/results, without suffix")
    given = parser.parse_args(arguments)
    if given.work is None:
        is_reverse = given.run is run_prepare and given.reverse
        given.work = BUILD / "seq2seq" / (f"{given.task}-reverse" if is_reverse else given.task)
    if given.run is run_evaluate and given.no_repeat_ngram < 0:
        parser.error(f"--no-repeat-ngram must be at least 0, got {given.no_repeat_ngram}")
    if given.run is run_train:
        given.sizes = given.sizes.split(",")
        if unknown := [name for name in given.sizes if name not in SIZES]:
            parser.error(f"no such size: {', '.join(unknown)}; there are {', '.join(SIZES)}")
        if given.layers is not None and LARGEST not in given.sizes:
            parser.error(f"--layers are those of {LARGEST}, which --sizes leaves out")
        given.sizes.sort(key=list(SIZES).index, reverse=True)
    return given


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
