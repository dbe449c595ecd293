"""One model serves several threads at once: every job gives what it gives alone."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from generate_models import pair, prompts
from test_encoder_decoder import encoded, models, start

import specdec_ext
from specdec_ext import hf
from specdec_ext.decoding.drafters.early_exit import EarlyExitDrafter

THREADS, JOBS = 4, 12
NEW = 8


def read(name, job):
    """What an encoder reads in a job: its own, of a batch and of lengths of its own."""
    generator = torch.Generator().manual_seed(100 + job)
    batch = 1 + job % 3
    if name == "whisper":
        return {"input_features": torch.randn(batch, 8, 20, generator=generator).double()}
    lengths = 3 + torch.randint(6, (batch,), generator=generator)
    ids = torch.randint(3, 67, (batch, int(lengths.max())), generator=generator)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def options(job, batch):
    """Greedy and sampled jobs, with limits and draft lengths of their own."""
    limits = [NEW - b - job % 2 for b in range(batch)]
    sampled = {"temperature": 0.9, "seeds": job} if job % 3 == 2 else {}
    return {"max_new_tokens": limits, "gamma": 1 + job % 4, "eos_token_id": (), **sampled}


def encoded_jobs(name):
    """Jobs of one encoder-decoder: on what each encodes, on what all share, inside transformers."""
    target, draft = models(name)
    shared = encoded(target, **read(name, 2)), encoded(draft, **read(name, 2))

    def run(job):
        inputs = read(name, job)
        batch = len(next(iter(inputs.values())))
        if job % 4 == 1 and name != "whisper":
            ours = {"custom_generate": hf.generate_fn, "draft_model": draft, "gamma": 3}
            return target.generate(**inputs, **ours, max_new_tokens=NEW, do_sample=False)
        pair_of = shared if job % 4 == 2 else (encoded(target, **inputs), encoded(draft, **inputs))
        batch = len(pair_of[0].states)
        return specdec_ext.generate(*pair_of, start(batch), **options(job, batch)).sequences

    return run


def causal_jobs(name):
    """Jobs of one causal model: drafts by another, by its own first layer, in padded batches."""
    target, draft = pair(name)

    def run(job):
        ids, mask = prompts([3 + (job + b) % 5 for b in range(1 + job % 3)], seed=job)
        if job % 4 == 1:
            ours = {"custom_generate": hf.generate_fn, "draft_model": draft, "gamma": 3}
            return target.generate(
                ids, attention_mask=mask, **ours, max_new_tokens=NEW, do_sample=False
            )
        drafter = EarlyExitDrafter(target, 1) if job % 2 else draft
        return specdec_ext.generate(
            target, drafter, ids, attention_mask=mask, **options(job, len(ids))
        ).sequences

    return run


KINDS = {
    "bart": encoded_jobs, "t5": encoded_jobs, "whisper": encoded_jobs, "llama": causal_jobs,
    "gpt2": causal_jobs,
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", KINDS)
def test_one_model_in_several_threads(name):
    alone = list(map(KINDS[name](name), range(JOBS)))
    run = KINDS[name](name)  # a model of the same weights, of which nothing is known yet
    assert len({tuple(row) for rows in alone for row in rows.tolist()}) > JOBS
    begin = threading.Barrier(THREADS)

    def work(k):
        begin.wait()
        order = [(5 * k + j) % JOBS for j in range(JOBS)]
        return [(job, run(job)) for job in order]

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            found = [answer for answers in pool.map(work, range(THREADS)) for answer in answers]
    finally:
        sys.setswitchinterval(switch)
    assert len(found) == THREADS * JOBS
    wrong = [job for job, rows in found if not torch.equal(rows, alone[job])]
    assert not wrong
