"""A GPU whose memory runs out, in an imitation: while a model is loaded, for the KV cache, in a pass."""

import gc
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest
from fake_cuda import ARENA, KERNEL, FakeGpu

from edgespec import EdgeSpecError, MemoryExhausted, load
from edgespec.cli.main import main
from edgespec.errors import DeviceUnavailable

PROMPT = "in the an"
# What each library says, as ONNX Runtime 1.31 passes it on.
SAYINGS = [
    ARENA.format(1071609344, 8589934592),
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : bfc_arena.cc:376 Failed to allocate memory for requested buffer "
    "of size 8388608",
    "[ONNXRuntimeError] : 1 : FAIL : CUDA failure 2: out of memory ; GPU=0 ; hostname=box ; "
    "file=cuda_allocator.cc ; line=48 ; expr=cudaMalloc((void**)&p, size); ",
    KERNEL
    + "CUBLAS failure 3: the resource allocation failed ; GPU=0 ; hostname=box ; expr=cublasCreate(&handle); ",
    KERNEL + "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0 ; hostname=box ; expr=cublasCreate(&handle); ",
    KERNEL + "CUDNN failure 4004: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ; GPU=0 ; expr=cudnnCreate",
    KERNEL + "vkAllocateMemory failed with VK_ERROR_OUT_OF_DEVICE_MEMORY",
    KERNEL + "D3D12 create resource failed with E_OUTOFMEMORY (0x8007000E)",
    "[GPU] Exceeded max size of memory object allocation: requested 4294967296 bytes",
    "Exception from src/plugins/intel_npu: ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
]
OTHERS = [
    "[ONNXRuntimeError] : 11 : EP_FAIL : CUDA failure 700: an illegal memory access was encountered ; GPU=0",
    "CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED ; GPU=0",
    "Node input 'x' is not a graph input, initializer, or output of a previous node.",
]


def forever(said: str, after: int = 0) -> Iterator[str | None]:
    return chain(repeat(None, after), repeat(said))


