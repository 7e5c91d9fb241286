"""What an application asks through litellm; see tests/server/test_public_clients.py."""

import json
import sys

import litellm

given = json.load(sys.stdin)
ask = {**given["ask"], "model": "openai/" + given["ask"]["model"], "api_base": given["url"], "api_key": "none"}
whole = litellm.completion(**ask)
stream = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True))
called = litellm.completion(**ask, tools=given["tools"], tool_choice="required")
formatted = litellm.completion(**ask, response_format=given["format"])
try:
    litellm.completion(**{**ask, "max_tokens": -1})
    refused = "not refused"
except litellm.BadRequestError as error:
    refused = str(error)
call = called.choices[0].message.tool_calls[0].function
print(
    json.dumps(
        {
            "chat": whole.choices[0].message.content,
            "stream": stream,
            "tool": {"name": call.name, "arguments": json.loads(call.arguments)},
            "json": json.loads(formatted.choices[0].message.content),
            "refused": refused,
        }
    )
)
