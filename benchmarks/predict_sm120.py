"""Predict the time of the mma.sync GEMMs and of the whole MLP on GPUs of sm_120 from the machine code. Needs no GPU,
and measures nothing.

Counts what a warp issues for a stage of K and for the epilogue of a tile, and sets beside the time of the tensor cores
what issue slots, shared memory, L2 and DRAM would take alone. The longest counts; nothing is added for waiting, and no
power limit is assumed. The whole MLP is both GEMMs, block by block, and the bytes of stage 1 and of quantizing y.
"""

import re
from collections import Counter
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

from h3mlp import contract
from h3mlp.backends.cute import blocks, choice, forms, jit, variants
from h3mlp.backends.cute.product import GATED_RESIDUAL, fc1, fc2

HIDDEN, FFN = contract.HIDDEN, contract.FFN
PUBLISHED_ROWS = 33472
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
    mlp_ms: float | None = None  # of the specified operator, published, at PUBLISHED_ROWS
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
    Card("RTX 5090", 170, forms.UNIT_SCALE, 16, (918, 1005), 24.7),
    Card("RTX 5090", 170, forms.PLAIN, 32, (507,)),
    Card("RTX PRO 6000", 188, forms.UNIT_SCALE, 16, (), 21.3),
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
@click.option("--rows", default=PUBLISHED_ROWS, show_default=True, help="Rows of x.")
def main(rows: int) -> None:
    counts, predictions = {}, {"FC1": [], "FC2": [], "Whole MLP": []}
    for card in CARDS:
        gpu = variants.KNOWN["sm_120a"]._replace(multiprocessors=card.multiprocessors)
        chosen = choice.Choice(card.form, "128x256")
        whole = blocks.sizes(gpu, HIDDEN, FFN, rows, chosen)
        times = []
        for name, product in (("FC1", fc1(HIDDEN, FFN)), ("FC2", fc2(HIDDEN, FFN))):
            kernel = variants.gemm_sm120(gpu, product, variants.LARGE_TILES[chosen.tile], card.form)
            loop, epilogue = instructions(jit.disassembly(kernel, gpu.arch))
            counted = dict.fromkeys(KINDS, 0) | by_kind(loop)
            counts[f"{name}\n{card.form}"] = counted | {"all": len(loop), "a tile's epilogue": len(epilogue)}
            predictions[name].append(predict(card, kernel, loop, epilogue, rows))
            times.append(milliseconds(card, kernel, loop, epilogue, whole))
        predictions["Whole MLP"].append(predict_mlp(card, rows, len(whole), times))
    headings = [f"{card.name}\n{card.form}" for card in CARDS]
    shown = [table("Instructions of a warp", list(counts), list(counts.values()))]
    shown += [table(f"Prediction, {name}", headings, columns) for name, columns in predictions.items()]
    tile = kernel.tile
    for part in shown:
        Console().print(part, "")
    Console().print(f"M = {rows}; tile {tile.name}, K {tile.stage_k} a stage. Not measured.")


def table(title: str, headings: list[str], columns: list[dict]) -> Table:
    """A line for each key that the columns share."""
    shown = Table(title, show_edge=False, pad_edge=False)
    for heading in headings:
        shown.add_column(heading, justify="right")
    for name in columns[0]:
        shown.add_row(name, *(str(column[name]) for column in columns))
    return shown


def cycles_of_a_stage(card: Card, tile, loop: list[str]) -> dict[str, float]:
    kinds, warps = by_kind(loop), tile.threads // 32
    stage_bytes = (tile.tokens + tile.rows) * tile.stage_k
    return {
        "tensor cores": kinds["tensor core"] * warps // QUARTERS * card.cycles,
        "issue slots": len(loop) * warps // QUARTERS,
        "shared memory": (kinds["ldmatrix"] * 512 * warps + stage_bytes) / SMEM_BYTES,
        "L2": stage_bytes * card.multiprocessors * max(card.clocks) / L2_BYTES,
    }


def waves_of(card: Card, kernel, rows: int) -> int:
    return -(-kernel.row_tiles * -(-rows // kernel.tile.tokens) // card.multiprocessors)


def milliseconds(card: Card, kernel, loop: list[str], epilogue: list[str], whole: list[int]) -> list[float]:
    """Least and most for blocks of so many rows: with each tile's epilogue behind another's products, and without; at
    the clocks that the published figures mean."""
    tile, stages = kernel.tile, kernel.product.k // kernel.tile.stage_k
    waves = sum(waves_of(card, kernel, rows) for rows in whole)
    hidden = waves * stages * max(cycles_of_a_stage(card, tile, loop).values())
    exposed = hidden + waves * len(epilogue) * tile.threads // 32 // QUARTERS
    times = sorted(1e3 * total / clock for total in (hidden, exposed) for clock in card.clocks)
    return [times[0], times[-1]]


def predict(card: Card, kernel, loop: list[str], epilogue: list[str], rows: int) -> dict[str, str]:
    product = kernel.product
    groups = -(-rows // (kernel.tile.tokens * kernel.group))
    written = product.columns * (4 if product.end == GATED_RESIDUAL else 2)  # with the residual read
    moved = groups * product.n * product.k + rows * (product.k + written)
    times = milliseconds(card, kernel, loop, epilogue, [rows])
    cycles = cycles_of_a_stage(card, kernel.tile, loop)
    found = {f"{name}, cycles": f"{value:,.0f}" for name, value in cycles.items()}
    return found | {
        "published TFLOPS": _range(card.published, ".0f") if card.published else "",
        "clock, GHz": _range([clock / 1e9 for clock in card.clocks], ".2f") + ("" if card.published else ", assumed"),
        "waves of tiles": str(waves_of(card, kernel, rows)),
        "DRAM alone, ms": f"{1e3 * moved / card.dram_bytes:.2f}",
        "predicted ms": _range(times, ".1f"),
        "predicted TFLOPS": _rates(2 * rows * product.n * product.k, times),
    }


def predict_mlp(card: Card, rows: int, count: int, gemms: list[list[float]]) -> dict[str, str]:
    stage1, quantization = (1e3 * 3 * rows * columns / card.dram_bytes for columns in (HIDDEN, FFN))
    both = [sum(parts) for parts in zip(*gemms, strict=True)]
    times = [ms + stage1 + quantization for ms in both]
    flops = 6 * rows * HIDDEN * FFN
    published = card.mlp_ms if rows == PUBLISHED_ROWS else None
    return {
        "blocks": str(count),
        "both GEMMs, ms": _range(both, ".1f"),
        "stage 1, ms": f"{stage1:.2f}",
        "quantizing y, ms": f"{quantization:.2f}",
        "predicted ms": _range(times, ".1f"),
        "predicted TFLOPS": _rates(flops, times),
        "published for the specified operator, ms": f"{published}" if published else "",
        "its TFLOPS": f"{flops / published / 1e9:.0f}" if published else "",
    }


def _rates(flops: float, times: list[float]) -> str:
    return _range([flops / ms / 1e9 for ms in reversed(times)], ".0f")


def _range(values, form: str) -> str:
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


if __name__ == "__main__":
    main()
