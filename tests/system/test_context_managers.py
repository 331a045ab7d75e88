"""Context managers made of generators: they do as contextlib's, and keep nothing alive."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from weakref import ref

import pytest

from edgespec.system.context_managers import contextmanager


def passing() -> Iterator[int]:
    yield 7


def finishing() -> Iterator[int]:
    try:
        yield 7
    finally:
        pass


def raising_again() -> Iterator[int]:
    try:
        yield 7
    except ValueError:
        raise


def translating() -> Iterator[int]:
    try:
        yield 7
    except Exception as error:
        raise LookupError("other") from error


def translating_without_cause() -> Iterator[int]:
    try:
        yield 7
    except Exception:
        raise LookupError("other") from None


def swallowing() -> Iterator[int]:
    try:
        yield 7
    except Exception:
        return


def failing_at_first() -> Iterator[int]:
    raise LookupError("at first")
    yield 7


def failing_at_last() -> Iterator[int]:
    yield 7
    raise LookupError("at last")


GENERATORS = [
    passing, finishing, raising_again, translating, translating_without_cause, swallowing, failing_at_first,
    failing_at_last,
]  # fmt: skip
ERRORS = [None, ValueError("x"), StopIteration(3), KeyboardInterrupt(), GeneratorExit(), RuntimeError("y")]


def outcome(manager: Callable[[], AbstractContextManager[int]], error: BaseException | None) -> object:
    """What a block in a context manager gives, and the frames and causes of what leaves it."""
    found = []
    try:
        with manager() as value:
            found.append(value)
            if error is not None:
                raise error.with_traceback(None)
    except BaseException as left:
        frames, traceback = [], left.__traceback__
        while traceback:
            frames.append(traceback.tb_frame.f_code.co_name)
            traceback = traceback.tb_next
        frames = [name for name in frames if name not in ("__enter__", "__exit__")]
        found += [type(left), str(left), frames, repr(left.__cause__), left.__suppress_context__]
    return found


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("generator", GENERATORS, ids=lambda each: each.__name__)
def test_a_block_ends_as_in_one_of_contextlib(
    generator: Callable[[], Iterator[int]], error: BaseException | None
) -> None:
    assert outcome(contextmanager(generator), error) == outcome(contextlib.contextmanager(generator), error)


class Large:
    pass


@pytest.mark.parametrize("generator", GENERATORS[:6], ids=lambda each: each.__name__)
def test_what_a_block_held_is_freed_once_an_error_has_left_it(generator: Callable[[], Iterator[int]]) -> None:
    manager, held = contextmanager(generator), []

    def fail(large: Large) -> None:
        held.append(ref(large))
        with manager():
            raise ValueError("x")

    gc.disable()  # so that what only the collector of garbage would free is seen
    try:
        with contextlib.suppress(Exception):
            fail(Large())
        assert held[0]() is None
    finally:
        gc.enable()
