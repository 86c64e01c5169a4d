"""Every key of an adapter is on FC1, of another part of MiniMax-H3, or refused with its own reason."""

import pytest

from h3mlp.checkpoint.adapter_keys import parse_key


@pytest.mark.parametrize(
    ("key", "module"),
    [
        # The most used few-step adapter: MiniMax's names of attention in diffusers' refiner blocks.
        *(
            (f"token_refiner.refiner_blocks.0.attn.{name}.lora_A.weight", f"token_refiner.refiner_blocks.0.attn.{name}")
            for name in ("q_proj", "k_proj", "v_proj", "out_proj", "to_q", "to_out.0", "qkv_proj", "norm_q")
        ),
        (
            "transformer_blocks.49.attn.to_gate_compress.lora_B.default.weight",
            "transformer_blocks.49.attn.to_gate_compress",
        ),
        ("diffusion_model.blocks.0.adaln_proj.linear.weight", "blocks.0.adaln_proj.linear"),
        ("diffusion_model.blocks.0.adaln_proj.linear.set_weight", "blocks.0.adaln_proj.linear"),
        ("diffusion_model.blocks.0.adaln_proj.linear.alpha.lora_A.weight", "blocks.0.adaln_proj.linear.alpha"),
        ("blocks.0.attn.out_proj.diff_b", "blocks.0.attn.out_proj"),
        ("blocks.0.norm1.diff", "blocks.0.norm1"),
        ("blocks.0.mlp.fc2.lora_down.weight", "blocks.0.mlp.fc2"),
        ("transformer_blocks.0.ff.net.2.lora_magnitude_vector", "transformer_blocks.0.ff.net.2"),
        ("blocks.0.attn.qkv_proj.lokr_w1", "blocks.0.attn.qkv_proj"),
        ("final_layer.adaln_proj.linear.set_weight", "final_layer.adaln_proj.linear"),
        ("adaln_t_table.set_weight", "adaln_t_table"),
        ("time_embedder.proj_in.lora_A.weight", "time_embedder.proj_in"),
        ("lora_unet_token_refiner_blocks_1_attn_out_proj.lora_up.weight", "token_refiner.blocks.1.attn.out_proj"),
        ("lora_unet_blocks_3_adaln_proj_linear.alpha", "blocks.3.adaln_proj.linear"),
        ("lora_unet_condition_proj.alpha", "condition_proj"),
    ],
)
def test_another_part_of_the_model(key, module):
    assert parse_key(key, "it") == (module, None)


@pytest.mark.parametrize(
    ("key", "role"),
    [
        ("blocks.0.mlp.fc1.lora_A.weight", "down"),
        ("lora_unet_blocks_0_mlp_fc1.lora_up.weight", "up"),
        ("lora_unet_blocks_0_mlp_fc1.alpha", "alpha"),
        ("model.diffusion_model.blocks.0.mlp.fc1.lora_alpha", "alpha"),
        ("base_model.model.blocks.0.mlp.fc1.lora_B.turbo.weight", "up"),
    ],
)
def test_on_fc1(key, role):
    assert parse_key(key, "it") == ("blocks.0.mlp.fc1", role)


@pytest.mark.parametrize("on", ["fc1", "norm2", "flat norm2"])
@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ("diff", "adds to the whole weight, which is no LoRA"),
        ("diff_b", "adds a bias, of which the operator has none"),
        ("set_weight", "puts another weight in its place"),
        ("weight", "puts another weight in its place"),
        ("modules_to_save.default.weight", "puts another weight in its place"),
        ("lora_B.bias", "adds a bias"),
        ("dora_scale", "is DoRA"),
        ("lora_magnitude_vector.default", "is DoRA"),
        ("lokr_w1", "LoKr, LoHa or OFT"),
        ("hada_w1_a", "LoKr, LoHa or OFT"),
        ("oft_blocks", "LoKr, LoHa or OFT"),
        ("reshape_weight", "is of an unknown kind"),
        ("lora_mid.weight", "is of an unknown kind"),
    ],
)
def test_its_own_reason(on, tail, reason):
    """A delta for norm2 or FC1 is never lost."""
    module = {
        "fc1": "blocks.0.mlp.fc1",
        "norm2": "transformer_blocks.7.norm2",
        "flat norm2": "lora_unet_blocks_0_norm2",
    }[on]
    where = "FC1" if on == "fc1" else "norm2, whose weight the prepared layer holds"
    with pytest.raises(ValueError, match=f"{module}.{tail} of it must be a pair .*: it is on {where}, and .*{reason}"):
        parse_key(f"{module}.{tail}", "it")


def test_a_pair_on_norm2():
    with pytest.raises(ValueError, match="it is on norm2, whose weight the prepared layer holds"):
        parse_key("blocks.0.norm2.lora_A.weight", "it")


@pytest.mark.parametrize(
    "key",
    [
        "blocks.0.self_attn.q.lora_A.weight",  # Wan
        "blocks.0.ffn.0.lora_down.weight",
        "double_blocks.0.img_mlp.fc1.lora_A.weight",  # HunyuanVideo
        "transformer_blocks.0.attn1.to_q.lora_A.weight",  # LTX
        "transformer_blocks.0.ff_context.net.0.proj.lora_A.weight",  # Flux
        "single_transformer_blocks.0.attn.to_q.lora_A.weight",
        "text_encoder.layers.0.lora_A.weight",
        "blocks.0.mlp.fc3.lora_A.weight",
        "blocks.0.mlp.gate_proj.lora_A.weight",
        "blocks.0.lora_A.weight",
        "blocks.0.mlp.fc1",
        "lora_unet_blocks_0_mlp_fc9.lora_down.weight",
        "lora_te_text_model_0.alpha",
        "alpha",
        "",
    ],
)
def test_another_model(key):
    with pytest.raises(ValueError, match="must belong to a linear layer of MiniMax-H3; it matches none"):
        parse_key(key, "it")
