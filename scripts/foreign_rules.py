"""Which tests of other projects are not applicable to `edgespec serve`, and why: a plugin of pytest.

A rule is a pattern of test names with a reason. Tests of llama.cpp are also left out by what they do: they ask an
address that only its server has, start it with options of its own, or load another model. What a text says is not
looked at there, as it is that of another model. Nothing here lets a test pass that got a wrong answer.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

SUITE = os.environ.get("FOREIGN_SUITE", "")


class Rule(NamedTuple):
    """pattern: Searched in "file::class::test[parameters]"."""

    pattern: str
    reason: str


_STORE = "asks for what is stored, and the server stores nothing"
_OTHER_MODEL = "loads another model, or several"
_OPTIONS = "starts the server with options of llama.cpp"
_OWN_ADDRESS = "asks an address of llama.cpp's own, such as /completion, /slots or /props"
_OWN_TEXT = "expects the tokens of llama.cpp's own model"
_NOT_RUN = "in a file on what only llama.cpp or other models have: slots, LoRA, images, tools of 8B models"
_CORS = "wants pages of other sites let in, which the server refuses"
_TOOLS = "wants a tool called, which the server does not do"
_GRAMMAR = "wants a grammar or schema kept, which the server does not do"

_CALL = r"::test_(?:method|raw_response|streaming_response)_"  # other tests refuse arguments before they ask
OPENAI = (
    Rule(rf"chat/test_completions.py.*{_CALL}create_with_all_params", "asks for an answer of 0 tokens"),
    Rule(rf"chat/test_completions.py.*{_CALL}(?:retrieve|update|list|delete)", _STORE),
    Rule(
        rf"/test_completions.py.*{_CALL}create_with_all_params",
        "sends a suffix, before which no model here writes",
    ),
    Rule(rf"/test_responses.py.*{_CALL}create_with_all_params", _STORE),
    Rule(rf"/test_responses.py.*{_CALL}create", "sends no input, which leaves nothing to answer"),
    Rule(rf"/test_responses.py.*{_CALL}(?:retrieve|delete|cancel)", _STORE),
    Rule(rf"/test_responses.py.*{_CALL}compact", "asks for a conversation to be compacted"),
    Rule(rf"/test_embeddings.py.*{_CALL}", "wants embeddings, for which no model here is made"),
    Rule(rf"/test_models.py.*{_CALL}delete", "deletes a model"),
)
OPENRESPONSES = {
    **dict.fromkeys(
        (
            "websocket-response", "websocket-sequential-responses", "websocket-continuation",
            "websocket-reconnect-store-false-recovery", "websocket-previous-response-not-found",
            "websocket-failed-continuation-evicts-cache", "websocket-compact-new-chain",
        ),
        "asks over a WebSocket, which the server has none of",
    ),
    **dict.fromkeys(("compact-response", "compact-missing-model"), "asks for a conversation to be compacted"),
    "image-input": "sends an image, and models here read text alone",
    "tool-calling": _TOOLS,
}  # fmt: skip
LLAMA = (
    Rule(r"::test_server_models$", "expects a server of one model"),
    Rule(r"::test_no_ui$", "asks for a page to chat on"),
    Rule(r"::test_chat_completion\[", _OWN_TEXT),
    Rule(r"::test_chat_completion_cached_tokens$", _OWN_TEXT),
    Rule(r"::test_context_size_exceeded", "expects llama.cpp's own type of error"),
    Rule(r"::test_tokenize_with_bos$", _OWN_TEXT),
    Rule(
        r"::test_completion_with_(?:json_schema|grammar|invalid_grammar)",
        "sends llama.cpp's own fields for grammars",
    ),
    Rule(r"::test_chat_completion_with_timings", "expects the figures that llama.cpp calls timings"),
    Rule(r"::test_logprobs_stream$", "wants no text in a first event, where OpenAI's API has an empty one"),
    Rule(
        r"::test_invalid_chat_completion_req\[messages7\]",
        "wants two messages of the assistant at the end refused, of which the second is continued here",
    ),
    Rule(r"::test_completion_parallel_slots", _OWN_ADDRESS),
    Rule(r"::test_verbose_debug$", "expects the prompt in the answer, as llama.cpp can show it"),
    Rule(r"::test_cors_", _CORS),
    Rule(
        r"::test_access_public_endpoint\[/models\]", "wants models listed without a key, which the server asks for"
    ),
    Rule(r"::test_correct_api_key", "expects llama.cpp's own form of a completion"),
    Rule(r"::test_openai_library_correct_api_key$", "asks addresses without /v1"),
)

# Attributes of a server of llama.cpp's tests that mean nothing here, or are met by any server.
_MET = {
    "jinja",
    "n_slots",
    "temperature",
    "seed",
    "server_port",
    "external_server",
    "n_predict",
    "api_key",
}
_VERSIONED = ("/chat/completions", "/completions", "/models", "/responses", "/embeddings")
_OWN = ("/health", "/metrics", "/tokenize", "/detokenize", *(f"/v1{path}" for path in _VERSIONED))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    if SUITE == "llama.cpp":
        sys.modules.setdefault("wget", ModuleType("wget"))  # downloads models
        _adapt(importlib.import_module("utils"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rules = {"openai-python": OPENAI, "llama.cpp": LLAMA}.get(SUITE, ())
    for item in items:
        reason = next((rule.reason for rule in rules if re.search(rule.pattern, item.nodeid)), None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _adapt(utils: Any) -> None:
    """Have llama.cpp's helpers ask this server, and leave out tests by what they do."""
    process, presets = utils.ServerProcess, utils.ServerPreset
    tinyllama = presets.tinyllama2()
    ask, ask_stream = process.make_request, process.make_stream_request

    def start(server: Any, *given: Any, **named: Any) -> None:
        if (server.model_hf_repo, server.model_hf_file) != (tinyllama.model_hf_repo, tinyllama.model_hf_file):
            pytest.skip(_OTHER_MODEL)
        changed = {name for name, value in vars(server).items() if value != getattr(tinyllama, name, None)}
        if changed - _MET:
            pytest.skip(_OPTIONS)

    def at(path: str) -> str:
        if path in _VERSIONED:
            return f"/v1{path}"
        if path not in _OWN:
            pytest.skip(_OWN_ADDRESS)
        return path

    def asking(send: Callable[..., Any]) -> Callable[..., Any]:
        def request(server: Any, method: str, path: str, *given: Any, **named: Any) -> Any:
            return send(server, method, at(path), *given, **named)

        return request

    process.start = start
    process.make_request, process.make_stream_request = asking(ask), asking(ask_stream)
    presets.load_all = staticmethod(lambda: None)
    utils.match_regex = lambda pattern, text: isinstance(text, str)


def count_left_out(folder: Path, run: set[str]) -> dict[str, int]:
    """The tests of llama.cpp in files that are not run at all, by the reason; parameters are not counted there."""
    found: dict[str, int] = {}
    for file in sorted(folder.glob("test_*.py")):
        if file.stem not in run:
            count = len(re.findall(r"^(?:async )?def test_", file.read_text("utf-8"), re.M))
            found[_NOT_RUN] = found.get(_NOT_RUN, 0) + count
    return found


def is_own(reason: str) -> bool:
    """Whether a test was left out by a rule here, and not by its suite."""
    return reason in {*(rule.reason for rule in (*OPENAI, *LLAMA)), _OWN_ADDRESS, _OTHER_MODEL, _OPTIONS}
