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

from fedplan.data.tables import load_table
from fedplan.federation.account import Account, Limits
from fedplan.federation.client import Client, make_example_guard, make_noise_guard
from fedplan.federation.egress_log import EgressLog
from fedplan.federation.endpoint import Endpoint, open_journal, site_run_folder
from fedplan.federation.error_codes import error_fields
from fedplan.federation.eval_sets import MetricPolicy
from fedplan.federation.fault_log import FaultLog
from fedplan.federation.messages import RequestRefused, read_run_id
from fedplan.naming import allow_imports
from fedplan.runners.site import Site
from fedplan.storage.journal import Journal
from fedplan.storage.names import safe_folder_name
from fedplan.studies.experiment import build_experiment, make_eval_set, make_participation
from fedplan.studies.run_folder import write_run_files, write_task_file
from fedplan.studies.schema import ConfigError, Study
from fedplan.tensors.aux_tensors import is_aux
from fedplan.tensors.devices import move_model, resolve_device
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message

if TYPE_CHECKING:
    from datasets import Dataset

    from fedplan.federation.agreement import Agreement
    from fedplan.federation.secagg_client import SecAggClient


class SiteRuntime:
    """A site's data and model for one study, and its endpoint in the run of the last request.

    Files are written for their owner only; data derived from examples is encrypted if the site has
    a key. The study comes over the network: only code that the site installed for fedplan, or
    allows, is imported. `limits` are the site's privacy limits. `egress` logs everything that is
    sent; `hide_loss` and `metric_policy` restrict the metrics that are sent.
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
        """Load data and model; ConfigError if the study has no client of the site's name."""
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
            account = Path(site.state) / "account" / safe_folder_name(site.dataset)
            self.account = Account(account, limits, encryption=self.encryption)
            self.faults = FaultLog(Path(site.state), self.encryption)
            self.egress, self.hide_loss = egress or EgressLog(Path(site.state)), hide_loss
        self._endpoint: Endpoint | None = None

    def answer(self, kind: str, message: Message) -> Message:
        """Return the reply of the run's endpoint to a request of a kind such as "train".

        An exception is logged at the site, and the reply then has an error code only.
        """
        with private_umask():
            try:
                endpoint = self.endpoint(read_run_id(message))
            except Exception as error:
                return pack_message({}, {**error_fields(self.faults.append(error))})
            return endpoint.answer(kind, message)

    def endpoint(self, run: str) -> Endpoint:
        """Return the endpoint of a run, made if the last request was of another run."""
        if self._endpoint is None or self._endpoint.agreement.run != run:
            with private_umask():
                self._endpoint = _make_endpoint(self, run)
        return self._endpoint


def _make_endpoint(runtime: SiteRuntime, run: str) -> Endpoint:
    """Make the client and endpoint of a run, and write the study to its folder."""
    study, name, experiment = runtime.study, runtime.site.name, runtime.experiment
    agreement, account = replace(experiment.pinned_agreement, run=run), runtime.account
    folder = site_study_folder(runtime.site.state, study, name)
    run_folder = site_run_folder(folder, run)
    client = Client(
        name=name,
        examples=experiment.data.train[name],
        journal=open_journal(run_folder, runtime.encryption),
        model=experiment.model,
        start=experiment.initial_values,
        start_digests=experiment.param_digests,
        initial_model=experiment.initial_model.with_checksums(experiment.model, agreement.frozen),
        loss=experiment.data.task.loss,
        traits=runtime.traits,
        guard=make_example_guard(agreement, account.folder, account),
        noise_guard=make_noise_guard(agreement, account),
        account=account,
        deterministic=study.deterministic,
        hide_loss=runtime.hide_loss
        or len(experiment.data.train[name]) < runtime.metric_policy.min_examples,
        eval_set=make_eval_set(study, experiment.data, name),
        metric_policy=runtime.metric_policy,
        activation_cache=study.train.activation_cache,
    )
    if study.continue_from:
        _import_earlier_state(runtime, client.journal)
    write_run_files(run_folder, study, agreement.params)
    write_task_file(run_folder, experiment.data)
    masker = (
        make_secagg_client(runtime, agreement, client, run_folder)
        if agreement.secagg.active
        else None
    )
    return Endpoint(
        agreement,
        client,
        folder,
        faults=runtime.faults,
        egress=runtime.egress,
        secagg_client=masker,
    )


