"""Drafters that pass on another law than they drew from: for negative controls of the law's tests.

They stand before a drafter's class: ``class Wrong(AnotherRow, HeadsDrafter)``.
"""


class AnotherMap:
    """Says of its laws that their entries are other tokens than were drawn."""

    def propose(self, *arguments, **named):
        draft = super().propose(*arguments, **named)
        ids = draft.token_ids
        return draft._replace(token_ids=None if ids is None else ids.roll(1))


class AnotherRow:
    """Passes on the row of the token behind."""

    def propose(self, *arguments, **named):
        draft = super().propose(*arguments, **named)
        return draft if draft.logits is None else draft._replace(logits=draft.logits.roll(1, 1))
