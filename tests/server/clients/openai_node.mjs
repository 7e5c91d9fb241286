// What an application asks through openai for Node; see tests/server/test_public_clients.py.
import OpenAI from "openai";
import { readFileSync } from "node:fs";

const { url, ask, tools, format } = JSON.parse(readFileSync(0));
const chat = new OpenAI({ baseURL: url, apiKey: "none" }).chat.completions;
const whole = await chat.create(ask);
let stream = "";
for await (const chunk of await chat.create({ ...ask, stream: true })) stream += chunk.choices[0]?.delta.content ?? "";
const called = await chat.create({ ...ask, tools, tool_choice: "required" });
const formatted = await chat.create({ ...ask, response_format: format });
const refused = await chat.create({ ...ask, max_tokens: -1 }).catch((error) => error.message);
const call = called.choices[0].message.tool_calls[0].function;
console.log(JSON.stringify({
  chat: whole.choices[0].message.content,
  stream,
  tool: { name: call.name, arguments: JSON.parse(call.arguments) },
  json: JSON.parse(formatted.choices[0].message.content),
  refused,
}));