@pytest.mark.parametrize("said", SAYINGS)
def test_a_target_that_is_refused_memory_while_it_is_opened_ends_with_exit_code_5(
    said: str, gpu: FakeGpu, gpu_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.loads = forever(said)
    assert main(["chat", str(gpu_model), "--device", "cuda", "--prompt", PROMPT]) == MemoryExhausted.exit_code == 5
    found = capsys.readouterr().err
    assert "out of memory while loading" in found
    assert "Traceback" not in found


@pytest.mark.parametrize("said", OTHERS)
def test_what_is_no_lack_of_memory_is_not_taken_for_it(said: str, gpu: FakeGpu, gpu_model: Path) -> None:
    gpu.loads = forever(said)
    with pytest.raises(DeviceUnavailable):
        load(gpu_model, device="cuda", drafter="none")


def test_a_gpu_without_room_for_the_first_cache_or_pass_ends_with_exit_code_5(
    gpu: FakeGpu, gpu_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.arrays = forever(SAYINGS[0])
    assert main(["chat", str(gpu_model), "--device", "cuda", "--prompt", PROMPT]) == 5
    assert "no memory for a context of" in capsys.readouterr().err
    gpu.arrays, gpu.passes = iter(()), forever(SAYINGS[3])
    assert main(["chat", str(gpu_model), "--device", "cuda", "--prompt", PROMPT]) == 5
    assert "out of memory while running a pass" in capsys.readouterr().err


@pytest.mark.parametrize("said", [SAYINGS[0], SAYINGS[2]])
def test_a_cache_that_cannot_grow_ends_the_answer_and_the_next_one_is_right(
    said: str, gpu: FakeGpu, gpu_model: Path
) -> None:
    prompt = "in the an " * 95
    with load(gpu_model, device="cuda", drafter="none") as engine:
        length = len(engine.encode(prompt))
        assert 480 < length <= 512 - 16, (
            "the first answer is to pass the end of the first buffers, and not at once"
        )
        wanted = engine.generate(prompt, max_tokens=40).token_ids
    with load(gpu_model, device="cuda", drafter="none") as engine:
        gpu.arrays = forever(said)
        with pytest.raises(MemoryExhausted, match="no memory for a context of"):
            engine.generate(prompt, max_tokens=40)
        assert engine.generate(prompt, max_tokens=2).token_ids == wanted[:2]
        gpu.arrays = iter(())
        assert engine.generate(prompt, max_tokens=40).token_ids == wanted


def test_a_pass_that_is_refused_ends_the_answer_and_the_next_one_is_right(gpu: FakeGpu, gpu_model: Path) -> None:
    with load(gpu_model, device="cuda", drafter="none") as engine:
        wanted = engine.generate(PROMPT, max_tokens=40).token_ids
        gpu.passes = forever(SAYINGS[2], 9)
        with pytest.raises(MemoryExhausted, match="out of memory while running a pass"):
            engine.generate("an " + PROMPT, max_tokens=40)
        gpu.passes = iter(())
        assert engine.generate(PROMPT, max_tokens=40).token_ids == wanted


def test_a_gpu_that_is_lost_or_held_by_others_is_named_with_what_to_do(gpu: FakeGpu, gpu_model: Path) -> None:
    with load(gpu_model, device="cuda", drafter="none") as engine:
        gpu.passes = forever(KERNEL + "CUDA failure 46: CUDA-capable device(s) is/are busy or unavailable", 9)
        with pytest.raises(EdgeSpecError, match="busy or unavailable; the GPU or its driver gave up, or another"):
            engine.generate(PROMPT, max_tokens=40)


def test_the_ladder_frees_a_drafter_on_the_gpu_for_its_target(
    gpu: FakeGpu, gpu_model: Path, tmp_path: Path
) -> None:
    with load(gpu_model, device="cuda", drafter="none", deterministic=True) as engine:
        wanted = engine.generate(PROMPT, max_tokens=60).token_ids
    drafter = tmp_path / "drafter"
    drafter.symlink_to(gpu_model)
    said: list[str] = []
    options = {"drafter": str(drafter), "draft_length": 3, "device": "cuda", "drafter_device": "cuda"}
    with load(gpu_model, deterministic=True, report=said.append, **options) as engine:
        assert engine._drafting.pool.has_models
        before = gpu.used
        gpu.passes = chain(repeat(None, 20), repeat(KERNEL + "CUDA failure 2: out of memory", 3))
        answer = engine.generate(PROMPT, max_tokens=60)
        gc.collect()
        assert not engine._drafting.pool.has_models
        assert gpu.used < before
        again = engine.generate(PROMPT, max_tokens=60)
    assert answer.token_ids == again.token_ids == wanted
    assert any("drafting steps down" in line for line in said)
    engine = None
    gc.collect()
    assert gpu.used == gpu.kept == 0, "closing gives everything back"


@pytest.mark.slow
def test_a_gpu_that_another_program_takes_in_mid_answer_ends_with_exit_code_5_and_the_text_so_far(
    gpu: FakeGpu, gpu_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "chat",
        str(gpu_model),
        "--device",
        "cuda",
        "--drafter",
        "none",
        "--prompt",
        PROMPT,
        "--max-tokens",
        "40",
    ]
    assert main(command) == 0
    wanted = capsys.readouterr().out.strip()
    before = len(gpu.widths) + gpu.num_replayed
    assert main(command) == 0
    # Of an opening that finds its check saved, and an answer.
    num_passes = len(gpu.widths) + gpu.num_replayed - before
    capsys.readouterr()
    gpu.passes = forever(SAYINGS[2], num_passes - 20)
    assert main(command) == 5
    found = capsys.readouterr()
    assert 0 < len(found.out.strip()) < len(wanted)
    assert wanted.startswith(found.out.strip())
    assert "out of memory while running a pass" in found.err
    assert "Traceback" not in found.err
