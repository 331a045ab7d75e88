"""Work in a deeper stack."""

import threading

import pytest

from edgespec.system.threads import run_with_stack


def test_work_runs_in_a_thread_of_its_own_and_its_result_and_errors_come_back() -> None:
    before = threading.stack_size()
    assert run_with_stack(threading.get_ident, 1 << 20) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        run_with_stack(lambda: 1 // 0, 1 << 20)
    assert threading.stack_size() == before
