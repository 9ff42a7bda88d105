"""The architectures that benchmarks/conversion.py converts, each with small sizes and random weights.

`NAMES` lists the names by library; `build` returns a network and its inputs. Importing this file imports
neither timm nor torchvision nor transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "torchvision_operators"))
import sitecustomize  # noqa: F401  # declares the operators that a CUDA build of torchvision lacks on a CPU


def _words(text: str) -> list[str]:
    return text.split()


TIMM = _words("""
resnet18 resnet26d resnext26ts seresnet18 legacy_seresnet18 skresnet18 resnest14d ecaresnet26t gcresnext26ts resnetv2_18
botnet26t_256 lambda_resnet26t densenet121 dla46_c hrnet_w18_small ese_vovnet19b_dw cspresnet50 darknet17 regnetx_002
regnety_002 nf_resnet26 nf_regnet_b0 eca_nfnet_l0 repvgg_a0 mobileone_s0 fastvit_t8 mobilenetv2_050
mobilenetv3_small_050 mobilenetv4_conv_small efficientnet_b0 tinynet_e mixnet_s fbnetc_100 mnasnet_small ghostnet_050
ghostnetv2_100 lcnet_050 rexnet_100 xception41 convnext_atto convnextv2_atto inception_next_atto hgnetv2_b0 starnet_s1
edgenext_xx_small mobilevit_xxs mobilevitv2_050 poolformer_s12 efficientformer_l1 efficientformerv2_s0 efficientvit_b0
efficientvit_m0 levit_128s coat_tiny coatnet_nano_rw_224 maxvit_nano_rw_256 crossvit_tiny_240 cait_xxs24_224 pit_ti_224
pvt_v2_b0 vit_tiny_patch16_224 gmlp_ti16_224 convit_tiny gcvit_xxtiny eva02_tiny_patch14_224 repghostnet_050 shvit_s1
""")

TORCHVISION = _words("""
alexnet vgg11_bn resnet18 resnext50_32x4d squeezenet1_1 densenet121 googlenet inception_v3 shufflenet_v2_x0_5
mobilenet_v2 mobilenet_v3_small mnasnet0_5 regnet_x_400mf regnet_y_400mf efficientnet_b0 efficientnet_v2_s convnext_tiny
vit_b_32 swin_t maxvit_t fcn_resnet50 lraspp_mobilenet_v3_large r3d_18
""")

_CONVOLUTIONAL = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": {},
    "RobertaForSequenceClassification": {},
    "DistilBertForSequenceClassification": {},
    "AlbertForSequenceClassification": {},
    "ElectraForSequenceClassification": {},
    "DebertaForSequenceClassification": {},
    "DebertaV2ForSequenceClassification": {},
    "MobileBertForSequenceClassification": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "SqueezeBertForSequenceClassification": {},
    "ConvBertForSequenceClassification": {},
    "FNetForSequenceClassification": {},
    "MPNetForSequenceClassification": {},
    "RoFormerForSequenceClassification": {},
    "ModernBertForSequenceClassification": {},
    "NystromformerForSequenceClassification": {},
    "GPT2LMHeadModel": {},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "GPTNeoXForCausalLM": {},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "OPTForCausalLM": {"word_embed_proj_dim": 32},
    "BloomForCausalLM": {},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "MixtralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "PhiForCausalLM": {},
    "StableLmForCausalLM": {},
    "CohereForCausalLM": {},
    "MambaForCausalLM": {},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16},
    "FalconMambaForCausalLM": {},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "BambaForCausalLM": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "RwkvForCausalLM": {"attention_hidden_size": 32},
    "XGLMForCausalLM": {"attention_heads": 4},
    "BioGptForCausalLM": {},
    "T5ForConditionalGeneration": {},
    "BartForConditionalGeneration": {},
    "PegasusForConditionalGeneration": {},
    "M2M100ForConditionalGeneration": {},
    "ViTForImageClassification": {},
    "BeitForImageClassification": {},
    "ResNetForImageClassification": {**_CONVOLUTIONAL, "embedding_size": 8},
    "SegformerForImageClassification": {**_CONVOLUTIONAL, "num_attention_heads": [1, 2, 2, 4]},
    "PoolFormerForImageClassification": _CONVOLUTIONAL,
    "Wav2Vec2ForSequenceClassification": {
        "conv_dim": [16, 16],
        "conv_stride": [5, 2],
        "conv_kernel": [10, 3],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    },
    "WhisperForConditionalGeneration": {"max_source_positions": 8, "num_mel_bins": 8, "decoder_start_token_id": 1},
}
"""Classes with the settings that differ from `_SMALL`."""
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "d_ff", "ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_key_value_heads", "num_experts", "num_local_experts"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "patch_size"), 8),
    "decoder_attention_heads": 4,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 1,
    "image_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}


class _Around(nn.Module):
    """A torch.nn module without activations, in a network that has one."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.act, self.head = inner, nn.ReLU(), nn.Linear(width, 2)

    def forward(self, *args: Tensor) -> Tensor:
        result = self.inner(*args)
        while isinstance(result, tuple):
            result = result[0]
        head: Tensor = self.head(self.act(result))
        return head


