# SPDX-License-Identifier: Apache-2.0
"""A site at work on one study: its data, its model, and its replies to requests."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedplan.data.tables import (
    DataError,
    add_empty_columns,
    has_json_columns,
    load_table,
    open_images,
)
from fedplan.federation.client import (
    Client,
    ClientPrivacy,
    MetricPolicy,
    make_example_guard,
    make_noise_guard,
    require_private_setup,
)
from fedplan.federation.endpoint import Endpoint, open_journal, site_run_folder
from fedplan.federation.global_state import continued_state
from fedplan.federation.ledger.egress import Account, EgressLog, Limits, require_complete_account
from fedplan.federation.ledger.faults import FaultLog, error_fields
from fedplan.federation.messages import RequestRefused, read_run_id
from fedplan.naming import allow_imports
from fedplan.runners.executors.ranks import ClientDevices
from fedplan.runners.local import make_train_setup
from fedplan.runners.site import Site
from fedplan.storage.files import safe_folder_name
from fedplan.studies.experiment import build_experiment, make_eval_set, make_participation
from fedplan.studies.run import write_run_files
from fedplan.studies.schema import ConfigError, Study
from fedplan.tensors.devices import move_model, resolve_device
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message

if TYPE_CHECKING:
    from datasets import Dataset

    from fedplan.federation.agreement import Agreement
    from fedplan.federation.secure_client import SecAggClient


class SiteRuntime:
    """A site at work on one study: `answer` replies to the server's requests.

    The constructor loads the data and builds the model, and raises ConfigError if the study has no
    client of the site's name, DamagedLog if its account and its egress log do not agree. Under
    example-level DP it tries the model on made-up examples, and raises PrivacyError if the model
    mixes examples: later nothing that depends on examples is refused. Examples that do not fit a
    private study are left out, and counted in the site's fault log. A study comes over the network,
    so it may import only packages in `site.allow_packages`. `limits` are the site's privacy limits
    over all studies on the dataset; `hide_loss` and `metric_policy` restrict the metrics that are
    sent.
    """

    def __init__(
        self,
        site: Site,
        study: Study,
        limits: Limits | None = None,
        *,
        egress: EgressLog | None = None,
        hide_loss: bool = False,
        metric_policy: MetricPolicy | None = None,
    ) -> None:
        self.metric_policy = metric_policy or MetricPolicy()
        with private_umask(), allow_imports(site.allow_packages):
            self.site, self.study, self.encryption = site, study, site.encryption
            name = site.name
            table = None if study.data.path else (name, load_site_table(site, study))
            self.experiment = build_experiment(study, table)
            if name not in self.experiment.data.train:
                raise ConfigError(f"the study has no client {name!r}")
            # The site knows its own machine, so its setting overrides the study's.
            move_model(self.experiment.model, resolve_device(site.device or study.device))
            self.traits = _traits(study, site)
            self.account = open_account(site, limits)
            self.faults = FaultLog(Path(site.state), self.encryption)
            self.egress, self.hide_loss = egress or EgressLog(Path(site.state)), hide_loss
            require_complete_account(self.account, self.egress)
            if text := self.experiment.data.left_out:
                self.faults.append(DataError(text))
            private = study.privacy is not None and study.privacy.unit == "example"
            trial = self.experiment.data.task.made_up_examples() if private else None
            self.setup = make_train_setup(study, self.experiment, trial)
            count = site.devices_per_client
            devices = ClientDevices(study, self.experiment, count, site) if count > 1 else None
            self.setup = replace(self.setup, spread=devices)
            require_private_setup(self.experiment.agreement, self.setup)
            if devices:
                devices.start()
        self._endpoint: Endpoint | None = None

    def answer(self, kind: str, message: Message) -> Message:
        """Return the reply to a request of a kind, as "train"; of an exception only its code."""
        with private_umask():
            try:
                endpoint = self.endpoint(read_run_id(message))
            except Exception as error:
                return pack_message({}, {**error_fields(self.faults.append(error))})
            return endpoint.answer(kind, message)

    def endpoint(self, run: str) -> Endpoint:
        """Return the endpoint of a run, made new if the last request was of another run."""
        if self._endpoint is None or self._endpoint.agreement.run != run:
            with private_umask():
                self._endpoint = _make_endpoint(self, run)
        return self._endpoint


def open_account(site: Site, limits: Limits | None) -> Account:
    """Open the account of a site's dataset, with the site's limits."""
    folder = Path(site.state) / "account" / safe_folder_name(site.dataset)
    return Account(folder, limits, encryption=site.encryption)


def _make_endpoint(runtime: SiteRuntime, run: str) -> Endpoint:
    """Make the client and endpoint of a run; a continued run's state is copied, without aux."""
    site, study, experiment = runtime.site, runtime.study, runtime.experiment
    name, policy = site.name, runtime.metric_policy
    agreement, account = replace(experiment.pinned_agreement, run=run), runtime.account
    folder = site_study_folder(site.state, study, name)
    run_folder = site_run_folder(folder, run)
    client = Client(
        name=name,
        examples=experiment.data.train[name],
        journal=open_journal(run_folder, runtime.encryption),
        setup=runtime.setup,
        traits=runtime.traits,
        privacy=ClientPrivacy(
            guard=make_example_guard(agreement, account.folder, account),
            noise_guard=make_noise_guard(agreement, account),
            account=account,
            hide_loss=runtime.hide_loss or len(experiment.data.train[name]) < policy.min_examples,
            metric_policy=policy,
        ),
        eval_set=make_eval_set(study, experiment.data, name),
    )
    if study.continue_from:
        pattern = f"*/{safe_folder_name(name)}/{study.continue_from}"
        for earlier in Path(site.state).glob(pattern):
            state, _ = open_journal(earlier, runtime.encryption, reading=True).client_state()
            client.journal.initialize(continued_state(agreement, state))
    write_run_files(run_folder, study, experiment)
    secagg_client = None
    if agreement.secagg.active:
        secagg_client = make_secagg_client(runtime, agreement, client, run_folder)
    faults, egress = runtime.faults, runtime.egress
    return Endpoint(
        agreement, client, folder, faults=faults, egress=egress, secagg_client=secagg_client
    )


