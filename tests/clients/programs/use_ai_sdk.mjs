// Vercel's AI SDK with its providers for OpenAI (chat, responses, completions), compatible and Anthropic.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError,
  generateObject,
  generateText,
  Output,
  stepCountIs,
  streamObject,
  streamText,
  tool,
} from "ai";
import { z } from "zod";
import { all, ASK, assert, City, Fruit, MODEL, PICK, rain, run, URL, WEATHER } from "./cases.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: "none" });
const like = { name: "local", baseURL: `${URL}/v1`, includeUsage: true };
const one = { local: { parallel_tool_calls: false }, openai: { parallelToolCalls: false } };
const thinking = { enable_thinking: true, thinking_budget: 20 };
const anthropic = (structuredOutputMode) => ({
  model: createAnthropic({ baseURL: `${URL}/v1`, apiKey: "none" })(MODEL),
  providerOptions: { anthropic: { structuredOutputMode, disableParallelToolUse: true } },
});
const options = { temperature: 0, maxOutputTokens: 100, maxRetries: 0, providerOptions: one };
const chat = { ...options, model: openai.chat(MODEL) };
const responses = { ...options, model: openai.responses(MODEL) };
const completions = { ...options, model: openai.completion(MODEL) };
const compatible = {
  ...options,
  model: createOpenAICompatible({ ...like, supportsStructuredOutputs: true })(MODEL),
};
const messages = { ...options, ...anthropic("outputFormat") };
const messagesByTool = { ...options, ...anthropic("jsonTool") };
const weather = tool({ description: "Says what the weather is like.", inputSchema: City, execute: rain });
// The first step calls the tool, the second answers.
const loop = {
  prompt: WEATHER,
  tools: { weather },
  stopWhen: stepCountIs(4),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
};

const nested = z.object({ fruits: z.array(Fruit), best: Fruit.nullable() });
const rain24 = z.object({ type: z.literal("rain"), hours: z.int().min(0).max(24) });
const sun = z.object({ type: z.literal("sun"), hot: z.boolean() });
// Anthropic's provider moves bounds, patterns and formats into descriptions, so they are not tried there.
const constrained = [
  z.object({ sky: z.discriminatedUnion("type", [rain24, sun]) }),
  z.object({ either: z.union([z.boolean(), z.literal("no"), z.int().min(0).max(9)]) }),
  z.object({ day: z.iso.date(), id: z.uuid(), address: z.ipv4(), letters: z.string().regex(/^[a-c]{2,4}$/) }),
  z.object({ pair: z.tuple([z.boolean(), z.literal("x")]), share: z.number().gte(0).lte(1) }),
];

function counted(usage) {
  assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0, JSON.stringify(usage));
}

async function text(given) {
  const whole = await generateText({ ...given, prompt: ASK });
  assert.ok(whole.text && ["stop", "length"].includes(whole.finishReason), whole.finishReason);
  counted(whole.usage);
  const stream = streamText({ ...given, prompt: ASK });
  const pieces = await all(stream.textStream);
  assert.ok(pieces.length > 1);
  assert.equal(pieces.join(""), whole.text);
  assert.equal(await stream.finishReason, whole.finishReason);
  counted(await stream.usage);
}

async function object(given) {
  const whole = await generateObject({ ...given, schema: Fruit, prompt: PICK });
  assert.deepEqual(Fruit.parse(whole.object), whole.object);
  assert.equal(whole.finishReason, "stop");
  const stream = streamObject({ ...given, schema: Fruit, prompt: PICK });
  const partial = await all(stream.partialObjectStream);
  assert.deepEqual(partial.at(-1), whole.object);
  assert.deepEqual(await stream.object, whole.object);
  counted(await stream.usage);
}

async function schemas(given, shapes) {
  for (const schema of shapes) {
    const whole = await generateObject({ ...given, maxOutputTokens: 300, schema, prompt: PICK });
    assert.deepEqual(schema.parse(whole.object), whole.object);
  }
  const array = await generateObject({ ...given, output: "array", schema: Fruit, prompt: PICK });
  for (const each of array.object) Fruit.parse(each);
  const one = await generateObject({ ...given, output: "enum", enum: ["x", "y"], prompt: PICK });
  assert.ok(["x", "y"].includes(one.object));
}

