"""What an application asks through langchain-openai; see tests/server/test_public_clients.py."""

import json
import sys

import openai
from langchain_openai import ChatOpenAI

given = json.load(sys.stdin)
ask = dict(given["ask"])
messages = [(message["role"], message["content"]) for message in ask.pop("messages")]
model = ChatOpenAI(base_url=given["url"], api_key="none", **ask)
formatted = model.bind(response_format=given["format"]).invoke(messages)
call = model.bind_tools(given["tools"], tool_choice="required").invoke(messages).tool_calls[0]
try:
    model.bind(max_tokens=-1).invoke(messages)
    refused = "not refused"
except openai.BadRequestError as error:
    refused = str(error)
print(
    json.dumps(
        {
            "chat": model.invoke(messages).content,
            "stream": "".join(chunk.content for chunk in model.stream(messages)),
            "tool": {"name": call["name"], "arguments": call["args"]},
            "json": json.loads(formatted.content),
            "refused": refused,
        }
    )
)
