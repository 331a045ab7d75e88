from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from edgespec.runtimes.devices import find_device
from edgespec.setup.open_model import open_model, read_folder
from edgespec.system.cancel import Cancel


@pytest.mark.parametrize("nth", [1, 2])
def test_ctrl_c_as_the_loading_begins_ends_it(tiny_model: Path, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come while a thread is being started, before anything waits for the threads."""
    submit, cancel, jobs = ThreadPoolExecutor.submit, Cancel(), list[Future[object]]()

    def interrupted(self: ThreadPoolExecutor, *arguments: object) -> Future[object]:
        jobs.append(submit(self, *arguments))  # type: ignore[arg-type]
        if len(jobs) == nth:
            raise KeyboardInterrupt
        return jobs[-1]

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    model = read_folder(tiny_model)
    with pytest.raises(KeyboardInterrupt):
        open_model(model, find_device("cpu"), num_threads=1, cancel=cancel)
    assert cancel.is_set
