"""Pinned host memory, without a GPU: what is mapped, placed and registered, and what is left after a failure."""

from __future__ import annotations

import errno
import gc
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.tier.host_memory import numa, pinned
from sglang_oasis.tier.host_memory.pinned import HUGE_PAGE, PinnedAllocator
from sglang_oasis.tier.host_pool import HostPool

PAGE = 4096
CHUNK = 4 * PAGE


class Registrations:
    """A registrar that books what is pinned, and refuses one registration."""

    def __init__(self, refused: int | None = None) -> None:
        self.pinned: dict[int, int] = {}
        self.calls = 0
        self._refused = refused

    def register(self, address: int, nbytes: int) -> None:
        self.calls += 1
        if self.calls - 1 == self._refused:
            raise OSError(2, "out of memory")
        assert address % PAGE == 0
        assert nbytes % PAGE == 0
        assert all(address + nbytes <= start or start + size <= address for start, size in self.pinned.items())
        self.pinned[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]


def mapped(address: int) -> bool:
    """Whether an address belongs to any mapping of this process."""
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
    chunk_pages=st.integers(1, 5),
)
def test_a_tensor_is_zeroed_ordinary_memory_and_all_of_it_is_pinned(
    shape: tuple[int, ...], dtype: torch.dtype, chunk_pages: int
) -> None:
    registrations = Registrations()
    tensor = PinnedAllocator(registrations, chunk_bytes=chunk_pages * PAGE)(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (shape, dtype, "cpu")
    assert not tensor.any()
    content = torch.randint(0, 100, shape).to(dtype)
    tensor.copy_(content)
    assert torch.equal(tensor, content)
    ranges = sorted(registrations.pinned.items())
    assert ranges[0][0] == tensor.data_ptr()
    assert all(nbytes <= chunk_pages * PAGE for _, nbytes in ranges)
    assert all(first + nbytes == second for (first, nbytes), (second, _) in itertools.pairwise(ranges))
    assert 0 <= sum(registrations.pinned.values()) - tensor.nbytes < PAGE


def test_large_memory_begins_at_a_huge_page() -> None:
    registrations = Registrations()
    tensor = PinnedAllocator(registrations)((2 * HUGE_PAGE + 1,), torch.uint8)
    assert tensor.data_ptr() % HUGE_PAGE == 0
    assert sum(registrations.pinned.values()) == 2 * HUGE_PAGE + PAGE
    tensor[-1] = 1  # the last byte is there


def test_memory_lives_as_long_as_the_last_tensor_over_it() -> None:
    registrations = Registrations()
    tensor = PinnedAllocator(registrations, chunk_bytes=CHUNK)((4 * CHUNK,), torch.uint8)
    address, view = tensor.data_ptr(), tensor.view(4, CHUNK)[3]
    del tensor
    gc.collect()
    view.fill_(7)
    assert (len(registrations.pinned), mapped(address)) == (4, True)
    del view
    gc.collect()
    assert not registrations.pinned
    assert not mapped(address)


@pytest.mark.parametrize("refused", [0, 2, 3])
def test_a_refused_chunk_leaves_nothing_behind_and_names_the_remedy(
    refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmapped: list[pinned.Span] = []
    original = pinned._unmap
    monkeypatch.setattr(pinned, "_unmap", lambda span: (unmapped.append(span), original(span)))
    registrations = Registrations(refused)
    with pytest.raises(LookaheadKVError) as failure:
        PinnedAllocator(registrations, chunk_bytes=1 << 20)((4 << 20,), torch.uint8)
    message = str(failure.value)
    assert f"only {refused * (1 << 20) / 1e9:.2f} GB" in message
    for remedy in ("out of memory", "ulimit -l", "memlock", "--lookahead-kv-host-gb"):
        assert remedy in message
    assert "\n" not in message
    assert registrations.calls == refused + 1
    assert not registrations.pinned
    assert unmapped[-1].nbytes == 4 << 20


def test_when_a_later_layer_cannot_be_pinned_the_earlier_ones_are_released() -> None:
    registrations = Registrations(refused=5)
    allocate = PinnedAllocator(registrations, chunk_bytes=CHUNK)
    with pytest.raises(LookaheadKVError, match="could be pinned"):
        HostPool(
            num_pages=2,
            num_layers=4,
            kv_heads=2,
            block_size=16,
            head_dim=64,  # a layer takes two chunks
            dtype=torch.float32,
            summary_format=None,
            allocate=allocate,
        )
    gc.collect()
    assert not registrations.pinned
    assert allocate.pinned_bytes == 4 * CHUNK  # what the sentence counts from


def test_memory_that_cannot_be_mapped_is_refused_in_a_sentence() -> None:
    with pytest.raises(LookaheadKVError, match=r"could not be mapped \(Cannot allocate memory\).*host-gb"):
        PinnedAllocator(Registrations())((1 << 50,), torch.uint8)


@pytest.mark.parametrize(("code", "survives"), [(errno.EINVAL, True), (errno.ENOMEM, False)])
def test_an_old_kernel_is_worked_around_and_missing_memory_is_not(
    code: int, survives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(span: pinned.Span, advice: int) -> bool:
        pinned.ctypes.set_errno(code)
        return False

    monkeypatch.setattr(pinned, "_advise", refuse)
    registrations = Registrations()
    if survives:
        assert PinnedAllocator(registrations)((PAGE,), torch.uint8).sum() == 0
    else:
        with pytest.raises(LookaheadKVError, match=r"no more host memory .* lower --lookahead-kv-host-gb"):
            PinnedAllocator(registrations)((PAGE,), torch.uint8)
        assert registrations.calls == 0


def machine(folder: Path, nodes: int, device_node: str | None) -> Path:
    """A sysfs with memory nodes and one GPU."""
    for node in range(nodes):
        (folder / f"devices/system/node/node{node}").mkdir(parents=True)
    (folder / "devices/system/node/online").write_text(f"0-{nodes - 1}")
    gpu = folder / "bus/pci/devices/0000:1b:00.0"
    gpu.mkdir(parents=True)
    if device_node is not None:
        (gpu / "numa_node").write_text(device_node)
    return folder


@pytest.mark.parametrize(
    ("nodes", "device_node", "expected"),
    [(2, "1\n", 1), (2, "0\n", 0), (2, "-1\n", None), (1, "0\n", None), (2, None, None), (2, "?", None)],
    ids=["far node", "first node", "placed nowhere", "one node", "no entry", "not a number"],
)
def test_the_node_of_a_gpu_is_what_sysfs_says(
    tmp_path: Path, nodes: int, device_node: str | None, expected: int | None
) -> None:
    assert numa.node_of_device("0000:1B:00.0", machine(tmp_path, nodes, device_node)) == expected


def policies_are_told() -> bool:
    """Containers often forbid it, and mbind with it."""
    try:
        numa.policy_at(torch.zeros(1).data_ptr())
    except (OSError, KeyError):
        return False
    return True


@pytest.mark.skipif(not policies_are_told(), reason="the kernel tells no memory policies")
def test_memory_is_preferred_from_the_node_that_was_asked_for() -> None:
    tensor = PinnedAllocator(Registrations(), node=0)((4 * PAGE,), torch.uint8)
    assert numa.policy_at(tensor.data_ptr()) == (numa.MPOL_PREFERRED, [0])
    elsewhere = PinnedAllocator(Registrations())((4 * PAGE,), torch.uint8)
    assert numa.policy_at(elsewhere.data_ptr()) == (0, [])


def test_a_node_that_this_process_may_not_use_is_warned_of_once_and_does_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = [name.removeprefix("node") for name in os.listdir("/sys/devices/system/node")]
    missing = 1 + max(int(number) for number in nodes if number.isdigit())
    allocate = PinnedAllocator(Registrations(), node=missing)
    for _ in range(2):
        assert allocate((4 * PAGE,), torch.uint8).sum() == 0
    assert len(caplog.records) == 1
    assert f"NUMA node {missing}" in caplog.text
    assert "numactl" in caplog.text


class Driver:
    """As much of the CUDA driver as a registrar asks."""

    def __init__(self, same_addresses: int, error: int = 0) -> None:
        self._same_addresses, self._error = same_addresses, error

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        handle._obj.value = index
        return self._error

    def cuDeviceGetPCIBusId(self, name: Any, size: int, handle: Any) -> int:
        name.value = b"0000:1B:00.0"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:
        value._obj.value = self._same_addresses if attribute == 91 else 0
        return 0


class Runtime:
    """As much of torch.cuda.cudart() as a registrar calls."""

    def __init__(self, result: int) -> None:
        self._result = result
        self.flags = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.flags = flags
        return self._result

    def cudaGetErrorString(self, result: int) -> str:
        return f"error {result}"


@pytest.mark.parametrize(
    ("driver", "sentence"),
    [(Driver(0), "cudaDevAttrCanUseHostPointerForRegisteredMem is 0"), (Driver(1, 100), "cuDeviceGet with error 100")],
    ids=["other addresses", "driver fails"],
)
def test_a_device_that_cannot_use_host_pointers_is_refused(
    driver: Driver, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(pinned.ctypes, "CDLL", lambda name: driver)
    with pytest.raises(LookaheadKVError, match=sentence):
        pinned.CudaRegistrar(torch.device("cuda", 0))


def test_a_registration_is_mapped_and_portable_and_its_error_is_the_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(0)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinned.ctypes, "CDLL", lambda name: Driver(1))
    registrar = pinned.CudaRegistrar(torch.device("cuda", 0))
    assert registrar.pci_id == "0000:1B:00.0"
    registrar.register(PAGE, PAGE)
    assert runtime.flags == 1 | 2
    runtime._result = 2
    with pytest.raises(OSError, match="error 2"):
        registrar.register(PAGE, PAGE)
