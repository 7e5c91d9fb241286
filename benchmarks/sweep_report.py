"""A sweep's file as Markdown: gains by arm and load, then every figure of every cell."""

from __future__ import annotations

from statistics import mean

from benchmarks.sweep import summary

LEGEND = (
    "*Ratio*: output tokens per second over the mean of the two controls around the arm (A, A2); with several rounds "
    "their mean and range. *Controls differ*: the largest |A2 − A| of those pairs over their mean, in the control's row "
    "(max − min) over the mean of all its runs; a ratio within it of 1 says nothing. tokens/step, window (drafts verified "
    "per request and step) and the times of a step are the server's own (docs/metrics.md); *draft* is backbone and head, "
    "*accept* acceptance and the draft's KV, *host* planning, packing and bookkeeping; *step* is all of it and the engine's "
    "part. TTFT and ms/token (time per output token after the first: the inter-token latency, since one chunk of a stream holds all "
    "tokens of a step) are medians over requests, means over runs. A control that was started without a draft has no status: "
    "its step is its ms/token."
)
COLUMNS = (
    ("tokens/s", "output_throughput", "{:.1f}"),
    ("tokens/step", "tokens_per_step", "{:.2f}"),
    ("window", "mean_window", "{:.2f}"),
    ("no draft", "skipped", "{:.0%}"),
    ("step ms", "step_ms", "{:.1f}"),
    ("draft ms", "draft_ms", "{:.1f}"),
    ("verify ms", "verify_ms", "{:.1f}"),
    ("accept ms", "accept_ms", "{:.1f}"),
    ("host ms", "host_ms", "{:.2f}"),
    ("TTFT ms", "median_ttft_ms", "{:.0f}"),
    ("ms/token", "median_tpot_ms", "{:.1f}"),
    ("p99", "p99_tpot_ms", "{:.1f}"),
)


def markdown(body: dict) -> str:
    """The whole page of a sweep's file, finished or not."""
    plan, control = body["plan"], body["plan"]["control"]
    order = [control, *plan["treatments"]]
    rows = sorted(summary(body["runs"], control), key=lambda row: order.index(row["arm"]))
    lines = ["# Serving under load", "", *_about(body), ""]
    for temperature in plan["temperatures"]:
        mine = [row for row in rows if row["temperature"] == temperature]
        if mine:
            lines += [
                f"## Temperature {temperature:g}: tokens per second over plain decoding",
                "",
                *_ratios(plan, mine, control),
                "",
                *_best(plan, mine),
                "",
            ]
    lines += ["## Every figure", "", LEGEND, ""]
    for row_group in _cells(rows):
        lines += _cell(row_group, control)
    return "\n".join(lines)


def _about(body: dict) -> list[str]:
    plan, machine, runs = body["plan"], body["machine"], body["runs"]
    loads = [run["load_average"] for run in runs] or [float("nan")]
    per_cell = len(plan["treatments"]) + 1 + -(-len(plan["treatments"]) // plan["between"])
    planned = plan["rounds"] * len(plan["temperatures"]) * len(plan["concurrencies"]) * per_cell
    counts = ", ".join(f"{count} at {clients}" for clients, count in body["pilot"].get("requests", {}).items())
    also = "; ".join(f"`{text}`" for text in body.get("also", ()))
    return [
        f"`{body['command']}`",
        "",
        (
            f"{body['started']}, {machine['cpu']}, {machine['cores']} cores, load average {min(loads):.1f} to {max(loads):.1f} "
            f"during the runs (the sweep's own included); SGLang {machine['sglang']}, torch {machine['torch']}, sglang-dspark "
            f"{machine['sglang-dspark']}. Target `{body['server'].get('model_path')}`, draft "
            f"`{body['server'].get('speculative_draft_model_path')}`, {body['server'].get('dtype')}."
        ),
        "",
        (
            f"**Control**: {body['control']}. {len(runs)} of {planned} runs. Requests of a run by clients: {counts}; "
            f"{plan['output_tokens'] // 2} to {plan['output_tokens'] * 3 // 2} tokens each, ends ignored; "
            f"{'the same prompts for every run of a cell' if plan['same_prompts'] else 'prompts of their own for every run'}, "
            f"{body['prompts']}; prefix cache emptied before every run. Arms ran on one server that was switched between "
            f"runs{also and f', except these, on servers of their own: {also}'}. Load generator: `sglang.benchmark.serving`."
        ),
    ]


def _ratios(plan: dict, rows: list[dict], control: str) -> list[str]:
    """Arms down, clients across, with the range over rounds where there is one."""
    clients = [c for c in plan["concurrencies"] if any(row["concurrency"] == c for row in rows)]
    lines = ["| arm | " + " | ".join(map(_clients, clients)) + " |", "|---|" + "--:|" * len(clients)]
    for arm in plan["treatments"]:
        lines.append(f"| {arm} | " + " | ".join(_ratio(_find(rows, c, arm)) for c in clients) + " |")
    spreads = (_find(rows, c, control) for c in clients)
    cells = (f"{row['output_throughput']:.1f} ± {row['spread'] / 2:.1%}" for row in spreads)
    return [*lines, f"| *{control}, tokens/s* | " + " | ".join(cells) + " |"]


def _best(plan: dict, rows: list[dict]) -> list[str]:
    """Each compact arm over the best fixed length of its cell (chosen afterwards, so it carries a winner's luck)."""
    lines = []
    for c in plan["concurrencies"]:
        static = [
            (mean(row["ratios"]), row["arm"])
            for row in rows
            if row["concurrency"] == c and row["ratios"] and row["arm"].startswith("static-")
        ]
        compact = [
            row for row in rows if row["concurrency"] == c and row["ratios"] and row["arm"].startswith("compact")
        ]
        if static and compact:
            best, name = max(static)
            told = ", ".join(f"{row['arm']} {mean(row['ratios']) / best:.3f}" for row in compact)
            lines.append(f"- {_clients(c)}: best fixed length {name} ({best:.3f}); over it: {told}")
    return lines


def _cells(rows: list[dict]) -> list[list[dict]]:
    keys = sorted({(row["temperature"], row["concurrency"]) for row in rows}, key=lambda key: (-key[0], key[1]))
    return [[row for row in rows if (row["temperature"], row["concurrency"]) == key] for key in keys]


def _cell(rows: list[dict], control: str) -> list[str]:
    lines = [
        f"### T = {rows[0]['temperature']:g}, {_clients(rows[0]['concurrency'])}",
        "",
        "| arm | runs | ratio | controls differ | " + " | ".join(name for name, _, _ in COLUMNS) + " |",
        "|---|--:|--:|--:|" + "--:|" * len(COLUMNS),
    ]
    for row in rows:
        shown = [_form(row[field], form) for _, field, form in COLUMNS]
        ratio = "1" if row["arm"] == control else _ratio(row)
        lines.append(
            f"| {row['arm']} | {row['runs']} | {ratio} | {_form(row['spread'], '{:.1%}')} | " + " | ".join(shown) + " |"
        )
    return [*lines, ""]


def _clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


def _find(rows: list[dict], concurrency: int, arm: str) -> dict:
    return next((row for row in rows if row["concurrency"] == concurrency and row["arm"] == arm), {})


def _ratio(row: dict) -> str:
    ratios = row.get("ratios")
    if not ratios:
        return "–"
    several = f" ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{mean(ratios):.3f}{several}"


def _form(value, form: str) -> str:
    return "–" if value is None else form.format(value)
