"""The operator as a torch.nn module, which holds the prepared weight."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from . import check, contract
from .checkpoint.prepared import load_layer
from .operators.fc1_swiglu import fc1_swiglu_fp8
from .weights import PackedFC1


class FC1SwiGLU(nn.Module):
    """RMSNorm + indexed AdaLN + FC1 + SwiGLU of a transformer block, in FP8: [..., H] in, [..., F] out.

    Made by ``from_checkpoint``, ``from_linear`` or ``from_packed``; or with dimensions alone, also on the meta device,
    to be loaded from a state_dict. Until then its scales are NaN and so is its output.

    Its weights are parameters without gradients, so that whatever offloads or splits a model moves them as it moves a
    linear layer's. They keep their dtypes: ``.to(torch.float16)``, ``.half()`` and the like move them at most, since
    codes cast to another type would be numbers without their scales. The row order travels in the state_dict and is
    checked when one is loaded. Codes and scales that the operator makes of x live in memory of torch's caching
    allocator for the time of the call only: on a GPU all layers on a stream reuse the same, streams and CUDA graphs
    have their own.

    Attributes:
        weight: E4M3 [2F, H], packed row order.
        weight_scale: FP32 [2F], the same order.
        norm_weight: BF16 [H].
        eps, accumulate, modulation: as in ``fc1_swiglu_fp8``.
        clamp_index: read row 0 of the tables where the index is negative, as engines do that pad with -1; by the
            contract such rows are 0.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter
    norm_weight: nn.Parameter

    def __init__(
        self,
        hidden: int = contract.HIDDEN,
        ffn: int = contract.FFN,
        *,
        eps: float = contract.EPS,
        accumulate: str = "fp32",
        modulation: str = "fused",
        clamp_index: bool = False,
        device: torch.device | str | None = None,
    ):
        """
        Raises:
            ValueError: an argument of wrong type or value.
        """
        super().__init__()
        check.dimensions(hidden, ffn)
        check.options(eps, accumulate, modulation)
        self.eps, self.accumulate, self.modulation, self.clamp_index = eps, accumulate, modulation, clamp_index
        self.weight = _frozen(torch.empty((2 * ffn, hidden), dtype=contract.QUANTIZED, device=device))
        self.weight_scale = _frozen(torch.full((2 * ffn,), torch.nan, dtype=contract.SCALE, device=device))
        self.norm_weight = _frozen(torch.full((hidden,), torch.nan, dtype=contract.ACTIVATION, device=device))

    @classmethod
    def from_packed(cls, packed: PackedFC1, norm_weight: torch.Tensor, **options) -> "FC1SwiGLU":
        """A module that holds the memory of this prepared weight, not a copy, and of its norm weight.

        Args:
            packed: the weight, of any size.
            norm_weight: BF16 [H] on the same device.
            **options: those of the constructor after the dimensions.

        Raises:
            ValueError: an argument of wrong type, dtype, shape, device or value.
        """
        if not isinstance(packed, PackedFC1):
            check.refuse("packed", "an h3mlp.PackedFC1", packed)
        rows, hidden = packed.weight.shape
        check.norm_weight("norm_weight", norm_weight, hidden, packed.weight.device)
        module = cls(hidden, rows // 2, device="meta", **options)
        module.weight, module.weight_scale = map(_frozen, packed)
        module.norm_weight = _frozen(norm_weight)
        return module

    @classmethod
    def from_checkpoint(
        cls,
        path: Path | str,
        layer: int | str,
        *,
        device: torch.device | str = "cpu",
        copy: bool = False,
        **options,
    ) -> "FC1SwiGLU":
        """A layer of a checkpoint that ``h3mlp convert`` made, with its norm weight.

        On the CPU it holds the pages of the file, unless ``copy`` is given: see ``h3mlp.load_fc1``.

        Args:
            path: the file, its index.json or its folder, or the name of a snapshot in Hugging Face's cache.
            layer: the number of a transformer block, or a block's name, as in ``h3mlp.load_fc1``.
            device: where it shall be.
            copy: read the file instead of mapping it.
            **options: as in ``from_packed``.

        Raises:
            ValueError: not a prepared checkpoint, or a damaged one; no such layer; an option of wrong type or value.
            OSError: a file cannot be read.
        """
        return cls.from_packed(*load_layer(path, layer, device, copy=copy), **options)

    @classmethod
    def from_linear(
        cls,
        fc1: nn.Linear | torch.Tensor,
        norm: nn.RMSNorm | torch.Tensor,
        *,
        gate_order: str,
        eps: float | None = None,
        **options,
    ) -> "FC1SwiGLU":
        """Quantize and pack the weight of a BF16 layer, on its device. The layer is left as it is.

        Args:
            fc1: a plain linear layer without bias, BF16 [2F, H], or its weight.
            norm: the RMSNorm before it, or its weight, BF16 [H].
            gate_order: "gate_up" where the F gate rows come first (MiniMax's own checkpoint), "up_gate" where the up
                rows do (diffusers). No default: the wrong one gives noise and no error.
            eps: of the norm; its own unless given, 1e-5 where ``norm`` is a weight.
            **options: as in ``from_packed``.

        Raises:
            ValueError: an argument of wrong type, dtype, shape or value; a layer with a bias, with LoRA adapters,
                already quantized, with hooks, or on the meta device.
        """
        weight = linear_weight("fc1", fc1) if isinstance(fc1, nn.Module) else fc1
        norm_weight, norm_eps = rms_norm("norm", norm) if isinstance(norm, nn.Module) else (norm, contract.EPS)
        check.fc1_weight(weight)
        check.norm_weight("norm", norm_weight, weight.shape[1], weight.device)
        packed = PackedFC1.from_bf16(weight.detach(), gate_order=gate_order)
        eps = norm_eps if eps is None else eps
        return cls.from_packed(packed, norm_weight.detach().clone(), eps=eps, **options)

    @property
    def hidden(self) -> int:
        return self.weight.shape[1]

    @property
    def ffn(self) -> int:
        return self.weight.shape[0] // 2

    @property
    def packed(self) -> PackedFC1:
        """The weight as the operator takes it; shares the module's memory."""
        return PackedFC1(self.weight, self.weight_scale)

    def forward(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            x: BF16 [..., H].
            scale: BF16 [R, H] AdaLN table; a column chunk of a wider projection will do. FP32, as pruned checkpoints
                have it, is rounded to BF16 first, since the operator's contract has BF16: R rows of it, not M.
            shift: BF16 [R, H], likewise.
            index: int32 or int64, the table row of each row of x, of any shape that torch broadcasts to x's leading
                one: [B, S], [S], [B, 1] or [1] for [B, S, H]. Without scale, shift and index there is no AdaLN.

        x and index may be views of any strides; where the operator needs others, a copy is made.

        Returns:
            BF16 [..., F].

        Raises:
            ValueError, RuntimeError, NotImplementedError: as ``fc1_swiglu_fp8``.
        """
        check.tensor("x", x)
        if not x.dim():
            check.refuse("x", f"bfloat16 [..., {self.hidden}]", x)
        leading = x.shape[:-1]
        if index is not None:
            check.tensor("index", index)
            if not _broadcasts(index.shape, leading):
                check.refuse("index", f"{list(leading)} like x, or of a shape that broadcasts to that", index)
            if self.clamp_index:
                index = index.clamp(min=0)
            index = index.expand(leading).reshape(-1).contiguous()
        x = x.reshape(-1, x.shape[-1])
        y = fc1_swiglu_fp8(
            x if x.stride(1) == 1 else x.contiguous(),
            self.norm_weight,
            _as_table(scale),
            _as_table(shift),
            index,
            self.weight,
            self.weight_scale,
            eps=self.eps,
            accumulate=self.accumulate,
            modulation=self.modulation,
        )
        return y.view(*leading, self.ffn)

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, ffn={self.ffn}, modulation={self.modulation!r}, accumulate={self.accumulate!r}"

    def get_extra_state(self) -> torch.Tensor:
        """The row order, as a tensor: safetensors and offloading take nothing else in a state_dict."""
        return torch.tensor(list(contract.PACKED.encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        if fault := _row_order_fault("_extra_state", state):
            raise ValueError(fault)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors):
        """Refuse, before anything is copied, what would leave a weight with the rows or scales of another."""
        faults = list(self._faults_of(state_dict, prefix))
        errors += faults
        if not faults:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors
            )

    def _faults_of(self, state_dict: Mapping[str, object], prefix: str) -> Iterator[str]:
        mine = dict(self.named_parameters())
        given = {name: state_dict[prefix + name] for name in mine if prefix + name in state_dict}
        if "weight" in given:
            order = f"{prefix}_extra_state"
            if order not in state_dict:
                yield (
                    f"{prefix}weight comes without {order}, which tells its row order: if it is packed, make the "
                    "module with FC1SwiGLU.from_packed; if it is a BF16 weight, with FC1SwiGLU.from_linear"
                )
            elif fault := _row_order_fault(order, state_dict[order]):
                yield fault
        for one, other in (("weight", "weight_scale"), ("weight_scale", "weight")):
            if one in given and other not in given:
                yield f"{prefix}{one} comes without {prefix}{other}: codes and scales belong together"
        for name, value in given.items():
            want = mine[name]
            if not isinstance(value, torch.Tensor):
                yield f"{prefix}{name} must be a tensor; it is {check.describe(value)}"
            elif value.dtype != want.dtype:
                yield f"{prefix}{name} must be {want.dtype}; it is {value.dtype}"
            elif value.shape != want.shape:
                yield f"size mismatch for {prefix}{name}: it must be {list(want.shape)}; it is {list(value.shape)}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "FC1SwiGLU":
        """What moves tensors also casts those of floating point, E4M3 among them: it is shown integers."""

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            integers = tensor.view(_INTEGER_OF_BYTES[tensor.element_size()])
            moved = fn(integers)
            if moved is integers:
                return tensor
            if moved.dtype != integers.dtype:  # .type(), which casts integers too
                moved = integers.to(moved.device)
            return moved.view(tensor.dtype)

        return super()._apply(keep_dtype, recurse)


def _frozen(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach(), requires_grad=False)


def _as_table(value: torch.Tensor | None) -> torch.Tensor | None:
    fp32 = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.to(contract.ACTIVATION) if fp32 else value


def _broadcasts(shape: torch.Size, leading: torch.Size) -> bool:
    """Whether ``expand`` takes one to the other."""
    last = leading[len(leading) - len(shape) :]
    return len(shape) <= len(leading) and all(size in (1, want) for size, want in zip(shape, last, strict=True))


def _row_order_fault(name: str, state: object) -> str | None:
    """What is wrong with a row order from a state_dict."""
    plain = isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.dim() == 1 and not state.is_meta
    if not plain:
        return f"{name} must be the name of a row order, uint8 [N]; it is {check.describe(state)}"
    order = bytes(state.tolist()).decode(errors="replace")
    return None if order == contract.PACKED else f"{name} must say row order {contract.PACKED!r}; it says {order!r}"


_INTEGER_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def linear_weight(name: str, module: nn.Module) -> torch.Tensor:
    """The weight of a layer that is nothing but BF16 x @ weight.T.

    Raises:
        ValueError: it is anything else; says what, under this name.
    """
    if type(module) is not nn.Linear:
        wrapped = hasattr(module, "base_layer") or hasattr(module, "lora_A")
        advice = "merge and unload its LoRA adapters first" if wrapped else "quantized layers and subclasses are not"
        raise ValueError(f"{name} must be a plain torch.nn.Linear ({advice}); it is a {check.class_of(module)}")
    if module.bias is not None:
        check.refuse(f"{name}.bias", "None", module.bias)
    unhooked(name, module)
    weight = module.weight
    if type(weight) not in (torch.Tensor, nn.Parameter):
        raise ValueError(f"{name}.weight must be a plain tensor, not quantized; it is a {check.class_of(weight)}")
    _loaded_bf16(f"{name}.weight", weight)
    return weight


def rms_norm(name: str, module: nn.Module) -> tuple[torch.Tensor, float | None]:
    """Weight and eps of a plain RMSNorm. Which eps torch puts for None depends on its version.

    Raises:
        ValueError: it is anything else, or its weight is not there in BF16.
    """
    plain_rms_norm(name, module)
    _loaded_bf16(f"{name}.weight", module.weight)
    return module.weight, module.eps


def plain_rms_norm(name: str, module: nn.Module) -> None:
    """
    Raises:
        ValueError: it is anything but an RMSNorm over the last dimension with a weight, loaded or not.
    """
    if type(module) is not nn.RMSNorm or module.weight is None or len(module.normalized_shape) != 1:
        raise ValueError(f"{name} must be a torch.nn.RMSNorm over the last dimension, with a weight; it is {module}")
    unhooked(name, module)


def unhooked(name: str, module: nn.Module) -> None:
    """Nothing but the module's own forward runs when it is called.

    Raises:
        ValueError: it has hooks, or another forward was put in its place.
    """
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    if hooked or module._compiled_call_impl is not None:
        raise ValueError(
            f"{name} must have no hooks and not be compiled (as by accelerate's or diffusers' offloading, or "
            "torch.compile): do that afterwards"
        )


def _loaded_bf16(name: str, weight: torch.Tensor) -> None:
    if weight.dtype != contract.ACTIVATION:
        check.refuse(name, "bfloat16", weight)
    if weight.is_meta:
        check.refuse(name, "loaded", weight)
