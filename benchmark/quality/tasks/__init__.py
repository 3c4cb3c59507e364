"""Tasks with offline generators, after RULER (arXiv 2404.06654) and the context-intensive sets that followed it."""

from benchmark.quality.documents import Task
from benchmark.quality.tasks import agent, needles, reading, tracking, words

TASKS: dict[str, Task] = {
    task.name: task for module in (needles, tracking, words, reading, agent) for task in module.TASKS
}
"""Name -> task."""
