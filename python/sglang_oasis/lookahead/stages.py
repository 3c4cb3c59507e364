"""A pipeline of Python threads: a task of one layer passes the stages in order, tasks of different layers overlap."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch


class Stage(NamedTuple):
    """A named step of the pipeline: takes what the stage before returned, or the submitted task."""

    name: str
    run: Callable[[Any], Any]


class StagePipeline:
    """Runs one task per layer at a time, each stage in a thread of its own.

    Args:
        stages: in order.
        num_layers: layers that submit tasks.
        background: False runs every task to its end in `submit`.

    Attributes:
        seconds: time spent in each stage, by stage name.
        stall_seconds: time that `wait` blocked.
        stalls: number of `wait` calls that found the task unfinished.
    """

    def __init__(self, stages: Sequence[Stage], num_layers: int, background: bool = True) -> None:
        self._stages = stages
        self._background = background
        self._threads = [
            ThreadPoolExecutor(
                max_workers=1, thread_name_prefix=f"lookahead-{stage.name}", initializer=_one_torch_thread
            )
            for stage in stages
        ]
        self._pending: list[Future[None] | None] = [None] * num_layers
        self.seconds = {stage.name: 0.0 for stage in stages}
        self._timing = threading.Lock()
        self.stall_seconds = 0.0
        self.stalls = 0

    def submit(self, layer: int, task: Any) -> None:
        """Start a task of `layer`; the layer's previous task must have been waited for."""
        if self._pending[layer] is not None:
            raise RuntimeError(f"the lookahead task of layer {layer} was not waited for before the next one")
        if not self._background:
            self.run(task)
            return
        done: Future[None] = Future()
        self._pending[layer] = done
        self._threads[0].submit(self._pass_on, 0, task, done)

    def run(self, task: Any) -> Any:
        """Run all stages now, in the caller's thread; return what the last one returned."""
        for stage in self._stages:
            task = self._timed(stage, task)
        return task

    def wait(self, layer: int) -> None:
        """Block until the layer's task is through, no other layer's; raises what the task raised."""
        done = self._pending[layer]
        if done is None:
            return
        self._pending[layer] = None
        if not done.done():
            self.stalls += 1
            start = time.perf_counter()
            try:
                done.result()
            finally:
                self.stall_seconds += time.perf_counter() - start
        done.result()

    def drain(self) -> None:
        """Wait for the tasks of all layers."""
        for layer in range(len(self._pending)):
            self.wait(layer)

    def close(self) -> None:
        """End the threads; tasks under way are finished first."""
        for thread in self._threads:
            thread.shutdown()

    def _timed(self, stage: Stage, value: Any) -> Any:
        start = time.perf_counter()
        value = stage.run(value)
        with self._timing:  # `run` is in the caller's thread
            self.seconds[stage.name] += time.perf_counter() - start
        return value

    def _pass_on(self, index: int, value: Any, done: Future[None]) -> None:
        try:
            value = self._timed(self._stages[index], value)
        except BaseException as error:
            done.set_exception(error)
            return
        if index + 1 < len(self._stages):
            self._threads[index + 1].submit(self._pass_on, index + 1, value, done)
        else:
            done.set_result(None)


def _one_torch_thread() -> None:
    # The forward pass owns the cores; a stage that spread over them would slow it down. Threads that exist already keep
    # their number; torch gives this one to threads that are started later, too.
    torch.set_num_threads(1)
