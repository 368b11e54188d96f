// Calls of the server with the API key of this tab.

import { Refused, authorization, events, refusal } from "../dashboard/stream.js";

const KEY = "jaxserve-api-key"; // in sessionStorage: gone with the tab
export const ROOT = new URL("..", import.meta.url); // with the prefix of a proxy

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (text) => sessionStorage.setItem(KEY, text),
  forget: () => sessionStorage.removeItem(KEY),
};

/** Returns the JSON at a path. Throws `Refused` with the server's words, or what `fetch` throws. */
export async function getJson(path, options = {}) {
  const response = await fetch(new URL(path, ROOT), { cache: "no-store", headers: authorization(key.get()), ...options });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** Posts a body, and yields the events of the answer. Throws `Refused` also for an error in the middle. */
export async function* post(path, body, signal) {
  const response = await fetch(new URL(path, ROOT), {
    method: "POST",
    headers: { "content-type": "application/json", ...authorization(key.get()) },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const values = events(response.body);
  for (;;) {
    const { value, done } = await values.next();
    if (done && !value) throw new Error("The connection ended before the answer was complete.");
    if (done) return;
    if (value.error) throw new Refused(500, value.error.message);
    yield value;
  }
}

/** Returns an error in words, with what can be done about it. */
export function inWords(error) {
  if (error instanceof TypeError) return "The server cannot be reached, or the connection was lost.";
  if (!(error instanceof Refused)) return error.message;
  const text = error.message.replace(/^./, (letter) => letter.toUpperCase()).replace(/[^.!?]$/, "$&.");
  if (error.status === 429) return `Too many requests: ${text}`;
  if (error.status === 503) return `${text} Try again in a moment.`;
  return text;
}
