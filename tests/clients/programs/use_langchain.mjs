// LangChain JS with OpenAI's chat, responses and completions and with Anthropic's messages.

import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAI } from "@langchain/openai";
import { z } from "zod";
import { all, ASK, assert, City, Fruit, MODEL, PICK, rain, run, URL, WEATHER } from "./cases.mjs";

const options = { model: MODEL, apiKey: "none", temperature: 0, maxTokens: 100, maxRetries: 0 };
const configuration = { baseURL: `${URL}/v1` };
const chat = (more) => new ChatOpenAI({ ...options, configuration, ...more });
const responses = (more) => chat({ useResponsesApi: true, ...more });
const messages = (more) => new ChatAnthropic({ ...options, anthropicApiUrl: URL, ...more });
const weather = tool(rain, { name: "weather", description: "Says what the weather is like.", schema: City });

async function text(model) {
  const whole = await model.invoke(ASK);
  assert.ok(whole.text && whole.usage_metadata.input_tokens > 0);
  const pieces = await all(await model.stream(ASK));
  const joined = pieces.reduce((sum, piece) => sum.concat(piece));
  assert.ok(pieces.length > 1);
  assert.equal(joined.text, whole.text);
  assert.equal(joined.usage_metadata.output_tokens, whole.usage_metadata.output_tokens);
}

async function picks(model, method) {
  const named = { name: "Fruit", method };
  const found = await model.withStructuredOutput(Fruit, named).invoke(PICK);
  assert.deepEqual(Fruit.parse(found), found);
  const both = await model.withStructuredOutput(Fruit, { ...named, includeRaw: true }).invoke(PICK);
  assert.deepEqual(both.parsed, found);
}

// Not for function calling over responses and messages: LangChain cannot parse such streams of any server.
async function picksInAStream(model, method) {
  const picked = model.withStructuredOutput(Fruit, { name: "Fruit", method });
  const partial = await all(await picked.stream(PICK));
  assert.deepEqual(Fruit.parse(partial.at(-1)), partial.at(-1));
}

/** One call, and the answer to its result, streamed or not. */
async function tools(model, choice) {
  const asked = [new HumanMessage(WEATHER)];
  for (const streamed of [false, true]) {
    const forced = model.bindTools([weather], choice);
    const first = streamed
      ? (await all(await forced.stream(asked))).reduce((sum, piece) => sum.concat(piece))
      : await forced.invoke(asked);
    assert.equal(first.tool_calls.length, 1);
    const [call] = first.tool_calls;
    const result = await weather.invoke(call);
    assert.equal(result.tool_call_id, call.id);
    assert.equal(result.content, rain(City.parse(call.args)));
    const last = model.bindTools([weather], { tool_choice: "none" });
    assert.ok((await last.invoke([...asked, first, result])).text);
  }
}

const one = { tool_choice: "weather", parallel_tool_calls: false };
// Over responses LangChain sends the names of tools alone.
const required = { tool_choice: "required", parallel_tool_calls: false };

// This mode does not send the schema.
async function anyJson(model) {
  const json = model.withStructuredOutput(z.looseObject({}), { method: "jsonMode" });
  assert.equal(typeof (await json.invoke("Answer with a JSON object.")), "object");
}

/** Several requests at once wait for each other. */
async function batch(model) {
  const [first, ...others] = await model.batch([ASK, ASK, ASK, ASK]);
  for (const other of others) assert.equal(other.text, first.text);
}

await run({
  case_chat_text: () => text(chat()),
  case_chat_batch: () => batch(chat()),
  case_chat_json_schema: () => picks(chat(), "jsonSchema"),
  case_chat_json_schema_stream: () => picksInAStream(chat(), "jsonSchema"),
  case_chat_function_calling: () => picks(chat(), "functionCalling"),
  case_chat_function_calling_stream: () => picksInAStream(chat(), "functionCalling"),
  case_chat_json_mode: () => anyJson(chat()),
  case_chat_tools: () => tools(chat(), one),
  case_chat_tools_required: () => tools(chat(), required),
  case_responses_text: () => text(responses()),
  case_responses_json_schema: () => picks(responses(), "jsonSchema"),
  case_responses_json_schema_stream: () => picksInAStream(responses(), "jsonSchema"),
  case_responses_function_calling: () => picks(responses(), "functionCalling"),
  case_responses_json_mode: () => anyJson(responses()),
  case_responses_tools: () => tools(responses(), one),
  case_completions_text: async () => {
    const model = new OpenAI({ ...options, configuration });
    const whole = await model.invoke("def add(a, b):");
    assert.ok(whole);
    assert.equal((await all(await model.stream("def add(a, b):"))).join(""), whole);
  },
  case_anthropic_text: () => text(messages()),
  case_anthropic_batch: () => batch(messages()),
  case_anthropic_json_schema: () => picks(messages(), "jsonSchema"),
  case_anthropic_json_schema_stream: () => picksInAStream(messages(), "jsonSchema"),
  case_anthropic_function_calling: () => picks(messages(), "functionCalling"),
  case_anthropic_tools: () => tools(messages(), { tool_choice: "weather" }),
});
