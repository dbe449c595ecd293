"""The two models of a command line, their tokenizer, and texts to complete."""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import fetch
from .frame import check_device, first_line
from .prompt_files import Given
from .tokenizers import difference, has_tokenizer

__all__ = [
    "Pair",
    "Prompt",
    "as_prompt",
    "find_pair",
    "find_prompts",
    "left_padded",
    "load_given",
    "load_named",
    "load_pair",
    "size_of",
]

#: Where the package specdec_ext_pair lies in a checkout.
IN_A_CHECKOUT = Path(__file__).parents[2] / "benchmarks" / "pair" / "package" / "specdec_ext_pair"
GRAPHS = 64  # of a compiled draft
PROMPT_TOKENS = 160
PROMPTS = 8


@dataclass
class Pair:
    """Two models and their tokenizer.

    Attributes
    ----------
    target, draft : torch.nn.Module
        The models. None in place of a draft: heads or copies of the text draft.
    tokenizer : PreTrainedTokenizerBase
        The target's.
    held_out : list of str
        Modules of the standard library whose text the models have not learned.
    draft_tokenizer : PreTrainedTokenizerBase or None
        Of the draft's checkpoint, where it has one of its own.
    heads : torch.nn.Module or None
        Decoding heads that draft over the target's hidden states.
    """

    target: Any
    draft: Any
    tokenizer: Any
    held_out: list[str]
    draft_tokenizer: Any = None
    heads: Any = None

    @property
    def mismatch(self) -> str | None:
        """What is wrong with the draft's tokenizer, if it has one that is not the target's."""
        if self.draft_tokenizer is None:
            return None
        return difference(self.tokenizer, self.draft_tokenizer)

    @property
    def drafter(self) -> Any:
        """What drafts: the draft, heads, or copies of the text where a target came alone."""
        from ..decoding import SuffixDrafter

        if self.heads is not None:
            return self.heads.make_drafter()
        return SuffixDrafter() if self.draft is None else self.draft

    @property
    def has_draft(self) -> bool:
        """Whether a model or heads draft, not copies of the text."""
        return self.draft is not None or self.heads is not None

    @property
    def drafts_with(self) -> str:
        """What drafts, for a reader."""
        if self.has_draft:
            return size_of(self.draft if self.heads is None else self.heads)
        return "SuffixDrafter(), copies of the text"

    @property
    def device(self) -> torch.device:
        """Where the target is."""
        device: torch.device = self.target.device
        return device


class Prompt(NamedTuple):
    """A text to complete."""

    name: str
    text: str
    ids: Tensor  # [1, P]


def size_of(model: Any) -> str:
    """Say how large a model is, or of which kind decoding heads are."""
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    if hasattr(model, "make_drafter"):
        shape = type(model).__name__
    else:
        config = model.config.get_text_config()
        layers = "layer" if config.num_hidden_layers == 1 else "layers"
        shape = f"{config.num_hidden_layers} {layers} x {config.hidden_size}"
    return f"{shape}, {millions:,.1f} M parameters"


def left_padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Put token rows ``[P_b]`` into a batch: ids and attention mask, ``[B, P]`` int64."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64, device=rows[0].device)
    mask = torch.zeros_like(ids)
    for b, row in enumerate(rows):
        ids[b, width - len(row) :] = row
        mask[b, width - len(row) :] = 1
    return ids, mask


def find_draft(target: str) -> Path:
    """Find the draft that specdec-ext-pair has for a model that `fetch` gets, see `fetch.MODELS`.

    Parameters
    ----------
    target : str
        The model's name.

    Returns
    -------
    Path
        A folder with the draft and its card.

    Raises
    ------
    ImportError
        This is no checkout, and the package specdec-ext-pair is not installed.
    ValueError
        It has none for this model.
    """
    draft = fetch.MODELS[target].draft
    if draft is None:
        raise ValueError(f"specdec-ext-pair has no draft for {target}")
    return find_pair().parent / draft


