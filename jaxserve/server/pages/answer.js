// One answer: the request for it, and the message that grows with its events.

import { post } from "./api.js";
import { responseFormat, sampling, tools } from "./settings.js";

const STREAMED = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
const MIN_SECONDS = 0.05; // of generation, below which a speed says nothing
const TEXT_TOKENS = 256; // of a completed text, unless the settings say otherwise

/** Returns a new message of the model. */
export const newAnswer = (model) => ({ role: "assistant", model, content: "", reasoning: "", calls: [], stats: {}, state: "waiting" });

/**
 * Lets the model answer a conversation, and fills `answer` meanwhile. With `onto`, it goes on with its last message.
 *
 * `state` of the answer goes from waiting over thinking or writing to done. Calls `changed()` after each event. Throws
 * when the server refuses or the connection is lost; what has come by then stays.
 */
export async function fill(answer, { mode, model, messages, settings, signal, onto }, changed) {
  const began = performance.now();
  const [path, body] = mode === "text" ? textBody(model, messages, settings) : chatBody(model, messages, settings);
  if (onto && mode === "chat") Object.assign(body, { add_generation_prompt: false, continue_final_message: true });
  for await (const chunk of post(path, { ...body, ...STREAMED }, signal)) {
    const now = performance.now();
    const [choice] = chunk.choices;
    if (choice) take(answer, choice, now);
    if (chunk.usage) count(answer, chunk.usage, began, now);
    changed();
  }
  answer.state = "done";
}

/** Returns the path and the body of a request that goes on with a text. */
function textBody(model, messages, settings) {
  const prompt = messages.map((message) => message.content).join("");
  return ["v1/completions", { model, prompt, max_tokens: TEXT_TOKENS, ...sampling(settings) }];
}

/** Returns the path and the body of a request that answers a conversation. */
function chatBody(model, messages, settings) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const body = { model, messages: [...system, ...messages.map(forServer)], ...sampling(settings) };
  if (settings.thinking) body.enable_thinking = settings.thinking === "on";
  const offered = tools(settings);
  if (offered.length) body.tools = offered;
  const format = responseFormat(settings);
  if (format) body.response_format = format;
  return ["v1/chat/completions", body];
}

/** Returns a message as the API takes it. */
function forServer({ role, content, reasoning, calls, id }) {
  if (role === "tool") return { role, tool_call_id: id, content };
  if (role !== "assistant") return { role, content };
  const message = { role, content };
  if (reasoning) message.reasoning_content = reasoning;
  if (calls?.length) {
    message.content = content || null;
    message.tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }
  return message;
}

/** Adds what a choice of a chunk brings to an answer. */
function take(answer, { delta, text, finish_reason: reason }, now) {
  const { stats } = answer;
  const written = text ?? delta?.content;
  const thought = delta?.reasoning_content;
  if (thought) {
    answer.reasoning += thought;
    answer.state = "thinking";
    stats.thinkingSince ??= now;
  }
  if ((written || delta?.tool_calls) && stats.thinkingSince && !stats.thought) stats.thought = (now - stats.thinkingSince) / 1e3;
  if (written) answer.content += written;
  if (written || delta?.tool_calls) answer.state = "writing";
  for (const part of delta?.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { id: "", name: "", arguments: "" });
    if (part.id) call.id = part.id;
    if (part.function?.name) call.name = part.function.name;
    call.arguments += part.function?.arguments ?? "";
  }
  if (written || thought || delta?.tool_calls) stats.first ??= now;
  if (reason) stats.reason = reason;
}

/** Notes tokens and times: seconds to the first token, and tokens per second after it. */
function count({ stats }, usage, began, now) {
  stats.tokens = usage.completion_tokens;
  stats.prompt = usage.prompt_tokens;
  if (stats.first === undefined) return;
  stats.ttft = (stats.first - began) / 1e3;
  stats.firstTokens ??= stats.tokens;
  const later = stats.tokens - stats.firstTokens;
  const seconds = (now - stats.first) / 1e3;
  if (later > 0 && seconds > MIN_SECONDS && stats.reason === undefined) stats.rate = later / seconds;
}
