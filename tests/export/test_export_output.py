"""An export appears at its output whole or not at all, whatever is in its way."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import assert_refused

import edgespec.system.disk
from edgespec.errors import DiskFull, EdgeSpecError, PrecisionLoss, UsageError
from edgespec.export.convert import export_model
from edgespec.export.options import ExportOptions
from edgespec.export.output import atomic_folder
from edgespec.manifest import read_manifest
from edgespec.setup.downloads import delete_abandoned_exports
from edgespec.system.file_hashes import verify_files

# Where an export is killed: after its first lines of progress, at a write, before and after each step.
KILLED_EXPORTS = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
import edgespec.system.disk, edgespec.system.disk
from edgespec.export import convert, output as output_module, plan, weights

source, parent = Path(sys.argv[1]), Path(sys.argv[2])
output = parent / "out"

def die(*arguments, **settings):
    os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name):
    setattr(owner, name, die)

def after(owner, name):
    step = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **settings: die(step(*arguments, **settings)))

def in_the_fifth_write():
    write, count = weights.WeightsFile._place, iter(range(99))
    weights.WeightsFile._place = lambda *given: die() if next(count) == 4 else write(*given)

def exporting(prepare):
    if (pid := os.fork()) == 0:
        try:
            prepare()
            convert.export_model(source, output)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

STAGES = {
    "reading": (lambda: after(plan, "read_source"), False),
    "locked": (lambda: before(output_module, "require_disk_space"), False),
    "weights": (in_the_fifth_write, False),
    "graph": (lambda: before(convert.ir, "save"), False),
    "saved": (lambda: after(convert.ir, "save"), False),
    "hashing": (lambda: before(output_module, "file_record"), False),
    "manifest": (lambda: before(output_module, "write_manifest"), False),
    "written": (lambda: after(output_module, "write_manifest"), False),
    "renaming": (lambda: before(output_module, "install_folder"), False),
    "renamed": (lambda: after(output_module, "install_folder"), True),
}
for stage, (prepare, is_whole) in STAGES.items():
    assert exporting(prepare) == signal.SIGKILL, stage
    assert output.exists() == is_whole, stage
    if is_whole:
        left = {path.name for path in parent.iterdir()}
        assert left == {"out", ".out.lock"}, left
        os.rename(output, parent / "first")
    assert exporting(lambda: None) == 0, stage
    left = {path.name for path in parent.iterdir()} - {"first"}
    assert left == {"out"}, (stage, left)
    output_module.shutil.rmtree(output)
    print(stage)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which Windows lacks: the stages run in forks")
def test_export_that_is_killed_at_any_stage_leaves_no_half_and_can_be_run_again(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_EXPORTS, str(tiny_gguf), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[-1] == "renamed"
    verify_files(tmp_path / "first", read_manifest(tmp_path / "first").files)


def test_leftovers_of_outputs_with_longer_names_are_left_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    other = tmp_path / ".out.int4.partial"
    other.mkdir()
    export_model(tiny_gguf, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.int4.partial", "out"]


@pytest.mark.parametrize(
    ("passing", "said"), [("", "No other precision was found to pass"), ("fp32", "fp32 passes")]
)
def test_prune_finds_the_trial_of_another_precision_once_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passing: str, said: str
) -> None:
    places: set[Path] = set()

    def run(export: object, options: ExportOptions, output: Path, *others: object) -> SimpleNamespace:
        if options.precision == passing:
            return SimpleNamespace(check=SimpleNamespace(divergence=0.0))
        if options.precision != "int4":
            places.add(output.parent)
            assert delete_abandoned_exports(tmp_path / "new", is_dry=True) == 0, "it is held while it is made"
        raise PrecisionLoss("int4 loses too much", precision="int4")

    monkeypatch.setattr("edgespec.export.convert._Export.run", run)
    with pytest.raises(PrecisionLoss, match=said):
        export_model(tmp_path / "model.gguf", tmp_path / "new" / "out", precision="int4")
    assert places == {tmp_path / "new" / ".out.partial"}
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_second_export_to_one_output_waits_for_the_first(tiny_gguf: Path, tmp_path: Path) -> None:
    """The first is another process, which holds the lock until the second says that it waits."""
    output = tmp_path / "out"
    program = (
        "import sys; from pathlib import Path; from edgespec.export import convert;"
        "convert.write_text = (lambda write: lambda *given: (print('busy', flush=True), sys.stdin.readline(),"
        " write(*given))[2])(convert.write_text);"
        "convert.export_model(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, str(tiny_gguf), str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        assert first.stdout.readline() == b"busy\n"
        said: list[str] = []

        def report(line: str) -> None:
            said.append(line)
            if "waiting" in line:
                first.stdin.write(b"go on\n")
                first.stdin.flush()

        with pytest.raises(UsageError, match="already exists"):
            export_model(tiny_gguf, output, report=report)
    assert f"process {first.pid} is exporting to {output}; waiting for it" in said
    verify_files(output, read_manifest(output).files)
    assert list(tmp_path.iterdir()) == [output]


def test_everything_reaches_the_disk_before_the_folder_gets_its_name(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    fsync, replace, open_ = os.fsync, os.replace, os.open
    names: dict[int, str] = {}

    def opened(path: object, *settings: int) -> int:
        handle = open_(path, *settings)  # type: ignore[call-overload]
        names[handle] = Path(str(path)).name
        return int(handle)

    monkeypatch.setattr(edgespec.system.disk.os, "open", opened)
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(("sync", names[handle])), fsync(handle)))

    def take_name(old: Path, new: Path) -> None:
        if Path(new).name == "out":
            done.append(("name", "out"))
        replace(old, new)

    monkeypatch.setattr(os, "replace", take_name)
    manifest = export_model(tiny_gguf, tmp_path / "out")
    files = {("sync", name) for name in [*manifest.files, "edgespec.json"]}
    assert set(done[: len(files)]) == files
    assert done[len(files) :] == [("sync", ".out.partial"), ("name", "out"), ("sync", tmp_path.name)]


def test_windows_writes_the_files_of_other_systems(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = export_model(tiny_gguf, tmp_path / "here", name="tiny")

    def write_text(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.replace("\n", "\r\n").encode(encoding))

    monkeypatch.setattr(Path, "write_text", write_text)
    assert export_model(tiny_gguf, tmp_path / "there", name="tiny").files == here.files


def test_dangling_link_in_the_way_is_seen_before_the_work(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    said: list[str] = []
    with pytest.raises(UsageError, match="already exists"):
        export_model(tiny_gguf, tmp_path / "out", report=said.append)
    assert said == []


def test_output_in_the_way_is_left_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(UsageError, match="already exists"):
        export_model(tiny_gguf, tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "precious"


def test_full_disk_is_told_before_writing(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert_refused(tiny_gguf, tmp_path, "free some space", error=EdgeSpecError)


@pytest.mark.parametrize("limit_bytes", [0, 1000, 50_000, 300_000])
def test_largest_file_that_is_reached_while_writing_leaves_nothing(
    tiny_gguf: Path, tmp_path: Path, limit_bytes: int
) -> None:
    resource = pytest.importorskip("resource", reason="needs file size limits, which Windows lacks")
    signal = __import__("signal")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
    try:
        assert_refused(tiny_gguf, tmp_path, error=EdgeSpecError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


WRITES = {
    "weights": "edgespec.export.weights.WeightsFile._place",
    "graph": "edgespec.export.convert.ir.save",
    "texts": "pathlib.Path.write_bytes",
    "manifest": "edgespec.export.output.write_manifest",
    "to the disk": "os.fsync",
    "name": "os.replace",
}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_full_disk_at_any_write_is_told_with_the_bytes_needed(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, number: int
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(write, fail)
    with pytest.raises(DiskFull, match=rf"[kM]B are needed.*{os.strerror(number)}.*free some space") as raised:
        export_model(tiny_gguf, tmp_path / "out")
    assert raised.value.needed_bytes > 100_000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EFBIG])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_write_that_is_forbidden_is_told_in_words(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, number: int
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(write, fail)
    with pytest.raises(EdgeSpecError, match=rf"cannot write to .*{os.strerror(number)}.*choose another"):
        export_model(tiny_gguf, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_folder_that_cannot_be_written_is_told_at_once(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    is_full, why = number in (errno.ENOSPC, errno.EDQUOT), os.strerror(number)
    words = rf"no room in .*{why}.*free some space" if is_full else rf"cannot write to .*{why}.*output="
    with pytest.raises(DiskFull if is_full else UsageError, match=words):
        export_model(tiny_gguf, tmp_path / "new" / "out")


def test_names_that_are_not_utf8_are_written_with_replacements(tiny_gguf: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff\xfe.gguf")
    try:
        (tmp_path / name).symlink_to(tiny_gguf)
    except OSError:
        pytest.skip("needs a file system that takes names that are not UTF-8")
    manifest = export_model(tmp_path / name, tmp_path / "out")
    assert manifest.source.name == "bad\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}.gguf"
    assert read_manifest(tmp_path / "out") == manifest


@pytest.mark.parametrize("kind", ["file", "link"])
def test_file_or_link_in_the_place_of_the_partial_folder_is_left_alone(
    tiny_gguf: Path, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text").write_text("precious")
    place = tmp_path / "made" / ".out.partial"
    place.parent.mkdir()
    if kind == "file":
        place.write_text("precious")
    else:
        place.symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match="in the way and not a folder; remove it"):
        export_model(tiny_gguf, tmp_path / "made" / "out")
    assert [path.name for path in place.parent.iterdir()] == [".out.partial"]
    assert (tmp_path / "mine" / "text").read_text() == "precious"


def test_link_in_the_place_of_the_lock_is_told_in_words(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / ".out.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match=r"\.out\.lock is a link, not a lock; remove it"):
        export_model(tiny_gguf, tmp_path / "out")
    assert (tmp_path / "mine").read_text() == "precious"


def test_failed_export_takes_back_the_folders_above_it(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DiskFull, match=r"are needed, 67 MB more must stay free, and"):
        export_model(tiny_gguf, tmp_path / "a" / "b" / "out")
    assert not list(tmp_path.iterdir())


def export_until_told_to_end(output: Path) -> None:
    with atomic_folder(output) as folder:
        (folder / "model.onnx").write_text("a part")
        signal.raise_signal(signal.SIGTERM)


def test_an_export_of_a_program_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a program that sets no handler
    try:
        with pytest.raises(SystemExit) as ended:
            export_until_told_to_end(tmp_path / "new" / "model")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
