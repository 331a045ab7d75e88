"""Arguments of Python that are unknown or of a wrong kind: checked, and what was meant instead."""

import os
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from inspect import Parameter, isasyncgenfunction, iscoroutinefunction, signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar, cast

from edgespec.errors import UsageError


def require_kind(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raises UsageError: An argument is of none of the kinds; a switch is no number."""
    is_switch = isinstance(value, bool) and bool not in (kind if isinstance(kind, tuple) else (kind,))
    if is_switch or not isinstance(value, kind):
        raise UsageError(f"{name} is {value!r:.60}; wanted {wanted}")


def require_path(name: str, given: object, wanted: str = "the path of a file") -> Path:
    """An argument as a path. Raises UsageError: It is none that any file can have."""
    try:
        if isinstance(given, str | Path) and str(given) and b"\0" not in os.fsencode(given):
            return Path(given)
    except UnicodeEncodeError:  # half of a surrogate pair
        pass
    raise UsageError(f"{name} is {given!r:.60}; wanted {wanted}")


def require_function(name: str, value: object, wanted: str = "a function") -> None:
    """Raises UsageError: It is no function, or one of asyncio, which nothing here would wait for."""
    if not callable(value):
        raise UsageError(f"{name} is {value!r:.60}; wanted {wanted}")
    functions = value, type(value).__call__  # which an object that can be called has
    if any(map(iscoroutinefunction, functions)) or any(map(isasyncgenfunction, functions)):
        raise UsageError(f"{name} is an async function, which is not awaited here; wanted a plain function")


def plain_number(value: Any) -> Any:
    """A number of another library, such as numpy, as one of Python; anything else as it is."""
    if not isinstance(value, Real) or isinstance(value, int | float):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


# By our arguments, what other libraries and programs call them.
_OTHERS = {
    "model": "model_path model_id model_name path pretrained_model_name_or_path repo_id",
    "max_tokens": "max_new_tokens n_predict num_predict max_completion_tokens max_length",
    "context": "n_ctx num_ctx context_length max_model_len",
    "num_threads": "n_threads num_thread threads",
    "device": "n_gpu_layers num_gpu main_gpu device_map",
    "drafter": "draft_model assistant_model speculative_config",
    "draft_length": "num_speculative_tokens",
    "precision": "quantization quantize quant dtype torch_dtype load_in_4bit load_in_8bit",
    "temperature": "temp do_sample",
    "repetition_penalty": "repeat_penalty",
    "stop": "stop_strings stop_sequences",
    "banned": "bad_words bad_words_ids",
    "schema": "json_schema format guided_json",
    "response_format": "grammar",
    "thinking": "enable_thinking think",
    "template_options": "chat_template_kwargs",
    "timeout_s": "timeout max_time",
    "system": "system_prompt",
    "report": "verbose",
    "offline": "local_files_only",
    "prompt": "messages inputs",
}
_ELSEWHERE = {name: own for own, names in _OTHERS.items() for name in names.split()}
Explained = TypeVar("Explained", bound=Callable[..., Any])


def advise(name: str, known: Collection[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """What was meant by an unknown argument, behind a semicolon, or nothing; elsewhere has advice by names."""
    from difflib import get_close_matches  # which nothing else needs

    meant = _ELSEWHERE.get(name, name)
    if meant not in known and elsewhere and meant in elsewhere:
        return f"; {elsewhere[meant]}"
    near = [meant] if meant in known else get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""


def explains_arguments(
    function: Explained,
    options: Collection[str] = (),
    elsewhere: Callable[[str], Mapping[str, str]] = lambda function: {},
) -> Explained:
    """Has a function or a class take numbers of numpy too, and advise on an argument that it does not have.

    Args:
        options: The arguments that it takes by **.
        elsewhere: Gives, for the name of the function, what to do with arguments that belong elsewhere.
    """
    if isinstance(function, type):
        function.__init__ = explains_arguments(function.__init__, options, elsewhere)  # type: ignore[misc]
        return function
    name = function.__qualname__.removesuffix(".__init__")
    named = [each.name for each in signature(function).parameters.values() if each.kind != Parameter.VAR_KEYWORD]
    known = {*named, *options} - {"self", "cls"}

    def checked(given: dict[str, Any]) -> dict[str, Any]:
        for each in given:
            if each not in known:
                advice = advise(each, known, elsewhere(name))
                raise TypeError(f"{name}() got an unexpected keyword argument '{each}'{advice}")
        return {each: plain_number(value) for each, value in given.items()}

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        return function(*args, **checked(given))

    @wraps(function)
    async def call_in_task(*args: Any, **given: Any) -> Any:
        return await function(*args, **checked(given))

    return cast("Explained", call_in_task if iscoroutinefunction(function) else call)
