"""The server that is benchmarked: its status, its settings, its cache, and one run of SGLang's load generator on it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx

from sglang_dspark.errors import UserError

# What a run keeps of the load generator's result; the inter-token latency is its time per output token, since a chunk
# of a stream holds all tokens of a step.
KEPT = (
    "duration",
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "median_e2e_latency_ms",
    "p99_itl_ms",
)


class ServerError(UserError):
    """The server or the load generator did not do what was asked; the message says what."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Args:
        url: without a trailing slash.
        key, admin_key: SGLang's API keys, or None.
        tokenizer: folder or cached hub name, instead of the one that the server names.
    """

    url: str
    key: str | None = None
    admin_key: str | None = None
    tokenizer: str | None = None

    def status(self) -> list[dict] | None:
        """Status of every rank, or None for a server that has none (another algorithm, or plain decoding)."""
        answer = self._ask("GET", "/dspark/status", self.key, allowed=(200, 404))
        ranks = answer.json().get("ranks") if answer.status_code == 200 else None
        return ranks or None

    def configure(self, settings: dict) -> None:
        """Switch settings.

        Raises:
            ServerError: the server refused; the reason is its own.
        """
        self._ask("POST", "/dspark/config", self.admin_key or self.key, json=settings)

    def flush_cache(self) -> None:
        """Empty the prefix cache, so that no arm finds prompts that another one has prefilled."""
        self._ask("POST", "/flush_cache", self.admin_key or self.key, params={"timeout": 30})

    def describe(self) -> dict:
        """Model, engine version and what was started, for the receipt."""
        info = self._ask("GET", "/server_info", self.admin_key or self.key).json()
        kept = (
            "model_path",
            "served_model_name",
            "speculative_algorithm",
            "speculative_draft_model_path",
            "version",
            "dtype",
            "tp_size",
            "max_running_requests",
            "max_total_num_tokens",
            "device",
            "attention_backend",
        )
        return {name: _from_here(info.get(name)) for name in kept}

    def model_name(self) -> str:
        """The name that requests give (the first of `/v1/models`)."""
        models = self._ask("GET", "/v1/models", self.key).json().get("data")
        if not models:
            raise ServerError(f"{self.url} serves no model")
        return models[0]["id"]

    def tokenizer_path(self) -> Path:
        """Where the tokenizer lies on this machine: the named one, or what `/model_info` tells. No hub is ever asked.

        Raises:
            ServerError: it is neither here nor in the hub's local cache.
        """
        name = self.tokenizer
        if name is None:
            info = self._ask("GET", "/model_info", self.key, allowed=(200, 404))
            told = info.json() if info.status_code == 200 else {}
            name = told.get("tokenizer_path") or told.get("model_path") or self.model_name()
        if Path(name).exists():
            return Path(name)
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(name, local_files_only=True))
        except (OSError, ValueError) as error:
            raise ServerError(
                f"the tokenizer {name!r} of {self.url} is neither a path of this machine nor in the "
                "local Hugging Face cache: name a folder that holds it with --tokenizer"
            ) from error

    def _ask(
        self, method: str, path: str, key: str | None, allowed: tuple[int, ...] = (200,), **more
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            answer = httpx.request(method, self.url + path, headers=headers, timeout=60, **more)
        except httpx.TransportError as error:
            raise ServerError(f"{self.url} does not answer: {error}") from error
        if answer.status_code not in allowed:
            raise ServerError(f"{method} {self.url}{path} answered {answer.status_code}: {answer.text[:300]}")
        return answer


def run_load(
    server: Server, dataset: Path, count: int, concurrency: int, *, stop_at_end: bool, warmup: int | None = None
) -> dict:
    """Send the requests of `dataset` with `concurrency` clients through `sglang.benchmark.serving` and return KEPT.

    `warmup` requests (at most 4 by default) go first, copies of the first one, and are not in the figures.

    Raises:
        ServerError: requests failed, the tokenizer is not on this machine, or the generator ended without a result.
    """
    tokenizer = server.tokenizer_path()
    result = dataset.with_suffix(".result.jsonl")
    result.unlink(missing_ok=True)
    argv = [
        "--backend",
        "sglang-oai-chat",
        "--base-url",
        server.url,
        "--dataset-name",
        "openai",
        "--dataset-path",
        dataset,
        "--num-prompts",
        count,
        "--max-concurrency",
        concurrency,
        # As `--model` too: the generator looks up that name's chat template, on the hub if it is no path.
        "--model",
        tokenizer,
        "--tokenizer",
        tokenizer,
        "--served-model-name",
        server.model_name(),
        "--output-file",
        result,
        "--disable-tqdm",
        "--warmup-requests",
        min(concurrency, 4) if warmup is None else warmup,
        "--ready-check-timeout-sec",
        10,
    ]
    log = _generate([str(word) for word in argv] + ["--disable-ignore-eos"] * stop_at_end, server.key)
    if not result.is_file():
        raise ServerError(f"the load generator gave no result: {log[-500:]}")
    measured = json.loads(result.read_text().splitlines()[-1])
    if measured["completed"] != count:
        raise ServerError(f"{count - measured['completed']} of {count} requests failed: {log[-500:]}")
    return {name: measured[name] for name in KEPT}


@contextlib.contextmanager
def without_hub():
    """No request to a model hub inside: a benchmark measures a server, and a missing network costs 20 s of retries."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _from_here(value: object) -> object:
    """A path as it reads on another machine: from the working folder or the home folder, where it is below one of them."""
    if isinstance(value, str) and value.startswith("/"):
        for base, shown in ((Path.cwd(), Path()), (Path.home(), Path("~"))):
            if Path(value).is_relative_to(base):
                return str(shown / Path(value).relative_to(base))
    return value


def _generate(argv: list[str], key: str | None) -> str:
    """SGLang's command in this process (its imports cost seconds, and it runs many times); returns its output."""
    from sglang.benchmark import serving

    before, environment, out = sys.argv, os.environ.get("OPENAI_API_KEY"), io.StringIO()
    sys.argv = ["sglang.benchmark.serving", *argv]
    if key:
        os.environ["OPENAI_API_KEY"] = key  # the only way in that the generator has for a key
    try:
        with without_hub(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            serving.cli_main()
    except (SystemExit, Exception) as error:  # whatever ends the generator ends one run with its reason
        raise ServerError(f"the load generator failed: {error}: {out.getvalue()[-500:]}") from error
    finally:
        sys.argv = before
        if key:
            os.environ.pop("OPENAI_API_KEY")
            if environment is not None:
                os.environ["OPENAI_API_KEY"] = environment
    return out.getvalue()
