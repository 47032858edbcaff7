# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .executors.executor import PoolConfig, make_pool_config
from .executors.processes import ProcessTransport
from .flower.edge import serve_edge
from .flower.keys import make_keys, make_site_keys, replace_node_key
from .flower.starter import new_federation, new_site
from .flower.statistics import statistics_on_superlink
from .flower.superlink import read_public_key, read_superlink, run_on_superlink, run_superlink
from .flower.supernode import is_key_registered, run_supernode, serve_tasks
from .local import Federation
from .simulation import Simulation
from .site import INBOX_FOLDER, ServerSection, Site, read_peer_fingerprints, read_site
from .site_runtime import (
    SiteRuntime,
    load_site_table,
    open_account,
    private_umask,
    site_study_folder,
)
