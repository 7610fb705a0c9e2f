"""A plugin of pytest: the fixture `kernels` is the wheel's library for 64-bit Arm, run by qemu.

Tests stay as they are, and so does NativeKernels. Only the library that it loads is another one: a call
copies the storages of the tensors to memory that it shares with a process of qemu, and back.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ryzanstein.worker.kernels import native, wheel

COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
_DRIVER = Path(__file__).with_name("aarch64_driver.c")
_MEMORY_BYTES = 1 << 30  # of a sparse file


class Pointers(TorchFunctionMode):
    """Remembers the storages whose addresses were asked for: those of the next call's arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.data_ptr:
            storage = args[0].untyped_storage()
            self.storages[storage.data_ptr()] = storage
        return result


class Memory:
    """What the arguments of a call point to: copies in a file that the emulated process maps too."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(_MEMORY_BYTES)
            self._file = mmap.mmap(file.fileno(), _MEMORY_BYTES)
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(self._file))
        self.clear()

    def clear(self) -> None:
        self._end = 0
        self._copies: list[tuple[int, int, int]] = []  # address, size, offset

    def add(self, address: int, size: int) -> int:
        """Copies what lies at an address, with the same alignment. Returns its offset."""
        offset = self._end + address % mmap.PAGESIZE
        self._end = offset + size + -(offset + size) % mmap.PAGESIZE
        assert self._end <= _MEMORY_BYTES
        ctypes.memmove(self._begin + offset, address, size)
        self._copies.append((address, size, offset))
        return offset

    def place(self, address: int) -> int:
        """The offset of the copy of what an address points to."""
        for begin, size, offset in self._copies:
            if begin <= address < begin + size:
                return offset + address - begin
        raise AssertionError(f"{address:#x} is in no tensor of this call")

    def copy_back(self, storages: Iterable[int]) -> None:
        """Structures stay as they were: their copies hold addresses of the other process."""
        wanted = set(storages)
        for address, size, offset in self._copies:
            if address in wanted:
                ctypes.memmove(address, self._begin + offset, size)


class Call:
    """What one call sends: arguments, and the places in memory that hold a pointer."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._pointers: list[int] = []
        self._integers: list[int] = []
        self._floats: list[float] = []

    def add(self, value: Any, kind: Any) -> None:
        if kind is ctypes.c_float:
            self._floats.append(value)
        elif kind in (ctypes.c_int, ctypes.c_int64):
            self._integers += (False, int(value))
        elif not value:
            self._integers += (False, 0)
        elif kind is ctypes.c_void_p:
            self._integers += (True, self._memory.place(value))
        else:
            pointed = value.contents if hasattr(value, "contents") else getattr(value, "_obj", value)
            self._integers += (True, self._structure(pointed))

    def _structure(self, value: ctypes.Structure | ctypes.Array[Any]) -> int:
        offset = self._memory.add(ctypes.addressof(value), ctypes.sizeof(value))
        for name, kind in getattr(value, "_fields_", ()):
            address = getattr(value, name)
            if kind is ctypes.c_void_p and address:
                self._pointers += (offset + getattr(type(value), name).offset, self._memory.place(address))
        return offset

    def request(self, name: str) -> bytes:
        pairs = [struct.pack(f"=q{len(n)}q", len(n) // 2, *n) for n in (self._pointers, self._integers)]
        floats = struct.pack("=2f", *[*self._floats, 0.0, 0.0][:2])
        return struct.pack("=32sq", name.encode(), torch.get_num_threads()) + b"".join(pairs) + floats


class EmulatedLibrary:
    """In the place of ctypes.CDLL."""

    def __init__(self, process: subprocess.Popen[bytes], memory: Memory, pointers: Pointers) -> None:
        self._process, self._memory, self._pointers = process, memory, pointers

    def __getattr__(self, name: str) -> EmulatedFunction:
        function = EmulatedFunction(name, self)
        setattr(self, name, function)
        return function

    def call(self, name: str, arguments: Sequence[tuple[Any, Any]]) -> int:
        """Calls a function with values and their types of ctypes. Returns the register of its result."""
        storages = self._pointers.storages
        self._memory.clear()
        for address, storage in storages.items():
            if address:
                self._memory.add(address, storage.nbytes())
        call = Call(self._memory)
        for value, kind in arguments:
            call.add(value, kind)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(call.request(name))
        stdin.flush()
        answer = stdout.read(8)
        assert len(answer) == 8, f"the emulated process ended with {self._process.wait()}"
        self._memory.copy_back(storages)
        storages.clear()
        (result,) = struct.unpack("=q", answer)
        return int(result)


class EmulatedFunction:
    """A function of the library, with what NativeKernels sets of a function of ctypes."""

    argtypes: Sequence[Any] = ()
    restype: Any = None
    calls = 0  # of all functions

    def __init__(self, name: str, library: EmulatedLibrary) -> None:
        self._name, self._library = name, library

    def __call__(self, *arguments: Any) -> int | None:
        EmulatedFunction.calls += 1
        result = self._library.call(self._name, list(zip(arguments, self.argtypes, strict=True)))
        return None if self.restype is None else self.restype(result).value


@contextmanager
def emulated_kernels() -> Iterator[native.NativeKernels]:
    """Compiles the wheel's library and the driver, and runs them until the block ends."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", COMPILER)
        patch.setenv(wheel.ARCH, "aarch64")
        (library,) = wheel.compile_levels(Path(folder))
        driver = Path(folder) / "driver"
        linked = ("-Wl,--no-as-needed", "-fopenmp", "-ldl")
        subprocess.run([COMPILER, "-O1", "-std=gnu11", str(_DRIVER), *linked, "-o", str(driver)], check=True, timeout=60)
        memory = Memory(Path(folder) / "memory")
        command = [*EMULATOR, str(driver), str(library), str(Path(folder) / "memory")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process, Pointers() as pointers:
            patch.setattr(native.ctypes, "CDLL", lambda path: EmulatedLibrary(process, memory, pointers))
            kernels = native.NativeKernels(library)
            patch.undo()
            yield kernels
            assert process.stdin is not None
            process.stdin.close()


_opened: list[tuple[Any, native.NativeKernels]] = []


def pytest_sessionstart() -> None:
    context = emulated_kernels()
    _opened.append((context, context.__enter__()))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> native.NativeKernels | None:
    if fixturedef.argname != "kernels":
        return None
    kernels = _opened[0][1]
    fixturedef.cached_result = (kernels, fixturedef.cache_key(request), None)
    return kernels


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{EmulatedFunction.calls} calls were emulated")


def pytest_unconfigure() -> None:
    while _opened:
        _opened.pop()[0].__exit__(None, None, None)
