"""How tests of other projects are counted, and which of them are left out; the suites are not run here."""

import json
import re
from pathlib import Path

import foreign_rules
import foreign_suites
import pytest
from foreign_suites import Outcome, read_compliance, read_report, source_of, table

CASES = """<testsuites><testsuite>
<testcase classname="a" name="one"/>
<testcase classname="a" name="two"><failure message="no"/></testcase>
<testcase classname="a" name="three"><error message="no"/></testcase>
<testcase classname="a" name="four"><skipped message="{own}"/></testcase>
<testcase classname="a" name="five"><skipped message="slow"/></testcase>
</testsuite></testsuites>"""


def reason_of(rules: tuple[foreign_rules.Rule, ...], name: str) -> str | None:
    return next((rule.reason for rule in rules if re.search(rule.pattern, name)), None)


def test_a_report_is_counted_with_reasons(tmp_path: Path) -> None:
    own = foreign_rules.OPENAI[0].reason
    (tmp_path / "report.xml").write_text(CASES.format(own=own))
    found = read_report(tmp_path / "report.xml")
    assert (found.passed, found.failed) == (1, ["a.two", "a.three"])
    assert found.reasons == {own: 1, "left out by the suite: slow": 1}
    lines = table({"openai-python": found}).splitlines()
    assert "| openai-python | 1 | 2 | 2 |" in lines
    assert f"| openai-python | 1 | {own} |" in lines
    assert lines[-1] == "failed: openai-python: a.three"


def test_results_of_the_compliance_test_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        {"id": "basic-response", "status": "passed"}, {"id": "streaming-response", "status": "failed"},
        {"id": "image-input", "status": "failed"}, {"id": "new", "status": "skipped", "errors": ["not here"]},
    ]  # fmt: skip
    found = read_compliance(json.dumps({"results": results}))
    assert (found.passed, found.failed) == (1, ["streaming-response"])
    assert found.reasons == {foreign_rules.OPENRESPONSES["image-input"]: 1, "not here": 1}
    with pytest.raises(SystemExit, match="did not print"):
        read_compliance("Fatal error")


@pytest.mark.parametrize(
    ("name", "is_left_out"),
    [
        ("chat/test_completions.py::TestCompletions::test_method_create_overload_1[loose]", False),
        ("chat/test_completions.py::TestCompletions::test_method_delete[strict]", True),
        ("chat/test_completions.py::TestCompletions::test_path_params_delete[strict]", False),
        ("test_completions.py::TestCompletions::test_raw_response_create_overload_2[loose]", False),
        ("test_responses.py::TestResponses::test_streaming_response_cancel[loose]", True),
        ("test_responses.py::TestResponses::test_path_params_retrieve_overload_1[loose]", False),
        ("test_models.py::TestModels::test_method_list[loose]", False),
        ("test_embeddings.py::TestEmbeddings::test_method_create[loose]", True),
    ],
)  # fmt: skip
def test_what_the_server_answers_is_not_left_out(name: str, is_left_out: bool) -> None:
    assert (reason_of(foreign_rules.OPENAI, f"tests/api_resources/{name}") is not None) == is_left_out


def test_refusals_of_llama_cpp_are_not_left_out() -> None:
    for name in (
        "unit/test_chat_completion.py::test_invalid_chat_completion_req[messages3]",
        "unit/test_chat_completion.py::test_completion_with_response_format[response_format4-0-None]",
        "unit/test_security.py::test_incorrect_api_key[invalid-key]",
        "unit/test_tokenize.py::test_tokenize_with_pieces",
    ):
        assert reason_of(foreign_rules.LLAMA, name) is None


def test_tests_of_files_that_are_not_run_are_counted(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_one(): ...\nasync def test_two(): ...\n")
    (tmp_path / "test_b.py").write_text("def test_one(): ...\n")
    assert list(foreign_rules.count_left_out(tmp_path, {"test_b"}).values()) == [2]


def test_a_suite_that_is_there_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama.cpp").mkdir()
    assert source_of("llama.cpp", tmp_path) == tmp_path / "llama.cpp"
    monkeypatch.setitem(foreign_suites.ORIGINS, "openresponses", str(tmp_path / "nothing"))
    with pytest.raises(SystemExit, match="put a copy of it at"):
        source_of("openresponses", tmp_path)


def test_outcomes_add_up() -> None:
    found = Outcome(1, ["a"])
    found.add(Outcome(2, ["b"]))
    assert (found.passed, found.failed) == (3, ["a", "b"])
