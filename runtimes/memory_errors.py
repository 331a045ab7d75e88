"""The words of runtimes and drivers that are refused memory. ONNX Runtime raises no error of its own for that.

The words are those of ONNX Runtime 1.31 and its plugins, read in their libraries and source, and those that
drivers document. Words that are also said for other reasons are not here: CUBLAS_STATUS_NOT_INITIALIZED, QNN's
MEM_ALLOC (also for a wrong architecture), and a device that is lost.
"""

from typing import NamedTuple


class Saying(NamedTuple):
    """Words of a message in lower case, and who says them."""

    words: str
    source: str


SAYINGS = (
    # The host.
    Saying("allocate memory", "ONNX Runtime's arena (bfc_arena.cc), strerror(ENOMEM), Dawn's maps of buffers"),
    Saying("bad_alloc", "what() of C++'s error with gcc and clang"),
    Saying("bad allocation", "what() of C++'s error with Microsoft's compiler"),
    Saying("not enough memory", "Windows: ERROR_NOT_ENOUGH_MEMORY, E_OUTOFMEMORY"),
    Saying("paging file is too small", "Windows: ERROR_COMMITMENT_LIMIT, when a file is mapped"),
    # ONNX Runtime's arena, on any device.
    Saying("smaller than requested bytes", "the arena's limit (gpu_mem_limit), bfc_arena.cc"),
    Saying("failed to find a free memory block", "bfc_arena.cc"),
    # NVIDIA. ONNX Runtime writes `CUDA failure 2: out of memory`, `CUBLAS failure 3: the resource allocation
    # failed` (cuda_call.cc; older versions write the status's name) and what cuDNN returns.
    Saying("out of memory", "cudaGetErrorString(cudaErrorMemoryAllocation); Dawn; most others"),
    Saying("cudaerrormemoryallocation", "the name of CUDA's error"),
    Saying("the resource allocation failed", "cublasGetStatusString(CUBLAS_STATUS_ALLOC_FAILED)"),
    Saying("resource allocation failed inside the cudnn library", "cudnnGetErrorString"),
    Saying("host memory allocation failed inside the cudnn library", "cudnnGetErrorString"),
    Saying("status_alloc_failed", "names of cuBLAS and of cuDNN before version 9"),
    Saying("_allocation_failed", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, …_HOST_…"),
    # Names that hold the words: CUDA_ERROR_OUT_OF_MEMORY, VK_ERROR_OUT_OF_DEVICE_MEMORY, CL_OUT_OF_HOST_MEMORY,
    # ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY, E_OUTOFMEMORY, kIOGPUCommandBufferCallbackErrorOutOfMemory.
    Saying("out_of_memory", "CUDA's driver, oneDNN (dnnl_out_of_memory)"),
    Saying("out_of_device_memory", "Vulkan (through WebGPU), Level Zero (through OpenVINO)"),
    Saying("out_of_host_memory", "Vulkan, Level Zero, OpenCL"),
    Saying("outofmemory", "Direct3D 12 (WebGPU and DirectML), Metal, WebGPU's own kind of error"),
    Saying("0x8007000e", "DirectML: E_OUTOFMEMORY as a number"),
    Saying("insufficient memory", "Metal, OpenVINO"),
    # WebGPU and OpenVINO's plugins for Intel's GPU and NPU.
    Saying("memory allocation failed. size=", "the WebGPU plugin"),
    Saying("cl_mem_object_allocation_failure", "OpenCL (through OpenVINO)"),
    Saying("cl_out_of_resources", "OpenCL, whose other reason is a kernel that takes too much"),
    Saying("out of gpu resources", "OpenVINO's GPU plugin"),
    Saying("exceeded max size of memory", "OpenVINO's GPU plugin: one array is larger than the GPU allows"),
    Saying("buffer allocation failed", "OpenVINO's GPU and NPU plugins"),
)


def is_memory_error(error: BaseException) -> bool:
    """True if memory was refused, by the error's type or by what it says."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(saying.words in message for saying in SAYINGS)
