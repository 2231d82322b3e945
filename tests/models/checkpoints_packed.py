"""Checkpoints with packed weights, as they are published."""

from __future__ import annotations

from tests.models.checkpoint_case import Case, compressed, llama3, packed, shape
from tests.models.checkpoints_dense import FP8, LLAMA, LLAMA2, LLAMA_8B, LLAMA_70B, QWEN3_8B
from tests.models.checkpoints_mixtures import QWEN3_30B

AWQ = {"bits": 4, "group_size": 128, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
GPTQ = {"bits": 4, "group_size": 128, "damp_percent": 0.1, "sym": True, "true_sequential": True}
NF4 = {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
}
FBGEMM = {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
LLAMA_405B = {**LLAMA, **llama3(8.0), **shape(16_384, 53_248, 126, 128, 8, 128_256, 131_072)}

CASES: tuple[Case, ...] = (
    Case("Qwen/Qwen3-8B-FP8", {**QWEN3_8B, "quantization_config": FP8}, 8.191),
    Case("Qwen/Qwen3-8B-AWQ", packed(QWEN3_8B, "awq", **AWQ), 8.191),
    Case("Qwen/Qwen3-30B-A3B-GPTQ-Int4", packed(QWEN3_30B, "gptq", **GPTQ, desc_act=False, meta={}), 30.53),
    Case(
        "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
        packed(LLAMA_8B, "awq", **AWQ, do_fuse=False),
        8.030,
    ),
    Case(
        "TheBloke/Llama-2-7B-Chat-GPTQ",
        packed({**LLAMA2, **shape(4096, 11_008, 32, 32, 32, 32_000, 4096)}, "gptq", **GPTQ, desc_act=True),
        6.738,
    ),
    Case(
        "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit",
        packed({**LLAMA_8B, "unsloth_version": "2025.1"}, "bitsandbytes", **NF4),
        8.030,
    ),
    Case(
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8",
        packed(LLAMA_8B, "compressed-tensors", **compressed("float-quantized", "float", 8, "tensor")),
        8.030,
    ),
    Case(
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16",
        packed(LLAMA_8B, "compressed-tensors", **compressed("pack-quantized", "int", 4, "group", group_size=128)),
        8.030,
    ),
    Case(
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8",
        packed(LLAMA_8B, "compressed-tensors", **compressed("int-quantized", "int", 8, "channel")),
        8.030,
    ),
    Case("meta-llama/Llama-3.1-405B-Instruct-FP8", packed(LLAMA_405B, "fbgemm_fp8", **FBGEMM), 405.9),
    Case(
        "nvidia/Llama-3.3-70B-Instruct-FP4",
        packed(LLAMA_70B, "modelopt", quant_algo="NVFP4"),
        refused="quantization_config.quant_method='modelopt'",
    ),
    Case(
        "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
        {**LLAMA_8B, "quantization": {"group_size": 64, "bits": 4}},
        refused="quantization={'group_size': 64, 'bits': 4}",
    ),
)
