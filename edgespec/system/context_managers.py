"""Context managers made of generators, which leave no cycle of references where they raise or swallow an error.

Those of contextlib do in Python 3.12 and 3.13: the frame of their __exit__ keeps the error, and this the frames
that it passed through, with those of their callers. All their locals, such as a model that was closed, then stay
until the garbage collector looks.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


def contextmanager(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Makes a context manager of a generator function, as contextlib's does."""

    @wraps(function)
    def make(*arguments: P.args, **options: P.kwargs) -> AbstractContextManager[T]:
        return _Context(function(*arguments, **options))

    return make


class _Context(AbstractContextManager[T]):
    def __init__(self, generator: Iterator[T]) -> None:
        self._generator = cast(Generator[T, None, None], generator)

    def __enter__(self) -> T:
        return next(self._generator)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            if error is None:
                next(self._generator, None)
                return False
            try:
                self._generator.throw(error)
            except StopIteration as stopped:
                return stopped is not error
            except BaseException as raised:
                # A StopIteration leaves a generator as the cause of a RuntimeError.
                is_wrapped = isinstance(error, StopIteration) and type(raised) is RuntimeError
                if raised is not error and not (is_wrapped and raised.__cause__ is error):
                    raise
                error.__traceback__ = traceback
                return False
            raise AssertionError("the generator goes on after the block")
        finally:
            del kind, error, traceback
