"""The proof that rows do not depend on cuts: it finds those that do, and is kept for the machine that made it."""

from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from calls import decoder
from double import Double
from real_shapes import Shape, count_differing, random_tokens, walks, write_model

from edgespec.decoding.decoder import Can
from edgespec.manifest import read_manifest
from edgespec.runtimes import devices, onnx
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.pass_shapes import RowRule
from edgespec.runtimes.tree import OnnxTreeDecoder
from edgespec.setup.row_proof import (
    FILE_NAME,
    RowProof,
    proof_key,
    proofs_of,
    prove_rows,
    write_row_proof,
)
from edgespec.types import Logits, TokenIds


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 256 and a short window, in int8."""
    shape = Shape(256, heads=2, kv_heads=1, hidden=160, inner=96, window=100)
    return write_model(tmp_path_factory.mktemp("wide"), "gemma3", shape, "int8")


def test_rows_with_heads_of_256_do_not_depend_on_cuts(wide_heads: Path) -> None:
    tokens = random_tokens(400)
    compared, differing = count_differing(decoder(wide_heads), tokens, walks(len(tokens), 6, seed=1))
    assert compared > 750
    assert differing == 0


def test_a_prompt_of_any_length_gives_the_last_row_that_a_pass_over_one_token_gives(tmp_path: Path) -> None:
    shape = Shape(64, heads=4, kv_heads=1, hidden=640, inner=256)
    folder = write_model(tmp_path, "gemma3", shape, "int4", 128)
    whole, stepped, tokens = decoder(folder), decoder(folder), random_tokens(30)
    for stop in range(1, len(tokens) + 1):
        whole.forget()
        assert np.array_equal(whole.logits(tokens[:stop], 1), stepped.logits(tokens[:stop], 1))


def test_the_probe_holds_for_passes_by_the_rule(wide_heads: Path) -> None:
    manifest = read_manifest(wide_heads)
    proof = prove_rows(decoder(wide_heads), manifest, limit_s=inf)
    assert proof.holds, proof.reason
    assert (proof.num_different, proof.max_difference) == (0, 0.0)
    assert proof.num_rows > 180
    assert proof.longest_past > 1000
    assert str(proof.num_rows) in proof.reason


def test_the_probe_finds_rows_that_differ_without_the_rule(
    wide_heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without flash attention, whose tiles may be as short as sums want them: with an L2 cache of 512 KiB they are.
    no_rule = RowRule(has_flash_attention=False, borders=())
    monkeypatch.setattr("edgespec.runtimes.passes.row_rule", lambda head_dims, l2_bytes: no_rule)
    proof = prove_rows(decoder(wide_heads), read_manifest(wide_heads))
    assert not proof.holds
    assert proof.num_different > 0
    assert proof.max_difference > 0
    assert "rows differ with the cut of the text into passes, by up to" in proof.reason


def test_the_probe_finds_rows_that_differ_in_passes_of_one_token(tiny_model: Path) -> None:
    proof = prove_rows(decoder(tiny_model, deterministic=False), read_manifest(tiny_model))
    assert not proof.holds
    assert "in passes of one token" in proof.reason


def test_a_tree_graph_and_one_without_positions_are_proved_as_well(tiny_model: Path) -> None:
    manifest = read_manifest(tiny_model)
    trees = OnnxTreeDecoder(tiny_model, manifest, find_device("cpu"), deterministic=True)
    for each in (trees, decoder(tiny_model)):
        proof = prove_rows(each, manifest)
        assert proof.holds, proof.reason
        assert np.array_equal(each.logits(np.arange(5, dtype=np.int32), 2).shape, (2, manifest.vocab_size))


def test_a_short_limit_still_compares_some_stretches(tiny_model: Path) -> None:
    manifest = read_manifest(tiny_model)
    short, long = (prove_rows(decoder(tiny_model), manifest, limit_s=limit_s) for limit_s in (0, 60))
    assert 100 < short.num_rows < long.num_rows
    assert short.holds
    assert long.holds


def test_a_context_of_few_tokens_is_enough(tiny_model: Path) -> None:
    manifest = replace(read_manifest(tiny_model), context_length=31)
    proof = prove_rows(onnx.OnnxDecoder(tiny_model, manifest, find_device("cpu"), deterministic=True), manifest)
    assert proof.holds
    assert proof.num_rows > 20


class _Wrong(Double):
    """A decoder whose row of one position depends on how many are asked for."""

    vocab_size, context_length, num_fed = 7, 200, 0

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        rows = np.cumsum(tokens)[-num_last:, None] % np.arange(3, 10, dtype=np.float32)
        if len(tokens) - num_last <= 3 < len(tokens) and num_last > 12:
            rows[3 - len(tokens)] += 0.5
        return rows


def test_a_decoder_without_a_cache_of_its_own_is_proved_by_what_it_gives(tiny_model: Path) -> None:
    manifest = read_manifest(tiny_model)
    proof = prove_rows(_Wrong(), manifest)
    assert not proof.holds
    assert proof.max_difference == 0.5
    assert "first at position 3" in proof.reason


class _Cut(Double):
    """A decoder whose last row depends on where a prompt was cut, behind the first pass that reads it."""

    vocab_size, context_length, can = 7, 700, Can(widths=(4,), read_width=256)
    ends = frozenset[int]()

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        rows = np.cumsum(tokens)[-num_last:, None] % np.arange(3, 10, dtype=np.float32)
        self.ends = self.ends | {len(tokens)} if len(tokens) > 1 else frozenset()
        rows[-1] += 0.5 * any(256 < end < len(tokens) for end in self.ends)
        return rows


def test_a_prompt_of_several_passes_that_read_is_compared_however_little_time_there_is(tiny_model: Path) -> None:
    proof = prove_rows(_Cut(), read_manifest(tiny_model), limit_s=0)
    assert not proof.holds
    assert "a prompt of" in proof.reason


PROOF = RowProof(
    holds=True, reason="equal", num_rows=5, num_different=0, max_difference=0.0, longest_past=9, seconds=0.5
)


def test_a_proof_is_read_as_it_was_written_and_beside_others(tmp_path: Path) -> None:
    other = replace(PROOF, holds=False, reason="differs")
    assert proofs_of(tmp_path).read().get("a") is None
    write_row_proof(tmp_path, "a", PROOF)
    write_row_proof(tmp_path, "b", other)
    assert (proofs_of(tmp_path).read().get("a"), proofs_of(tmp_path).read().get("b")) == (PROOF, other)
    write_row_proof(tmp_path, "a", other)
    assert proofs_of(tmp_path).read().get("a") == other


def test_the_oldest_of_many_proofs_is_dropped(tmp_path: Path) -> None:
    for number in range(70):
        write_row_proof(tmp_path, str(number), PROOF)
    assert proofs_of(tmp_path).read().get("0") is None
    assert proofs_of(tmp_path).read().get("69") == PROOF


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"version": 1, "proofs": {"a": {"holds": "yes"}}}', '{"version": 9}']
)
def test_a_damaged_file_holds_no_proof_and_is_written_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    assert proofs_of(tmp_path).read().get("a") is None
    reported: list[str] = []
    write_row_proof(tmp_path, "a", PROOF, reported.append)
    assert proofs_of(tmp_path).read().get("a") == PROOF
    # A file of another version is no damaged one.
    assert [f"{tmp_path / FILE_NAME} was damaged (" in line for line in reported] == [True] * ("9" not in content)
    write_row_proof(tmp_path, "b", PROOF, reported.append)
    assert len(reported) <= 1


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    reported: list[str] = []
    (tmp_path / "file").write_text("")
    write_row_proof(tmp_path / "file", "a", PROOF, reported.append)
    (tmp_path / FILE_NAME).mkdir()
    write_row_proof(tmp_path, "a", PROOF, reported.append)
    assert len(reported) == 2
    for line, folder in zip(reported, (tmp_path / "file", tmp_path), strict=True):
        assert line.startswith(f"{folder / FILE_NAME} cannot be written (")


def test_a_context_that_is_too_short_to_compare_is_the_reason(tiny_model: Path) -> None:
    manifest = replace(read_manifest(tiny_model), context_length=16)
    proof = prove_rows(onnx.OnnxDecoder(tiny_model, manifest, find_device("cpu"), deterministic=True), manifest)
    assert (proof.holds, proof.num_rows) == (False, 0)
    assert "its context of 16 tokens is too short" in proof.reason


def test_a_key_changes_with_graph_threads_cache_runtime_and_processor(
    tiny_model: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, device = read_manifest(tiny_model), find_device("cpu")
    keys = {
        proof_key(manifest, device, 2),
        proof_key(manifest, device, 3),
        proof_key(read_manifest(tiny_drafter), device, 2),
    }
    assert proof_key(manifest, device, 2) in keys
    monkeypatch.setattr(devices, "read_l2_bytes", lambda: 12345)
    keys.add(proof_key(manifest, device, 2))
    monkeypatch.setattr(devices, "processor_name", lambda: "another")
    keys.add(proof_key(manifest, device, 2))
    monkeypatch.setattr(devices.import_onnxruntime(), "__version__", "9.9.9")
    keys.add(proof_key(manifest, device, 2))
    assert len(keys) == 6
