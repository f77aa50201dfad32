"""Builds the kernels and launches them.

On a GPU they are compiled by NVRTC, which comes with torch's own CUDA packages, and launched through the CUDA
driver: torch offers no programmatic dependent launch. No toolkit is needed.

home/cuda/kernels-RECIPE.cubin     RECIPE is a hash of sources, options, architecture and compiler version

On a CPU the same source is built with the machine's compiler and run by csrc/cpu_shim.h, for tests.
"""

import ctypes as c
import hashlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import local
from typing import Any, Final, Protocol

import torch

from paceline import native_build
from paceline.errors import NotCompiled
from paceline.paths import home

SOURCES: Final = Path(__file__).parent / "csrc"
SAMPLING: Final = Path(__file__).parents[2] / "sampling" / "csrc"
HEADERS: Final = (
    SAMPLING / "exact_exp.h",
    *(
        SOURCES / f"{name}.h"
        for name in ("ptx", "pass", "linear", "packed", "attention", "cut", "choose", "rows", "block_head")
    ),
)
# Without -fmad=false the compiler contracts a product and a sum in one row count and not in another.
OPTIONS: Final = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")
MIN_CAPABILITY: Final = (8, 0)  # bf16 matrix instructions, asynchronous copies
PDL_CAPABILITY: Final = (9, 0)
MIN_SHARED_KB: Final = 220  # of one block, which attention over heads of 128 needs

_LARGE_SHARED: Final = 48 * 1024  # bytes above which a kernel must ask
_MAX_DYNAMIC_SHARED_SIZE: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_OUT_OF_MEMORY: Final = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PROGRAMMATIC_SERIALIZATION: Final = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Launcher(Protocol):
    """Runs kernels one after another, in the order of the calls."""

    device: torch.device
    multiprocessors: int

    def launch(
        self, name: str, grid: int, threads: int, shared_bytes: int, argument: c.Structure
    ) -> None: ...
    def capture(self, launches: Callable[[], None]) -> Callable[[], None] | None:
        """Records these launches, which ran before, as a graph; gives what replays it. None: no graphs."""


class _Attribute(c.Structure):  # CUlaunchAttribute
    _fields_ = (("id", c.c_int), ("pad", c.c_int), ("value", c.c_int), ("rest", c.c_byte * 60))


class _Config(c.Structure):  # CUlaunchConfig
    _fields_ = (
        *(
            (name, c.c_uint)
            for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")
        ),
        ("stream", c.c_void_p),
        ("attributes", c.POINTER(_Attribute)),
        ("attribute_count", c.c_uint),
    )


class GpuLauncher:
    """Launches on torch's current stream of one GPU, from any thread."""

    def __init__(self, device: torch.device, defines: Sequence[str] = (), pdl: bool | None = None) -> None:
        """pdl: None: where the GPU has it."""
        reason = unusable(device)
        if reason:
            raise NotCompiled(reason)
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._thread = local()
        self._enter_thread()
        properties = torch.cuda.get_device_properties(self.device)
        self.multiprocessors = int(properties.multi_processor_count)
        self.pdl = capability(device) >= PDL_CAPABILITY if pdl is None else pdl
        self._driver = c.CDLL("libcuda.so.1")
        self._attribute = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, 1)
        self._functions: dict[str, tuple[c.c_void_p, int]] = {}
        # It keeps the interpreter's lock: getting it back could take far longer than a launch.
        self._launch_graph = c.PyDLL("libcuda.so.1").cuGraphLaunch
        self._launch_graph.argtypes = (c.c_void_p, c.c_void_p)
        self._module = c.c_void_p()
        self._check(
            self._driver.cuModuleLoadData(c.byref(self._module), cubin(architecture(device), defines))
        )

    def launch(self, name: str, grid: int, threads: int, shared_bytes: int, argument: c.Structure) -> None:
        self._enter_thread()
        function = self._function(name, shared_bytes)
        arguments = (c.c_void_p * 1)(c.addressof(argument))
        stream = torch.cuda.current_stream(self.device).cuda_stream
        config = _Config(grid, 1, 1, threads, 1, 1, shared_bytes, stream)
        if self.pdl:
            config.attributes, config.attribute_count = c.pointer(self._attribute), 1
        self._check(self._driver.cuLaunchKernelEx(c.byref(config), function, arguments, None))

    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        """Through the driver: a replay takes a third of the time that torch's takes."""
        driver, graph, executable = self._driver, c.c_void_p(), c.c_void_p()
        new_stream: Any = torch.cuda.Stream
        stream = new_stream(self.device)
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(stream):
            self._check(driver.cuStreamBeginCapture_v2(c.c_void_p(stream.cuda_stream), _THREAD_LOCAL))
            try:
                launches()
            finally:
                ended = driver.cuStreamEndCapture(c.c_void_p(stream.cuda_stream), c.byref(graph))
            self._check(ended)
        made = driver.cuGraphInstantiateWithFlags(c.byref(executable), graph, c.c_ulonglong(0))
        driver.cuGraphDestroy(graph)
        self._check(made)
        launch, current, index = self._launch_graph, _current_stream(), self.device.index

        def replay() -> None:
            self._enter_thread()
            if code := launch(executable, current(index)):
                self._check(code)

        weakref.finalize(replay, driver.cuGraphExecDestroy, executable).atexit = False
        return replay

    def _enter_thread(self) -> None:
        """The driver needs torch's context of this GPU to be the thread's current one."""
        if not hasattr(self._thread, "entered"):
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)
            self._thread.entered = True

    def _function(self, name: str, shared_bytes: int) -> c.c_void_p:
        found, allowed = self._functions.get(name, (c.c_void_p(), -1))
        if allowed < 0:
            self._check(self._driver.cuModuleGetFunction(c.byref(found), self._module, name.encode()))
            self._functions[name] = (found, allowed := _LARGE_SHARED)
        if shared_bytes > allowed:
            self._check(self._driver.cuFuncSetAttribute(found, _MAX_DYNAMIC_SHARED_SIZE, shared_bytes))
            self._functions[name] = (found, shared_bytes)
        return found

    def _check(self, code: int) -> None:
        if code:
            text = c.c_char_p()
            self._driver.cuGetErrorString(code, c.byref(text))
            if code == _OUT_OF_MEMORY:
                raise torch.OutOfMemoryError("the CUDA driver has no memory left on the GPU")
            raise NotCompiled(f"the CUDA driver refused a kernel: {(text.value or b'').decode()} ({code})")


