"""Defaults of an answer by a preset, where its request leaves them open."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from edgespec.config.presets import Preset as Preset
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.request import AnswerOptions, AnswerSettings, TalkOptions, answer_settings, require_format
from edgespec.engine.transcript import Transcript, messages_of
from edgespec.errors import UsageError
from edgespec.setup.wish import Wish
from edgespec.text.chat_template import Message, Turn
from edgespec.text.prompt_encoder import Prompt, is_ids, parse_messages

if TYPE_CHECKING:
    from edgespec.engine.conversation import Conversation
    from edgespec.engine.engine import Engine


def check_preset(preset: Preset) -> None:
    """Raises UsageError: A preset has a value that no model and no answer can have."""
    try:
        Wish(model=preset.model, **preset.load_arguments)
        SamplingParams(**preset.sampling)
        if preset.options.get("max-tokens") == 0:
            raise UsageError("max-tokens is 0; wanted a whole number from 1, or -1 for no limit")
        if wanted := preset.answer_options.get("response_format"):
            require_format(wanted)
    except UsageError as error:
        raise UsageError(f"the preset '{preset.name}': {error}") from None


def by_preset(engine: "Engine", preset: Preset | None) -> "Engine":
    """An engine whose answers are made by a preset; it shares all that another one has open, and ends with it."""
    shared = object.__new__(type(engine))
    vars(shared).update(vars(engine))
    shared.preset = preset and fitting(preset, shared)
    return shared


def fitting(preset: Preset, engine: "Engine") -> Preset:
    """A preset without its think where the model of an engine has no switch for that."""
    return preset if preset.think is None or engine.can_switch_thinking else replace(preset, think=None)


def settings_by(
    options: AnswerOptions | TalkOptions, suggested: SamplingParams | None, preset: Preset | None
) -> AnswerSettings:
    """The options of an answer, with those of a preset where they say nothing."""
    if preset is None:
        return answer_settings(options, suggested)
    stated: dict[str, Any] = {name: value for name, value in options.items() if not _is_open(value)}
    said = preset.answer_options
    if "schema" in stated:
        said.pop("response_format", None)
    return answer_settings(cast("AnswerOptions", {**options, **said, **stated}), suggested)


def _is_open(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and not value)


def opened(prompt: Prompt, options: AnswerSettings, preset: Preset | None) -> tuple[Prompt, AnswerSettings]:
    """A prompt behind the system message and the examples of a preset, unless it has a system message itself."""
    if options.system == "":
        return prompt, replace(options, system=None)
    if preset is None or options.raw or is_ids(prompt):
        return prompt, options
    turns = parse_messages([Message("user", prompt)] if isinstance(prompt, str) else prompt)
    own: list[Turn] = [turns.pop(0)] if turns and turns[0].role == "system" else []
    if not own and options.system is None:
        own = _system_of(preset.system)
    return [*own, *parse_messages(preset.messages), *turns], options


def begin_chat(talk: "Conversation", preset: Preset | None) -> "Conversation":
    """A new conversation with the system message of a preset, unless it has one, and its examples."""
    if preset is not None:
        if talk.system is None:
            talk.system = preset.system
        begin_anew(talk)
    return talk


def begin_anew(talk: "Conversation") -> None:
    """Forget all of a conversation but its system message and the examples of its engine's preset."""
    preset = talk.engine.preset
    examples = parse_messages(preset.messages if preset else ())
    talk.restore(Transcript(messages=(*_system_of(talk.system), *examples)))


def follow_preset(talk: "Conversation", before: Preset | None) -> bool:
    """Have a conversation follow the preset of its engine, where nothing else was set since the one before.

    Returns False where the examples of the preset are left out, as the conversation has begun.
    """
    if (after := talk.engine.preset) == before:
        return True
    old, new = (settings_by({}, None, each) for each in (before, after))
    for name in ("max_tokens", "stop", "thinking", "response_format"):
        if _is_open(value := getattr(talk, name)) or value == getattr(old, name):
            setattr(talk, name, getattr(new, name))
    if talk.system in (None, before and before.system):
        talk.system = after.system if after else None
    said, wanted = (parse_messages(each.messages if each else ()) for each in (before, after))
    if [*messages_of(talk.rounds)] != said:
        return not wanted
    begin_anew(talk)
    return True


def _system_of(text: str | None) -> list[Turn]:
    return [Message("system", text)] if text else []
