"""How models write calls of tools: a declaration for each family, found by what its chat template says.

CallFormat is data; call_body.py reads by it, and notations.py writes.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

from edgespec.tools import channels


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonBody:
    """Calls as JSON: an object with name and arguments, or a list of them.

    names, arguments: Keys of both; the first of each is what templates write, others are read too.
    is_keyed: The object has one key, the name, whose value is the arguments.
    is_list: Templates write a list.
    """

    names: tuple[str, ...] = ("name", "tool_name", "function")
    arguments: tuple[str, ...] = ("arguments", "parameters", "args")
    is_keyed: bool = False
    is_list: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBody:
    """The name, then its arguments as a JSON object.

    before: Texts of which one may come before the name.
    between: The first is between name and arguments, others may come before it.
    after: What comes behind the arguments.
    text_name: A name that stands for text, which follows.
    """

    between: tuple[str, ...]
    before: tuple[str, ...] = ()
    after: str = ""
    text_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TagBody:
    """The name, then each argument between tags. Texts stand as they are, other values as JSON.

    begin, name_end: Around the name. A name_end of "" ends at the white space or the tag behind it.
    key, key_end, value, value_end: Around each argument's name and value.
    kinds: Behind the name, what tells that a value is text, and what that it is JSON; else the schema tells.
    end: Behind the last argument.
    space: Around values.
    quotes: What may stand around a text too.
    """

    begin: str
    name_end: str
    key: str
    key_end: str
    value_end: str
    value: str = ""
    kinds: tuple[str, str] = ("", "")
    end: str = ""
    space: str = "\n"
    quotes: tuple[str, str] = ("", "")

    def opening(self, key: str, *, is_text: bool) -> str:
        """The text before the value of an argument."""
        kind = self.kinds[0] if is_text else self.kinds[1]
        return self.key + key + kind + self.key_end + ("\n" + self.value if self.value else "") + self.space


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonBody:
    """Calls as Python writes them: [name(key="value")].

    has_lines: Templates write each on a line of its own, and no list.
    """

    has_lines: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsBody:
    """call:name{key:value}, with quote around texts."""

    quote: str


Body = JsonBody | NamedBody | TagBody | PythonBody | PairsBody


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How one family of models writes calls.

    signs: Texts that tell the family's chat templates: all of one of these rows are in them. Where none are given,
        the beginning of the first frame does.
    frames: What stands before and behind a call, or a list of calls; the first is what templates write. A frame
        without an end lasts as long as its calls. White space within frames may be missing.
    noise: Texts that may stand around frames and mean nothing.
    is_bare: JSON that is a call counts without a frame too, as the first thing of an answer.
    is_open: The prompt ends in the beginning of a frame.
    joint: What templates write between two frames.
    outer: What templates write around all frames.
    said: What stands before text that is no call.
    asides: What stands around the texts that may come before, each once, in this order.
    """

    name: str
    frames: tuple[tuple[str, str], ...]
    body: Body
    _: KW_ONLY
    signs: tuple[tuple[str, ...], ...] = ()
    noise: tuple[str, ...] = ()
    is_bare: bool = False
    is_open: bool = False
    joint: str = "\n"
    outer: tuple[str, str] = ("", "")
    said: str = ""
    asides: tuple[tuple[str, str], ...] = ()

    def marks(self) -> Iterator[str]:
        """The texts that a parser has to see, also where they are special tokens."""
        for pair in (*self.frames, self.outer):
            yield from pair
        yield from self.noise
        if isinstance(self.body, NamedBody):
            yield from (*self.body.before, *self.body.between, self.body.after)
        if isinstance(self.body, PairsBody):
            yield self.body.quote


_QWEN_CODER = TagBody(
    begin="<function=", name_end=">", key="<parameter=", key_end=">", value_end="</parameter>", end="</function>"
)
_GLM = TagBody(
    begin="", name_end="", key="<arg_key>", key_end="</arg_key>", value="<arg_value>",
    value_end="</arg_value>", space="",
)  # fmt: skip
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _invokes(mark: str = "", kinds: tuple[str, str] = ("", "")) -> TagBody:
    """Calls as <invoke name="…"> and <parameter name="…">, of which the frame begins the first."""
    return TagBody(
        begin="", name_end='">', key=f'<{mark}parameter name="', key_end='">', kinds=kinds,
        value_end=f"</{mark}parameter>", end=f"</{mark}invoke>", space="",
    )  # fmt: skip


_DSML = "｜DSML｜"


def _dsml(name: str, word: str) -> CallFormat:
    """A format of DeepSeek with marks of its own, of which a word is around all calls."""
    return CallFormat(
        name,
        ((f'<{_DSML}invoke name="', ""),),
        _invokes(_DSML, ('" string="true', '" string="false')),
        signs=((_DSML, f"{word}>"),),
        outer=(f"<{_DSML}{word}>\n", f"\n</{_DSML}{word}>"),
    )


HERMES = CallFormat(
    "hermes",
    # The others are what small models of the family write in its place.
    (("<tool_call>\n", "\n</tool_call>"), ("<tools>\n", "\n</tools>"), ("<function_call>", "</function_call>")),
    JsonBody(),
    signs=(("<tool_call>",), ("xml_tools",)),
    is_bare=True,
)

