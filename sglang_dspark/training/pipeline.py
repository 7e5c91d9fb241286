"""From a target folder to a finished draft: prompts, answers with features, training, calibration, evaluation.

Every stage leaves files in the work folder and finds them again, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from sglang_dspark.prompts.prompts import Prompt, load_prompts, mix, save_prompts
from sglang_dspark.prompts.sources import package_prompts
from sglang_dspark.training.answers import answer_worker, open_target, requests_of, shard_metadata, text_worker
from sglang_dspark.training.build import default_feature_layers
from sglang_dspark.training.estimate import check_resources, estimate
from sglang_dspark.training.evaluate import acceptance_table, confidence_quality, fit_scaling
from sglang_dspark.training.export import export_draft, link_tokenizer
from sglang_dspark.training.model import load_draft
from sglang_dspark.training.model_card import write_model_card
from sglang_dspark.training.settings import TrainSettings
from sglang_dspark.training.shards import check_shards
from sglang_dspark.training.speculate import Speculator
from sglang_dspark.training.stream import check_answers
from sglang_dspark.training.target import check_feature_layers
from sglang_dspark.training.train import Trainer


class Pipeline:
    """One run in ``work`` whose result goes to ``out``.

    Raises ValueError where the work folder belongs to other settings, or the machine is too small.
    """

    def __init__(self, settings: TrainSettings, work: Path, out: Path):
        from transformers import AutoConfig

        self.settings, self.work, self.out = settings, work, out
        config = AutoConfig.from_pretrained(settings.target)
        self.layers = settings.feature_layers or default_feature_layers(config.num_hidden_layers)
        check_feature_layers(self.layers, config.num_hidden_layers)
        self.estimate = estimate(settings, config, len(self.layers))

    def run(self) -> dict:
        """All stages; returns the tables that the model card shows."""
        self.prepare()
        self.make_prompts()
        self.answer()
        self.train()
        scalings = self.calibrate()
        return self.evaluate(scalings)

    def prepare(self) -> None:
        """Make the folders, and refuse at once what cannot work."""
        if self.settings.answered is not None:
            check_answers(Path(self.settings.answered), Path(self.settings.target).name)
        self.work.mkdir(parents=True, exist_ok=True)
        check_resources(self.estimate, self.work)
        path = self.work / "settings.json"
        if path.exists() and (found := TrainSettings.load(path)) != self.settings:
            differing = {k: (v, getattr(self.settings, k)) for k, v in found if v != getattr(self.settings, k)}
            raise ValueError(
                f"{self.work} holds a run with other settings (found, wanted): {differing}; give another --work folder"
            )
        self.settings.save(path)

    def make_prompts(self) -> None:
        """``prompts.jsonl`` to train on, ``held/prompts.jsonl`` for calibration and evaluation: disjoint by their
        text.
        """
        s, path, held_folder = self.settings, self.work / "prompts.jsonl", self.work / "held"
        if path.exists():
            return
        held_folder.mkdir(exist_ok=True)
        if s.prompts is not None:
            every = load_prompts(Path(s.prompts))
            sources: dict[str, list[Prompt]] = {}
            for prompt in every:
                sources.setdefault(prompt.kind, []).append(prompt)
        else:
            sources = package_prompts(s.answers // 4 + 200, s.seed)
        train = {kind: [p for p in prompts if not p.held_out] for kind, prompts in sources.items()}
        held = {kind: [p for p in prompts if p.held_out] or prompts[:1] for kind, prompts in sources.items()}
        save_prompts(
            mix(held, s.held_prompts + 2 * s.evaluation_prompts, s.seed + 1, 0.0), held_folder / "prompts.jsonl"
        )
        save_prompts(mix(train, s.answers, s.seed, s.greedy_share), path)

    def answer(self) -> None:
        """The target's answers and their features, packaged texts, and a held-out part for the training's own
        measure.
        """
        s, held = self.settings, self.work / "held"
        shards = sorted((self.work / "shards").glob("*.safetensors"))
        check_shards(shards, shard_metadata(s, self.layers))
        if s.answered is None and not (self.work / "answers.done").exists():
            _in_processes("answers", s, self.layers, self.work, s.workers)
            if s.text_tokens:
                _in_processes("texts", s, self.layers, self.work, 1)
            (self.work / "answers.done").touch()
        if not (held / "answers.done").exists():
            short = s.model_copy(update={"generation_batch": min(s.generation_batch, 64), "workers": 1})
            lines = (held / "prompts.jsonl").read_text().splitlines(keepends=True)
            (held / "answers").mkdir(exist_ok=True)
            (held / "answers" / "prompts.jsonl").write_text("".join(lines[: s.held_prompts]))
            _in_processes("answers", short, self.layers, held / "answers", 1)
            (held / "answers.done").touch()

    def train(self) -> None:
        """Train, exporting at every checkpoint, so that stopping early leaves a draft that works."""
        if (self.work / "train.done").exists():
            return
        _in_processes("train", self.settings, self.layers, self.work, self.settings.workers)
        (self.work / "train.done").touch()

    def _speculate(self, temperature: float, prompts: list[Prompt], seed: int, head: bool = True, rule="token"):
        s = self.settings
        target = open_target(s, self.layers)
        dtype = getattr(torch, s.dtype)
        draft = load_draft(self.work / "draft", target.embedding, target.lm_head, dtype).to(s.device)
        requests = requests_of(prompts, target.tokenizer, s)
        speculator = Speculator(target, draft, temperature, s.evaluation_new, seed, head, rule)
        return speculator.run(requests, s.evaluation_batch)

    def _held(self) -> tuple[list[Prompt], list[Prompt]]:
        """Held-out prompts for calibration, and others for evaluation."""
        s, prompts = self.settings, load_prompts(self.work / "held" / "prompts.jsonl")
        rest = prompts[s.held_prompts :]
        return rest[: len(rest) // 2], rest[len(rest) // 2 :]

    def calibrate(self) -> dict:
        """Sequential temperature scaling (paper §1.4) of each confidence head on real rounds at temperature 1."""
        if self.settings.confidence == "none":
            return {}
        rounds = self._speculate(1.0, self._held()[0], seed=11)
        scalings = {head: fit_scaling(rounds, head) for head in rounds.confidence}
        main = scalings["main"]
        body = {key: list(getattr(main, key)) for key in ("temperatures", "ece_before", "ece_after", "samples")}
        if "hidden" in scalings:
            body["hidden_temperatures"] = list(scalings["hidden"].temperatures)
        body["fitted_at_temperature"] = 1.0
        (self.work / "sts.json").write_text(json.dumps(body, indent=2) + "\n")
        return scalings

    def evaluate(self, scalings: dict) -> dict:
        """Real speculative decoding on held-out prompts at T = 1 and T = 0; writes the finished folder with its
        card.
        """
        tables: dict = {"acceptance": {}, "confidence": {}}
        for temperature in (1.0, 0.0):
            rounds = self._speculate(temperature, self._held()[1], seed=12)
            table = acceptance_table(rounds)
            tables["acceptance"][f"T={temperature:g}"] = {kind: asdict(row) for kind, row in table.items()}
            for head, scaling in scalings.items():
                quality = confidence_quality(rounds, head, scaling)
                tables["confidence"][f"T={temperature:g} {head}"] = asdict(quality)
        block = acceptance_table(self._speculate(1.0, self._held()[1], seed=12, rule="block"))
        tables["acceptance"]["T=1, block verification"] = {kind: asdict(row) for kind, row in block.items()}
        log = json.loads((self.work / "training_log.json").read_text())
        tables["training"] = log[-1]
        tables["machine"] = f"{platform.processor() or platform.machine()}, {self.settings.workers} processes"
        tables["date"] = time.strftime("%Y-%m-%d")
        self._finish(tables)
        return tables

    def _finish(self, tables: dict) -> None:
        s, target = self.settings, open_target(self.settings, self.layers)
        draft = load_draft(self.work / "draft", target.embedding, target.lm_head)
        export_draft(draft, self.out)
        link_tokenizer(self.out, target.path)
        s.save(self.out / "settings.json")
        for name in ("sts.json", "training_log.json"):
            if (self.work / name).exists():
                (self.out / name).write_text((self.work / name).read_text())
        (self.out / "evaluation.json").write_text(json.dumps(tables, indent=2) + "\n")
        write_model_card(self.out, s, draft.config, tables)


def _in_processes(stage: str, settings: TrainSettings, layers: tuple[int, ...], work: Path, count: int) -> None:
    """Run a stage in ``count`` spawned processes under one progress bar; a failing one stops the run with its error."""
    if count == 1:  # nothing to share: saves starting a process
        with _progress(stage, _total(stage, settings, 1)) as show:
            _worker(stage, settings, layers, work, 0, 1, show, "")
        return
    context = multiprocessing.get_context("spawn")
    counters = [context.Value("d", 0.0) for _ in range(count)]
    with tempfile.TemporaryDirectory() as meeting:
        processes = [
            context.Process(target=_spawned, args=(stage, settings, layers, work, i, count, counters[i], meeting))
            for i in range(count)
        ]
        for process in processes:
            process.start()
        try:
            with _progress(stage, _total(stage, settings, count)) as show:
                while any(p.is_alive() for p in processes):
                    show(sum(c.value for c in counters))
                    failed = [p.exitcode for p in processes if p.exitcode]
                    if failed:
                        raise RuntimeError(
                            f"a process of the stage {stage!r} failed (exit code {failed[0]}); see its error above"
                        )
                    time.sleep(0.2)
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
                process.join()
        if any(p.exitcode for p in processes):
            raise RuntimeError(f"a process of the stage {stage!r} failed; see its error above")


def _total(stage: str, settings: TrainSettings, count: int) -> float:
    if stage == "train":
        return float(count)
    return float(settings.text_tokens if stage == "texts" else settings.answers * settings.max_new)


def _spawned(stage, settings, layers, work, worker, workers, counter, meeting) -> None:
    def report(value: float) -> None:
        counter.value = float(value)

    _worker(stage, settings, layers, work, worker, workers, report, meeting)


def _worker(stage, settings, layers, work, worker: int, workers: int, report: Callable[[float], None], meeting) -> None:
    if stage == "answers":
        answer_worker(settings, layers, work, worker, workers, report)
    elif stage == "texts":
        text_worker(settings, layers, work, report)
    else:
        _train_worker(settings, layers, work, worker, workers, lambda status: report(status["progress"]), meeting)


def _train_worker(settings, layers, work: Path, worker: int, workers: int, report: Callable, meeting: str) -> None:
    if workers > 1:
        store = torch.distributed.FileStore(f"{meeting}/store", workers)
        torch.distributed.init_process_group("gloo", store=store, rank=worker, world_size=workers)
    trainer = Trainer(settings, layers, work, worker, workers)

    def save(draft, _measures) -> None:
        export_draft(draft, work / "draft")
        (work / "training_log.json").write_text(json.dumps(trainer.log, indent=1) + "\n")

    trainer.run(report, save)


@contextlib.contextmanager
def _progress(label: str, total: float) -> Iterator[Callable[[float], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)
