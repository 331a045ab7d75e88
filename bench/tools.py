"""How well a model calls tools: 20 requests with the call that each wants.

    python bench/tools.py MODEL [--ways auto,required,named,strict] [--requests N] [--drafter auto]

A way says how the call is asked for: auto leaves it to the model, required demands one, named says of which tool,
and strict leaves it to the model and has its arguments follow the schema. For each way it prints how many answers
have calls, how many of them are valid (a known tool, arguments in JSON that follow its schema), and how many are
right (the tool and the arguments that were wanted, in text without regard to case). MODEL is as `edgespec.load`
takes it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, NamedTuple

from command_line import command_line, parse_ways

from edgespec import Engine, ToolCall, load
from edgespec.tools.tool import parse_tools

_MAX_TOKENS = 96
_WAYS = ("auto", "required", "named", "strict")


def get_weather(city: str, days: int = 1) -> str:
    """Tell the weather forecast of a city.

    Args:
        city: Name of the city.
        days: For how many days.
    """
    return ""


def set_timer(minutes: int, label: str = "") -> str:
    """Start a timer that rings after some minutes."""
    return ""


def convert(amount: float, source: str, target: str) -> str:
    """Convert an amount of money.

    Args:
        amount: How much.
        source: Code of the currency it is in, such as USD.
        target: Code of the currency that is wanted, such as EUR.
    """
    return ""


def set_light(room: str, state: Literal["on", "off"]) -> str:
    """Turn the light of a room on or off."""
    return ""


def search_files(pattern: str, folder: str = ".") -> str:
    """Find files by a pattern such as *.py in a folder."""
    return ""


TOOLS = parse_tools([get_weather, set_timer, convert, set_light, search_files])


class Task(NamedTuple):
    """A request, and the call that it wants."""

    prompt: str
    name: str
    arguments: dict[str, Any]


TASKS = (
    Task("What is the weather in Oslo?", "get_weather", {"city": "Oslo"}),
    Task("Give me the forecast for Lima for the next 3 days.", "get_weather", {"city": "Lima", "days": 3}),
    Task("Do I need an umbrella in Dublin today?", "get_weather", {"city": "Dublin"}),
    Task("How will the weather be in New Delhi over 5 days?", "get_weather", {"city": "New Delhi", "days": 5}),
    Task("Set a timer for 10 minutes.", "set_timer", {"minutes": 10}),
    Task("Start a 7 minute timer labelled eggs.", "set_timer", {"minutes": 7, "label": "eggs"}),
    Task("Remind me in half an hour.", "set_timer", {"minutes": 30}),
    Task("Set a timer of 90 minutes with the label bread.", "set_timer", {"minutes": 90, "label": "bread"}),
    Task("Convert 100 USD to EUR.", "convert", {"amount": 100, "source": "USD", "target": "EUR"}),
    Task("How much is 25.5 GBP in JPY?", "convert", {"amount": 25.5, "source": "GBP", "target": "JPY"}),
    Task("I have 3000 CHF. What is that in USD?", "convert", {"amount": 3000, "source": "CHF", "target": "USD"}),
    Task("Change 1 EUR to SEK.", "convert", {"amount": 1, "source": "EUR", "target": "SEK"}),
    Task("Turn on the light in the kitchen.", "set_light", {"room": "kitchen", "state": "on"}),
    Task("Switch the bedroom light off.", "set_light", {"room": "bedroom", "state": "off"}),
    Task("Lights off in the garage, please.", "set_light", {"room": "garage", "state": "off"}),
    Task("Please turn the light in the hall on.", "set_light", {"room": "hall", "state": "on"}),
    Task("Find all *.py files in the folder src.", "search_files", {"pattern": "*.py", "folder": "src"}),
    Task("Search for *.md files in docs.", "search_files", {"pattern": "*.md", "folder": "docs"}),
    Task("Which files match *.txt here?", "search_files", {"pattern": "*.txt"}),
    Task("Look for *.log files in the folder var.", "search_files", {"pattern": "*.log", "folder": "var"}),
)


@dataclass(slots=True)
class Score:
    """What came of the requests of one way."""

    num_requests: int = 0
    num_called: int = 0
    num_valid: int = 0
    num_right: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


def is_valid(call: ToolCall) -> bool:
    """Whether a call is of a tool that there is, and its arguments have the names and types of its schema."""
    tool = next((each for each in TOOLS if each.name == call.name), None)
    try:
        arguments = call.parse()
    except ValueError:
        return False
    if tool is None:
        return False
    properties = tool.parameters["properties"]
    kinds: dict[Any, Any] = {"string": str, "integer": int, "number": (int, float)}
    return (
        arguments.keys() <= properties.keys()
        and set(tool.parameters.get("required", ())) <= arguments.keys()
        and all(
            isinstance(value, kinds.get(properties[key].get("type"), object))
            and value in properties[key].get("enum", [value])
            for key, value in arguments.items()
        )
    )


def is_right(call: ToolCall, task: Task) -> bool:
    """Whether a valid call is the one that a request wants; arguments that it leaves open may be given too."""
    found = call.parse()
    return call.name == task.name and all(
        _plain(found.get(key)) == _plain(value) for key, value in task.arguments.items()
    )


def _plain(value: Any) -> Any:
    return value.strip("/").casefold() if isinstance(value, str) else value


def options_of(way: str, task: Task) -> dict[str, Any]:
    """What asks an engine for a call."""
    if way == "strict":
        tools = [
            {"type": "function", "function": {**each.as_dict()["function"], "strict": True}} for each in TOOLS
        ]
        return {"tools": tools}
    return {"tools": TOOLS, "tool_choice": {"auto": "auto", "required": "required"}.get(way, task.name)}


def ask(engine: Engine, way: str, task: Task, score: Score) -> None:
    """Ask one request, and count what came of it."""
    started = perf_counter()
    answer = engine.generate(
        task.prompt, max_tokens=_MAX_TOKENS, parallel_tool_calls=False, temperature=0.0, **options_of(way, task)
    )
    score.seconds += perf_counter() - started
    score.num_requests += 1
    score.num_tokens += len(answer.token_ids)
    valid = [call for call in answer.tool_calls if is_valid(call)]
    score.num_called += bool(answer.tool_calls)
    score.num_valid += bool(valid)
    is_good = bool(valid) and is_right(valid[0], task)
    score.num_right += is_good
    if not is_good:
        calls = [f"{call.name}({call.arguments})" for call in answer.tool_calls]
        print(f"  {way}: {task.prompt} -> {calls or answer.text!r}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("model")
    parser.add_argument("--ways", default=",".join(_WAYS))
    parser.add_argument("--requests", type=int, default=len(TASKS), help="so many, taken evenly from all")
    parser.add_argument("--drafter", default="auto")
    options = parser.parse_args(arguments)
    ways = parse_ways(parser, options.ways, _WAYS)
    num = min(max(1, options.requests), len(TASKS))
    tasks = [TASKS[i * len(TASKS) // num] for i in range(num)]
    with load(options.model, drafter=options.drafter) as engine:
        print(f"tools: {engine.tool_format}")
        print(f"{'way':10} {'asked':>6} {'called':>7} {'valid':>6} {'right':>6} {'tokens':>7} {'seconds':>8}")
        for way in ways:
            score = Score()
            for task in tasks:
                ask(engine, way, task, score)
            counts = f"{score.num_requests:6} {score.num_called:7} {score.num_valid:6} {score.num_right:6}"
            print(f"{way:10} {counts} {score.num_tokens:7} {score.seconds:8.1f}", flush=True)


if __name__ == "__main__":
    main()
