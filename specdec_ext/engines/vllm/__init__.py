"""vLLM's rejection sampler replaced by `specdec_ext.verify`: a plugin, off unless asked for.

vLLM finds `register` through the entry point ``vllm.general_plugins`` and calls it in each of its
processes. Without the environment variable ``SPECDEC_VLLM`` it does nothing. With it (see
`specdec_ext.engines.vllm.settings`) the classes that verify drafts and draw them are replaced, in
both of vLLM's model runners, before the engine is built:

- ``hooks`` lists what is replaced or read, with the signatures it must have, and the versions;
- ``layout`` and ``requests`` turn vLLM's batches into the arguments of `specdec_ext.verify`;
- ``v1`` and ``v2`` are the two model runners' adapters.

How to use it stands in ``docs/vllm.md``.
"""

from __future__ import annotations

import logging
import os

from .settings import VARIABLE, parse_settings

__all__ = ["register"]

# Below "vllm", whose handler prints it in every process.
_logger = logging.getLogger("vllm.specdec_ext")
_registered: list[str] = []  # why, or as what; vLLM may call a plugin several times


def register() -> None:
    """Replace vLLM's rejection sampler if ``SPECDEC_VLLM`` asks for it and this vLLM fits.

    A vLLM of another version or with other signatures is left alone, and one line of its log says
    why. Calls after the first do nothing.

    Raises
    ------
    ValueError
        ``SPECDEC_VLLM`` names no rule, or a parameter that is none or out of range.

    Examples
    --------
    >>> import os
    >>> from specdec_ext.engines.vllm import register
    >>> "SPECDEC_VLLM" in os.environ
    False
    >>> register()  # does nothing, whether vLLM is there or not
    """
    settings = parse_settings(os.environ.get(VARIABLE, ""))
    if settings is None or _registered:
        return
    from . import hooks, v1, v2

    reason = hooks.mismatch()
    if reason is not None:
        _registered.append(reason)
        _logger.warning("specdec_ext: vLLM is left as it is: %s", reason)
        return
    v1.install(settings)
    v2.install(settings)
    _registered.append(settings.rule)
    _logger.info("specdec_ext: drafts are verified by specdec_ext.verify, %s", settings)
