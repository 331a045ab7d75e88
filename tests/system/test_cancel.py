import threading

import pytest

from edgespec.errors import Cancelled
from edgespec.system.cancel import Cancel


def test_what_goes_on_is_ended_and_what_is_over_or_not_begun_is_not() -> None:
    cancel, ended = Cancel(), list[str]()
    with cancel.on_set(lambda: ended.append("over")):
        pass
    with cancel.on_set(lambda: ended.append("outer")), cancel.on_set(lambda: ended.append("inner")):
        cancel.require_unset()
        cancel.set()
    assert ended == ["outer", "inner"]
    assert cancel.is_set
    with pytest.raises(Cancelled), cancel.on_set(lambda: ended.append("late")):
        pytest.fail("it begins nothing once it is set")
    with pytest.raises(Cancelled):
        cancel.require_unset()
    assert ended == ["outer", "inner"]


def test_it_is_set_from_another_thread() -> None:
    cancel, ended = Cancel(), threading.Event()
    with cancel.on_set(ended.set):
        threading.Thread(target=cancel.set).start()
        assert ended.wait(120)
