"""MiniMax-H3 of diffusers: norm2, modulation and FC1 + SwiGLU of its blocks replaced by the operator, in place.

``apply(transformer)`` is all that a user needs, or ``load(folder)`` of what ``h3mlp convert --all`` wrote, which never
has the BF16 weights of FC1 in memory. What ``apply`` does to a block: ``ff.net[0]`` becomes an ``FC1SwiGLU``, which
holds the weight of ``norm2`` too; ``norm2`` becomes the identity; and a block with AdaLN gets a forward that hands the
AdaLN tables to ``ff.net[0]`` instead of modulating. The class of such a block is then one of the same name from here.

All that rests on what four classes of diffusers compute (``KNOWN``), so that any other code there is refused.
"""

import hashlib
import inspect
import io
import json
import textwrap
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from .. import __version__, check
from ..checkpoint import names
from ..checkpoint.prepared import Prepared, open_prepared
from ..module import FC1SwiGLU, linear_weight, plain_rms_norm, rms_norm, unhooked

try:
    from diffusers.models.activations import SwiGLU
    from diffusers.models.attention import FeedForward
    from diffusers.models.transformers import transformer_minimax_h3 as original
except ImportError as missing:
    raise ImportError(
        f"h3mlp.integrations.diffusers needs a diffusers that has MiniMax-H3, 0.42 or newer ({missing}): "
        "pip install 'h3mlp[diffusers]'"
    ) from missing

GATE_ORDER = "up_gate"
"""Of ``SwiGLU``, which has the value before the gate."""

KNOWN = {
    original.MiniMaxH3TransformerBlock: "227feb66bb1014dc",
    original.MiniMaxH3TokenRefinerBlock: "96dd0cc6cf650c04",
    FeedForward: "e91a80c7d08f883d",
    SwiGLU: "28e86ce79a5ce61a",
}
"""A hash of each forward in diffusers 0.42.1."""

_KEPT = "_h3mlp_kept"


class MiniMaxH3TransformerBlock(original.MiniMaxH3TransformerBlock):
    """The block with ``FC1SwiGLU`` in ``ff.net[0]``. Hooks on ``norm2`` and ``ff`` themselves do not run."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        temb: torch.Tensor,
        adaln_indices: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, S, H] to [B, S, H]; as the class it stands for."""
        # In FP32 where the checkpoint has it so, as pruned ones do: what is modulated is BF16, and so are the tables.
        tables = (table.to(hidden_states.dtype) for table in self.adaln_proj(temb))
        *of_attention, shift, scale, gate = tables
        hidden_states = self.attend(hidden_states, *of_attention, adaln_indices, rotary_emb, attention_mask)
        return self.feed_forward(hidden_states, shift, scale, gate, adaln_indices)

    def attend(self, x, shift, scale, gate, index, rotary_emb, attention_mask):
        """The half that stays as it was."""
        shift, scale, gate = (table.index_select(0, index) for table in (shift, scale, gate))
        return x + gate * self.attn(self.norm1(x) * (1.0 + scale) + shift, rotary_emb, attention_mask)

    def feed_forward(self, x, shift, scale, gate, index):
        """The half with the operator."""
        fc1, *rest = self.ff.net
        y = fc1(x, scale, shift, index)
        for module in rest:
            y = module(y)
        return x + gate.index_select(0, index) * y


class MiniMaxH3Transformer3DModel(original.MiniMaxH3Transformer3DModel):
    """The model of which some blocks were replaced."""

    def save_pretrained(self, *_args, **_kwargs) -> None:
        """Refused: ``from_pretrained`` would find no FC1 weights in the files and make up random ones."""
        raise RuntimeError(
            "save_pretrained cannot save a transformer whose FC1 weights h3mlp holds in FP8: from_pretrained would not "
            "find them. Save it before h3mlp.integrations.diffusers.apply, or after restore(transformer); "
            "`h3mlp convert --all` of what was saved gives a folder for h3mlp.integrations.diffusers.load"
        )

    def load_lora_adapter(self, pretrained_model_name_or_path_or_dict, *args, **kwargs):
        """As diffusers', but an adapter of a layer that is not there any more is refused, not left out."""
        keys = pretrained_model_name_or_path_or_dict
        for key in keys if isinstance(keys, dict) else ():
            block = next((name for name in _applied(self) if f"{name}.ff.net.0.proj." in key), None)
            if block is not None:
                raise ValueError(
                    f"the adapter must not touch {block}.ff.net.0.proj, which h3mlp holds in FP8; it has {key!r}. "
                    "Load and fuse it before h3mlp.integrations.diffusers.apply"
                )
        return super().load_lora_adapter(pretrained_model_name_or_path_or_dict, *args, **kwargs)


