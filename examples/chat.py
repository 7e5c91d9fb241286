"""A chat whose requests say for themselves how far to speculate, by the OpenAI client.

    ./run serve                       # in another terminal
    python examples/chat.py ["What is a library?"] [--url http://127.0.0.1:30000/v1]

`custom_params.dspark` bounds the windows of one request: `enabled` (false: plain decoding), `min_window`, `max_window`.
The text is the same whatever it says, at temperature 0 token for token; only the time differs.
"""

from __future__ import annotations

import argparse
import time

from openai import OpenAI

BOUNDS: dict[str, dict] = {
    "as the server decides": {},
    "at most two drafts a step": {"max_window": 2},
    "no drafts": {"enabled": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default="Explain in one sentence what a library is.")
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1")
    options = parser.parse_args()
    client = OpenAI(base_url=options.url, api_key="none")
    model = client.models.list().data[0].id
    for name, bounds in BOUNDS.items():
        began = time.perf_counter()
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": options.question}],
            temperature=0,
            max_tokens=64,
            extra_body={"custom_params": {"dspark": bounds}},
        )
        print(f"{name} ({time.perf_counter() - began:.2f} s): {answer.choices[0].message.content}")


if __name__ == "__main__":
    main()
