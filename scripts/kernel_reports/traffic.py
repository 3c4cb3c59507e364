"""Counts the bytes that each Triton kernel moves in one layer of a decode step, and those that any kernel must move.

`python -m scripts.kernel_reports.traffic` prints the table of docs/kernels.md. A test counts what
interpreted kernels touch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from triton import cdiv

from scripts.kernel_reports.workload import QWEN3_8B, Workload
from sglang_oasis.kernels.triton.launches import RANK_TILE, SCORE_TILE

INT, LONG, FLOAT = 4, 8, 4


class Traffic(NamedTuple):
    """Bytes and operations of one op, over all rows and heads.

    Attributes:
        floor: inputs read once and results written once, without bookkeeping.
        moved: bytes that the kernels access, every address once per kernel and direction: the memory traffic if caches
            keep everything during a kernel and nothing between kernels.
        reread: bytes that programs of a kernel read again, from caches.
        link: bytes of `moved` that cross the link to host memory.
        operations: multiplications and additions.
    """

    floor: float
    moved: float
    reread: float = 0
    link: float = 0
    operations: float = 0

    @property
    def ratio(self) -> float:
        """`moved` relative to the least possible."""
        return self.moved / self.floor


def take_tokens(load: Workload, completing: float | None = None) -> Traffic:
    """Count for the share `completing` of entries that complete a block, on average one in B per token."""
    share = load.tokens / load.block_size if completing is None else completing
    programs, tokens = load.batch * load.heads, load.tokens * 2 * load.vector_bytes
    keys = load.block_size * load.vector_bytes
    floor = programs * (3 * tokens + share * (keys + 2 * load.record_bytes))
    entry = LONG + 4 * INT + LONG * load.tokens + share * INT
    return Traffic(
        floor,
        moved=floor + load.batch * entry,
        reread=load.batch * (load.heads - 1) * entry,
        link=programs * (tokens + share * load.record_bytes),
        operations=programs * share * 4 * load.block_size * load.head_dim,
    )


def score_blocks(load: Workload) -> Traffic:
    """Count for both kernels; the data between them counts as moved, written and read."""
    programs, count = load.batch * load.heads, load.queries * load.group
    logical = load.blocks + 1
    tiles, rank_tiles = cdiv(load.blocks, SCORE_TILE), cdiv(load.blocks, RANK_TILE)
    idle, rank_idle = cdiv(logical, SCORE_TILE) - tiles, cdiv(logical, RANK_TILE) - rank_tiles
    queries, partials = count * load.vector_bytes, 2 * FLOAT * count * tiles
    averages = 2 * FLOAT * load.blocks if load.smoothed else 0
    floor = programs * (load.blocks * load.record_bytes + queries + averages + FLOAT * logical)
    between = programs * (2 * FLOAT * count * load.blocks + 2 * partials)
    rows = LONG if load.smoothed else 0
    issued = programs * (tiles * (queries + LONG + INT) + idle * INT)
    issued += programs * (rank_tiles * (partials + rows + INT) + rank_idle * INT)
    tables = load.batch * (LONG + INT + rows + INT)
    return Traffic(
        floor,
        moved=floor + between + tables,
        reread=issued - programs * (queries + partials) - tables,
        operations=programs * load.blocks * count * 4 * load.head_dim,
    )


def select_admissions(load: Workload) -> Traffic:
    """Count with all C best missing blocks admitted; atomic additions to the counters are not counted."""
    programs, selected = load.batch * load.heads, load.selected
    floor = programs * ((LONG + INT + INT) * selected + INT * (selected - load.most) + 2 * INT * load.most)
    tables = load.batch * (LONG + INT) + 2 * INT
    return Traffic(floor, moved=floor + tables, reread=programs * (LONG + 3 * INT) - tables)


def fetch_blocks(load: Workload) -> Traffic:
    """Count as if no two heads admitted the same block."""
    admissions = load.batch * load.heads * load.most
    floor = 2 * admissions * load.chunk_bytes
    tables = load.batch * LONG + INT
    return Traffic(
        floor,
        moved=floor + admissions * 8 * INT + tables,
        reread=admissions * (LONG + INT) - tables,
        link=admissions * load.chunk_bytes,
    )


def attend(load: Workload) -> Traffic:
    """Count with all slots full; the query vectors of a (row, head) share one tile."""
    programs, places = load.batch * load.heads, load.selected + load.local
    vectors = load.group * load.tokens
    floor = programs * (places * load.chunk_bytes + 2 * vectors * load.vector_bytes)
    tables = load.batch * (INT * places + LONG + INT) + INT * (load.batch + 1)
    return Traffic(
        floor,
        moved=floor + tables,
        reread=programs * (INT * places * load.block_size + LONG + 3 * INT) - tables,
        operations=programs * places * load.block_size * vectors * 4 * load.head_dim,
    )


def summarise_blocks(load: Workload) -> Traffic:
    """Count for one block of each row."""
    programs = load.batch * load.heads
    floor = programs * (load.block_size * load.vector_bytes + load.record_bytes)
    tables = 2 * LONG * load.batch
    operations = programs * 4 * load.block_size * load.head_dim
    return Traffic(floor, floor + tables, 2 * LONG * programs - tables, operations=operations)


OPS: tuple[Callable[[Workload], Traffic], ...] = (
    take_tokens, score_blocks, select_admissions, fetch_blocks, attend, summarise_blocks,
)  # fmt: skip


def table(load: Workload) -> str:
    """Return a Markdown table, in KiB."""
    lines = ["| op | floor | moved | ratio | over the link | read again | operations |", "|---" * 7 + "|"]
    for op in OPS:
        found = op(load)
        sizes = (found.floor, found.moved, found.link, found.reread)
        floor, moved, link, reread = (f"{size / 1024:,.1f}" for size in sizes)
        lines.append(
            f"| `{op.__name__}` | {floor} | {moved} | {found.ratio:.3f} | {link} | {reread} | {found.operations:,.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(QWEN3_8B))