_REPLACEMENT = {
    original.MiniMaxH3TransformerBlock: MiniMaxH3TransformerBlock,
    original.MiniMaxH3TokenRefinerBlock: original.MiniMaxH3TokenRefinerBlock,  # without AdaLN its own forward will do
}
_ORIGINAL = {replacement: cls for cls, replacement in _REPLACEMENT.items()}


@dataclass(frozen=True)
class Report:
    """What ``apply`` did.

    Attributes:
        blocks: the names of the replaced blocks.
        bytes_before: of their norm2 and FC1 weights in BF16.
        bytes_after: of the prepared weights, and of the BF16 weights where they were kept.
        cast_tables: those of the blocks whose AdaLN tables are FP32, and cast to BF16.
    """

    blocks: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    cast_tables: tuple[str, ...] = ()

    @property
    def bytes_saved(self) -> int:
        return self.bytes_before - self.bytes_after

    def __str__(self) -> str:
        before, after, saved = (f"{n / 1e9:,.3f}" for n in (self.bytes_before, self.bytes_after, self.bytes_saved))
        cast = f"; FP32 AdaLN tables of {len(self.cast_tables)} are cast to BF16" if self.cast_tables else ""
        return f"{len(self.blocks)} blocks: FC1 weights of {before} GB now take {after} GB, {saved} GB saved{cast}"


@torch.no_grad()
def apply(
    transformer: original.MiniMaxH3Transformer3DModel,
    *,
    checkpoint: Path | str | None = None,
    copy: bool = False,
    blocks: Iterable[int | str] | None = None,
    modulation: str = "fused",
    accumulate: str = "fp32",
    keep_weights: bool = False,
) -> Report:
    """Replace norm2, modulation and FC1 + SwiGLU of a transformer's blocks by the FP8 operator, in place.

    Each weight is quantized where it is, on the CPU or a GPU, and freed before the next: beyond the model that takes
    0.2 GB at its real size. Do it after loading the model and its LoRA adapters, and before offloading and
    torch.compile are set up. Either everything is replaced or, on an error, nothing. For inference only.

    Args:
        transformer: in BF16, with plain weights. LoRA on other layers than FC1 is kept.
        checkpoint: what ``h3mlp convert`` made, to take norm2 and FC1 from. The model's own are not read: they may be
            of any kind, and on the meta device. On the CPU the weights lie in the mapped file.
        copy: read the checkpoint instead of mapping it, as in ``h3mlp.load_fc1``.
        blocks: which, by name ("transformer_blocks.3", "token_refiner.refiner_blocks.0") or, of transformer_blocks, by
            number. All, those of the token refiner included, unless given.
        modulation: "fused", or "eager" for the roundings of diffusers, as in ``h3mlp.fc1_swiglu_fp8``.
        accumulate: as there.
        keep_weights: keep the BF16 weights for ``restore``, on the device where they are; nothing is saved then.

    Raises:
        ValueError: the transformer is of another class, for training, compiled or offloaded already; a block is not
            there, is replaced already, or has an FC1 that is not a plain BF16 linear layer; the checkpoint is not
            prepared, or has no such block or another size. The message has the block's name.
        NotImplementedError: a diffusers whose blocks compute something that this module does not know.
    """
    _check_diffusers()
    _check_transformer(transformer)
    check.modulation(modulation)
    check.accumulate(accumulate)
    chosen = _choose(transformer, blocks)
    prepared = None if checkpoint is None else open_prepared(checkpoint)
    for name, block in chosen.items():
        _check_block(name, block)
        if prepared is None:
            _check_weights(name, block)
        else:
            _check_prepared(name, block, prepared, keep_weights)
    before = after = 0
    options = {"modulation": modulation, "accumulate": accumulate}
    for name, block in chosen.items():
        norm, swiglu = block.norm2, block.ff.net[0]
        if prepared is None:
            fc1 = FC1SwiGLU.from_linear(swiglu.proj, norm, gate_order=GATE_ORDER, **options)
        else:
            device = _device_of(block)
            fc1 = FC1SwiGLU.from_checkpoint(prepared, name, device=device, copy=copy, eps=norm.eps, **options)
        old_bytes = 2 * (fc1.norm_weight.numel() + fc1.weight.numel())
        before += old_bytes
        after += sum(weight.nbytes for weight in fc1.parameters()) + (old_bytes if keep_weights else 0)
        if keep_weights:
            setattr(block, _KEPT, (norm, swiglu))  # in a tuple, torch does not see them: neither moved nor saved
        block.ff.net[0], block.norm2 = fc1, nn.Identity()
        block.__class__ = _REPLACEMENT[type(block)]
    transformer.__class__ = MiniMaxH3Transformer3DModel
    cast = tuple(name for name, block in chosen.items() if _tables_dtype(block) == torch.float32)
    return Report(tuple(chosen), before, after, cast)


