"""Predict the mma.sync GEMM's time on GPUs of sm_120 from its machine code. Needs no GPU, and is no measurement.

Counts what a warp issues for a stage of K and for the epilogue of a tile, and sets beside the time of the tensor cores
what issue slots, shared memory, L2 and DRAM would take alone. The longest counts; nothing is added for waiting.
"""

import re
from collections import Counter
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

from h3mlp import contract
from h3mlp.backends.cute import forms, jit, variants
from h3mlp.backends.cute.product import fc1
from h3mlp.tools.bench import work

HIDDEN, FFN = contract.HIDDEN, contract.FFN
QUARTERS = 4
"""Of an SM: each has its scheduler and its tensor core."""

SMEM_BYTES = 128
"""A cycle, of an SM."""

L2_BYTES = 8.7e12
"""A second: measured on an RTX PRO 6000 and published by Chips and Cheese, June 2025."""


class Card(NamedTuple):
    name: str
    multiprocessors: int
    form: str
    cycles: int  # that a QMMA of 16 x 8 x 32 keeps a tensor core busy
    published: tuple[int, ...]  # TFLOPS of the instruction alone
    dram_bytes: float = 1.79e12

    @property
    def flops_a_cycle(self) -> float:
        return self.multiprocessors * QUARTERS * 2 * 16 * 8 * 32 / self.cycles

    @property
    def clocks(self) -> list[float]:
        """Hz: what the published figures mean; without any, those of the first card."""
        published, card = (self.published, self) if self.published else (CARDS[0].published, CARDS[0])
        return [1e12 * tflops / card.flops_a_cycle for tflops in published]


CARDS = (
    Card("RTX 5090", 170, forms.UNIT_SCALE, 16, (918, 1005)),
    Card("RTX 5090", 170, forms.PLAIN, 32, (507,)),
    Card("RTX PRO 6000", 188, forms.UNIT_SCALE, 16, ()),
)

KINDS = {
    "tensor core": r"QMMA",
    "ldmatrix": r"LDSM",
    "TMA": r"UTMALDG",
    "barriers": r"SYNCS|ELECT|VOTEU",
    "branches": r"BRA|NOP",
    "integer, uniform": r"U[A-Z0-9]+|PLOP3",
    "integer, a thread": r".*",
}


def instructions(text: str) -> tuple[list[str], list[str]]:
    """Opcodes of the loop over K, and of the rest of the loop over tiles, that all warps but the first run."""
    opcodes, labels, jumps = [], {}, []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(opcodes)
        if found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)(.*?);", line):
            if found[1] == "BRA" and (target := re.search(r"\.L_x_\d+", found[2])):
                jumps.append((len(opcodes), target[0]))
            opcodes.append(found[1])
    back = [(labels[target], at + 1) for at, target in jumps if target in labels and labels[target] <= at]
    loops = sorted((end - begin, begin, end) for begin, end in back if "QMMA" in opcodes[begin:end])
    _, begin, end = loops[0]
    _, outer_begin, outer_end = next(loop for loop in loops if loop[1] < begin and loop[2] > end)
    return opcodes[begin:end], opcodes[outer_begin:begin] + opcodes[end:outer_end]


def by_kind(opcodes: list[str]) -> Counter:
    return Counter(next(kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)) for name in opcodes)


@click.command(help=__doc__)
@click.option("--rows", default=33472, show_default=True, help="Rows of x.")
def main(rows: int) -> None:
    counts, predictions = {}, []
    for card in CARDS:
        gpu = variants.KNOWN["sm_120a"]._replace(multiprocessors=card.multiprocessors)
        kernel = variants.gemm_sm120(gpu, fc1(HIDDEN, FFN), variants.LARGE_TILES["128x256"], card.form)
        loop, epilogue = instructions(jit.disassembly(kernel, gpu.arch))
        counts[card.form] = dict.fromkeys(KINDS, 0) | by_kind(loop)
        counts[card.form] |= {"all": len(loop), "a tile's epilogue": len(epilogue)}
        predictions.append(predict(card, kernel, loop, epilogue, rows))
    counted = table("Instructions of a warp", list(counts), list(counts.values()))
    model = table("Prediction", [f"{card.name}\n{card.form}" for card in CARDS], predictions)
    tile = kernel.tile
    Console().print(counted, "", model, f"\nM = {rows}; tile {tile.name}, K {tile.stage_k} a stage. Not measured.")


def table(title: str, headings: list[str], columns: list[dict]) -> Table:
    """A line for each key that the columns share."""
    shown = Table(title, show_edge=False, pad_edge=False)
    for heading in headings:
        shown.add_column(heading, justify="right")
    for name in columns[0]:
        shown.add_row(name, *(str(column[name]) for column in columns))
    return shown


def predict(card: Card, kernel, loop: list[str], epilogue: list[str], rows: int) -> dict[str, str]:
    tile, kinds = kernel.tile, by_kind(loop)
    warps = tile.threads // 32
    stage_bytes = (tile.tokens + tile.rows) * tile.stage_k
    per_quarter = warps // QUARTERS
    cycles = {
        "tensor cores": kinds["tensor core"] * per_quarter * card.cycles,
        "issue slots": len(loop) * per_quarter,
        "shared memory": (kinds["ldmatrix"] * 512 * warps + stage_bytes) / SMEM_BYTES,
        "L2": stage_bytes * card.multiprocessors * max(card.clocks) / L2_BYTES,
    }
    stages = HIDDEN // tile.stage_k
    token_tiles = -(-rows // tile.tokens)
    waves = -(-kernel.row_tiles * token_tiles // card.multiprocessors)
    groups = -(-token_tiles // kernel.group)
    moved = groups * 2 * FFN * HIDDEN + rows * (HIDDEN + 2 * FFN)
    hidden = waves * stages * max(cycles.values())
    exposed = hidden + waves * len(epilogue) * per_quarter
    times = sorted(1e3 * total / clock for total in (hidden, exposed) for clock in card.clocks)
    flops = work.gemm(rows, HIDDEN, FFN).flops
    found = {f"{name}, cycles": f"{value:,.0f}" for name, value in cycles.items()}
    return found | {
        "published TFLOPS": _range(card.published, ".0f") if card.published else "",
        "clock, GHz": _range([clock / 1e9 for clock in card.clocks], ".2f") + ("" if card.published else ", assumed"),
        "waves of tiles": str(waves),
        "DRAM alone, ms": f"{1e3 * moved / card.dram_bytes:.2f}",
        "predicted ms": _range(times, ".1f"),
        "predicted TFLOPS": _range([flops / ms / 1e9 for ms in reversed(times)], ".0f"),
    }


def _range(values, form: str) -> str:
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


if __name__ == "__main__":
    main()
