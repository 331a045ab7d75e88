"""Runs the tests that other projects have for servers of OpenAI's API against a running `edgespec serve`.

    python scripts/foreign_suites.py [--model FOLDER] [--sources FOLDER] [--json] [SUITE …]

The suites are those of openai-python (tests/api_resources), Open Responses (its compliance test, in TypeScript: it
takes bun, or node with npm) and llama.cpp (tools/server/tests/unit). Their files are no part of this project. They
are read from folders openai-python, openresponses and llama.cpp of --sources, and what is not there is cloned by
git from ORIGINS. Each test passes, fails, or is not applicable, which a rule says beforehand, with its reason:
foreign_rules.py. The exit code is 1 if one fails.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import foreign_rules
import platformdirs

from edgespec.config.options import DEFAULT_MODEL
from edgespec.setup.home import ModelHome, default_home

SCRIPTS = Path(__file__).parent
ORIGINS = {
    "openai-python": "https://github.com/openai/openai-python",
    "openresponses": "https://github.com/openresponses/openresponses",
    "llama.cpp": "https://github.com/ggml-org/llama.cpp",
}
LIMIT_S = 1800  # for a run of tests
SECRET = "sk-this-is-the-secret-key"  # that llama.cpp's tests of keys send
OPENAI_FILES = ("chat/test_completions", "test_completions", "test_models", "test_embeddings", "test_responses")
LLAMA_FILES = (
    "test_basic", "test_chat_completion", "test_compat_oai_responses", "test_completion", "test_embedding",
    "test_ignore_eos", "test_infill", "test_template", "test_tokenize",
)  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """What became of the tests of a suite; reasons are of those that are not applicable, and their numbers."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Outcome") -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.reasons += other.reasons


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(ORIGINS)}; default: all")
    parser.add_argument("--sources", type=Path, help="a folder that has or gets the suites")
    parser.add_argument("--model", type=Path, help=f"a model folder; default: {DEFAULT_MODEL}, prepared")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    names = arguments.suites or [*ORIGINS]
    if unknown := [name for name in names if name not in ORIGINS]:
        parser.error(f"there is no suite {unknown[0]}; there are {', '.join(ORIGINS)}")
    sources = arguments.sources or Path(platformdirs.user_cache_dir("edgespec-tests", appauthor=False)) / "suites"
    model = arguments.model or ModelHome(default_home()).find(DEFAULT_MODEL)
    if model is None or not model.is_dir():
        parser.error(
            f"{model or DEFAULT_MODEL} is not prepared here; edgespec models pull {DEFAULT_MODEL} does that"
        )
    found = {}
    for name in names:
        suite = source_of(name, sources)
        print(f"running {name}", file=sys.stderr)
        found[name] = RUNS[name](suite, model.resolve())
    print(json.dumps({name: document(each) for name, each in found.items()}) if arguments.json else table(found))
    return 1 if any(each.failed for each in found.values()) else 0


def source_of(name: str, sources: Path) -> Path:
    """The folder of a suite, cloned if it is not there."""
    folder = sources / name
    if not folder.is_dir():
        sources.mkdir(parents=True, exist_ok=True)
        print(f"cloning {ORIGINS[name]}", file=sys.stderr)
        try:
            subprocess.run(["git", "clone", "--quiet", "--depth", "1", ORIGINS[name], str(folder)], check=True)
        except (OSError, subprocess.CalledProcessError):
            sys.exit(f"{name} cannot be cloned from {ORIGINS[name]}; put a copy of it at {folder}")
    return folder


@contextmanager
def serving(model: Path, names: Sequence[str], *flags: str) -> Iterator[str]:
    """The URL of a server that knows a model by further names too, until the block ends."""
    with tempfile.TemporaryDirectory() as home:
        models = Path(home) / "models"
        models.mkdir()
        for name in names:
            (models / name).symlink_to(model, target_is_directory=True)
        command = [sys.executable, "-m", "edgespec", "serve", str(model), "--port", "0", "--json", *flags]
        environment = {**os.environ, "EDGESPEC_HOME": home, "EDGESPEC_CONFIG": os.devnull}
        log = (Path(home) / "log").open("w+")
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            assert server.stdout is not None
            if not (line := server.stdout.readline()):
                log.seek(0)
                sys.exit(f"the server did not start: {log.read()}")
            yield str(json.loads(line)["url"])
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
            log.close()


def run_openai(suite: Path, model: Path) -> Outcome:
    files = [f"tests/api_resources/{name}.py" for name in OPENAI_FILES]
    stated = "".join((suite / name).read_text("utf-8") for name in files)
    names = re.findall(r'model="([\w.-]+)"', stated)
    with serving(model, sorted({*names, "gpt-4o-mini"})) as url:  # that is shown
        return run_pytest("openai-python", suite, files, {"TEST_API_BASE_URL": url}, suite / "src")


