"""`config.json` as models are released with it: the decoder that it means, and what is refused."""

import dataclasses
import json
import math

import pytest

from experiments import hf_config
from experiments.errors import UserError
from jaxaccel.nn import DecoderConfig, MtpConfig, RopeScaling, parameter_count

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_1_8B = LLAMA_2_7B | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_3_2_1B = LLAMA_3_1_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"factor": 32.0},
    "tie_word_embeddings": True,
}
MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MISTRAL_7B_V03 = MISTRAL_7B_V01 | {
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
}
QWEN_2_5_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA_2_27B = GEMMA_2_2B | {
    "head_dim": 128,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
}

LLAMA_8B = DecoderConfig(
    128256, 32, 4096, 32, 8, 128, 14336, rope_theta=5e5, rope_scaling=RopeScaling(8.0)
)
MISTRAL = DecoderConfig(32000, 32, 4096, 32, 8, 128, 14336, windows=(4096,))
GEMMA = DecoderConfig(
    256000, 26, 2304, 8, 4, 256, 9216, True, "gelu_tanh", 1e-6, windows=(4096, None),
    zero_centered_norm=True, post_norms=True, embedding_scale=48.0, attention_scale=1 / 16,
    attention_soft_cap=50.0, logits_soft_cap=30.0,
)  # fmt: skip
# Of each: its file, the decoder, positions, and parameters as published.
RELEASED = {
    "Llama-2-7b": (
        LLAMA_2_7B,
        DecoderConfig(32000, 32, 4096, 32, 32, 128, 11008),
        4096,
        6_738_415_616,
    ),
    "Llama-3.1-8B": (LLAMA_3_1_8B, LLAMA_8B, 131072, 8_030_261_248),
    "Llama-3.2-1B": (
        LLAMA_3_2_1B,
        DecoderConfig(
            128256, 16, 2048, 32, 8, 64, 8192, tied_head=True, rope_theta=5e5,
            rope_scaling=RopeScaling(32.0),
        ),
        131072,
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (MISTRAL_7B_V01, MISTRAL, 32768, 7_241_732_096),
    "Mistral-7B-v0.3": (
        MISTRAL_7B_V03,
        dataclasses.replace(MISTRAL, vocab_size=32768, rope_theta=1e6, windows=(None,)),
        32768,
        7_248_023_552,
    ),
    "Qwen2.5-0.5B": (
        QWEN_2_5_05B,
        DecoderConfig(
            151936, 24, 896, 14, 2, 64, 4864, tied_head=True, norm_epsilon=1e-6, rope_theta=1e6,
            qkv_bias=True,
        ),
        32768,
        494_032_768,
    ),
    "Qwen3-0.6B": (
        QWEN_3_06B,
        DecoderConfig(
            151936, 28, 1024, 16, 8, 128, 3072, tied_head=True, norm_epsilon=1e-6, rope_theta=1e6,
            qk_norm=True,
        ),
        40960,
        596_049_920,
    ),
    "gemma-2-2b": (GEMMA_2_2B, GEMMA, 8192, 2_614_341_888),
    "gemma-2-27b": (
        GEMMA_2_27B,
        dataclasses.replace(
            GEMMA, layers=46, width=4608, heads=32, kv_heads=16, head_size=128, mlp_width=36864,
            embedding_scale=math.sqrt(4608), attention_scale=1 / 12,
        ),
        8192,
        27_227_128_320,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_released_models(name):
    content, model, context, count = RELEASED[name]
    found = hf_config.parse(json.loads(json.dumps(content)))
    assert found.model == model
    assert (found.context, found.content, found.mtp) == (context, content, MtpConfig())
    assert parameter_count(found.model) == count
    # What is made from the decoder alone means the same.
    written = hf_config.parse(json.loads(json.dumps(hf_config.write(model, context, "bfloat16"))))
    assert (written.model, written.context) == (model, context)


def without(content, *keys):
    return {key: value for key, value in content.items() if key not in keys}


NEWER = without(LLAMA_3_1_8B, "rope_scaling", "rope_theta")
OURS = "num_nextn_predict_layers"
WINDOWS = QWEN_2_5_05B | {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("content", "field", "value"),
    [
        # What a file leaves out, or says by null, its family has.
        (without(LLAMA_2_7B, "num_key_value_heads"), "kv_heads", 32),
        (LLAMA_2_7B | {"head_dim": None}, "head_size", 128),
        (without(LLAMA_2_7B, "rms_norm_eps"), "norm_epsilon", 1e-6),
        (without(LLAMA_2_7B, "hidden_act"), "activation", "silu"),
        (without(LLAMA_2_7B, "tie_word_embeddings"), "tied_head", False),
        (without(LLAMA_2_7B, "architectures"), "mlp_width", 11008),
        (LLAMA_2_7B | {"sliding_window": 9}, "windows", (None,)),  # Llama reads none
        (without(MISTRAL_7B_V01, "sliding_window"), "windows", (4096,)),
        (without(QWEN_3_06B, "head_dim"), "head_size", 128),
        (QWEN_3_06B | {"head_dim": None}, "head_size", 64),
        (without(GEMMA_2_2B, "head_dim"), "head_size", 256),
        (GEMMA_2_2B | {"tie_word_embeddings": False}, "tied_head", False),
        (GEMMA_2_2B | {"attn_logit_softcapping": None}, "attention_soft_cap", None),
        (GEMMA_2_2B | {"hidden_activation": None}, "activation", "gelu_tanh"),
        (GEMMA_2_2B | {"hidden_activation": "gelu"}, "activation", "gelu"),
        (GEMMA_2_2B | {"num_hidden_layers": 3}, "windows", (4096, None, 4096)),
        # Windows from a layer on, or by layer.
        (WINDOWS | {"max_window_layers": 2}, "windows", (None, None, 8, 8)),
        (WINDOWS | {"max_window_layers": 0}, "windows", (8,)),
        (WINDOWS | {"max_window_layers": 4}, "windows", (None,)),
        (
            WINDOWS | {"layer_types": 2 * ["full_attention", "sliding_attention"]},
            "windows",
            (None, 8),
        ),
        # As transformers 5 writes it.
        (NEWER | {"rope_parameters": {"rope_type": "default", "rope_theta": 7}}, "rope_theta", 7.0),
        (
            NEWER | {"rope_parameters": LLAMA_3_1_8B["rope_scaling"] | {"rope_theta": 5e5}},
            "rope_scaling",
            RopeScaling(8.0),
        ),
    ],
)
def test_what_a_file_may_leave_out_or_say_otherwise(content, field, value):
    assert getattr(hf_config.parse(content).model, field) == value


def test_heads_that_a_file_says_it_has():
    heads = LLAMA_2_7B | {OURS: 2, "mtp_kind": "parallel"}
    assert hf_config.parse(heads).mtp == MtpConfig(2, "parallel")
    assert hf_config.parse(without(heads, "mtp_kind")).mtp == MtpConfig(2, "sequential")


ROPE = LLAMA_3_1_8B["rope_scaling"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "architecture None is not supported; there are LlamaForCausalLM, Mistral"),
        (
            LLAMA_2_7B | {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; .*Qwen3ForCausalLM, Gemma2ForCausalLM",
        ),
        ({"model_type": "mamba"}, "architecture mamba is not supported"),
        (LLAMA_2_7B | {"architectures": "LlamaForCausalLM"}, "architectures is 'Llama.*a list"),
        (LLAMA_2_7B | {"architectures": 7}, "architectures is 7; it must be a list"),
        (without(LLAMA_2_7B, "hidden_size"), "has no hidden_size"),
        (LLAMA_2_7B | {"vocab_size": None}, "has no vocab_size"),
        (without(LLAMA_2_7B, "max_position_embeddings"), "has no max_position_embeddings"),
        (LLAMA_2_7B | {"num_attention_heads": "32"}, "num_attention_heads is '32'; .* whole num"),
        (LLAMA_2_7B | {"num_hidden_layers": True}, "num_hidden_layers is True; .*whole number"),
        (LLAMA_2_7B | {"intermediate_size": 2.5}, "intermediate_size is 2.5; .*whole number"),
        (LLAMA_2_7B | {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; .*true or false"),
        (LLAMA_2_7B | {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a number"),
        (LLAMA_2_7B | {"rms_norm_eps": -1.0}, "norm_epsilon is -1.0"),
        (LLAMA_2_7B | {"hidden_size": 0, "head_dim": 4}, "width is 0; it must be at least 1"),
        (LLAMA_2_7B | {"num_key_value_heads": 5}, "32 query heads do not divide into 5"),
        (LLAMA_2_7B | {"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'; legal are silu"),
        (LLAMA_2_7B | {"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]; it must be a text"),
        (GEMMA_2_2B | {"hidden_activation": "x"}, "hidden_activation is 'x'; legal are silu"),
        (LLAMA_2_7B | {"attention_bias": True}, "attention_bias is True, which .*legal is False"),
        (LLAMA_2_7B | {"mlp_bias": True}, "mlp_bias is True"),
        (LLAMA_2_7B | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            NEWER | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5, which .*legal is 1.0",
        ),
        (GEMMA_2_2B | {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (
            LLAMA_2_7B | {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type is 'linear'; legal are default and llama3",
        ),
        (LLAMA_3_1_8B | {"rope_scaling": ROPE | {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        (LLAMA_3_1_8B | {"rope_scaling": without(ROPE, "factor")}, "has no factor"),
        (LLAMA_3_1_8B | {"rope_scaling": ROPE | {"factor": "8"}}, "factor is '8'; .*a number"),
        (LLAMA_3_1_8B | {"rope_scaling": [8]}, r"rope_scaling is \[8\]; it must be an object"),
        (
            NEWER | {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_type is 'default'; legal",
        ),
        (
            LLAMA_2_7B | {"quantization_config": {"quant_method": "awq", "bits": 4}},
            "quant_method is 'awq'; legal is fp8",
        ),
        (LLAMA_2_7B | {"quantization_config": "awq"}, "quantization_config is 'awq'; .*an object"),
        (
            WINDOWS | {"layer_types": 4 * ["linear_attention"]},
            "layer_types has 'linear_attention'; legal are sliding_attention, full_attention",
        ),
        (WINDOWS | {"layer_types": 4 * [["full_attention"]]}, r"layer_types has \['full_att"),
        (WINDOWS | {"layer_types": 3 * ["full_attention"]}, "has 3 entries for 4 layers"),
        (WINDOWS | {"layer_types": "full_attention"}, "layer_types is 'full.*must be a list"),
        (
            LLAMA_3_1_8B | {"layer_types": 32 * ["sliding_attention"]},
            "layer_types contradicts sliding_window, None: legal is full_attention",
        ),
        (
            NEWER | {"rope_parameters": {"rope_type": "default", "rope_theta": 7}, "rope_theta": 8},
            "rope_theta is 8.0 there and 7.0 in rope_parameters",
        ),
        (
            NEWER | {"rope_parameters": ROPE, "rope_scaling": ROPE | {"factor": 2.0}},
            "rope_scaling and rope_parameters are not the same",
        ),
        (LLAMA_3_1_8B | {"max_position_embeddings": 0}, "max_position_embeddings is 0; it must be"),
        (WINDOWS | {"sliding_window": 0, "max_window_layers": 0}, r"windows are \(0,\)"),
        (GEMMA_2_2B | {"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar is 'x'"),
        (LLAMA_2_7B | {OURS: -1}, "depth is -1"),
    ],
)
def test_what_a_decoder_here_is_not_is_one_line(tmp_path, content, message):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as error:
        hf_config.read(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is no folder of a model: it has no config.json"),
        ("[1]", "config.json holds no JSON object"),
        ('{"architectures"', "cannot read .*config.json: "),
        ("[" * 100_000, "cannot read .*config.json: "),
        ('{"tokenizer_fingerprint": "0"}', "is a run of this program.*experiments.export --run"),
    ],
)
def test_a_file_that_is_none(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        hf_config.read(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_a_decoder_of_no_family_is_refused_with_what_sets_it_apart():
    odd = dataclasses.replace(MISTRAL, qk_norm=True, post_norms=True)
    with pytest.raises(UserError, match=r"no architecture .* fits: llama has another ") as error:
        hf_config.write(odd, 128, "bfloat16")
    for family in ("llama", "mistral", "qwen2", "qwen3", "gemma2"):
        assert f"{family} has another " in str(error.value)
    assert "qwen3 has another post_norms" in str(error.value)
