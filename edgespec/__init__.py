"""Language models on this machine, faster, with their own output: exact speculative decoding.

    from edgespec import load

    with load("smollm2-135m") as engine:
        for chunk in engine.stream("Why is the sky blue?"):
            print(chunk.text, end="", flush=True)

load() opens a model as an Engine, which answers with stream(), astream() and generate(); its chat() begins a
Conversation, which remembers. help(Engine.stream) lists the options of an answer. The module models lists,
prepares and removes models; devices() lists what can run them. Each error is an EdgeSpecError.

What is not listed here may change without notice.
"""
# ruff: noqa: F401  the names for the wings are given on

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgespec.system.signals import defer_signals

if TYPE_CHECKING:  # the public names, and those for the wings
    from edgespec.decoding.decoder import Decoder, empty_cache
    from edgespec.decoding.logprobs import TokenLogprob, mean_nll
    from edgespec.decoding.repetition import ends_in_loop
    from edgespec.decoding.sampling import GumbelSampler, SamplingParams
    from edgespec.decoding.scheduler import DraftPolicy, Plain, speculative_decode
    from edgespec.draft.acceptance_rates import AcceptanceChange
    from edgespec.draft.answer_cache import AnswerCache
    from edgespec.draft.costs import Gain, pass_costs
    from edgespec.draft.limits import MAX_FIXED_TOKENS
    from edgespec.draft.measured import main_reason
    from edgespec.draft.option import best_length, expected_tokens
    from edgespec.draft.timeline import Interval, chrome_trace, latest, picture, svg_picture
    from edgespec.engine.answer_stream import AnswerStream, Reply
    from edgespec.engine.answers import Chunk, Completion, Stats, join_chunks
    from edgespec.engine.conversation import Conversation
    from edgespec.engine.engine import Engine
    from edgespec.engine.load import load, open_wish
    from edgespec.engine.mcp_servers import McpServers, open_servers, require_allowed
    from edgespec.engine.pair_check import check_pair
    from edgespec.engine.pair_export import PairHalf, add_forms, export_pair, plan_pair, usual_added_precision
    from edgespec.engine.plan import plan_document, rank_for_model
    from edgespec.engine.preset_defaults import Preset, begin_anew, by_preset, check_preset, follow_preset
    from edgespec.engine.reasoning import ReasoningStream, has_spent, split_reasoning
    from edgespec.engine.request import (
        AnswerOptions,
        Drafting,
        require_embedding_model,
        require_format,
        require_writer,
    )
    from edgespec.engine.tool_process import ToolProcess, cut_result
    from edgespec.engine.transcript import Round, Transcript
    from edgespec.errors import (
        ContextOverflow,
        ConversationError,
        DeviceUnavailable,
        DiskFull,
        EdgeSpecError,
        ExportMismatch,
        FormatError,
        IntegrityError,
        ManifestError,
        MemoryExhausted,
        ModelError,
        PrecisionLoss,
        SourceError,
        ToolError,
        UnsuitedModel,
        UsageError,
        VocabularyMismatch,
        in_flags,
        in_python,
    )
    from edgespec.manifest import FILE_NAME, Manifest, read_manifest
    from edgespec.memory.free_memory import ReadFreeMemory, free_memory, return_freed
    from edgespec.memory.pressure import PressureReader, ReadPressure
    from edgespec.runtimes.device_names import device_names, form_of, parse_device_name
    from edgespec.runtimes.devices import import_onnxruntime, nvidia_bytes
    from edgespec.runtimes.discovery import DeviceReport, Discovery, devices, discover
    from edgespec.runtimes.driver_check import is_known_to_lack_half_floats
    from edgespec.runtimes.hardware import cores
    from edgespec.setup.catalog import CATALOG, CatalogEntry, HubRepository
    from edgespec.setup.device_choice import require_names_together
    from edgespec.setup.downloads import Download
    from edgespec.setup.drafter_ranking import ranking_document, ranking_in_words
    from edgespec.setup.foresee import file_bytes, memory_bytes
    from edgespec.setup.head_target import read_whole_model
    from edgespec.setup.home import ModelHome, default_home
    from edgespec.setup.hub import can_fetch
    from edgespec.setup.inventory import CatalogModel, Inventory, PreparedModel
    from edgespec.setup.measure import profile_target
    from edgespec.setup.ollama_models import pulled_names
    from edgespec.setup.open_model import measure_ranges, open_decoder, open_with_states, require_runtime
    from edgespec.setup.pair import learned_files
    from edgespec.setup.plan_words import plan_in_words
    from edgespec.setup.profile import Profile
    from edgespec.setup.snapshot import LocalSource, Preview
    from edgespec.setup.source_names import split_precision
    from edgespec.setup.usage import Usage, UsageFile, UsageKey
    from edgespec.setup.wish import AcceptanceName, Wish
    from edgespec.system.arguments import explains_arguments, require_function, require_kind, require_path
    from edgespec.system.progress import TERMINAL, LoadProgress, silent
    from edgespec.text.chat_template import CallMessage, Message, ResultMessage, Turn, read_template
    from edgespec.text.pdf import read_pdf
    from edgespec.text.prompt_encoder import (
        PromptEncoder,
        find_thinking_switch,
        parse_ids,
        parse_messages,
        split_begun,
    )
    from edgespec.text.tokenizer import TextStream, Tokenizer
    from edgespec.tools.call_events import CallArguments, CallEnd, CallStart, in_order, join_calls
    from edgespec.tools.tool import Tool, ToolCall, ToolUse, parse_tools, result_text
    from edgespec.types import (
        FinishReason,
        Overflow,
        Precision,
        Report,
        Role,
        Row,
        ScheduleChoice,
        TokenIds,
        ToolChoice,
        append,
    )