def _current_stream() -> Callable[[int], int]:
    """The handle of torch's current stream, the quick way where torch has it."""
    quick: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda index: torch.cuda.current_stream(index).cuda_stream)


class CpuLauncher:
    """The kernels on a CPU, slowly: for tests where there is no GPU."""

    device = torch.device("cpu")
    pdl = False

    def __init__(self, defines: Sequence[str] = (), multiprocessors: int = 5) -> None:
        self.multiprocessors = multiprocessors
        # Fortified, longjmp takes jumps between stacks for an error.
        flags = ("-O1", "-U_FORTIFY_SOURCE", "-DON_CPU", "-xc++", "-w", f"-I{SAMPLING}", *defines)
        unit = native_build.Unit(SOURCES / "kernels.cu", flags)
        self.library = native_build.load("cuda-shim", [unit], [*HEADERS, SOURCES / "cpu_shim.h"])

    def launch(self, name: str, grid: int, threads: int, shared_bytes: int, argument: c.Structure) -> None:
        kernel = c.cast(getattr(self.library, name), c.c_void_p)
        self.library.launch(kernel, grid, threads, c.byref(argument))

    def capture(self, launches: Callable[[], None]) -> None:
        return None


# ---- what a GPU can do


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def architecture(device: torch.device) -> str:
    major, minor = capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def unusable(device: torch.device) -> str | None:
    """Why the kernels cannot run on this GPU; None: they can."""
    found = capability(device)
    if found < MIN_CAPABILITY:
        return f"the GPU's compute capability is {found[0]}.{found[1]}, the kernels need 8.0"
    properties = torch.cuda.get_device_properties(device)
    shared_kb = int(getattr(properties, "shared_memory_per_block_optin", 0)) // 1024
    if shared_kb < MIN_SHARED_KB:
        return f"a block of this GPU has {shared_kb} KB of shared memory, the kernels need {MIN_SHARED_KB}"
    return None


# ---- NVRTC


def cubin(arch: str, defines: Sequence[str] = ()) -> bytes:
    """The compiled kernels: from the cache, or built in a few seconds."""
    compiler = _Nvrtc()
    sources = {path.name: path.read_bytes() for path in (SOURCES / "kernels.cu", *HEADERS)}
    options = [f"--gpu-architecture={arch}", *OPTIONS, *defines]
    recipe = hashlib.sha256(repr((sources, options, compiler.version)).encode()).hexdigest()[:24]
    path = home() / "cuda" / f"kernels-{recipe}.cubin"
    with suppress(OSError):
        return path.read_bytes()
    built = compiler.compile(sources, options)
    with suppress(OSError):  # else it is built again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_bytes(built)
        temporary.replace(path)
    return built


class _Nvrtc:
    def __init__(self) -> None:
        self._library = _load_nvrtc()
        major, minor = c.c_int(), c.c_int()
        self._library.nvrtcVersion(c.byref(major), c.byref(minor))
        self.version = (major.value, minor.value)

    def compile(self, sources: dict[str, bytes], options: Sequence[str]) -> bytes:
        library, program = self._library, c.c_void_p()
        headers = [name for name in sources if name != "kernels.cu"]
        texts = (c.c_char_p * len(headers))(*(sources[name] for name in headers))
        names = (c.c_char_p * len(headers))(*(name.encode() for name in headers))
        code = library.nvrtcCreateProgram(
            c.byref(program), sources["kernels.cu"], b"kernels.cu", len(headers), texts, names
        )
        if code:
            raise NotCompiled(f"NVRTC made no program of the kernels (error {code})")
        words = (c.c_char_p * len(options))(*(option.encode() for option in options))
        failed = library.nvrtcCompileProgram(program, len(options), words)
        if failed:
            log = self._read(program, "ProgramLog").decode(errors="replace").strip("\0 \n")
            raise NotCompiled(f"NVRTC stopped with error {failed}: {log[:2000]}")
        return self._read(program, "CUBIN")

    def _read(self, program: c.c_void_p, what: str) -> bytes:
        size = c.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, c.byref(size))
        buffer = c.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw


def _load_nvrtc() -> c.CDLL:
    for path in _nvrtc_paths():
        with suppress(OSError):
            return c.CDLL(path)
    raise NotCompiled("NVRTC is not here: it comes with torch's CUDA packages (nvidia-cuda-nvrtc)")


def _nvrtc_paths() -> Iterator[str]:
    """In torch's packages, then wherever the system finds it."""
    packages = Path(torch.__file__).parent.parent / "nvidia"
    found = [path for path in packages.glob("*/lib/libnvrtc.so*") if "builtins" not in path.name]
    found += (Path(torch.__file__).parent / "lib").glob("libnvrtc-*.so*")
    yield from (
        str(path) for path in sorted(found, key=lambda path: len(path.name)) if "builtins" not in path.name
    )
    toolkit = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    major = (torch.version.cuda or "13").partition(".")[0]
    yield from (f"libnvrtc.so.{major}", f"{toolkit}/lib64/libnvrtc.so", "libnvrtc.so")
