"""Exact speculative decoding of language models across the devices of one machine.

    from edgespec import load

    with load("smollm2-135m") as engine:
        for chunk in engine.stream("Why is the sky blue?"):
            print(chunk.text, end="", flush=True)

What is not listed here may change without notice.
"""

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgespec.system.signals import defer_signals

if TYPE_CHECKING:
    from edgespec.decoding.logprobs import TokenLogprob
    from edgespec.decoding.sampling import SamplingParams
    from edgespec.drafters.timeline import Interval
    from edgespec.engine.answer_stream import AnswerStream, Reply
    from edgespec.engine.answers import Chunk, Completion
    from edgespec.engine.conversation import Conversation
    from edgespec.engine.drafting import Drafting
    from edgespec.engine.engine import Engine
    from edgespec.engine.load import load
    from edgespec.engine.request import AnswerOptions
    from edgespec.engine.stats import Stats
    from edgespec.engine.transcript import Round
    from edgespec.errors import (
        ContextOverflow,
        ConversationError,
        DeviceUnavailable,
        DiskFull,
        EdgeSpecError,
        ExportMismatch,
        IntegrityError,
        ManifestError,
        MemoryExhausted,
        ModelError,
        SourceError,
        UnsuitedModel,
        UsageError,
        VocabularyMismatch,
    )
    from edgespec.policy.acceptance_rates import AcceptanceChange
    from edgespec.policy.measured_gain import Gain
    from edgespec.system.progress import LoadProgress
    from edgespec.tokenization.chat_template import Message
    from edgespec.tools.call_events import CallArguments, CallEnd, CallStart
    from edgespec.tools.tool import ToolCall

if TYPE_CHECKING:  # wing names, one a line; "as" says that they are given on
    from edgespec.decoders import Decoder as Decoder
    from edgespec.decoding.cached_prefix import empty_cache as empty_cache
    from edgespec.decoding.likelihood import mean_nll as mean_nll
    from edgespec.decoding.sampling import GumbelSampler as GumbelSampler
    from edgespec.decoding.scheduler import Block as Block
    from edgespec.decoding.scheduler import DraftPolicy as DraftPolicy
    from edgespec.decoding.scheduler import Plain as Plain
    from edgespec.decoding.scheduler import speculative_decode as speculative_decode
    from edgespec.engine.answers import join_chunks as join_chunks
    from edgespec.loading.open_model import open_with_states as open_with_states
    from edgespec.models.home import ModelHome as ModelHome
    from edgespec.models.hub import LocalSource as LocalSource
    from edgespec.policy.expected import best_length as best_length
    from edgespec.policy.expected import expected_tokens as expected_tokens
    from edgespec.profiling.measure import profile_target as profile_target
    from edgespec.profiling.profile import Profile as Profile

__version__ = "0.1.0"

logging.getLogger("edgespec").addHandler(logging.NullHandler())  # silent unless somebody listens

__all__ = [
    "AcceptanceChange",
    "AnswerOptions",
    "AnswerStream",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Chunk",
    "Completion",
    "ContextOverflow",
    "Conversation",
    "ConversationError",
    "DeviceUnavailable",
    "DiskFull",
    "Drafting",
    "EdgeSpecError",
    "Engine",
    "ExportMismatch",
    "Gain",
    "IntegrityError",
    "Interval",
    "LoadProgress",
    "ManifestError",
    "MemoryExhausted",
    "Message",
    "ModelError",
    "Reply",
    "Round",
    "SamplingParams",
    "SourceError",
    "Stats",
    "TokenLogprob",
    "ToolCall",
    "UnsuitedModel",
    "UsageError",
    "VocabularyMismatch",
    "load",
]

_HOMES = {
    "AcceptanceChange": "policy.acceptance_rates",
    "AnswerOptions": "engine.request",
    "AnswerStream": "engine.answer_stream",
    "CallArguments": "tools.call_events",
    "CallEnd": "tools.call_events",
    "CallStart": "tools.call_events",
    "Chunk": "engine.answers",
    "Completion": "engine.answers",
    "Conversation": "engine.conversation",
    "Drafting": "engine.drafting",
    "Message": "tokenization.chat_template",
    "Engine": "engine.engine",
    "Gain": "policy.measured_gain",
    "Interval": "drafters.timeline",
    "Reply": "engine.answer_stream",
    "Round": "engine.transcript",
    "load": "engine.load",
    "LoadProgress": "system.progress",
    "SamplingParams": "decoding.sampling",
    "TokenLogprob": "decoding.logprobs",
    "ToolCall": "tools.tool",
    "Stats": "engine.stats",
}

# Names of inner rooms that the wings use (chat, server, evaluation, training, cli), with their modules.
# They are no promise to apps. Sorted, one a line; each is also in the block for type checkers above.
_WING_NAMES = {
    "Block": "decoding.scheduler",
    "Decoder": "decoders",
    "DraftPolicy": "decoding.scheduler",
    "GumbelSampler": "decoding.sampling",
    "LocalSource": "models.hub",
    "ModelHome": "models.home",
    "Plain": "decoding.scheduler",
    "Profile": "profiling.profile",
    "best_length": "policy.expected",
    "empty_cache": "decoding.cached_prefix",
    "expected_tokens": "policy.expected",
    "join_chunks": "engine.answers",
    "mean_nll": "decoding.likelihood",
    "open_with_states": "loading.open_model",
    "profile_target": "profiling.measure",
    "speculative_decode": "decoding.scheduler",
}


# A program beside a checkout finds this folder before the installed package; runtimes/ and export/ lie beside it.
if not os.path.isdir(os.path.join(os.path.dirname(__file__), "runtimes")):
    __path__.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line starts at once and can be interrupted cleanly."""
    home = _WING_NAMES.get(name) or (_HOMES.get(name, "errors") if name in __all__ else None)
    if home is None:
        raise AttributeError(f"module 'edgespec' has no attribute '{name}'")
    with defer_signals():  # NumPy, which most of them need, would report itself broken
        module = import_module(f"edgespec.{home}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
