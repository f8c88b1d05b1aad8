"""Numbers of single model types for which zoo_models.py has no rules."""

from __future__ import annotations

from typing import Any

_HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GEMMA_3N = {
    **_SHARED,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": [96] * 4,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
}
_KEYPOINTS = {"keypoint_threshold": 0.0, "max_keypoints": 12}
_CODEBOOK = {"<image>": 200, **{f"IMGIMG{letter}Z": 201 + index for index, letter in enumerate("ABCD")}}

#: model type -> fields of its small configuration, alone or in another one, that the rules do not give.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {**_HYBRID, "attn_layer_indices": [1]},
    "blip-2": {"image_token_index": 250},
    "bit": {"num_groups": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        }
    },
    "chameleon": {"vocabulary_map": _CODEBOOK},
    "codegen": {"rotary_dim": 8},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "esm": {"pad_token_id": 1, "mask_token_id": 250},
    "emu3": {"vocabulary_map": {f"<|extra_{i}|>": i for i in range(200, 202)} | {"<image>": 199}},
    "falcon_h1": {**_HYBRID, "mamba_d_ssm": 128},
    "gemma3n_text": _GEMMA_3N,
    "glm5_next_text": {"qk_rope_head_dim": 0, "index_kpool": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "gptj": {"rotary_dim": 8},
    "granite4_vision": {
        "deepstack_layer_map": [(0, 0)],
        "spatial_target_layers": [0, 1],
        "downsample_rate": "1/2",
    },
    "granitemoehybrid": _HYBRID,
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "mamba_dt_rank": 16},
    "led": {"attention_window": 4},
    "longformer": {"attention_window": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lightglue": {"depth_confidence": -1.0, "width_confidence": -1.0, "filter_threshold": 0.0},
    "longcat_flash": {"qk_head_dim": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "mimi": {"upsample_groups": 64},
    "mimi_decoder": {"upsample_groups": 64},
    "pocket_tts_audio_tokenizer": {"upsample_groups": 64},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 64},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 16,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "superpoint": _KEYPOINTS,
    "t5gemma2_encoder": {"dropout_rate": 0.0},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 16,
    },
}
