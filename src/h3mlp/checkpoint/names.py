"""Which layer of MiniMax-H3 a tensor belongs to, by its name, in every naming that is in use.

MiniMax's own ("native", also ComfyUI's) and that of diffusers, behind any of the prefixes that engines put in front.
The naming decides which half of FC1 comes first: nothing in the weights themselves does.
"""

import re
from typing import NamedTuple

from .. import contract

PREFIXES = ("model", "diffusion_model", "transformer", "net", "module")
"""Put in front by engines and wrappers, also several: "model.diffusion_model."."""

NATIVE, DIFFUSERS, MIXED = "native", "diffusers", "mixed"

GATE_ORDER_OF = {NATIVE: "gate_up", DIFFUSERS: "up_gate"}
"""MiniMax stores [gate; value], the SwiGLU of diffusers [value; gate]. No one writes a mix of the two namings, so that
its order is not known."""

FC1, FC2, NORM = "fc1", "fc2", "norm2"

_STACKS = {
    "blocks": (NATIVE, "blocks"),
    "token_refiner.blocks": (NATIVE, "token_refiner.blocks"),
    "transformer_blocks": (DIFFUSERS, "blocks"),
    "token_refiner.refiner_blocks": (DIFFUSERS, "token_refiner.blocks"),
}
_MODULES = {
    "mlp.fc1": (NATIVE, FC1),
    "mlp.fc2": (NATIVE, FC2),
    "ff.net.0.proj": (DIFFUSERS, FC1),
    "ff.net.2": (DIFFUSERS, FC2),
    "norm2": (None, NORM),  # the same in both
}


def _any_of(names) -> str:
    return "|".join(map(re.escape, names))


_BLOCK = rf"(?P<stack>{_any_of(_STACKS)})\.(?P<index>0|[1-9]\d{{0,5}})"
_PREFIXED = rf"(?P<prefix>(?:(?:{_any_of(PREFIXES)})\.)*)"
_TENSOR = re.compile(rf"{_PREFIXED}{_BLOCK}\.(?P<module>{_any_of(_MODULES)})\.(?P<tail>\w+)", re.ASCII)
_NAMED_BLOCK = re.compile(rf"{_PREFIXED}{_BLOCK}", re.ASCII)


class Layer(NamedTuple):
    """A layer by its place in the model, whatever its checkpoint calls it. Sorts in the order in which layers are
    written: the transformer blocks, then those of the token refiner."""

    stack: str
    index: int

    def __str__(self) -> str:
        return f"{self.stack}.{self.index}"


class Part(NamedTuple):
    """What a tensor is to its layer.

    Attributes:
        layer: the layer.
        module: FC1, FC2 or NORM.
        tail: the last part of the name: "weight", "weight_scale" and so on.
        naming: NATIVE, DIFFUSERS or MIXED.
        of_block: the naming of the block, NATIVE or DIFFUSERS.
        prefix: what stands in front, with its last dot.
    """

    layer: Layer
    module: str
    tail: str
    naming: str
    of_block: str
    prefix: str


def parse(name: str) -> Part | None:
    """What this tensor is, or None if it is none of FC1, FC2 and norm2."""
    match = _TENSOR.fullmatch(name)
    if match is None:
        return None
    of_block, stack = _STACKS[match["stack"]]
    of_module, module = _MODULES[match["module"]]
    naming = of_block if of_module in (None, of_block) else MIXED
    return Part(Layer(stack, int(match["index"])), module, match["tail"], naming, of_block, match["prefix"])


def parse_layer(layer: int | str) -> Layer | None:
    """The layer of a number (of the transformer blocks) or a block's name in either naming; None if it is neither."""
    if isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0:
        return Layer("blocks", layer)
    match = _NAMED_BLOCK.fullmatch(layer) if isinstance(layer, str) else None
    return match and Layer(_STACKS[match["stack"]][1], int(match["index"]))


def gate_order(naming: str, given: str | None, name: str, option: str = "--gate-order") -> str:
    """Which half comes first: what was given, else what the naming says. ``option`` is how a user gives it.

    Raises:
        ValueError: it cannot be known.
    """
    if given is not None:
        return given
    if naming not in GATE_ORDER_OF:
        raise ValueError(
            f"gate_order must be given for {name}, whose name is half MiniMax's and half diffusers': "
            f"{' or '.join(map(repr, contract.GATE_ORDER))} ({option}). Look into the code that runs this checkpoint: "
            "the half that goes through silu is the gate. Of a layer that is known in another checkpoint, `h3mlp "
            "verify` tells the two apart"
        )
    return GATE_ORDER_OF[naming]