def run_llama(suite: Path, model: Path) -> Outcome:
    found = Outcome()
    folder = suite / "tools" / "server" / "tests"
    others = ["gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1", "davinci-002"]
    with serving(model, others) as url:
        files = [f"unit/{name}.py" for name in LLAMA_FILES]
        found.add(run_pytest("llama.cpp", folder, files, llama_environment(url)))
    with serving(model, others, "--api-key", SECRET) as url:
        found.add(run_pytest("llama.cpp", folder, ["unit/test_security.py"], llama_environment(url)))
    found.reasons.update(foreign_rules.count_left_out(folder / "unit", {*LLAMA_FILES, "test_security"}))
    return found


def llama_environment(url: str) -> dict[str, str]:
    port = url.removesuffix("/v1").rpartition(":")[2]
    return {"DEBUG_EXTERNAL": "1", "PORT": port, "LLAMA_SERVER_TEST_SKIP_MODEL_PRELOAD": "1"}


def run_pytest(
    suite: str, folder: Path, files: Sequence[str], environment: dict[str, str], *paths: Path
) -> Outcome:
    """Run files of tests by the rules of a suite."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        plugin = ["-p", "foreign_rules", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
        command = [sys.executable, "-m", "pytest", *plugin, "-q", "--tb=short", f"--junitxml={report}", *files]
        there = {
            **os.environ, **environment, "FOREIGN_SUITE": suite, "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(map(str, [*paths, SCRIPTS, folder])),
        }  # fmt: skip
        done = subprocess.run(command, cwd=folder, env=there, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True)
        sys.stderr.write(done.stdout)
        if not report.is_file():
            sys.exit(f"pytest did not run the tests of {suite}; its words are above")
        return read_report(report)


def read_report(report: Path) -> Outcome:
    found = Outcome()
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            found.failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif skipped is not None:
            reason = skipped.get("message", "").removeprefix("Skipped: ")
            found.reasons[reason if foreign_rules.is_own(reason) else f"left out by the suite: {reason}"] += 1
        else:
            found.passed += 1
    return found


def run_openresponses(suite: Path, model: Path) -> Outcome:
    with tempfile.TemporaryDirectory() as scratch, serving(model, ["gpt-4o-mini"]) as url:
        copy = Path(scratch)
        for part in ("bin", "src/lib", "src/generated"):
            shutil.copytree(suite / part, copy / part)
        (copy / "package.json").write_text('{"type": "module", "private": true}\n', "utf-8")
        runner = typescript(copy)
        asked = ["bin/compliance-test.ts", "--base-url", url, "--api-key", "none", "--json"]
        done = subprocess.run([*runner, *asked], cwd=copy, timeout=LIMIT_S, stdout=subprocess.PIPE, text=True)
        return read_compliance(done.stdout)


def typescript(folder: Path) -> list[str]:
    """A command that runs TypeScript in a folder, with what the compliance test imports."""
    wanted = ["zod@^3.25.76"]
    if bun := shutil.which("bun"):
        subprocess.run([bun, "add", "--silent", *wanted], cwd=folder, check=True)
        return [bun, "run"]
    if npm := shutil.which("npm"):
        quietly = ["--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run([npm, "install", *quietly, *wanted, "tsx"], cwd=folder, check=True, stdout=sys.stderr)
        return [str(folder / "node_modules" / ".bin" / "tsx")]
    sys.exit("the compliance test of Open Responses takes bun, or node with npm; install one of them")


def read_compliance(printed: str) -> Outcome:
    found = Outcome()
    try:
        results = json.loads(printed)["results"]
    except (ValueError, KeyError):
        sys.exit(f"the compliance test did not print its results: {printed[:2000]}")
    for each in results:
        if (reason := foreign_rules.OPENRESPONSES.get(each["id"])) is not None:
            found.reasons[reason] += 1
        elif each["status"] == "skipped":
            found.reasons["; ".join(each.get("errors") or ["skipped by the suite"])] += 1
        elif each["status"] == "passed":
            found.passed += 1
        else:
            found.failed.append(each["id"])
            print(f"{each['id']}: {each.get('errors')}", file=sys.stderr)
    return found


def document(found: Outcome) -> dict[str, object]:
    return {"passed": found.passed, "failed": found.failed, "not_applicable": dict(found.reasons.most_common())}


def table(found: dict[str, Outcome]) -> str:
    """The numbers of each suite in Markdown, and below why tests are not applicable and which have failed."""
    lines = ["| suite | passed | failed | not applicable |", "|---|---|---|---|"]
    for name, each in found.items():
        lines.append(f"| {name} | {each.passed} | {len(each.failed)} | {each.reasons.total()} |")
    lines += ["", "| suite | tests | why they are not applicable |", "|---|---|---|"]
    for name, each in found.items():
        lines += [f"| {name} | {count} | {reason} |" for reason, count in each.reasons.most_common()]
    return "\n".join(
        [*lines, *(f"failed: {name}: {test}" for name, each in found.items() for test in each.failed)]
    )


RUNS = {"openai-python": run_openai, "openresponses": run_openresponses, "llama.cpp": run_llama}

if __name__ == "__main__":
    sys.exit(main())