def make_secagg_client(
    runtime: SiteRuntime, agreement: Agreement, client: Client, run_folder: Path
) -> SecAggClient:
    """Make the site's side of secure aggregation, from its node key and its peers' keys.

    Raises RequestRefused with code "peers" if the site has no keys.
    """
    from fedplan.federation.secagg_client import SecAggClient  # optional dependency
    from fedplan.runners.peer_keys import read_node_key, read_peer_keys

    site, study = runtime.site, runtime.study
    if not site.peer_keys or site.server is None or not site.server.node_key:
        raise RequestRefused(
            f"{study.name} uses secure aggregation, and {site.name} is not set up for it: set "
            "peers (a folder with every site's NAME.pub) and server.node in its site.toml"
        ).with_code("peers")
    names = list(study.clients.names) or list(runtime.experiment.data.train)
    directory = read_peer_keys(Path(site.peer_keys), names)
    participation, node = make_participation(study), read_node_key(Path(site.server.node_key))

    def cohort(number: int) -> list[str]:
        return participation.cohort(agreement.experiment, number, names)

    return SecAggClient(agreement, client, node, directory, run_folder, cohort=cohort)


def _import_earlier_state(runtime: SiteRuntime, journal: Journal) -> None:
    """Initialize a journal with the site's state in the run that the study continues.

    Auxiliary tensors are left out; nothing happens if the site was not in that run.
    """
    run, name = runtime.study.continue_from, safe_folder_name(runtime.site.name)
    for run_folder in Path(runtime.site.state).glob(f"*/{name}/{run}"):
        client_state, _ = open_journal(run_folder, runtime.encryption, reading=True).client_state()
        journal.initialize({k: v for k, v in client_state.items() if not is_aux(k)})


def _traits(study: Study, site: Site) -> dict[str, str]:
    """Return the site's traits: the study's, overridden by the site's own.

    Raises ConfigError for own traits under client-level DP: sending them reveals participation.
    """
    own, name = site.traits, site.name
    if own and study.client_level_dp:
        raise ConfigError(
            f"the site {name!r} has traits of its own ({', '.join(own)}): this study has "
            f"client-level privacy, so traits must be in the study, in clients.traits.{name}"
        )
    return study.clients.traits.get(name, {}) | own


@contextmanager
def private_umask() -> Generator[None]:
    """Set the umask to 077 for the body, so that new files are readable by their owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def site_study_folder(state_folder: str, study: Study, name: str) -> Path:
    """Return a site's folder for a study (by name and seed); it has a folder per run."""
    return (
        Path(state_folder) / safe_folder_name(f"{study.name}-{study.seed}") / safe_folder_name(name)
    )


def study_client_names(study: Study) -> list[str]:
    """Return the names of a study's clients; loads the data if the study does not list them."""
    return list(study.clients.names) or list(build_experiment(study).data.train)


def load_site_table(site: Site, study: Study) -> Dataset:
    """Load a site's table from its file, or by its own reader function.

    Raises ConfigError if the site has no data or its reader cannot be imported.
    """
    if not site.data:
        raise ConfigError(f"the site {site.name!r} has no data: set data in its site.toml")
    if not site.reader:
        return load_table(site.data, split=study.data.split, allow_empty=study.privacy is not None)
    file, _, function = site.reader.rpartition(":")
    module_spec = importlib.util.spec_from_file_location("fedplan_site_rows", file)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{file} cannot be imported for its {function}")
    sys.path.insert(0, str(Path(file).parent))
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, function)(site.data)
