"""Host memory that a GPU reads and writes by address; it is mapped, placed on a node, touched, and pinned in chunks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_oasis.cpus import usable_cpus
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.tier.host_memory.numa import node_of_device, prefer_node

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 30
"""Bytes per pinning call. A driver may refuse one huge registration, and chunks show how much could be pinned."""

TOUCH_BYTES = 256 << 20
TOUCH_THREADS = 16
HUGE_PAGE = 2 << 20

MADV_DONTFORK, MADV_HUGEPAGE, MADV_POPULATE_WRITE = 10, 14, 23
REGISTER_PORTABLE, REGISTER_MAPPED = 1, 2
CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_MAP_FAILED = ctypes.c_void_p(-1).value


class Registrar(Protocol):
    """Pins memory for a device."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin a range of addresses; raises OSError with the reason if that fails."""

    def unregister(self, address: int) -> None:
        """Release the range that was pinned at `address`; raises OSError with the reason if that fails."""


class Span(NamedTuple):
    """A range of addresses.

    Attributes:
        address: first address.
        nbytes: number of bytes.
    """

    address: int
    nbytes: int


class PinnedAllocator:
    """Makes zeroed CPU tensors in pinned memory, each in an anonymous mapping of its own.

    Memory is unpinned and unmapped when no tensor uses it any more. A tensor may cross a chunk boundary: every
    chunk is mapped for the device at its host addresses (CUDA Runtime API, cudaHostGetDevicePointer: with
    cudaDevAttrCanUseHostPointerForRegisteredMem the device uses the host pointer), so kernels see one range. Only
    cudaMemcpy rejects a range that was registered in two parts, so copies must be done by a kernel or page by
    page.

    Args:
        registrar: pins the memory.
        node: memory node to take the memory from, None for any.
        chunk_bytes: bytes per pinning call, a multiple of the system's page size.

    Attributes:
        pinned_bytes: bytes of all tensors made so far.
    """

    def __init__(self, registrar: Registrar, node: int | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._registrar = registrar
        self._node = node
        self._chunk_bytes = chunk_bytes
        self.pinned_bytes = 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a zeroed tensor.

        Raises:
            LookaheadKVError: the memory cannot be mapped or pinned; all memory of this tensor is released.
        """
        count = math.prod(shape)
        mapping = _map(count * dtype.itemsize)
        try:
            if self._node is not None and not prefer_node(*mapping, self._node):
                self._node = None  # the warning was logged once
            _touch(mapping)
            chunks = self._pin(mapping)
        except BaseException:
            _unmap(mapping)
            raise
        self.pinned_bytes += mapping.nbytes
        memory = (ctypes.c_char * mapping.nbytes).from_address(mapping.address)
        # Not at the interpreter's exit: other threads may still read, and the system frees everything anyway.
        weakref.finalize(memory, _release, self._registrar, mapping, chunks).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)

    def _pin(self, mapping: Span) -> list[Span]:
        pinned: list[Span] = []
        for chunk in _split(mapping, self._chunk_bytes):
            try:
                self._registrar.register(*chunk)
            except OSError as error:
                done = self.pinned_bytes + sum(part.nbytes for part in pinned)
                _unpin(self._registrar, pinned)
                raise LookaheadKVError(
                    f"only {done / 1e9:.2f} GB of host memory could be pinned for the KV cache, the next "
                    f"{chunk.nbytes / 1e9:.2f} GB were refused ({error.strerror}): raise the limit of locked memory "
                    f"(`ulimit -l unlimited`, in a container --ulimit memlock=-1), or lower --lookahead-kv-host-gb."
                ) from error
            pinned.append(chunk)
        return pinned


class CudaRegistrar:
    """Pins memory for all CUDA devices of this process; the given device must be able to use host pointers.

    Args:
        device: a CUDA device.

    Attributes:
        pci_id: PCI address of the device.

    Raises:
        LookaheadKVError: the device has other addresses for pinned memory than the host.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        index = torch.cuda.current_device() if device.index is None else device.index
        _check_driver(driver.cuDeviceGet(ctypes.byref(handle), index), "cuDeviceGet")
        name = ctypes.create_string_buffer(32)
        _check_driver(driver.cuDeviceGetPCIBusId(name, len(name), handle), "cuDeviceGetPCIBusId")
        same = ctypes.c_int()
        attribute = CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        _check_driver(driver.cuDeviceGetAttribute(ctypes.byref(same), attribute, handle), "cuDeviceGetAttribute")
        if not same.value:
            raise LookaheadKVError(
                f"CUDA device {index} cannot read pinned memory at its host addresses "
                f"(cudaDevAttrCanUseHostPointerForRegisteredMem is 0): lookahead KV needs a Linux host, without "
                f"virtualisation that hides unified addressing, and a GPU of compute capability 8.0 or newer."
            )
        self.pci_id = name.value.decode()

    def register(self, address: int, nbytes: int) -> None:
        self._check(torch.cuda.cudart().cudaHostRegister(address, nbytes, REGISTER_PORTABLE | REGISTER_MAPPED))

    def unregister(self, address: int) -> None:
        self._check(torch.cuda.cudart().cudaHostUnregister(address))

    @staticmethod
    def _check(result: object) -> None:
        code = int(result)  # type: ignore[call-overload]
        if code:
            raise OSError(code, torch.cuda.cudart().cudaGetErrorString(result))


def pinned_allocator(device: torch.device) -> PinnedAllocator:
    """Return an allocator of pinned memory near a CUDA device.

    Raises:
        LookaheadKVError: the device cannot read pinned memory by address.
    """
    registrar = CudaRegistrar(device)
    node = node_of_device(registrar.pci_id)
    logger.info(
        "Host KV memory is pinned for GPU %s, on %s.", registrar.pci_id, "any node" if node is None else f"node {node}"
    )
    return PinnedAllocator(registrar, node)


def _map(nbytes: int) -> Span:
    """Map private anonymous memory, in huge pages where the system has them, which forks do not inherit.

    If a fork inherited it, the next write would go to a copy of the page, but the device would use the original.
    """
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    # Map a larger range, which contains one that begins at a huge page, and unmap the rest on both sides.
    spare = HUGE_PAGE if whole >= HUGE_PAGE else 0
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = _libc.mmap(None, ctypes.c_size_t(whole + spare), protection, flags, -1, ctypes.c_long(0))
    if start == _MAP_FAILED:
        raise LookaheadKVError(
            f"{nbytes / 1e9:.2f} GB of host memory could not be mapped ({os.strerror(ctypes.get_errno())}): lower "
            f"--lookahead-kv-host-gb, or raise the limit of virtual memory (`ulimit -v`)."
        )
    address = -(-start // HUGE_PAGE) * HUGE_PAGE if spare else start
    for rest in (Span(start, address - start), Span(address + whole, start + spare - address)):
        if rest.nbytes:
            _unmap(rest)
    mapping = Span(address, whole)
    _advise(mapping, MADV_HUGEPAGE)
    _advise(mapping, MADV_DONTFORK)
    return mapping


def _advise(span: Span, advice: int) -> bool:
    return _libc.madvise(ctypes.c_void_p(span.address), ctypes.c_size_t(span.nbytes), advice) == 0


def _touch(mapping: Span) -> None:
    """Let the kernel provide all pages, in parallel; registration would provide one after another."""
    threads = min(TOUCH_THREADS, usable_cpus())
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_populate, _split(mapping, TOUCH_BYTES)))


