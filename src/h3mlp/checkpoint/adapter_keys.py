"""What a key of an adapter is for, in every naming: a pair on FC1, another part of MiniMax-H3, or none of it.

Adapters of several layers are the rule. Those on FC1 are merged, and what changes FC1 or norm2 in another way is
refused, since the prepared layer holds both. What is for other parts of the model is the engine's. A key of another
model is refused: the adapter would be ignored without a word.
"""

import re
from typing import NamedTuple

from .names import FC1, NORM, PREFIXES, parse

DOWN, UP, ALPHA = "down", "up", "alpha"

_BLOCK = r"(?:token_refiner\.)?blocks\.\d+|(?:transformer_blocks|token_refiner\.refiner_blocks)\.\d+"
_LINEAR = r"mlp\.fc[12]|ff\.net\.(?:0\.proj|2)"
_INSIDE = rf"(?:{_LINEAR}|norm2|(?:attn|adaln_proj|norm1)(?:\.\w+)*)"
"""The parts of a block. Nothing else within mlp and ff: it could be FC1 in a form that is not known here."""
_OUTSIDE = (
    r"(?:(?:video_patch|audio_patch|condition)_proj|(?:audio_)?proj_(?:in|out)|time_embedder|context_embedder|norm_out"
    r"|final_layer|adaln_t_table|token_refiner\.\w*norm)(?:\.\w+)*"
)
_MODULE = rf"(?P<module>(?:{_BLOCK})\.{_INSIDE}|{_OUTSIDE})"

_DOWN = r"lora_A|lora_down|lora\.down|lora_linear_layer\.down"
_UP = r"lora_B|lora_up|lora\.up|lora_linear_layer\.up"
_TAILS = (
    rf"(?:(?P<down>{_DOWN})|(?P<up>{_UP}))(?:\.(?!weight$|bias$)\w+)?(?:\.weight)?",
    r"(?P<alpha>(?:lora_)?alpha)",
    r"(?P<other>(?:lora|lokr|hada|b?oft|dora|diff|set_weight|modules_to_save)[\w.]*|\w+)",
)
_KEYS = tuple(re.compile(rf"{_MODULE}\.{tail}", re.ASCII) for tail in _TAILS)

_PREFIX = re.compile(rf"(?:(?:base_model|dit|unet|transformer_ref|{'|'.join(PREFIXES)})\.)*", re.ASCII)
_FLAT_PREFIX = re.compile(r"(?:lora_unet|lora_transformer|lycoris)_", re.ASCII)
"""Kohya's trainers turn every dot of a module's name into an underscore."""
_DOTTED = (
    (re.compile(r"^token_refiner_"), "token_refiner."),
    (re.compile(r"^((?:token_refiner\.)?(?:transformer_|refiner_)?blocks)_(\d+)_"), r"\1.\2."),
    (re.compile(r"(?<=\.)(mlp|attn|adaln_proj)_"), r"\1."),
    (re.compile(r"(?<=\.)ff_net_0_proj$"), "ff.net.0.proj"),
    (re.compile(r"(?<=\.)ff_net_2$"), "ff.net.2"),
    (re.compile(r"^(final_layer|time_embedder|norm_out)_"), r"\1."),
)

_REASONS = (
    (r"diff_b|(?:.*\.)?bias", "adds a bias, of which the operator has none"),
    (r"diff", "adds to the whole weight, which is no LoRA"),
    (r"set_weight|modules_to_save\..*|weight", "puts another weight in its place"),
    (r"dora_scale|lora_magnitude_vector.*", "is DoRA, which also scales the merged weight"),
    (r"lokr_.*|hada_.*|oft_.*|boft_.*", "is no LoRA but LoKr, LoHa or OFT"),
)


class Key(NamedTuple):
    """What a key is for.

    Attributes:
        module: the name without prefixes and with its dots.
        role: DOWN, UP or ALPHA of FC1; None for other modules.
    """

    module: str
    role: str | None


def parse_key(key: str, file: object) -> Key:
    """
    Args:
        key: the tensor's name.
        file: where it is, for messages.

    Raises:
        ValueError: it is not of MiniMax-H3, or changes FC1 or norm2 in a way that cannot be merged.
    """
    dotted = _dotted(key)
    match = next(filter(None, (pattern.fullmatch(dotted) for pattern in _KEYS)), None)
    if match is None:
        raise ValueError(f"{key} of {file} must belong to a linear layer of MiniMax-H3; it matches none")
    module = match["module"]
    part = parse(f"{module}.weight")
    if part is None or part.module not in (FC1, NORM):
        return Key(module, None)
    found = match.groupdict()
    role = next((role for role in (DOWN, UP, ALPHA) if found.get(role)), None)
    if part.module == NORM or role is None:
        of = "norm2, whose weight the prepared layer holds" if part.module == NORM else "FC1"
        tail = found.get("other", "")
        reason = next((text for pattern, text in _REASONS if re.fullmatch(pattern, tail)), "is of an unknown kind")
        raise ValueError(
            f"{key} of {file} must be a pair of LoRA matrices on FC1 or an alpha: it is on {of}, and "
            f"{reason}. Only LoRA on FC1 can be merged here; bake the rest into the checkpoint first"
        )
    return Key(module, role)


def _dotted(key: str) -> str:
    """Without prefixes, and with the dots that kohya's trainers took out."""
    flat = _FLAT_PREFIX.match(key)
    if flat is None:
        return key[_PREFIX.match(key).end() :]
    name, dot, tail = key[flat.end() :].partition(".")
    for pattern, dotted in _DOTTED:
        name = pattern.sub(dotted, name)
    return f"{name}{dot}{tail}"
