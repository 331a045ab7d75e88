"""Calls of tools that an answer ends with: shown, run with the user's yes, and what the model is told of each."""

import sys
from collections.abc import Iterator, Sequence
from itertools import count

from edgespec import CallEnd, ContextOverflow, Reply, ToolCall
from edgespec.chat.call_text import brief_result, format_call
from edgespec.chat.plain import Waiting
from edgespec.chat.session import ChatSession
from edgespec.chat.tool_box import Permission, ToolBox
from edgespec.system.console import warn
from edgespec.system.signals import catch_ctrl_c

MOST_ROUNDS = 8  # answers that call tools, one after another, to one message
_REFUSED = "The user refused this call. Do not repeat it unless you are asked to."
_NOT_ASKED = "This call was not run, because the user ended the answer before it."
_NOBODY = "This call was not run, because nobody can be asked whether it may be."
_ENDED = "error: the user ended this call while it ran"
_ENOUGH = "This call was not run: there were too many for one message. Answer with what you know by now."
_TOO_LONG = "error: the result of this call is too long for the context"


def replies_to_results(session: ChatSession) -> Iterator[Reply]:
    """Run the calls that the last answer has ended with, give what the model says then, and so on.

    After MOST_ROUNDS answers with calls it is told that it may make none, and its next answer is the last one.
    There is none where the user ends the answer instead of saying whether a call may be run.

    Raises ContextOverflow: There is no room for any result.
    """
    for num_rounds in count(1):
        # Those of an older answer stay where another one in its place has no word; they are not run.
        is_asked = session.last is not None and session.last.finish_reason == "tool_calls"
        if not is_asked or not (calls := session.conversation.calls):
            if num_lost := sum(
                isinstance(event, CallEnd) for chunk in session.answer for event in chunk.tool_calls
            ):
                session.info(f"the answer was cut off, so its {num_lost} tool calls were not run")
            return
        if num_rounds > MOST_ROUNDS + 1:
            session.info(f"stopped: the model still calls tools after {MOST_ROUNDS} rounds of calls")
            return
        results = [_ENOUGH] * len(calls) if num_rounds > MOST_ROUNDS else _run_all(session, calls)
        if num_left := len(calls) - len(results):
            if results:  # calls that were run are in the conversation, with their results
                _give(session, [*results, *[_NOT_ASKED] * num_left]).close()
                session.save()
            session.info("(the answer ends here; /retry asks again)")
            return
        reply = _give(session, results)
        session.save()
        yield reply


def _give(session: ChatSession, results: Sequence[str]) -> Reply:
    try:
        return session.conversation.give_results(results)
    except ContextOverflow:
        session.info("the results of the tools are too long for the context; the model is told so")
        return session.conversation.give_results([_TOO_LONG] * len(results))


def _run_all(session: ChatSession, calls: Sequence[ToolCall]) -> list[str]:
    """Results for the model of its calls; fewer than these where the user ends the answer."""
    results = list[str]()
    for call in calls:
        if (result := _answer_call(session, call)) is None:
            break
        results.append(result)
    return results


def _answer_call(session: ChatSession, call: ToolCall) -> str | None:
    """Run a call if the user allows it; return the result for the model. None: the user ends the answer."""
    box = session.tools
    assert box is not None  # it alone lets a model call tools
    is_allowed = call.name in box.allowed
    if not (is_allowed and session.is_quiet):
        session.info(f"the model calls {format_call(call)}")
    if not is_allowed:
        if session.permit is None:
            warn(f"{call.name} was not run: there is no terminal to ask in; --allow {call.name} allows it")
            return _NOBODY
        if (permission := session.permit(call.name)) is None:
            return None
        if permission is Permission.NO:
            session.info("not run; the model is told that you refused")
            return _REFUSED
        if permission is Permission.ALWAYS:
            box.allowed.add(call.name)
    return _run(session, box, call)


def _run(session: ChatSession, box: ToolBox, call: ToolCall) -> str:
    process = next((each for each in box.processes if call.name in {tool.name for tool in each.tools}), None)
    if process is None:  # it was started anew, and offers less than before
        session.info(said := f"there is no tool {call.name} any more")
        return f"error: {said}"
    waiting = Waiting(sys.stdout, lambda: f"{call.name} is running; Ctrl-C ends it")
    with catch_ctrl_c(process.end_call) as was_pressed, waiting:
        result = process.run(call)
    if was_pressed():
        session.info(f"{call.name} was ended; the model is told so")
        return _ENDED
    if not session.is_quiet:
        if result.printed.strip():
            session.info(f"{call.name} printed: {brief_result(result.printed)}")
        session.info(f"{call.name if result.is_error else 'result'}: {brief_result(result.text)}")
    return result.text
