"""The words of runtimes and drivers that are refused memory. ONNX Runtime raises no error of its own for that.

The words are those of ONNX Runtime 1.31 and its plugins, read in their libraries and source, and those that
drivers document. Words that are also said for other reasons are not here: CUBLAS_STATUS_NOT_INITIALIZED, QNN's
MEM_ALLOC (also for a wrong architecture), and a device that is lost.
"""

# Words of a message in lower case, and who says them.
SAYINGS = {
    # The host.
    "allocate memory": "ONNX Runtime's arena (bfc_arena.cc), strerror(ENOMEM), Dawn's maps of buffers",
    "bad_alloc": "what() of C++'s error with gcc and clang",
    "bad allocation": "what() of C++'s error with Microsoft's compiler",
    "not enough memory": "Windows: ERROR_NOT_ENOUGH_MEMORY, E_OUTOFMEMORY",
    "paging file is too small": "Windows: ERROR_COMMITMENT_LIMIT, when a file is mapped",
    # ONNX Runtime's arena, on any device.
    "smaller than requested bytes": "the arena's limit (gpu_mem_limit), bfc_arena.cc",
    "failed to find a free memory block": "bfc_arena.cc",
    # NVIDIA. ONNX Runtime writes `CUDA failure 2: out of memory`, `CUBLAS failure 3: the resource allocation
    # failed` (cuda_call.cc; older versions write the status's name) and what cuDNN returns.
    "out of memory": "cudaGetErrorString(cudaErrorMemoryAllocation); Dawn; most others",
    "cudaerrormemoryallocation": "the name of CUDA's error",
    "the resource allocation failed": "cublasGetStatusString(CUBLAS_STATUS_ALLOC_FAILED)",
    "resource allocation failed inside the cudnn library": "cudnnGetErrorString",
    "host memory allocation failed inside the cudnn library": "cudnnGetErrorString",
    "status_alloc_failed": "names of cuBLAS and of cuDNN before version 9",
    "_allocation_failed": "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, …_HOST_…",
    # Names that hold the words: CUDA_ERROR_OUT_OF_MEMORY, VK_ERROR_OUT_OF_DEVICE_MEMORY, CL_OUT_OF_HOST_MEMORY,
    # ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY, E_OUTOFMEMORY, kIOGPUCommandBufferCallbackErrorOutOfMemory.
    "out_of_memory": "CUDA's driver, oneDNN (dnnl_out_of_memory)",
    "out_of_device_memory": "Vulkan (through WebGPU), Level Zero (through OpenVINO)",
    "out_of_host_memory": "Vulkan, Level Zero, OpenCL",
    "outofmemory": "Direct3D 12 (WebGPU and DirectML), Metal, WebGPU's own kind of error",
    "0x8007000e": "DirectML: E_OUTOFMEMORY as a number",
    "insufficient memory": "Metal, OpenVINO",
    # WebGPU and OpenVINO's plugins for Intel's GPU and NPU.
    "memory allocation failed. size=": "the WebGPU plugin",
    "cl_mem_object_allocation_failure": "OpenCL (through OpenVINO)",
    "cl_out_of_resources": "OpenCL, whose other reason is a kernel that takes too much",
    "out of gpu resources": "OpenVINO's GPU plugin",
    "exceeded max size of memory": "OpenVINO's GPU plugin: one array is larger than the GPU allows",
    "buffer allocation failed": "OpenVINO's GPU and NPU plugins",
}


def is_memory_error(error: BaseException) -> bool:
    """True if memory was refused, by the error's type or by what it says."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(words in message for words in SAYINGS)
