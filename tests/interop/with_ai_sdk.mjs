// Vercel's AI SDK with its OpenAI-compatible provider: `with_ai_sdk.mjs URL MODEL`.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "asyncllm", baseURL: `${url}/v1`, apiKey: "-", includeUsage: true });
const model = provider(name);
const TEXT = "Hello ďábelské 😀.";
const inputSchema = jsonSchema({ type: "object", properties: { city: { type: "string" } } });
const tools = { get_weather: tool({ description: "Now.", inputSchema, execute: async ({ city }) => `sunny in ${city}` }) };

const whole = await generateText({ model, prompt: "hi", maxRetries: 0 });
assert.equal(whole.text, TEXT);
assert.equal(whole.finishReason, "stop");

const streamed = streamText({ model, prompt: "hi", maxRetries: 0 });
let text = "";
for await (const part of streamed.textStream) text += part;
assert.equal(text, TEXT);
assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);

// The call is made, its result sent back, and the answer to that read.
const called = await generateText({ model, prompt: "CALL", tools, stopWhen: stepCountIs(2), maxRetries: 0 });
assert.deepEqual(called.steps[0].toolCalls[0].input, { city: "Brno" });
assert.equal(called.text, TEXT);
const parts = [];
for await (const part of streamText({ model, prompt: "CALL", tools, maxRetries: 0 }).fullStream) parts.push(part);
assert.deepEqual(parts.find((part) => part.type === "tool-call").input, { city: "Brno" });
assert.equal(parts.at(-1).finishReason, "tool-calls");

const schema = jsonSchema({
  type: "object", properties: { name: { enum: ["Ada", "Bob"] } }, required: ["name"], additionalProperties: false,
});
const structured = await generateText({
  model: createOpenAICompatible({ name: "asyncllm", baseURL: `${url}/v1`, supportsStructuredOutputs: true })(name),
  prompt: "hi", output: Output.object({ schema }), maxRetries: 0,
});
assert.match(structured.output.name, /^(Ada|Bob)$/);

const completion = await generateText({ model: provider.completionModel(name), prompt: "hi", maxRetries: 0, maxOutputTokens: 60 });
assert.equal(completion.text, TEXT);
await assert.rejects(generateText({ model: provider("no-such"), prompt: "hi", maxRetries: 0 }), /no-such/);

const controller = new AbortController();
const left = streamText({ model, prompt: "ENDLESS", abortSignal: controller.signal, maxRetries: 0, onError: () => {} });
for await (const part of left.textStream) {
  if (part) break;
}
controller.abort();
