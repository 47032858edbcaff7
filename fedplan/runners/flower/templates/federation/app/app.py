"""The two ends of the study: `client` runs at each site, `server` once."""

from pathlib import Path

from fedplan.runners.flower.apps import client_of, server_of

STUDY = Path(__file__).parent / "study.toml"

client = client_of(STUDY)
server = server_of(STUDY)

# A site whose data is no table that fedplan reads says how it is read:
#
# import datasets
#
#
# def read(path: str) -> "datasets.Dataset":
#     """The rows of this site; `path` is what its node was started with as data."""
#     return datasets.load_from_disk(path)
#
#
# client = client_of(STUDY, rows=read)