@torch.no_grad()
def load(
    folder: Path | str, *, device: torch.device | str = "cpu", copy: bool = False, **options
) -> MiniMaxH3Transformer3DModel:
    """The transformer of a folder that ``h3mlp convert --all`` made of one of diffusers, with ``apply`` done.

    Precisions are those of ``from_pretrained(torch_dtype=torch.bfloat16)``: FP32 for the modules that diffusers keeps
    in it, and BF16 for the rest. On the CPU, tensors that are stored so lie in the mapped files.

    Args:
        folder: with config.json.
        device: where the model shall be.
        copy: read the files instead of mapping them, as in ``h3mlp.load_fc1``.
        **options: ``modulation`` and ``accumulate`` of ``apply``.

    Raises:
        ValueError: it is no such folder, or has not all tensors of the model, or others.
        NotImplementedError: as ``apply``.
        OSError: a file cannot be read.
    """
    from accelerate import init_empty_weights  # which nothing else here needs

    prepared = open_prepared(folder)
    config = prepared.container.files[0].with_name("config.json")
    origin = next(iter(prepared.description.layers.values()))
    if origin["naming"] != names.DIFFUSERS or not config.is_file():
        raise ValueError(
            f"folder must be what `h3mlp convert --all` made of a transformer's folder of diffusers, with config.json; "
            f"{folder} is of {origin['source']}" + ("" if config.is_file() else " and has none")
        )
    with init_empty_weights(include_buffers=False):
        model = original.MiniMaxH3Transformer3DModel.from_config(json.loads(config.read_text(encoding="utf-8")))
    model.eval().requires_grad_(False)
    apply(model, checkpoint=prepared, copy=copy, **options)
    prefix = names.parse(origin["source"]).prefix
    rest = {
        name.removeprefix(prefix): _in_its_precision(name, prepared.get(name, copy)).to(device)
        for name in prepared.others
        if not name.endswith(".norm2.weight")
    }
    missing, unexpected = model.load_state_dict(rest, strict=False, assign=True)
    missing = [name for name in missing if ".ff.net.0." not in name]
    if missing or unexpected:
        what = f"{unexpected[0]} is none of them" if unexpected else f"{missing[0]} is missing"
        raise ValueError(f"{folder} must have the tensors of {type(model).__name__}; {what}")
    return model.to(device)


