"""From fields of a request to what an engine is asked: sampling, drafting, formats, priority, reasoning, tools."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from edgespec import AnswerOptions, Drafting, Engine, SamplingParams, ToolError, ToolUse, Turn, UsageError
from edgespec.server.errors import ApiError, wrong
from edgespec.server.limits import Limits
from edgespec.server.protocol import (
    ChatRequest,
    GenerationFields,
    Prediction,
    ResponsesRequest,
    SamplingFields,
    SpeculationField,
    StructuredOutputs,
    Text,
    stop_strings,
    text_of,
    within,
)

_SWITCH = "enable_thinking"
# Of Qwen's API, vLLM and llama.cpp.
_BUDGETS = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens")
_SEEDS = 1 << 64
LEAST, _BACKGROUND = -10, -1  # priorities, of which 0 is that of persons
_SAMPLING = {each.name for each in fields(SamplingParams)}
# What Open WebUI asks for behind each answer, by the template that its questions have unless somebody edits them.
_TASK, _HISTORY = "### Task:", "<chat_history>"
_OUTPUTS = ('"title"', '"tags"', '"follow_ups"')

TalkRequest = ChatRequest | ResponsesRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """An answer that is asked for.

    use: The tools that it may call.
    format_field: The field of the request that states what it has to match.
    """

    prompt: Text | Sequence[Turn]
    options: AnswerOptions
    use: ToolUse | None = None
    format_field: str | None = None

    @property
    def sampling(self) -> SamplingParams:
        return self.options.get("sampling") or SamplingParams()


def sampling_of(asked: SamplingFields, engine: Engine, limits: Limits, index: int = 0) -> SamplingParams:
    """How tokens of one of several answers are chosen.

    What a request leaves open is as the model's own settings have it, else greedy.

    index: Of the answer. Each has a seed of its own, also where the request gives one.

    Raises:
        ApiError: 400, logit_bias is no map of token ids, or too large.
        UsageError: A value is out of range.
    """
    stated = {name: getattr(asked, name, None) for name in _SAMPLING - {"seed", "logit_bias"}}
    if (again := asked.repeat_penalty) is not None:
        if stated["repetition_penalty"] not in (None, again):
            raise wrong("repeat_penalty", "and repetition_penalty differ; give one of them")
        stated["repetition_penalty"] = again
    if stated.get("top_k") == -1:  # as other servers say "all"
        stated["top_k"] = 0
    # Without a seed, or with -1 as in llama.cpp and vLLM, each answer is another one, as clients expect.
    of_preset = engine.preset.sampling.get("seed") if engine.preset else None
    seed = next((seed for seed in (asked.seed, of_preset) if seed is not None), -1)
    seed = secrets.randbits(53) if seed == -1 else seed
    return replace(
        engine.model_sampling or SamplingParams(),
        **{name: value for name, value in stated.items() if value is not None},
        logit_bias=_bias(asked.logit_bias or {}, limits),
        seed=(seed + index) % _SEEDS,
    )


def _bias(stated: dict[str, float], limits: Limits) -> dict[int, float]:
    if len(stated) > limits.num_biases:
        raise wrong("logit_bias", f"has {len(stated)} tokens; wanted at most {limits.num_biases}")
    for token, value in stated.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10) or not -100 <= value <= 100:
            raise wrong(
                "logit_bias", f"has {token[:20]!r}: {value}; wanted token ids with numbers from -100 to 100"
            )
    return {int(token): value for token, value in stated.items()}


def drafting_of(
    asked: SpeculationField | None, prediction: Prediction | None, open_drafters: Sequence[str]
) -> Drafting | None:
    """How an answer is drafted for; None for all that is open.

    Raises:
        ApiError: 400, speculation names a drafter that is not open, or a length of another kind, or the prediction
            is no text.
        UsageError: The length is out of range.
    """
    if prediction is not None and prediction.type != "content":
        raise wrong("prediction", f"is of the type '{prediction.type[:40]}'; wanted content, which is a text")
    predicted = text_of(prediction.content, "prediction") if prediction else ""
    asked = asked or SpeculationField()
    if asked.off:
        return Drafting(drafters=())
    length = None if asked.length in (None, "auto") else asked.length
    if isinstance(length, str):
        raise wrong("speculation", f"is {length[:40]!r}; wanted auto or a number", "speculation.length")
    if not predicted and length is None and asked.drafter in (None, "auto"):
        return None
    return Drafting(drafters=_names(asked.drafter, open_drafters), draft_length=length, prediction=predicted)


def _names(asked: str | None, open_drafters: Sequence[str]) -> Sequence[str] | None:
    if asked is None or asked == "auto":
        return None
    names = [] if asked == "none" else asked.split("+")
    if unknown := [name for name in names if name not in open_drafters]:
        there = ", ".join(["auto", "none", *open_drafters])
        raise wrong(
            "speculation",
            f"names '{unknown[0][:40]}', which is not open; open are: {there}. edgespec serve --drafter opens "
            "others",
            "speculation.drafter",
        )
    return names


def require_followed(asked: SamplingFields, engine: Engine) -> None:
    """Raises ApiError: 400, a field says when an answer ends, and models here do not follow it."""
    others = {token for token in asked.stop_token_ids or () if token not in engine.manifest.eos_token_ids}
    stated = {
        "stop_token_ids": (bool(others), "which are not end tokens of the model; give their text as stop"),
        "min_tokens": (bool(asked.min_tokens), "and models here end an answer where they want; leave it out"),
        "ignore_eos": (bool(asked.ignore_eos), "and models here end an answer where they want; leave it out"),
        "functions": (bool(getattr(asked, "functions", None)), "the older form of tools; send tools"),
    }
    for name, (is_given, why) in stated.items():
        if is_given:
            raise wrong(name, f"is given, {why}")


class StatedFormat(NamedTuple):
    """A format that an answer has to match, as response_format states it, and the field that has it."""

    field: str
    value: Mapping[str, Any]


def format_of(asked: GenerationFields) -> StatedFormat | None:
    """The format that the answer has to match; None for any text.

    Raises ApiError: 400, it is stated twice, or a field of another server's has no JSON, no choices, or no format.
    """
    guided = StructuredOutputs(
        json=asked.guided_json, regex=asked.guided_regex, choice=asked.guided_choice, grammar=asked.guided_grammar
    )
    stated = {"response_format": asked.response_format, **_formats("guided_", guided)}
    if (outputs := asked.structured_outputs) is not None:
        if outputs == StructuredOutputs():
            fields = ", ".join(outputs.__slots__)
            raise wrong("structured_outputs", f"has no format that models here follow; give one of {fields}")
        stated |= _formats("structured_outputs.", outputs)
    stated |= {
        # An empty schema is one, too: any JSON.
        "json_schema": _of_kind("json_schema", "schema", asked.json_schema),
        "grammar": _of_kind("grammar", "grammar", asked.grammar or None),
    }
    found = [StatedFormat(field, value) for field, value in stated.items() if value is not None]
    if len(found) > 1:
        names = " and ".join(each.field for each in found)
        raise wrong(found[1].field, "each state the format of the answer; give one of them", names)
    return found[0] if found else None


def _formats(prefix: str, given: StructuredOutputs) -> dict[str, Mapping[str, Any] | None]:
    """The format that each field states, by its name in the request."""
    if given.choice is not None and not given.choice:
        raise wrong(f"{prefix}choice", "has no texts; give at least one, or leave it out")
    choices = " | ".join(map(json.dumps, given.choice or ()))
    schema = _schema_of(given.json, f"{prefix}json")
    return {
        f"{prefix}json": _of_kind("json_schema", "schema", schema),
        f"{prefix}regex": _of_kind("regex", "regex", given.regex or None),
        f"{prefix}choice": _of_kind("grammar", "grammar", f"start: {choices}" if choices else None),
        f"{prefix}grammar": _of_kind("grammar", "grammar", given.grammar or None),
        f"{prefix}json_object": {"type": "json_object"} if given.json_object else None,
    }


def _of_kind(kind: str, key: str, value: Any) -> Mapping[str, Any] | None:
    return None if value is None else {"type": kind, key: value}


def _schema_of(stated: dict[str, Any] | str | None, field: str) -> Any:
    if not isinstance(stated, str):
        return stated
    try:
        return json.loads(stated)
    except (ValueError, RecursionError) as error:
        raise wrong(field, f"is not JSON ({error}); give a schema") from None


def priority_of(asked: SamplingFields) -> int:
    """The priority that a request states, else a low one if it is known that no person waits for it.

    Raises ApiError: 400, it is out of range; no request goes before those of persons, who have 0.
    """
    stated = within("priority", asked.priority, LEAST, 0)
    if stated is not None:
        return stated
    return _BACKGROUND if isinstance(asked, ChatRequest) and _is_background(asked) else 0


def _is_background(asked: ChatRequest) -> bool:
    if asked.stream or len(asked.messages) != 1 or not isinstance(text := asked.messages[0].content, str):
        return False
    return text.startswith(_TASK) and _HISTORY in text and any(name in text for name in _OUTPUTS)


def thinking_of(asked: TalkRequest, engine: Engine) -> bool | None:
    """True if the model is to reason first; None where the request leaves it to a template, or that has no switch.

    Raises ApiError: 400, the switch is neither true nor false.
    """
    stated = (asked.chat_template_kwargs or {}).get(_SWITCH, getattr(asked, _SWITCH, None))
    if stated is not None and not isinstance(stated, bool):
        raise wrong(f"chat_template_kwargs.{_SWITCH}", f"is {stated!r:.40}; wanted true or false", _SWITCH)
    if stated is None and (effort := _effort(asked)):
        stated = effort != "none"
    if stated is None and engine.preset:
        stated = engine.preset.think
    return stated if engine.can_switch_thinking else None


def template_options_of(asked: TalkRequest) -> dict[str, Any] | None:
    """The variables that a request gives to the chat template, beside the switch of reasoning."""
    effort = _effort(asked)
    stated = {} if effort in (None, "none") else {"reasoning_effort": effort}
    stated |= {name: value for name, value in (asked.chat_template_kwargs or {}).items() if name != _SWITCH}
    return stated or None


def _effort(asked: TalkRequest) -> str | None:
    if isinstance(asked, ChatRequest):
        return asked.reasoning_effort
    return asked.reasoning.effort if asked.reasoning else None


def budget_of(asked: TalkRequest, engine: Engine) -> int | None:
    """The most tokens that the model may reason; None for no limit.

    Raises ApiError: 400, it is below -1, has two values, or the model does not reason.
    """
    stated = {name: value for name in _BUDGETS if (value := getattr(asked, name)) is not None}
    for name, value in stated.items():
        if value < -1:
            raise wrong(name, f"is {value}; wanted a number of tokens from 0, or -1 for no limit")
    if len(set(stated.values())) > 1:
        raise wrong(max(stated), "are names of one thing; give one of them", " and ".join(stated))
    name, budget = next(iter(stated.items()), ("", -1))
    if budget == -1:
        return None
    if not engine.can_think:
        model = asked.model or engine.manifest.name
        raise wrong(name, f"is given, but {model} does not think before it answers; leave it out")
    return budget


def tool_use_of(asked: TalkRequest) -> ToolUse | None:
    """The tools that an answer may call. Raises ApiError: 400, they are wrong."""
    try:
        return ToolUse.parse(asked.tools, asked.tool_choice, is_parallel=asked.parallel_tool_calls is not False)
    except ToolError as error:
        raise ApiError(400, str(error), param=error.field) from None
    except UsageError as error:
        param = "tool_choice" if str(error).startswith("tool_choice") else "tools"
        raise ApiError(400, str(error), param=param) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """The answers that a request asks for.

    num_answers: How many.
    requests: What to ask the engine for each of them; called in a thread once the model is loaded.
    num_prompts: How many prompts they are answers to, each to as many as the others.
    priority: Of the request; the model gives its place up to one of a higher priority.
    """

    model: str | None
    num_answers: int
    requests: Callable[[Engine], Sequence[AnswerRequest]]
    num_prompts: int = 1
    priority: int = 0


def talk_plan(
    asked: TalkRequest,
    conversation: tuple[Sequence[Turn], str],
    format: StatedFormat | None,
    limits: Limits,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prediction: Prediction | None = None,
    num_answers: int = 1,
) -> AnswerPlan:
    """The answers to a conversation, by what chat completions and responses state in one way.

    conversation: Its messages, and the beginning of the answer.

    Raises ApiError: 400, the request asks for what cannot be.
    """
    (messages, prefill), use = conversation, tool_use_of(asked)
    stop, priority = stop_strings(asked.stop, limits), priority_of(asked)

    def requests(engine: Engine) -> Sequence[AnswerRequest]:
        require_followed(asked, engine)
        options = AnswerOptions(
            max_tokens=max_tokens,
            stop=stop,
            logprobs=logprobs,
            drafting=drafting_of(asked.speculation, prediction, engine.open_drafters),
            priority=priority,
            thinking=thinking_of(asked, engine),
            template_options=template_options_of(asked),
            prefill=prefill,
            response_format=format and format.value,
            thinking_budget=budget_of(asked, engine),
            whole_tool_calls=not asked.stream,
        )
        if use:
            options |= {"tools": use.tools, "tool_choice": use.choice, "parallel_tool_calls": use.is_parallel}
        return [
            AnswerRequest(
                prompt=messages,
                options={**options, "sampling": sampling_of(asked, engine, limits, i)},
                use=use,
                format_field=format and format.field,
            )
            for i in range(num_answers)
        ]

    return AnswerPlan(model=asked.model, num_answers=num_answers, requests=requests, priority=priority)
