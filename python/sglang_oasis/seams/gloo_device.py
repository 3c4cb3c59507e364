"""Makes all process groups of a rank share one thread for their sockets, so that an idle rank uses almost no CPU time.

torch gives every gloo group a device of its own, whose thread wakes up a hundred times a second; SGLang makes ten
groups per rank, even for a single rank, which together take 1% of a core. One device can serve any number of groups.

Read from sglang 0.5.23: `distributed/parallel_state.init_distributed_environment` and `.initialize_model_parallel`
(AROUND: while they run, groups are made on the shared device); from torch 2.13:
`distributed_c10d._new_process_group_helper`, which makes a gloo group of (store, rank, size, timeout) and ignores
options. Remove this when it passes options on, or when gloo's threads wait for events without a timeout.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from torch.distributed import distributed_c10d

from sglang_oasis.seams.seam import Seam
from sglang_oasis.serving.cpu_platform.detect import cpu_platform_wanted


@functools.cache
def shared_device() -> Any:
    """Return the gloo device that all groups of this process share."""
    return distributed_c10d.ProcessGroupGloo.create_default_device()


class SharingGroup(distributed_c10d.ProcessGroupGloo):
    """A gloo group on the shared device."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = distributed_c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [shared_device()]
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def _on_one_device(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # A user who names interfaces may want several devices.
    if not cpu_platform_wanted() or "GLOO_SOCKET_IFNAME" in os.environ:
        return original(*args, **kwargs)
    with patch.object(distributed_c10d, "ProcessGroupGloo", SharingGroup):
        return original(*args, **kwargs)


SEAMS = [
    Seam(f"distributed.parallel_state.{name}", _on_one_device, "AROUND")
    for name in ("init_distributed_environment", "initialize_model_parallel")
]
