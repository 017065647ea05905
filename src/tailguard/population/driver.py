"""The driver of a population: commands of the scheduler become tasks, their outcomes become events in the journal.

runs/NAME/config.yaml        the resolved configuration
          population.jsonl   the journal: all that happened
          bundles/           what members are made of; deleted when nothing can ask for it any more
          metrics.jsonl      one line per round, the same in tensorboard/; alerts.jsonl, one line per alert that began
          logs/              what worker processes had to say
     NAME-best/              the best member as an ordinary run, when all is done
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any

from tailguard.checkpoint import digest, read_bundle, write_file
from tailguard.config_edits import differences
from tailguard.errors import CheckpointError, ConfigError
from tailguard.examination import remember
from tailguard.experiment import Experiment
from tailguard.files import read_json
from tailguard.health.metrics import FAILED_READY_CHECKS
from tailguard.population.config import PopulationConfig, load_saved_population
from tailguard.population.history import ancestry, history, latest
from tailguard.population.journal import Journal
from tailguard.population.replay import replayed
from tailguard.population.scheduler import (
    Command,
    Event,
    Failure,
    PBTScheduler,
    ReadyCheck,
    Report,
    RunSegment,
    StopSegment,
)
from tailguard.population.segment import bundle_name, bundle_path
from tailguard.population.space import with_values
from tailguard.population.tasks import Executor, Outcome, Task
from tailguard.population.watch import Round, Watch
from tailguard.run import RunFolder
from tailguard.run.records import Records
from tailguard.yaml_files import parse_yaml

log = logging.getLogger(__name__)

PATIENCE = ("population.hang_timeout_s", "population.start_timeout_s")
"""What may be edited while a population is under way: how long to wait for others decides nothing."""

Listener = Callable[["Population"], None]


class Population:
    """One population on disk; `run` begins it, or goes on where its journal ends."""

    def __init__(self, config: PopulationConfig, folder: str | Path, executor: Executor) -> None:
        self.config, self.folder, self.executor = config, Path(folder).resolve(), executor
        self.journal = Journal(RunFolder(self.folder).population_journal)
        self.scheduler = config.scheduler()
        self.segments: dict[str, RunSegment] = {}  # under way, by the key of their task
        self.began: dict[str, float] = {}
        self.told: dict[int, Mapping[str, Any]] = {}  # of every member, about its last segment
        self.patience_from = time.monotonic()
        self.watch = Watch()

    def run(self, listener: Listener = lambda population: None) -> PBTScheduler:
        """Train the population to its end; the scheduler then knows all members and the best."""
        with RunFolder(self.folder).lock():
            self.write_config()
            with closing(self.records):
                self.obey(self.restart())
                while not self.scheduler.finished:
                    listener(self)
                    for event in self.next_events():
                        self.take(event)
                    self.collect_garbage()
                self.note(self.watch.close())
            listener(self)
            self.export_best()
        return self.scheduler

    @cached_property
    def records(self) -> Records:
        """metrics.jsonl, alerts.jsonl and TensorBoard's events: written anew from the journal when a driver starts."""
        return Records(RunFolder(self.folder), 0)

    # beginning and going on

    def write_config(self) -> None:
        """Write down what the population is, or see that the folder holds this very one."""
        file = self.folder / "config.yaml"
        if not file.exists():
            self.write_manifest()
            write_file(file, self.config.to_yaml().encode())
        elif load_saved_population(file) != self.config:
            raise ConfigError(
                f"{self.folder} holds a population with another configuration. Choose another --run, or give it the "
                "configuration it was begun with to go on."
            )

        else:
            self.refuse_edits()

    def write_manifest(self) -> None:
        """Keep what the population is begun with beside the file that a user may edit."""
        told = {"config": parse_yaml(self.config.to_yaml(), "config.yaml"), "command": sys.argv}
        write_file(RunFolder(self.folder).manifest_file, json.dumps(told, indent=1).encode())

    def refuse_edits(self) -> None:
        """A config.yaml edited since the beginning: members would go on with the one, and copies with the other."""
        folder = RunFolder(self.folder)
        begun = folder.manifest().get("config")
        if begun is None:
            return  # an earlier version did not write it down
        found = list(differences(begun, parse_yaml(self.config.to_yaml(), "config.yaml")))
        fixed = [edit for edit in found if edit.key not in PATIENCE]
        if fixed:
            raise ConfigError(
                f"{folder.config_file} was edited, and a population cannot change under way: "
                f"{'; '.join(map(str, fixed))}. Set it back, or begin another with `tailguard population "
                f"{folder.config_file} --run NAME`."
            )
        for edit in found:
            log.warning("%s from here on", edit)
        if found:
            self.write_manifest()

    def restart(self) -> list[Command]:
        """Replay the journal; what it leaves under way is asked for again, and what is finished is adopted."""
        lines = self.journal.read()
        self.told = latest(history(lines))
        commands, events = replayed(self.scheduler, lines, self.journal.path)
        for command in commands:
            self.require_bundle(command)
        self.journal.append("resume" if events else "start", time=time.time())
        for event in events:
            if isinstance(event, Report):
                self.note(self.watch.follow(event), aloud=False)
        for leftover in (self.folder / "bundles").glob("*/.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        return commands

    def require_bundle(self, command: Command) -> None:
        """Refuse to go on from a bundle that is not there: every attempt at the segment would fail."""
        bundle = command.bundle if isinstance(command, RunSegment) else None
        if bundle is not None and not bundle_path(self.folder, bundle).is_dir():
            raise CheckpointError(
                f"{bundle_path(self.folder, bundle)} is missing, and member {command.member} goes on from it in round "
                f"{command.round}. Either it was removed, or {self.journal.path} was edited: put a copy back, or start "
                "the population anew under another --run."
            )

    # commands out, events in

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, StopSegment):
                for key in [key for key, segment in self.segments.items() if segment.member == command.member]:
                    del self.segments[key]
                    self.executor.cancel(key)
            else:
                key = f"{command.member}/{command.round}/{command.attempt}"
                self.segments[key], self.began[key] = command, time.monotonic()
                self.executor.submit(Task(key, "segment", {"folder": str(self.folder), "segment": asdict(command)}))

    def next_events(self) -> list[Event]:
        """Outcomes that came, or a readiness check when the patience with late members is used up by another part."""
        config = self.config.population
        interval = config.ready_timeout_s / config.ready_check_max_wait
        left = self.patience_from + interval - time.monotonic()
        outcomes = self.executor.wait(min(max(left, 0.0), 1.0))
        events = [event for outcome in outcomes for event in self.event_of(outcome)]
        if events or not self.scheduler.waiting or self.executor.starved:
            self.patience_from = time.monotonic()
            return events
        if time.monotonic() < self.patience_from + interval:
            return []
        self.patience_from = time.monotonic()
        return [ReadyCheck()]

    def event_of(self, outcome: Outcome) -> list[Event]:
        """What an outcome means to the scheduler; nothing when nobody waits for it any more."""
        segment = self.segments.pop(outcome.key, None)
        if segment is None:
            return []
        if outcome.result is None:
            return [Failure(segment.member, segment.round, segment.attempt, outcome.reason)]
        score = outcome.result["score"]
        score = nan if score is None else score
        kept = outcome.result.get("figures", {}), outcome.result.get("alerts", {})
        self.told[segment.member] = {**outcome.result.get("told", {}), "alerts": kept[1]}
        return [Report(segment.member, segment.round, score, outcome.result["bundle"], *kept)]

    def take(self, event: Event) -> None:
        """First the journal, then the consequences: a crash in between replays to the same place."""
        self.journal.append(event, **self.about(event))
        commands = self.scheduler.handle(event)
        if isinstance(event, Failure):
            log.warning("Member %d failed in round %d: %s", event.member, event.round, event.reason)
            if not (member := self.scheduler.members[event.member]).alive:
                log.warning("Member %d is given up after %d attempts.", member.index, member.failures)
        if isinstance(event, ReadyCheck) and commands:
            log.warning("Not all members came in time; the population goes on with those who are ready.")
        if isinstance(event, Report):
            self.note(self.watch.follow(event))
        self.obey(commands)

    def note(self, ended: Round | None, aloud: bool = True) -> None:
        """Write down a round that is over, and say which alerts began in it."""
        if ended is None:
            return
        self.records.add({"time": time.time(), **ended.row()}, ended.alert_lines())
        for notice in ended.notices if aloud else ():
            log.warning("%s", notice.sentence())

    def about(self, event: Event) -> dict[str, Any]:
        """What readers of the journal want to know beside the event itself."""
        if isinstance(event, ReadyCheck):
            return {"time": time.time(), FAILED_READY_CHECKS.name: self.scheduler.failed_ready_checks + 1}
        member = self.scheduler.members[event.member]
        attempt = event.attempt if isinstance(event, Failure) else member.failures
        seconds = time.monotonic() - self.began.pop(f"{event.member}/{event.round}/{attempt}", time.monotonic())
        about: dict[str, Any] = {"time": time.time(), "seconds": round(seconds, 3)}
        if isinstance(event, Report):
            copied = bool(member.lineage) and member.lineage[-1].round == event.round
            about |= {
                "hyperparameters": dict(member.hyperparameters),
                "source": member.parent if copied else None,
                "parent": member.parent,
                **self.told.get(event.member, {}),
            }
        return about

    def collect_garbage(self) -> None:
        """Delete bundles that nothing still to come can ask for; what is being written now is not among them.

        Only when all outcomes that came together are taken: before, the scheduler does not know of their bundles.
        """
        needed = self.scheduler.reachable()
        needed |= {bundle_name(segment.member, segment.round) for segment in self.segments.values()}
        for place in (self.folder / "bundles").glob("member-*/round-*"):
            if f"{place.parent.name}/{place.name}" not in needed:
                shutil.rmtree(place, ignore_errors=True)

    # the end

    @property
    def best_run(self) -> RunFolder:
        """Where the best member becomes a run: beside the population, so that its trials count with all others."""
        return RunFolder(self.folder.with_name(f"{self.folder.name}-best"))

    def export_best(self) -> None:
        """The best member as an ordinary run that can be evaluated, attacked and resumed."""
        best, run = self.scheduler.best, self.best_run
        if best is None or best.bundle is None or self.is_exported(run):
            return
        source = bundle_path(self.folder, best.bundle)
        n_steps = int(read_bundle(source)[1]["num_timesteps"])
        place = run.checkpoint(n_steps)
        shutil.rmtree(place, ignore_errors=True)  # of an export that a crash cut short
        shutil.copytree(source, place)
        ppo = with_values(self.config.experiment.ppo, best.hyperparameters)
        experiment = Experiment(self.config.experiment.replace(ppo=ppo, steps=n_steps))
        about = {
            **experiment.manifest(experiment.training_env(), sys.argv),
            "population": str(self.folder),
            "member": best.index,
            "score": best.score,
            "schedule": [asdict(segment) for segment in ancestry(history(self.journal.read()), best.index)],
        }
        remember(experiment.task, run.path)
        run.create(experiment.config.to_yaml(), about)

    def is_exported(self, run: RunFolder) -> bool:
        """Whether the run is there already; one of somebody else under that name is not overwritten."""
        if not run.config_file.exists():
            return False
        if read_json(run.manifest_file, ConfigError).get("population") != str(self.folder):
            raise ConfigError(
                f"{run.path} is a run of something else, so the best member cannot go there. Move it away."
            )
        return True


def population_digest(folder: str | Path, scheduler: PBTScheduler) -> str:
    """One sha256 over everything that a population is: settings, scores, lineage, and every bit of every bundle."""
    members: list[Any] = []
    for member in scheduler.members:
        state = member.state_dict()
        files = None
        if member.bundle is not None:
            try:
                files = read_bundle(bundle_path(Path(folder), member.bundle))[1]["files"]
            except CheckpointError as error:
                files = str(error)
        members.append({**state, "files": files})
    return digest(json.dumps(members, sort_keys=True).encode())