_LIST = JsonBody(is_list=True)
_COMMAND = JsonBody(names=("tool_name",), arguments=("parameters",), is_list=True)
FORMATS = (
    CallFormat(
        "harmony",
        ((f"{channels.CALL}functions.", ""),),
        NamedBody(between=(channels.CALL_BODY,)),
        signs=((channels.CHANNEL, "<|call|>"),),
        noise=(channels.NEXT,),
        joint=channels.NEXT,
        said=channels.FINAL,
        asides=((channels.ANALYSIS, channels.NEXT), (channels.COMMENTARY, channels.NEXT)),
    ),
    CallFormat(
        "deepseek",
        ((_CALL, _CALL_END),),
        NamedBody(before=("function" + _SEP,), between=("\n```json\n",), after="\n```"),
        signs=((_CALL, "```json"),),
        outer=(_BEGIN, _END),
    ),
    CallFormat("deepseek-v3.1", ((_CALL, _CALL_END),), NamedBody(between=(_SEP,)), joint="", outer=(_BEGIN, _END)),
    _dsml("deepseek-v3.2", "function_calls"),
    _dsml("deepseek-v4", "tool_calls"),
    CallFormat(
        "minimax",
        (('<invoke name="', ""),),
        _invokes(),
        signs=(("<minimax:tool_call>",),),
        outer=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    ),
    CallFormat(
        "kimi",
        (("<|tool_call_begin|>", "<|tool_call_end|>"),),
        NamedBody(before=("functions.",), between=("<|tool_call_argument_begin|>",)),
        signs=(("<|tool_call_argument_begin|>",),),
        joint="",
        outer=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    CallFormat("seed", (("<seed:tool_call>\n", "\n</seed:tool_call>"),), _QWEN_CODER),
    CallFormat(
        "qwen3-coder",
        (("<tool_call>\n", "\n</tool_call>"), ("<function=", "")),
        _QWEN_CODER,
        signs=(("<function=", "<parameter="),),
        noise=("</tool_call>",),
    ),
    CallFormat(
        "minicpm5",
        (('<function name="', ""),),
        TagBody(
            begin="",
            name_end='">',
            key='<param name="',
            key_end='">',
            value_end="</param>",
            end="</function>",
            space="",
            quotes=("<![CDATA[", "]]>"),
        ),
    ),
    CallFormat("olmo3", (("<function_calls>", "</function_calls>"),), PythonBody(has_lines=True)),
    CallFormat("functionary", (("<function=", "</function>"),), NamedBody(between=(">",)), joint=""),
    CallFormat(
        "functionary-v3.2",
        ((">>>", ""),),
        NamedBody(between=("\n",), text_name="all"),
        signs=((">>>", "recipient==all"),),
        is_open=True,
        joint="",
    ),
    CallFormat("glm", (("<tool_call>", "</tool_call>"),), _GLM, signs=(("<arg_key>",),)),
    CallFormat(  # its templates state no form: a message is a call where it begins with the name of a tool
        "glm4",
        (("<|assistant|>", ""),),
        NamedBody(between=("\n",)),
        signs=(("<|observation|>", "metadata"),),
        is_open=True,
        joint="",
    ),
    CallFormat(
        "hunyuan",
        (("<tool_call>", "</tool_call>"),),
        NamedBody(between=("\n```json\n",), after="\n```"),
        signs=(("<tool_calls>", "<tool_call>", "```json"),),
        outer=("<tool_calls>", "</tool_calls>"),
    ),
    CallFormat(
        "mistral-args",
        (("[TOOL_CALLS]", ""),),
        NamedBody(between=("[ARGS]", "[CALL_ID]")),
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        joint="",
    ),
    CallFormat("mistral", (("[TOOL_CALLS]", ""),), _LIST, is_bare=True),
    CallFormat("command-r7b", (("<|START_ACTION|>", "<|END_ACTION|>"),), _COMMAND),
    CallFormat(
        "command-r",
        (("Action:\n```json\n", "\n```"), ("Action: ```json\n", "\n```"), ("Action:```json\n", "\n```")),
        _COMMAND,
        signs=(("Action:", "tool_name"),),
    ),
    CallFormat("nemotron", (("<TOOLCALL>", "</TOOLCALL>"),), _LIST),
    CallFormat(
        "phi-4-mini",
        (("<|tool_call|>", "<|/tool_call|>"), ("functools", "")),
        _LIST,
        signs=(("<|tool|>",),),
        is_bare=True,
    ),
    CallFormat("granite", (("<|tool_call|>", ""), ("<tool_call>", "")), _LIST, is_bare=True),
    CallFormat("gigachat", (("<|function_call|>", ""),), JsonBody()),
    CallFormat(
        "function-gemma",
        (("<start_function_call>", "<end_function_call>"),),
        PairsBody(quote="<escape>"),
        joint="",
    ),
    CallFormat("gemma4", (("<|tool_call>", "<tool_call|>"),), PairsBody(quote='<|"|>'), joint=""),
    CallFormat(
        "lfm2",
        (("<|tool_call_start|>", "<|tool_call_end|>"),),
        PythonBody(),
        signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)),
    ),
    CallFormat("apertus", (("<|tools_prefix|>", "<|tools_suffix|>"),), JsonBody(is_keyed=True, is_list=True)),
    CallFormat("apriel", (("<tool_calls>", "</tool_calls>"),), _LIST),
    CallFormat(
        "llama3",
        (("", ""), ("<|python_tag|>", "")),
        JsonBody(arguments=("parameters", "arguments")),
        signs=(('{"name": function name, "parameters":',), ("<|python_tag|>",)),
        is_bare=True,
        joint="; ",
    ),
    HERMES,
)


def find_format(template: str) -> CallFormat | None:
    """The format that a chat template states; None where it states none that is known."""
    for each in FORMATS:
        signs = each.signs or ((each.frames[0][0].strip(),),)
        if any(all(text in template for text in row) for row in signs):
            return each
    return None