def _in_its_precision(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As ``from_pretrained`` casts floating point."""
    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return tensor
    kept = any(module in name.split(".") for module in original.MiniMaxH3Transformer3DModel._keep_in_fp32_modules)
    return tensor.to(torch.float32 if kept else torch.bfloat16)


def restore(transformer: original.MiniMaxH3Transformer3DModel) -> tuple[str, ...]:
    """Undo ``apply(..., keep_weights=True)``: the same BF16 layers again, on the device where the block is now.

    Returns:
        The names of the blocks that were restored.

    Raises:
        ValueError: nothing was replaced, or weights were not kept. Nothing has been changed.
    """
    applied = _applied(transformer)
    lost = [name for name, block in applied.items() if not hasattr(block, _KEPT)]
    if lost or not applied:
        what = f"{lost[0]} has none (apply(..., keep_weights=True) keeps them)" if lost else "no block was replaced"
        raise ValueError(f"transformer must have kept the BF16 weights of its replaced blocks; {what}")
    for block in applied.values():
        norm, swiglu = getattr(block, _KEPT)
        device = block.ff.net[0].weight.device
        block.norm2, block.ff.net[0] = norm.to(device), swiglu.to(device)
        block.__class__ = _ORIGINAL.get(type(block), type(block))
        delattr(block, _KEPT)
    transformer.__class__ = original.MiniMaxH3Transformer3DModel
    return tuple(applied)


def _blocks_of(transformer: nn.Module) -> dict[str, nn.Module]:
    """All blocks by name, in the order in which they run."""
    stacks = {
        "token_refiner.refiner_blocks": transformer.token_refiner.refiner_blocks,
        "transformer_blocks": transformer.transformer_blocks,
    }
    return {f"{prefix}.{i}": block for prefix, stack in stacks.items() for i, block in enumerate(stack)}


def _applied(transformer: nn.Module) -> dict[str, nn.Module]:
    """The blocks that were replaced."""
    found = _blocks_of(transformer) if isinstance(transformer, original.MiniMaxH3Transformer3DModel) else {}
    return {name: block for name, block in found.items() if isinstance(block.ff.net[0], FC1SwiGLU)}


def _choose(transformer: nn.Module, wanted: Iterable[int | str] | None) -> dict[str, nn.Module]:
    found = _blocks_of(transformer)
    if wanted is None:
        return found
    if isinstance(wanted, (str, int)):
        check.refuse("blocks", "a sequence of names or numbers", wanted)
    count = len(transformer.transformer_blocks)
    names = []
    for block in wanted:
        number = isinstance(block, int) and not isinstance(block, bool)
        name = f"transformer_blocks.{block % count}" if number and -count <= block < count else block
        if name not in found:
            check.refuse(
                "blocks", f"names of {', '.join(list(found)[:1] + list(found)[-1:])} and such, or numbers", block
            )
        names.append(name)
    return {name: block for name, block in found.items() if name in names}


def _check_transformer(transformer: object) -> None:
    if type(transformer) not in (original.MiniMaxH3Transformer3DModel, MiniMaxH3Transformer3DModel):
        held = " (it has one in .transformer)" if hasattr(transformer, "transformer") else ""
        compiled = " (call apply before torch.compile)" if hasattr(transformer, "_orig_mod") else ""
        raise ValueError(
            "transformer must be a diffusers.MiniMaxH3Transformer3DModel; "
            f"it is a {check.class_of(transformer)}{held}{compiled}"
        )
    if transformer.gradient_checkpointing:
        raise ValueError(
            "transformer must not have gradient checkpointing enabled: the operator has no gradient. "
            "Call transformer.disable_gradient_checkpointing() for inference"
        )
    if transformer._compiled_call_impl is not None:
        raise ValueError("transformer must not be compiled yet: call apply before transformer.compile()")


def _check_block(name: str, block: nn.Module) -> None:
    swiglu = block.ff.net[0]
    if isinstance(swiglu, FC1SwiGLU):
        raise ValueError(f"{name} must not be replaced yet; it is")
    if type(block) not in _REPLACEMENT or type(block.ff) is not FeedForward or type(swiglu) is not SwiGLU:
        raise ValueError(f"{name} must be a plain block with a SwiGLU; it is {block}")
    if _tables_dtype(block) == torch.float16:
        raise ValueError(f"{name}.adaln_proj must be in bfloat16 or float32, it is in float16: cast it to BF16")
    unhooked(name, block)
    unhooked(f"{name}.ff", block.ff)
    unhooked(f"{name}.ff.net.0", swiglu)


def _check_weights(name: str, block: nn.Module) -> None:
    """What is quantized is what it seems to be."""
    weight = linear_weight(f"{name}.ff.net.0.proj", block.ff.net[0].proj)
    check.fc1_weight(weight)
    norm_weight, eps = rms_norm(f"{name}.norm2", block.norm2)
    check.norm_weight(f"{name}.norm2.weight", norm_weight, weight.shape[1], weight.device)
    check.eps(eps)


def _check_prepared(name: str, block: nn.Module, prepared: Prepared, keep_weights: bool) -> None:
    """The checkpoint has what this block wants, and nothing is lost with what the block has."""
    proj, norm = block.ff.net[0].proj, block.norm2
    if not isinstance(proj, nn.Linear) or proj.bias is not None:
        raise ValueError(
            f"{name}.ff.net.0.proj must be a torch.nn.Linear without bias; it is a {check.class_of(proj)} "
            "(LoRA adapters of FC1 are merged by `h3mlp convert --lora`)"
        )
    unhooked(f"{name}.ff.net.0.proj", proj)
    plain_rms_norm(f"{name}.norm2", norm)
    check.eps(norm.eps)
    if names.parse_layer(name) not in prepared.layers:
        raise ValueError(f"checkpoint must have {name}; {prepared.container.path} does not")
    size, description = (proj.out_features, proj.in_features), prepared.description
    if size != (2 * description.ffn, description.hidden):
        raise ValueError(
            f"checkpoint must have the size of {name}.ff.net.0.proj, {list(size)}; it has "
            f"{[2 * description.ffn, description.hidden]}"
        )
    if keep_weights and (proj.weight.is_meta or norm.weight.is_meta):
        raise ValueError(f"keep_weights must be False, since the weights of {name} are not loaded; it is True")


def _tables_dtype(block: nn.Module) -> torch.dtype | None:
    """The token refiner's blocks have none at all."""
    return next(block.adaln_proj.parameters()).dtype if hasattr(block, "adaln_proj") else None


def _device_of(block: nn.Module) -> torch.device:
    """Where the layer after FC1 is; the CPU while that is nowhere yet."""
    device = next(block.ff.net[-1].parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def _check_diffusers() -> None:
    for cls, known in KNOWN.items():
        if _hash_of(cls.forward) != known:
            raise NotImplementedError(
                f"{cls.__name__}.forward of the installed diffusers {metadata.version('diffusers')} is not that of "
                f"0.42.1, which h3mlp {__version__} knows, and might compute something else. Install that diffusers, "
                "or a newer h3mlp"
            )


def _hash_of(function) -> str:
    """Of the tokens, so that neither a comment nor the layout decides."""
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # no source is there, or it is no function of Python's
        return ""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    words = " ".join(token.string for token in tokens if token.type not in blank)
    return hashlib.sha256(words.encode()).hexdigest()[:16]