__version__ = "0.1.0"

logging.getLogger("edgespec").addHandler(logging.NullHandler())  # silent unless somebody listens

__all__ = [
    "AcceptanceChange", "AcceptanceName", "AnswerOptions", "AnswerStream", "CallArguments", "CallEnd",
    "CallMessage", "CallStart", "CatalogModel", "Chunk", "Completion", "ContextOverflow", "Conversation",
    "ConversationError", "DeviceReport", "DeviceUnavailable", "DiskFull", "Drafting", "EdgeSpecError",
    "Engine", "ExportMismatch", "FinishReason", "FormatError", "Gain", "IntegrityError", "Interval",
    "LoadProgress", "ManifestError", "McpServers", "MemoryExhausted", "Message", "ModelError", "Overflow",
    "Precision", "PrecisionLoss", "PreparedModel", "Reply", "ResultMessage", "Role", "Round", "SamplingParams",
    "ScheduleChoice", "SourceError", "Stats", "TokenLogprob", "ToolCall", "ToolChoice", "ToolError",
    "UnsuitedModel", "UsageError", "VocabularyMismatch", "devices", "load", "models",
]  # fmt: skip


# The names of each module, sorted; each name is also in the block for type checkers above. Those that are not in
# __all__ are of inner rooms, for the wings (chat, server, evaluation, training, cli): no promise to apps.
_MODULES = {
    "decoding.decoder": "Decoder empty_cache",
    "decoding.logprobs": "TokenLogprob mean_nll",
    "decoding.repetition": "ends_in_loop",
    "decoding.sampling": "GumbelSampler SamplingParams",
    "decoding.scheduler": "DraftPolicy Plain speculative_decode",
    "draft.acceptance_rates": "AcceptanceChange",
    "draft.answer_cache": "AnswerCache",
    "draft.costs": "Gain pass_costs",
    "draft.limits": "MAX_FIXED_TOKENS",
    "draft.measured": "main_reason",
    "draft.option": "best_length expected_tokens",
    "draft.timeline": "Interval chrome_trace latest picture svg_picture",
    "engine.answer_stream": "AnswerStream Reply",
    "engine.answers": "Chunk Completion Stats join_chunks",
    "engine.conversation": "Conversation",
    "engine.engine": "Engine",
    "engine.load": "load open_wish",
    "engine.mcp_servers": "McpServers open_servers require_allowed",
    "engine.pair_check": "check_pair",
    "engine.pair_export": "PairHalf add_forms export_pair plan_pair usual_added_precision",
    "engine.plan": "plan_document rank_for_model",
    "engine.preset_defaults": "Preset begin_anew by_preset check_preset follow_preset",
    "engine.reasoning": "ReasoningStream has_spent split_reasoning",
    "engine.request": "AnswerOptions Drafting require_embedding_model require_format require_writer",
    "engine.tool_process": "ToolProcess cut_result",
    "engine.transcript": "Round Transcript",
    "errors": "ContextOverflow ConversationError DeviceUnavailable DiskFull EdgeSpecError ExportMismatch "
    "FormatError IntegrityError ManifestError MemoryExhausted ModelError PrecisionLoss SourceError "
    "ToolError UnsuitedModel UsageError VocabularyMismatch in_flags in_python",
    "manifest": "FILE_NAME Manifest read_manifest",
    "memory.free_memory": "ReadFreeMemory free_memory return_freed",
    "memory.pressure": "PressureReader ReadPressure",
    "models": "models",
    "runtimes.device_names": "device_names form_of parse_device_name",
    "runtimes.devices": "import_onnxruntime nvidia_bytes",
    "runtimes.discovery": "DeviceReport Discovery devices discover",
    "runtimes.driver_check": "is_known_to_lack_half_floats",
    "runtimes.hardware": "cores",
    "setup.catalog": "CATALOG CatalogEntry HubRepository",
    "setup.device_choice": "require_names_together",
    "setup.downloads": "Download",
    "setup.drafter_ranking": "ranking_document ranking_in_words",
    "setup.foresee": "file_bytes memory_bytes",
    "setup.head_target": "read_whole_model",
    "setup.home": "ModelHome default_home",
    "setup.hub": "can_fetch",
    "setup.inventory": "CatalogModel Inventory PreparedModel",
    "setup.measure": "profile_target",
    "setup.ollama_models": "pulled_names",
    "setup.open_model": "measure_ranges open_decoder open_with_states require_runtime",
    "setup.pair": "learned_files",
    "setup.plan_words": "plan_in_words",
    "setup.profile": "Profile",
    "setup.snapshot": "LocalSource Preview",
    "setup.source_names": "split_precision",
    "setup.usage": "Usage UsageFile UsageKey",
    "setup.wish": "AcceptanceName Wish",
    "system.arguments": "explains_arguments require_function require_kind require_path",
    "system.progress": "LoadProgress TERMINAL silent",
    "text.chat_template": "CallMessage Message ResultMessage Turn read_template",
    "text.pdf": "read_pdf",
    "text.prompt_encoder": "PromptEncoder find_thinking_switch parse_ids parse_messages split_begun",
    "text.tokenizer": "TextStream Tokenizer",
    "tools.call_events": "CallArguments CallEnd CallStart in_order join_calls",
    "tools.tool": "Tool ToolCall ToolUse parse_tools result_text",
    "types": "FinishReason Overflow Precision Report Role Row ScheduleChoice TokenIds ToolChoice append",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

# A program beside a checkout finds this folder before the installed package; runtimes/ and export/ lie beside it.
if not os.path.isdir(os.path.join(os.path.dirname(__file__), "runtimes")):
    __path__.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


if not TYPE_CHECKING:  # to a type checker any name could be imported then

    def __getattr__(name: str) -> Any:
        """Import on first use, so that the command line starts at once and can be interrupted cleanly."""
        if (home := _HOMES.get(name)) is None:
            raise AttributeError(f"module 'edgespec' has no attribute '{name}'")
        with defer_signals():  # NumPy, which most of them need, would report itself broken
            module = import_module(f"edgespec.{home}")
        return module if name == "models" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