def make_secagg_client(
    runtime: SiteRuntime, agreement: Agreement, client: Client, run_folder: Path
) -> SecAggClient:
    """Make a client's side of secure aggregation.

    Reads the site's node key and the public keys of all clients; `run_folder` stores the protocol's
    state. Raises RequestRefused with code "peer-keys" if the site is not set up, or a key is
    missing or invalid.
    """
    from fedplan.federation.secure_client import SecAggClient  # optional dependency
    from fedplan.runners.site import read_node_key, read_peer_keys

    site, study = runtime.site, runtime.study
    if not site.peer_keys or site.server is None or not site.server.node_key:
        raise RequestRefused(
            f"{study.name} uses secure aggregation, and {site.name} is not set up for it: set "
            "peer_keys (a folder with every site's NAME.pub) and server.node_key in its site.toml"
        ).with_code("peer-keys")
    names = list(study.clients.names) or list(runtime.experiment.data.train)
    directory = read_peer_keys(Path(site.peer_keys), names)
    participation, node = make_participation(study), read_node_key(Path(site.server.node_key))

    def cohort(number: int) -> list[str]:
        return participation.cohort(agreement.experiment, number, names)

    return SecAggClient(agreement, client, node, directory, run_folder, cohort=cohort)


def _traits(study: Study, site: Site) -> dict[str, str]:
    """Return the client's traits; ConfigError if a site's own would reveal that it takes part."""
    own, name = site.traits, site.name
    if own and study.client_level_dp:
        raise ConfigError(
            f"the site {name!r} has traits of its own ({', '.join(own)}): this study has "
            f"client-level privacy, so traits must be in the study, in clients.traits.{name}"
        )
    return study.clients.traits.get(name, {}) | own


@contextmanager
def private_umask() -> Generator[None]:
    """Set this process's umask to 077 for the body: new files are readable by their owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def site_study_folder(state_folder: str, study: Study, name: str) -> Path:
    """Return a site's folder for a study (by name and seed); it has a folder per run."""
    study_folder = Path(state_folder) / safe_folder_name(f"{study.name}-{study.seed}")
    return study_folder / safe_folder_name(name)


def load_site_table(site: Site, study: Study, *, with_images: bool = True) -> Dataset:
    """Load the site's table from the file `site.data`, or by the function `site.reader`.

    The study gives the split of a file, and allows an empty table only with privacy. Then a column
    of the study that JSON files lack is a column without values: in such files one row decides
    whether there is a column. `with_images`: open the files that columns of images name. Raises
    ConfigError if the site has no data or no Python file as reader.
    """
    if not site.data:
        raise ConfigError(f"the site {site.name!r} has no data: set data in its site.toml")
    if not site.reader:
        is_private, data, task = study.privacy is not None, study.data, study.task
        table = load_table(site.data, split=data.split, allow_empty=is_private)
        if is_private and has_json_columns(site.data):
            columns = (*task.input_columns, task.label, *data.filter, *data.train_filter)
            table = add_empty_columns(table, columns)
        images = task.input_columns if with_images and task.kind.startswith("image") else []
        return open_images(table, images, site.data, private=is_private)
    file, _, function = site.reader.rpartition(":")
    module_spec = importlib.util.spec_from_file_location("fedplan_site_rows", file)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{file} cannot be imported for its {function}")
    sys.path.insert(0, str(Path(file).parent))
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, function)(site.data)