def find_pair() -> Path:
    """Find the pair of models that the demo runs: the checkout's, else the installed package's.

    Returns
    -------
    Path
        A folder with ``target``, ``draft``, ``tokenizer`` and ``pair.json``.

    Raises
    ------
    ImportError
        This is no checkout, and the package specdec-ext-pair is not installed.

    Examples
    --------
    >>> from specdec_ext.commands.pair import find_pair
    >>> sorted(path.name for path in find_pair().iterdir() if path.is_dir())
    ['draft', 'target', 'tokenizer']
    """
    in_a_checkout = IN_A_CHECKOUT / "stdlib-pair"
    if in_a_checkout.is_dir():
        return in_a_checkout
    try:
        from specdec_ext_pair import PAIR
    except ImportError as error:
        raise ImportError(
            "the demo's models are a package of their own, and it is not installed: pip install "
            "specdec-ext-pair (from a checkout: pip install ./benchmarks/pair/package), or give "
            "--target and --draft"
        ) from error
    pair: Path = PAIR
    return pair


def load_pair(
    target_path: str | None = None,
    draft_path: str | None = None,
    device: str = "cpu",
    needs_draft: bool = True,
    dtype: str | None = None,
    packed: bool = False,
    compiled: bool = False,
) -> Pair:
    """Load two checkpoints over the same tokens; those of `find_pair` where none are named.

    ``needs_draft``: there must be a draft model; otherwise decoding heads do as well, or nothing
    but a target. ``dtype``: what the models compute in, a name of torch's; None: float32 on CPUs,
    elsewhere what the checkpoints say. ``packed``: the target's weights, by `pack_linears`, and
    the queries of its ``sdpa`` attention by `group_queries`. ``compiled``: the draft model, by
    `torch.compile`, once for all lengths; the process then keeps up to `GRAPHS` graphs a function.
    """
    named = target_path is not None, draft_path is not None
    if named == (False, True) or (named == (True, False) and needs_draft):
        raise ValueError("--target and --draft go together")
    target, draft = _checkpoints(target_path, draft_path)
    try:
        import transformers
    except ImportError as error:
        raise ImportError("needs transformers: pip install 'specdec_ext[hf]'") from error
    # Kinds of drafts that transformers knows when these are imported.
    from ..models import draft_llama, eagle, heads  # noqa: F401

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Half precision is slow on many CPUs, and greedy choices then tie.
    whole = target_path is None or torch.device(device).type == "cpu"
    kind = dtype or ("float32" if whole else "auto")

    def model(folder: Path, auto: Any = transformers.AutoModelForCausalLM) -> Any:
        found: Any = auto.from_pretrained(folder, dtype=kind, local_files_only=True)
        return found.eval().to(device)

    def tokenizer(folder: Path) -> Any:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)

    beside, card = target.parent / "tokenizer", target.parent / "pair.json"
    read = _loaded(lambda path: json.loads(path.read_text()), card) if card.is_file() else None
    heads_path = draft if draft and _loaded(_are_heads, draft) else None
    if heads_path and needs_draft:
        raise ValueError(f"--draft must be a language model here, got decoding heads in {draft}")
    pair = Pair(
        _loaded(model, target),
        _loaded(model, draft) if draft and not heads_path else None,
        _loaded(tokenizer, beside if beside.is_dir() else target),
        _find(read, "held_out_modules") or ["textwrap", "heapq", "calendar", "fractions"],
        _loaded(tokenizer, draft) if draft and has_tokenizer(draft) else None,
        _loaded(partial(model, auto=transformers.AutoModel), heads_path) if heads_path else None,
    )
    if packed:
        from ..decoding import group_queries, pack_linears

        pack_linears(pair.target)
        if getattr(pair.target.config, "_attn_implementation", None) == "sdpa":
            group_queries(pair.target)
    if compiled:
        if pair.draft is None:
            raise ValueError("--compile-draft needs a draft model (--draft)")
        # Trees, and requests of a batch that end one by one, need more graphs than torch's 8.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
        pair.draft.compile(dynamic=True)
    return pair


def _checkpoints(target_path: str | None, draft_path: str | None) -> tuple[Path, Path | None]:
    """Find the folders of a target and a draft, which must be there."""
    draft: Path | None
    if target_path is None:
        target, draft = find_pair() / "target", find_pair() / "draft"
    else:
        target = checkpoint(target_path)
        draft = None if draft_path is None else _draft_checkpoint(draft_path)
    for folder in (target, draft):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"no checkpoint at {folder}")
    return target, draft


