# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .append_log import (
    AppendLog,
    CommittedLog,
    DamagedLog,
    LogHead,
    head_file,
    read_head,
    read_json_lines,
    timestamp,
)
from .checkpoints import contiguous_tensors
from .encryption import Encryption
from .files import (
    PRIVATE,
    SHARED,
    checkpoint_numbers,
    failpoint,
    file_size_and_digest,
    make_folder,
    open_private,
    safe_folder_name,
    validate_client_names,
    validate_study_name,
    wrap_disk_errors,
    write_atomic,
    write_folder,
    write_if_changed,
)
from .journal import Journal, client_state_folder, sync_journals
from .locks import (
    FolderLock,
    NoLocks,
    Process,
    acquire_folder_lock,
    current_process,
    find_syncfs,
    locked_folder,
    sync_folder,
)
from .logs import LOG, Log, LogEntry, follow_log, read_log, utc_now
from .store import Store, TensorsAndMeta

__all__ = ["read_log"]
