"""What a distilled draft is worth: how often it and its target agree, where it has not learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import common
import torch

from pair.distilled.training import Conversation, batch_of, draft_laws, law_parts
from specdec_ext.models.draft_llama import DraftLlama


@torch.no_grad()
def measure(
    draft: DraftLlama, texts: Sequence[Conversation], device: torch.device
) -> list[dict[str, Any]]:
    """Compare laws on the target's answers, by the temperature at which they were drawn.

    Returns a record a temperature: ``alpha_0``, how often the likeliest tokens of both are the
    same; ``alpha_1``, the mean mass that both laws share at temperature 1 (a lower bound, see
    `law_parts`); ``known``, the mass that the target gives to tokens that the draft knows (likewise
    of those kept). Standard errors are over conversations.
    """
    records = []
    for temperature in sorted({text.temperature for text in texts}):
        own = [text for text in texts if text.temperature == temperature and len(text.probs)]
        values = torch.tensor([_agreement(draft, text, device) for text in own])
        means, errors = values.mean(0).tolist(), (values.std(0) / len(own) ** 0.5).tolist()
        names = ("alpha_0", "alpha_1", "known")
        record: dict[str, Any] = {"temperature": round(temperature, 4), "conversations": len(own)}
        record |= dict(zip(names, means, strict=True))
        record |= {f"{name}_se": error for name, error in zip(names, errors, strict=True)}
        records.append(record)
    return records


def _agreement(draft: DraftLlama, text: Conversation, device: torch.device) -> list[float]:
    batch = batch_of([text])
    batch = type(batch)(*(part.to(device) for part in batch))
    laws = draft_laws(draft, batch)
    likeliest = draft.draft_token_ids[laws[batch.answered].argmax(-1)]
    known = batch.probs * (draft.entries[batch.entries] < laws.shape[-1])
    shares = (likeliest == batch.entries[:, 0], law_parts(draft, batch, laws)[1], known.sum(-1))
    return [share.float().mean().item() for share in shares]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Format the records."""
    cells = [
        [
            f"{record['temperature']:g}",
            str(record["conversations"]),
            *(
                f"{record[n]:.3f} ({record[f'{n}_se']:.3f})"
                for n in ("alpha_0", "alpha_1", "known")
            ),
        ]
        for record in records
    ]
    head = ["answers drawn at T", "texts", "alpha at T = 0 (se)", "alpha at T = 1 (se)",
            "target's mass on known tokens (se)"]  # fmt: skip
    return common.markdown_table(head, cells)
