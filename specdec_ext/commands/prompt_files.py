"""Prompts out of files: texts, and conversations for a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from .frame import first_line

__all__ = ["HELP", "Given", "read_prompts"]

#: Of the option that names such files.
HELP = (
    "texts to complete: a YAML or JSON list of strings or of prompts with names "
    "(docs/commands.md), else one a line"
)
Messages = list[dict[str, str]]


class Given(NamedTuple):
    """A prompt as a file gives it.

    Attributes
    ----------
    name : str
        What it is called.
    content : str or list of dict
        A text, or the messages of a conversation, each with ``role`` and ``content``.
    """

    name: str
    content: str | Messages

    @property
    def text(self) -> str:
        """The text, or what the last message says."""
        return self.content if isinstance(self.content, str) else self.content[-1]["content"]

    def messages(self) -> Messages:
        """Give the conversation; a text is what the user says."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        return self.content


def read_prompts(*paths: Path) -> list[Given]:
    r"""Read prompts; of several files the first prompt of each, then the second ones, and so on.

    Parameters
    ----------
    *paths : Path
        ``.json``, ``.yaml`` or ``.yml``: a list whose items are texts, or mappings with a
        ``name``, if wanted, and either ``content``, a text, or ``messages``, a conversation. Other
        files: one text a line.

    Returns
    -------
    list of Given
        Texts are without white space at their ends where they come from YAML or JSON mappings.

    Raises
    ------
    ValueError
        A YAML or JSON file holds something else.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
    ...     _ = file.write("- Hello!\n- name: thanks\n  content: Thank you!\n")
    ...     file.flush()
    ...     [(prompt.name, prompt.text) for prompt in read_prompts(Path(file.name))]
    [('prompt 1', 'Hello!'), ('thanks', 'Thank you!')]
    """
    turns = zip_longest(*(_read(path) for path in paths))
    return [given for given in chain.from_iterable(turns) if given is not None]


def _read(path: Path) -> list[Given]:
    text = path.read_text(encoding="utf-8")
    if path.suffix not in (".json", ".yaml", ".yml"):
        items: Any = [line for line in text.splitlines() if line.strip()]
    else:
        try:
            items = json.loads(text) if path.suffix == ".json" else _yaml(text)
        except ValueError as error:
            raise ValueError(f"cannot read {path}: {first_line(error)}") from error
    found = items if isinstance(items, list) else [items]
    prompts = [_prompt(item, f"prompt {n}") for n, item in enumerate(found, start=1)]
    if None in prompts:
        raise ValueError(
            f"{path} must hold a list of texts that are not empty, or of mappings with content (a "
            "text) or messages (mappings with role and content)"
        )
    return [prompt for prompt in prompts if prompt is not None]


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("needs PyYAML to read YAML: pip install 'specdec_ext[hf]'") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", ";")) from error


def _prompt(item: Any, name: str) -> Given | None:
    """Read an item of a list; None: it is no prompt."""
    if isinstance(item, str):
        return Given(name, item) if item else None
    if not isinstance(item, dict) or ("content" in item) == ("messages" in item):
        return None
    name = str(item.get("name", name))
    if "content" in item:
        text = _text(item["content"])
        return None if text is None else Given(name, text)
    messages = _conversation(item["messages"])
    return None if messages is None else Given(name, messages)


def _conversation(messages: Any) -> Messages | None:
    if not isinstance(messages, Sequence) or not messages:
        return None
    found: Messages = []
    for message in messages:
        text = _text(message.get("content")) if isinstance(message, dict) else None
        role = message.get("role") if text is not None else None
        if text is None or not isinstance(role, str):
            return None
        found.append({"role": role, "content": text})
    return found


def _text(value: Any) -> str | None:
    return value.strip() or None if isinstance(value, str) else None
