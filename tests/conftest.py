import gc
import gettext
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import psutil
import pytest
import tiny
from hypothesis import HealthCheck, settings
from lent import LentProcess

from edgespec.config.options import DEFAULT_MODEL
from edgespec.export.convert import export_model
from edgespec.export.options import Trimming
from edgespec.manifest import Manifest, read_manifest
from edgespec.setup.catalog import CATALOG, CatalogFile
from edgespec.setup.downloads import fetch
from edgespec.system.disk import hold_lock
from edgespec.text.tokenizer import Tokenizer


def pytest_configure(config: pytest.Config) -> None:
    """Properties are tried on fewer examples where the slow tests are left out too; a busy machine breaks none.

    What is compiled is kept, here and by the many programs that tests start: 4 s of a process that tests. They
    take Ctrl-C also where a shell has it ignored, since the tests run in the background.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.dont_write_bytecode = False
    gc.set_threshold(20_000, 20, 20)  # of 700, 10, 10: garbage is looked for in a 30th of the time
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    num_examples = 30 if "not slow" in config.option.markexpr else 100
    settings.register_profile(
        "of this run",
        max_examples=num_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],  # it measures seconds, in which the machine may pause
    )
    settings.load_profile("of this run")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Each of several processes reads the folders from another one on, so that they compile different tests.

    All of them read all tests, and find compiled what another has read.
    """
    config = session.config
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and config.args == config.getini("testpaths"):
        (tests,) = config.args
        folders = [
            str(path)
            for path in sorted(config.rootpath.joinpath(tests).glob("[!_]*"))
            if path.name != "conftest.py"
        ]
        first = int(worker) * len(folders) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        config.args = folders[first:] + folders[:first]
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Modules with long tests come first, so that at the end no process waits for the long test of another."""
    items.sort(key=lambda item: item.path)  # whichever was read first
    yield
    ranks = dict[Path, int]()
    for item in items:
        rank = 0 if item.get_closest_marker("model") else 1 if item.get_closest_marker("slow") else 2
        ranks[item.path] = min(rank, ranks.get(item.path, rank))
    items.sort(key=lambda item: ranks[item.path])


def pytest_collection_finish() -> None:
    """Tests that collect garbage look through their own, and not through all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Nor through what earlier modules have left, such as packages that they were the first to import."""
    found = yield
    if nextitem is not None and nextitem.path != item.path:
        pytest_collection_finish()
    return found


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a test that waits for a process or a thread leaves its core to another."""
    return (psutil.cpu_count(logical=False) or psutil.cpu_count() or 1) + 1


@pytest.fixture(scope="session", autouse=True)
def share_of_the_machine() -> Iterator[None]:
    """Give each of several test processes its share of the cores, and let none wait for the disk or for rest.

    Threads that wait for each other's passes take twice the time of all where others have their cores.
    """
    num_logical, num_cores = psutil.cpu_count() or 1, psutil.cpu_count(logical=False) or 1
    share = max(1, num_cores // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "cpu_count", lambda logical=True: num_logical if logical else share)
        patch.setattr(os, "fsync", lambda handle: None)
        for name in ("_QUIET_S", "_MOST_S"):  # between answers that are timed
            patch.setattr(f"edgespec.evaluation.timed_answer.{name}", 0.002)
        # Each of argparse's words is looked for in files of translations, and there are none.
        patch.setattr(gettext, "dgettext", lambda domain, message: message)
        yield


@pytest.fixture(scope="session", autouse=True)
def home_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the user has is neither read nor written."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("EDGESPEC_") and "TEST" not in name]:
            patch.delenv(variable)
        patch.setenv("EDGESPEC_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("EDGESPEC_CONFIG", os.devnull)
        yield


@pytest.fixture(scope="session", autouse=True)
def processor_alone() -> Iterator[None]:
    """Tests choose between no devices of the machine that they run on, unless they say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgespec.setup.resolve.may_have_accelerator", lambda: False)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_template_process() -> Iterator[None]:
    """For the many engines and exports of tests that are not about such processes."""
    with pytest.MonkeyPatch.context() as patch:
        for user in ("engine.load", "export.template_check"):
            patch.setattr(f"edgespec.{user}.TemplateProcess", LentProcess)
        yield


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny.write_gguf(path, tiny.random_weights())
    return path


@pytest.fixture(scope="session")
def tiny_model(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    export_model(tiny_gguf, folder, precision="fp32")
    return folder


@pytest.fixture(scope="session")
def manifest(tiny_model: Path) -> Manifest:
    return read_manifest(tiny_model)


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model / "tokenizer.json")


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A shell's background jobs ignore it, and so does a command that has heard it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tiny_with_states(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, whose graphs give the hidden states behind all layers and behind the final norm."""
    folder = tmp_path_factory.mktemp("models") / "tiny-states"
    export_model(tiny_gguf, folder, precision="fp32", hidden_layers=(0, 1, 2))
    return folder


@pytest.fixture(scope="session")
def tiny_drafter(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in four bits, which agrees with the other one now and then."""
    folder = tmp_path_factory.mktemp("drafters") / "tiny-int4"
    export_model(tiny_gguf, folder, precision="int4")
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real default model, fetched once and kept between runs."""
    cache = os.environ.get("EDGESPEC_TEST_CACHE") or platformdirs.user_cache_dir("edgespec-tests", appauthor=False)
    source = CATALOG[DEFAULT_MODEL].source
    assert isinstance(source, CatalogFile)
    return fetch(source, Path(cache), print)


def real_model(
    gguf: Path, name: str, precision: str, tmp_path_factory: pytest.TempPathFactory, **options: Any
) -> Path:
    """An export of the real model, which the first process that wants it makes for all processes of this run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "real" / name
    folder.parent.mkdir(exist_ok=True)
    with hold_lock(shared / f"{name}.lock"):
        if not folder.exists():
            export_model(gguf, folder, precision=precision, **options)
    return folder


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_model(smollm2_gguf, "smollm2-135m", "source", tmp_path_factory)


@pytest.fixture(scope="session")
def smollm2_with_self(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a drafter of 20 of its 30 layers."""
    trimming = Trimming(skip=frozenset(range(10, 20)))
    return real_model(smollm2_gguf, "smollm2-135m-with-self", "source", tmp_path_factory, trimming=trimming)


@pytest.fixture(scope="session")
def smollm2_int4(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_model(smollm2_gguf, "smollm2-135m-int4", "int4", tmp_path_factory)


@pytest.fixture(scope="session")
def smollm2_int8(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rounded anew, so that it differs from the source now and then, as a drafter does."""
    return real_model(smollm2_gguf, "smollm2-135m-int8", "int8", tmp_path_factory)
