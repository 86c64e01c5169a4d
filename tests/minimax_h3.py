"""A small MiniMax-H3 transformer of diffusers with random weights, in the precisions of its checkpoint."""

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import nn

from h3mlp import FC1SwiGLU

TEXT, VIDEO, AUDIO = 7, 24, 5
FP32 = ("proj_in", "audio_proj_in", "time_embedder", "rope", "proj_out", "audio_proj_out")


BLOCKS = (
    "token_refiner.refiner_blocks.0",
    "token_refiner.refiner_blocks.1",
    "transformer_blocks.0",
    "transformer_blocks.1",
)


def transformer(seed: int = 0) -> MiniMaxH3Transformer3DModel:
    """Two blocks and two of the token refiner, hidden 256, FFN 128."""
    torch.manual_seed(seed)
    model = MiniMaxH3Transformer3DModel(
        num_attention_heads=4,
        attention_head_dim=48,
        hidden_size=256,
        num_layers=2,
        num_refiner_layers=2,
        ffn_dim=128,
        in_channels=4,
        audio_in_channels=8,
        text_dim=64,
        freq_dim=32,
        time_embed_hidden_dim=64,
        time_embed_dim=64,
        rope_freq_dim=4,
    ).eval()
    for name, module in model.named_children():
        module.to(torch.float32 if name in FP32 else torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("norm2.weight"):
            nn.init.normal_(parameter, mean=1.0, std=0.1)
        elif ".ff.net.0." in name:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def inputs(batch: int = 1, seed: int = 1, video_rows: int = VIDEO, timesteps: int = 3) -> dict[str, torch.Tensor]:
    """One packed sequence: text, video and audio rows at so many timesteps."""
    generator = torch.Generator().manual_seed(seed)
    rows = TEXT + video_rows + AUDIO

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator)

    text, video, audio = torch.arange(rows).split([TEXT, video_rows, AUDIO])
    return {
        "hidden_states": normal(video_rows, 16),
        "audio_hidden_states": normal(AUDIO, 8),
        "encoder_hidden_states": normal(TEXT, 64).bfloat16(),
        "timestep": torch.linspace(0.7, 0.0, timesteps),
        "timestep_indices": torch.randint(timesteps, (rows,), generator=generator),
        "token_tags": torch.cat([torch.full_like(part, tag) for part, tag in ((text, 1), (video, 0), (audio, 2))]),
        "position_ids": torch.randint(6, (rows, 3), generator=generator),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


@torch.no_grad()
def run(model: nn.Module, device: torch.device | str = "cpu", **options) -> torch.Tensor:
    """Video and audio velocities, in one, on the CPU. Inputs go to the device, where the model is or will be."""
    given = {name: value.to(device) for name, value in inputs(**options).items()}
    video, audio = model(**given, return_dict=False)
    return torch.cat([video.flatten(), audio.flatten()]).cpu()


def fc1s(model: nn.Module) -> dict[str, FC1SwiGLU]:
    """What has been put into the model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FC1SwiGLU)}


def is_untouched(model: nn.Module) -> bool:
    kept = any(hasattr(model.get_submodule(name), "_h3mlp_kept") for name in BLOCKS)
    return not fc1s(model) and type(model) is MiniMaxH3Transformer3DModel and not kept