async function record(given) {
  const schema = z.object({ ripe: z.record(z.enum(["apple", "pear"]), z.boolean()) });
  const whole = await generateObject({ ...given, schema, prompt: PICK });
  assert.deepEqual(schema.parse(whole.object), whole.object);
}

async function output(given) {
  const asked = { ...given, output: Output.object({ schema: Fruit }), prompt: PICK };
  const whole = await generateText(asked);
  assert.deepEqual(Fruit.parse(whole.output), whole.output);
  const stream = streamText(asked);
  assert.deepEqual((await all(stream.partialOutputStream)).at(-1), whole.output);
  const choice = await generateText({ ...asked, output: Output.choice({ options: ["apple", "pear"] }) });
  assert.ok(["apple", "pear"].includes(choice.output));
}

function checked(steps) {
  assert.equal(steps.length, 2);
  assert.equal(steps[0].finishReason, "tool-calls");
  const [call] = steps[0].toolCalls;
  const [result] = steps[0].toolResults;
  assert.equal(call.toolName, "weather");
  assert.equal(result.toolCallId, call.toolCallId);
  assert.equal(result.output, rain(City.parse(call.input)));
  assert.ok(steps[1].text && steps[1].toolCalls.length === 0);
  for (const step of steps) counted(step.usage);
}

async function tools(given) {
  checked((await generateText({ ...given, ...loop })).steps);
}

async function toolsInAStream(given) {
  const stream = streamText({ ...given, ...loop });
  const kinds = new Set((await all(stream.fullStream)).map((part) => part.type));
  const expected = ["tool-input-start", "tool-input-end", "tool-call", "tool-result", "text-delta", "finish"];
  for (const kind of expected) assert.ok(kinds.has(kind), `${kind} is missing`);
  assert.ok(!kinds.has("error"));
  checked(await stream.steps);
}

async function toolsAndOutput(given) {
  const whole = await generateText({ ...given, ...loop, output: Output.object({ schema: Fruit }) });
  checked(whole.steps);
  assert.deepEqual(Fruit.parse(whole.output), whole.output);
}

async function namedTool(given) {
  const toolChoice = { type: "tool", toolName: "weather" };
  const asked = { ...given, prompt: WEATHER, tools: { weather }, toolChoice };
  assert.ok(City.parse((await generateText(asked)).toolCalls[0].input));
  const parts = await all(streamText(asked).fullStream);
  const pieces = parts.filter((part) => part.type === "tool-input-delta").map((part) => part.delta);
  assert.deepEqual(JSON.parse(pieces.join("")), parts.find((part) => part.type === "tool-call").input);
}

/** A tool without arguments, and one that fails: both results go back to the model. */
async function oddTools(given) {
  const now = tool({ inputSchema: z.object({}), execute: () => ({ time: "noon", parts: [12, 0] }) });
  const execute = () => {
    throw new Error("no answer");
  };
  for (const [name, each] of Object.entries({ now, fails: tool({ inputSchema: City, execute }) })) {
    const first = { type: "tool", toolName: name };
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? first : "none" });
    const whole = await generateText({ ...given, ...loop, tools: { [name]: each }, prepareStep });
    assert.equal(whole.steps.length, 2);
    assert.equal(whole.steps[0].toolCalls[0].toolName, name);
  }
}

async function image(given) {
  const content = [{ type: "image", image: new Uint8Array([137, 80, 78, 71, 13, 10, 26, 10, 0]) }];
  const asked = generateText({ ...given, messages: [{ role: "user", content }] });
  assert.equal((await asked.then(() => null, (error) => error))?.statusCode, 400);
}

async function reasoning(given) {
  const whole = await generateText({ ...given, prompt: ASK });
  assert.ok(whole.reasoningText && whole.text && whole.usage.outputTokenDetails.reasoningTokens > 0);
  const stream = streamText({ ...given, prompt: ASK });
  const kinds = (await all(stream.fullStream)).map((part) => part.type);
  assert.ok(kinds.indexOf("reasoning-end") < kinds.indexOf("text-start"));
  assert.equal(await stream.reasoningText, whole.reasoningText);
  assert.equal(await stream.text, whole.text);
}

