"""Sizes of the small model: the released architecture, with every kind of layer, within 20 MB.

Widths that a product is summed over are multiples of 32, so that no block of a scale is partly filled. Candidates leave
something out from 8,192 entries on, as long as a training's rows: their source learns what its own layers look for, not
what the Reindex layer does, and with 256 blocks one seed in two then misses facts from 2,048 entries on.
"""

import msgspec

from dsuf.checkpoint.config import ModelConfig, VisionConfig

SIZES = ModelConfig(
    vocab_size=4096, dim=256, n_layers=10, n_heads=4, head_dim=128, rope_head_dim=32, q_lora_rank=128, o_groups=2,
    o_lora_rank=64, norm_eps=1e-20, window_size=64, compress_ratios=(0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0),
    kv_source_layers=(2, 4, 5), index_source_layers=(2, 4, 5, 7), rope_theta=10_000, compress_rope_theta=160_000,
    rope_factor=16, beta_fast=32, beta_slow=1, original_seq_len=65_536, index_n_heads=4, index_head_dim=64,
    index_topk=64, candidate_source_layer=5, candidate_topk_blocks=1024, candidate_block_size=8, hc_mult=4,
    hc_sinkhorn_iters=20, hc_eps=1e-6, n_routed_experts=16, n_shared_experts=1, n_activated_experts=3,
    moe_inter_dim=96, route_scale=1.5, swiglu_limit=10.0, engram_layer_ids=(1, 4),
    engram_num_embeddings=(3_252, 3_496), engram_vocab_size=512, engram_n_heads=2, engram_head_dim=32,
    engram_pad_id=2, engram_compressed_vocab_size=3_459, n_mtp_layers=3, dspark_block_size=5,
    dspark_noise_token_id=4_039, dspark_target_layer_ids=(7, 8, 9), dspark_markov_rank=32, dspark_n_routed_experts=6,
    dspark_n_activated_experts=2, image_token_id=4_087, max_seq_len=1_048_576,
    vision=VisionConfig(
        n_layers=1, dim=8, n_heads=1, inter_dim=8, patch_size=14, rope_theta=10_000, downsample_ratio=3,
        max_n_token=1024, min_pixels=295_936,
    ),
)  # fmt: skip
"""What ships: window 0, 1; Full 2, 4, 5; Reuse 3, 6, 8, 9; Reindex 7; Engram before 1 and 4; three draft stages."""

TOY = msgspec.structs.replace(
    SIZES, vocab_size=512, dim=64, n_layers=7, head_dim=32, rope_head_dim=16, q_lora_rank=32, o_lora_rank=32,
    window_size=8, compress_ratios=(0, 0, 2, 1, 1, 1, 1, 0, 0, 0), kv_source_layers=(2, 3),
    index_source_layers=(2, 3, 5), index_n_heads=2, index_head_dim=32, index_topk=8, candidate_source_layer=3,
    candidate_topk_blocks=6, candidate_block_size=2, n_routed_experts=4, n_activated_experts=2, moe_inter_dim=32,
    engram_layer_ids=(1, 2), engram_num_embeddings=(280, 434), engram_vocab_size=32, engram_compressed_vocab_size=432,
    dspark_target_layer_ids=(4, 5, 6), dspark_n_routed_experts=4, dspark_noise_token_id=455, image_token_id=503,
)  # fmt: skip
"""The same kinds of layers for tests on a CPU."""
