// The openai package of npm, run by node in a folder that has it: `with_openai.mjs URL MODEL`.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
const TEXT = "Hello ďábelské 😀.";
const messages = [{ role: "user", content: "hi" }];
const parameters = { type: "object", properties: { city: { type: "string" } } };

const whole = await client.chat.completions.create({ model, messages, temperature: 0 });
assert.equal(whole.choices[0].message.content, TEXT);
assert.ok(whole._request_id);

let text = "";
const stream = await client.chat.completions.create({
  model, messages, temperature: 0, stream: true, stream_options: { include_usage: true },
});
let usage;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, TEXT);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const runner = client.chat.completions.stream({ model, messages: [{ role: "user", content: "CALL" }], tools });
const called = await runner.finalChatCompletion();
assert.equal(called.choices[0].finish_reason, "tool_calls");
assert.equal(called.choices[0].message.tool_calls[0].function.arguments, '{"city": "Brno"}');

const completion = await client.completions.create({ model, prompt: "hi", temperature: 0, max_tokens: 60 });
assert.equal(completion.choices[0].text, TEXT);

const response = await client.responses.create({ model, input: "hi" });
assert.equal(response.output_text, TEXT);
const events = client.responses.stream({
  model, input: "CALL", tools: [{ type: "function", name: "get_weather", parameters, strict: false }],
});
let argumentsText = "";
events.on("response.function_call_arguments.delta", (event) => { argumentsText += event.delta; });
const final = await events.finalResponse();
assert.equal(final.output.at(-1).type, "function_call");
assert.equal(argumentsText, '{"city": "Brno"}');
const again = await client.responses.create({
  model, previous_response_id: final.id,
  input: [{ type: "function_call_output", call_id: final.output.at(-1).call_id, output: "sunny" }],
});
assert.equal(again.output_text, TEXT);

const schema = { type: "object", properties: { name: { enum: ["Ada", "Bob"] } }, required: ["name"], additionalProperties: false };
const structured = await client.chat.completions.create({
  model, messages, response_format: { type: "json_schema", json_schema: { name: "person", strict: true, schema } },
});
assert.match(JSON.parse(structured.choices[0].message.content).name, /^(Ada|Bob)$/);

assert.equal((await client.models.list()).data[0].id, model);
await assert.rejects(client.chat.completions.create({ model: "no-such", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), OpenAI.BadRequestError);

const left = await client.chat.completions.create({
  model, messages: [{ role: "user", content: "ENDLESS" }], stream: true, max_tokens: 100000,
});
for await (const chunk of left) {
  if (chunk.choices[0]?.delta?.content) break; // aborts
}
