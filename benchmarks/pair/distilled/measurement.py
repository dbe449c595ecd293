"""What a distilled draft is worth: how often it and its target agree, where it has not learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import common
import torch

from pair.distilled.training import Batch, Conversation, batch_of, draft_laws, law_parts
from specdec_ext.models.draft_llama import DraftLlama

NAMES = ("alpha_0", "alpha_1", "known")


@torch.no_grad()
def measure(
    draft: DraftLlama, texts: Sequence[Conversation], device: torch.device
) -> list[dict[str, Any]]:
    """Compare laws on the target's answers, by the temperature at which they were drawn.

    First answers and those to a second turn, which refers to the first, are told apart. A record
    has ``alpha_0``, how often the likeliest tokens of both are the same; ``alpha_1``, the mean mass
    that both laws share at temperature 1 (a lower bound, see `law_parts`); ``known``, the mass that
    the target gives to tokens that the draft knows (likewise of those kept). Standard errors are
    over answers.
    """
    found: dict[tuple[float, int], list[list[float]]] = {}
    for text in texts:
        for turn, shares in enumerate(_agreement(draft, text, device)):
            found.setdefault((text.temperature, turn + 1), []).append(shares)
    records = []
    for (temperature, turn), shares in sorted(found.items()):
        values = torch.tensor(shares)
        means = values.mean(0).tolist()
        errors = (values.std(0, correction=min(1, len(shares) - 1)) / len(shares) ** 0.5).tolist()
        record: dict[str, Any] = {"temperature": round(temperature, 4), "turn": turn}
        record |= {"answers": len(shares)} | dict(zip(NAMES, means, strict=True))
        records.append(record | {f"{n}_se": e for n, e in zip(NAMES, errors, strict=True)})
    return records


def _agreement(draft: DraftLlama, text: Conversation, device: torch.device) -> list[list[float]]:
    """Return the shares of each answer."""
    batch = Batch(*(part.to(device) for part in batch_of([text])))
    laws = draft_laws(draft, batch)
    likeliest = draft.draft_token_ids[laws.argmax(-1)]
    known = batch.probs * (draft.entries[batch.entries] < laws.shape[-1])
    same = (likeliest == batch.entries[:, 0]).float()
    shares = torch.stack([same, law_parts(draft, batch, laws)[1], known.sum(-1)], 1).cpu()
    # An answer is a run of tokens whose laws are known.
    ends = (text.answered.int().diff(append=torch.zeros(1, dtype=torch.int32)) == -1).nonzero()
    lengths = text.answered.cumsum(0)[ends[:, 0]].diff(prepend=torch.zeros(1, dtype=torch.int64))
    return [own.mean(0).tolist() for own in shares.split(lengths.tolist())]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Format the records."""
    cells = [
        [
            f"{record['temperature']:g}",
            str(record["turn"]),
            str(record["answers"]),
            *(f"{record[n]:.3f} ({record[f'{n}_se']:.3f})" for n in NAMES),
        ]
        for record in records
    ]
    head = ["answers drawn at T", "turn", "answers", "alpha at T = 0 (se)", "alpha at T = 1 (se)",
            "target's mass on known tokens (se)"]  # fmt: skip
    return common.markdown_table(head, cells)
