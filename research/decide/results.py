# SPDX-License-Identifier: Apache-2.0
"""Results of a question: what each run came to, in one file, with the question it was run for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from fedplan.storage.files import write_atomic
from fedplan.sweeps.comparisons import markdown_table
from fedplan.sweeps.statistics import mean_interval
from research.decide.places import SEED
from research.decide.proof import digest_at, time_of
from research.decide.question import Question, QuestionError, QuestionFile, Score
from research.decide.verdicts import Verdict, judged, markdown

RESULTS = Path(__file__).parents[1] / "results" / "decisions"


@dataclass(frozen=True)
class Played:
    """A run of an arm: by which question, begun when, its numbers by round, and what it tells.

    `sources` are the digests of what it read, by the paths that the question names.
    """

    arm: str
    seed: int
    question: str
    commit: str
    began: int
    seconds: float
    up: int | None
    down: int | None
    curve: list[tuple[int, float]]
    facts: dict[str, Any]
    told: dict[str, float] = field(default_factory=dict[str, float])
    sources: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def name(self) -> str:
        """It among the others of its question."""
        return f"{self.arm}-{self.seed}"

    @property
    def key(self) -> str:
        """It among those of all forms that its question ever had."""
        return key_of(self.question, self.arm, self.seed)

    def score(self, of: Score) -> float:
        """The mean of its last rounds."""
        if len(self.curve) < of.last:
            raise QuestionError(f"{self.name} has {len(self.curve)} rounds, and {of.last} count")
        return mean(number for _, number in self.curve[-of.last :])


def key_of(question: str, arm: str, seed: int) -> str:
    """A run by the digest of its question, its arm and its seed."""
    return f"{arm}-{seed} {question[:12]}"


def read_results(name: str, folder: Path = RESULTS) -> dict[str, Played]:
    """The runs that were kept of a question."""
    file = folder / f"{name}.json"
    said: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"runs": []}
    found = [Played(**each) for each in said["runs"]]
    return {each.key: each for each in found}


def write_results(asked: QuestionFile, runs: Mapping[str, Played], folder: Path = RESULTS) -> str:
    """Keep the runs with the verdicts they give, and say the table."""
    verdicts, told = decided(asked, runs)
    said = {
        "question": asked.digest,
        "asks": asked.question.asks,
        "verdicts": [_plain(each) for each in verdicts],
        "told": told,
        "runs": [asdict(each) for each in runs.values()],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{asked.name}.json", _text(said).encode())
    return report(asked, runs)


def report(asked: QuestionFile, runs: Mapping[str, Played]) -> str:
    """The verdicts, what each arm came to, and what is to be said about the runs."""
    verdicts, told = decided(asked, runs)
    words = f"### {asked.name}\n\n{asked.question.asks}\n\n{markdown(asked.question, verdicts)}"
    words += arms_told(asked, runs)
    return words + "".join(f"\nNote: {each}.\n" for each in told)


def arms_told(asked: QuestionFile, runs: Mapping[str, Played]) -> str:
    """What each arm came to, with the other numbers that the question asks for; they are not judged."""
    tells, found = asked.question.tells, list[list[str]]()
    for arm in asked.question.compared:
        own = [r for r in runs.values() if r.arm == arm and not fault_of(asked, r)]
        if not own:
            continue
        scores = mean_interval([each.score(asked.question.score) for each in own]).text()
        numbers = [[each.told[n] for each in own if n in each.told] for n in tells]
        others = [mean_interval(each).text() if each else "" for each in numbers]
        sent = [_mega([each.up for each in own]), _mega([each.down for each in own])]
        found.append([arm, str(len(own)), scores, *others, *sent])
    heads = ["arm", "seeds", asked.question.score.name, *tells, "MB up", "MB down"]
    return f"\n{markdown_table(heads, found)}" if found else ""


def _mega(counts: Sequence[int | None]) -> str:
    known = [each / 1e6 for each in counts if each is not None]
    return f"{mean(known):.2f}" if known else ""


def decided(asked: QuestionFile, runs: Mapping[str, Played]) -> tuple[list[Verdict], list[str]]:
    """The verdicts, from those runs alone before which the question stood in the log as it is now.

    What is left out is told, and so is what differs among those that count.
    """
    kept, told = list[Played](), list[str]()
    for each in runs.values():
        fault = fault_of(asked, each)
        if not fault:
            kept.append(each)
        elif fault not in told:
            told.append(fault)
    verdicts = judged(asked.question, scores_of(asked.question, kept))
    return verdicts, [*told, *_differing(kept)]


def _differing(runs: Sequence[Played]) -> Iterator[str]:
    commits = list(dict.fromkeys(str(each.facts.get("commit", "")) for each in runs))
    if len(commits) > 1:
        yield f"the runs are of {len(commits)} commits of the code: {', '.join(commits)}"
    found = dict[str, set[str]]()
    for each in runs:
        for path, digest in each.sources.items():
            # A path that tells the seed is of another thing for each.
            found.setdefault(path.replace(SEED, str(each.seed)), set()).add(digest)
    for path, digests in found.items():
        if len(digests) > 1:
            yield f"there were {len(digests)} different things behind {path}"


def fault_of(asked: QuestionFile, run: Played) -> str:
    """Why a run says nothing about a question as it stands; nothing if it does."""
    if run.question != asked.digest:
        return f"the question was changed after runs of it (then {run.question[:8]}): left out"
    if digest_at(asked.files, run.commit) != run.question:
        return f"the log does not show the question at {run.commit[:8]}, before its runs: left out"
    if run.began < time_of(asked.files[0].parent, run.commit):
        return f"runs began before the question was committed at {run.commit[:8]}: left out"
    return ""


def scores_of(question: Question, runs: list[Played]) -> dict[str, dict[int, float]]:
    """What each arm came to, by seed; starts that nobody compares have no score."""
    found = dict[str, dict[int, float]]()
    for each in runs:
        if each.arm in question.compared and each.seed in question.seeds:
            found.setdefault(each.arm, {})[each.seed] = each.score(question.score)
    return found


def _plain(found: Verdict) -> dict[str, Any]:
    gain = found.gain
    return {
        "comparison": found.asked.name,
        "claim": found.asked.claim,
        "least": found.asked.least,
        "seeds": found.seeds,
        "gain": gain.mean if gain else None,
        "low": gain.low if gain else None,
        "high": gain.high if gain else None,
        "p_holm": found.p,
        "p_short_holm": found.short,
        "verdict": found.word,
    }


def _text(said: dict[str, Any]) -> str:
    """JSON with one line for each run."""
    runs = ",\n".join(json.dumps(each) for each in said.pop("runs"))
    head = json.dumps(said, indent=1).removesuffix("\n}")
    return f'{head},\n "runs": [\n{runs}\n]\n}}\n'