def _loaded(load: Callable[[Path], Any], path: Path) -> Any:
    try:
        return load(path)
    except Exception as error:  # files that are broken bring errors of all kinds
        raise ValueError(f"cannot load {path}: {first_line(error)}") from error


def _are_heads(folder: Path) -> bool:
    """Tell whether a checkpoint is of decoding heads, which are no language model."""
    from transformers import AutoConfig

    from ..models.eagle import EagleHeadConfig
    from ..models.heads import DecodingHeadsConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return isinstance(config, (EagleHeadConfig, DecodingHeadsConfig))


def _draft_checkpoint(path: str) -> Path:
    """Return the folder of a draft: a path, or that for a fetched model, or the model itself."""
    source = fetch.MODELS.get(path)
    if source is None or source.draft is None or Path(path).is_dir():
        return checkpoint(path)
    return find_draft(path)


def checkpoint(path: str) -> Path:
    """Return the folder that an option names: a path, or a model that was fetched."""
    return fetch.find(path) if path in fetch.MODELS and not Path(path).is_dir() else Path(path)


def _find(tree: Any, key: str) -> Any:
    """Return the first value under ``key`` anywhere in a JSON object."""
    if not isinstance(tree, dict):
        return None
    if key in tree:
        return tree[key]
    return next((found for value in tree.values() if (found := _find(value, key))), None)


def load_given(args: argparse.Namespace, *, needs_draft: bool = True) -> Pair:
    """Load the models that a command line names: see `load_named` and `load_pair`."""
    return load_pair(
        args.target,
        args.draft,
        args.device,
        needs_draft,
        args.dtype,
        packed=args.packed,
        compiled=args.compile_draft,
    )


def load_named(
    args: argparse.Namespace, texts: Sequence[Given] | None = None, *, needs_draft: bool = True
) -> tuple[Pair, list[Prompt]]:
    """Load the models that a command line names on its device, and find what they complete.

    Parameters
    ----------
    args : argparse.Namespace
        With ``target``, ``draft``, ``dtype``, ``packed``, ``compile_draft``, ``device`` and
        ``prompt``: see `specdec_ext.commands.frame.add_pair_arguments`.
    texts : sequence of Given, optional
        What to complete, if it is known.
    needs_draft : bool
        See `load_pair`.
    """
    check_device(args.device)
    pair = load_given(args, needs_draft=needs_draft)
    if texts is None:
        return pair, find_prompts(pair, getattr(args, "prompt", None))
    chat = getattr(args, "chat", False)
    return pair, [as_prompt(pair, given, chat=chat) for given in texts]


def as_prompt(pair: Pair, given: Given, *, chat: bool = False) -> Prompt:
    """Put a text into the target's tokens; a conversation, or ``chat``, into its chat template."""
    if chat or not isinstance(given.content, str):
        if pair.tokenizer.chat_template is None:
            raise ValueError("the target's tokenizer has no chat template")
        found = pair.tokenizer.apply_chat_template(
            given.messages(), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        found = pair.tokenizer(given.content, return_tensors="pt")
    return Prompt(given.name, given.text, found["input_ids"].to(pair.device))


def find_prompts(pair: Pair, text: str | None = None) -> list[Prompt]:
    """Take the given text, or the openings of modules that the models have never seen."""
    if text is not None:
        if not text:
            raise ValueError("--prompt is empty")
        return [as_prompt(pair, Given("the prompt", text))]
    library = Path(sysconfig.get_path("stdlib"))
    # The one that is shown first: prose, signatures and code in its opening lines.
    names = sorted(pair.held_out, key=lambda name: name != "textwrap")
    found: list[Prompt] = []
    for name in names:
        path = library / f"{name}.py"
        if path.is_file() and len(found) < PROMPTS:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            opening = "".join(_opening(lines, pair.tokenizer))
            found.append(as_prompt(pair, Given(f"{name}.py", opening)))
    if not found:
        raise ValueError(f"none of {', '.join(pair.held_out)} is in {library}; give --prompt")
    return found


def _opening(lines: Iterable[str], tokenizer: Any) -> Iterator[str]:
    """Yield the first lines, about `PROMPT_TOKENS` tokens of them."""
    tokens = 0
    for line in lines:
        tokens += len(tokenizer(line, add_special_tokens=False).input_ids)
        if tokens > PROMPT_TOKENS:
            return
        yield line
