# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .adapters import (
    CONFIG,
    WEIGHTS,
    adapter_families,
    adapter_family,
    add_adapter,
    import_peft,
    load_adapter,
    lora_scales,
    make_peft_config,
    merge_and_dequantize,
    read_adapter_config,
    save_adapter,
)
from .architectures import register_layer_map
from .attention import align_mask, attention_shift, capture_attention, token_mask
from .catalog import (
    SHORT_NAMES,
    TASK_CLASSES,
    is_hub_id,
    load_model_config,
    load_pretrained,
    manifest_json,
    meta_model,
    no_load_report,
    no_progress_bars,
    params_of,
    read_manifest,
    strip_hub_prefix,
)
from .description import block_modules, describe
from .dual_encoder import TEMPLATE, DualEncoder, load_dual_encoder
from .folder import (
    SETTINGS,
    Preprocessing,
    image_mean_std,
    image_tensor,
    load_folder,
    predict_classes,
    save_folder,
)
from .layer_maps import restore_layer_maps
from .params import ITEMSIZE, TRAINABLE_DTYPES, Block, Kind, Param, Params
from .prompts import add_prompts
from .proposal import proposal_report, propose_layer_map, register_study_layer_map, small_model_like
from .validate import check_params
from .values import (
    QUANTIZATIONS,
    copy_buffers,
    freeze_batch_norms,
    get_values,
    is_packed,
    is_quantized,
    mixes_examples,
    param_value,
    pin_packed_layout,
    quantization_config,
    require_unchanged_buffers,
    restore_buffers,
    set_values,
)

__all__ = [
    "Block",
    "DualEncoder",
    "Kind",
    "Param",
    "Params",
    "check_params",
    "describe",
    "freeze_batch_norms",
    "get_values",
    "load_dual_encoder",
    "load_folder",
    "params_of",
    "predict_classes",
    "propose_layer_map",
    "register_layer_map",
    "save_folder",
    "set_values",
]
