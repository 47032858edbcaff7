# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .accumulator import CARRY_BITS, dtype_name
from .chunks import ChunkedTensors, chunk_tensors, squared_distances
from .codecs import CODED_PART_NAMES, Codec, CodecError
from .compression import parse_codec, plain
from .devices import (
    AUTO,
    CPU,
    DeviceError,
    autocast,
    check_device_name,
    deterministic,
    device_count,
    device_description,
    eval_mode,
    fork_rng_state,
    grad_scaler,
    host_copy,
    model_device,
    move_model,
    rank_device,
    read_floats,
    read_ints,
    resolve_device,
    rng_state,
    sum_dtype,
    tensor_float32,
    to_device,
    worker_device,
)
from .message import BrokenMessage, Message
from .named import (
    Batch,
    DigestCache,
    Tensors,
    all_finite,
    aux_name,
    aux_names,
    checksum,
    digest,
    digests,
    full_digest,
    is_aux,
    nbytes,
    number_digest,
    only_aux,
    param_key,
    same_bits,
    split_aux,
)
from .ring import (
    WORD,
    Words,
    add_words,
    counts_from_words,
    ints_from_words,
    subtract_words,
    widen_words,
    words_from_counts,
    words_from_ints,
)
from .serialization import (
    DTYPES,
    JSON,
    SerializationError,
    TensorEntry,
    pack,
    pack_message,
    parse_entries,
    tensor_view,
    unpack,
    unpack_message,
)
from .sums import (
    GRID,
    MAX_SUM_STEPS,
    MAX_VALUE,
    MAX_WEIGHT,
    ExactSum,
    SumError,
    peak_steps_and_squared_distances,
)

__all__ = [
    "ChunkedTensors",
    "chunk_tensors",
    "Batch",
    "BrokenMessage",
    "Codec",
    "CodecError",
    "ExactSum",
    "Message",
    "SerializationError",
    "SumError",
    "Tensors",
    "digest",
    "digests",
    "pack",
    "pack_message",
    "parse_codec",
    "unpack",
    "unpack_message",
]
