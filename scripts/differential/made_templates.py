# ruff: noqa: E501  a template is one text
"""Chat templates, made by chance of what published ones do, in words of their own.

Each is a row of choices: how turns are marked, what becomes of a system message, how contents are read, how tools,
calls, results and reasoning are written, what is refused, and which of Jinja's means it takes for that.
"""

from random import Random
from typing import NamedTuple


class Marks(NamedTuple):
    """The texts around a turn; {role} is replaced."""

    name: str
    before: str
    after: str


_MARKS = (
    Marks("chatml", "<|im_start|>{role}\n", "<|im_end|>\n"),
    Marks("headers", "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
    Marks("turns", "<start_of_turn>{role}\n", "<end_of_turn>\n"),
    Marks("pipes", "<|{role}|>\n", "<|end|>\n"),
    Marks("roles", "<|start_of_role|>{role}<|end_of_role|>", "<|end_of_text|>\n"),
    Marks("words", "### {role}:\n", "\n\n"),
    Marks("brackets", "[{role}] ", " [/{role}]"),
    Marks("bare", "{role}: ", "\n"),
)
_SAID = (
    "message['content']",
    "message.content",
    "message['content'] | trim",
    "message['content'].strip()",
    "(message.content or '')",
    "said(message.content)",
    "content",
    "parts",
)
_SYSTEM = (
    "own turn",
    "in the first user turn",
    "refused",
    "with a default",
    "dropped",
    "with the date",
    "developer",
)
_TOOLS = ("none", "in system", "in user", "turn of their own", "indented", "by macro", "one a line", "by fields")
_RESULTS = ("tool", "ipython", "observation", "user", "in one user turn", "with name", "dropped")
_CALLS = ("none", "hermes", "list", "tags", "python", "by macro", "text arguments", "first alone")
_THINKING = ("none", "kept", "dropped", "split", "switch", "switch by word", "last alone")
_CHECKS = ("none", "alternating", "known roles", "user last", "first role")
_EXTRAS = (
    "none",
    "date",
    "date if given",
    "documents",
    "builtin tools",
    "separators",
    "sorted",
    "chained filters",
)
_LOOPS = ("plain", "rest", "namespace", "index", "neighbours", "continue", "reversed", "break")


class Form(NamedTuple):
    """One template's choices."""

    marks: Marks
    said: str
    system: str
    tools: str
    results: str
    calls: str
    thinking: str
    check: str
    extra: str
    loop: str
    trains: bool  # has the tag generation
    trims: bool  # takes white space away by - in its tags
    begins: bool  # writes bos_token
    ends: bool  # writes eos_token behind the assistant


def draw_form(random: Random) -> Form:
    choose = random.choice
    return Form(
        choose(_MARKS), choose(_SAID), choose(_SYSTEM), choose(_TOOLS), choose(_RESULTS), choose(_CALLS),
        choose(_THINKING), choose((*_CHECKS, "none", "none")), choose(_EXTRAS), choose((*_LOOPS, "plain")),
        random.random() < 0.3, random.random() < 0.5, random.random() < 0.5, random.random() < 0.3,
    )  # fmt: skip


def write_template(form: Form) -> str:
    """The template of a form."""
    lines = [*_beginning(form), *_head(form), *_loop_begin(form), *_turn(form), *_loop_end(form)]
    lines += [
        "{% if add_generation_prompt %}",
        _open(form, "assistant") + _first_thought(form),
        "{% endif %}",
    ]
    text = "\n".join(lines) if form.trims else "".join(lines)
    return text.replace("{% ", "{%- ").replace(" %}", " -%}") if form.trims else text


def _open(form: Form, role: str) -> str:
    return _text(form.marks.before.replace("{role}", role))


def _close(form: Form, role: str) -> str:
    return _text(form.marks.after.replace("{role}", role))


def _text(text: str) -> str:
    """An expression that writes a text, so that tags beside it take none of its white space."""
    return "{{ " + repr(text) + " }}" if text else ""


def _beginning(form: Form) -> list[str]:
    lines = ["{{ bos_token }}"] if form.begins else []
    lines.append(
        "{% macro said(given) %}{% if given is string %}{{ given }}{% elif given is none %}{% else %}"
        "{% for part in given %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
        "{{ '<image>' }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    )
    lines.append(
        "{% macro fields(given) %}{% for key, value in given.items() %}{{ key }}={{ value | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}{% endmacro %}"
    )
    checks = {
        "user last": "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('ask something') }}{% endif %}",
        "first role": "{% if messages[0].role not in ['system', 'user'] %}"
        "{{ raise_exception('begins with ' ~ messages[0].role) }}{% endif %}",
    }
    return [*lines, *([checks[form.check]] if form.check in checks else [])]


_DOCUMENTS = (
    "{% if documents is not none and documents | length %}{{ 'Documents:\\n' }}{% for each in documents %}"
    "{{ each.title }}: {{ each['text'] }}{{ '\\n' }}{% endfor %}{% endif %}"
)
_EXTRA_TEXTS = {
    "date": "{{ 'Today: ' ~ strftime_now('%d %b %Y') ~ '\\n' }}",
    "date if given": "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{{ 'Today: ' ~ date_string }}",
    "documents": _DOCUMENTS,
    "builtin tools": "{% if builtin_tools is defined %}{{ 'Tools: ' ~ builtin_tools | reject('equalto', 'code') "
    "| join(', ') }}{% endif %}{% if tools is not none %}{{ 'Environment: ipython\\n' }}{% endif %}",
    "separators": "{{ {'b': 1, 'a': ['x', none, true]} | tojson(separators=(',', ':')) }}",
    "sorted": "{{ {'b': 1, 'a': 'é<&>'} | tojson(sort_keys=true, ensure_ascii=true) }}",
    "chained filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list "
    "| length }}{{ ['a', 'b'] | map('upper') | join('-') | replace('-', '+') | default('x') }}",
}

_TOOL_TEXTS = {
    "in system": "{{ 'Functions: ' ~ (tools | tojson) ~ '\\n' }}",
    "in user": "{{ '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}",
    "turn of their own": "{{ '<tools>' ~ (tools | map(attribute='function') | list | tojson) ~ '</tools>' }}",
    "indented": "{% for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}",
    "by macro": "{% for tool in tools %}{{ fields(tool.function) }}{{ '\\n' }}{% endfor %}",
    "one a line": "<tools>{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}</tools>",
    "by fields": "{% for tool in tools %}{% set f = tool.function %}{{ f.name }}({% for name, kind in "
    "f.parameters.properties | dictsort %}{{ name }}: {{ kind.type | default('any') }}"
    "{{ ', ' if not loop.last }}{% endfor %}){% if f.description is defined %}{{ ' # ' + f.description }}"
    "{% endif %}{{ '\\n' }}{% endfor %}",
}


def _tools(form: Form) -> str:
    """The tools, where there are some."""
    asked = "tools is not none and tools | length > 0" if form.trains else "tools"
    return f"{{% if {asked} %}}{_TOOL_TEXTS[form.tools]}{{% endif %}}"


def _head(form: Form) -> list[str]:
    """What stands before the turns: the system message, tools and extras."""
    has = "messages and messages[0]['role'] == 'system'"
    first = "messages[0]['content']" if form.said == "message['content']" else "said(messages[0].content)"
    extra = _EXTRA_TEXTS.get(form.extra, "")
    tools = _tools(form) if form.tools in ("in system", "indented", "one a line", "by fields") else ""
    opened, closed = _open(form, "system"), _close(form, "system")
    if form.system == "refused":
        refusal = "{{ raise_exception('System role not supported') }}"
        return [f"{{% if {has} %}}{refusal}{{% endif %}}", extra, tools]
    if form.system in ("in the first user turn", "dropped"):
        given = f"{{% set system = {first} if {has} else '' %}}"
        return [given, *([opened, tools, closed] if tools else []), extra]
    if form.system == "with a default":
        default = "You are a helpful assistant."
        return [f"{opened}{{{{ {first} if {has} else {default!r} }}}}", extra, tools, closed]
    if form.system == "with the date":
        date = "{{ '\\n' ~ strftime_now('%Y-%m-%d') }}"
        return [f"{opened}{{% if {has} %}}{{{{ {first} }}}}{{% endif %}}{date}", extra, tools, closed]
    role = "developer" if form.system == "developer" else "system"
    shown = f"{_open(form, role)}{{{{ {first} }}}}{extra}{tools}{closed}"
    return [f"{{% if {has} %}}{shown}{{% elif tools %}}{opened}{tools}{closed}{{% endif %}}"]


def _loop_begin(form: Form) -> list[str]:
    rest = "{% set rest = messages[1:] if messages and messages[0]['role'] == 'system' else messages %}"
    each = "rest[::-1] | reverse" if form.loop == "reversed" else "rest"
    begin = [rest, "{% set ns = namespace(users=0, last=-1, wrote=false) %}"]
    if form.loop in ("namespace", "neighbours") or form.thinking == "last alone":
        begin.append(
            "{% for m in rest %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        )
    begin.append(f"{{% for message in {each} %}}")
    if form.loop == "continue":
        begin.append("{% if message['role'] == 'nobody' %}{% continue %}{% endif %}")
    if form.loop == "break":
        begin.append("{% if loop.index0 > 20 %}{% break %}{% endif %}")
    if form.loop == "index":
        begin.append("{{ loop.index }}/{{ loop.length }} ")
    if form.check == "alternating":
        begin.append(
            "{% if message.role in ('user', 'assistant') and not message.tool_calls and "
            "(message.role == 'user') != (ns.users % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
            "{% if message.role in ('user', 'assistant') and not message.tool_calls %}"
            "{% set ns.users = ns.users + 1 %}{% endif %}"
        )
    if form.said == "content":
        begin.append("{% set content = message.content if message.content is string else said(message.content) %}")
    return begin


_PARTS = "{% for part in message['content'] %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"


def _turn(form: Form) -> list[str]:
    said = _PARTS if form.said == "parts" else "{{ " + form.said + " }}"
    lines = ["{% if message['role'] == 'user' %}", _open(form, "user")]
    if form.tools in ("in user", "turn of their own", "by macro"):
        lines.append(f"{{% if loop.first %}}{_tools(form)}{{% endif %}}")
    if form.system == "in the first user turn":
        lines.append("{% if loop.first and system %}{{ system + '\\n\\n' }}{% endif %}")
    lines += [said, _close(form, "user"), "{% elif message['role'] == 'assistant' %}", _open(form, "assistant")]
    lines.append("{% generation %}" if form.trains else "")
    lines += [*_reasoning(form), *_calls(form), _close(form, "assistant")]
    lines.append("{{ eos_token }}" if form.ends else "")
    lines.append("{% endgeneration %}" if form.trains else "")
    lines += _results(form)
    if form.check == "known roles":
        lines.append("{% else %}{{ raise_exception('Unknown role: ' + message['role']) }}")
    return [*lines, "{% endif %}"]


def _reasoning(form: Form) -> list[str]:
    """The content of the assistant, with its reasoning as the form has it."""
    if form.said == "parts":
        return [_PARTS]
    plain = (
        "{{ " + form.said + " }}"
        if form.said != "message['content'].strip()"
        else "{{ (message.content or '').strip() }}"
    )
    given = "message.reasoning_content is defined and message.reasoning_content is string"
    shown = f"{{% if {given} %}}{{{{ '<think>\\n' + message.reasoning_content.strip() + '\\n</think>\\n\\n' }}}}{{% endif %}}"
    if form.thinking == "kept":
        return [shown, plain]
    if form.thinking == "last alone":
        return [f"{{% if loop.index0 > ns.last %}}{shown}{{% endif %}}", plain]
    if form.thinking in ("dropped", "split", "switch"):
        split = "{% set text = said(message.content) %}{% if '</think>' in text %}"
        keep = "{% set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{{ '(' + thought + ')' }}"
        after = "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ text }}"
        return [split, keep if form.thinking == "split" else "", after]
    return [plain]


def _first_thought(form: Form) -> str:
    if form.thinking == "switch":
        return "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    if form.thinking == "switch by word":
        return "{% if thinking %}{{ '<think>' }}{% else %}{{ '</think>' }}{% endif %}"
    return ""


_CALL_TEXTS = {
    "hermes": "{% for call in message.tool_calls %}{% if call.function %}{% set call = call.function %}{% endif %}"
    "{{ '\\n<tool_call>\\n{\"name\": \"' }}{{ call.name }}{{ '\", \"arguments\": ' }}"
    "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}"
    "{{ '}\\n</tool_call>' }}{% endfor %}",
    "list": "{{ '[TOOL_CALLS] [' }}{% for call in message.tool_calls %}{{ '{\"name\": \"' + call.function.name + "
    "'\", \"arguments\": ' + (call.function.arguments | tojson) + ', \"id\": \"' + call.id + '\"}' }}"
    "{{ ', ' if not loop.last else ']' }}{% endfor %}",
    "tags": "{% for call in message.tool_calls %}{{ '<function=' + call.function.name + '>' }}{% for key, value in "
    "call.function.arguments | items %}{{ '<parameter=' + key + '>\\n' ~ (value | string) ~ '\\n</parameter>' }}"
    "{% endfor %}{{ '</function>' }}{% endfor %}",
    "python": "[{% for call in message['tool_calls'] %}{{ call.function.name }}({{ fields(call.function.arguments) }})"
    "{% if not loop.last %}, {% endif %}{% endfor %}]",
    "by macro": "{% for call in message.tool_calls %}{{ call.function.name ~ ':' ~ fields(call.function.arguments) }}"
    "{% endfor %}",
    "text arguments": "{% for call in message.tool_calls %}{{ '<tool_call>' + call.function.name + '\\n' + "
    "(call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) + "
    "'</tool_call>' }}{% endfor %}",
    "first alone": "{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{{ {'name': message.tool_calls[0].function.name, 'parameters': message.tool_calls[0].function.arguments} | tojson }}",
}  # fmt: skip


def _calls(form: Form) -> list[str]:
    if form.calls == "none":
        return []
    asked = "message.tool_calls is defined and message.tool_calls" if form.begins else "message['tool_calls']"
    return [f"{{% if {asked} %}}{_CALL_TEXTS[form.calls]}{{% endif %}}"]


def _results(form: Form) -> list[str]:
    content = "{{ said(message.content) }}"
    if form.results == "dropped":
        return []
    branch = "{% elif message.role in ['tool', 'ipython'] %}"
    if form.results == "with name":
        return [
            branch,
            _open(form, "tool"),
            "{{ {'name': message.name, 'content': message.content} | tojson }}",
            _close(form, "tool"),
        ]
    if form.results == "in one user turn":
        first = "{% if loop.first or rest[loop.index0 - 1].role != 'tool' %}" + _open(form, "user") + "{% endif %}"
        last = "{% if loop.last or loop.nextitem.role != 'tool' %}" + _close(form, "user") + "{% endif %}"
        return [branch, first, "{{ '\\n<tool_response>\\n' }}", content, "{{ '\\n</tool_response>' }}", last]
    role = {"tool": "tool", "ipython": "ipython", "observation": "observation", "user": "user"}[form.results]
    text = (
        "{% if message.content is mapping or message.content is iterable and message.content is not string %}{{ message.content | tojson }}{% else %}"
        + content
        + "{% endif %}"
    )
    return [branch, _open(form, role), text if role == "ipython" else content, _close(form, role)]


def _loop_end(form: Form) -> list[str]:
    if form.loop == "neighbours":
        return [
            "{% if not loop.last and loop.nextitem.role == message.role %}{{ '~' }}{% endif %}"
            "{% if loop.previtem is defined and loop.previtem.role == 'system' %}{{ '^' }}{% endif %}",
            "{% endfor %}",
        ]
    if form.loop == "namespace":
        return ["{% if loop.index0 == ns.last %}{{ '(last)' }}{% endif %}", "{% endfor %}"]
    return ["{% endfor %}"]