def _populate(span: Span) -> None:
    if _advise(span, MADV_POPULATE_WRITE):
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise LookaheadKVError(
            f"the system has no more host memory for the KV cache ({os.strerror(ctypes.get_errno())}): lower "
            f"--lookahead-kv-host-gb, or raise the memory limit of the container."
        )
    ctypes.memset(span.address, 0, span.nbytes)  # for Linux before 5.14


def _split(span: Span, nbytes: int) -> Iterator[Span]:
    for offset in range(0, span.nbytes, nbytes):
        yield Span(span.address + offset, min(nbytes, span.nbytes - offset))


def _unpin(registrar: Registrar, chunks: Sequence[Span]) -> None:
    for chunk in reversed(chunks):
        with contextlib.suppress(OSError):  # the CUDA context may have ended already
            registrar.unregister(chunk.address)


def _release(registrar: Registrar, mapping: Span, chunks: Sequence[Span]) -> None:
    _unpin(registrar, chunks)
    _unmap(mapping)


def _unmap(span: Span) -> None:
    _libc.munmap(ctypes.c_void_p(span.address), ctypes.c_size_t(span.nbytes))


def _check_driver(code: int, call: str) -> None:
    if code:
        raise LookaheadKVError(f"the CUDA driver answered {call} with error {code}: check the driver with nvidia-smi.")