async function refused(given) {
  const asked = { ...given, prompt: ASK, topP: 5 };
  const errors = [await generateText(asked).then(() => null, (error) => error)];
  await streamText({ ...asked, onError: ({ error }) => errors.push(error) }).consumeStream();
  assert.equal(errors.length, 2);
  for (const error of errors) {
    assert.ok(APICallError.isInstance(error), String(error));
    assert.equal(error.statusCode, 400);
    assert.ok(!error.isRetryable && error.message.includes("top_p"), error.message);
  }
}

/** The server goes on with the next request when a client has gone. */
async function aborted(given) {
  const leave = new AbortController();
  const stream = streamText({ ...given, prompt: ASK, maxOutputTokens: 3000, abortSignal: leave.signal });
  for await (const part of stream.fullStream) if (part.type === "text-delta") leave.abort();
  for (let tries = 0; tries < 100; tries += 1) {
    const { queue } = await (await fetch(`${URL}/props`)).json();
    if (queue.running === 0) return;
    await new Promise((wake) => setTimeout(wake, 50));
  }
  assert.fail("the request is still running");
}

await run({
  case_chat_refused: () => refused(chat),
  case_chat_aborted: () => aborted(chat),
  case_chat_text: () => text(chat),
  case_chat_object: () => object(chat),
  case_chat_schemas: () => schemas(chat, [nested, ...constrained]),
  case_chat_output: () => output(chat),
  case_chat_tools: () => tools(chat),
  case_chat_tools_stream: () => toolsInAStream(chat),
  case_chat_tools_and_output: () => toolsAndOutput(chat),
  case_chat_named_tool: () => namedTool(chat),
  case_chat_odd_tools: () => oddTools(chat),
  case_chat_image: () => image(chat),
  case_responses_refused: () => refused(responses),
  case_responses_aborted: () => aborted(responses),
  case_responses_text: () => text(responses),
  case_responses_object: () => object(responses),
  case_responses_schemas: () => schemas(responses, [nested, ...constrained]),
  case_responses_output: () => output(responses),
  case_responses_tools: () => tools(responses),
  case_responses_tools_stream: () => toolsInAStream(responses),
  case_responses_tools_and_output: () => toolsAndOutput(responses),
  case_responses_named_tool: () => namedTool(responses),
  case_responses_odd_tools: () => oddTools(responses),
  case_responses_image: () => image(responses),
  case_completions_text: () => text(completions),
  case_compatible_refused: () => refused(compatible),
  case_compatible_aborted: () => aborted(compatible),
  case_compatible_text: () => text(compatible),
  case_compatible_object: () => object(compatible),
  case_compatible_schemas: () => schemas(compatible, [nested, ...constrained]),
  case_compatible_record: () => record(compatible),
  case_compatible_output: () => output(compatible),
  case_compatible_tools: () => tools(compatible),
  case_compatible_tools_stream: () => toolsInAStream(compatible),
  case_compatible_tools_and_output: () => toolsAndOutput(compatible),
  case_compatible_named_tool: () => namedTool(compatible),
  case_compatible_odd_tools: () => oddTools(compatible),
  case_compatible_image: () => image(compatible),
  case_compatible_reasoning: () => reasoning({ ...compatible, providerOptions: { local: thinking } }),
  case_anthropic_refused: () => refused(messages),
  case_anthropic_aborted: () => aborted(messages),
  case_anthropic_text: () => text(messages),
  case_anthropic_object: () => object(messages),
  case_anthropic_object_by_tool: () => object(messagesByTool),
  case_anthropic_schemas: () => schemas(messages, [nested]),
  case_anthropic_output: () => output(messages),
  case_anthropic_tools: () => tools(messages),
  case_anthropic_tools_stream: () => toolsInAStream(messages),
  case_anthropic_tools_and_output: () => toolsAndOutput(messages),
  case_anthropic_named_tool: () => namedTool(messages),
  case_anthropic_odd_tools: () => oddTools(messages),
  case_anthropic_image: () => image(messages),
});