def _composite(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    encoder, decoder = nn.TransformerEncoderLayer(**_LAYER), nn.TransformerDecoderLayer(**_LAYER, activation="gelu")
    recurrent = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN, "LSTMCell": nn.LSTMCell}
    if name in recurrent:
        return _Around(recurrent[name](8, 6), 6), (x[0] if name == "LSTMCell" else x,)
    made: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
        "TransformerEncoderLayer": (encoder, (x,)),
        "TransformerDecoderLayer": (decoder, (x, memory)),
        "TransformerEncoder": (nn.TransformerEncoder(encoder, 2, nn.LayerNorm(8)), (x,)),
        "TransformerDecoder": (nn.TransformerDecoder(decoder, 2), (x, memory)),
        "Transformer": (nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (x, memory)),
        "MultiheadAttention": (_Around(nn.MultiheadAttention(8, 2, batch_first=True), 8), (x, x, x)),
        "Sequential": (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Sequential(nn.Dropout(), nn.Tanh())), (x,)),
        "AdaptiveLogSoftmaxWithLoss": (
            nn.Sequential(nn.Linear(8, 8), nn.SiLU(), _Classes(nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4]))),
            (x[0],),
        ),
    }
    return made[name]


class _Classes(nn.Module):
    def __init__(self, inner: nn.AdaptiveLogSoftmaxWithLoss) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.log_prob(x)


COMPOSITES = _words("""
TransformerEncoderLayer TransformerDecoderLayer TransformerEncoder TransformerDecoder Transformer MultiheadAttention
Sequential AdaptiveLogSoftmaxWithLoss LSTM GRU RNN LSTMCell
""")

NAMES = {"timm": TIMM, "torchvision": TORCHVISION, "transformers": list(TRANSFORMERS), "torch": COMPOSITES}


def build(library: str, name: str) -> tuple[nn.Module, tuple[Any, ...] | dict[str, Any]]:
    """A network with weights from seed 0, and its inputs."""
    torch.manual_seed(0)
    if library == "torch":
        return _composite(name)
    if library == "transformers":
        return _of_transformers(name)
    if library == "torchvision":
        import torchvision

        size = {"inception_v3": 299, "vit_b_32": 32, "maxvit_t": 224, "r3d_18": 16}.get(name, 64)
        options: dict[str, Any] = {"image_size": 32} if name == "vit_b_32" else {}
        if name in ("fcn_resnet50", "lraspp_mobilenet_v3_large"):
            options = {"weights_backbone": None}
        model = torchvision.models.get_model(name, weights=None, num_classes=5, **options)
        return model, (torch.randn(2, 3, *([size] * (3 if name == "r3d_18" else 2))),)
    import timm

    fixed = {"efficientformer_l1": 224, "crossvit_tiny_240": 64}  # without img_size, or with another size
    size = fixed.get(name, 64)
    try:
        model = timm.create_model(name, num_classes=5, **({} if name in fixed else {"img_size": 64}))
    except TypeError:  # a convolutional network, which takes any size
        model = timm.create_model(name, num_classes=5)
    return model, (torch.randn(2, 3, size, size),)


def _of_transformers(name: str) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    cls = getattr(transformers, name)
    default = cls.config_class()
    known = {setting: value for setting, value in _SMALL.items() if hasattr(default, setting)}
    model = cls(cls.config_class(**{**known, **TRANSFORMERS[name]}))
    tokens = torch.randint(3, 60, (2, 8))
    inputs: dict[str, Any] = {
        "pixel_values": {"pixel_values": torch.randn(2, 3, 32, 32)},
        "input_values": {"input_values": torch.randn(2, 800)},
        "input_features": {"input_features": torch.randn(2, 8, 16), "decoder_input_ids": tokens},
        "input_ids": {"input_ids": tokens},
    }[model.main_input_name]
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens[:, :5]
    return model, inputs
