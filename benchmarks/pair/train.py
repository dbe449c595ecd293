"""Train the target and draft models that ship with specdec_ext.

Both are Hugging Face ``LlamaForCausalLM`` models over one 2,048-entry byte-level BPE, trained on
the sources of the running Python's standard library. The draft is distilled from the target with a
loss that contains the total variation distance itself: 1 - TV is the acceptance rate.

    python benchmarks/pair/train.py                  # everything; run it again to resume
    python benchmarks/pair/train.py --evaluate-only  # measure the exported pair, rewrite its card

Every batch is a function of (seed, step) alone and nothing depends on the clock, so that an
interrupted run ends where an uninterrupted one does. The learning rate is constant until the last
``--target-decay-share`` of the steps: until then ``--target-steps`` may be changed on resuming.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pair.data import prepare_data  # noqa: E402
from pair.measurement import (  # noqa: E402
    acceptance_mass,
    evaluate,
    export_pair,
    plain_acceptance_mass,
    training_facts,
)
from pair.training import train_draft, train_target  # noqa: E402

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--work-dir", type=Path, default=REPOSITORY / "build/train_pair", help="checkpoints")
    add("--output-dir", type=Path, default=HERE / "package/specdec_ext_pair/stdlib-pair")
    add("--evaluate-only", action="store_true", help="measure the exported pair, rewrite its card")
    add("--plain-alpha", action="store_true", help="measure alpha without the built operators")
    add("--stop-after", choices=("data", "target"), help="leave out what follows")
    add("--seed", type=int, default=0)
    add("--device", type=torch.device, default=None, help="default: cuda where there is one")
    add("--threads", type=int, default=None, help="default: torch's own")
    add("--target-steps", type=int, default=700)
    add("--draft-text-steps", type=int, default=5000)
    add("--draft-steps", type=int, default=1800)
    add("--batch-tokens", type=int, default=4096, help="tokens a step")
    add("--short-length", type=int, default=256, help="crop length in the first steps")
    add("--long-share", type=float, default=0.15, help="last share of the steps, at full context")
    add("--test-share", type=float, default=0.25, help="share of the crops that are test code")
    add("--muon-lr", type=float, default=0.02)
    add("--adam-lr", type=float, default=2e-3)
    add("--weight-decay", type=float, default=0.05)
    add("--warmup-steps", type=int, default=40)
    add("--target-decay-share", type=float, default=0.25)
    add("--draft-decay-share", type=float, default=0.4)
    add("--final-kl", type=float, default=0.02, help="weight of KL at the end of distillation")
    add("--checkpoint-steps", type=int, default=100)
    args = parser.parse_args()
    if args.device is None:
        args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return args


def main() -> None:
    """Run the stages that are asked for."""
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    # Read by cuBLAS when it starts; without it, deterministic algorithms are refused on GPUs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    mass = plain_acceptance_mass if args.plain_alpha else acceptance_mass
    if args.evaluate_only:
        evaluate(args.output_dir, mass)
        return
    args.work_dir.mkdir(parents=True, exist_ok=True)
    (args.work_dir / "pid").write_text(f"{os.getpid()}\n")
    tokenizer, data = prepare_data(args)
    if args.stop_after == "data":
        print(f"{data.library_tokens} library, {len(data.train)} training tokens")
        print(f"{len(data.held_out)} held-out tokens, {data.held_out_bytes} bytes")
        return
    target = train_target(tokenizer, data, args)
    if args.stop_after == "target":
        return
    draft = train_draft(target, tokenizer, data, args)
    facts = training_facts(target, draft, data, args)
    export_pair(target, draft, tokenizer, facts, args.output_dir)
    evaluate(args.output_dir, mass)


if __name__ == "__main__":
    main()
